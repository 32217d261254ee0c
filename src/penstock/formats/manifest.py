"""The manifest of a folder of shards: how many samples and bytes each has, and its checksum."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import DataError
from penstock.formats.publish import replace_file

MANIFEST = "manifest.json"


class ShardEntry(NamedTuple):
    """What the manifest says about one shard.

    Attributes:
        name: The file's name in the folder.
        samples: How many samples it holds.
        bytes: Its size on disk.
        sha256: The checksum of the file, in hex.
    """

    name: str
    samples: int
    bytes: int
    sha256: str


class Manifest:
    """The shards of a folder, sorted by name."""

    __slots__ = ("_by_name", "format", "shards")

    def __init__(self, shards: Iterable[ShardEntry], format: str = "tar") -> None:
        self.shards = tuple(sorted(shards, key=lambda shard: shard.name))
        self.format = format
        self._by_name = {shard.name: shard for shard in self.shards}

    def entry(self, name: str) -> ShardEntry | None:
        """Give what is said about a shard, None when it is not listed."""
        return self._by_name.get(name)


def read_manifest(folder: str | os.PathLike[str]) -> Manifest | None:
    """Read the manifest of a folder, without looking at any shard; None when there is none.

    Raises:
        DataError: It is not a manifest.
        OSError: It is there and cannot be read.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _parsed(path, status.st_mtime_ns, status.st_size, status.st_ino)


def write_manifest(
    folder: str | os.PathLike[str],
    entries: Iterable[ShardEntry],
    format: str = "tar",
    *,
    without: Iterable[str] = (),
) -> Manifest:
    """Add shards to the manifest of a folder, in place of what it said about shards of the same names.

    Shards named in ``without`` are no more. Several processes may do so at the same time.

    Raises:
        DataError: There is a manifest of another format, or a file that is none.
        OSError: The folder cannot be written.
    """
    with _locked(folder):
        known = read_manifest(folder)
        if known is not None and known.format != format:
            raise DataError(f"the folder holds {known.format} shards, not {format}", os.path.join(folder, MANIFEST))
        merged = {shard.name: shard for shard in known.shards} if known else {}
        merged |= {shard.name: shard for shard in entries}
        for name in without:
            merged.pop(name, None)
        manifest = Manifest(merged.values(), format)
        shards = [
            {"name": shard.name, "samples": shard.samples, "bytes": shard.bytes, "sha256": shard.sha256}
            for shard in manifest.shards
        ]
        lines = ",\n".join(json.dumps(shard) for shard in shards)
        text = f'{{"v": 1, "format": {json.dumps(format)}, "shards": [\n{lines}\n]}}\n'
        replace_file(Path(folder, MANIFEST), text.encode())
    return manifest


@contextmanager
def _locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@lru_cache(maxsize=16)
def _parsed(path: str, mtime_ns: int, size: int, inode: int) -> Manifest:
    """Read a manifest once; the rest of the arguments tell whether it has changed."""
    try:
        found: Any = json.loads(Path(path).read_bytes())
        if found["v"] != 1:
            raise DataError(f"the manifest is of version {found['v']!r}, this reads version 1", path)
        entries = [_entry(**shard) for shard in found["shards"]]
        manifest = Manifest(entries, _text(found["format"]))
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as exc:
        raise DataError(f"the manifest is malformed: {exc!r}", path) from exc
    if len(manifest.shards) != len(manifest._by_name):
        raise DataError("the manifest lists a shard twice", path)
    return manifest


def _entry(name: str, samples: int, bytes: int, sha256: str) -> ShardEntry:
    if not (type(samples) is type(bytes) is int and samples >= 0 and bytes >= 0):
        raise ValueError(f"no count: {samples!r}, {bytes!r}")
    if "/" in _text(name) or name in ("", ".", ".."):
        raise ValueError(f"no file name: {name!r}")
    return ShardEntry(name, samples, bytes, _text(sha256))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not a text: {value!r}")
    return value
