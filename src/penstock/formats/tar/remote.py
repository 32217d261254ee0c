"""Shards that are no files of this machine: their index is fetched from beside them, their samples by ranges.

A shard without an index, a compressed one and one whose server gives no ranges is fetched whole, once, to an unlinked
temporary file, and then read like any file.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from penstock.blobs.compression import LIMITS, ArchiveLimits
from penstock.blobs.content import Content
from penstock.blobs.draft import read_object
from penstock.blobs.prefetch import Fetcher, PrefetchedBytes, read_whole
from penstock.blobs.stamp import Stamp
from penstock.errors import DataError, StorageError
from penstock.formats.tar.index import SUFFIX, Index
from penstock.formats.tar.scan import open_archive, open_shard, scan
from penstock.storage import Info, Storage, redacted
from penstock.storage.protocol import scheme

log = logging.getLogger(__name__)


def open_remote(
    place: str,
    storage: Storage,
    fetcher: Fetcher,
    *,
    expected: int | None = None,
    sha256: str | None = None,
    mapped: bool = True,
    limits: ArchiveLimits = LIMITS,
    known: Index | None = None,
) -> tuple[Index, Content | None]:
    """Give the index of a remote shard and (``mapped``) its content.

    Args:
        place: Its URL.
        storage: Where it lies.
        fetcher: What brings its bytes.
        expected: How many samples the manifest says there are.
        sha256: The checksum the manifest says it has.
        mapped: Whether its samples are wanted too.
        limits: How far a compressed shard may unpack.
        known: Its index from a moment ago.

    Raises:
        StorageError: It cannot be read.
        DataError: It is not what the manifest says.
    """
    if not mapped and (index := known or remote_index(place, storage)) is not None:
        return index.expecting(expected, "the manifest"), None
    with ThreadPoolExecutor(1, "penstock open") as aside:  # each is a trip to the server
        looking = aside.submit(_look, place, storage)
        index = known or remote_index(place, storage)
        path, info = looking.result()
    if path is not None:  # a cache has it
        if index is None:
            return open_shard(path, expected=expected, shard=redacted(place), limits=limits)
        content = open_archive(path, redacted(place), limits)
        if len(content.bytes) != index.content_size:
            index = scan(content.buffer, content.problem).stamped(Stamp(len(content.bytes)))
        return index.expecting(expected, "the manifest"), content
    if index is not None and _fits(index, info):
        arriving = PrefetchedBytes(fetcher, storage, place, redacted(place), info, index.grid)
        return index.expecting(expected, "the manifest"), Content(arriving)
    content = _fetched(place, storage, fetcher, info, sha256, limits)
    if index is None or len(content.bytes) != index.content_size:
        index = scan(content.buffer, content.problem).stamped(Stamp(info.size or len(content.bytes)))
    return index.expecting(expected, "the manifest"), content


def _look(place: str, storage: Storage) -> tuple[str | None, Info]:
    """Where the shard is on this machine, and what it is."""
    path = storage.local_path(place)
    return path, Info(None, None, False) if path is not None else storage.info(place)


def _fits(index: Index, info: Info) -> bool:
    """Whether ranges of the object are what the index speaks of."""
    return info.ranges and info.size is not None and index.shard_size == info.size == index.content_size


def remote_index(place: str, storage: Storage) -> Index | None:
    """Fetch the index beside a shard; ``None`` where there is none.

    Raises:
        StorageError: it cannot be known whether there is one.
    """
    data = read_object(storage, beside(place), optional=True)
    if data is None:
        return None
    try:
        return Index.from_bytes(data, redacted(place))
    except DataError as exc:
        log.warning("%s: the index beside it is not used: %s", redacted(place), exc.problem)
        return None


def beside(place: str) -> str:
    """The URL of the index that belongs to a shard; what stands in a query stays there."""
    if scheme(place) not in ("http", "https"):
        return place + SUFFIX
    path, mark, query = place.partition("?")
    return path + SUFFIX + mark + query


def _fetched(
    place: str, storage: Storage, fetcher: Fetcher, info: Info, sha256: str | None, limits: ArchiveLimits
) -> Content:
    """Fetch a whole shard; one whose checksum is wrong is fetched once more."""
    with tempfile.NamedTemporaryFile(prefix="penstock-") as spool:
        for attempt in range(2):
            spool.seek(0)
            spool.truncate()
            found = _spooled(read_whole(storage, place, redacted(place), info, fetcher), spool, place)
            if sha256 is None or found == sha256:
                return open_archive(spool.name, redacted(place), limits)
            if not attempt:
                log.warning("%s: its checksum is not the manifest's; fetched again", redacted(place))
    raise DataError("its checksum is not the one in the manifest", redacted(place))


def _spooled(chunks: Iterator[bytes], spool: IO[bytes], place: str) -> str:
    hashed = hashlib.sha256()
    for chunk in chunks:
        hashed.update(chunk)
        try:
            spool.write(chunk)
        except OSError as exc:
            problem = f"cannot keep the shard in {tempfile.gettempdir()}: {exc.strerror or exc}"
            raise StorageError(problem, redacted(place)) from exc
    spool.flush()
    return hashed.hexdigest()
