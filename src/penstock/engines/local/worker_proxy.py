"""A worker somewhere else, as the run sees it: asked, replaced when it dies, its blocks done again.

A block whose worker dies or hangs is done again. When that happens twice its items are done one at a time, so that
the one to blame is known and fails alone, by the plan's policy on errors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import numpy as np

from penstock.engines.local.block_codec import decode_block, encode_block
from penstock.engines.local.pool import Closed, Done, Job, Parts
from penstock.engines.local.transport import CannotSend
from penstock.engines.meter import Meter, Meters
from penstock.errors import EngineError, PenstockError, StageError
from penstock.plan import Block, Context, Origin, PlacedStage

TRIES = 2  # of a block, and then of each of its items alone


class WorkerDied(Exception):
    """A worker process ended in the middle of something."""


class WorkerStuck(WorkerDied):
    """A worker process was ended since it took too long."""


class WorkerLost(WorkerDied):
    """A worker is gone by no fault of the block it had: it died over another one, or with its machine."""


class Left(Exception):
    """The hand that began with a block is gone, after so many of its parts."""

    def __init__(self, block: Any, given: int) -> None:
        self.block, self.given = block, given


class RemoteWorker(Protocol):
    """A worker somewhere else, as its hand sees it. One thread at a time, but for ``kill``."""

    cpu: float
    retried: int

    def load(self) -> None:
        """Wait until it is ready."""

    def ask(self, origin: Origin, *words: Any) -> tuple[tuple[Any, ...], bool]:
        """Have it work."""

    def stage(self) -> int | None:
        """The number of the stage it is, or was, at."""

    def kill(self) -> None:
        """End it at once; whoever waits for it is told."""

    def close(self) -> None:
        """Let it clean up and end."""


class SegmentPayload(Protocol):
    """What hands send to workers, and how those are started; see ``Cargo``."""

    @property
    def before(self) -> list[tuple[PlacedStage, Context]]:
        """What is done here."""

    @property
    def stages(self) -> list[PlacedStage]:
        """What is done there."""

    @property
    def contexts(self) -> list[Context]:
        """Theirs."""

    @property
    def on(self) -> str:
        """What the workers are."""

    def enter(self) -> None:
        """Note that somebody will want workers."""

    def leave(self) -> None:
        """Note that somebody wants none any more."""

    def abort(self) -> None:
        """End what is being started."""

    def start(self, device: Any) -> RemoteWorker:
        """Start a worker."""


@dataclass(slots=True, eq=False)
class RemoteWorkerProxy:
    """What a worker thread works with when its work is done in a process, here or on another machine."""

    cargo: SegmentPayload
    device: Any
    meter: Meter
    meters: Meters
    number: int
    _child: RemoteWorker | None = None
    _closed: bool = False  # the run is over
    _left: bool = False  # its thread is gone; whoever goes on with a block begun here begins it anew
    _used: float = 0.0  # by children that are gone
    _last_stage: int | None = None  # that the last of them was at
    _lock: threading.Lock = field(default_factory=threading.Lock)  # other threads go on with blocks begun here
    _numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.cargo.enter()

    def prepare(self) -> None:
        """Start the process."""
        with self._lock:
            if not (self._closed or self._left):
                self._started()

    def __call__(self, job: Job) -> Done:
        """Work on a block, or go on with one."""
        parts = self._parts(self._read(job)) if isinstance(job, Block) else job
        try:
            done, again = next(parts)
        except Left as exc:
            parts = self._parts(exc.block, exc.given)
            done, again = next(parts)
        return done, parts if again else None

    def cpu(self) -> float:
        """Seconds of a processor used so far."""
        return self._used + (self._child.cpu if self._child is not None else 0.0)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._left = True
            if self._child is not None:
                self._child.close()
            self.cargo.leave()

    def abort(self) -> None:
        """End the process at once."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
        else:
            self.cargo.abort()

    def overdue(self, limit: float) -> Exception | None:
        """Never: it ends a process that takes too long by itself."""
        return None

    def _read(self, block: Block) -> Block:
        if block.inputs:  # else it only marks the end of a part
            for placed, ctx in self.cargo.before:
                block = placed.stage.run(block, ctx)
        return block

    def _parts(self, block: Block, given: int = 0) -> Parts:
        """The parts of a block, but for the first ``given``."""
        if not (block.inputs or block.items):  # it only marks the end of a part
            yield block, False
            return
        tries = 0  # since the last part that came
        while tries < TRIES:
            try:
                for number, part in enumerate(self._sent(block)):
                    if number >= given:
                        given += 1
                        tries = 0
                        yield part
                return
            except Left:
                raise Left(block, given) from None
            except (WorkerDied, CannotSend) as exc:
                last = exc
                tries += not isinstance(exc, WorkerLost)
                if isinstance(exc, WorkerStuck | CannotSend):
                    break
        if given:
            place = block.place(0)
            raise StageError(f"{last}, again and again", self._blamed().describe(), place.key, place.shard)
        yield self._one_by_one(block), False

    def _sent(self, block: Block) -> Parts:
        """The parts of a block, from the process."""
        number = next(self._numbers)
        outer, block.more = block.more, False
        try:
            child, reply = self._asked(None, block.origin, "run", number, encode_block(block))
        finally:
            block.more = outer
        while True:
            part, again = decode_block(reply[0], block.origin), reply[1]
            del reply
            part.more = again or (outer and part.error is None)
            yield part, again
            if not again:
                return
            del part
            _, reply = self._asked(child, block.origin, "next", number, None)

    def _asked(
        self, child: RemoteWorker | None, origin: Origin, *words: Any
    ) -> tuple[RemoteWorker, tuple[tuple[Any, ...], bool]]:
        """Ask the process, which is started if need be; one that was replaced knows nothing of the block."""
        with self._lock:
            if self._closed:
                raise Closed
            if self._left:
                raise Left(None, 0)
            if child is not None and child is not self._child:
                raise WorkerLost("its worker process was replaced")
            try:
                child = self._child or self._started()
                before = child.retried
                reply = child.ask(origin, *words)
            except WorkerDied as exc:
                self._bury(exc)
                raise
            except CannotSend:
                self._last_stage = None
                raise
            self.meter.retries += child.retried - before
            return child, reply

    def _started(self) -> RemoteWorker:
        """A new process; that it dies before it has seen a sample is no sample's fault."""
        for attempt in range(TRIES):
            try:
                child = self._child = self.cargo.start(self.device)
            except EngineError:
                if self._closed:
                    raise Closed from None
                raise
            if self._closed:  # while it was being started, when there was nobody to kill
                child.kill()
            try:
                child.load()
                break
            except WorkerDied as exc:
                self._bury(exc)
                if attempt == TRIES - 1:
                    raise EngineError(f"{self._blamed().describe()}: {exc}, again and again") from None
            except PenstockError:
                self._child = None
                raise
        return child

    def _bury(self, exc: WorkerDied) -> None:
        if self._closed:
            raise Closed from None
        if self._child is not None:
            self._used += self._child.cpu
            self._last_stage = self._child.stage()
        self._child = None
        stuck = isinstance(exc, WorkerStuck)
        self.meter.timeouts += stuck
        self.meter.deaths += not stuck
        self.meters.tell("timeout" if stuck else "death", self.meter, worker=self.number, problem=str(exc))

    def _blamed(self) -> Any:
        stages = self.cargo.stages
        return stages[-1 if self._last_stage is None else self._last_stage].stage

    def _one_by_one(self, block: Block) -> Block:
        """The block done item by item: those that end their worker every time fail like any other."""
        done: list[Block] = []
        for item, value in enumerate(block.items):
            alone = block.keep([item], [value])
            alone.error, alone.skips, alone.more = None, [], False
            try:
                part = self._insisted(alone)
            except (WorkerDied, CannotSend) as exc:
                stage = self._blamed()
                if not stage.fail(block, item, exc, self.cargo.contexts[-1]):
                    break
                continue
            done.append(part)
            if part.error is not None:
                block.inputs, block.error, block.more = part.inputs, part.error, False
                break
        out = block.become([item for part in done for item in part.items])
        out.keys = np.concatenate([block.keys[:0], *(part.keys for part in done)])
        none = np.zeros(0, np.int64)
        out.owner = np.concatenate([none, *(none if part.owner is None else part.owner for part in done)])
        skips = [skip for part in done for skip in part.skips] + block.skips
        out.skips = sorted((skip for skip in skips if skip.input < out.inputs), key=lambda skip: skip.input)
        return out

    def _insisted(self, alone: Block) -> Block:
        """What becomes of one item, however many parts that is."""
        for attempt in range(TRIES):
            try:
                parts = [part for part, _ in self._sent(alone)]
                break
            except WorkerStuck:
                raise
            except WorkerDied:
                if attempt == TRIES - 1:
                    raise
        out = parts[-1].become([item for part in parts for item in part.items])
        out.keys = np.concatenate([part.keys for part in parts])
        out.owner = np.concatenate([part.owner for part in parts if part.owner is not None])
        out.begin = alone.begin
        return out
