"""Names of shards: the target of a writer as a folder, a pattern or one archive, and compression by suffix."""

from __future__ import annotations

import os

from penstock.blobs.compression import COMPRESSION_SUFFIXES
from penstock.errors import PlanError
from penstock.storage.protocol import scheme

TAR_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz")
_DEFAULT_PATTERN = "shard-%06d.tar"


def parse_target(path: str, compress: str | None) -> tuple[str, str, bool]:
    """Return the folder of a target, the name or pattern of its shards, and whether it is a single archive.

    Raises:
        PlanError: The name has a ``%`` but is not a pattern for numbered shards.
    """
    folder, name = os.path.split(path)
    single = "%" not in name and name.endswith(TAR_SUFFIXES)
    if "%" not in name and not single:
        folder, name = path, _DEFAULT_PATTERN
    if compress is not None and suffix_compression(name) is None:
        name += COMPRESSION_SUFFIXES[compress]
    if not single:
        _check_pattern(name)
    return folder or ".", name, single


def on_disk(url: str) -> bool:
    """Return whether a URL is a local path, which is written without going through a storage."""
    return scheme(url) == "file"


def suffix_compression(name: str) -> str | None:
    """Return the compression that the suffix of a name stands for."""
    if name.endswith(".tgz"):
        return "gz"
    return next((kind for kind, suffix in COMPRESSION_SUFFIXES.items() if name.endswith(suffix)), None)


def _check_pattern(name: str) -> None:
    try:
        distinct = name % 0 != name % 1
    except (TypeError, ValueError):
        distinct = False
    if not distinct:
        raise PlanError(f"{name!r} is not a pattern for numbered shards: write it like 'train-%06d.tar'")
