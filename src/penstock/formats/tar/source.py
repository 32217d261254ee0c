"""Tar shards as a source of samples."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.blobs.compression import LIMITS, ArchiveLimits
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.manifest import (
    Manifest,
    current_files,
    read_manifest,
    read_manifest_at,
    shard_name,
    shard_url,
)
from penstock.formats.tar.archive import BLOCK
from penstock.formats.tar.reader import TarReader
from penstock.formats.tar.remote import open_manifest
from penstock.formats.tar.shard_names import TAR_SUFFIXES, expand_shards
from penstock.formats.tar.walker import iter_samples
from penstock.order import I64
from penstock.plan import Fields, Resources, Source, StreamReader, Traits
from penstock.storage import STDIN, Cache, Storage, expand_braces, local_path, open_storage, redacted, relative_names
from penstock.storage.cache import check_places, wrap_with_cache
from penstock.storage.protocol import scheme, without_query
from penstock.storage.urls import natural_key


@dataclass(frozen=True, slots=True)
class TarSource(Source):
    """Tar shards, as the user wrote them.

    Attributes:
        patterns: Paths, URLs and patterns.
        workers: The size of the pool that reads; None: no pool of its own.
        limits: How large compressed shards may become.
        storage: The storage of URLs; None: chosen by their schemes.
        cache: Keeps remote shards on disk.
        manifest: A manifest of the shards that is stored apart from them, and has their indexes beside it.

    Raises:
        PlanError: ``storage`` is not a storage, or ``cache`` is not a ``Cache``.
    """

    patterns: tuple[str, ...]
    workers: int | tuple[int, int] | None = None
    limits: ArchiveLimits = LIMITS
    storage: Storage | None = None
    cache: Cache | None = None
    manifest: str | None = None

    def __post_init__(self) -> None:
        check_places(self.storage, self.cache)
        if STDIN in self.patterns and not self.streams:
            raise PlanError("'-' is the standard input, which cannot be read together with other shards")

    @property
    def streams(self) -> bool:
        """Whether the source can only be read once, front to back."""
        return self.patterns == (STDIN,)

    @property
    def resources(self) -> Resources | None:
        """The resources of a pool that reads, only if ``workers`` is given: reading in place is cheaper."""
        return None if self.workers is None else Resources(self.workers)

    def open(self) -> TarReader | StdinReader:
        """List the shards and return their reader; shards that a manifest lists are not opened.

        Raises:
            StorageError: A shard is missing, or a folder cannot be listed.
        """
        if self.streams:
            return StdinReader()
        patterns = self.patterns
        urls = current_files(
            lambda: [url for pattern in patterns for url in self._shards_of(pattern)], patterns, "tar", self.storage
        )
        paths = [local_path(url) if scheme(url) == "file" else url for url in urls]
        storage = wrap_with_cache(self.cache, paths, self.storage)
        names, shown = relative_names(paths), [redacted(url) for url in urls]
        if self.manifest is not None:
            given = open_manifest(self.manifest, paths, self.storage)
            return TarReader(shown, names, paths, given.counts(paths), self.limits, storage, given=given)
        manifests = {folder: _manifest(folder, storage) for folder in {_folder(path) for path in paths}}
        counts = _known_counts(urls, paths, manifests)
        remote = {folder: manifest for folder, manifest in manifests.items() if scheme(folder) != "file"}
        return TarReader(shown, names, paths, counts, self.limits, storage, remote)

    def _shards_of(self, pattern: str) -> list[str]:
        """Return the shards that a pattern matches; for an HTTP folder, the shards that its manifest names."""
        if scheme(pattern) not in ("http", "https") or "?" in pattern:
            return expand_shards((pattern,), self.storage)
        found: list[str] = []
        for url in expand_braces(pattern):
            if url.endswith((*TAR_SUFFIXES, "*")):
                found += expand_shards((url,), self.storage)
            elif (manifest := read_manifest_at(url.rstrip("/"), self.storage, optional=True)) is not None:
                found += [shard_url(url, name) for name in sorted((e.name for e in manifest.shards), key=natural_key)]
            else:
                found += _listed_shards(url, self.storage)
        return found

    def describe(self) -> str:
        shown = ", ".join(repr(redacted(pattern)) for pattern in self.patterns[:3])
        return f"read_tar({shown}{', ...' if len(self.patterns) > 3 else ''})"


def _listed_shards(folder: str, storage: Storage | None) -> list[str]:
    """Return the shards in an HTTP folder, if it is on a WebDAV server, which can be listed."""
    below = folder.rstrip("/") + "/"
    try:
        urls = [found.url for found in open_storage(folder, storage).list(below)]
    except StorageError as exc:
        problem = "an HTTP folder cannot be listed, and this one has no manifest"
        advice = "write out the shard names, as in a-{000..146}.tar"
        raise StorageError(f"{problem}; {advice}", redacted(folder)) from exc
    names = {url: url.removeprefix(below) for url in urls if url.endswith(TAR_SUFFIXES)}
    shards = [url for url, name in names.items() if "/" not in name and not name.startswith(".")]
    if not shards:
        raise StorageError("there are no tar shards in this folder", redacted(folder))
    return sorted(shards, key=natural_key)


def _known_counts(urls: list[str], paths: list[str], manifests: dict[str, Manifest | None]) -> I64 | None:
    """Return the counts in the manifests, if they list all shards; checks that the other local shards exist."""
    counts: list[int] = []
    for url, path in zip(urls, paths, strict=True):
        manifest = manifests[_folder(path)]
        entry = manifest.entry(shard_name(path)) if manifest is not None else None
        if entry is not None:
            if entry.name.endswith(".tar") and entry.samples * BLOCK > entry.bytes:
                raise DataError(f"the manifest says {entry.samples} samples in {entry.bytes} bytes", url)
            counts.append(entry.samples)
        elif scheme(path) == "file" and not os.path.isfile(path):
            raise StorageError("no such shard", url)
    return np.array(counts, np.int64) if len(counts) == len(paths) else None


def _folder(path: str) -> str:
    return without_query(path).rpartition("/")[0]


def _manifest(folder: str, storage: Storage | None) -> Manifest | None:
    if scheme(folder) == "file":
        return read_manifest(folder or ".")
    return read_manifest_at(folder, storage, optional=True)


class StdinReader(StreamReader):
    """Reads standard input once, front to back."""

    traits = Traits(sendable=False)

    def stream(self, fields: Fields) -> Iterator[tuple[Any, DataError | None]]:
        return iter_samples(sys.stdin.buffer, STDIN, fields)
