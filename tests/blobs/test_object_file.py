"""Objects as files: read while they arrive, and written whole or not at all."""

from __future__ import annotations

import contextlib
import http.server
import io
import secrets
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.blobs.object_file import ObjectReader, ObjectWriter
from penstock.errors import StorageError
from penstock.storage import open_storage
from penstock.testing.servers import http_server


def written(url: str) -> ObjectWriter:
    return ObjectWriter(open_storage(url).put(url))


@pytest.fixture
def url() -> str:
    return f"memory://object-file/{secrets.token_hex(8)}"


def test_an_object_is_read_as_any_file_is(tmp_path: Path) -> None:
    data = bytes(range(256)) * 100_000
    (tmp_path / "a").write_bytes(data)
    with http_server(tmp_path) as port:
        url = f"http://127.0.0.1:{port}/a"
        with ObjectReader(url) as file:
            assert [file.peek(2), file.read(3), file.peek(2), file.read(0)] == [data[:2], data[:3], data[3:5], b""]
            first = file.read1()
            assert data[3:].startswith(first)
            at = 3 + len(first)
            assert file.read(9 << 20) == data[at : at + (9 << 20)]
            assert b"".join(file.chunks()) == data[at + (9 << 20) :]
            assert file.read() == file.read1() == file.peek(1) == b""
        with io.BufferedReader(ObjectReader(url)) as buffered:
            assert buffered.read() == data


def test_an_object_that_cannot_be_read_is_an_error_of_the_first_read(tmp_path: Path) -> None:
    with http_server(tmp_path) as port, ObjectReader(f"http://127.0.0.1:{port}/gone") as file:
        for _ in range(2):
            with pytest.raises(StorageError, match="gone"):
                file.read()


def test_an_object_appears_when_its_file_is_closed(url: str) -> None:
    with written(url) as file:
        assert file.write(b"abc") == 3
        with pytest.raises(StorageError):
            ObjectReader(url).read()
    assert ObjectReader(url).read() == b"abc"


def test_an_object_does_not_appear_after_an_error_nor_if_its_file_is_dropped(url: str) -> None:
    with contextlib.suppress(ZeroDivisionError), written(url) as file:
        file.write(b"%d" % (1 // 0))
    written(url).write(b"abc")
    with pytest.raises(StorageError):
        ObjectReader(url).read()


def test_an_object_that_is_needed_later_is_asked_for_when_the_first_bytes_of_the_other_are_there(
    tmp_path: Path,
) -> None:
    answered, too_early = threading.Event(), []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def do_GET(self) -> None:
            if self.path == "/b" and not answered.is_set():
                too_early.append(self.path)
            super().do_GET()
            if self.path == "/a":
                answered.set()

        def log_message(self, *args: Any) -> None: ...

    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        first, second = (ObjectReader(f"http://127.0.0.1:{server.server_port}/{name}") for name in ("a", "b"))
        first.fetch()
        second.fetch(after=first)
        assert [second.read(), first.read()] == [b"b", b"a"]
        first.close()
        second.close()
        server.shutdown()
    assert not too_early
