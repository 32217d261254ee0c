"""Byte ranges of open files that the kernel copies where it can, so that their bytes need not enter this process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.errors import StorageError

_CHUNK = 1 << 20
# Errors for one way of copying between two files; another way may work.
_UNSUPPORTED = {
    *(errno.EINVAL, errno.EXDEV, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP, errno.ETXTBSY, errno.EPERM),
    errno.ENOTSOCK,  # sendfile of systems other than Linux
}


class FileRange:
    """A byte range of an open file.

    Args:
        owner: Keeps the file open while it is referenced.
        fd: The descriptor of the file.
        start: The offset of the first byte.
        stop: The offset after the last byte.
    """

    __slots__ = ("fd", "owner", "start", "stop")

    def __init__(self, owner: object, fd: int, start: int, stop: int) -> None:
        self.owner, self.fd, self.start, self.stop = owner, fd, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def grow(self, other: FileRange) -> bool:
        """Extend this range by ``other`` if ``other`` begins where this one ends; return whether it does."""
        if other.fd != self.fd or other.owner is not self.owner or other.start != self.stop:
            return False
        self.stop = other.stop
        return True

    def copy_to(self, fd: int) -> None:
        """Copy the range to the current position of ``fd``, by the cheapest system call that the two files allow.

        Raises:
            StorageError: The file has become shorter.
            OSError: The bytes cannot be read or written.
        """
        at = self.start
        for copy in _COPIES:
            try:
                while at < self.stop:
                    at += _progress(copy(self.fd, fd, at, self.stop - at))
                return
            except OSError as exc:
                if exc.errno not in _UNSUPPORTED or copy is _COPIES[-1]:
                    raise

    def chunks(self, buffer: bytearray | None = None) -> Iterator[memoryview]:
        """Read the range chunk by chunk; every chunk is a view of the same buffer, which the next one overwrites.

        Raises:
            StorageError: The file has become shorter.
        """
        room = memoryview(buffer if buffer is not None else bytearray(_CHUNK))
        at = self.start
        while at < self.stop:
            piece = room[: min(len(room), self.stop - at)]
            done = _progress(os.preadv(self.fd, [piece], at))
            at += done
            yield piece[:done]


def _progress(done: int) -> int:
    if not done:
        raise StorageError("the file became shorter while it was being copied")
    return done


def _copy_file_range(source: int, target: int, start: int, size: int) -> int:
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOSYS, "only Linux copies ranges")
    return os.copy_file_range(source, target, size, start)


def _sendfile(source: int, target: int, start: int, size: int) -> int:
    return os.sendfile(target, source, start, size)


def _read_and_write(source: int, target: int, start: int, size: int) -> int:
    return os.write(target, os.pread(source, min(size, _CHUNK), start))


# Cheapest first: shared extents, copies inside the kernel, copies through this process.
_COPIES: tuple[Callable[[int, int, int, int], int], ...] = (_copy_file_range, _sendfile, _read_and_write)


def joined(pieces: Iterable[Any]) -> bytes:
    """Return all pieces as one ``bytes``; file ranges are read."""
    return b"".join(
        b"".join(bytes(chunk) for chunk in piece.chunks()) if type(piece) is FileRange else piece for piece in pieces
    )


def runs(pieces: Iterable[Any]) -> Iterator[FileRange | list[Any]]:
    """Yield pieces in order: adjacent file ranges as one range, the buffers between two ranges as one list."""
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
