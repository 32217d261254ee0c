"""Index a whole shard on any storage, for ``penstock index``: read it, compute checksums, store its index beside it."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from penstock.blobs.checksums import CellChecksums
from penstock.blobs.content import Content, temporary_copy
from penstock.blobs.draft import put_object, read_object
from penstock.blobs.prefetch import CHUNK, Fetcher, PrefetchedBytes
from penstock.blobs.remote_bytes import RemoteBytes, Window
from penstock.blobs.stamp import Stamp
from penstock.errors import StorageError
from penstock.formats.manifest import (
    ShardEntry,
    read_manifest,
    read_manifest_at,
    shard_name,
    write_manifest,
    write_manifest_at,
)
from penstock.formats.tar.archive import BLOCK, compression_of
from penstock.formats.tar.index import INDEX_SUFFIX, Index, write_beside
from penstock.formats.tar.remote import MAX_SHARD, index_url, stored_index_url
from penstock.formats.tar.scan import Scan, load_index, open_archive, scan
from penstock.formats.tar.shard_names import on_disk
from penstock.formats.tar.small_values import MAX_VALUE_BYTES, FieldValues
from penstock.storage import NotFound, Storage, local_path, open_storage, redacted

_READ_BYTES = 1 << 20
_SKIPPED = -1  # in place of the number of hashed bytes: members were skipped
_FIRST_JUMP = 64 << 10  # bytes requested for a header behind a member that was skipped


@dataclass(frozen=True, slots=True)
class FileChecksums:
    """The size of a file, its SHA-256, and the checksum of each of its cells, as an index stores them."""

    size: int
    sha256: str
    cells: np.ndarray[tuple[int], np.dtype[np.uint32]]


def build_index(url: str) -> Index:
    """Build the index of a shard on any storage as :func:`index_shard` does, without its entry for a manifest.

    Raises:
        StorageError: The shard cannot be read.
        MissingExtra: The shard is compressed by zstd, and zstandard is not installed.
    """
    return index_shard(url)[0]


def index_shard(
    url: str, storage: Storage | None = None, fetcher: Fetcher | None = None, *, values: Iterable[str] = ()
) -> tuple[Index, ShardEntry]:
    """Read a whole shard on any storage; return its index, with the checksums of its cells, and its manifest entry.

    A valid index that is stored beside a local shard is used instead of a new scan. A remote shard is read through as
    it arrives. Where a member takes longer to fetch than a request for what follows it, the member is skipped; the
    index then has no checksums, and the entry an empty one.

    Args:
        url: The shard.
        storage: Its storage; chosen by the scheme of the URL by default.
        fetcher: Fetches the bytes of remote shards; by default a new one.
        values: Fields whose values the index has too, unless one is not small; a remote shard is then downloaded.

    Raises:
        StorageError: The shard cannot be read.
        MissingExtra: The shard is compressed by zstd, and zstandard is not installed.
    """
    ranges = None if on_disk(url) or values else _index_ranges(url, storage, fetcher)
    index, checksums = ranges or _index_copy(url, storage, values)
    return index, ShardEntry(shard_name(url), index.samples, checksums.size, checksums.sha256)


def _index_copy(url: str, storage: Storage | None, values: Iterable[str]) -> tuple[Index, FileChecksums]:
    """Index a local shard, or one that is downloaded first."""
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
        return index, checksums


def _index_ranges(url: str, storage: Storage | None, fetcher: Fetcher | None) -> tuple[Index, FileChecksums] | None:
    """Index a remote shard as it arrives; None if it is compressed, or its server does not support ranges."""
    opened = open_storage(url, storage)
    begun = time.monotonic()
    info = opened.info(url)
    if not info.ranges or not info.size or info.size > MAX_SHARD:
        return None
    own = fetcher or Fetcher()
    ranges = _CheckedRanges(PrefetchedBytes(own, opened, url, redacted(url), info), time.monotonic() - begun)
    try:
        if compression_of(bytes(ranges.window(0).data[:BLOCK])) is not None:
            return None
        running = Scan(ranges)
        while running.advance():
            pass
        checksums = ranges.checksums()
        return running.index().stamped(Stamp(info.size), checksums.cells), checksums
    finally:
        ranges.close()
        if fetcher is None:
            own.stop()


class _CheckedRanges(RemoteBytes):
    """The bytes of a remote shard, which are hashed while their headers are scanned, as long as none is skipped.

    Args:
        ranges: The bytes.
        latency_s: How long a request takes.
    """

    def __init__(self, ranges: PrefetchedBytes, latency_s: float) -> None:
        self._ranges, self._latency_s = ranges, latency_s
        self._hashes, self._hashed = _Checksums(), 0
        self._skips_beyond: float = sys.maxsize  # until the first bytes have arrived
        self._jumping = _FIRST_JUMP
        self._last = Window(0, 0, b"")

    def __getitem__(self, sel: slice) -> bytes:
        return self._ranges[sel]

    def reach(self, offset: int) -> int:
        return self._ranges.reach(offset)

    def cut(self, starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        return self._ranges.cut(starts, stops)

    def close(self) -> None:
        self._ranges.close()

    def window(self, offset: int) -> Window:
        if self._last.start <= offset < self._last.stop:
            return self._last
        if self._hashed >= 0 and offset - self._hashed > self._skips_beyond:
            self._hashed = _SKIPPED
            self._ranges.close()
        self._last = self._jump(offset) if self._hashed == _SKIPPED else self._read_through(offset)
        return self._last

    def _read_through(self, offset: int) -> Window:
        """Hash the bytes up to the part that holds the byte at ``offset``."""
        while True:
            begun = time.monotonic()
            window = self._ranges.window(self._hashed)
            if not self._hashed:
                transfer_s = max(time.monotonic() - begun - self._latency_s, 1e-3)
                self._skips_beyond = max(_READ_BYTES, self._latency_s * window.stop / transfer_s)
            self._hashes.update(memoryview(window.data)[: window.stop - window.start])
            self._hashed = window.stop
            self._ranges.pass_over(window.stop)
            if offset < window.stop:
                return window

    def _jump(self, offset: int) -> Window:
        """Request a few headers from ``offset`` on; more with every request that follows the one before."""
        follows = offset < self._last.stop + _READ_BYTES
        self._jumping = min(2 * self._jumping, CHUNK) if follows else _FIRST_JUMP
        stop = min(offset + self._jumping, len(self._ranges))
        return Window(offset, stop, self._ranges[offset:stop])

    def checksums(self) -> FileChecksums:
        """Return the checksums of all bytes; empty ones if some were skipped."""
        size = len(self._ranges)
        if self._hashed == _SKIPPED or size - self._hashed > self._skips_beyond:
            return FileChecksums(size, "", np.zeros(0, np.uint32))
        if self._hashed < size:
            self._read_through(size - 1)
        return self._hashes.result()


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


def update_manifest(folder: str, entries: Iterable[ShardEntry]) -> int:
    """Bring the entries of shards in a folder's manifest up to date; return how many were changed or added.

    A folder without a manifest stays without one.

    Raises:
        DataError: The manifest is not one of tar shards.
        StorageError: The manifest cannot be read or written.
    """
    local = on_disk(folder)
    manifest = read_manifest(local_path(folder)) if local else read_manifest_at(folder)
    changed = [entry for entry in entries if manifest is not None and manifest.entry(entry.name) != entry]
    if manifest is None or not changed:
        return 0
    try:
        if local:
            write_manifest(local_path(folder), changed, classes=manifest.classes)
        else:
            write_manifest_at(folder, None, changed, classes=manifest.classes)
    except OSError as exc:
        raise StorageError(f"the manifest cannot be written: {getattr(exc, 'strerror', None) or exc}", folder) from exc
    return len(changed)


def store_index_apart(manifest: str, name: str, index: Index) -> None:
    """Store the index of a shard beside a manifest that is apart from the shards.

    Args:
        manifest: The path or URL of the manifest.
        name: The name of the shard in the manifest.
        index: The index.

    Raises:
        StorageError: The index cannot be written.
    """
    url = stored_index_url(manifest, name)
    put_object(open_storage(url), url, index.to_bytes())


def store_index(url: str, index: Index) -> None:
    """Store an index beside its shard, where readers look for it.

    Raises:
        StorageError: The index cannot be written there.
    """
    try:
        if on_disk(url):
            write_beside(local_path(url), index)
        else:
            put_object(open_storage(url), index_url(url), index.to_bytes())
    except StorageError:
        raise
    except OSError as exc:
        raise StorageError(f"the index cannot be written beside it: {exc.strerror or exc}", redacted(url)) from exc


def make_manifest_entry(url: str) -> ShardEntry:
    """Read a whole shard and return its entry for a manifest; store its index beside it if there is none.

    Raises:
        StorageError: The shard cannot be read.
    """
    with local_copy(url) as (path, known):
        checksums = known or checksum_file(path)
        content = open_archive(path, redacted(url))
        index = scan(content.buffer, content.problem)
        stamp = Stamp.of(os.stat(path)) if on_disk(url) else Stamp(checksums.size)
    if read_object(open_storage(url), url + INDEX_SUFFIX) is None:
        store_index(url, index.stamped(stamp, checksums.cells))
    return ShardEntry(url.rpartition("/")[2], index.samples - len(index.bad), checksums.size, checksums.sha256)


@contextmanager
def local_copy(url: str, storage: Storage | None = None) -> Iterator[tuple[str, FileChecksums | None]]:
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
            self.update(chunk)
            yield chunk

    def update(self, chunk: bytes | memoryview) -> None:
        self._sha256.update(chunk)
        self._cells.update(chunk)
        self._size += len(chunk)

    def result(self) -> FileChecksums:
        return FileChecksums(self._size, self._sha256.hexdigest(), self._cells.values())
