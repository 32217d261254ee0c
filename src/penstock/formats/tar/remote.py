"""Remote shards: the index is fetched from beside the shard, the samples as byte ranges.

A shard without an index is read as it arrives where its samples are needed in order (``open_in_order``). Where they
are needed in another order, and a compressed shard or one whose server does not support ranges, it is fetched whole,
once, to the cache or to an unlinked temporary file, and read like a local file. The index that results is kept in
the user's cache folder.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import BinaryIO, cast

import numpy as np

from penstock.blobs.compression import LIMITS, ArchiveLimits
from penstock.blobs.content import Content, room_for, temporary_copy
from penstock.blobs.draft import read_object
from penstock.blobs.prefetch import Fetcher, PrefetchedBytes, read_whole
from penstock.blobs.remote_bytes import ChunkReader, StreamedBytes, limited
from penstock.blobs.stamp import Stamp, cached_path, write_cached
from penstock.errors import DataError, StorageError
from penstock.formats.manifest import Manifest, read_manifest_file, shard_url
from penstock.formats.tar.archive import BLOCK, compression_of
from penstock.formats.tar.index import I64, INDEX_SUFFIX, Index
from penstock.formats.tar.scan import open_archive, open_shard, scan
from penstock.formats.tar.shard_names import suffix_compression
from penstock.formats.tar.unindexed import UnindexedShard
from penstock.formats.tar.walker import archive_chunks
from penstock.storage import Info, Storage, open_storage, redacted
from penstock.storage.cache import CachedStorage
from penstock.storage.protocol import scheme, unsigned, without_query

log = logging.getLogger(__name__)
MAX_SHARD = 1 << 46  # bytes: more than any store accepts as one object
_CACHE_FAMILY = "index"


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
    index, path, info = _look_up(url, storage, known)
    if path is not None:  # the cache holds the shard
        return _open_copy(path, url, index, expected, limits)
    if index is not None and _readable_by_ranges(index, info):
        prefetched = PrefetchedBytes(fetcher, storage, url, redacted(url), info, index.checksums)
        return index.expecting(expected, "the manifest"), Content(prefetched)
    content = _fetch_whole(url, storage, fetcher, info, sha256, limits)
    if index is None or len(content.buffer) != index.content_size:
        index = scan(content.buffer, content.problem).stamped(Stamp(info.size or len(content.buffer)))
        remember_index(url, storage, info, index)
    return index.expecting(expected, "the manifest"), content


def open_in_order(
    url: str, storage: Storage, fetcher: Fetcher, priority: int, *, limits: ArchiveLimits = LIMITS
) -> tuple[Index, Content] | UnindexedShard:
    """Open a remote shard whose samples are needed in order: its index and content, or without an index as it arrives.

    Args:
        url: The shard.
        storage: Its storage.
        fetcher: Fetches its bytes.
        priority: Of its bytes, where they are fetched ahead; shards that are read earlier have lower ones.
        limits: How large a compressed shard may become.

    Raises:
        StorageError: The shard cannot be read.
    """
    index, path, info = _look_up(url, storage, None)
    if path is not None:
        return _open_copy(path, url, index, None, limits)
    if index is not None and _readable_by_ranges(index, info):
        prefetched = PrefetchedBytes(fetcher, storage, url, redacted(url), info, index.checksums, priority)
        return index, Content(prefetched)
    if info.ranges and info.size is not None and info.size > MAX_SHARD:
        raise StorageError(f"the server declares {info.size:,} bytes, more than a shard can have", redacted(url))
    content = _bytes_in_order(url, storage, fetcher, priority, info, limits)

    def completed(found: Index) -> Index:
        stamped = found.stamped(Stamp(info.size or found.content_size))
        remember_index(url, storage, info, stamped)
        return stamped

    return UnindexedShard(redacted(url), content, completed)


def _bytes_in_order(
    url: str, storage: Storage, fetcher: Fetcher, priority: int, info: Info, limits: ArchiveLimits
) -> PrefetchedBytes | StreamedBytes:
    """Return the bytes of a shard as they arrive: by ranges, or in a temporary file if it has to be decompressed."""
    packed = suffix_compression(without_query(url)) is not None
    if info.ranges and info.size and not packed:
        ranges = PrefetchedBytes(fetcher, storage, url, redacted(url), info, priority=priority)
        if compression_of(bytes(ranges.window(0).data[:BLOCK])) is None:
            return ranges
        ranges.close()
        packed = True
    chunks = read_whole(storage, url, redacted(url), info, fetcher)
    if not packed:  # the name does not say so: the bytes that arrive are bounded, and those decompressed by the limits
        chunks = limited(chunks, room_for(info.size, redacted(url)), redacted(url))
    return StreamedBytes(archive_chunks(cast(BinaryIO, ChunkReader(chunks)), limits), redacted(url))


def _open_copy(
    path: str, url: str, index: Index | None, expected: int | None, limits: ArchiveLimits
) -> tuple[Index, Content]:
    """Open the copy of a shard that the cache holds."""
    if index is None:
        index, content = open_shard(path, expected=expected, shard=redacted(url), limits=limits)
        assert content is not None
        return index, content
    content = open_archive(path, redacted(url), limits)
    if len(content.buffer) != index.content_size:
        index = scan(content.buffer, content.problem).stamped(Stamp(len(content.buffer)))
    return index.expecting(expected, "the manifest"), content


def _look_up(url: str, storage: Storage, known: Index | None) -> tuple[Index | None, str | None, Info]:
    """Return the index of a shard, the local path of a cached copy, or else what the storage knows about the shard."""

    def copy_or_info() -> tuple[str | None, Info]:
        path = storage.local_path(url)
        return path, Info(None, None, False) if path is not None else storage.info(url)

    with ThreadPoolExecutor(1, "penstock open") as pool:  # both at once: each is a round trip to the server
        lookup = pool.submit(copy_or_info)
        index = known or remote_index(url, storage)
        path, info = lookup.result()
    return index or remembered_index(url, storage, info), path, info


def is_remembered(url: str, storage: Storage) -> bool:
    """Return whether an earlier run kept the index of a shard; the shard may have changed since."""
    try:
        return cached_path(_CACHE_FAMILY, _cache_key(url, storage)).is_file()
    except RuntimeError:
        return False


def remembered_index(url: str, storage: Storage, info: Info) -> Index | None:
    """Return the index of a shard that an earlier run found, if the shard has not changed since."""
    if info.tag is None or not is_remembered(url, storage):
        return None
    try:
        data = cached_path(_CACHE_FAMILY, _cache_key(url, storage)).read_bytes()
        index = Index.from_bytes(data, redacted(url))
    except (OSError, RuntimeError, DataError):
        return None
    return index if index.stamp == _stamp(info) else None


def remember_index(url: str, storage: Storage, info: Info, index: Index) -> None:
    """Keep an index in the user's cache folder, where the content of the shard can be identified."""
    if info.tag is not None and info.size is not None:
        write_cached(_CACHE_FAMILY, _cache_key(url, storage), replace(index, stamp=_stamp(info)).to_bytes())


