"""The monitor's files: a run appends its statistics to a file, about once a second, for ``penstock view --run``.

Each process appends to a file of its own in the folder, so ranks need no coordination and a killed one leaves what it
has written. A line is one JSON object: the beginning of a run, or its statistics at a time. The log never makes a run
fail: a folder that cannot be written is logged once, and the run continues without.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from penstock.engines.meter import Meters
from penstock.engines.stats import snapshot

log = logging.getLogger(__name__)

LOG_SUFFIX = ".run.jsonl"
INTERVAL_S = 1.0
_DENSE_LINES = 600  # this many at full rate; then the interval grows with the run, so that a day takes few megabytes
_MAX_INTERVAL_S = 30.0
_MAX_LINE_BYTES = 1 << 20  # of a file that is read: a line of ours has a few thousand
_PAGE = os.sysconf("SC_PAGE_SIZE")
_run_numbers = count()


class RunLog:
    """Appends the statistics of one run to the file of this process."""

    def __init__(self, meters: Meters, folder: str, *, rank: int, world: int, epoch: int, plan: str) -> None:
        """Prepare the log; nothing is written before ``start``.

        Args:
            meters: The meters of the run.
            folder: Where the files are; created if necessary.
            rank: The rank that runs.
            world: The number of ranks.
            epoch: The epoch.
            plan: The plan as text.
        """
        self._meters, self._folder = meters, Path(folder)
        self._run = next(_run_numbers)
        self._begin = {"rank": rank, "world": world, "epoch": epoch, "plan": plan, "engine": meters.engine}
        self._path = self._folder / f"{socket.gethostname()}-{os.getpid()}-{_process_start()}{LOG_SUFFIX}"
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._stopped = threading.Lock()  # acquired once, by the first call of ``stop``
        self.cpu_s = 0.0  # processor-seconds that the log has used

    def start(self) -> None:
        """Write the beginning of the run, and start the thread that appends."""
        if self._thread is not None:
            return
        process = {"host": socket.gethostname(), "pid": os.getpid(), "started": _process_start()}
        self._thread = threading.Thread(target=self._append_until_stopped, name="penstock run log", daemon=True)
        if self._append({"kind": "begin", "interval": INTERVAL_S, **process, **self._begin}, create=True):
            self._thread.start()

    def stop(self) -> None:
        """Write the statistics for the last time; a second call does nothing."""
        if self._thread is None or not self._stopped.acquire(blocking=False):
            return
        self._stop.set()
        # The garbage collector may close a forgotten run in any thread, even in this log's own.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._append({"kind": "stats", **self._stats()})

    def _append_until_stopped(self) -> None:
        lines = 0
        while not self._stop.wait(min(_MAX_INTERVAL_S, INTERVAL_S * max(1.0, lines / _DENSE_LINES))):
            begun = time.thread_time()
            lines += 1
            if not self._append({"kind": "stats", **self._stats()}):
                return
            self.cpu_s += time.thread_time() - begun

    def _stats(self) -> dict[str, Any]:
        stats = snapshot(self._meters).to_dict()
        for segment in stats["segments"]:
            del segment["sizes"]  # grows with the run; every line has the workers of its time
        return {"memory": _resident_bytes(), **stats}

    def _append(self, record: dict[str, Any], *, create: bool = False) -> bool:
        """Append a line by one write, and return whether that was possible."""
        line = json.dumps({"run": self._run, "time": time.time(), **record}, separators=(",", ":")) + "\n"
        try:
            if create:
                self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", buffering=0) as file:
                file.write(line.encode())
        except OSError as exc:
            log.warning("the run is not monitored: %s: %s", self._folder, exc.strerror or exc)
            return False
        return True


@dataclass(slots=True, eq=False)
class LoggedRun:
    """One run of one process, as its log records it.

    Attributes:
        begin: The record of its beginning: ``rank``, ``world``, ``epoch``, ``plan``, ``engine``, ``host``, ``pid``.
        lines: The records of its statistics, in order: those of ``Stats.to_dict``, with ``time`` and ``memory``.
    """

    begin: dict[str, Any]
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last(self) -> dict[str, Any]:
        """The latest record."""
        return self.lines[-1] if self.lines else self.begin

    def status(self, now: float) -> str:
        """Return "ended", "running", "lost" (its process is gone) or "silent" (nothing was written for a while)."""
        if self.lines and not self.lines[-1].get("running"):
            return "ended"
        if self.begin.get("host") == socket.gethostname() and not _is_alive(self.begin):
            return "lost"
        interval = max(INTERVAL_S, len(self.lines) / _DENSE_LINES * INTERVAL_S)
        return "silent" if now - float(self.last["time"]) > 5 * interval + 5 else "running"


class RunLogReader:
    """Reads the files of a folder, and on later calls only what was appended to them."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._offsets: dict[Path, int] = {}
        self._runs: dict[tuple[str, int], LoggedRun] = {}

    def read(self) -> list[LoggedRun]:
        """Return all runs, by beginning; a line that is being written is left for the next call."""
        for path in sorted(self.folder.glob(f"*{LOG_SUFFIX}")):
            for record in self._new_records(path):
                key = (path.name, record["run"])
                if record["kind"] == "begin":
                    self._runs[key] = LoggedRun(record)
                elif key in self._runs:
                    self._runs[key].lines.append(record)
        return sorted(self._runs.values(), key=lambda run: float(run.begin["time"]))

    def _new_records(self, path: Path) -> Iterator[dict[str, Any]]:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in iter(lambda: file.readline(_MAX_LINE_BYTES), b""):
                    if not line.endswith(b"\n"):
                        return
                    self._offsets[path] = file.tell()
                    if (record := _parsed(line)) is not None:
                        yield record
        except OSError as exc:
            log.warning("%s cannot be read: %s", path, exc.strerror or exc)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if another program wrote it, or it is damaged."""
    try:
        record = json.loads(line)
        valid = isinstance(record["run"], int) and isinstance(record["time"], int | float)
        valid = valid and (record["kind"] == "begin" or isinstance(record["segments"], list))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    kind = record.get("kind")
    if (
        not valid
        or kind not in ("begin", "stats")
        or (kind == "stats" and not isinstance(record.get("segments"), list))
    ):
        return None
    return record  # type: ignore[no-any-return]


def _process_start() -> int:
    """Return when this process began, in the system's ticks: a number of a process may be given out again."""
    return _start_of(os.getpid()) or 0


def _start_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _is_alive(begin: dict[str, Any]) -> bool:
    return not os.path.isdir("/proc/self") or _start_of(int(begin.get("pid", 0))) == begin.get("started")


def _resident_bytes() -> int:
    """Return the memory of this process in bytes; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0
