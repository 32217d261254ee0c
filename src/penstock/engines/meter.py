"""What a run counts about itself, while it runs: one meter a segment, one for the consumer.

Workers write, anybody reads. Every number only grows (but for ``workers`` and ``pending``), so the difference of two
readings is what happened between them; a reading in the middle of a write is off by one block at most.
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
    """Something that happened in a run, for whoever observes it."""

    kind: str  # "begin", "block", "workers", "death", "timeout", "tick", "end"
    seconds: float  # since the run began
    segment: str | None = None  # what it describes itself as
    worker: int | None = None
    took: float = 0.0  # "block": how long, until ``seconds``
    items: int = 0  # "block": items that came out; "workers": how many there are now
    problem: str | None = None


@dataclass(slots=True, eq=False)
class Meter:
    """What one segment did."""

    name: str
    on: str  # "threads", "processes", "actors" of a cluster, or "inline": in the thread that moves blocks
    least: int = 1  # workers it may shrink to
    most: int = 1  # and grow to
    workers: int = 1  # now
    blocks: int = 0
    inputs: int = 0  # items that came in
    items: int = 0  # and out
    nbytes: int = 0  # of what came out
    busy: float = 0.0  # worker-seconds inside stages, with the way to a process and back
    starved: float = 0.0  # worker-seconds without input, while the segment asked for it
    blocked: float = 0.0  # worker-seconds without input, since nobody took what was finished
    cpu: float = 0.0  # seconds of a processor that went into ``busy``
    awaited: float = 0.0  # seconds that everything behind waited for this segment
    pending: int = 0  # blocks under way now: queued, in work, or finished and not yet taken
    retries: int = 0
    skips: int = 0
    deaths: int = 0  # workers that died and were replaced
    timeouts: int = 0
    sizes: list[tuple[float, int]] = field(default_factory=list)  # (seconds since the begin, workers) at each change


@dataclass(slots=True, eq=False)
class Meters:
    """What one run did."""

    segments: list[Meter] = field(default_factory=list)
    engine: str = "local"
    begun: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    items: int = 0  # delivered
    waited: float = 0.0  # seconds the consumer waited for the next block
    since: float | None = None  # when it began to wait, while it does
    observer: Observer | None = None

    def waiting(self) -> float:
        """Seconds the consumer has waited, this moment included."""
        since = self.since
        return self.waited + (time.perf_counter() - since if since is not None else 0.0)

    @property
    def seconds(self) -> float:
        """How long the run has been going, or went."""
        return (time.perf_counter() if self.ended is None else self.ended) - self.begun

    def tell(self, kind: str, segment: Meter | None = None, **facts: Any) -> None:
        """Tell the observer, if there is one."""
        if (observer := self.observer) is None:
            return
        try:
            observer(Event(kind, self.seconds, segment.name if segment else None, **facts))
        except Exception:  # no fault of the run's: it goes on unobserved
            self.observer = None
            log.exception("the observer failed and is not told anything more")