def _cache_key(url: str, storage: Storage) -> str:
    server = getattr(getattr(storage, "storage", storage), "endpoint", None) or ""
    return f"{redacted(str(server))}\n{unsigned(url)}"


def _stamp(info: Info) -> Stamp:
    """Return the stamp of a remote shard, which has a hash of its tag in place of an inode."""
    digest = hashlib.blake2b((info.tag or "").encode("utf-8", "surrogateescape"), digest_size=7).digest()
    return Stamp(info.size or 0, 0, int.from_bytes(digest))


def _readable_by_ranges(index: Index, info: Info) -> bool:
    """Return whether the offsets in the index are offsets in the object: it is not compressed and has the same size."""
    return info.ranges and info.size is not None and index.shard_size == info.size == index.content_size


def remote_index(url: str, storage: Storage) -> Index | None:
    """Fetch the index beside a shard; None if there is no valid one.

    Raises:
        StorageError: The storage cannot determine whether there is an index.
    """
    return _read_index(index_url(url), url, storage)


def _read_index(location: str, shard: str, storage: Storage | None) -> Index | None:
    try:
        data = read_object(open_storage(location, storage), location, optional=True)
        return None if data is None else Index.from_bytes(data, redacted(shard))
    except DataError as exc:
        log.warning("%s: the index %s is not used: %s", redacted(shard), redacted(location), exc.problem)
        return None


