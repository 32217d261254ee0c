"""Meters: what a run measures about itself while it runs, for each segment and for the consumer.

Workers write them, any thread may read them, without a lock. All numbers but ``workers`` and ``pending`` only grow, so
the difference of two readings is what happened in between; a reading during a write is off by one block at most.
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
    """Something that happened in a run, as an observer gets it.

    Attributes:
        kind: "begin", "block", "workers", "death", "timeout", "tick" or "end".
        seconds: The time since the run began.
        segment: The segment, as it describes itself.
        worker: The number of the worker.
        took: Of a "block": the seconds of work, up to ``seconds``.
        items: Of a "block": its outputs; of "workers": how many there are now.
        problem: Of a "death" or "timeout": what happened.
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
    """What one segment did.

    Attributes:
        name: The segment, as it describes itself.
        on: "threads", "processes", "actors" of a cluster, or "inline": in the thread that moves blocks.
        least: How few workers the pool may shrink to.
        most: How many it may grow to.
        workers: How many it has now.
        blocks: Blocks that came out.
        inputs: Items that came in.
        items: Items that came out.
        nbytes: Bytes that came out.
        busy: Worker-seconds inside stages, with the transport to a process and back.
        starved: Worker-seconds without input, while the segment asked for it.
        blocked: Worker-seconds without input, while finished blocks waited to be taken.
        cpu: Processor-seconds of ``busy``.
        awaited: Seconds in which everything after this segment waited for it.
        pending: Blocks in flight now: queued, in work, or finished and not taken yet.
        retries: Calls that were made again.
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
    """What one run did.

    Attributes:
        segments: The meters of its segments, in the order of the plan.
        engine: The name of the engine.
        begun: When the run began, on the performance counter.
        ended: When it ended; None while it runs.
        items: Items that were delivered.
        waited: Seconds that the consumer waited for blocks, without the current wait.
        waiting_since: When the current wait of the consumer began; None while it does not wait.
        observer: Called with every event.
    """

    segments: list[Meter] = field(default_factory=list)
    engine: str = "local"
    begun: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    items: int = 0
    waited: float = 0.0
    waiting_since: float | None = None
    observer: Observer | None = None

    def waiting(self) -> float:
        """Return the seconds that the consumer has waited, with the current wait."""
        since = self.waiting_since
        return self.waited + (time.perf_counter() - since if since is not None else 0.0)

    @property
    def seconds(self) -> float:
        """The duration of the run, so far or in total."""
        return (time.perf_counter() if self.ended is None else self.ended) - self.begun

    def tell(self, kind: str, segment: Meter | None = None, **facts: Any) -> None:
        """Call the observer with an event; one that raises is logged and not called again."""
        if (observer := self.observer) is None:
            return
        try:
            observer(Event(kind, self.seconds, segment.name if segment else None, **facts))
        except Exception:  # not a failure of the run, which continues without the observer
            self.observer = None
            log.exception("the observer failed; it is not called again")
