from __future__ import annotations

import logging
import os
import pickle
import secrets
import traceback
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.storage import HTTP, Forbidden, NotFound, Retry, expand
from penstock.testing.proxy import Proxy
from penstock.testing.servers import http_server, plain_server
from penstock.testing.storages import DATA

QUICK = Retry(tries=3, base_s=0.02, most_s=0.1, stall_s=20.0, connect_s=20.0)
STORAGE = HTTP(retry=QUICK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "a b.bin").write_bytes(DATA)
    (folder / "a.bin").write_bytes(DATA)
    (folder / "empty").touch()
    return folder


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    with http_server(folder) as port:
        yield port


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[int]:
    with plain_server(folder) as port:
        yield port


@pytest.fixture
def proxy(port: int) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", port) as proxy:
        yield proxy


def test_a_server_with_ranges_is_read_by_ranges(port: int) -> None:
    url = f"http://127.0.0.1:{port}/a%20b.bin"
    info = STORAGE.info(url)
    assert (info.size, info.ranges) == (len(DATA), True)
    assert info.tag is not None
    assert STORAGE.read(url, 100, 4000, tag=info.tag) == DATA[100:4000]
    buffer = memoryview(bytearray(50))
    assert STORAGE.read(url, len(DATA) - 50, len(DATA), into=buffer) is buffer
    assert buffer == DATA[-50:]
    assert b"".join(STORAGE.stream(url)) == DATA


def test_a_server_without_ranges_is_recognised_and_read(plain: int) -> None:
    url = f"http://127.0.0.1:{plain}/a.bin"
    info = STORAGE.info(url)
    assert (info.size, info.ranges) == (len(DATA), False)
    assert STORAGE.read(url, 100, 4000, tag=info.tag) == DATA[100:4000]
    assert b"".join(STORAGE.stream(url)) == DATA
    with pytest.raises(StorageError, match=f"{len(DATA):,} bytes"):
        STORAGE.read(url, 5, len(DATA) + 1)


@pytest.mark.parametrize(("start", "stop"), [(0, len(DATA) + 1), (len(DATA), len(DATA) + 1), (10**6, 10**6 + 5)])
def test_a_range_beyond_the_end_is_an_error(port: int, start: int, stop: int) -> None:
    with pytest.raises(StorageError, match=f"{len(DATA):,} bytes"):
        STORAGE.read(f"http://127.0.0.1:{port}/a.bin", start, stop)


def test_an_empty_object_is_an_object(port: int, plain: int) -> None:
    for url in (f"http://127.0.0.1:{server}/empty" for server in (port, plain)):
        assert STORAGE.info(url).size == 0
        assert list(STORAGE.stream(url)) == []
        assert STORAGE.read(url, 0, 0) == b""


def test_a_missing_object_is_not_found(port: int) -> None:
    for action in (STORAGE.info, lambda url: STORAGE.read(url, 0, 1), lambda url: list(STORAGE.stream(url))):
        with pytest.raises(NotFound, match="no such object"):
            action(f"http://127.0.0.1:{port}/none")


def test_a_status_of_200_with_content_range_is_a_range(proxy: Proxy, port: int) -> None:
    """Some S3 servers answer so; here the proxy changes the status."""
    proxy.rule(times=None, as_status=200)
    url = f"http://127.0.0.1:{proxy.port}/a.bin"
    assert STORAGE.info(url).ranges
    assert STORAGE.read(url, 100, 4000) == DATA[100:4000]


def test_content_with_another_tag_is_refused(folder: Path, port: int) -> None:
    path = folder / "changing"
    path.write_bytes(DATA)
    url = f"http://127.0.0.1:{port}/changing"
    tag = STORAGE.info(url).tag
    path.write_bytes(DATA + b"more")
    with pytest.raises(StorageError, match="changed while it was being read"):
        STORAGE.read(url, 3, 9, tag=tag)


