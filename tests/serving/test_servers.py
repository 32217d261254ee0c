from __future__ import annotations

import socket
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.serving.access import Address, parse_address
from penstock.serving.servers import Credentials, RemoteServer, ServerLost, Servers, address_source
from penstock.testing import numbers


def test_addresses_come_from_a_list_a_name_or_a_file(tmp_path: Path) -> None:
    assert address_source(["grpc://127.0.0.1:1", "127.0.0.2:2"])() == [Address("127.0.0.1", 1), Address("127.0.0.2", 2)]
    assert address_source("grpc://127.0.0.1:1")() == [Address("127.0.0.1", 1)]
    listed = tmp_path / "servers"
    source = address_source(str(listed))
    assert source() == []
    listed.write_text("grpc://127.0.0.1:1  # the first\n\n")
    assert source() == [Address("127.0.0.1", 1)]
    assert address_source(f"file:{listed}")() == source()
    for wrong in ([], 7, ["http://x"]):
        with pytest.raises(PlanError):
            address_source(wrong)


def test_a_server_that_failed_is_left_out_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serving.servers.RETRY_S", 0.0)
    with ps.serve(numbers((9,)), "grpc://127.0.0.1:0") as server:
        servers = Servers(address_source([server.address, "grpc://127.0.0.1:9"]), Credentials())
        servers.wait_for_first(20)
        (usable,) = servers.usable()
        assert "127.0.0.1:9 (it cannot be reached: Connection refused)" in servers.problems()
        version = servers.version
        servers.lose(usable, "it was tested")
        assert servers.usable() == []
        assert servers.version != version
        assert (
            servers.call("epoch", cut={"rank": 0, "world": 1, "kind": "range", "uneven": "keep"}, epoch=0)["length"]
            == 9
        )
        assert servers.usable() == [usable]
        servers.close()
    with pytest.raises(ServerLost):
        usable.call("hello", {}, 5)
    usable.disconnect()


def test_a_server_that_does_not_answer_is_named_with_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = RemoteServer(parse_address(f"grpc://127.0.0.1:{silent.getsockname()[1]}"), Credentials())
        with pytest.raises(ServerLost, match="it does not answer"):
            server.call("hello", {}, 0.2)
        server.disconnect()
