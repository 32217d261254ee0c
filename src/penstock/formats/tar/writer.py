"""Samples to shards: the same samples give the same bytes, and a shard appears whole or not at all."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import numpy as np

from penstock.errors import DataError, MissingExtra, PlanError
from penstock.formats.manifest import ShardEntry, read_manifest, write_manifest
from penstock.formats.publish import partial_path
from penstock.formats.tar.compression import SUFFIXES
from penstock.formats.tar.index import SUFFIX, IndexBuilder, Stamp, write_beside
from penstock.formats.tar.members import BLOCK, padded

Encode = Callable[[str, Any], bytes]
Target = str | os.PathLike[str]

_END = bytes(2 * BLOCK)
_BATCH = 1 << 20  # bytes handed to the system at once
_MAX_OCTAL = 8**11
_SHARD = "shard-%06d.tar"
_PAX_NAME = b"././@PaxHeader"
_MIDDLE = b"0000644\0" + b"0000000\0" * 2  # mode, user, group
_TAIL = b"ustar\00000" + bytes(64) + b"0000000\0" * 2  # magic, version, names of user and group, device


def _header(name: bytes, size: int, kind: bytes = b"0", prefix: bytes = b"") -> bytes:
    """Make a POSIX header block that says nothing but name and size."""
    front = name.ljust(100, b"\0") + _MIDDLE + b"%011o\0" % size + b"00000000000\0"
    back = kind + bytes(100) + _TAIL + prefix.ljust(155, b"\0") + bytes(12)
    return b"%b%06o\0 %b" % (front, sum(front) + sum(back) + 8 * 32, back)


def _member_header(name: bytes, size: int) -> bytes:
    """Make the header of a member, with a PAX record before it for what a POSIX header cannot say."""
    records = []
    place = _placed(name)
    if place is None:
        records.append(_record(b"path", name))
        place = b"", name[:100]
    if size >= _MAX_OCTAL:
        records.append(_record(b"size", b"%d" % size))
    if not records:
        return _header(place[1], size, prefix=place[0])
    body = b"".join(records)
    pax = _header(_PAX_NAME, len(body), b"x") + body + bytes(padded(len(body)) - len(body))
    return pax + _header(place[1], size if size < _MAX_OCTAL else 0, prefix=place[0])


def _placed(name: bytes) -> tuple[bytes, bytes] | None:
    """Split a name into prefix and name as POSIX headers hold them, if they can."""
    if not name.isascii():
        return None
    if len(name) <= 100:
        return b"", name
    cut = name.rfind(b"/", 0, 156)
    return (name[:cut], name[cut + 1 :]) if cut > 0 and len(name) - cut - 1 <= 100 else None


def _record(name: bytes, value: bytes) -> bytes:
    """Make a PAX record, whose length counts its own digits."""
    length = bare = len(name) + len(value) + 3
    while length != bare + len(str(length)):
        length = bare + len(str(length))
    return b"%d %b=%b\n" % (length, name, value)


class _Sink(io.RawIOBase):
    """A file that keeps the checksum and the number of its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.count = 0

    def writable(self) -> bool:
        """Tell that it can be written."""
        return True

    def write(self, data: Any) -> int:
        """Write it all."""
        left = memoryview(data)
        self.hash.update(left)
        self.count += len(left)
        size = len(left)
        while left:
            left = left[self._file.write(left) :]
        return size


