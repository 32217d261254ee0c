"""Where the bytes of an archive go: through a compressor, past the checksums, into a draft."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from functools import partial
from typing import Any, BinaryIO

from penstock.blobs.background import Submit
from penstock.blobs.checksums import CellChecksums
from penstock.blobs.draft import Draft, FileDraft
from penstock.blobs.file_range import FileRange, runs
from penstock.formats.tar.archive import BLOCK, padded

END = bytes(2 * BLOCK)  # of every archive


def sample_size(sizes: Iterable[int]) -> int:
    """How many bytes of an archive a sample takes whose fields have these sizes, with ordinary names."""
    return sum(BLOCK + padded(size) for size in sizes)


def file_size(nbytes: int, compress: str | None = None) -> int:
    """The most bytes a shard file has, whose members take ``nbytes``."""
    size = nbytes + len(END)
    return size + size // 64 + 4096 if compress else size  # what cannot be compressed grows, but never by as much


class Sink(io.RawIOBase):
    """A draft that keeps the checksums and the number of its bytes.

    Args:
        draft: Where the bytes go.
        sums: Who makes the checksums, which take longer than to write; whoever writes, by default. They are those of
            all bytes only when it has done what it was given.
    """

    def __init__(self, draft: Draft, sums: Submit) -> None:
        self._sums = sums
        self._draft = draft
        self.hash = hashlib.sha256()
        self.grid = CellChecksums()
        self.count = 0
        self._buffer = bytearray(1 << 18)  # which stays in the processor's cache

    def writable(self) -> bool:
        """Tell that it can be written."""
        return True

    def write(self, data: Any) -> int:
        """Write it all."""
        kept = bytes(data)  # no copy of what is bytes; a compressor may use its buffer again
        self._sums(partial(self._sum, kept))
        self._draft.write(kept)
        self.count += len(kept)
        return len(kept)

    def write_pieces(self, pieces: list[Any]) -> None:
        """Write all of them; ranges of files are copied by the system where the draft is a file."""
        for run in runs(pieces):
            if not isinstance(run, FileRange):
                self.write(b"".join(run))
            elif isinstance(self._draft, FileDraft):
                run.copy_to(self._draft.fileno())
                self._sums(partial(self._sum_range, run))
                self.count += len(run)
            else:
                for chunk in run.chunks():
                    self.write(chunk)

    def _sum_range(self, range: FileRange) -> None:
        for chunk in range.chunks(self._buffer):
            self._sum(chunk)

    def _sum(self, data: bytes | memoryview) -> None:
        self.hash.update(data)
        self.grid.update(data)


class OpenFile:
    """A file of the user's as a draft: it is written to as it is, and stays."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def publish(self) -> None:
        """It is where it should be."""

    def drop(self) -> None:
        """What it has got stays there."""
