"""The manifest of a folder of shards: the samples, size and checksum of each shard."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from penstock.blobs.draft import put_object, read_object, replace_file
from penstock.errors import DataError
from penstock.storage import Storage, open_storage, redacted
from penstock.storage.protocol import scheme, without_query

MANIFEST = "manifest.json"
_MAX_SAMPLES = 1 << 40  # of one shard: sums over millions of shards stay within 64 bits


class ShardEntry(NamedTuple):
    """The entry of one shard in a manifest.

    Attributes:
        name: The name of the file in the folder.
        samples: How many samples the shard holds.
        bytes: The size of the file.
        sha256: The checksum of the file, in hex.
    """

    name: str
    samples: int
    bytes: int
    sha256: str


class Manifest:
    """The shards of a folder, sorted by name.

    Attributes:
        shards: The entry of each shard.
        format: The format of the shards, such as ``"tar"``.
        classes: The class names by number, for the numbers in ``cls``; ``None`` if unknown.
        source_fingerprint: Identifies the source that the shards were packed from; empty if they were not packed, or
            packed from several sources. The file stores it as ``made``.
    """

    __slots__ = ("_by_name", "classes", "format", "shards", "source_fingerprint")

    def __init__(
        self,
        shards: Iterable[ShardEntry],
        format: str = "tar",
        classes: Iterable[str] | None = None,
        source_fingerprint: str = "",
    ) -> None:
        self.shards = tuple(sorted(shards, key=lambda shard: shard.name))
        self.format = format
        self.classes = None if classes is None else tuple(classes)
        self.source_fingerprint = source_fingerprint
        self._by_name = {shard.name: shard for shard in self.shards}

    def entry(self, name: str) -> ShardEntry | None:
        """Return the entry of a shard, ``None`` if it is not listed."""
        return self._by_name.get(name)

    def merged(
        self,
        entries: Iterable[ShardEntry],
        without: Iterable[str],
        classes: Sequence[str] | None,
        source_fingerprint: str,
    ) -> Manifest:
        """Return this manifest with more entries, which replace those of the same names; ``without`` are removed."""
        by_name = self._by_name | {shard.name: shard for shard in entries}
        for name in without:
            by_name.pop(name, None)
        return Manifest(by_name.values(), self.format, self.classes if classes is None else classes, source_fingerprint)

    def to_bytes(self) -> bytes:
        """Return the content of the manifest file: JSON, with a line for each shard."""
        lines = ",\n".join(json.dumps(shard._asdict()) for shard in self.shards)
        optional = f'"classes": {json.dumps(self.classes)}, ' if self.classes is not None else ""
        optional += f'"made": {json.dumps(self.source_fingerprint)}, ' if self.source_fingerprint else ""
        return f'{{"v": 1, "format": {json.dumps(self.format)}, {optional}"shards": [\n{lines}\n]}}\n'.encode()


def read_manifest(folder: str | os.PathLike[str]) -> Manifest | None:
    """Read the manifest of a local folder; ``None`` if there is none. The shards themselves are not checked.

    Raises:
        DataError: The file is not a manifest.
        OSError: The file exists but cannot be read.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _read_once(path, status.st_mtime_ns, status.st_size, status.st_ino)


def write_manifest(
    folder: str | os.PathLike[str],
    entries: Iterable[ShardEntry],
    format: str = "tar",
    *,
    without: Iterable[str] = (),
    classes: Sequence[str] | None = None,
    source_fingerprint: str = "",
) -> Manifest:
    """Add entries to the manifest of a local folder; they replace entries of the same names.

    The entries named in ``without`` are removed. Several processes may call this at the same time.

    Raises:
        DataError: The existing manifest is of another format, or is not a manifest.
        OSError: The folder cannot be written.
    """
    with _locked(folder):
        existing = _check_format(read_manifest(folder), format, os.path.join(folder, MANIFEST))
        manifest = existing.merged(entries, without, classes, source_fingerprint)
        replace_file(Path(folder, MANIFEST), manifest.to_bytes())
    return manifest


