"""The fork server: a fresh interpreter that loads what the workers of a pool need, and forks them.

It is started next to the user's program, not forked from it, so it has none of the program's threads and locks, and not
its main module; of the user's code it runs only imports. A fork takes milliseconds and shares the memory of everything
that is loaded.

When the run is gone, however it ended, the connection is closed, so the fork server ends too, and its workers are
killed with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from penstock.engines.local.block_codec import encode_error, raise_startup_error
from penstock.engines.local.transport import Connection
from penstock.errors import EngineError

_STOP_TIMEOUT_S = 5.0
_CHECK_S = 1.0  # interval at which a fork server checks that its run exists: a fork of the run may keep the connection
_PR_SET_PDEATHSIG = 1  # prctl option: send this process a signal when its parent dies
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Blocks of large arrays come and go: memory that malloc returns to the system is faulted in again every time.
_MALLOC_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}

WorkerMain = Callable[[socket.socket, int, Any, Any], None]  # socket, descriptor of the heartbeat, payload, device


class ForkServer:
    """The run's side of a fork server. Thread-safe."""

    def __init__(self, payload: bytes, threads: int) -> None:
        """Prepare a fork server, which is started by the first fork.

        Args:
            payload: What workers need, pickled.
            threads: The number of threads that the libraries of one worker may use.
        """
        self._payload, self._threads = payload, threads
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._users = 0
        self._aborted = False

    def acquire(self) -> None:
        """Register a user that will fork workers."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Unregister a user; the last one ends the fork server."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._close()

    def fork(self, fd: int, heartbeat_fd: int, device: Any) -> int:
        """Fork a worker that serves the socket ``fd``, and return its process id.

        Raises:
            EngineError: Processes cannot be started, or cannot load their stages.
        """
        with self._lock:
            for attempt in range(2):
                try:
                    connection = self._started()
                    connection.send(("fork", device))
                    socket.send_fds(connection.sock, [b"."], [fd, heartbeat_fd])
                    return int(connection.recv())
                except (EOFError, OSError) as exc:
                    ending = self._reap()
                    if attempt or self._aborted:
                        raise EngineError(f"worker processes cannot be started: {ending or exc}") from exc
        raise AssertionError("unreachable")

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a worker as ``subprocess`` defines it, or ``None`` while it runs."""
        with self._lock:
            if self._connection is None:
                return -signal.SIGKILL
            try:
                self._connection.send(("exit_code", pid))
                code: int | None = self._connection.recv()
            except (EOFError, OSError):
                self._reap()
                return -signal.SIGKILL  # it was killed with the fork server
            return code

    def wait(self, pid: int, timeout_s: float) -> int | None:
        """Wait for a worker to end and return its exit code; ``None`` if it has not ended within ``timeout_s``."""
        until = time.monotonic() + timeout_s
        pause = 0.0005
        while (code := self.exit_code(pid)) is None and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return code

    def abort(self) -> None:
        """Kill the fork server and its workers; calls that wait for it fail, and it is not started again."""
        self._aborted = True
        if (process := self._process) is not None:
            process.kill()

    def _started(self) -> Connection:
        """Return the connection to the fork server, which is started if necessary."""
        if self._aborted:
            raise EOFError
        if self._connection is not None:
            return self._connection
        own_sock, server_sock = socket.socketpair()
        try:
            self._process = _spawn(server_sock.fileno(), self._threads)
            if self._aborted:  # while it was being started, when there was no process to kill
                self._process.kill()
        except BaseException:
            own_sock.close()
            raise
        finally:
            server_sock.close()
        connection = self._connection = Connection(own_sock)
        connection.send(self._payload)
        kind, *fields = connection.recv()
        if kind == "raise":
            self._close()
            raise_startup_error(fields[0], "load its stages")
        return connection

    def _reap(self) -> str:
        """Clean up after a fork server that has died, and return how it ended."""
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if connection is not None:
            connection.close()
        if process is None:
            return ""
        process.kill()
        code = process.wait()
        return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit status {code}"

    def _close(self) -> None:
        process, connection, self._process, self._connection = self._process, self._connection, None, None
        if connection is not None:
            with suppress(OSError):
                connection.send(("stop", None))
            connection.close()
        if process is not None:
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _spawn(fd: int, threads: int) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter that finds the modules this one finds, and does not load its main module."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from penstock.engines.local.process_worker import run_fork_server; run_fork_server({fd}, {os.getpid()})"
    )
    env = {**dict.fromkeys(_THREAD_VARIABLES, str(threads)), **_MALLOC_VARIABLES, **os.environ}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=(fd,),
        env=env,
        start_new_session=True,  # only the run responds to Ctrl-C
    )


def serve_forks(fd: int, run_pid: int, worker_main: WorkerMain) -> None:
    """Run as the fork server: load the payload, then fork workers until the run sends a stop message or is gone.

    Args:
        fd: The socket whose other end is the run's ``ForkServer``.
        run_pid: The process of the run.
        worker_main: What a forked worker runs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=fd))
    try:
        try:
            payload = pickle.loads(connection.recv())
        except (EOFError, OSError):
            raise
        except BaseException as exc:
            connection.send(("raise", encode_error(exc)))
            return
        connection.send(("ready",))
        gc.collect()
        gc.freeze()  # otherwise the garbage collector would write to, and so copy, the pages that workers share
        _fork_on_request(connection, run_pid, payload, worker_main)
    except (EOFError, OSError):
        os._exit(1)


def _fork_on_request(connection: Connection, run_pid: int, payload: Any, worker_main: WorkerMain) -> None:
    ready = select.poll()
    ready.register(connection.sock, select.POLLIN)
    own_pid = os.getpid()
    while True:
        while not ready.poll(1000 * _CHECK_S):
            if os.getppid() != run_pid:
                return
        kind, argument = connection.recv()  # the argument is a pid, or the device of a new worker
        if kind == "stop":
            return
        if kind == "exit_code":
            connection.send(_exit_code(argument))
            continue
        _, fds, _, _ = socket.recv_fds(connection.sock, 1, 2)
        pid = os.fork()
        if not pid:
            _become_worker(own_pid, connection, worker_main, fds, payload, argument)
        for fd in fds:
            os.close(fd)
        connection.send(pid)


def _exit_code(pid: int) -> int | None:
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if ended else None


def _become_worker(
    server_pid: int, connection: Connection, worker_main: WorkerMain, fds: list[int], payload: Any, device: Any
) -> None:
    """Run a worker in this process, which has just been forked; never return."""
    code = 1
    try:
        _exit_with_parent(server_pid)
        connection.close()
        _reseed()
        worker_main(socket.socket(fileno=fds[0]), fds[1], payload, device)
        code = 0
    except (EOFError, OSError):  # the run is gone
        pass
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _exit_with_parent(parent: int) -> None:
    """Make this process end with the fork server, even if that is killed, whatever this process is doing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _reseed() -> None:
    """Seed the global random generators, so that workers draw different numbers, as separate programs do."""
    random.seed()
    np.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(int.from_bytes(os.urandom(7), "little"))
