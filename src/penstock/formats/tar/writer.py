"""Writing tar shards: the same samples give the same bytes, and a shard appears whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import numpy as np
import numpy.typing as npt

from penstock.blobs.background import BackgroundThread, Submit, run_now
from penstock.blobs.compression import COMPRESSION_SUFFIXES, compressor
from penstock.blobs.draft import Draft, FileDraft, UploadDraft, put_object
from penstock.blobs.file_range import FileRange, joined
from penstock.blobs.stamp import Stamp
from penstock.errors import DataError, PlanError
from penstock.formats.manifest import (
    ShardEntry,
    read_manifest_at,
    write_manifest_at,
)
from penstock.formats.tar.archive import (
    BLOCK,
    END_MARKER,
    ZEROS,
    EncodedSamples,
    check_key,
    encode_value,
    field_bytes,
    is_plain_key,
    member_header,
)
from penstock.formats.tar.index import INDEX_SUFFIX, Index, IndexBuilder, write_beside
from penstock.formats.tar.shard_names import on_disk, parse_target, suffix_compression
from penstock.formats.tar.sink import HashingSink, OpenFileDraft, file_size
from penstock.formats.tar.small_values import ValueCollector
from penstock.storage import Storage, local_path, open_storage, redacted

EncodeField = Callable[[str, Any], bytes]
ArchiveTarget = str | os.PathLike[str]

_BATCH_BYTES = 1 << 20  # written at once
_RANGE_WEIGHT = 16  # a byte that stays in its file counts 1/16: it takes no memory, and large copies are quicker
_QUEUED_BATCHES = 16  # per thread: enough to keep the disk busy while one sample is slow to arrive
_QUEUED_SHARDS = 2  # complete, and waiting to be published
_OPEN_SHARDS = 8  # begun and not published: each holds a file or an upload open, and an upload its first part in memory
_FAILURE_CHECK_S = 0.5  # how often a writer that waits for a shard to be published looks for a failure


class TarWriter:
    """Writes one archive, sample by sample; the same samples give the same bytes.

    A path or URL appears when the writer is closed, with an index beside it; leaving the ``with`` block by an exception
    leaves nothing behind. A file that is already open is written to directly, and stays open.

    Args:
        target: A path, a URL, or an open binary file.
        encode: Turns a field's name and value into bytes; by default bytes are stored as they are and other values by
            the field's extension, as ``penstock.codecs.encode`` does.
        compress: "gz", "zst", "bz2" or "xz"; by default the suffix of a path decides.
        storage: The storage of a URL; by default its scheme decides.
        write_thread: Runs the writes; in the calling thread by default.
        hash_thread: Runs the checksum work; in the thread that writes by default.
        publish_thread: Publishes the complete archive; in the thread that hashes by default.

    Attributes:
        url: The path or URL; None for an open file.
        samples: The number of samples written.
        nbytes: The size of the archive so far, uncompressed.
        entry: The manifest entry of the archive, once it has been published.

    Raises:
        PlanError: The compression is unknown.
        MissingExtra: The compression is zstd and zstandard is not installed.
        OSError: The file cannot be created.
    """

    def __init__(
        self,
        target: ArchiveTarget | BinaryIO,
        encode: EncodeField | None = None,
        compress: str | None = None,
        *,
        storage: Storage | None = None,
        write_thread: Submit = run_now,
        hash_thread: Submit = run_now,
        publish_thread: Submit = run_now,
    ) -> None:
        self.url = os.fspath(target) if isinstance(target, str | os.PathLike) else None
        self.samples = 0
        self.nbytes = 0
        self.entry: ShardEntry | None = None
        self._encode = encode
        self._write_thread, self._hash_thread, self._publish_thread = write_thread, hash_thread, publish_thread
        self._keys: set[str] = set()
        self._endings: dict[tuple[str, ...], dict[str, bytes]] = {}
        self._builder = IndexBuilder()
        self._values = ValueCollector()
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._pieces: list[Any] = []
        self._pending_bytes = 0
        self._closed = False
        self._failure: BaseException | None = None  # of a write in the background: raised by the next write
        self._storage = None if self.url is None or on_disk(self.url) else open_storage(self.url, storage)
        compress = compress or (suffix_compression(self.url) if self.url else None)
        self._draft = self._open_draft(target)
        try:
            self._sink = HashingSink(self._draft, hash_thread)
            self._out = compressor(cast(BinaryIO, self._sink), compress)
        except BaseException:
            self._drop()
            raise

    def _open_draft(self, target: Any) -> Draft:
        if self.url is None:
            return OpenFileDraft(cast(BinaryIO, target))
        if self._storage is not None:  # an old index must not outlive the shard that is replaced
            return UploadDraft(self._storage.put(self.url), partial(self._storage.delete, self.url + INDEX_SUFFIX))
        path = Path(local_path(self.url))
        return FileDraft(path, partial(path.with_name(path.name + INDEX_SUFFIX).unlink, missing_ok=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def write(self, sample: Mapping[str, Any]) -> int:
        """Add a sample and return the number of archive bytes it takes.

        Fields named ``__like_this__`` are not written; the others are, in the order of their names.

        Raises:
            DataError: The key or a field cannot be stored as it is, or the key was written before. Nothing of
                the sample was written.
            OSError: The file cannot be written.
            ValueError: The archive is closed.
        """
        return self.write_encoded(self.encode(sample))

    def encode(self, sample: Mapping[str, Any]) -> EncodedSamples:
        """Check and encode a sample without writing it.

        Raises:
            DataError: The key or a field cannot be stored as it is.
        """
        if (key := sample.get("__key__")) is None:
            raise DataError("the sample has no '__key__'", self._shard)
        check_key(key)
        endings = self._member_endings(tuple(sample), key)
        stem = key.encode("utf-8", "surrogateescape")
        pieces: list[Any] = []
        starts: list[int] = []
        sizes: list[int] = []
        at = 0
        for field, ending in endings.items():
            data = sample[field] if self._encode is None else self._encode(field, sample[field])
            if type(data) is not bytes:
                data = field_bytes(data if self._encode else encode_value(data, field, key), field, key)
            size = len(data)
            header = member_header(stem + ending, size)
            padding = -size % BLOCK
            pieces += (header, data, ZEROS[:padding])
            starts.append(at + len(header))
            sizes.append(size)
            at += len(header) + size + padding
        return EncodedSamples([key], tuple(endings), pieces, starts, sizes, at)

    def _member_endings(self, names: tuple[str, ...], key: str) -> dict[str, bytes]:
        """Return the fields to store, each with the ending of its member's name; cached by the sample's names."""
        endings = self._endings.get(names)
        if endings is None:
            endings = {field: _ending(field, key) for field in sorted(names) if not field[:2] == "__" == field[-2:]}
            if not endings:
                raise DataError("a sample without fields cannot be stored", self._shard, key)
            self._endings[names] = endings
        return endings

    def write_encoded(self, encoded: EncodedSamples) -> int:
        """Add encoded samples and return the number of archive bytes they take.

        Raises:
            DataError: A key was written before.
            OSError: The file cannot be written.
            ValueError: The archive is closed.
        """
        if self._closed:
            raise self._failure or ValueError("the archive is closed")
        keys, before = encoded.keys, self.nbytes
        if not self._keys.isdisjoint(keys):
            raise DataError("the key was written before", self._shard, next(key for key in keys if key in self._keys))
        self._keys.update(keys)
        self._pieces += encoded.pieces
        self._values.add(self.samples, encoded)
        self._starts += [before + start for start in encoded.starts]
        self._sizes += encoded.sizes
        self._builder.add_all([key.encode("utf-8", "surrogateescape") for key in keys], encoded.field_names)
        self.samples += len(keys)
        self.nbytes = before + encoded.nbytes
        self._pending_bytes += encoded.nbytes // (_RANGE_WEIGHT if type(encoded.pieces[0]) is FileRange else 1)
        if self._pending_bytes >= _BATCH_BYTES:
            self._flush()
        return encoded.nbytes

    def close(self, published: Callable[[ShardEntry], object] | None = None) -> None:
        """Complete the archive and publish it: a path or URL appears, and ``entry`` is set.

        Args:
            published: Called with the entry in the thread that publishes.

        Raises:
            OSError: The file cannot be written.
        """
        if self._closed:
            return
        self._closed = True
        self._pieces.append(END_MARKER)
        self.nbytes += len(END_MARKER)
        self._flush()
        self._write_thread(partial(self._end, published))

    def abort(self) -> None:
        """Discard the archive: a path or URL does not appear; an open file keeps its bytes, without an end marker."""
        self._closed = True
        if self.entry is None:
            self._drop()

    @property
    def _shard(self) -> str | None:
        return None if self.url is None else redacted(self.url)

    def _flush(self) -> None:
        batch, self._pieces, self._pending_bytes = self._pieces, [], 0
        self._write_thread(partial(self._write, batch))

    def _write(self, batch: list[Any]) -> None:
        try:
            self._sink.write_pieces(batch) if self._out is self._sink else self._out.write(joined(batch))
        except BaseException as exc:
            self._drop(exc)
            raise

    def _end(self, published: Callable[[ShardEntry], object] | None) -> None:
        try:
            if self._out is not self._sink:
                self._out.close()
        except BaseException as exc:
            self._drop(exc)
            raise
        # Publishing goes through the hash thread, so that the checksums are complete by then.
        self._hash_thread(partial(self._publish_thread, partial(self._publish, published)))

    def _publish(self, published: Callable[[ShardEntry], object] | None) -> None:
        try:
            status = self._draft.publish()
        except BaseException as exc:
            self._drop(exc)
            raise
        name = self.url.rpartition("/")[2] if self.url else ""
        entry = ShardEntry(name, self.samples, self._sink.nbytes, self._sink.sha256.hexdigest())
        if self.url is not None and not (isinstance(self._draft, FileDraft) and self._draft.special):
            self._write_index(self.url, Stamp.of(status) if status else Stamp(self._sink.nbytes))
        self.entry = entry
        if published is not None:
            published(entry)

    def _write_index(self, url: str, stamp: Stamp) -> None:
        start, size = np.array(self._starts, np.int64), np.array(self._sizes, np.int64)
        index: Index = self._builder.build(start, size, 0, self.nbytes).stamped(stamp, self._sink.checksums.values())
        index = replace(index, values=self._values.values(self.samples))
        if self._storage is None:
            write_beside(local_path(url), index)
        else:
            put_object(self._storage, url + INDEX_SUFFIX, index.to_bytes())

    def _drop(self, failure: BaseException | None = None) -> None:
        self._closed, self._failure = True, self._failure or failure
        self._draft.drop()


class ShardWriter:
    """Writes samples into numbered shards, each with an index beside it, and a manifest at the end.

    A shard appears when it is complete and replaces one of the same name; closing the writer also removes the shards
    with higher numbers that an earlier, larger set of that name left in the manifest. Leaving the ``with`` block by an
    exception discards the shard that is being written and keeps the shards before it, without a manifest.

    Args:
        target: A folder (created if necessary; shards are ``shard-000000.tar`` ...), a pattern with a number
            (``train-%04d.tar``), or one archive that takes everything; a path or a URL.
        max_bytes: The most bytes of a shard file, unless one sample alone has more. What compression saves is not known
            in advance, so compressed shards turn out smaller.
        max_samples: The most samples of a shard.
        compress: "gz", "zst", "bz2" or "xz"; names get the suffix. By default the target's suffix decides.
        encode: Turns a field's name and value into bytes; by default as in ``TarWriter``.
        start: The number of the first shard.
        manifest: Whether to write the manifest on closing; ``entries`` has its content in any case.
        storage: The storage of a URL; by default its scheme decides.
        background: Whether to write, hash and publish in background threads; a failure there is raised by a later call.
        published: Called for every shard that has appeared, in order, with its entry and its note (see ``write``).
        at_least_one: Whether to leave an empty shard if there are no samples; by default if ``start`` is 0.

    Attributes:
        folder: The folder of the shards.
        entries: The manifest entries of the shards published so far.

    Raises:
        PlanError: A limit is not positive, the compression is unknown, or the target is not a valid pattern.
        OSError: The folder cannot be created.
    """

    def __init__(
        self,
        target: ArchiveTarget,
        *,
        max_bytes: float | None = None,
        max_samples: int | None = None,
        compress: str | None = None,
        encode: EncodeField | None = None,
        start: int = 0,
        manifest: bool = True,
        storage: Storage | None = None,
        background: bool = False,
        published: Callable[[ShardEntry, Any], object] | None = None,
        at_least_one: bool | None = None,
    ) -> None:
        url = os.fspath(target)
        if (max_bytes is not None and max_bytes <= 0) or (max_samples is not None and max_samples <= 0):
            raise PlanError(f"max_bytes={max_bytes!r}, max_samples={max_samples!r}: each must be above 0, or None")
        if compress is not None and compress not in COMPRESSION_SUFFIXES:
            raise PlanError(f"unknown compression {compress!r}: use one of {', '.join(COMPRESSION_SUFFIXES)}")
        self._on_disk = on_disk(url)
        folder, name, single = parse_target(local_path(url) if self._on_disk else url, compress)
        self.folder = folder
        self.entries: list[ShardEntry] = []
        self._compress = compress or suffix_compression(name)
        self._name, self._single = name, single
        self._max_bytes = None if single else max_bytes
        self._max_samples = None if single else max_samples
        self._encode, self._next, self._manifest = encode, start, manifest
        self._storage, self._published = storage, published
        self._at_least_one = start == 0 if at_least_one is None else at_least_one
        self._open: TarWriter | None = None
        self._unpublished: list[TarWriter] = []
        self._may_open = threading.Semaphore(_OPEN_SHARDS)
        self._closed = False
        if self._on_disk:
            os.makedirs(folder, exist_ok=True)
        # Three threads, because writing, hashing and publishing wait for different things: disk, CPU, fsync or server.
        limits = {"write": _QUEUED_BATCHES, "hash": _QUEUED_BATCHES, "publish": _QUEUED_SHARDS} if background else {}
        self._threads = {
            f"{task}_thread": BackgroundThread(f"penstock-{task}", queued) for task, queued in limits.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort(wait=issubclass(kind, Exception))

    def write(self, sample: Mapping[str, Any], note: Callable[[], Any] | None = None) -> None:
        """Add a sample; begins a new shard if the open one would become too large.

        Args:
            sample: The sample.
            note: Called before the sample is written if it begins a new shard; ``published`` gets the result together
                with the shard before it.

        Raises:
            DataError: The key or a field cannot be stored as it is, or the shard already has the key.
            OSError: The folder cannot be written.
            ValueError: The writer is closed.
        """
        if self._closed:
            raise ValueError("the writer is closed")
        self.write_encoded((self._open or self._begin()).encode(sample), note)

    def write_all(self, samples: Sequence[Mapping[str, Any]], note: Callable[[int], Any]) -> None:
        """Add samples as :meth:`write` does, faster if they are alike; ``note`` gets the number of one among them.

        Raises:
            DataError: A sample cannot be stored; those before it may be written.
            OSError: The folder cannot be written.
            ValueError: The writer is closed.
        """
        alike = _encode_alike(samples) if self._encode is None and self.fits(len(samples), 0) else None
        if alike is not None and self.fits(len(samples), alike.nbytes):
            self.write_encoded(alike)
            return
        for number, sample in enumerate(samples):
            self.write(sample, partial(note, number))

    def write_encoded(self, encoded: EncodedSamples, note: Callable[[], Any] | None = None) -> None:
        """Add encoded samples, all to one shard, as :meth:`write` does.

        Raises:
            DataError: The shard already has a key.
            OSError: The folder cannot be written.
            ValueError: The writer is closed.
        """
        if self._closed:
            raise ValueError("the writer is closed")
        writer = self._open or self._begin()
        if not self.fits(len(encoded.keys), encoded.nbytes):
            self._finish(writer, note() if note else None)
            writer = self._begin()
        writer.write_encoded(encoded)

    @property
    def single(self) -> str | None:
        """The name of the one archive that takes everything; None if the writer numbers its shards."""
        return self._name if self._single else None

    def fits(self, samples: int, nbytes: int) -> bool:
        """Return whether samples fit into the open shard, or into a new one if none is open; one sample always does."""
        have, size = (self._open.samples, self._open.nbytes) if self._open is not None else (0, 0)
        if have + samples <= 1:
            return True
        if self._max_samples is not None and have + samples > self._max_samples:
            return False
        return self._max_bytes is None or file_size(size + nbytes, self._compress) <= self._max_bytes

    def close(self, note: Callable[[], Any] | None = None) -> None:
        """Complete the last shard and write the manifest.

        Raises:
            OSError: The folder cannot be written.
            DataError: The folder has a file ``manifest.json`` that is not a manifest.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._at_least_one and not self._unpublished and not self.entries:
                self._begin()
            if self._open is not None:
                self._finish(self._open, note() if note else None)
            for thread in self._threads.values():
                thread.finish()
        except BaseException as exc:
            self.abort(wait=isinstance(exc, Exception))
            raise
        if self._manifest:
            self._write_manifest()

    def _write_manifest(self) -> None:
        """Write the manifest, then remove the shards after the last one that it listed from an earlier, larger set."""
        storage = None if self._on_disk else self._storage
        manifest, names = read_manifest_at(self.folder, storage), list[str]()
        while not self._single and manifest and manifest.entry(name := self._name % (self._next + len(names))):
            names.append(name)
        write_manifest_at(self.folder, storage, self.entries, without=names)
        target = open_storage(self.folder, storage)
        for name in names:
            target.delete(f"{self.folder}/{name}")
            target.delete(f"{self.folder}/{name}{INDEX_SUFFIX}")

    def abort(self, wait: bool = True) -> None:
        """Discard the shard that is being written; published shards stay.

        Args:
            wait: Let complete shards that are still being published appear.
        """
        self._closed = True
        for thread in self._threads.values():
            thread.stop(after_all=wait)
        for writer in self._unpublished:
            writer.abort()
        self._unpublished.clear()
        self._open = None

    def _begin(self) -> TarWriter:
        while not self._may_open.acquire(timeout=_FAILURE_CHECK_S):
            for thread in self._threads.values():
                thread.check()
        name = self._name if self._single else self._name % self._next
        url = f"{self.folder.rstrip('/')}/{name}" if self.folder != "/" else f"/{name}"
        self._open = TarWriter(url, self._encode, self._compress, storage=self._storage, **self._threads)
        self._next += 1
        self._unpublished.append(self._open)
        return self._open

    def _finish(self, writer: TarWriter, note: Any) -> None:
        self._open = None
        writer.close(partial(self._on_published, writer, note))

    def _on_published(self, writer: TarWriter, note: Any, entry: ShardEntry) -> None:
        self._unpublished.remove(writer)
        self._may_open.release()
        self.entries.append(entry)
        if self._published is not None:
            self._published(entry, note)