def read_manifest_at(url: str, storage: Storage | None = None, *, optional: bool = False) -> Manifest | None:
    """Read the manifest of a folder on any storage; ``None`` if there is none.

    With ``optional``, the result is also ``None`` if access to the manifest is denied.

    Raises:
        DataError: The object is not a manifest.
        StorageError: The manifest cannot be read.
    """
    location = manifest_url(url)
    data = read_object(open_storage(url, storage), location, optional=optional)
    return None if data is None else _from_bytes(data, redacted(location))


def write_manifest_at(
    url: str,
    storage: Storage | None,
    entries: Iterable[ShardEntry],
    format: str = "tar",
    *,
    without: Iterable[str] = (),
    classes: Sequence[str] | None = None,
    source_fingerprint: str = "",
) -> Manifest:
    """Do what :func:`write_manifest` does for a folder on any storage, without a lock: one writer at a time.

    Raises:
        DataError: The existing manifest is of another format, or is not a manifest.
        StorageError: The folder cannot be written.
    """
    location = manifest_url(url)
    existing = _check_format(read_manifest_at(url, storage), format, redacted(location))
    manifest = existing.merged(entries, without, classes, source_fingerprint)
    put_object(open_storage(url, storage), location, manifest.to_bytes())
    return manifest


def manifest_url(folder: str) -> str:
    """Return the URL of the manifest of a folder."""
    return f"{folder.rstrip('/')}/{MANIFEST}"


def shard_url(folder: str, name: str) -> str:
    """Return the path or URL of a shard that a manifest names; characters that mean something in a URL are quoted."""
    return f"{folder.rstrip('/')}/{quote(name) if scheme(folder) in ('http', 'https') else name}"


def shard_name(url: str) -> str:
    """Return the name of a shard in the manifest of its folder: the inverse of ``shard_url``."""
    name = without_query(url).rpartition("/")[2]
    return unquote(name) if scheme(url) in ("http", "https") else name


def _check_format(existing: Manifest | None, format: str, url: str) -> Manifest:
    """Return the existing manifest, or an empty one, after a check that its format is the given one."""
    if existing is not None and existing.format != format:
        raise DataError(f"the folder holds {existing.format} shards, not {format}", url)
    return existing or Manifest((), format)


@contextmanager
def _locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@lru_cache(maxsize=16)
def _read_once(path: str, mtime_ns: int, size: int, inode: int) -> Manifest:
    """Read a manifest; the arguments after ``path`` differ if the file has changed, so it is then read again."""
    return _from_bytes(Path(path).read_bytes(), path)


def _from_bytes(data: bytes, path: str) -> Manifest:
    try:
        content: Any = json.loads(data)
        if content["v"] != 1:
            raise DataError(f"the manifest has version {content['v']!r}, but only version 1 can be read", path)
        entries = [_entry(**shard) for shard in content["shards"]]
        classes = [_text(name) for name in content["classes"]] if "classes" in content else None
        manifest = Manifest(entries, _text(content["format"]), classes, _text(content.get("made", "")))
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as exc:
        raise DataError(f"the manifest is malformed: {exc!r}", path) from exc
    if len(manifest.shards) != len(manifest._by_name):
        raise DataError("the manifest lists a shard twice", path)
    return manifest


def _entry(name: str, samples: int, bytes: int, sha256: str) -> ShardEntry:
    if not (type(samples) is type(bytes) is int and 0 <= samples <= _MAX_SAMPLES and 0 <= bytes < 1 << 60):
        raise ValueError(f"invalid counts: {samples!r} samples, {bytes!r} bytes")
    if not _text(name) or name[0] == "." or "/" in name or "\0" in name:
        raise ValueError(f"invalid file name: {name!r}")
    return ShardEntry(name, samples, bytes, _text(sha256))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not a string: {value!r}")
    return value