def test_redirects_are_followed_without_sending_secrets_to_other_hosts(proxy: Proxy, port: int) -> None:
    with Proxy("127.0.0.1", port) as other:
        target = f"http://127.0.0.1:{other.port}/a.bin"
        proxy.rule("GET /moved", times=None, status=302, headers={"Location": target})
        proxy.rule("GET /here", times=None, status=307, headers={"Location": "/a.bin"})
        storage = HTTP(headers=(("X-Token", "never-to-be-seen"),), retry=QUICK)
        assert storage.read(f"http://u:never-to-be-seen@127.0.0.1:{proxy.port}/moved", 5, 50) == DATA[5:50]
        assert storage.read(f"http://127.0.0.1:{proxy.port}/here", 5, 50) == DATA[5:50]
        assert "X-Token" in proxy.requests[-1].headers
        assert {"Authorization", "X-Token"} <= set(proxy.requests[0].headers)
        assert not {"Authorization", "X-Token"} & set(other.requests[0].headers)


def test_a_redirect_loop_is_an_error(proxy: Proxy) -> None:
    proxy.rule(times=None, status=302, headers={"Location": "/a.bin"})
    with pytest.raises(StorageError, match="redirects more than 5 times"):
        STORAGE.info(f"http://127.0.0.1:{proxy.port}/a.bin")


def test_user_and_password_are_sent_but_not_shown(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = secrets.token_hex()
    with http_server(folder, "--user", "me", "--pass", secret) as port:
        address = f"127.0.0.1:{port}/a.bin?token={secret}"
        assert STORAGE.read(f"http://me:{secret}@{address}", 0, 9) == DATA[:9]
        with pytest.raises(StorageError, match="the user or password is missing or wrong") as caught:
            STORAGE.read(f"http://me:{secret}-not@{address}", 0, 9)
        with pytest.raises(StorageError, match="the user or password is missing or wrong"):
            STORAGE.info(f"http://{address}")
    assert caught.value.url == f"http://127.0.0.1:{port}/a.bin?..."
    storage = HTTP(headers=(("X", secret),))
    assert pickle.loads(pickle.dumps(storage)) == storage
    output = caplog.text + repr(caught.value) + "".join(traceback.format_exception(caught.value)) + repr(storage)
    assert "DEBUG" in output  # logging was on
    assert secret not in output
    assert b64encode(f"me:{secret}".encode()).decode() not in output


def test_an_object_is_not_a_file_of_this_machine() -> None:
    assert STORAGE.local_path("http://127.0.0.1/a") is None


def test_over_http_braces_are_expanded_but_globs_and_folders_are_not() -> None:
    assert expand(["http://host/a-{0..1}.tar?x=*", "http://host/folder"], [".tar"]) == [
        "http://host/a-0.tar?x=*", "http://host/a-1.tar?x=*", "http://host/folder",
    ]  # fmt: skip


def test_a_server_without_tls_is_an_error(port: int) -> None:
    with pytest.raises(StorageError, match="connection broke"):
        STORAGE.info(f"https://127.0.0.1:{port}/a.bin")


def test_a_missing_server_and_a_malformed_url_are_errors() -> None:
    with pytest.raises(StorageError, match="refuses connections"):
        STORAGE.info("http://127.0.0.1:1/a")
    with pytest.raises(StorageError, match="not the URL of a server"):
        STORAGE.info("http://[half/a")


def test_a_forked_child_makes_its_own_connections(proxy: Proxy) -> None:
    url = f"http://127.0.0.1:{proxy.port}/a.bin"
    assert STORAGE.read(url, 0, 10) == DATA[:10]
    child = os.fork()
    if not child:
        correct = all(STORAGE.read(url, at, at + 100) == DATA[at : at + 100] for at in range(0, 3000, 100))
        os._exit(0 if correct else 1)
    for at in range(0, 3000, 100):
        assert STORAGE.read(url, at, at + 50) == DATA[at : at + 50]
    assert os.waitpid(child, 0)[1] == 0


def test_status_403_is_forbidden(proxy: Proxy) -> None:
    proxy.rule("/a.bin", times=None, status=403)
    url = f"http://127.0.0.1:{proxy.port}/a.bin"
    with pytest.raises(Forbidden, match="403"):
        STORAGE.info(url)


def test_info_reuses_its_connection(proxy: Proxy) -> None:
    for _ in range(5):
        assert STORAGE.info(f"http://127.0.0.1:{proxy.port}/a.bin").size == len(DATA)
    assert proxy.accepted == 1
