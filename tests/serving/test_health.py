from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest

import penstock as ps
from penstock.errors import EngineError
from penstock.serving.access import Address
from penstock.serving.health import MAX_HEALTH_CLIENTS, HealthServer
from penstock.testing import numbers


def _get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, json.loads(exc.read())


def test_a_server_reports_its_health() -> None:
    with ps.serve(numbers((9,)), "grpc://127.0.0.1:0", health="127.0.0.1:0") as server:
        assert server.health_url is not None
        assert _get(server.health_url) == (200, {"status": "serving", "consumers": 0})
        assert _get(server.health_url.replace("/health", "/other"))[0] == 404


def test_a_server_that_ends_is_not_healthy_and_silent_clients_do_not_matter() -> None:
    health = HealthServer(Address("127.0.0.1", 0), lambda: (False, {"status": "ending"}))
    port = int(health.url.split(":")[2].partition("/")[0])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_HEALTH_CLIENTS - 1)]
    assert _get(health.url) == (503, {"status": "ending"})
    for sock in silent:
        sock.close()
    with pytest.raises(EngineError, match="cannot be reported at"):
        HealthServer(Address("127.0.0.1", port), lambda: (True, {}))
    health.close()
