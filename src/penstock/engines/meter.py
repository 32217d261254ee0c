"""Meters: the counters of a run while it runs, for each segment and for the consumer.

Workers write them and any thread may read them, without a lock. All numbers except ``workers`` and ``pending`` only
grow, so the difference of two readings is what happened in between; a reading during a write is off by one block at
most.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

Observer = Callable[["Event"], Any]


class Event(NamedTuple):
    """Something that happened in a run, as passed to the observer.

    Attributes:
        kind: "begin", "block", "workers", "death", "timeout", "tick" or "end".
        seconds: The time since the run began.
        segment: The segment, as it describes itself.
        worker: The number of the worker.
        took: For a "block": the seconds of work, which ended at ``seconds``.
        items: For a "block": the number of its outputs; for "workers": the current number of workers.
        problem: For a "death" or "timeout": what happened.
    """

    kind: str
    seconds: float
    segment: str | None = None
    worker: int | None = None
    took: float = 0.0
    items: int = 0
    problem: str | None = None


@dataclass(slots=True, eq=False)
class Meter:
    """The counters of one segment.

    Attributes:
        name: The segment, as it describes itself.
        on: "threads", "processes", "actors" of a cluster, or "inline": in the thread that moves blocks.
        least: The minimum number of workers of the pool.
        most: The maximum number of workers.
        workers: The current number of workers.
        blocks: Output blocks.
        inputs: Input items.
        items: Output items.
        nbytes: Output bytes.
        busy: Worker-seconds inside stages, including the transport to a process and back.
        starved: Worker-seconds spent waiting for input.
        blocked: Worker-seconds without input because finished blocks were waiting to be consumed.
        cpu: Processor-seconds of ``busy``.
        awaited: Seconds in which everything after this segment waited for it.
        pending: Blocks in flight now: queued, in progress, or finished and not consumed yet.
        retries: Repeated calls.
        skips: Samples that failed and were skipped.
        deaths: Workers that died and were replaced.
        timeouts: Samples that took longer than ``timeout_s``.
        sizes: (seconds since the run began, workers) at each change of ``workers``.
    """

    name: str
    on: str
    least: int = 1
    most: int = 1
    workers: int = 1
    blocks: int = 0
    inputs: int = 0
    items: int = 0
    nbytes: int = 0
    busy: float = 0.0
    starved: float = 0.0
    blocked: float = 0.0
    cpu: float = 0.0
    awaited: float = 0.0
    pending: int = 0
    retries: int = 0
    skips: int = 0
    deaths: int = 0
    timeouts: int = 0
    sizes: list[tuple[float, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Meters:
    """The counters of one run.

    Attributes:
        segments: The meters of its segments, in the order of the plan.
        engine: The name of the engine.
        begun: When the run began, by ``time.perf_counter``.
        ended: When it ended; None while it runs.
        items: Items that were delivered.
        waited: Seconds that the consumer waited for blocks, excluding the current wait.
        waiting_since: When the current wait of the consumer began; None if it is not waiting.
        observer: Called with every event.
        guests: The counters of the open runs that use the pools of this one.
    """

    segments: list[Meter] = field(default_factory=list)
    engine: str = "local"
    begun: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    items: int = 0
    waited: float = 0.0
    waiting_since: float | None = None
    observer: Observer | None = None
    guests: list[Meters] = field(default_factory=list)

    def waiting(self) -> float:
        """Return the seconds that the consumers have waited, including the current wait."""
        since = self.waiting_since
        own = self.waited + (time.perf_counter() - since if since is not None else 0.0)
        return own + sum(guest.waiting() for guest in list(self.guests))

    @property
    def seconds(self) -> float:
        """The duration of the run, so far or in total."""
        return (time.perf_counter() if self.ended is None else self.ended) - self.begun

    def notify(self, kind: str, segment: Meter | None = None, **facts: Any) -> None:
        """Call the observer with an event; one that raises is logged and not called again."""
        if (observer := self.observer) is None:
            return
        try:
            observer(Event(kind, self.seconds, segment.name if segment else None, **facts))
        except Exception:  # the run continues without the observer
            self.observer = None
            log.exception("the observer failed; it is not called again")
