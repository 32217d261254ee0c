"""Which shards a reader keeps open: bounded by their number, the memory of their indexes, and temporary files."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping, Set

from penstock.blobs.content import MappedFile
from penstock.blobs.prefetch import PrefetchedBytes
from penstock.blobs.remote_bytes import RemoteBytes, StreamedBytes
from penstock.formats.tar.located import OpenShard
from penstock.formats.tar.unindexed import UnindexedShard

OPEN_SHARDS = 32  # a window reads 16 shards at once, and the next window may have begun
_OPEN_SAMPLES = 1 << 18  # of more remote shards that stay open: only their indexes take memory, 40 MB for that many
_LEAST_SAMPLES = 1 << 8  # a smaller shard counts as this many

Opened = OpenShard | UnindexedShard


def shards_to_close(opened: Mapping[int, Opened], ahead: Set[int], newest: int) -> set[int]:
    """Return the shards to close beside a new one: those used least recently, and those opened ahead last.

    32 shards stay open; remote ones that are read by ranges also as long as their indexes are small. Shards that were
    decompressed or fetched whole take half of what the temporary folder has room for.

    Args:
        opened: The open shards, the one used least recently first.
        ahead: Those that were opened ahead, and not used since.
        newest: The new one, which stays.
    """
    order = sorted(opened, key=ahead.__contains__)  # stable
    light = [shard for shard in order if _is_light(opened[shard])]
    heavy = [shard for shard in order if not _is_light(opened[shard])]
    temporary = {shard: size for shard in heavy if (size := _temporary_bytes(opened[shard]))}
    room = (sum(temporary.values()) + shutil.disk_usage(tempfile.gettempdir()).free) // 2 if temporary else 0
    samples = {shard: max(_LEAST_SAMPLES, _samples(opened[shard])) for shard in light}
    excess = {*heavy[:-OPEN_SHARDS], *_first_until_fits(temporary, room)}
    excess |= _first_until_fits(samples, _OPEN_SAMPLES).intersection(light[:-OPEN_SHARDS])
    return excess - {newest}


def _first_until_fits(sizes: Mapping[int, int], limit: int) -> set[int]:
    """Return the first shards: those that have to be closed so that the others fit within a limit."""
    total, gone = sum(sizes.values()), set[int]()
    for shard, size in sizes.items():
        if total <= limit:
            break
        total -= size
        gone.add(shard)
    return gone


def remote_bytes(opened: Opened) -> RemoteBytes | None:
    """Return the bytes of a shard that are fetched when they are read; None if they are on this machine."""
    content = opened.content if isinstance(opened, UnindexedShard) else opened.content.bytes
    return content if isinstance(content, RemoteBytes) else None


def content_size(opened: Opened) -> int:
    """Return the size of a shard; a gigabyte if it is not known."""
    content = opened.content if isinstance(opened, UnindexedShard) else opened.content.bytes
    return 1 << 30 if isinstance(content, StreamedBytes) else len(content)


def close(opened: Opened) -> None:
    """Stop fetching the bytes of a shard, and free what is held."""
    content = remote_bytes(opened)
    if content is not None:
        content.close()


def _is_light(opened: Opened) -> bool:
    """Return whether an open shard takes no more than the memory of its index."""
    return isinstance(opened, OpenShard) and isinstance(opened.content.bytes, PrefetchedBytes)


def _temporary_bytes(opened: Opened) -> int:
    """Return how much of the temporary folder a shard takes that was decompressed or fetched whole."""
    content = opened.content.bytes if isinstance(opened, OpenShard) else b""
    stored = isinstance(content, MappedFile) and os.fstat(content.fd).st_nlink
    return len(content) if isinstance(content, mmap.mmap) and not stored else 0


def _samples(opened: Opened) -> int:
    return opened.index.samples if isinstance(opened, OpenShard) else 0
