"""File stamps, which show that a file has changed, and the user's cache of data derived from files."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from penstock.blobs.draft import replace_file

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stamp:
    """The size, modification time and inode of a local file; another stamp means that its content may have changed."""

    size: int = 0
    mtime_ns: int = 0
    inode: int = 0

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Take the stamp of a file from its ``os.stat``."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


def user_cache() -> Path:
    """Return the folder of the cache of derived data: $PENSTOCK_CACHE, else below the user's cache folder.

    Raises:
        RuntimeError: The user has no home folder.
    """
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def cached_path(family: str, path: str) -> Path:
    """Return where something derived from the file at ``path`` is cached.

    Raises:
        RuntimeError: The user has no home folder.
    """
    name = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:40]
    return user_cache() / family / name


def write_cached(family: str, path: str, data: bytes) -> None:
    """Cache something derived from the file at ``path``; a cache that cannot be written is not an error."""
    try:
        target = cached_path(family, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, data, durable=False)
    except (OSError, RuntimeError) as exc:
        _log.debug("the %s of %s is not cached: %s", family, path, exc)
