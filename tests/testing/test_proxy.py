from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.testing.proxy import Proxy
from penstock.testing.servers import plain_server


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    (tmp_path / "a").write_bytes(b"0123456789")
    with plain_server(tmp_path) as port, Proxy("127.0.0.1", port) as proxy:
        yield proxy


def _get(proxy: Proxy) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{proxy.port}/a", timeout=5) as answer:
        return bytes(answer.read())


def test_without_rules_nothing_is_touched(proxy: Proxy) -> None:
    assert _get(proxy) == b"0123456789"
    assert proxy.requests[0].headers["Host"] == f"127.0.0.1:{proxy.port}"


def test_a_rule_counts_its_requests(proxy: Proxy) -> None:
    proxy.rule("GET /a", times=1, skip=1, status=418)
    assert _get(proxy) == b"0123456789"
    with pytest.raises(OSError, match="418"):
        _get(proxy)
    assert _get(proxy) == b"0123456789"


def test_a_rule_that_does_not_match_does_nothing(proxy: Proxy) -> None:
    proxy.rule("PUT", status=418)
    assert _get(proxy) == b"0123456789"


def test_a_fault_nobody_knows_is_refused(proxy: Proxy) -> None:
    with pytest.raises(TypeError):
        proxy.rule(explode=True)


def test_closing_ends_what_hangs(proxy: Proxy) -> None:
    proxy.rule(hang=True)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
        client.sendall(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
        threading.Timer(0.2, proxy.close).start()
        assert client.recv(100) == b""
