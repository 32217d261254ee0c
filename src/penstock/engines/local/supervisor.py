"""The supervisor of a run: a thread that resizes pools and fails blocks whose thread hangs, ten times a second."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from penstock.engines.local.pool import Pool
from penstock.engines.local.tuner import TICK_S, Reading, Tuner
from penstock.engines.meter import Meters


@dataclass(slots=True)
class _Watched:
    """A pool and its counters at the last tick."""

    pool: Pool
    timeout_s: float | None
    busy: float = 0.0
    cpu: float = 0.0
    awaited: float = 0.0
    inputs: int = 0

    def reading(self, seconds: float) -> Reading:
        """Return what happened in the ``seconds`` since the last tick."""
        meter = self.pool.meter
        now = (self.pool.busy(), meter.cpu, meter.awaited, meter.inputs)
        then = (self.busy, self.cpu, self.awaited, self.inputs)
        busy, cpu, awaited, inputs = ((new - old) / seconds for new, old in zip(now, then, strict=True))
        self.busy, self.cpu, self.awaited, self.inputs = now
        size = self.pool.size
        awaited_share = min(1.0, max(awaited, 0.0))
        processes = meter.on != "threads"
        return Reading(size, meter.least, meter.most, processes, min(busy, size), cpu, awaited_share, inputs)


class Supervisor:
    """Watches the pools of a run in a separate thread, which is started only if there is something to decide.

    It checks the time limits of threads only: a worker process is checked by its proxy.
    """

    def __init__(self, cores: float, meters: Meters) -> None:
        self.thread: threading.Thread | None = None
        self._tuner = Tuner(cores)
        self._meters = meters
        self._watched: list[_Watched] = []
        self._stopped = threading.Event()

    def watch(self, pool: Pool, timeout_s: float | None) -> None:
        """Add a pool; ``timeout_s`` bounds the time that one of its threads may spend on one item."""
        self._watched.append(_Watched(pool, timeout_s))

    def start(self) -> None:
        """Start the thread if a pool can be resized, an item can time out, or the run has an observer."""
        resizable = any(watched.pool.meter.least < watched.pool.meter.most for watched in self._watched)
        if resizable or self._meters.observer is not None or any(watched.timeout_s for watched in self._watched):
            self.thread = threading.Thread(target=self._watch, name="penstock supervisor", daemon=True)
            self.thread.start()

    def stop(self) -> None:
        """Ask the thread to end; it does so within a tick."""
        self._stopped.set()

    def _watch(self) -> None:
        last, waited = time.perf_counter(), self._meters.waited
        while not self._stopped.wait(TICK_S):
            now = time.perf_counter()
            consumer_waited = min(1.0, (self._meters.waiting() - waited) / (now - last))
            readings = [watched.reading(now - last) for watched in self._watched]
            last, waited = now, self._meters.waiting()
            for watched, size in zip(self._watched, self._tuner.tick(readings, consumer_waited), strict=True):
                watched.pool.resize(size)
                if watched.timeout_s is not None:
                    watched.pool.fail_overdue(watched.timeout_s)
            self._meters.notify("tick")
