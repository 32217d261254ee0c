"""Where worker processes come from: one fresh interpreter that has loaded what they need, and forks them.

It is started beside the user's program, not forked from it, so it has none of its threads, locks and main module; and
it runs nothing of the user's but imports. A fork takes milliseconds and shares the memory of all that is loaded.

When the run is gone, however it went, the nursery ends (its connection does), and its workers are killed with it.
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

from penstock.engines.local.block_codec import encode_error, raise_unready
from penstock.engines.local.transport import Connection
from penstock.errors import EngineError

_PATIENCE_S = 5.0
_LOOK_S = 1.0  # how often a nursery looks whether its run is there, should a fork of the run hold the connection open
_DEATH_SIGNAL = 1  # prctl's number for: send me a signal when my parent dies
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Blocks of large arrays come and go: memory that is given back to the system is faulted in again every time.
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}

Serve = Callable[[socket.socket, int, Any, Any], None]


class ForkServer:
    """The run's side. Safe to use from several threads."""

    def __init__(self, cargo: bytes, threads: int) -> None:
        """Nothing is started before the first fork.

        Args:
            cargo: What workers need, pickled.
            threads: How many threads the libraries of one worker may use.
        """
        self._cargo, self._threads = cargo, threads
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Connection | None = None
        self._guests = 0
        self._aborted = False

    def enter(self) -> None:
        """Note that somebody will want workers."""
        with self._lock:
            self._guests += 1

    def leave(self) -> None:
        """Note that somebody wants none any more; the last one ends the nursery."""
        with self._lock:
            self._guests -= 1
            if not self._guests:
                self._close()

    def fork(self, fd: int, board_fd: int, device: Any) -> int:
        """Make a worker that serves the socket ``fd``; its process id.

        Raises:
            EngineError: processes cannot be started, or cannot load their stages.
        """
        with self._lock:
            for attempt in range(2):
                try:
                    wire = self._started()
                    wire.send(("fork", device))
                    socket.send_fds(wire.sock, [b"."], [fd, board_fd])
                    return int(wire.recv())
                except (EOFError, OSError) as exc:
                    how = self._buried()
                    if attempt or self._aborted:
                        raise EngineError(f"worker processes cannot be started: {how or exc}") from exc
        raise AssertionError("unreachable")

    def ended(self, pid: int) -> int | None:
        """How a worker ended, as ``subprocess`` says it; ``None``: it has not."""
        with self._lock:
            if self._wire is None:
                return -signal.SIGKILL
            try:
                self._wire.send(("ended", pid))
                code: int | None = self._wire.recv()
            except (EOFError, OSError):
                self._buried()
                return -signal.SIGKILL  # with the nursery
            return code

    def wait(self, pid: int, seconds: float) -> int | None:
        """Wait until a worker has ended; ``None``: it has not."""
        until = time.monotonic() + seconds
        pause = 0.0005
        while (code := self.ended(pid)) is None and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return code

    def abort(self) -> None:
        """End it at once, with its workers; whoever waits for it is told, and it is not started again."""
        self._aborted = True
        if (process := self._process) is not None:
            process.kill()

    def _started(self) -> Connection:
        if self._aborted:
            raise EOFError
        if self._wire is not None:
            return self._wire
        here, there = socket.socketpair()
        try:
            self._process = _spawned(there.fileno(), self._threads)
            if self._aborted:  # while it was being started, when there was nothing to kill
                self._process.kill()
        except BaseException:
            here.close()
            raise
        finally:
            there.close()
        wire = self._wire = Connection(here)
        wire.send(self._cargo)
        word, *facts = wire.recv()
        if word == "raise":
            self._close()
            raise_unready(facts[0], "load its stages")
        return wire

    def _buried(self) -> str:
        """Forget a nursery that died; say how it went."""
        process, wire, self._process, self._wire = self._process, self._wire, None, None
        if wire is not None:
            wire.close()
        if process is None:
            return ""
        process.kill()
        code = process.wait()
        return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit status {code}"

    def _close(self) -> None:
        process, wire, self._process, self._wire = self._process, self._wire, None, None
        if wire is not None:
            with suppress(OSError):
                wire.send(("stop", None))
            wire.close()
        if process is not None:
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _spawned(fd: int, threads: int) -> subprocess.Popen[bytes]:
    """A fresh interpreter that sees the modules this one sees, and nothing of its main module."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from penstock.engines.local.process_worker import nursery; nursery({fd}, {os.getpid()})"
    )
    env = {**dict.fromkeys(_THREADS, str(threads)), **_KEPT, **os.environ}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=(fd,),
        env=env,
        start_new_session=True,  # Ctrl-C is the run's to handle
    )


def tend(fd: int, parent: int, serve: Serve) -> None:
    """The nursery's side: load the cargo, then fork workers that ``serve`` until told to stop, or the run is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wire = Connection(socket.socket(fileno=fd))
    try:
        try:
            cargo = pickle.loads(wire.recv())
        except (EOFError, OSError):
            raise
        except BaseException as exc:
            wire.send(("raise", encode_error(exc)))
            return
        wire.send(("ready",))
        gc.collect()
        gc.freeze()  # so that the collector does not copy what workers share
        _tend(wire, parent, cargo, serve)
    except (EOFError, OSError):
        os._exit(1)


def _tend(wire: Connection, parent: int, cargo: Any, serve: Serve) -> None:
    ready = select.poll()
    ready.register(wire.sock, select.POLLIN)
    here = os.getpid()
    while True:
        while not ready.poll(1000 * _LOOK_S):
            if os.getppid() != parent:
                return
        word, about = wire.recv()
        if word == "stop":
            return
        if word == "ended":
            wire.send(_ended(about))
            continue
        _, fds, _, _ = socket.recv_fds(wire.sock, 1, 2)
        pid = os.fork()
        if not pid:
            _become(here, wire, serve, fds, cargo, about)
        for one in fds:
            os.close(one)
        wire.send(pid)


def _ended(pid: int) -> int | None:
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status) if found else None


def _become(nursery: int, wire: Connection, serve: Serve, fds: list[int], cargo: Any, device: Any) -> None:
    """Be a worker, and never come back."""
    code = 1
    try:
        _die_with(nursery)
        wire.close()
        _draw_anew()
        serve(socket.socket(fileno=fds[0]), fds[1], cargo, device)
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


def _die_with(parent: int) -> None:
    """End with the nursery even when it is killed, and whatever this process is in the middle of."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _draw_anew() -> None:
    """Let global generators of workers differ, as those of separate programs do."""
    random.seed()
    np.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(int.from_bytes(os.urandom(7), "little"))
