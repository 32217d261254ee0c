"""Servers that are killed, restarted, cut off, hang or come back: each sample is delivered exactly once."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

import penstock as ps
from penstock.testing import numbers

FULL = os.environ.get("PENSTOCK_FULL") == "1"
KILLS = 20 if FULL else 2
PARTITIONS_S = (5.0, 60.0) if FULL else (2.0,)
SAMPLES = 6000 if FULL else 1000


def _program(folder: Path, samples: int, stages: str = "") -> str:
    text = f"""
        import time
        from penstock.testing import numbers

        def slow(sample):
            time.sleep(0.002)
            return sample

        ds = numbers(({samples},)).shuffle().map(slow, workers=2){stages}.batched(5)
    """
    (folder / "program.py").write_text(textwrap.dedent(text))
    return f"{folder / 'program.py'}:ds"


class ServerProcess:
    """``penstock serve`` in a process that can be killed and started again at the same address."""

    def __init__(self, python: str, program: str) -> None:
        self._python, self._program = python, program
        self.address = ""
        self.start(0)

    def start(self, port: int) -> None:
        command = [self._python, "-m", "penstock", "serve", self._program, "--listen", f"127.0.0.1:{port}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        found = re.search(r"serving at (\S+:(\d+)),", self.process.stdout.readline())
        assert found is not None
        self.address, self.port = found[1], int(found[2])

    def end(self, kind: signal.Signals = signal.SIGRTMIN) -> int:
        """Send a signal, and wait for the end; SIGRTMIN kills."""
        self.process.send_signal(kind)
        code = self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


@contextmanager
def processes(python: str, program: str, count: int) -> Iterator[list[ServerProcess]]:
    servers: list[ServerProcess] = []
    try:
        servers += [ServerProcess(python, program) for _ in range(count)]
        yield servers
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.end()


class DroppingProxy:
    """Forwards connections to a server; while ``dropping`` is set, what arrives is neither forwarded nor refused."""

    def __init__(self, port: int) -> None:
        self._target, self.dropping = port, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"
        self._closed = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for source, target in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._forward, args=(source, target), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while self.dropping.is_set() and not self._closed.is_set():
                    time.sleep(0.02)
                target.sendall(data)
        for side in (source, target):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed.set()
        for side in (self._listener, *self._sockets):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()
        for thread in self._threads:
            thread.join(10)


def _consume(feed: Any, at: dict[int, Callable[[], object]]) -> list[int]:
    """Return the samples of an epoch; call a function after each batch that ``at`` names."""
    seen: list[int] = []
    for number, batch in enumerate(feed):
        seen += batch["x"].tolist()
        if number in at:
            at[number]()
    return seen


def _check_ledger(folder: Path) -> None:
    proof = ps.ledger(folder).verify()
    assert proof.ok, proof
    assert proof.finished


@pytest.mark.parametrize("stages", ["", ".filter(lambda sample: True)"] if FULL else [""])
def test_servers_killed_at_random_moments_lose_and_repeat_nothing(
    stages: str, tmp_path: Path, warm_python: str
) -> None:
    program = _program(tmp_path, SAMPLES, stages)
    random = Random(len(stages))
    moments = sorted(random.sample(range(5, SAMPLES // 5 - 5), KILLS))
    with processes(warm_python, program, 2) as servers:
        feed = ps.connect([server.address for server in servers], ledger=tmp_path / "ledger")
        want = list(numbers((SAMPLES,)).shuffle().epoch(0))

        def restart(server: ServerProcess) -> None:
            server.end()
            server.start(server.port)

        seen = _consume(feed, {moment: lambda: restart(random.choice(servers)) for moment in moments})
        feed.close()
    assert seen == [sample["x"] for sample in want]
    _check_ledger(tmp_path / "ledger")


def test_all_servers_killed_and_restarted_while_the_consumer_says_what_it_waits_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, warm_python: str
) -> None:
    monkeypatch.setattr("penstock.serving.servers.SAY_S", 0.2)
    with processes(warm_python, _program(tmp_path, 3000), 2) as servers, caplog.at_level(logging.WARNING, "penstock"):
        feed = ps.connect([server.address for server in servers], ledger=tmp_path / "ledger")
        restarts: list[threading.Thread] = []

        def kill_all() -> None:
            for server in servers:
                server.end()
            said_by = time.monotonic() + 60  # the consumer asks for nothing meanwhile
            while caplog.text.count("the connection is lost") < 2:
                assert time.monotonic() < said_by, caplog.text
                time.sleep(0.05)

            def start_again() -> None:
                deadline = time.monotonic() + 60
                while "waiting for a server: grpc://" not in caplog.text and time.monotonic() < deadline:
                    time.sleep(0.05)
                for server in servers:
                    server.start(server.port)

            restarts.append(threading.Thread(target=start_again))
            restarts[0].start()

        seen = _consume(feed, {30: kill_all})
        restarts[0].join()
        feed.close()
    assert sorted(seen) == list(range(3000))
    assert "waiting for a server: grpc://127.0.0.1:" in caplog.text
    _check_ledger(tmp_path / "ledger")


@pytest.mark.parametrize("seconds", PARTITIONS_S)
@pytest.mark.parametrize("cut_off", [1, 2])
def test_a_partition_is_survived(seconds: float, cut_off: int, tmp_path: Path) -> None:
    def slow(sample: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.004)
        return sample

    ds = numbers((900,)).shuffle().map(slow, workers=1).batched(5)
    with ExitStack() as stack:
        servers = [stack.enter_context(ps.serve(ds, "grpc://127.0.0.1:0")) for _ in range(2)]
        proxies = [DroppingProxy(int(server.address.rpartition(":")[2])) for server in servers]
        for proxy in proxies:
            stack.callback(proxy.close)
        addresses = [proxy.address for proxy in proxies]
        feed = ps.connect(addresses, ledger=tmp_path, silence_s=1.5)

        def cut() -> None:
            for proxy in proxies[:cut_off]:
                proxy.dropping.set()

            def clear() -> None:
                for proxy in proxies:
                    proxy.dropping.clear()

            heal = threading.Timer(seconds, clear)
            heal.start()
            stack.callback(heal.join)

        seen = _consume(feed, {20: cut})
        feed.close()
    assert sorted(seen) == list(range(900))
    _check_ledger(tmp_path)


def test_a_server_that_ends_in_order_passes_its_consumers_on(tmp_path: Path, warm_python: str) -> None:
    with processes(warm_python, _program(tmp_path, 400), 2) as servers:
        feed = ps.connect([server.address for server in servers], ledger=tmp_path / "ledger")
        codes: list[int] = []
        seen = _consume(feed, {10: lambda: codes.append(servers[0].end(signal.SIGTERM))})
        feed.close()
    assert codes == [0]
    assert sorted(seen) == list(range(400))
    _check_ledger(tmp_path / "ledger")


def test_new_servers_in_a_file_are_used_and_those_that_left_are_not(tmp_path: Path) -> None:
    ds = numbers((4000,)).shuffle().map(dict).batched(5)
    listed = tmp_path / "servers.txt"
    with ps.serve(ds, "grpc://127.0.0.1:0") as a, ps.serve(ds, "grpc://127.0.0.1:0") as b:
        listed.write_text(f"# the servers\n{a.address}\n")
        feed = ps.connect(listed)
        seen: list[int] = []
        deadline = time.monotonic() + 60
        for number, batch in enumerate(feed):
            seen += batch["x"].tolist()
            if number == 10:
                listed.write_text(f"{b.address}\n")
            while number > 10 and feed.servers != [b.address] and time.monotonic() < deadline:
                time.sleep(0.02)
        assert feed.servers == [b.address]
        feed.close()
    assert seen == [sample["x"] for sample in numbers((4000,)).shuffle().epoch(0)]


def test_a_consumer_that_pauses_longer_than_a_server_waits_continues_exactly() -> None:
    ds = numbers((300,)).shuffle().map(dict).batched(5)
    with ps.serve(ds, "grpc://127.0.0.1:0", idle_s=0.1, ready=1) as server:
        feed = ps.connect(server.address)
        seen = _consume(feed, {4: lambda: _wait_for_idle(server)})
        feed.close()
    assert seen == [sample["x"] for sample in numbers((300,)).shuffle().epoch(0)]


def _wait_for_idle(server: Any) -> None:
    deadline = time.monotonic() + 60
    while server._pipeline.runs and time.monotonic() < deadline:
        time.sleep(0.02)
