"""Shards looked at from outside: their index made, their checksums, keys and counts compared with what is said."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import numpy as np

from penstock.blobs.checksums import CELL, CellChecksums
from penstock.blobs.draft import put_object, read_object
from penstock.blobs.stamp import Stamp
from penstock.errors import DataError, StorageError
from penstock.formats.files import find
from penstock.formats.manifest import Manifest, ShardEntry, read_manifest_at
from penstock.formats.tables.source import SUFFIXES as TABLES
from penstock.formats.tar.index import SUFFIX, Index, write_beside
from penstock.formats.tar.scan import load_index, open_archive, scan
from penstock.formats.tar.shard_names import on_disk
from penstock.formats.tar.source import SUFFIXES
from penstock.packing.parquet_set import read_note
from penstock.storage import NotFound, Storage, expand, local_path, open_storage, redacted

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a shard."""

    shard: str
    problem: str

    def __str__(self) -> str:
        return f"{self.shard}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Sums:
    """The checksums of a file as it is."""

    size: int
    sha256: str
    checksums: np.ndarray[tuple[int], np.dtype[np.uint32]]


def make_index(url: str, storage: Storage | None = None) -> Index:
    """Make the index of a shard anywhere, with its checksums; a good one beside a file is kept.

    Raises:
        StorageError: The shard cannot be read.
        MissingExtra: It is compressed by zstd and there is no zstandard.
    """
    with _here(url, storage) as (path, sums):
        if on_disk(url):
            index = load_index(path, shard=url)
            return index.stamped(index.stamp, (sums or _sums(path)).checksums)
        content = open_archive(path, redacted(url))
        sums = sums or _sums(path)
        return scan(content.buffer, content.problem).stamped(Stamp(sums.size), sums.checksums)


def put_index(url: str, index: Index, storage: Storage | None = None) -> None:
    """Put an index beside its shard, where readers look for it.

    Raises:
        StorageError: It cannot be written there.
    """
    try:
        if on_disk(url):
            write_beside(local_path(url), index)
        else:
            put_object(open_storage(url, storage), url + SUFFIX, index.to_bytes())
    except StorageError:
        raise
    except OSError as exc:
        raise StorageError(f"the index cannot be written beside it: {exc.strerror or exc}", redacted(url)) from exc


def entry_of(url: str, storage: Storage | None = None) -> ShardEntry:
    """Read a shard and give what a manifest should say about it; an index that is missing is put beside it.

    Raises:
        StorageError: It cannot be read.
    """
    with _here(url, storage) as (path, known):
        sums = known or _sums(path)
        content = open_archive(path, redacted(url))
        index = scan(content.buffer, content.problem)
        stamp = Stamp.of(os.stat(path)) if on_disk(url) else Stamp(sums.size)
    if read_object(open_storage(url, storage), url + SUFFIX) is None:
        put_index(url, index.stamped(stamp, sums.checksums), storage)
    return ShardEntry(url.rpartition("/")[2], index.samples - len(index.bad), sums.size, sums.sha256)


@dataclass(frozen=True, slots=True)
class Listed:
    """A shard to look at: where it is, and what its manifest says; ``strays`` are not in one that there is."""

    url: str
    entry: ShardEntry | None
    stray: bool


def listed(patterns: tuple[str, ...], storage: Storage | None = None) -> list[Listed]:
    """Find the shards that patterns mean, and those that the manifests of whole folders say there should be.

    Raises:
        DataError: A manifest is none.
        StorageError: Nothing is there.
    """
    manifests: dict[str, Manifest | None] = {}

    def manifest(folder: str) -> Manifest | None:
        if folder not in manifests:
            manifests[folder] = read_manifest_at(folder, None if on_disk(folder) else storage)
        return manifests[folder]

    out: dict[str, Listed] = {}
    for pattern in patterns:
        whole = manifest(pattern.rstrip("/")) if not pattern.endswith(SUFFIXES) else None
        urls = [f"{pattern.rstrip('/')}/{entry.name}" for entry in whole.shards] if whole is not None else []
        try:
            urls = list(dict.fromkeys([*urls, *expand((pattern,), SUFFIXES, storage)]))
        except StorageError:
            if not urls:
                raise
        for url in urls:
            folder, _, name = url.rpartition("/")
            known = manifest(folder or ".")
            entry = known.entry(name) if known is not None else None
            out[url] = Listed(url, entry, known is not None and entry is None)
    return list(out.values())


def listed_tables(patterns: tuple[str, ...], storage: Storage | None = None) -> list[Listed]:
    """Find the Parquet files that patterns mean, and those that packings noted in whole folders.

    Raises:
        StorageError: Nothing is there.
    """
    notes: dict[str, dict[str, ShardEntry]] = {}

    def noted(folder: str) -> dict[str, ShardEntry]:
        if folder not in notes:
            note = read_note(folder, None if on_disk(folder) else storage)
            files = note["files"] if note is not None else ()
            notes[folder] = {name: ShardEntry(name, rows, size, sha) for _, name, rows, size, sha in files}
        return notes[folder]

    out: dict[str, Listed] = {}
    for pattern in patterns:
        whole = noted(pattern.rstrip("/")) if not pattern.endswith(TABLES) else {}
        urls = [f"{pattern.rstrip('/')}/{name}" for name in whole]
        try:
            urls = list(dict.fromkeys([*urls, *find((pattern,), TABLES, storage)]))
        except StorageError:
            if not urls:
                raise
        for url in urls:
            folder, _, name = url.rpartition("/")
            out[url] = Listed(url, noted(folder or ".").get(name), False)
    return list(out.values())


