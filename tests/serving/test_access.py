from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PlanError, StorageError
from penstock.serving.access import Address, check_connect, find_token, parse_address

TOKEN = "a-token-of-enough-characters"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    monkeypatch.delenv("PENSTOCK_TOKEN_FILE", raising=False)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("grpc://a:7070", Address("a", 7070)),
        ("127.0.0.1:80", Address("127.0.0.1", 80)),
        ("grpc+tls://host.example", Address("host.example", 7070, tls=True)),
        ("grpc://[::1]:9", Address("::1", 9)),
    ],
)
def test_addresses_are_parsed(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "http://a:1", "grpc://a:x", "grpc://a:99999", "grpc://u:p@a:1", "grpc://a/b", None, 7]
)
def test_what_is_not_an_address_is_refused(text: Any) -> None:
    with pytest.raises(PlanError, match="is not an address"):
        parse_address(text)


def test_a_name_with_several_addresses_stands_for_several_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", ("10.0.0.1", 7070)), (2, 1, 6, "", ("10.0.0.2", 7070)), (2, 1, 6, "", ("10.0.0.1", 7070))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    resolved = parse_address("grpc+tls://feeders:7070").resolved()
    assert [(one.host, one.name, one.tls) for one in resolved] == [
        ("10.0.0.1", "feeders", True),
        ("10.0.0.2", "feeders", True),
    ]


def test_a_token_is_found_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_token(None) is None
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    token = find_token(None)
    assert token is not None
    assert TOKEN not in repr(token)
    assert token.matches(f"Bearer {TOKEN}")
    for wrong in (TOKEN, f"Bearer {TOKEN}x", "Bearer ", "", "\udcff"):
        assert not token.matches(wrong)
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}-2\n")
    path.chmod(0o600)
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(path))
    assert find_token(None) != token
    path.chmod(0o644)
    with pytest.raises(PlanError, match="can be read by every user"):
        find_token(None)
    path.unlink()
    with pytest.raises(StorageError, match="cannot be read"):
        find_token(None)


@pytest.mark.parametrize("token", ["short", "with a space in its middle", "ümläute-are-not-ascii"])
def test_a_weak_token_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(PlanError) as error:
        find_token(token)
    assert token not in str(error.value)


def test_other_machines_are_reached_encrypted_or_explicitly_not() -> None:
    for address in (Address("127.0.0.1", 1), Address("localhost", 1), Address("a", 1, tls=True)):
        check_connect(address, None, insecure=False)
    check_connect(Address("a", 1), None, insecure=True)
    with pytest.raises(PlanError, match="unencrypted"):
        check_connect(Address("a", 1), None, insecure=False)
