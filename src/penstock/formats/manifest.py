"""The manifest of a folder of shards: how many samples and bytes each has, and its checksum."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from penstock.blobs.draft import put_object, read_object, replace_file
from penstock.errors import DataError
from penstock.storage import Storage, open_storage, redacted

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
    """The shards of a folder, sorted by name.

    Attributes:
        shards: What is said about each.
        format: What they are.
        classes: What the numbers in ``cls`` mean, where that is known.
        made: What they were packed from, as a fingerprint; empty where they were not, or from several things.
    """

    __slots__ = ("_by_name", "classes", "format", "made", "shards")

    def __init__(
        self,
        shards: Iterable[ShardEntry],
        format: str = "tar",
        classes: Iterable[str] | None = None,
        made: str = "",
    ) -> None:
        self.shards = tuple(sorted(shards, key=lambda shard: shard.name))
        self.format = format
        self.classes = None if classes is None else tuple(classes)
        self.made = made
        self._by_name = {shard.name: shard for shard in self.shards}

    def entry(self, name: str) -> ShardEntry | None:
        """Give what is said about a shard, None when it is not listed."""
        return self._by_name.get(name)

    def merged(
        self, entries: Iterable[ShardEntry], without: Iterable[str], classes: Sequence[str] | None, made: str
    ) -> Manifest:
        """Give this manifest with more shards, in place of those of the same names."""
        known = self._by_name | {shard.name: shard for shard in entries}
        for name in without:
            known.pop(name, None)
        return Manifest(known.values(), self.format, self.classes if classes is None else classes, made)

    def to_bytes(self) -> bytes:
        """Give the file form: JSON, a line for each shard."""
        lines = ",\n".join(json.dumps(shard._asdict()) for shard in self.shards)
        more = f'"classes": {json.dumps(self.classes)}, ' if self.classes is not None else ""
        more += f'"made": {json.dumps(self.made)}, ' if self.made else ""
        return f'{{"v": 1, "format": {json.dumps(self.format)}, {more}"shards": [\n{lines}\n]}}\n'.encode()


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
    classes: Sequence[str] | None = None,
    made: str = "",
) -> Manifest:
    """Add shards to the manifest of a folder, in place of what it said about shards of the same names.

    Shards named in ``without`` are no more. Several processes may do so at the same time.

    Raises:
        DataError: There is a manifest of another format, or a file that is none.
        OSError: The folder cannot be written.
    """
    with _locked(folder):
        known = _of_format(read_manifest(folder), format, os.path.join(folder, MANIFEST))
        manifest = known.merged(entries, without, classes, made)
        replace_file(Path(folder, MANIFEST), manifest.to_bytes())
    return manifest


def read_manifest_at(url: str, storage: Storage | None = None, *, optional: bool = False) -> Manifest | None:
    """Read the manifest of a folder anywhere; None when there is none, or (``optional``) it may not be read.

    Raises:
        DataError: It is not a manifest.
        StorageError: It cannot be read.
    """
    place = manifest_url(url)
    data = read_object(open_storage(url, storage), place, optional=optional)
    return None if data is None else _from_bytes(data, redacted(place))


def write_manifest_at(
    url: str,
    storage: Storage | None,
    entries: Iterable[ShardEntry],
    format: str = "tar",
    *,
    without: Iterable[str] = (),
    classes: Sequence[str] | None = None,
    made: str = "",
) -> Manifest:
    """Do what :func:`write_manifest` does, for a folder anywhere; elsewhere than on disk one writer at a time.

    Raises:
        DataError: There is a manifest of another format, or an object that is none.
        StorageError: The folder cannot be written.
    """
    place = manifest_url(url)
    known = _of_format(read_manifest_at(url, storage), format, redacted(place))
    manifest = known.merged(entries, without, classes, made)
    put_object(open_storage(url, storage), place, manifest.to_bytes())
    return manifest


def manifest_url(folder: str) -> str:
    """Give where the manifest of a folder is."""
    return f"{folder.rstrip('/')}/{MANIFEST}"


def _of_format(known: Manifest | None, format: str, place: str) -> Manifest:
    if known is not None and known.format != format:
        raise DataError(f"the folder holds {known.format} shards, not {format}", place)
    return known or Manifest((), format)


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
    return _from_bytes(Path(path).read_bytes(), path)


def _from_bytes(data: bytes, path: str) -> Manifest:
    try:
        found: Any = json.loads(data)
        if found["v"] != 1:
            raise DataError(f"the manifest is of version {found['v']!r}, this reads version 1", path)
        entries = [_entry(**shard) for shard in found["shards"]]
        classes = [_text(name) for name in found["classes"]] if "classes" in found else None
        manifest = Manifest(entries, _text(found["format"]), classes, _text(found.get("made", "")))
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
