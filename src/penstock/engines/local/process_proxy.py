"""A worker in a process of its own, as the run sees it: started, asked, watched, ended."""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

from penstock.engines.local.block_codec import answer, decode_error, raise_unready
from penstock.engines.local.fork_server import ForkServer
from penstock.engines.local.heartbeat import SIZE, Heartbeat
from penstock.engines.local.pool import ABORT_S
from penstock.engines.local.transport import CannotSend, Connection, dumps, memory_file
from penstock.engines.local.worker_proxy import WorkerDied, WorkerStuck
from penstock.engines.program import Segment
from penstock.engines.read_stage import Read
from penstock.errors import EngineError
from penstock.plan import Context, Origin, PlacedStage, Resources

_POLL_S = 0.05  # how often a worker with a time limit is looked at, at least


@dataclass(frozen=True, slots=True)
class ProcessPayload:
    """What a worker process needs: the stages, pickled once for all workers, and what it may use."""

    before: list[tuple[PlacedStage, Context]]  # what is done here: reading, whose maps of files stay in their process
    stages: list[PlacedStage]
    contexts: list[Context]
    nursery: ForkServer
    timeout_s: float | None
    on: ClassVar[str] = "processes"

    def enter(self) -> None:
        """Note that somebody will want workers."""
        self.nursery.enter()

    def leave(self) -> None:
        """Note that somebody wants none any more."""
        self.nursery.leave()

    def abort(self) -> None:
        """End what is being started."""
        self.nursery.abort()

    def start(self, device: Any) -> WorkerProcess:
        """Start a worker.

        Raises:
            EngineError: it cannot be started.
        """
        return WorkerProcess(self, device)

    @staticmethod
    def of(segment: Segment, contexts: list[Context]) -> ProcessPayload:
        """Pack a segment.

        Raises:
            EngineError: a function cannot travel to another process.
        """
        placed = list(zip(segment.stages, contexts, strict=True))
        before = [(one, ctx) for one, ctx in placed if isinstance(one.stage, Read)]
        there = [(one, ctx) for one, ctx in placed if not isinstance(one.stage, Read)]
        for one, _ in there:
            check_travels(one)
        needs = segment.resources or Resources()
        stages, its = [one for one, _ in there], [ctx for _, ctx in there]
        return ProcessPayload(
            before, stages, its, ForkServer(dumps((stages, its)), ceil(needs.cpus or 1)), needs.timeout_s
        )


def check_travels(placed: PlacedStage) -> None:
    """Require that a stage can be sent to another process.

    Raises:
        EngineError: it cannot.
    """
    try:
        dumps(placed)
    except Exception as exc:
        problem = f"{placed.stage.describe()} cannot be sent to a worker process: {exc}"
        raise EngineError(f"{problem}; on='threads' needs no sending") from exc


class WorkerProcess:
    """One worker process. One thread at a time, but for ``kill``."""

    def __init__(self, cargo: ProcessPayload, device: Any) -> None:
        """Start it.

        Raises:
            EngineError: it cannot be started.
        """
        here, there = socket.socketpair()
        board_fd = memory_file(SIZE)
        self._board = Heartbeat(mmap.mmap(board_fd, SIZE))
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
        self._wire = Connection(here)

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
            CannotSend: what was sent, or its answer, could not be made again at the other end.
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
                    raise decode_error(facts[0])
                if word == "unreadable":
                    raise CannotSend(facts[0])
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
