"""Check shards and Parquet files against their manifest, index and checksums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.blobs.checksums import CELL
from penstock.blobs.draft import read_object
from penstock.errors import DataError, StorageError
from penstock.formats.files import find_files
from penstock.formats.manifest import Manifest, ShardEntry, read_manifest_at
from penstock.formats.tables.source import PARQUET_SUFFIXES
from penstock.formats.tar.archive import RECORD, long_padding
from penstock.formats.tar.index import INDEX_SUFFIX, Index
from penstock.formats.tar.indexing import FileChecksums, checksum_file, local_copy
from penstock.formats.tar.scan import open_archive, scan
from penstock.formats.tar.shard_names import TAR_SUFFIXES, expand_shards
from penstock.storage import NotFound, open_storage, redacted


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a shard or table file."""

    shard: str
    problem: str

    def __str__(self) -> str:
        return f"{self.shard}: {self.problem}"


@dataclass(frozen=True, slots=True)
class FileToVerify:
    """A shard or table file.

    Attributes:
        url: Its location.
        entry: Its entry in the manifest; ``None`` if it has none.
        unlisted: Whether the folder has a manifest that does not list this file.
    """

    url: str
    entry: ShardEntry | None
    unlisted: bool


def shards_to_verify(patterns: tuple[str, ...]) -> list[FileToVerify]:
    """Return the shards that match the patterns and, for whole folders, those that only their manifests list.

    Raises:
        DataError: A manifest cannot be parsed.
        StorageError: Nothing matches a pattern.
    """
    manifests: dict[str, Manifest | None] = {}

    def manifest_of(folder: str) -> Manifest | None:
        if folder not in manifests:
            manifests[folder] = read_manifest_at(folder)
        return manifests[folder]

    files: dict[str, FileToVerify] = {}
    for pattern in patterns:
        own = manifest_of(pattern.rstrip("/")) if not pattern.endswith(TAR_SUFFIXES) else None
        urls = [f"{pattern.rstrip('/')}/{entry.name}" for entry in own.shards] if own is not None else []
        try:
            urls = list(dict.fromkeys([*urls, *expand_shards((pattern,))]))
        except StorageError:
            if not urls:
                raise
        for url in urls:
            folder, _, name = url.rpartition("/")
            manifest = manifest_of(folder or ".")
            entry = manifest.entry(name) if manifest is not None else None
            files[url] = FileToVerify(url, entry, manifest is not None and entry is None)
    return list(files.values())


def tables_to_verify(patterns: tuple[str, ...]) -> list[FileToVerify]:
    """Return the Parquet files that match the patterns and, for whole folders, those that only their manifests list.

    Raises:
        StorageError: Nothing matches a pattern.
    """
    entries_by_folder: dict[str, dict[str, ShardEntry]] = {}

    def entries_of(folder: str) -> dict[str, ShardEntry]:
        if folder not in entries_by_folder:
            manifest = read_manifest_at(folder, format="parquet")
            entries_by_folder[folder] = {entry.name: entry for entry in manifest.shards} if manifest is not None else {}
        return entries_by_folder[folder]

    files: dict[str, FileToVerify] = {}
    for pattern in patterns:
        own = entries_of(pattern.rstrip("/")) if not pattern.endswith(PARQUET_SUFFIXES) else {}
        urls = [f"{pattern.rstrip('/')}/{name}" for name in own]
        try:
            urls = list(dict.fromkeys([*urls, *find_files((pattern,), PARQUET_SUFFIXES)]))
        except StorageError:
            if not urls:
                raise
        for url in urls:
            folder, _, name = url.rpartition("/")
            files[url] = FileToVerify(url, entries_of(folder or ".").get(name), False)
    return list(files.values())


def verify_table(file: FileToVerify) -> list[Problem]:
    """Decode every row group of a Parquet file and return all problems; an unreadable file is one of them."""
    missing = "it was packed but does not exist" if file.entry else "there is no such file"
    return _collect(file, _table_problems(file), missing)


