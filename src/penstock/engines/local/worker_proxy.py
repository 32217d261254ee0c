"""The run's side of a worker in another process or an actor: send blocks, replace a worker that dies.

A block whose worker dies or hangs is processed again. If that happens twice, its items are processed one at a time, so
that the item that causes it is known and fails alone, by the plan's error policy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

import numpy as np

from penstock.engines.local.block_codec import decode_block, encode_block
from penstock.engines.local.pool import BlockJob, BlockParts, BlockResult, Closed
from penstock.engines.local.transport import CannotSend
from penstock.engines.meter import Meter, Meters
from penstock.errors import EngineError, PenstockError, StageError
from penstock.plan import Block, Context, Lineage, Origin, PlacedStage

MAX_ATTEMPTS = 2  # for a block, and then for each of its items alone


class WorkerDied(Exception):
    """A worker process ended while it was working."""


class WorkerStuck(WorkerDied):
    """A worker process was killed because it spent too long on one item."""


class WorkerLost(WorkerDied):
    """A worker is gone, but its current block did not cause it: it died with another block, or with its machine."""


class ProxyClosed(Exception):
    """The proxy that started ``block`` is closed, after it delivered ``delivered`` of the block's parts."""

    def __init__(self, block: Any, delivered: int) -> None:
        self.block, self.delivered = block, delivered


class RemoteWorker(Protocol):
    """A worker in another process, as its proxy sees it. Not thread-safe, except for ``kill``."""

    cpu_s: float
    retried: int

    def wait_ready(self) -> None:
        """Wait until the worker has constructed its functions.

        Raises:
            WorkerDied: The worker ended before that.
            EngineError: The worker cannot be started, or cannot construct its functions.
            StageError: The constructor of a function fails.
        """

    def request(self, origin: Origin, *message: Any) -> tuple[tuple[Any, ...], bool]:
        """Send a message and wait for the reply; meanwhile answer the worker's queries about ``origin``.

        Messages are ``"run"`` a block, ``"next"`` part of a block, and ``"drop"`` the remaining parts of a block, each
        with the number of the block and, for ``"run"``, the encoded block.

        Returns:
            A part of a block, encoded, and whether another one follows.

        Raises:
            WorkerDied: The worker died, or was killed because it took too long.
            CannotSend: The message or the reply cannot be pickled, or cannot be unpickled at the other end.
        """

    def current_stage(self) -> int | None:
        """Return the number of the stage that the worker runs, or ran when it ended; ``None`` if unknown."""

    def kill(self) -> None:
        """End the worker at once; a pending request raises ``WorkerDied``."""

    def close(self) -> None:
        """Let the worker clean up and end."""


class SegmentPayload(Protocol):
    """What the workers of a segment need, and how a worker is started."""

    @property
    def local_stages(self) -> list[tuple[PlacedStage, Context]]:
        """The stages that run in this process before a block is sent."""

    @property
    def stages(self) -> list[PlacedStage]:
        """The stages that run in the worker."""

    @property
    def contexts(self) -> list[Context]:
        """The contexts of ``stages``."""

    @property
    def on(self) -> str:
        """The kind of the workers, as the statistics name it."""

    def acquire(self) -> None:
        """Register a proxy that will start workers."""

    def release(self) -> None:
        """Unregister a proxy; the last one frees what the workers share."""

    def abort(self) -> None:
        """Cancel the starts in progress."""

    def start(self, device: Any) -> RemoteWorker:
        """Start a worker.

        Raises:
            EngineError: The worker cannot be started.
        """


