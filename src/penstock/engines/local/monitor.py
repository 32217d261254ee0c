"""Looks at the pools of a run ten times a second: sets their sizes, and ends the wait for a worker that hangs."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from penstock.engines.local.pool import Pool
from penstock.engines.local.tuner import TICK_S, Reading, Tuner
from penstock.engines.meter import Meters


@dataclass(slots=True)
class _Watched:
    """A pool, and what its counters were at the last look."""

    pool: Pool
    timeout_s: float | None
    busy: float = 0.0
    cpu: float = 0.0
    awaited: float = 0.0
    inputs: int = 0

    def reading(self, seconds: float) -> Reading:
        """What happened since the last look."""
        meter = self.pool.meter
        now = (self.pool.busy(), meter.cpu, meter.awaited, meter.inputs)
        then = (self.busy, self.cpu, self.awaited, self.inputs)
        busy, cpu, awaited, inputs = ((new - old) / seconds for new, old in zip(now, then, strict=True))
        self.busy, self.cpu, self.awaited, self.inputs = now
        size = self.pool.size
        waited = min(1.0, max(awaited, 0.0))
        return Reading(size, meter.least, meter.most, meter.on != "threads", min(busy, size), cpu, waited, inputs)


class Monitor:
    """The thread that watches over the pools of a run; there is none where there is nothing to decide."""

    def __init__(self, cores: float, meters: Meters) -> None:
        self.thread: threading.Thread | None = None
        self._tuner = Tuner(cores)
        self._meters = meters
        self._watched: list[_Watched] = []
        self._stopped = threading.Event()

    def watch(self, pool: Pool, timeout_s: float | None) -> None:
        """Watch over a pool; ``timeout_s`` is how long one of its threads may be at one item."""
        self._watched.append(_Watched(pool, timeout_s))

    def start(self) -> None:
        """Begin, if there is anything to do."""
        grows = any(one.pool.meter.least < one.pool.meter.most for one in self._watched)
        if grows or self._meters.observer is not None or any(one.timeout_s for one in self._watched):
            self.thread = threading.Thread(target=self._look, name="penstock monitor", daemon=True)
            self.thread.start()

    def stop(self) -> None:
        """End; the thread is gone soon after."""
        self._stopped.set()

    def _look(self) -> None:
        last, waited = time.perf_counter(), self._meters.waited
        while not self._stopped.wait(TICK_S):
            now = time.perf_counter()
            share = min(1.0, (self._meters.waiting() - waited) / (now - last))
            readings = [one.reading(now - last) for one in self._watched]
            last, waited = now, self._meters.waiting()
            for one, size in zip(self._watched, self._tuner.tick(readings, share), strict=True):
                one.pool.resize(size)
                if one.timeout_s is not None:
                    one.pool.give_up_after(one.timeout_s)
            self._meters.tell("tick")
