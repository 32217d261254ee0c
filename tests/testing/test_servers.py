"""The servers serve a folder: with ranges or without, open or with keys."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.storage import S3
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, http_server, plain_server, s3_server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "served" / "bucket").mkdir(parents=True)
    (tmp_path / "served" / "bucket" / "object").write_bytes(b"0123456789")
    return tmp_path / "served"


def get_range(port: int) -> tuple[int, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket/object", headers={"Range": "bytes=2-4"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.status, response.read()


def test_the_http_server_supports_ranges(folder: Path) -> None:
    with http_server(folder) as port:
        assert get_range(port) == (206, b"234")


def test_the_plain_server_ignores_ranges_and_stops_at_the_end(folder: Path) -> None:
    with plain_server(folder) as port:
        assert get_range(port) == (200, b"0123456789")
    with pytest.raises(urllib.error.URLError):
        get_range(port)


def test_the_s3_server_wants_its_keys(folder: Path) -> None:
    with s3_server(folder) as port:
        endpoint = f"http://127.0.0.1:{port}"
        assert S3(endpoint, ACCESS_KEY, SECRET_KEY).read("s3://bucket/object", 2, 5) == b"234"
        with pytest.raises(StorageError):
            S3(endpoint, ACCESS_KEY, "wrong").read("s3://bucket/object", 2, 5)


def test_the_s3_server_can_be_open_to_all(folder: Path) -> None:
    with s3_server(folder, keys=False) as port:
        assert S3(f"http://127.0.0.1:{port}", anonymous=True).read("s3://bucket/object", 2, 5) == b"234"
