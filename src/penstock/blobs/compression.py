"""Compressed files as streams: recognised by their first bytes, decompressed within limits, and written."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from penstock.errors import DataError, PlanError, import_extra

COMPRESSION_SUFFIXES = {"gz": ".gz", "bz2": ".bz2", "xz": ".xz", "zst": ".zst"}
_MAGICS = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zst"}
_CHUNK = 1 << 18  # one damaged chunk loses this much, against the cost of a call
_XZ_MEMORY = 1 << 29  # xz -9 needs 65 MiB to decompress; more than 512 MiB is an attack
_FREE_BYTES = 64 << 20  # any file may decompress to this much, whatever its ratio


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """How large a compressed file may become when it is decompressed.

    Attributes:
        max_bytes: The most bytes it may decompress to.
        max_ratio: The most times its own size that it may decompress to, beyond 64 MiB.
    """

    max_bytes: int = 64 << 30
    max_ratio: int = 1000

    def problem(self, packed: int, unpacked: int) -> str | None:
        """Return why ``packed`` bytes must not decompress to ``unpacked`` bytes; None if they may."""
        if unpacked > self.max_bytes:
            return f"refused: it decompresses to more than {self.max_bytes} bytes"
        if unpacked > _FREE_BYTES and unpacked > packed * self.max_ratio:
            return f"refused: it decompresses to more than {self.max_ratio} times its size, as an attack would"
        return None


LIMITS = ArchiveLimits()


def detect(head: bytes) -> str | None:
    """Recognise the compression of a file by its first bytes; None if it is not compressed."""
    return next((kind for magic, kind in _MAGICS.items() if head.startswith(magic)), None)


def decompressed(file: BinaryIO, kind: str | None, packed: Callable[[], int], limits: ArchiveLimits) -> Iterator[bytes]:
    """Read a file in chunks, decompressed, front to back.

    Args:
        file: The file, at its start.
        kind: What :func:`detect` returned.
        packed: Returns how many compressed bytes there are, or how many were read so far.
        limits: How large it may become.

    Raises:
        DataError: The stream is damaged (the bytes before the damage were yielded), or exceeds the limits.
        MissingExtra: The file is compressed by zstd and zstandard is not installed.
    """
    done = 0
    chunks = _chunks(file, kind)
    while True:
        try:
            chunk = next(chunks, b"")
        except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as exc:
            if isinstance(exc, OSError) and exc.errno is not None:
                raise
            raise DataError(f"the {kind} stream is damaged: {exc}") from exc
        if not chunk:
            return
        done += len(chunk)
        if kind is not None and (problem := limits.problem(packed(), done)):
            raise DataError(problem)
        yield chunk


def _chunks(file: BinaryIO, kind: str | None) -> Iterator[bytes]:
    if kind == "xz":
        return _xz(file)
    if kind == "zst":
        return _zstd(file)
    reader: Any = file
    if kind == "gz":
        reader = gzip.GzipFile(fileobj=file, mode="rb")
    elif kind == "bz2":
        reader = bz2.BZ2File(file)
    return iter(partial(reader.read1, _CHUNK), b"")  # read() would lose the bytes before any damage


def _xz(file: BinaryIO) -> Iterator[bytes]:
    """Decompress xz without lzma.LZMAFile, which does not bound the memory that a stream may ask for."""
    data = b""
    while data := data or file.read(_CHUNK):
        stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
        while not stream.eof:
            if not data and stream.needs_input:
                data = file.read(_CHUNK)
                if not data:
                    raise EOFError("it ends before its end marker")
            if chunk := stream.decompress(data, _CHUNK):
                yield chunk
            data = b""
        data = stream.unused_data.lstrip(b"\0")  # streams may be padded with zeros


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    zstandard = import_extra("zstandard", "reading zstd", "zstd")
    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    try:
        yield from iter(partial(reader.read, _CHUNK), b"")
    except zstandard.ZstdError as exc:
        raise ValueError(str(exc)) from exc


class CountingReader(io.RawIOBase):
    """A stream with its first bytes put back, which counts the bytes that are read.

    Attributes:
        count: Bytes read so far.
    """

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._more: Callable[[int], bytes] = getattr(rest, "read1", rest.read)  # read() would wait for more
        self.count = 0

    def readable(self) -> bool:
        """Return True: it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, first from the bytes put back."""
        data = self._head[: len(buffer)] or self._more(len(buffer))
        self._head = self._head[len(data) :]
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)


def compressor(file: BinaryIO, kind: str | None) -> Any:
    """Put a compressor in front of a file; equal input gives equal output.

    Raises:
        PlanError: The compression is unknown.
        MissingExtra: The compression is zstd and zstandard is not installed.
    """
    if kind is None:
        return file
    if kind == "gz":
        return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6)
    if kind == "bz2":
        return bz2.BZ2File(file, "wb")
    if kind == "xz":
        return lzma.LZMAFile(file, "wb")
    if kind != "zst":
        raise PlanError(f"unknown compression {kind!r}: use one of {', '.join(COMPRESSION_SUFFIXES)}")
    zstandard = import_extra("zstandard", "writing zstd", "zstd")
    return zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(file, closefd=False)
