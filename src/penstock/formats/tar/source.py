"""Tar shards as a source of samples."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import DataError, StorageError
from penstock.formats.manifest import read_manifest
from penstock.formats.tar.compression import LIMITS, ArchiveLimits
from penstock.formats.tar.reader import TarReader
from penstock.formats.tar.stream import samples
from penstock.order import I64
from penstock.plan import Fields, Resources
from penstock.storage import STDIN, expand, local_path, relative

SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True, slots=True)
class TarSource:
    """Tar shards: paths as the user wrote them."""

    patterns: tuple[str, ...]
    workers: int | tuple[int, int] | None = None
    limits: ArchiveLimits = LIMITS

    random_access = False

    @property
    def resources(self) -> Resources | None:
        """A pool of its own only if asked for: reading in place is cheaper than handing over."""
        return None if self.workers is None else Resources(self.workers)

    def open(self) -> TarReader | StdinReader:
        """List the shards; those that a manifest names are not touched.

        Raises:
            StorageError: one is missing.
        """
        if self.patterns == (STDIN,):
            return StdinReader()
        urls = expand(self.patterns, SUFFIXES)
        paths = [local_path(url) for url in urls]
        return TarReader(urls, relative(paths), paths, _known_counts(urls, paths), self.limits)

    def describe(self) -> str:
        """The call that made it."""
        shown = ", ".join(map(repr, self.patterns[:3])) + (", ..." if len(self.patterns) > 3 else "")
        return f"read_tar({shown})"


def _known_counts(urls: list[str], paths: list[str]) -> I64 | None:
    """What manifests say; shards that none names must at least be there."""
    manifests = {folder: read_manifest(folder or ".") for folder in {os.path.dirname(path) for path in paths}}
    counts: list[int] = []
    for url, path in zip(urls, paths, strict=True):
        manifest = manifests[os.path.dirname(path)]
        entry = manifest.entry(os.path.basename(path)) if manifest is not None else None
        if entry is not None:
            counts.append(entry.samples)
        elif not os.path.isfile(path):
            raise StorageError("no such shard", url)
    return np.array(counts, np.int64) if len(counts) == len(paths) else None


class StdinReader:
    """Standard input: front to back, once."""

    def stream(self, fields: Fields) -> Iterator[tuple[Any, DataError | None]]:
        """The samples as they come."""
        return samples(sys.stdin.buffer, STDIN, fields)
