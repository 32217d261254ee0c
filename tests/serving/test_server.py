"""A server on the network: who may connect, and that malformed, silent and slow clients do not hold it."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as arrow_flight
import pytest

import penstock as ps
from penstock.errors import EngineError, PlanError, StorageError
from penstock.serving import Server
from penstock.testing import numbers

FULL = os.environ.get("PENSTOCK_FULL") == "1"
TOKEN = "a-token-of-enough-characters"
MALFORMED = 1000 if FULL else 250
SOAK_S, SOAKED = (600.0, 3000) if FULL else (0.5, 1000)


@pytest.fixture
def server() -> Iterator[Server]:
    with ps.serve(numbers((400,)).shuffle().map(dict).batched(4), "grpc://127.0.0.1:0", TOKEN) as running:
        yield running


def _samples(feed: Any) -> list[int]:
    with ExitStack() as stack:
        stack.callback(feed.close)
        return [x for batch in feed for x in batch["x"].tolist()]


def _options(token: str = TOKEN) -> Any:
    return arrow_flight.FlightCallOptions(timeout=20, headers=[(b"authorization", f"Bearer {token}".encode())])


def _request(**changes: Any) -> dict[str, Any]:
    ds = numbers((400,)).shuffle().map(dict).batched(4)
    cut = {"rank": 0, "world": 1, "kind": "range", "uneven": "keep"}
    request = {"v": 1, "cut": cut, "state": ds.loader().state_dict(), "part": [0, 1], "traced": False}
    return {**request, **changes}


def _malformed(random: Random) -> bytes:
    """Return a request that has to be refused."""
    good = json.dumps(_request()).encode()
    state = _request()["state"]
    huge = 1 << 62
    choices = [
        lambda: good[: random.randrange(1, len(good) - 1)],
        lambda: random.randbytes(random.randrange(2000)),
        lambda: json.dumps(_request(v=2)).encode(),
        lambda: json.dumps(_request(part=[0, huge])).encode(),
        lambda: json.dumps(_request(part=[5, 2])).encode(),
        lambda: json.dumps(_request(cut={"rank": huge, "world": 2, "kind": "range", "uneven": "keep"})).encode(),
        lambda: json.dumps(_request(state={**state, "left": [[0, huge, 1, 0]]})).encode(),
        lambda: json.dumps(
            _request(state={**state, "left": [[0, 4, 1, 0]] * random.randrange(9), "plan": "x"})
        ).encode(),
        lambda: json.dumps(_request(state=None, repeated=[[huge, huge + 1, 1, 0]], epoch=0)).encode(),
        lambda: json.dumps([_request()]).encode(),
        lambda: b"[" * 100_000,
        lambda: b"x" * 5_000_000 if random.random() < 0.05 else b"{}",
        lambda: bytes(byte ^ (random.random() < 0.02) * random.randrange(1, 255) for byte in good[:-2]),
    ]
    return random.choice(choices)()


def _memory() -> int:
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)  # what other tests freed is not counted
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_malformed_requests_are_refused_while_others_are_served(server: Server) -> None:
    random = Random(0)
    client = arrow_flight.FlightClient(server.address)
    before = 0
    for number in range(MALFORMED):
        if number == MALFORMED // 4:
            before = _memory()
        data, token = _malformed(random), TOKEN if number % 10 else "another-token-of-that-length"
        with pytest.raises((arrow_flight.FlightError, OSError, ValueError)):
            client.do_get(arrow_flight.Ticket(data), _options(token)).read_chunk()
        kind = random.choice(["epoch", "position", "restore", "identities", "dropped", "session", "x"])
        with suppress(arrow_flight.FlightError, OSError, ValueError):  # it may be a question that has an answer
            list(client.do_action(arrow_flight.Action(kind, data), _options(token)))
        if number % 100 == 0:
            assert sorted(_samples(ps.connect(server.address, TOKEN))) == list(range(400))
    assert _memory() - before < 50_000_000
    client.close()
    assert sorted(_samples(ps.connect(server.address, TOKEN))) == list(range(400))


def test_connections_that_say_nothing_do_not_hold_the_server(server: Server) -> None:
    port = int(server.address.rpartition(":")[2])
    before = _memory()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    try:
        for sock in silent[::3]:
            sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: Random(sock.fileno()).randrange(24)])
        assert sorted(_samples(ps.connect(server.address, TOKEN))) == list(range(400))
        assert _memory() - before < 100_000_000
    finally:
        for sock in silent:
            sock.close()


def test_a_consumer_that_takes_nothing_costs_a_bounded_number_of_bytes() -> None:
    ds = numbers((2000,)).map(lambda sample: {"x": sample["x"], "data": np.zeros(100_000, np.uint8)}).batched(4)
    with ps.serve(ds, "grpc://127.0.0.1:0", ready="2MB", idle_s=1) as server:
        client = arrow_flight.FlightClient(server.address)
        cut = {"rank": 0, "world": 1, "kind": "range", "uneven": "keep"}
        request = {"v": 1, "cut": cut, "state": ds.loader().state_dict(), "part": [0, 1]}
        readers = [client.do_get(arrow_flight.Ticket(json.dumps(request).encode())) for _ in range(3)]
        for reader in readers:
            reader.read_chunk()
        deadline = time.monotonic() + 60
        while server._pipeline.runs and time.monotonic() < deadline:
            assert all(consumer["ready_bytes"] <= 2_400_000 for consumer in server.consumers())
            time.sleep(0.01)
        assert server._pipeline.runs == 0  # they are given up, and can ask again
        for reader in readers:
            reader.cancel()
        client.close()


@pytest.mark.parametrize("token", [None, "another-token-of-that-length", TOKEN + "x"])
def test_without_the_token_a_consumer_is_refused(server: Server, token: str | None) -> None:
    with pytest.raises(PlanError, match="does not accept the token") as error:
        ps.connect(server.address, token, timeout_s=5)
    assert TOKEN not in str(error.value)


def test_other_methods_need_the_token_too_and_do_nothing(server: Server) -> None:
    client = arrow_flight.FlightClient(server.address)
    for options in (None, _options()):
        with pytest.raises((arrow_flight.FlightError, NotImplementedError, OSError)):
            list(client.list_flights(options=options))
        with pytest.raises((arrow_flight.FlightError, NotImplementedError, OSError)):
            client.get_flight_info(arrow_flight.FlightDescriptor.for_path("/etc/passwd"), options)
    client.close()


def test_an_address_that_others_can_reach_needs_a_token_and_encryption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    ds = numbers((9,)).batched(2)
    with pytest.raises(PlanError, match="must show a token"):
        ps.serve(ds, "grpc://0.0.0.0:0")
    with pytest.raises(PlanError, match="unencrypted"):
        ps.serve(ds, "grpc://0.0.0.0:0", TOKEN)
    with ps.serve(ds, "grpc://0.0.0.0:0", TOKEN, insecure=True) as server:
        port = server.address.rpartition(":")[2]
        assert len(_samples(ps.connect(f"grpc://127.0.0.1:{port}", TOKEN))) == 9
    with pytest.raises(PlanError, match="unencrypted"):
        ps.connect("grpc://192.0.2.1:7070", TOKEN, timeout_s=0.1)
    with pytest.raises(PlanError, match="at least 16 visible ASCII characters"):
        ps.serve(ds, "grpc://127.0.0.1:0", "short")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    for name in ("server", "consumer"):
        files = ["-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem"]
        subprocess.run([*command, *files], check=True, capture_output=True)
    return folder


def test_connections_are_encrypted_with_certificates(certificates: Path) -> None:
    ds = numbers((9,)).batched(2)
    files: Any = {"certificate": certificates / "server.pem", "key": certificates / "server.key"}
    with ps.serve(ds, "grpc+tls://localhost:0", TOKEN, **files) as server:
        assert server.address.startswith("grpc+tls://")
        assert len(_samples(ps.connect(server.address, TOKEN, ca=certificates / "server.pem"))) == 9
        with pytest.raises(EngineError, match="no server answered"):
            ps.connect(server.address, TOKEN, ca=certificates / "consumer.pem", timeout_s=0.5)
    with ps.serve(ds, "grpc+tls://localhost:0", client_ca=certificates / "consumer.pem", **files) as server:
        own: Any = {"certificate": certificates / "consumer.pem", "key": certificates / "consumer.key"}
        assert len(_samples(ps.connect(server.address, ca=certificates / "server.pem", **own))) == 9
        with pytest.raises(EngineError, match="no server answered"):
            ps.connect(server.address, ca=certificates / "server.pem", timeout_s=0.5)
    with pytest.raises(StorageError, match="the private key cannot be read"):
        ps.serve(ds, "grpc+tls://localhost:0", certificate=files["certificate"], key=certificates / "none.key")
    with pytest.raises(PlanError, match="give both"):
        ps.serve(ds, "grpc+tls://localhost:0", certificate=files["certificate"])


def test_more_consumers_than_the_limit_use_another_server() -> None:
    ds = numbers((200,)).filter(lambda sample: True).batched(2)
    with ps.serve(ds, "grpc://127.0.0.1:0", max_consumers=1, ready=1) as a, ps.serve(ds, "grpc://127.0.0.1:0") as b:
        feeds = [ps.connect([a.address, b.address]) for _ in range(2)]
        iterators = [iter(feed) for feed in feeds]
        seen = [[x for batch in iterator for x in batch["x"].tolist()] for iterator in iterators]
        assert seen == [list(range(200))] * 2
        for feed in feeds:
            feed.close()


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EngineError, match="cannot listen at"):
            ps.serve(numbers((9,)), address)
    refused = pytest.raises(EngineError, match="cannot listen at")
    with ps.serve(numbers((9,)), "grpc://127.0.0.1:0") as server, refused:
        ps.serve(numbers((9,)), server.address)


def test_a_dataset_that_cannot_be_read_or_served_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        ps.serve(ps.read_tar(str(tmp_path / "none.tar")), "grpc://127.0.0.1:0")
    with pytest.raises(PlanError, match="rank and world"):
        ps.serve(numbers((9,)).shard(0, 2), "grpc://127.0.0.1:0")
    with pytest.raises(PlanError, match="takes a dataset"):
        ps.serve([1, 2], "grpc://127.0.0.1:0")  # type: ignore[arg-type]


def test_closing_ends_all_threads_and_a_second_time_does_nothing() -> None:
    before = threading.active_count()
    server = ps.serve(numbers((4000,)).map(dict).batched(4), "grpc://127.0.0.1:0", health="127.0.0.1:0")
    feed = ps.connect(server.address)
    next(iter(feed))
    feed.close()
    server.close()
    server.close()
    assert server.wait(0)
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before


def test_two_consumers_for_a_long_time_leave_memory_descriptors_and_threads_as_they_are() -> None:
    ds = (
        numbers((SOAKED,))
        .shuffle()
        .map(lambda sample: {"x": sample["x"], "data": np.zeros(5_000, np.uint8)})
        .batched(16)
    )
    with ps.serve(ds, "grpc://127.0.0.1:0") as server:
        feeds = [ps.connect(server.address, rank=rank, world=2) for rank in range(2)]

        def consume(feed: Any) -> None:
            for _ in feed:
                pass

        def epoch() -> tuple[int, int, int]:
            threads = [threading.Thread(target=consume, args=(feed,)) for feed in feeds]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return _memory(), len(os.listdir("/proc/self/fd")), threading.active_count()

        for _ in range(3):
            first = epoch()
        end = time.monotonic() + SOAK_S
        while time.monotonic() < end:
            last = epoch()
        for feed in feeds:
            feed.close()
    assert last[0] - first[0] < 60_000_000
    assert last[1] - first[1] <= 6
    assert last[2] - first[2] <= 6
