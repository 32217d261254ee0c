"""A fork server forks workers, reports how they end, and ends with its last user."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from penstock.blobs.content import memory_file
from penstock.dataset import Dataset, from_items
from penstock.engines import Program
from penstock.engines.local.fork_server import ForkServer
from penstock.engines.local.heartbeat import HEARTBEAT_BYTES
from penstock.engines.local.transport import Connection, dumps
from penstock.errors import EngineError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

EMPTY = dumps(([], []))  # no stages, no contexts
TIMEOUT_S = 20.0


def fork(server: ForkServer) -> tuple[int, Connection]:
    """Fork a worker; return its process id and this end of its connection."""
    own_sock, worker_sock = socket.socketpair()
    heartbeat_fd = memory_file(HEARTBEAT_BYTES)
    try:
        pid = server.fork(worker_sock.fileno(), heartbeat_fd, "cpu")
    except BaseException:
        own_sock.close()
        raise
    finally:
        worker_sock.close()
        os.close(heartbeat_fd)
    return pid, Connection(own_sock)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer(EMPTY, 1)
    server.acquire()
    yield server
    server.release()


def test_a_worker_gets_ready_and_ends_on_request(server: ForkServer) -> None:
    pid, connection = fork(server)
    assert connection.recv() == ("ready",)
    assert server.exit_code(pid) is None
    connection.send(("stop", 0, None))
    assert server.wait(pid, TIMEOUT_S) == 0
    connection.close()


def test_a_worker_ends_when_its_run_closes_the_connection(server: ForkServer) -> None:
    pid, connection = fork(server)
    assert connection.recv() == ("ready",)
    connection.close()
    assert server.wait(pid, TIMEOUT_S) == 1


def test_the_exit_code_of_a_killed_worker_is_its_signal(server: ForkServer) -> None:
    pid, connection = fork(server)
    os.kill(pid, signal.SIGKILL)
    assert server.wait(pid, TIMEOUT_S) == -signal.SIGKILL
    connection.close()


def test_workers_are_forked_from_one_process_that_is_not_the_run(server: ForkServer) -> None:
    (first, one), (second, two) = fork(server), fork(server)
    assert parent(first) == parent(second) != os.getpid()
    assert parent(parent(first)) == os.getpid()
    for connection in (one, two):
        connection.close()


def test_a_killed_fork_server_ends_its_workers_and_is_started_again(server: ForkServer) -> None:
    pid, connection = fork(server)
    os.kill(parent(pid), signal.SIGKILL)
    assert is_gone(pid)
    assert server.exit_code(pid) == -signal.SIGKILL
    again, other = fork(server)
    assert other.recv() == ("ready",)
    assert again != pid
    for one in (connection, other):
        one.close()


def test_the_last_user_ends_the_fork_server() -> None:
    server = ForkServer(EMPTY, 1)
    server.acquire()
    server.acquire()
    pid, connection = fork(server)
    process = parent(pid)
    server.release()
    assert Path(f"/proc/{process}").exists()
    server.release()
    assert is_gone(process)
    assert is_gone(pid)
    connection.close()


def test_an_aborted_fork_server_is_not_started_again(server: ForkServer) -> None:
    pid, connection = fork(server)
    server.abort()
    assert is_gone(pid)
    with pytest.raises(EngineError, match="worker processes cannot be started"):
        fork(server)
    connection.close()


class LoadsAsError:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_a_payload_that_cannot_be_loaded_is_an_error() -> None:
    server = ForkServer(dumps(LoadsAsError()), 1)
    server.acquire()
    with pytest.raises(EngineError, match=r"a worker process cannot load its stages: ValueError: .*not a number"):
        fork(server)
    server.release()


class FailsInConstructor:
    def __init__(self) -> None:
        raise ValueError("no weights found")

    def __call__(self, batch: Any) -> Any:
        return batch


def payload(ds: Dataset) -> bytes:
    program = Program(ds.plan)
    (segment,) = program.levels[0].segments
    contexts = program.contexts(segment, 0)
    return dumps((segment.stages[1:], contexts[1:]))  # without the reading stage


def test_a_worker_reports_that_it_cannot_construct_its_functions() -> None:
    server = ForkServer(payload(from_items([{"x": 1}]).map_batches(FailsInConstructor, on="processes")), 1)
    server.acquire()
    _, connection = fork(server)
    kind, error = connection.recv()
    assert kind == "raise"
    assert "no weights found" in error[0][1]
    connection.close()
    server.release()
