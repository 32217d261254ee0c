"""Samples to shards: the same samples give the same bytes, and a shard appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import numpy as np

from penstock.blobs.background import BackgroundThread, Submit, run_now
from penstock.blobs.compression import SUFFIXES, compressor
from penstock.blobs.draft import Draft, FileDraft, UploadDraft, put_object
from penstock.blobs.file_range import FileRange, joined
from penstock.blobs.stamp import Stamp
from penstock.errors import DataError, PlanError
from penstock.formats.manifest import (
    ShardEntry,
    read_manifest,
    read_manifest_at,
    write_manifest,
    write_manifest_at,
)
from penstock.formats.tar.archive import BLOCK, EncodedSamples, check_key, checked, encoded, member_header
from penstock.formats.tar.index import SUFFIX, Index, IndexBuilder, write_beside
from penstock.formats.tar.index import remove_shards as remove_shards
from penstock.formats.tar.shard_names import named, on_disk, suffix_compression
from penstock.formats.tar.sink import END, OpenFile, Sink, file_size
from penstock.storage import Storage, local_path, open_storage, redacted

Encode = Callable[[str, Any], bytes]
Target = str | os.PathLike[str]

_ZEROS = bytes(BLOCK)
_BATCH = 1 << 20  # bytes handed to the system at once
_LIGHT = 16  # bytes that stay in their file weigh so much less: they take no memory, and large copies less time
_INK_ROOM = 16  # batches on their way to the disk: enough to write on while a sample is long in coming
_PRESS_ROOM = 2  # shards that are complete and wait to be published


class TarWriter:
    """Writes one archive, sample by sample; the same samples give the same bytes.

    A path or URL appears when it is closed, with an index beside it; leaving the ``with`` block by an exception
    leaves nothing behind. An open file is written to as it is, and stays open.

    Args:
        target: A path, a URL, or a binary file.
        encode: Turns the value of a field into bytes, given the field's name; by default bytes stay as they are and
            other values are stored by the field's extension, as ``penstock.codecs.encode`` does.
        compress: "gz", "zst", "bz2" or "xz"; for a path, its suffix says so by default.
        storage: Where URLs lie; by default as their scheme says.
        ink: Who does the writing, ``sums`` the checksums, and ``press`` the publishing; whoever calls, by default.
        sums: See ``ink``.
        press: See ``ink``.

    Raises:
        PlanError: The compression is unknown.
        MissingExtra: It is zstd and there is no zstandard.
        OSError: The file cannot be made.
    """

    def __init__(
        self,
        target: Target | BinaryIO,
        encode: Encode | None = None,
        compress: str | None = None,
        *,
        storage: Storage | None = None,
        ink: Submit = run_now,
        sums: Submit = run_now,
        press: Submit = run_now,
    ) -> None:
        self.url = os.fspath(target) if isinstance(target, str | os.PathLike) else None
        self.samples = 0
        self.nbytes = 0
        self.entry: ShardEntry | None = None
        self._encode, self._ink, self._sums, self._press = encode, ink, sums, press
        self._keys: set[str] = set()
        self._kinds: dict[tuple[str, ...], dict[str, bytes]] = {}
        self._builder = IndexBuilder()
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._parts: list[Any] = []
        self._waiting = 0
        self._closed = False
        self._failure: BaseException | None = None  # of a write in the background: raised to whoever writes on
        self._storage = None if self.url is None or on_disk(self.url) else open_storage(self.url, storage)
        compress = compress or (suffix_compression(self.url) if self.url else None)
        self._draft = self._begun(target)
        try:
            self._sink = Sink(self._draft, sums)
            self._out = compressor(cast(BinaryIO, self._sink), compress)
        except BaseException:
            self._drop()
            raise

    def _begun(self, target: Any) -> Draft:
        if self.url is None:
            return OpenFile(cast(BinaryIO, target))
        if self._storage is not None:  # the index of a shard that is being replaced must go before it does
            return UploadDraft(self._storage.put(self.url), partial(self._storage.delete, self.url + SUFFIX))
        path = Path(local_path(self.url))
        return FileDraft(path, partial(path.with_name(path.name + SUFFIX).unlink, missing_ok=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def write(self, sample: Mapping[str, Any]) -> int:
        """Add a sample and give the number of archive bytes it takes.

        Fields named ``__like_this__`` are not written; the others in the order of their names.

        Raises:
            DataError: The key or a field cannot be stored as it is, or the key was written before. Nothing of
                the sample was written.
            OSError: The file cannot be written.
        """
        return self.write_parts(self.parts(sample))

    def parts(self, sample: Mapping[str, Any]) -> EncodedSamples:
        """Check a sample and make its headers, without writing it.

        Raises:
            DataError: The key or a field cannot be stored as it is.
        """
        if (key := sample.get("__key__")) is None:
            raise DataError("a sample has no '__key__'", self._shard)
        check_key(key)
        kind = self._kind(tuple(sample), key)
        stem = key.encode("utf-8", "surrogateescape")
        pieces: list[Any] = []
        starts: list[int] = []
        sizes: list[int] = []
        at = 0
        for field, ending in kind.items():
            data = sample[field] if self._encode is None else self._encode(field, sample[field])
            if type(data) is not bytes:
                data = checked(data if self._encode else encoded(data, field, key), field, key)
            size = len(data)
            header = member_header(stem + ending, size)
            padding = -size % BLOCK
            pieces += (header, data, _ZEROS[:padding])
            starts.append(at + len(header))
            sizes.append(size)
            at += len(header) + size + padding
        return EncodedSamples([key], tuple(kind), pieces, starts, sizes, at)

    def _kind(self, names: tuple[str, ...], key: str) -> dict[str, bytes]:
        """The fields to be stored and how their members' names end; most samples have the names of the one before."""
        known = self._kinds.get(names)
        if known is None:
            known = {field: _ending(field, key) for field in sorted(names) if not field[:2] == "__" == field[-2:]}
            if not known:
                raise DataError("a sample without fields cannot be stored", self._shard, key)
            self._kinds[names] = known
        return known

    def write_parts(self, parts: EncodedSamples) -> int:
        """Add samples as :meth:`parts` makes them, and give the number of bytes they take.

        Raises:
            DataError: A key was written before.
            OSError: The file cannot be written.
        """
        if self._closed:
            raise self._failure or ValueError("the archive is closed")
        keys, before = parts.keys, self.nbytes
        if not self._keys.isdisjoint(keys):
            raise DataError("the key was written before", self._shard, next(key for key in keys if key in self._keys))
        self._keys.update(keys)
        self._parts += parts.pieces
        self._starts += [before + start for start in parts.starts]
        self._sizes += parts.sizes
        self._builder.add_all([key.encode("utf-8", "surrogateescape") for key in keys], parts.kind)
        self.samples += len(keys)
        self.nbytes = before + parts.nbytes
        self._waiting += parts.nbytes // (_LIGHT if type(parts.pieces[0]) is FileRange else 1)
        if self._waiting >= _BATCH:
            self._flush()
        return parts.nbytes

    def close(self, published: Callable[[ShardEntry], object] | None = None) -> None:
        """End the archive; a path appears now, and ``entry`` tells what a manifest should say about it.

        Args:
            published: Called with that entry, by whoever publishes.

        Raises:
            OSError: The file cannot be written.
        """
        if self._closed:
            return
        self._closed = True
        self._parts.append(END)
        self.nbytes += len(END)
        self._flush()
        self._ink(partial(self._end, published))

    def abort(self) -> None:
        """Give up: a path does not appear. What an open file has got stays there, without an end marker."""
        self._closed = True
        if self.entry is None:
            self._drop()

    @property
    def _shard(self) -> str | None:
        return None if self.url is None else redacted(self.url)

    def _flush(self) -> None:
        batch, self._parts, self._waiting = self._parts, [], 0
        self._ink(partial(self._write, batch))

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
        # The checksums are complete when those who make them come by here.
        self._sums(partial(self._press, partial(self._publish, published)))

    def _publish(self, published: Callable[[ShardEntry], object] | None) -> None:
        try:
            status = self._draft.publish()
        except BaseException as exc:
            self._drop(exc)
            raise
        name = self.url.rpartition("/")[2] if self.url else ""
        entry = ShardEntry(name, self.samples, self._sink.count, self._sink.hash.hexdigest())
        if self.url is not None:
            self._write_index(self.url, Stamp.of(status) if status else Stamp(self._sink.count))
        self.entry = entry
        if published is not None:
            published(entry)

    def _write_index(self, url: str, stamp: Stamp) -> None:
        start, size = np.array(self._starts, np.int64), np.array(self._sizes, np.int64)
        index: Index = self._builder.build(start, size, 0, self.nbytes).stamped(stamp, self._sink.grid.values())
        if self._storage is None:
            write_beside(local_path(url), index)
        else:
            put_object(self._storage, url + SUFFIX, index.to_bytes())

    def _drop(self, why: BaseException | None = None) -> None:
        self._closed, self._failure = True, self._failure or why
        self._draft.drop()


