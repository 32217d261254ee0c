"""Shards that the programs read, written by webdataset and by tarfile."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four shards of six samples, four beside them, and shards of odd kinds."""
    folder = tmp_path_factory.mktemp("wds")
    import webdataset

    for name in ("shard", "extra"):
        with warnings.catch_warnings(), webdataset.ShardWriter(f"{folder}/{name}-%06d.tar", 6, verbose=0) as sink:
            for number in range(24):
                sink.write({"__key__": f"s/{number:04d}", **_fields(number)})
    members = [(f"s/{number}.{name}", data) for number in range(5) for name, data in _fields(number).items()]
    _write(folder / "packed.tgz", members, "w:gz")
    odd = ["./a.jpg", "./a.cls", "__meta__/x.json", "__info__", "dir.v1/noext", "d.v1/b.seg.JPG", "d.v1/b.cls", "noext"]
    _write(folder / "names.tar", [(name, name.encode()) for name in (*odd, "a/.x.jpg", "/abs/c.cls", "e..cls", "f.é")])
    again = ["a.jpg", "a.JPG", "b.jpg", "a.cls", "b.cls"]
    _write(folder / "repeated.tar", [(name, name.encode()) for name in again])
    _write(folder / "gz.tar", [("a.txt.gz", gzip.compress(b"hello")), ("a.json.gz", gzip.compress(b"[1]"))])
    return folder


def _fields(number: int) -> dict[str, bytes]:
    rng = np.random.default_rng(number)
    array = io.BytesIO()
    np.save(array, rng.integers(0, 99, 6))
    pixels = np.kron(rng.integers(0, 256, (5, 6, 3), np.uint8), np.ones((4, 4, 1), np.uint8))
    image = Image.fromarray(pixels if number % 5 else pixels[:, :, 0])
    found = {"cls": b"%d" % number, "txt": f"tëxt {number}".encode(), "json": json.dumps({"n": number}).encode()}
    for name, kind in (("jpg", "JPEG"), ("png", "PNG")):
        image.save(stream := io.BytesIO(), kind)
        found[name] = stream.getvalue()
    return found | {"npy": array.getvalue()}


def _write(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> None:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