class TarWriter:
    """Writes one archive, sample by sample; the same samples give the same bytes.

    A path is written under a temporary name in its folder and gets its own when it is closed, with an index
    beside it. Leaving the ``with`` block by an exception leaves nothing behind. An open file is written to
    as it is, and stays open.

    Args:
        target: A path, or a binary file.
        encode: Turns the value of a field into bytes, given the field's name; without it values are bytes.
        compress: "gz", "zst", "bz2" or "xz"; for a path, its suffix says so by default.

    Raises:
        PlanError: The compression is unknown.
        MissingExtra: It is zstd and there is no zstandard.
        OSError: The file cannot be made.
    """

    def __init__(self, target: Target | BinaryIO, encode: Encode | None = None, compress: str | None = None) -> None:
        self.path = Path(target) if isinstance(target, str | os.PathLike) else None
        self.samples = 0
        self.nbytes = 0
        self.entry: ShardEntry | None = None
        self._encode = encode
        self._keys: set[str] = set()
        self._builder = IndexBuilder()
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._parts: list[bytes | memoryview] = []
        self._waiting = 0
        self._closed = False
        compress = compress or (_suffix_compression(self.path.name) if self.path else None)
        if self.path is None:
            self._file = cast(BinaryIO, target)
        else:
            self._partial = partial_path(self.path)
            self._file = cast(BinaryIO, open(self._partial, "xb", buffering=0))  # noqa: SIM115
        try:
            self._sink = _Sink(self._file)
            self._out = _compressor(self._sink, compress)
        except BaseException:
            self._drop()
            raise

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
        return self.write_parts(*self.parts(sample))

    def parts(self, sample: Mapping[str, Any]) -> tuple[str, list[tuple[str, bytes, Any]]]:
        """Check a sample and make its headers, without writing it.

        Returns:
            Its key, and for each field the name, the header and the value.

        Raises:
            DataError: The key or a field cannot be stored as it is.
        """
        key = sample["__key__"]
        _check_key(key)
        parts = []
        for field in sorted(field for field in sample if not (field.startswith("__") and field.endswith("__"))):
            value = sample[field] if self._encode is None else self._encode(field, sample[field])
            data = _checked(value, field, key)
            name = f"{key}.{field}".encode("utf-8", "surrogateescape")
            parts.append((field, _member_header(name, len(data)), data))
        if not parts:
            raise DataError("a sample without fields cannot be stored", self._shard, key)
        return key, parts

    def write_parts(self, key: str, parts: list[tuple[str, bytes, Any]]) -> int:
        """Add a sample that :meth:`parts` has made.

        Raises:
            DataError: The key was written before.
            OSError: The file cannot be written.
        """
        if self._closed:
            raise ValueError("the archive is closed")
        if key in self._keys:
            raise DataError("the key was written before", self._shard, key)
        self._keys.add(key)
        before = self.nbytes
        for _, header, data in parts:
            size = len(data)
            self.nbytes += len(header) + padded(size)
            self._starts.append(self.nbytes - padded(size))
            self._sizes.append(size)
            self._parts += (header, data, bytes(-size % BLOCK))
        self._builder.add(key.encode("utf-8", "surrogateescape"), tuple(field for field, _, _ in parts))
        self.samples += 1
        self._waiting += self.nbytes - before
        if self._waiting >= _BATCH:
            self._flush()
        return self.nbytes - before

    def close(self) -> None:
        """End the archive; a path appears now, and ``entry`` tells what a manifest should say about it.

        Raises:
            OSError: The file cannot be written.
        """
        if self._closed:
            return
        try:
            self._parts.append(_END)
            self.nbytes += len(_END)
            self._flush()
            if self._out is not self._sink:
                self._out.close()
            if self.path is not None:
                self._publish(self.path)
        except BaseException:
            self._drop()
            raise
        self._closed = True
        name = self.path.name if self.path else ""
        self.entry = ShardEntry(name, self.samples, self._sink.count, self._sink.hash.hexdigest())

    def abort(self) -> None:
        """Give up: a path does not appear. What an open file has got stays there, without an end marker."""
        if not self._closed:
            self._drop()

    @property
    def _shard(self) -> str | None:
        return None if self.path is None else str(self.path)

    def _flush(self) -> None:
        batch = b"".join(self._parts)
        self._parts.clear()
        self._waiting = 0
        self._out.write(batch)

    def _publish(self, path: Path) -> None:
        os.fsync(self._file.fileno())
        stamp = Stamp.of(os.fstat(self._file.fileno()))
        self._file.close()
        path.with_name(path.name + SUFFIX).unlink(missing_ok=True)  # of a shard that is being replaced
        self._partial.replace(path)
        start, size = np.array(self._starts, np.int64), np.array(self._sizes, np.int64)
        write_beside(str(path), self._builder.build(start, size, 0, self.nbytes).stamped(stamp))

    def _drop(self) -> None:
        self._closed = True
        if self.path is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)


