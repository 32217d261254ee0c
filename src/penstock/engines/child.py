"""A worker in a process of its own, as the run sees it: started, asked, replaced when it dies, ended.

A block whose worker dies or hangs is done again. When that happens twice its items are done one at a time, so that
the one to blame is known and fails alone, by the plan's policy on errors.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from typing import Any

import numpy as np

from penstock.engines.board import SIZE, Board
from penstock.engines.meter import Meter, Meters
from penstock.engines.nursery import Nursery
from penstock.engines.parcel import answer, packed, raise_unready, unpacked, unpacked_error
from penstock.engines.pool import ABORT_S, Closed, Done, Job, Parts
from penstock.engines.program import Segment
from penstock.engines.reading import Read
from penstock.engines.wire import CannotTravel, Wire, dumps, memory_file
from penstock.errors import EngineError, PenstockError, StageError
from penstock.plan import Block, Context, Origin, Placed, Resources

TRIES = 2  # of a block, and then of each of its items alone
_POLL_S = 0.05  # how often a worker with a time limit is looked at, at least


class WorkerDied(Exception):
    """A worker process ended in the middle of something."""


class WorkerStuck(WorkerDied):
    """A worker process was ended since it took too long."""


class _Replaced(WorkerDied):
    """It died over another block, in between two parts of this one."""


class _Left(Exception):
    """The hand that began with a block is gone, after so many of its parts."""

    def __init__(self, block: Any, given: int) -> None:
        self.block, self.given = block, given


@dataclass(frozen=True, slots=True)
class Cargo:
    """What a worker process needs: the stages, pickled once for all workers, and what it may use."""

    before: list[tuple[Placed, Context]]  # what is done here: reading, whose maps of files stay in their process
    stages: list[Placed]
    contexts: list[Context]
    nursery: Nursery
    timeout_s: float | None

    @staticmethod
    def of(segment: Segment, contexts: list[Context]) -> Cargo:
        """Pack a segment.

        Raises:
            EngineError: a function cannot travel to another process.
        """
        placed = list(zip(segment.stages, contexts, strict=True))
        before = [(one, ctx) for one, ctx in placed if isinstance(one.stage, Read)]
        there = [(one, ctx) for one, ctx in placed if not isinstance(one.stage, Read)]
        for one, _ in there:
            _check_travels(one)
        needs = segment.resources or Resources()
        stages, its = [one for one, _ in there], [ctx for _, ctx in there]
        return Cargo(before, stages, its, Nursery(dumps((stages, its)), ceil(needs.cpus or 1)), needs.timeout_s)


def _check_travels(placed: Placed) -> None:
    try:
        dumps(placed)
    except Exception as exc:
        problem = f"{placed.stage.describe()} cannot be sent to a worker process: {exc}"
        raise EngineError(f"{problem}; on='threads' needs no sending") from exc


class Child:
    """One worker process. One thread at a time, but for ``kill``."""

    def __init__(self, cargo: Cargo, device: Any) -> None:
        """Start it.

        Raises:
            EngineError: it cannot be started.
        """
        here, there = socket.socketpair()
        board_fd = memory_file(SIZE)
        self._board = Board(mmap.mmap(board_fd, SIZE))
        self._nursery, self._timeout_s = cargo.nursery, cargo.timeout_s
        self._code: int | None = None
        self.cpu = 0.0
        self.retried = 0
        try:
            self.pid = cargo.nursery.fork(there.fileno(), board_fd, device)
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
            os.close(board_fd)
        self._wire = Wire(here)

    def load(self) -> None:
        """Wait until it is ready.

        Raises:
            WorkerDied: it ended before that.
            EngineError: it cannot make its functions.
            StageError: the constructor of one of them fails.
        """
        try:
            word, *facts = self._wire.recv()
        except (EOFError, OSError):
            raise self.died("at its start") from None
        if word == "raise":
            self.close()
            raise_unready(facts[0], "make its functions")

    def ask(self, origin: Origin, *words: Any) -> tuple[tuple[Any, ...], bool]:
        """Have it work; answer its questions about ``origin`` meanwhile.

        Raises:
            WorkerDied: it did, or was ended since it took too long.
            CannotTravel: what was sent, or its answer, could not be made again at the other end.
        """
        try:
            self._wire.send(words)
            del words
            while True:
                word, *facts = self._recv()
                if word == "done":
                    self.cpu, self.retried = facts[2]
                    return facts[0], facts[1]
                if word == "raise":
                    raise unpacked_error(facts[0])
                if word == "unreadable":
                    raise CannotTravel(facts[0])
                self._wire.send(answer(origin, word, *facts))
        except (EOFError, OSError) as exc:
            if isinstance(exc, OSError) and not isinstance(exc, ConnectionError):
                raise  # a full table of open files, say
            raise self.died("in the middle of a block") from None

    def _recv(self) -> Any:
        limit = self._timeout_s
        if limit is not None:
            ready = select.poll()
            ready.register(self._wire.sock, select.POLLIN)
            while not ready.poll(1000 * max(_POLL_S, limit / 10)):
                at = self._board.read()
                if at is not None and at[2] > limit:
                    self.kill()
                    self.died("")
                    raise WorkerStuck(f"it took longer than timeout_s={limit:g} and was ended")
        return self._wire.recv()

    def stage(self) -> int | None:
        """The number of the stage it is, or was, at."""
        at = self._board.read()
        return None if at is None else at[0]

    def died(self, when: str) -> WorkerDied:
        """Bury it, and say how it went."""
        self._wire.close()
        code = self._ended()
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit status {code}"
        return WorkerDied(f"its worker process ended {when}: {how}")

    def kill(self) -> None:
        """End it at once; whoever waits for it is told."""
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let it clean up and end; one that does not is killed."""
        with suppress(OSError):
            self._wire.send(("stop", 0, None))
        self._ended()
        self._wire.close()

    def _ended(self) -> int:
        """Wait for its end, which is soon; how it ended."""
        if self._code is None:
            self._code = self._nursery.wait(self.pid, ABORT_S)
        if self._code is None:  # it lives on
            self.kill()
            self._code = self._nursery.wait(self.pid, 10 * ABORT_S)
        return -signal.SIGKILL if self._code is None else self._code