@dataclass(slots=True, eq=False)
class RemoteWorkerProxy:
    """A worker proxy whose work is done by another process, on this or another machine."""

    payload: SegmentPayload
    device: Any
    meter: Meter
    meters: Meters
    number: int
    _worker: RemoteWorker | None = None
    _aborted: bool = False  # the run is over
    _closed: bool = False  # its thread has ended; a proxy that continues one of its blocks starts the block again
    _past_cpu_s: float = 0.0  # used by earlier workers
    _last_stage: int | None = None  # the last stage that an earlier worker ran
    _lock: threading.Lock = field(default_factory=threading.Lock)  # other threads may continue its blocks
    _numbers: Iterator[int] = field(default_factory=count)
    _abandoned: list[int] = field(default_factory=list)  # blocks whose remaining parts are not wanted

    def __post_init__(self) -> None:
        self.payload.acquire()

    def prepare(self) -> None:
        with self._lock:
            if not (self._aborted or self._closed):
                self._start()

    def __call__(self, job: BlockJob) -> BlockResult:
        parts = self._parts(self._run_local_stages(job)) if isinstance(job, Block) else job
        try:
            done, more_parts = next(parts)
        except ProxyClosed as exc:
            parts = self._parts(exc.block, exc.delivered)
            done, more_parts = next(parts)
        return done, parts if more_parts else None

    def cpu_seconds(self) -> float:
        return self._past_cpu_s + (self._worker.cpu_s if self._worker is not None else 0.0)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._worker is not None:
                self._worker.close()
            self.payload.release()

    def abort(self) -> None:
        self._aborted = True
        if (worker := self._worker) is not None:
            worker.kill()
        else:
            self.payload.abort()

    def overdue_error(self, timeout_s: float) -> Exception | None:
        """Return ``None``: the proxy itself kills a process that takes too long."""
        return None

    def _run_local_stages(self, block: Block) -> Block:
        if not block.is_marker:
            for placed, ctx in self.payload.local_stages:
                block = placed.stage.run(block, ctx)
        return block

    def _parts(self, block: Block, delivered: int = 0) -> BlockParts:
        """Yield the parts of a block after the first ``delivered``."""
        if block.is_marker:
            yield block, False
            return
        attempts = 0  # since the last part that arrived
        while attempts < MAX_ATTEMPTS:
            try:
                for number, part in enumerate(self._remote_parts(block)):
                    if number >= delivered:
                        delivered += 1
                        attempts = 0
                        yield part
                return
            except ProxyClosed:
                raise ProxyClosed(block, delivered) from None
            except (WorkerDied, CannotSend) as exc:
                last = exc
                attempts += not isinstance(exc, WorkerLost)
                if isinstance(exc, WorkerStuck | CannotSend):
                    break
        if delivered:
            place = block.place(0)
            raise StageError(f"{last}, repeatedly", self._blamed_stage().describe(), place.key, place.shard)
        yield self._one_by_one(block), False

    def _remote_parts(self, block: Block) -> BlockParts:
        """Send a block to the worker and yield the parts that it returns."""
        number, origin = next(self._numbers), block.lineage.origin
        whole = Block(block.items, block.keys, replace(block.lineage, more=False))
        worker, reply = self._request(None, origin, "run", number, encode_block(whole))
        del whole
        try:
            while True:
                part, more_parts = decode_block(reply[0], origin), reply[1]
                del reply
                more = more_parts or (block.lineage.more and part.lineage.error is None)
                part.lineage = replace(part.lineage, more=more)
                yield part, more_parts
                if not more_parts:
                    return
                del part
                _, reply = self._request(worker, origin, "next", number, None)
        except GeneratorExit:
            if more_parts:  # the run is closed, and other runs continue to use the worker
                self._abandoned.append(number)
            raise

    def _request(
        self, worker: RemoteWorker | None, origin: Origin, *message: Any
    ) -> tuple[RemoteWorker, tuple[tuple[Any, ...], bool]]:
        """Send a message to ``worker``; if it is ``None``, to the current worker, which is started if necessary.

        Raises:
            WorkerLost: ``worker`` was replaced; the new one does not have the block.
        """
        with self._lock:
            if self._aborted:
                raise Closed
            if self._closed:
                raise ProxyClosed(None, 0)
            if worker is not None and worker is not self._worker:
                raise WorkerLost("its worker process was replaced")
            try:
                worker = self._worker or self._start()
                before = worker.retried
                while message[0] == "run" and self._abandoned:
                    worker.request(origin, "drop", self._abandoned.pop(), None)
                reply = worker.request(origin, *message)
            except WorkerDied as exc:
                self._discard_worker(exc)
                raise
            except CannotSend:
                self._last_stage = None
                raise
            self.meter.retries += worker.retried - before
            return worker, reply

    def _start(self) -> RemoteWorker:
        """Start a worker; one that dies before its first block is not counted against any sample."""
        attempts = 0
        while True:
            try:
                worker = self._worker = self.payload.start(self.device)
            except EngineError:
                if self._aborted:
                    raise Closed from None
                raise
            if self._aborted:  # while it was starting, when there was no worker to kill
                worker.kill()
            try:
                worker.wait_ready()
                return worker
            except WorkerDied as exc:
                self._discard_worker(exc)
                attempts += not isinstance(exc, WorkerLost)  # a node that is gone may be chosen until that is known
                if attempts == MAX_ATTEMPTS:
                    raise EngineError(f"{self._blamed_stage().describe()}: {exc}, repeatedly") from None
            except PenstockError:
                self._worker = None
                raise

    def _discard_worker(self, exc: WorkerDied) -> None:
        if self._aborted:
            raise Closed from None
        if self._worker is not None:
            self._past_cpu_s += self._worker.cpu_s
            self._last_stage = self._worker.current_stage()
        self._worker = None
        self._abandoned.clear()
        stuck = isinstance(exc, WorkerStuck)
        self.meter.timeouts += stuck
        self.meter.deaths += not stuck
        self.meters.notify("timeout" if stuck else "death", self.meter, worker=self.number, problem=str(exc))

    def _blamed_stage(self) -> Any:
        stages = self.payload.stages
        return stages[-1 if self._last_stage is None else self._last_stage].stage

    def _one_by_one(self, block: Block) -> Block:
        """Process a block item by item: an item that ends its worker every time fails like any failing item."""
        done: list[Block] = []
        for item, value in enumerate(block.items):
            alone = block.keep([item], [value])
            alone.lineage = replace(alone.lineage, error=None, skips=(), more=False)
            try:
                part = self._run_alone(alone)
            except (WorkerDied, CannotSend) as exc:
                stage = self._blamed_stage()
                if not stage.fail(block, item, exc, self.payload.contexts[-1]):
                    break
                continue
            done.append(part)
            block.lineage = block.lineage.with_skips(*part.lineage.skips)
            if part.lineage.error is not None:
                block.lineage = block.lineage.until(part.lineage.inputs, part.lineage.error)
                break
        return _joined(done, block.lineage)

    def _run_alone(self, alone: Block) -> Block:
        """Process a block of one item, and join its parts."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                parts = [part for part, _ in self._remote_parts(alone)]
                break
            except WorkerStuck:
                raise
            except WorkerDied:
                if attempt == MAX_ATTEMPTS - 1:
                    raise
        skips = [skip for part in parts[:-1] for skip in part.lineage.skips]
        return _joined(parts, replace(parts[-1].lineage.with_skips(*skips), begin=alone.lineage.begin))


def _joined(parts: list[Block], lineage: Lineage) -> Block:
    """Return the items of several blocks, which have the same origin, in one block."""
    owners = [part.lineage.owner for part in parts if part.lineage.owner is not None]
    owner = np.concatenate([np.zeros(0, np.int64), *owners])
    keys = np.concatenate([np.zeros(0, np.uint64), *(part.keys for part in parts)])
    return Block([item for part in parts for item in part.items], keys, replace(lineage, owner=owner))