class ShardWriter:
    """Writes samples into numbered shards, each with an index beside it, and a manifest when done.

    A shard appears when it is complete, in place of one of the same name; shards that an earlier set of that name had
    beyond this one are removed with it. Leaving the ``with`` block by an exception removes the one that was
    being written and leaves those before it, without a manifest.

    Args:
        target: A folder (made if need be; shards are ``shard-000000.tar`` ...), a pattern with a number
            (``train-%04d.tar``), or the path of one archive that takes everything.
        max_bytes: The most bytes of a shard file, unless one sample alone has more. What compression will
            save is not known beforehand, so compressed shards turn out smaller.
        max_samples: The most samples of a shard.
        compress: "gz", "zst", "bz2" or "xz"; names get the suffix. By default as the target's suffix says.
        encode: Turns the value of a field into bytes, given the field's name; without it values are bytes.
        start: The number of the first shard.
        manifest: Write the manifest on closing; otherwise ``entries`` tells what it should say.

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
    ) -> None:
        path = os.fspath(target)
        if (max_bytes is not None and max_bytes <= 0) or (max_samples is not None and max_samples <= 0):
            raise PlanError("max_bytes and max_samples must be above zero")
        if compress is not None and compress not in SUFFIXES:
            raise PlanError(f"unknown compression {compress!r}: one of {', '.join(SUFFIXES)}")
        folder, name = os.path.split(path)
        single = "%" not in name and _is_archive(name)
        if "%" not in name and not single:
            folder, name = path, _SHARD
        self._compress = compress or _suffix_compression(name)
        if compress is not None and _suffix_compression(name) is None:
            name += SUFFIXES[compress]
        if not single:
            _check_pattern(name)
        self.folder = Path(folder or ".")
        self.entries: list[ShardEntry] = []
        self._name, self._single = name, single
        self._max_bytes = None if single else max_bytes
        self._max_samples = None if single else max_samples
        self._encode, self._next, self._manifest = encode, start, manifest
        self._open: TarWriter | None = None
        self._closed = False
        self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample, to a new shard where the open one would become too large.

        Raises:
            DataError: The key or a field cannot be stored as it is, or the shard has the key already.
            OSError: The folder cannot be written.
        """
        if self._closed:
            raise ValueError("the writer is closed")
        writer = self._open or self._begin()
        key, parts = writer.parts(sample)
        if writer.samples and self._over(writer, sum(len(head) + padded(len(data)) for _, head, data in parts)):
            self._finish(writer)
            writer = self._begin()
        writer.write_parts(key, parts)

    def close(self) -> None:
        """Complete the last shard and write the manifest.

        Raises:
            OSError: The folder cannot be written.
            DataError: The folder has a file ``manifest.json`` that is no manifest.
        """
        if self._closed:
            return
        self._closed = True
        if self._open is None and not self.entries:  # nothing was written: an empty shard says so
            self._begin()
        if self._open is not None:
            self._finish(self._open)
        if self._manifest:
            write_manifest(self.folder, self.entries, without=self._remove_left_over())

    def _remove_left_over(self) -> list[str]:
        """Remove the shards that an earlier, larger set of the same name had beyond this one; only the manifest's."""
        known = read_manifest(self.folder)
        gone: list[str] = []
        while not self._single and known and known.entry(name := self._name % (self._next + len(gone))):
            for path in (self.folder / name, self.folder / f"{name}{SUFFIX}"):
                path.unlink(missing_ok=True)
            gone.append(name)
        return gone

    def abort(self) -> None:
        """Give up the shard that is being written; complete ones stay."""
        self._closed = True
        if self._open is not None:
            self._open.abort()
            self._open = None

    def _over(self, writer: TarWriter, more: int) -> bool:
        if self._max_samples is not None and writer.samples >= self._max_samples:
            return True
        size = writer.nbytes + more + len(_END)
        if self._compress:
            size += size // 64 + 4096  # what cannot be compressed grows; none of the four by as much as this
        return self._max_bytes is not None and size > self._max_bytes

    def _begin(self) -> TarWriter:
        name = self._name if self._single else self._name % self._next
        self._next += 1
        self._open = TarWriter(self.folder / name, self._encode, self._compress)
        return self._open

    def _finish(self, writer: TarWriter) -> None:
        self._open = None
        writer.close()
        assert writer.entry is not None
        self.entries.append(writer.entry)


def _compressor(sink: _Sink, kind: str | None) -> Any:
    """Put a compressor before a file; the same bytes come out for the same bytes in."""
    file = cast(BinaryIO, sink)
    if kind is None:
        return sink
    if kind == "gz":
        return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6)
    if kind == "bz2":
        return bz2.BZ2File(file, "wb")
    if kind == "xz":
        return lzma.LZMAFile(file, "wb")
    if kind != "zst":
        raise PlanError(f"unknown compression {kind!r}: one of {', '.join(SUFFIXES)}")
    try:
        import zstandard
    except ImportError as exc:
        raise MissingExtra("writing zstd", "zstd") from exc
    return zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(file, closefd=False)


def _suffix_compression(name: str) -> str | None:
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


def _check_key(key: Any) -> None:
    """Refuse keys that would be read back as another one, or lead outside of a folder."""
    if not isinstance(key, str):
        raise DataError(f"a key must be text, not {type(key).__name__}", key=repr(key))
    folders, _, name = key.rpartition("/")
    problem = None
    if not key:
        problem = "the key is empty"
    elif not name:
        problem = "the key ends with a slash"
    elif "." in name:
        problem = "the key has a dot in its last part, where the field begins"
    elif key.startswith(("/", "./")) or ".." in folders.split("/"):
        problem = "the key is an absolute path or leads out of its folder"
    elif "\0" in key:
        problem = "the key holds a NUL character"
    if problem:
        raise DataError(problem, key=key)


def _checked(value: Any, field: str, key: str) -> Any:
    """Give the bytes of a field, refusing names and values that cannot be stored."""
    if not field or field[0] == "." or field != field.lower() or "/" in field or "\0" in field:
        raise DataError(f"{field!r} cannot be the name of a field: lower case, no slash, no leading dot", key=key)
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)  # a copy: the caller may go on with its buffer before it is written
    raise DataError(f"the field {field!r} must be bytes, not {type(value).__name__}", key=key)
