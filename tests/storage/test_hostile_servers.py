"""Servers that lie: what they claim is bounded by what they send, and their headers raise no raw errors."""

from __future__ import annotations

import io
import tarfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.blobs import content, draft
from penstock.errors import DataError, StorageError
from penstock.formats.tar import ShardWriter
from penstock.storage import HTTP, Retry

ONCE = HTTP(retry=Retry(tries=1, stall_s=5))
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def server(answers: dict[str, Answer]) -> Iterator[str]:
    """Serve answers by path and yield the server's URL; other paths are not found."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                answers.get(self.path, not_found)(self)
            except OSError:  # the client has disconnected
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_address[1]}"
    finally:
        served.shutdown()
        served.server_close()
        thread.join()


def not_found(handler: BaseHTTPRequestHandler) -> None:
    handler.send_error(404)


def reply(status: int, body: bytes = b"", **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def endless(piece: bytes) -> Answer:
    """An answer without a length that never ends."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(piece)

    return answer


@contextmanager
def memory_below(max_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < max_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "answer",
    [
        reply(503, Retry_After="inf"),
        reply(503, Retry_After="nan"),
        reply(503, Retry_After="9" * 5000),
        reply(503, Retry_After=f"Mon, 01 Jan {10**20} 00:00:00 GMT"),
        reply(503, Retry_After=f"Mon, 01 Jan 2024 00:00:00 +{10**20}"),
        reply(503, Retry_After="\xb2"),
        reply(302, Location="http://[::1"),
        reply(302, Location="http://host:99999999/x"),
        reply(302, Location="//[x]/"),
        reply(206, b"x", Content_Range="bytes 0-0/" + "9" * 5000),
        reply(206, b"x", Content_Range="bytes 0-" + "9" * 5000 + "/*"),
        reply(416, Content_Range="bytes */\xb2"),
    ],
)
def test_a_malformed_header_is_a_storage_error(answer: Answer) -> None:
    with server({"/x": answer}) as url:
        with pytest.raises(StorageError):
            b"".join(ONCE.stream(f"{url}/x"))
        with suppress(StorageError):
            ONCE.info(f"{url}/x")


@pytest.mark.parametrize("length", ["\xb2", "9" * 5000, "-1", "x"])
def test_a_malformed_length_is_no_length_or_a_storage_error(length: str) -> None:
    with server({"/x": reply(200, b"abc", Content_Length=length)}) as url, suppress(StorageError):
        assert b"".join(ONCE.stream(f"{url}/x")) in (b"abc", b"")


def shard_of(tmp_path: Path) -> tuple[bytes, bytes]:
    """The bytes of a small shard and of its index."""
    with ShardWriter(tmp_path / "real") as writer:
        for number in range(5):
            writer.write({"__key__": f"k{number}", "txt": b"x" * 100})
    path = tmp_path / "real" / "shard-000000.tar"
    return path.read_bytes(), Path(f"{path}.index").read_bytes()


def test_a_size_that_a_server_claims_allocates_nothing(tmp_path: Path) -> None:
    data, _ = shard_of(tmp_path)

    def claims(handler: BaseHTTPRequestHandler) -> None:
        start = int(handler.headers["Range"].removeprefix("bytes=").partition("-")[0])
        stop = min(int(handler.headers["Range"].rpartition("-")[2]) + 1, len(data))
        if start >= len(data):
            handler.send_error(500)
            return
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{10**18 - 1}")
        handler.send_header("Content-Length", str(stop - start))
        handler.end_headers()
        handler.wfile.write(data[start:stop])

    with server({"/a.tar": claims}) as url, memory_below(200 << 20), pytest.raises(StorageError):
        list(ps.read_tar(f"{url}/a.tar", storage=ONCE))


def test_an_endless_index_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "MAX_OBJECT", 1 << 20)
    data, _ = shard_of(tmp_path)
    with server({"/a.tar.index": endless(bytes(1 << 16)), "/a.tar": reply(200, data)}) as url:
        assert len(list(ps.read_tar(f"{url}/a.tar", storage=ONCE))) == 5


def test_an_endless_manifest_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "MAX_OBJECT", 1 << 20)
    with server({"/d/manifest.json": endless(b" " * (1 << 16))}) as url, pytest.raises(DataError, match="too many"):
        list(ps.read_tar(f"{url}/d", storage=ONCE))


@pytest.mark.parametrize("read", [ps.read_tar, ps.read_json])
def test_an_endless_file_ends_before_it_fills_the_disk(
    read: Callable[..., ps.Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "MAX_UNSIZED", 4 << 20)
    with server({"/a.tar": endless(b"{}\n" * 10_000)}) as url, pytest.raises(StorageError, match="declares no size"):
        list(read(f"{url}/a.tar", storage=ONCE))


def test_a_file_that_cannot_fit_on_the_disk_is_not_fetched() -> None:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    huge = reply(200, body.getvalue(), Content_Length=str(10**17))
    with server({"/a.tar": huge}) as url, pytest.raises(StorageError, match="do not fit"):
        list(ps.read_tar(f"{url}/a.tar", storage=ONCE))
