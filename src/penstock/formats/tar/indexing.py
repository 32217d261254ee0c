"""Index a whole shard on any storage, for ``penstock index``: read it, compute checksums, store its index beside it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from penstock.blobs.checksums import CellChecksums
from penstock.blobs.content import Content, temporary_copy
from penstock.blobs.draft import put_object, read_object
from penstock.blobs.stamp import Stamp
from penstock.errors import StorageError
from penstock.formats.manifest import (
    ShardEntry,
    read_manifest,
    read_manifest_at,
    write_manifest,
    write_manifest_at,
)
from penstock.formats.tar.index import INDEX_SUFFIX, Index, write_beside
from penstock.formats.tar.scan import load_index, open_archive, scan
from penstock.formats.tar.shard_names import on_disk
from penstock.formats.tar.small_values import MAX_VALUE_BYTES, FieldValues
from penstock.storage import NotFound, Storage, local_path, open_storage, redacted

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileChecksums:
    """The size of a file, its SHA-256, and the checksum of each of its cells, as an index stores them."""

    size: int
    sha256: str
    cells: np.ndarray[tuple[int], np.dtype[np.uint32]]


def build_index(url: str, storage: Storage | None = None) -> Index:
    """Build the index of a shard on any storage as :func:`index_shard` does, without its entry for a manifest.

    Raises:
        StorageError: The shard cannot be read.
        MissingExtra: The shard is compressed by zstd, and zstandard is not installed.
    """
    return index_shard(url, storage)[0]


def index_shard(url: str, storage: Storage | None = None, *, values: Iterable[str] = ()) -> tuple[Index, ShardEntry]:
    """Read a whole shard on any storage; return its index, with the checksums of its cells, and its manifest entry.

    A valid index that is stored beside a local shard is used instead of a new scan. A remote shard is downloaded. The
    index has the values of the fields named by ``values`` too, except of fields with a value that is not small.

    Raises:
        StorageError: The shard cannot be read.
        MissingExtra: The shard is compressed by zstd, and zstandard is not installed.
    """
    with local_copy(url, storage) as (path, known):
        checksums = known or checksum_file(path)
        if on_disk(url):
            index = load_index(path, shard=url)
            index = index.stamped(index.stamp, checksums.cells)
            content = open_archive(path, redacted(url)) if values else None
        else:
            content = open_archive(path, redacted(url))
            index = scan(content.buffer, content.problem).stamped(Stamp(checksums.size), checksums.cells)
        if content is not None and values:
            index = replace(index, values={**index.values, **_read_values(index, content, values)})
    return index, ShardEntry(url.rpartition("/")[2], index.samples, checksums.size, checksums.sha256)


def _read_values(index: Index, content: Content, names: Iterable[str]) -> dict[str, FieldValues]:
    """Return the values of fields that are small in every sample of the shard."""
    found = {}
    for name in names:
        values: dict[int, bytes] = {}
        for kind, fields in enumerate(index.kinds):
            if name not in fields:
                continue
            rows = np.flatnonzero(index.kind == kind)
            members = index.first[rows] + fields.index(name)
            starts, sizes = index.start[members], index.size[members]
            if (sizes > MAX_VALUE_BYTES).any():
                break
            spans = zip(rows.tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True)
            values |= {row: bytes(content.bytes[start:stop]) for row, start, stop in spans}
        else:
            if values:
                found[name] = FieldValues.of(index.samples, values)
    return found


def update_manifest(folder: str, entries: Iterable[ShardEntry], storage: Storage | None = None) -> int:
    """Bring the entries of shards in a folder's manifest up to date; return how many were changed or added.

    A folder without a manifest stays without one.

    Raises:
        DataError: The manifest is not one of tar shards.
        StorageError: The manifest cannot be read or written.
    """
    local = on_disk(folder)
    manifest = read_manifest(local_path(folder)) if local else read_manifest_at(folder, storage)
    changed = [entry for entry in entries if manifest is not None and manifest.entry(entry.name) != entry]
    if manifest is None or not changed:
        return 0
    try:
        if local:
            write_manifest(local_path(folder), changed, classes=manifest.classes)
        else:
            write_manifest_at(folder, storage, changed, classes=manifest.classes)
    except OSError as exc:
        raise StorageError(f"the manifest cannot be written: {getattr(exc, 'strerror', None) or exc}", folder) from exc
    return len(changed)


def store_index(url: str, index: Index, storage: Storage | None = None) -> None:
    """Store an index beside its shard, where readers look for it.

    Raises:
        StorageError: The index cannot be written there.
    """
    try:
        if on_disk(url):
            write_beside(local_path(url), index)
        else:
            put_object(open_storage(url, storage), url + INDEX_SUFFIX, index.to_bytes())
    except StorageError:
        raise
    except OSError as exc:
        raise StorageError(f"the index cannot be written beside it: {exc.strerror or exc}", redacted(url)) from exc


def make_manifest_entry(url: str, storage: Storage | None = None) -> ShardEntry:
    """Read a whole shard and return its entry for a manifest; store its index beside it if there is none.

    Raises:
        StorageError: The shard cannot be read.
    """
    with local_copy(url, storage) as (path, known):
        checksums = known or checksum_file(path)
        content = open_archive(path, redacted(url))
        index = scan(content.buffer, content.problem)
        stamp = Stamp.of(os.stat(path)) if on_disk(url) else Stamp(checksums.size)
    if read_object(open_storage(url, storage), url + INDEX_SUFFIX) is None:
        store_index(url, index.stamped(stamp, checksums.cells), storage)
    return ShardEntry(url.rpartition("/")[2], index.samples - len(index.bad), checksums.size, checksums.sha256)


@contextmanager
def local_copy(url: str, storage: Storage | None) -> Iterator[tuple[str, FileChecksums | None]]:
    """Provide the path of a local file, or of a temporary copy of a remote one with its checksums.

    Raises:
        StorageError: The file does not exist, or cannot be read.
    """
    if on_disk(url):
        path = local_path(url)
        if not os.path.isfile(path):
            raise NotFound("there is no such file", url)
        yield path, None
        return
    checksums = _Checksums()
    opened = open_storage(url, storage)
    with temporary_copy(checksums.updated(opened.stream(url)), redacted(url), opened.info(url).size) as path:
        yield path, checksums.result()


def checksum_file(path: str) -> FileChecksums:
    """Read a file and return its checksums.

    Raises:
        StorageError: The file cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            checksums = _Checksums()
            for _ in checksums.updated(iter(lambda: file.read(_READ_BYTES), b"")):
                pass
            return checksums.result()
    except OSError as exc:
        raise StorageError(f"cannot read the file: {exc.strerror or exc}", path) from exc


class _Checksums:
    """Computes the checksums of chunks that pass through."""

    def __init__(self) -> None:
        self._sha256, self._cells, self._size = hashlib.sha256(), CellChecksums(), 0

    def updated(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._sha256.update(chunk)
            self._cells.update(chunk)
            self._size += len(chunk)
            yield chunk

    def result(self) -> FileChecksums:
        return FileChecksums(self._size, self._sha256.hexdigest(), self._cells.values())