def _table_problems(file: FileToVerify) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with local_copy(file.url) as (path, known):
        if file.entry is not None:
            yield from _compare_with_entry(file.entry, known or checksum_file(path), "the manifest says")
        try:
            table = pq.ParquetFile(os.path.abspath(path))  # Arrow takes ~ for the home folder
        except (pa.ArrowException, OSError) as exc:
            yield f"not a Parquet file: {str(exc).splitlines()[0]}"
            return
        with table:
            rows = 0
            for group in range(table.num_row_groups):
                try:
                    rows += table.read_row_group(group).num_rows
                except (pa.ArrowException, OSError) as exc:
                    yield f"row group {group}: {str(exc).splitlines()[0]}"
                    return
            if rows != table.metadata.num_rows:
                yield f"its footer says {table.metadata.num_rows:,} rows, but the file has {rows:,}"


def verify_shard(file: FileToVerify) -> list[Problem]:
    """Read a whole shard and return all problems; an unreadable shard is one of them."""
    missing = "it is in the manifest but does not exist" if file.entry else "there is no such shard"
    return _collect(file, _shard_problems(file), missing)


def _collect(file: FileToVerify, problems: Iterator[str], missing: str) -> list[Problem]:
    name = redacted(file.url)
    try:
        return [Problem(name, problem) for problem in problems]
    except NotFound:
        return [Problem(name, missing)]
    except (StorageError, DataError) as exc:
        return [Problem(name, exc.problem)]


def _shard_problems(file: FileToVerify) -> Iterator[str]:
    if file.unlisted:
        yield "it is not in the manifest"
    with local_copy(file.url) as (path, known):
        checksums = known or checksum_file(path)
        if file.entry is not None:
            yield from _compare_with_entry(file.entry, checksums)
        content = open_archive(path, redacted(file.url))
        fresh = scan(content.buffer, content.problem)
    for number, problem in fresh.bad.items():
        yield f"sample {number} ({fresh.key(number)!r}): {problem}"
    if fresh.padding > RECORD and not fresh.bad:
        yield long_padding(fresh.padding)
    good = fresh.samples - len(fresh.bad)
    if file.entry is not None and good != file.entry.samples:
        yield f"the manifest says {file.entry.samples} samples, but the shard has {good} good ones"
    yield from _compare_with_index(file, fresh, checksums)


def _compare_with_entry(entry: ShardEntry, checksums: FileChecksums, says: str = "the manifest says") -> Iterator[str]:
    if entry.bytes != checksums.size:
        yield f"{says} {entry.bytes:,} bytes, but it has {checksums.size:,}"
    elif entry.sha256 not in ("", checksums.sha256):
        yield f"its SHA-256 is {checksums.sha256[:12]}..., but {says} {entry.sha256[:12]}..."


def _compare_with_index(file: FileToVerify, fresh: Index, checksums: FileChecksums) -> Iterator[str]:
    """Compare the index that is stored beside a shard with a fresh scan of the shard."""
    data = read_object(open_storage(file.url), file.url + INDEX_SUFFIX)
    if data is None:
        if file.entry is not None:
            yield "its index is missing"
        return
    try:
        index = Index.from_bytes(data, redacted(file.url))
    except DataError as exc:
        yield exc.problem
        return
    if index.shard_size != checksums.size:
        yield f"its index is for a file of {index.shard_size:,} bytes, but it has {checksums.size:,}"
    if index.keys() != fresh.keys():
        yield "its index lists other keys than the shard has"
    elif not (_equal(index.start, fresh.start) and _equal(index.size, fresh.size) and index.bad == fresh.bad):
        yield "its index lists other offsets or sizes than the shard's samples have"
    if len(index.checksums) == len(checksums.cells):
        for cell in np.flatnonzero(index.checksums != checksums.cells).tolist():
            start, stop = cell * CELL, min((cell + 1) * CELL, checksums.size)
            yield f"bytes {start:,} to {stop:,} have changed since the index was built"


def _equal(one: np.ndarray[tuple[int], np.dtype[np.int64]], other: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
    return bool(np.array_equal(one, other))