def _ending(field: str, key: str) -> bytes:
    field_bytes(b"", field, key)
    return f".{field}".encode("utf-8", "surrogateescape")


_PLAIN = np.frombuffer(member_header(b"", 0), np.uint8)  # of which only the name, the size and the checksum differ
_PLAIN_SUM = int(bytes(_PLAIN[148:154]), 8)


def _encode_alike(samples: Sequence[Mapping[str, Any]]) -> EncodedSamples | None:
    """Encode samples at once; None unless they have the same fields, of bytes, and names that plain headers hold."""
    keys: list[Any] = [sample.get("__key__") for sample in samples]
    names = {tuple(sample) for sample in samples}
    if len(names) != 1 or len({*keys}) < len(keys) or not all(map(is_plain_key, keys)):
        return None
    fields = sorted(field for field in names.pop() if not field[:2] == "__" == field[-2:])
    values = [sample[field] for sample in samples for field in fields]
    if {*map(type, values)} != {bytes}:
        return None
    endings = [_ending(field, keys[0]) for field in fields]
    members = [key.encode() + ending for key in keys for ending in endings]
    sizes = np.fromiter(map(len, values), np.int64, len(values))
    if max(map(len, members)) > 100 or not b"".join(endings).isascii() or sizes.max() >= 8**11:
        return None
    padding = -sizes % BLOCK
    ends = np.cumsum(BLOCK + sizes + padding)
    parts = zip(_plain_headers(members, sizes), values, padding.tolist(), strict=True)
    pieces = [piece for header, value, zeros in parts for piece in (header, value, ZEROS[:zeros])]
    starts = (ends - sizes - padding).tolist()
    return EncodedSamples(keys, tuple(fields), pieces, starts, sizes.tolist(), int(ends[-1]))


def _plain_headers(names: list[bytes], sizes: npt.NDArray[np.int64]) -> list[bytes]:
    """Return what ``member_header`` returns for each name and size."""
    rows, digits = np.tile(_PLAIN, (len(names), 1)), _octal(sizes, 11)
    rows[:, :100] = np.array(names, "S100").view(np.uint8).reshape(-1, 100)
    rows[:, 124:135] += digits
    sums = _PLAIN_SUM + rows[:, :100].sum(1, np.int64) + digits.sum(1, np.int64)
    rows[:, 148:154] = _octal(sums, 6) + ord("0")
    data = rows.tobytes()
    return [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]


def _octal(numbers: npt.NDArray[np.int64], digits: int) -> npt.NDArray[np.uint8]:
    return (numbers[:, None] >> np.arange(3 * digits - 3, -1, -3) & 7).astype(np.uint8)
