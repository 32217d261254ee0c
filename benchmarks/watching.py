"""What a process and all those below it hold and spend, seen from outside by the kernel's books."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Figures = dict[str, float]


@contextmanager
def watched_memory() -> Iterator[Figures]:
    """The most that this process and its children hold together, looked at every 50 ms.

    ``peak MB`` counts every page once, shared memory included, files not; ``private MB`` counts what is in one process
    alone, so memory that forked workers share with their parent is in neither of them.
    """
    peaks: Figures = {"peak MB": 0.0, "private MB": 0.0}
    stopped = threading.Event()

    def look() -> None:
        while not stopped.wait(0.05):
            found = [_held(pid) for pid in (os.getpid(), *_children(os.getpid()))]
            for name in peaks:
                peaks[name] = max(peaks[name], sum(held[name] for held in found) / 1e3)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield peaks
    finally:
        stopped.set()
        watcher.join()


def _held(pid: int) -> Figures:
    """Kilobytes of a process."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # it has just ended
        lines = []
    found = {name: float(size.split()[0]) for name, size in (line.split(":") for line in lines)}
    values = {"peak MB": ("Pss_Anon", "Pss_Shmem"), "private MB": ("Private_Clean", "Private_Dirty")}
    return {name: sum(found.get(part, 0.0) for part in parts) for name, parts in values.items()}


def _children(pid: int) -> list[int]:
    """All processes below one."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
        own = [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:  # it, or one of its threads, has just ended
        own = []
    return own + [below for child in own for below in _children(child)]


def cpu_seconds() -> float:
    """Seconds of CPU of this process and of all below it that still run, or that ended and were waited for."""
    return sum(_spent(pid) for pid in (os.getpid(), *_children(os.getpid()))) / os.sysconf("SC_CLK_TCK")


def _spent(pid: int) -> int:
    """Ticks of a process and of its children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0
    return sum(map(int, fields[11:15]))