class ShardWriter:
    """Writes samples into numbered shards, each with an index beside it, and a manifest when done.

    A shard appears when it is complete, in place of one of the same name; shards that an earlier set of that name had
    beyond this one are removed with it. Leaving the ``with`` block by an exception removes the one that was
    being written and leaves those before it, without a manifest.

    Args:
        target: A folder (made if need be; shards are ``shard-000000.tar`` ...), a pattern with a number
            (``train-%04d.tar``), or one archive that takes everything; a path or a URL.
        max_bytes: The most bytes of a shard file, unless one sample alone has more. What compression will
            save is not known beforehand, so compressed shards turn out smaller.
        max_samples: The most samples of a shard.
        compress: "gz", "zst", "bz2" or "xz"; names get the suffix. By default as the target's suffix says.
        encode: Turns the value of a field into bytes, given the field's name; by default as ``TarWriter`` has it.
        start: The number of the first shard.
        manifest: Write the manifest on closing; otherwise ``entries`` tells what it should say.
        storage: Where URLs lie; by default as their scheme says.
        background: Write and publish in threads of its own; a failure there is raised by a later call.
        published: Called for every shard that has appeared, in order, with its entry and the note that its last
            call of ``write`` or ``close`` made.

    Raises:
        PlanError: A limit or the compression makes no sense.
    """

    def __init__(
        self,
        target: Target,
        *,
        max_bytes: float | None = None,
        max_samples: int | None = None,
        compress: str | None = None,
        encode: Encode | None = None,
        start: int = 0,
        manifest: bool = True,
        storage: Storage | None = None,
        background: bool = False,
        published: Callable[[ShardEntry, Any], object] | None = None,
    ) -> None:
        url = os.fspath(target)
        if (max_bytes is not None and max_bytes <= 0) or (max_samples is not None and max_samples <= 0):
            raise PlanError("max_bytes and max_samples must be above zero")
        if compress is not None and compress not in SUFFIXES:
            raise PlanError(f"unknown compression {compress!r}: one of {', '.join(SUFFIXES)}")
        self._disk = on_disk(url)
        folder, name, single = named(local_path(url) if self._disk else url, compress)
        self.folder = folder
        self.entries: list[ShardEntry] = []
        self._compress = compress or suffix_compression(name)
        self._name, self._single = name, single
        self._max_bytes = None if single else max_bytes
        self._max_samples = None if single else max_samples
        self._encode, self._next, self._manifest = encode, start, manifest
        self._storage, self._published = storage, published
        self._open: TarWriter | None = None
        self._under_way: list[TarWriter] = []
        self._closed = False
        if self._disk:
            os.makedirs(folder, exist_ok=True)
        # The first writes, the second hashes, the third waits for the disk or for the other end of the line.
        rooms = {"ink": _INK_ROOM, "sums": _INK_ROOM, "press": _PRESS_ROOM} if background else {}
        self._lines = {name: BackgroundThread(f"penstock-{name}", room) for name, room in rooms.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort(wait=issubclass(kind, Exception))

    def write(self, sample: Mapping[str, Any], note: Callable[[], Any] | None = None) -> None:
        """Add a sample, to a new shard where the open one would become too large.

        Args:
            sample: The sample.
            note: Asked before the sample is written, if it begins a new shard; ``published`` gets the answer with
                the shard before it.

        Raises:
            DataError: The key or a field cannot be stored as it is, or the shard has the key already.
            OSError: The folder cannot be written.
        """
        if self._closed:
            raise ValueError("the writer is closed")
        self.write_parts((self._open or self._begin()).parts(sample), note)

    def write_parts(self, parts: EncodedSamples, note: Callable[[], Any] | None = None) -> None:
        """Add samples whose headers are made, all to one shard, as :meth:`write` does.

        Raises:
            DataError: The shard has a key already.
            OSError: The folder cannot be written.
        """
        if self._closed:
            raise ValueError("the writer is closed")
        writer = self._open or self._begin()
        if not self.fits(len(parts.keys), parts.nbytes):
            self._finish(writer, note() if note else None)
            writer = self._begin()
        writer.write_parts(parts)

    @property
    def single(self) -> str | None:
        """The name of the one archive that takes everything; None where there are numbered shards."""
        return self._name if self._single else None

    def fits(self, samples: int, nbytes: int) -> bool:
        """Tell whether samples go into the open shard, or a new one where none is open; one goes into an empty one."""
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
            DataError: The folder has a file ``manifest.json`` that is no manifest.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._open is None and self._next == 0:  # nothing was written: an empty shard says so
                self._begin()
            if self._open is not None:
                self._finish(self._open, note() if note else None)
            for line in self._lines.values():
                line.finish()
        except BaseException as exc:
            self.abort(wait=isinstance(exc, Exception))
            raise
        if self._manifest and self._disk:
            write_manifest(self.folder, self.entries, without=self._remove_left_over())
        elif self._manifest:
            write_manifest_at(self.folder, self._storage, self.entries, without=self._remove_left_over())

    def _remove_left_over(self) -> list[str]:
        """Remove the shards that an earlier, larger set of the same name had beyond this one; only the manifest's."""
        known = read_manifest(self.folder) if self._disk else read_manifest_at(self.folder, self._storage)
        gone: list[str] = []
        while not self._single and known and known.entry(name := self._name % (self._next + len(gone))):
            gone.append(name)
        remove_shards(self.folder, gone, self._storage)
        return gone

    def abort(self, wait: bool = True) -> None:
        """Give up the shard that is being written; complete ones stay, and those about to appear if one may wait."""
        self._closed = True
        for line in self._lines.values():
            line.stop(after_all=wait)
        for writer in self._under_way:
            writer.abort()
        self._under_way.clear()
        self._open = None

    def _begin(self) -> TarWriter:
        name = self._name if self._single else self._name % self._next
        url = f"{self.folder.rstrip('/')}/{name}" if self.folder != "/" else f"/{name}"
        self._open = TarWriter(url, self._encode, self._compress, storage=self._storage, **self._lines)
        self._next += 1
        self._under_way.append(self._open)
        return self._open

    def _finish(self, writer: TarWriter, note: Any) -> None:
        self._open = None
        writer.close(partial(self._appeared, writer, note))

    def _appeared(self, writer: TarWriter, note: Any, entry: ShardEntry) -> None:
        self._under_way.remove(writer)
        self.entries.append(entry)
        if self._published is not None:
            self._published(entry, note)


def _ending(field: str, key: str) -> bytes:
    checked(b"", field, key)
    return f".{field}".encode("utf-8", "surrogateescape")
