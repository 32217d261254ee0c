"""The proxy forwards requests unchanged, except for the faults that its rules inject."""

from __future__ import annotations

import http.client
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
    with urllib.request.urlopen(f"http://127.0.0.1:{proxy.port}/a", timeout=120) as response:
        return bytes(response.read())


def test_without_rules_requests_are_forwarded_unchanged(proxy: Proxy) -> None:
    assert _get(proxy) == b"0123456789"
    assert proxy.requests[0].headers["Host"] == f"127.0.0.1:{proxy.port}"


def test_a_rule_applies_to_the_given_number_of_requests(proxy: Proxy) -> None:
    proxy.rule("GET /a", times=1, skip=1, status=418)
    assert _get(proxy) == b"0123456789"
    with pytest.raises(OSError, match="418"):
        _get(proxy)
    assert _get(proxy) == b"0123456789"


def test_a_rule_that_does_not_match_has_no_effect(proxy: Proxy) -> None:
    proxy.rule("PUT", status=418)
    assert _get(proxy) == b"0123456789"


def test_an_unknown_fault_is_refused(proxy: Proxy) -> None:
    with pytest.raises(TypeError):
        proxy.rule(explode=True)


def test_closing_ends_a_request_that_hangs(proxy: Proxy) -> None:
    proxy.rule(hang=True)
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=120) as client:
        client.sendall(b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n")
        threading.Timer(0.2, proxy.close).start()
        assert client.recv(100) == b""


def test_a_body_can_be_cut_short(proxy: Proxy) -> None:
    proxy.rule(truncate_after=4)
    with pytest.raises(http.client.IncompleteRead) as caught:
        _get(proxy)
    assert caught.value.partial == b"0123"


def test_headers_and_status_can_be_replaced(proxy: Proxy) -> None:
    proxy.rule(headers={"Last-Modified": None, "X-Fault": "yes"}, as_status=203)
    with urllib.request.urlopen(f"http://127.0.0.1:{proxy.port}/a", timeout=120) as response:
        assert (response.status, response.headers["X-Fault"], response.headers["Last-Modified"]) == (203, "yes", None)


def test_a_lost_response_was_still_requested(proxy: Proxy) -> None:
    proxy.rule(deaf=True)
    with pytest.raises(OSError, match="reset"):
        _get(proxy)
    assert [request.path for request in proxy.requests] == ["/a"]
    assert _get(proxy) == b"0123456789"
