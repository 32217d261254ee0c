"""Bytes that stay in their file until they are written: the system copies them, nobody here holds them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.errors import StorageError

_CHUNK = 1 << 20
_NOT_SO = {errno.EINVAL, errno.EXDEV, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP, errno.ETXTBSY, errno.EPERM}


class FileRange:
    """The bytes of a file from one place to another.

    Args:
        owner: Keeps the file open as long as it lives.
        fd: The file.
        start: The first byte.
        stop: The byte behind the last one.
    """

    __slots__ = ("fd", "owner", "start", "stop")

    def __init__(self, owner: object, fd: int, start: int, stop: int) -> None:
        self.owner, self.fd, self.start, self.stop = owner, fd, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def grow(self, other: FileRange) -> bool:
        """Take in the range that follows this one, if it does."""
        if other.fd != self.fd or other.owner is not self.owner or other.start != self.stop:
            return False
        self.stop = other.stop
        return True

    def copy_to(self, fd: int) -> None:
        """Have the system copy them to where a file stands, by the first of its ways that it has for these two.

        Raises:
            StorageError: The file has become shorter.
            OSError: They cannot be written.
        """
        at = self.start
        for way in _WAYS:
            try:
                while at < self.stop:
                    at += _some(way(self.fd, fd, at, self.stop - at))
                return
            except OSError as exc:
                if exc.errno not in _NOT_SO:
                    raise

    def chunks(self, buffer: bytearray | None = None) -> Iterator[memoryview]:
        """Read them, piece by piece, all into one buffer.

        Raises:
            StorageError: The file has become shorter.
        """
        room = memoryview(buffer if buffer is not None else bytearray(_CHUNK))
        at = self.start
        while at < self.stop:
            piece = room[: min(len(room), self.stop - at)]
            done = _some(os.preadv(self.fd, [piece], at))
            at += done
            yield piece[:done]


def _some(done: int) -> int:
    if not done:
        raise StorageError("a shard has become shorter while it was copied")
    return done


def _by_range(source: int, target: int, start: int, size: int) -> int:
    return os.copy_file_range(source, target, size, start)


def _by_page(source: int, target: int, start: int, size: int) -> int:
    return os.sendfile(target, source, start, size)


def _by_hand(source: int, target: int, start: int, size: int) -> int:
    return os.write(target, os.pread(source, min(size, _CHUNK), start))


_WAYS: tuple[Callable[[int, int, int, int], int], ...] = (_by_range, _by_page, _by_hand)


def joined(pieces: Iterable[Any]) -> bytes:
    """All pieces as bytes, read where they are ranges."""
    return b"".join(
        b"".join(bytes(chunk) for chunk in piece.chunks()) if type(piece) is FileRange else piece for piece in pieces
    )


def runs(pieces: Iterable[Any]) -> Iterator[FileRange | list[Any]]:
    """Give pieces in order: ranges that follow each other as one, all that lies between two as a list."""
    last: FileRange | None = None
    between: list[Any] = []
    for piece in pieces:
        if type(piece) is not FileRange:
            if last is not None:
                yield last
                last = None
            between.append(piece)
        elif last is None or not last.grow(piece):
            if last is not None:
                yield last
            if between:
                yield between
                between = []
            last = FileRange(piece.owner, piece.fd, piece.start, piece.stop)
    if last is not None:
        yield last
    if between:
        yield between