@dataclass(slots=True, eq=False)
class ProcessHand:
    """What a worker thread works with when its work is done in a process."""

    cargo: Cargo
    device: Any
    meter: Meter
    meters: Meters
    number: int
    _child: Child | None = None
    _closed: bool = False  # the run is over
    _left: bool = False  # its thread is gone; whoever goes on with a block begun here begins it anew
    _used: float = 0.0  # by children that are gone
    _last_stage: int | None = None  # that the last of them was at
    _lock: threading.Lock = field(default_factory=threading.Lock)  # other threads go on with blocks begun here
    _numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.cargo.nursery.enter()

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
        except _Left as exc:
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
            self.cargo.nursery.leave()

    def abort(self) -> None:
        """End the process at once."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
        else:
            self.cargo.nursery.abort()

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
            except _Left:
                raise _Left(block, given) from None
            except (WorkerDied, CannotTravel) as exc:
                last = exc
                tries += not isinstance(exc, _Replaced)
                if isinstance(exc, WorkerStuck | CannotTravel):
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
            child, reply = self._asked(None, block.origin, "run", number, packed(block))
        finally:
            block.more = outer
        while True:
            part, again = unpacked(reply[0], block.origin), reply[1]
            del reply
            part.more = again or (outer and part.error is None)
            yield part, again
            if not again:
                return
            del part
            _, reply = self._asked(child, block.origin, "next", number, None)

    def _asked(self, child: Child | None, origin: Origin, *words: Any) -> tuple[Child, tuple[tuple[Any, ...], bool]]:
        """Ask the process, which is started if need be; one that was replaced knows nothing of the block."""
        with self._lock:
            if self._closed:
                raise Closed
            if self._left:
                raise _Left(None, 0)
            if child is not None and child is not self._child:
                raise _Replaced("its worker process was replaced")
            try:
                child = self._child or self._started()
                before = child.retried
                reply = child.ask(origin, *words)
            except WorkerDied as exc:
                self._bury(exc)
                raise
            except CannotTravel:
                self._last_stage = None
                raise
            self.meter.retries += child.retried - before
            return child, reply

    def _started(self) -> Child:
        """A new process; that it dies before it has seen a sample is no sample's fault."""
        for attempt in range(TRIES):
            try:
                child = self._child = Child(self.cargo, self.device)
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
            except (WorkerDied, CannotTravel) as exc:
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