def verify_table(shard: Listed, storage: Storage | None = None) -> list[Problem]:
    """Decode every row group of a Parquet file and tell everything that is wrong with it."""
    missing = "it was packed and is not there" if shard.entry else "there is no such file"
    return _told(shard, _table_problems(shard, storage), missing)


def _table_problems(shard: Listed, storage: Storage | None) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _here(shard.url, storage) as (path, known):
        if shard.entry is not None:
            yield from _against_manifest(shard.entry, known or _sums(path), "packing noted")
        try:
            file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as exc:
            yield f"no Parquet file: {str(exc).splitlines()[0]}"
            return
        with file:
            rows = 0
            for group in range(file.num_row_groups):
                try:
                    rows += file.read_row_group(group).num_rows
                except (pa.ArrowException, OSError) as exc:
                    yield f"row group {group}: {str(exc).splitlines()[0]}"
                    return
            if rows != file.metadata.num_rows:
                yield f"its footer says {file.metadata.num_rows:,} rows, it holds {rows:,}"


def verify(shard: Listed, storage: Storage | None = None) -> list[Problem]:
    """Read a shard whole and tell everything that is wrong with it."""
    missing = "it is in the manifest and not there" if shard.entry else "there is no such shard"
    return _told(shard, _problems(shard, storage), missing)


def _told(shard: Listed, problems: Iterator[str], missing: str) -> list[Problem]:
    name = redacted(shard.url)
    try:
        return [Problem(name, what) for what in problems]
    except NotFound:
        return [Problem(name, missing)]
    except (StorageError, DataError) as exc:
        return [Problem(name, exc.problem)]


def _problems(shard: Listed, storage: Storage | None) -> Iterator[str]:
    if shard.stray:
        yield "it is not in the manifest"
    with _here(shard.url, storage) as (path, known):
        sums = known or _sums(path)
        if shard.entry is not None:
            yield from _against_manifest(shard.entry, sums)
        content = open_archive(path, redacted(shard.url))
        fresh = scan(content.buffer, content.problem)
    for number, problem in fresh.bad.items():
        yield f"sample {number} ({fresh.key(number)!r}): {problem}"
    if shard.entry is not None and fresh.samples - len(fresh.bad) != shard.entry.samples:
        yield f"the manifest says {shard.entry.samples} samples, it holds {fresh.samples - len(fresh.bad)} good ones"
    yield from _against_index(shard, storage, fresh, sums)


def _against_manifest(entry: ShardEntry, sums: Sums, says: str = "the manifest says") -> Iterator[str]:
    if entry.bytes != sums.size:
        yield f"{says} {entry.bytes:,} bytes, it has {sums.size:,}"
    elif entry.sha256 != sums.sha256:
        yield f"its SHA-256 is {sums.sha256[:12]}..., {says} {entry.sha256[:12]}..."


def _against_index(shard: Listed, storage: Storage | None, fresh: Index, sums: Sums) -> Iterator[str]:
    data = read_object(open_storage(shard.url, None if on_disk(shard.url) else storage), shard.url + SUFFIX)
    if data is None:
        if shard.entry is not None:
            yield "its index is missing"
        return
    try:
        index = Index.from_bytes(data, redacted(shard.url))
    except DataError as exc:
        yield exc.problem
        return
    if index.shard_size != sums.size:
        yield f"its index is of a file of {index.shard_size:,} bytes, it has {sums.size:,}"
    if index.keys() != fresh.keys():
        yield "its index lists other keys than it holds"
    elif not (_same(index.start, fresh.start) and _same(index.size, fresh.size) and index.bad == fresh.bad):
        yield "its index says other places than its samples have"
    recorded = index.checksums if len(index.checksums) == len(sums.checksums) else sums.checksums
    for cell in np.flatnonzero(recorded != sums.checksums).tolist():
        yield f"bytes {cell * CELL:,} to {min((cell + 1) * CELL, sums.size):,} are not those the index was made of"


def _same(one: np.ndarray[tuple[int], np.dtype[np.int64]], other: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
    return bool(np.array_equal(one, other))


@contextmanager
def _here(url: str, storage: Storage | None) -> Iterator[tuple[str, Sums | None]]:
    """A shard as a file of this machine, fetched if need be, with its checksums where it was."""
    if on_disk(url):
        path = local_path(url)
        if not os.path.isfile(path):
            raise NotFound("there is no such shard", url)
        yield path, None
        return
    with tempfile.NamedTemporaryFile(prefix="penstock-") as spool:
        sums = _summed(_kept(open_storage(url, storage).stream(url), spool))
        spool.flush()
        yield spool.name, sums


def _kept(pieces: Iterable[bytes], spool: IO[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        spool.write(piece)
        yield piece


def _sums(path: str) -> Sums:
    try:
        with open(path, "rb", buffering=0) as file:
            return _summed(iter(lambda: file.read(_PIECE), b""))
    except OSError as exc:
        raise StorageError(f"cannot read the shard: {exc.strerror or exc}", path) from exc


def _summed(pieces: Iterable[bytes]) -> Sums:
    hashed, checksums, size = hashlib.sha256(), CellChecksums(), 0
    for piece in pieces:
        hashed.update(piece)
        checksums.update(piece)
        size += len(piece)
    return Sums(size, hashed.hexdigest(), checksums.values())