@dataclass(frozen=True, slots=True)
class GivenManifest:
    """A manifest that is stored apart from its shards, with their indexes beside it.

    Attributes:
        url: Where it is stored.
        manifest: Its content.
        storage: The storage of its URL.
    """

    url: str
    manifest: Manifest
    storage: Storage | None

    def counts(self, shards: Sequence[str]) -> I64:
        """Return the number of samples of each shard.

        Raises:
            StorageError: The manifest does not list a shard.
        """
        missing = next((shard for shard in shards if self.manifest.entry_of(shard) is None), None)
        if missing is not None:
            problem = f"the manifest {redacted(self.url)} does not list this shard"
            raise StorageError(f"{problem}; run `penstock index --manifest` for it", redacted(missing))
        return np.array([self.manifest.entry_of(shard).samples for shard in shards], np.int64)  # type: ignore[union-attr]

    def index(self, shard: str) -> Index | None:
        """Fetch the index of a shard; None if there is no valid one.

        Raises:
            StorageError: The storage cannot determine whether there is an index.
        """
        entry = self.manifest.entry_of(shard)
        return None if entry is None else _read_index(stored_index_url(self.url, entry.name), shard, self.storage)


def open_manifest(url: str, shards: Sequence[str], storage: Storage | None) -> GivenManifest:
    """Read a manifest that is stored apart from its shards.

    Args:
        url: The manifest.
        shards: The paths or URLs of the shards.
        storage: The storage of the shards, used for a manifest on the same one.

    Raises:
        StorageError: There is no such manifest, or it cannot be read.
        DataError: The file is not a manifest.
    """
    own = storage if scheme(url) != "file" and any(scheme(shard) == scheme(url) for shard in shards) else None
    manifest = read_manifest_file(url, own)
    if manifest is None:
        raise StorageError("there is no such manifest", redacted(url))
    return GivenManifest(url, manifest, own)


def stored_index_url(manifest: str, name: str) -> str:
    """Return the URL of the index of a shard that is stored beside a manifest."""
    return shard_url(without_query(manifest).rpartition("/")[0] or ".", name + INDEX_SUFFIX)


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
    if isinstance(storage, CachedStorage) and sha256 is None and (path := _fetch_to_cache(url, storage, fetcher, info)):
        return open_archive(path, redacted(url), limits)
    for attempt in range(2):
        digest = hashlib.sha256()
        chunks = _hashed(read_whole(storage, url, redacted(url), info, fetcher), digest)
        with temporary_copy(chunks, redacted(url), info.size) as path:
            if sha256 is None or digest.hexdigest() == sha256:
                return open_archive(path, redacted(url), limits)
        if not attempt:
            log.warning("%s: its checksum is not the one in the manifest; fetching it again", redacted(url))
    folder = redacted(url).rpartition("/")[0]
    advice = f"it is damaged, or was written again; if it was written again, run `penstock index {folder}`"
    raise DataError(f"its checksum is not the one in the manifest; {advice}", redacted(url))


def _hashed(chunks: Iterator[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def _fetch_to_cache(url: str, storage: Storage, fetcher: Fetcher, info: Info) -> str | None:
    """Fetch a whole shard to the cache and return its path; None if the cache has no room for it."""
    for _ in read_whole(storage, url, redacted(url), info, fetcher):
        pass
    return storage.local_path(url)
