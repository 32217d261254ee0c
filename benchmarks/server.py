"""A file server that simulates a remote one: each response has a latency, and each connection a limited bandwidth.

``python server.py FOLDER`` prints its port, and serves a folder over HTTP until it is terminated. It runs in its own
process, so that it does not slow down the interpreter that is measured; bytes go from file to socket in the kernel.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LATENCY_S = 0.050
BYTES_PER_S = 200e6  # of one connection
_SLICE_BYTES = 1 << 20  # sent at once: 5 ms, well above the precision of sleeping
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder from another process; yields its URL, without a slash at the end."""
    server = subprocess.Popen([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.terminate()
        server.communicate()


class _RequestHandler(BaseHTTPRequestHandler):
    """Responds to the requests of one connection."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any, folder: Path) -> None:
        self._folder = folder
        super().__init__(*args)

    def do_GET(self) -> None:
        time.sleep(LATENCY_S)
        path = (self._folder / unquote(urlsplit(self.path).path).lstrip("/")).resolve()
        if not path.is_relative_to(self._folder) or not path.is_file():
            self._send_headers(404, 0)
            return
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            tag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
            span = _requested_span(self.headers.get("Range"), status.st_size)
            if self.headers.get("If-Match", tag) != tag:
                self._send_headers(412, 0)
            elif span is None:
                self._send_headers(416, 0, {"Content-Range": f"bytes */{status.st_size}"})
            elif "Range" in self.headers:
                content_range = {"Content-Range": f"bytes {span[0]}-{span[1] - 1}/{status.st_size}"}
                self._send_headers(206, span[1] - span[0], {"ETag": tag, **content_range})
                self._send_span(file.fileno(), *span)
            else:
                self._send_headers(200, status.st_size, {"ETag": tag})
                self._send_span(file.fileno(), 0, status.st_size)

    do_HEAD = do_GET

    def _send_headers(self, status: int, length: int, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), "Accept-Ranges": "bytes", **(extra or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_span(self, file: int, start: int, stop: int) -> None:
        """Send a range at the limited bandwidth: wait before each slice until its last byte may arrive."""
        if self.command == "HEAD":
            return
        started_at, offset = time.perf_counter(), start
        while offset < stop:
            slice_end = min(offset + _SLICE_BYTES, stop)
            time.sleep(max(0.0, started_at + (slice_end - start) / BYTES_PER_S - time.perf_counter()))
            while offset < slice_end:
                offset += os.sendfile(self.connection.fileno(), file, offset, slice_end - offset)

    def setup(self) -> None:
        super().setup()
        # Without it the end of a response waits until the client has acknowledged its beginning.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client closed the connection early
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _requested_span(header: str | None, size: int) -> tuple[int, int] | None:
    """Return start and stop of a requested range, by default of all bytes; None if the range is invalid or empty."""
    match = _RANGE.fullmatch(header or "bytes=0-")
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        return (max(0, size - int(match[2])), size) if int(match[2]) else None
    start, stop = int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)
    return (start, stop) if start < stop or header is None else None


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # a full queue would delay a client by a second when many connect at once


def main() -> None:
    """Serve a folder until the process is terminated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0, help="by default a free port")
    args = parser.parse_args()
    server = _Server(("127.0.0.1", args.port), partial(_RequestHandler, folder=args.folder.resolve()))
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
