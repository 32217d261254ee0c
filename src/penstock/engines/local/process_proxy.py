"""The run's side of a worker process: start it, send it blocks, kill it when it exceeds its time limit, end it."""

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

from penstock.blobs.content import memory_file
from penstock.engines.local.block_codec import answer_origin_query, decode_error, raise_startup_error
from penstock.engines.local.fork_server import ForkServer
from penstock.engines.local.heartbeat import HEARTBEAT_BYTES, Heartbeat
from penstock.engines.local.pool import ABORT_TIMEOUT_S
from penstock.engines.local.transport import CannotSend, Connection, dumps
from penstock.engines.local.worker_proxy import WorkerDied, WorkerStuck
from penstock.engines.segments import Segment
from penstock.errors import EngineError
from penstock.plan import Context, Origin, PlacedStage, Resources

_POLL_S = 0.05  # the shortest interval between two checks of a worker's time limit


@dataclass(frozen=True, slots=True)
class ProcessPayload:
    """What the worker processes of a segment need: its stages, pickled once for all of them, and its limits."""

    local_stages: list[tuple[PlacedStage, Context]]  # reading: the files that it maps stay mapped in this process
    stages: list[PlacedStage]
    contexts: list[Context]
    fork_server: ForkServer
    timeout_s: float | None
    on: ClassVar[str] = "processes"

    def acquire(self) -> None:
        self.fork_server.acquire()

    def release(self) -> None:
        self.fork_server.release()

    def abort(self) -> None:
        self.fork_server.abort()

    def start(self, device: Any) -> WorkerProcess:
        return WorkerProcess(self, device)

    @staticmethod
    def of(segment: Segment, contexts: list[Context]) -> ProcessPayload:
        """Pickle the stages of a segment.

        Raises:
            EngineError: A function cannot be sent to another process.
        """
        placed_stages = list(zip(segment.stages, contexts, strict=True))
        local, remote = placed_stages[: segment.reading], placed_stages[segment.reading :]
        for placed, _ in remote:
            check_sendable(placed)
        resources = segment.resources or Resources()
        stages, remote_contexts = [placed for placed, _ in remote], [ctx for _, ctx in remote]
        fork_server = ForkServer(dumps((stages, remote_contexts)), ceil(resources.cpus or 1))
        return ProcessPayload(local, stages, remote_contexts, fork_server, resources.timeout_s)


def check_sendable(placed: PlacedStage) -> None:
    """Check that a stage can be sent to another process.

    Raises:
        EngineError: The stage cannot be sent.
    """
    try:
        dumps(placed)
    except Exception as exc:
        problem = f"{placed.stage.describe()} cannot be sent to a worker process: {exc}"
        raise EngineError(f"{problem}; use on='threads', where nothing is sent") from exc


class WorkerProcess:
    """One worker process; a ``RemoteWorker``."""

    def __init__(self, payload: ProcessPayload, device: Any) -> None:
        """Fork the process from the fork server.

        Raises:
            EngineError: It cannot be started.
        """
        own_sock, worker_sock = socket.socketpair()
        heartbeat_fd = memory_file(HEARTBEAT_BYTES)
        self._heartbeat = Heartbeat(mmap.mmap(heartbeat_fd, HEARTBEAT_BYTES))
        self._fork_server, self._timeout_s = payload.fork_server, payload.timeout_s
        self._exit_code: int | None = None
        self.cpu_s = 0.0
        self.retried = 0
        try:
            self.pid = payload.fork_server.fork(worker_sock.fileno(), heartbeat_fd, device)
        except BaseException:
            own_sock.close()
            raise
        finally:
            worker_sock.close()
            os.close(heartbeat_fd)
        self._connection = Connection(own_sock)

    def wait_ready(self) -> None:
        try:
            kind, *fields = self._connection.recv()
        except (EOFError, OSError):
            raise self._death("at its start") from None
        if kind == "raise":
            self.close()
            raise_startup_error(fields[0], "construct its functions")

    def request(self, origin: Origin, *message: Any) -> tuple[tuple[Any, ...], bool]:
        try:
            self._connection.send(message)
            del message
            while True:
                kind, *fields = self._recv()
                if kind == "done":
                    self.cpu_s, self.retried = fields[2]
                    return fields[0], fields[1]
                if kind == "raise":
                    raise decode_error(fields[0])
                if kind == "unreadable":
                    raise CannotSend(fields[0])
                self._connection.send(answer_origin_query(origin, kind, *fields))
        except (EOFError, OSError) as exc:
            if isinstance(exc, OSError) and not isinstance(exc, ConnectionError):
                raise  # such as too many open files
            raise self._death("in the middle of a block") from None

    def _recv(self) -> Any:
        timeout_s = self._timeout_s
        if timeout_s is not None:
            ready = select.poll()
            ready.register(self._connection.sock, select.POLLIN)
            while not ready.poll(1000 * max(_POLL_S, timeout_s / 10)):
                current = self._heartbeat.read()
                if current is not None and current[2] > timeout_s:
                    self.kill()
                    self._death("")
                    raise WorkerStuck(f"it took longer than timeout_s={timeout_s:g} and was killed")
        return self._connection.recv()

    def current_stage(self) -> int | None:
        current = self._heartbeat.read()
        return None if current is None else current[0]

    def _death(self, when: str) -> WorkerDied:
        """Wait for the process, which is ending, and return an error with its exit status or signal."""
        self._connection.close()
        code = self._wait()
        ending = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit status {code}"
        return WorkerDied(f"its worker process ended {when}: {ending}")

    def kill(self) -> None:
        if self._exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let the process clean up and end; kill it if it does not."""
        with suppress(OSError):
            self._connection.send(("stop", 0, None))
        self._wait()
        self._connection.close()

    def _wait(self) -> int:
        """Return the exit code of the process, which is about to end; kill it if it does not."""
        if self._exit_code is None:
            self._exit_code = self._fork_server.wait(self.pid, ABORT_TIMEOUT_S)
        if self._exit_code is None:
            self.kill()
            self._exit_code = self._fork_server.wait(self.pid, 10 * ABORT_TIMEOUT_S)
        return -signal.SIGKILL if self._exit_code is None else self._exit_code
