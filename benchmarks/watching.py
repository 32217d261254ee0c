"""Memory and CPU time of this process and all its descendants, as the kernel counts them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Figures = dict[str, float]


@contextmanager
def peak_memory() -> Iterator[Figures]:
    """Record the peak memory of this process and its descendants together, sampled every 50 ms.

    ``peak MB`` counts every page once, with shared memory and without files. ``private MB`` counts pages that belong to
    one process alone: memory that forked workers share with their parent is not in it.
    """
    peaks: Figures = {"peak MB": 0.0, "private MB": 0.0}
    stopped = threading.Event()

    def sample() -> None:
        while not stopped.wait(0.05):
            processes = [_memory_kb(pid) for pid in (os.getpid(), *_descendants(os.getpid()))]
            for name in peaks:
                peaks[name] = max(peaks[name], sum(process[name] for process in processes) / 1e3)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield peaks
    finally:
        stopped.set()
        sampler.join()


def _memory_kb(pid: int) -> Figures:
    """Return the memory of a process in kilobytes, by the names of ``peak_memory``."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # the process has just ended
        lines = []
    sizes = {name: float(size.split()[0]) for name, size in (line.split(":") for line in lines)}
    values = {"peak MB": ("Pss_Anon", "Pss_Shmem"), "private MB": ("Private_Clean", "Private_Dirty")}
    return {name: sum(sizes.get(part, 0.0) for part in parts) for name, parts in values.items()}


def _descendants(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:  # the process, or one of its threads, has just ended
        children = []
    return children + [descendant for child in children for descendant in _descendants(child)]


def cpu_seconds() -> float:
    """Return the CPU time of this process and its descendants: those that run, and those that were waited for."""
    return sum(_cpu_ticks(pid) for pid in (os.getpid(), *_descendants(os.getpid()))) / os.sysconf("SC_CLK_TCK")


def _cpu_ticks(pid: int) -> int:
    """Return the clock ticks of a process and of the children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # the process has just ended
        return 0
    return sum(map(int, fields[11:15]))
