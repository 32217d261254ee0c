"""Compressed archives as streams: told by their first bytes, unpacked front to back, within limits."""

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

from penstock.errors import DataError, MissingExtra
from penstock.formats.tar.members import BLOCK, checksum_holds

SUFFIXES = {"gz": ".gz", "bz2": ".bz2", "xz": ".xz", "zst": ".zst"}
_MAGICS = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zst"}
_CHUNK = 1 << 18  # what one damaged chunk can take along, against the cost of a call
_XZ_MEMORY = 1 << 29  # xz -9 needs 65 MiB to unpack; more than 512 MiB is an attack
_FREE_BYTES = 64 << 20  # any archive may unpack to this much, whatever its ratio


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """How far a compressed archive may unpack.

    Attributes:
        max_bytes: The most bytes it may unpack to.
        max_ratio: The most times its own size, once it is beyond 64 MiB.
    """

    max_bytes: int = 64 << 30
    max_ratio: int = 1000

    def problem(self, packed: int, unpacked: int) -> str | None:
        """Say what is wrong with so many bytes out of so many, if anything."""
        if unpacked > self.max_bytes:
            return f"refused: it unpacks to more than {self.max_bytes} bytes"
        if unpacked > _FREE_BYTES and unpacked > packed * self.max_ratio:
            return f"refused: it unpacks to more than {self.max_ratio} times its size, as an attack would"
        return None


LIMITS = ArchiveLimits()


def compression(head: bytes) -> str | None:
    """Tell by its first block how an archive is compressed; a good tar header is never taken for magic."""
    if len(head) >= BLOCK and checksum_holds(head[:BLOCK]):
        return None
    return next((kind for magic, kind in _MAGICS.items() if head.startswith(magic)), None)


def unpacked(file: BinaryIO, kind: str | None, packed: Callable[[], int], limits: ArchiveLimits) -> Iterator[bytes]:
    """Give the bytes of an archive in chunks, unpacked, front to back.

    Args:
        file: The archive, at its start.
        kind: What :func:`compression` told.
        packed: How many compressed bytes there are (or were read so far).
        limits: How far it may unpack.

    Raises:
        DataError: The stream is damaged (what came before was given), or beyond the limits.
        MissingExtra: It is compressed by zstd and there is no zstandard.
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
    reader: Any = file
    if kind == "gz":
        reader = gzip.GzipFile(fileobj=file, mode="rb")
    elif kind == "bz2":
        reader = bz2.BZ2File(file)
    elif kind == "zst":
        return _zstd(file)
    return iter(partial(reader.read1, _CHUNK), b"")  # read() would lose what it has when it meets a damage


def _xz(file: BinaryIO) -> Iterator[bytes]:
    """Unpack by hand: lzma.LZMAFile has no bound for the memory a stream may ask for."""
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
    try:
        import zstandard
    except ImportError as exc:
        raise MissingExtra("reading zstd", "zstd") from exc
    reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    try:
        yield from iter(partial(reader.read, _CHUNK), b"")
    except zstandard.ZstdError as exc:
        raise ValueError(str(exc)) from exc


class Counted(io.RawIOBase):
    """A stream with its first bytes put back, that counts what was read of it."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._more: Callable[[int], bytes] = getattr(rest, "read1", rest.read)  # read() would wait for more
        self.count = 0

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, first from the bytes put back."""
        data = self._head[: len(buffer)] or self._more(len(buffer))
        self._head = self._head[len(data) :]
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)
