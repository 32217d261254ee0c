"""Remote shards: the index is fetched from beside the shard, the samples as byte ranges.

A shard without an index, a compressed shard and one whose server does not support ranges are fetched whole, once, to an
unlinked temporary file, and read like a local file.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from penstock.blobs.compression import LIMITS, ArchiveLimits
from penstock.blobs.content import Content, temporary_copy
from penstock.blobs.draft import read_object
from penstock.blobs.prefetch import Fetcher, PrefetchedBytes, read_whole
from penstock.blobs.stamp import Stamp
from penstock.errors import DataError
from penstock.formats.tar.index import INDEX_SUFFIX, Index
from penstock.formats.tar.scan import open_archive, open_shard, scan
from penstock.storage import Info, Storage, redacted
from penstock.storage.protocol import scheme

log = logging.getLogger(__name__)


def open_remote(
    url: str,
    storage: Storage,
    fetcher: Fetcher,
    *,
    expected: int | None = None,
    sha256: str | None = None,
    mapped: bool = True,
    limits: ArchiveLimits = LIMITS,
    known: Index | None = None,
) -> tuple[Index, Content | None]:
    """Return the index of a remote shard, and its content.

    Args:
        url: The shard.
        storage: Its storage.
        fetcher: Fetches its bytes.
        expected: The number of samples in the manifest; missing ones become bad entries.
        sha256: The checksum in the manifest.
        mapped: Whether to return the content; if false, it is returned only if the shard had to be fetched.
        limits: How large a compressed shard may become.
        known: An index loaded before.

    Raises:
        StorageError: The shard cannot be read.
        DataError: The checksum of the shard is not the one in the manifest.
    """
    if not mapped and (index := known or remote_index(url, storage)) is not None:
        return index.expecting(expected, "the manifest"), None
    with ThreadPoolExecutor(1, "penstock open") as pool:  # both at once: each is a round trip to the server
        lookup = pool.submit(_look_up, url, storage)
        index = known or remote_index(url, storage)
        path, info = lookup.result()
    if path is not None:  # the cache holds the shard
        if index is None:
            return open_shard(path, expected=expected, shard=redacted(url), limits=limits)
        content = open_archive(path, redacted(url), limits)
        if len(content.bytes) != index.content_size:
            index = scan(content.buffer, content.problem).stamped(Stamp(len(content.bytes)))
        return index.expecting(expected, "the manifest"), content
    if index is not None and _readable_by_ranges(index, info):
        prefetched = PrefetchedBytes(fetcher, storage, url, redacted(url), info, index.checksums)
        return index.expecting(expected, "the manifest"), Content(prefetched)
    content = _fetch_whole(url, storage, fetcher, info, sha256, limits)
    if index is None or len(content.bytes) != index.content_size:
        index = scan(content.buffer, content.problem).stamped(Stamp(info.size or len(content.bytes)))
    return index.expecting(expected, "the manifest"), content


def _look_up(url: str, storage: Storage) -> tuple[str | None, Info]:
    """Return the local path of a cached shard, or else what the storage knows about the shard."""
    path = storage.local_path(url)
    return path, Info(None, None, False) if path is not None else storage.info(url)


def _readable_by_ranges(index: Index, info: Info) -> bool:
    """Return whether the offsets in the index are offsets in the object: it is not compressed and has the same size."""
    return info.ranges and info.size is not None and index.shard_size == info.size == index.content_size


def remote_index(url: str, storage: Storage) -> Index | None:
    """Fetch the index beside a shard; None if there is no valid one.

    Raises:
        StorageError: The storage cannot determine whether there is an index.
    """
    try:
        data = read_object(storage, index_url(url), optional=True)
        return None if data is None else Index.from_bytes(data, redacted(url))
    except DataError as exc:
        log.warning("%s: the index beside it is not used: %s", redacted(url), exc.problem)
        return None


def index_url(url: str) -> str:
    """Return the URL of the index of a shard; the query of an HTTP URL is kept."""
    if scheme(url) not in ("http", "https"):
        return url + INDEX_SUFFIX
    path, mark, query = url.partition("?")
    return path + INDEX_SUFFIX + mark + query


def _fetch_whole(
    url: str, storage: Storage, fetcher: Fetcher, info: Info, sha256: str | None, limits: ArchiveLimits
) -> Content:
    """Fetch a whole shard; if its checksum is wrong, once more."""
    for attempt in range(2):
        digest = hashlib.sha256()
        chunks = _hashed(read_whole(storage, url, redacted(url), info, fetcher), digest)
        with temporary_copy(chunks, redacted(url), info.size) as path:
            if sha256 is None or digest.hexdigest() == sha256:
                return open_archive(path, redacted(url), limits)
        if not attempt:
            log.warning("%s: its checksum is not the one in the manifest; fetching it again", redacted(url))
    folder = redacted(url).rpartition("/")[0]
    advice = f"it is damaged, or was written again: then run `penstock index {folder}`"
    raise DataError(f"its checksum is not the one in the manifest; {advice}", redacted(url))


def _hashed(chunks: Iterator[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk
