"""A distant file server on this machine: every answer starts late, and no connection is fast.

``python server.py FOLDER`` serves a folder over HTTP until it is ended, and first prints its port. It runs in a process
of its own, so that it takes nothing of the interpreter that is measured; bytes go from file to socket in the kernel.
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
BYTES_A_SECOND = 200e6  # of one connection
_SLICE = 1 << 20  # sent at once: 5 ms, well above what sleeping is exact to
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder from another process; gives its URL, without a slash at the end."""
    server = subprocess.Popen([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.terminate()
        server.communicate()


class _Answering(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any, folder: Path) -> None:
        self._folder = folder
        super().__init__(*args)

    def do_GET(self) -> None:
        time.sleep(LATENCY_S)
        path = (self._folder / unquote(urlsplit(self.path).path).lstrip("/")).resolve()
        if not path.is_relative_to(self._folder) or not path.is_file():
            self._head(404, 0)
            return
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            tag = f'"{about.st_mtime_ns:x}-{about.st_size:x}"'
            span = _span(self.headers.get("Range"), about.st_size)
            if self.headers.get("If-Match", tag) != tag:
                self._head(412, 0)
            elif span is None:
                self._head(416, 0, {"Content-Range": f"bytes */{about.st_size}"})
            elif "Range" in self.headers:
                part = {"Content-Range": f"bytes {span[0]}-{span[1] - 1}/{about.st_size}"}
                self._head(206, span[1] - span[0], {"ETag": tag, **part})
                self._send(file.fileno(), *span)
            else:
                self._head(200, about.st_size, {"ETag": tag})
                self._send(file.fileno(), 0, about.st_size)

    do_HEAD = do_GET

    def _head(self, status: int, length: int, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), "Accept-Ranges": "bytes", **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, file: int, start: int, stop: int) -> None:
        """Send a range so that each slice is complete when its time has come."""
        if self.command == "HEAD":
            return
        begun, at = time.perf_counter(), start
        while at < stop:
            slice_end = min(at + _SLICE, stop)
            time.sleep(max(0.0, begun + (slice_end - start) / BYTES_A_SECOND - time.perf_counter()))
            while at < slice_end:
                at += os.sendfile(self.connection.fileno(), file, at, slice_end - at)

    def setup(self) -> None:
        super().setup()
        # Else the end of an answer waits for the other side to confirm its beginning.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # a client that has seen enough
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _span(told: str | None, size: int) -> tuple[int, int] | None:
    """The range that a request asks for, all of it by default; ``None``: there is nothing there."""
    match = _RANGE.fullmatch(told or "bytes=0-")
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        return (max(0, size - int(match[2])), size) if int(match[2]) else None
    start, stop = int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)
    return (start, stop) if start < stop or told is None else None


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # nobody is to wait a second because many connect at once


def main() -> None:
    """Serve a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0, help="a free one by default")
    args = parser.parse_args()
    server = _Server(("127.0.0.1", args.port), partial(_Answering, folder=args.folder.resolve()))
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
