"""What shards are called: a folder, a pattern or one archive; compression by suffix."""

from __future__ import annotations

import os

from penstock.blobs.compression import SUFFIXES
from penstock.errors import PlanError
from penstock.storage.protocol import scheme

_SHARD = "shard-%06d.tar"


def named(path: str, compress: str | None) -> tuple[str, str, bool]:
    """Give the folder, the name or pattern of shards, and whether there is but one.

    Raises:
        PlanError: It has a ``%`` and is no pattern for numbers.
    """
    folder, name = os.path.split(path)
    single = "%" not in name and _is_archive(name)
    if "%" not in name and not single:
        folder, name = path, _SHARD
    if compress is not None and suffix_compression(name) is None:
        name += SUFFIXES[compress]
    if not single:
        _check_pattern(name)
    return folder or ".", name, single


def on_disk(url: str) -> bool:
    """Whether it is a path of this machine, which is written without a storage between."""
    return scheme(url) == "file"


def suffix_compression(name: str) -> str | None:
    """Give the compression that a name's suffix means."""
    if name.endswith(".tgz"):
        return "gz"
    return next((kind for kind, suffix in SUFFIXES.items() if name.endswith(suffix)), None)


def _is_archive(name: str) -> bool:
    return name.endswith((".tar", ".tgz", *(f".tar{suffix}" for suffix in SUFFIXES.values())))


def _check_pattern(name: str) -> None:
    try:
        distinct = name % 0 != name % 1
    except (TypeError, ValueError):
        distinct = False
    if not distinct:
        raise PlanError(f"{name!r} is no pattern for numbered shards: write it like 'train-%06d.tar'")
