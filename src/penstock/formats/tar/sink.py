"""Sinks for the bytes of an archive: a draft, with checksums computed on the way, or an open file."""

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
from penstock.formats.tar.archive import BLOCK, END_MARKER, padded

_GATHERED_BYTES = 1 << 22  # that are gathered at most: larger ones would stay in memory


def sample_size(sizes: Iterable[int]) -> int:
    """Return the archive bytes of a sample whose fields have these sizes, if their names fit plain headers."""
    return sum(BLOCK + padded(size) for size in sizes)


def file_size(nbytes: int, compress: str | None = None) -> int:
    """Return an upper bound for the size of a shard file whose members take ``nbytes``; exact if uncompressed."""
    size = nbytes + len(END_MARKER)
    return size + size // 64 + 4096 if compress else size  # incompressible data grows, but never by as much


class HashingSink(io.RawIOBase):
    """Writes to a draft, counts the bytes and computes their checksums.

    Args:
        draft: Where the bytes go.
        hash_thread: Runs the checksum work, which takes longer than the writing. The checksums are complete only when
            all work submitted to it is done.

    Attributes:
        nbytes: The number of bytes written.
        sha256: The SHA-256 of all bytes written.
        checksums: The CRC-32 of every MiB written.
    """

    def __init__(self, draft: Draft, hash_thread: Submit) -> None:
        self._hash_thread = hash_thread
        self._draft = draft
        self.sha256 = hashlib.sha256()
        self.checksums = CellChecksums()
        self.nbytes = 0
        self._spare: list[io.BytesIO] = []
        self._buffer = bytearray(1 << 18)  # small enough to stay in the processor's cache

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        owned = bytes(data)  # bytes are not copied; a compressor may reuse its buffer
        self._hash_thread(partial(self._hash, owned))
        self._draft.write(owned)
        self.nbytes += len(owned)
        return len(owned)

    def write_pieces(self, pieces: list[Any]) -> None:
        """Write buffers and ranges of files; if the draft is a file, the system copies the ranges."""
        for run in runs(pieces):
            if not isinstance(run, FileRange):
                self._write_buffers(run)
            elif isinstance(self._draft, FileDraft):
                run.copy_to(self._draft.fileno())
                self._hash_thread(partial(self._hash_range, run))
                self.nbytes += len(run)
            else:
                for chunk in run.chunks():
                    self.write(chunk)

    def _write_buffers(self, buffers: list[Any]) -> None:
        """Write buffers; for a file, they are gathered in memory that is reused, as fresh memory costs a copy."""
        if not isinstance(self._draft, FileDraft) or sum(map(len, buffers)) > _GATHERED_BYTES:
            self.write(b"".join(buffers))
            return
        memory = self._spare.pop() if self._spare else io.BytesIO()
        memory.seek(0)
        memory.writelines(buffers)
        data = memory.getbuffer()[: memory.tell()]
        self._draft.write(data)
        self.nbytes += len(data)
        self._hash_thread(partial(self._hash_gathered, data, memory))

    def _hash_gathered(self, data: memoryview, memory: io.BytesIO) -> None:
        self._hash(data)
        data.release()
        self._spare.append(memory)

    def _hash_range(self, file_range: FileRange) -> None:
        for chunk in file_range.chunks(self._buffer):
            self._hash(chunk)

    def _hash(self, data: bytes | memoryview) -> None:
        self.sha256.update(data)
        self.checksums.update(data)


class OpenFileDraft:
    """A file that the user has opened, as a draft: written to directly, and left open and in place."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def publish(self) -> None:
        """Do nothing: the bytes are where they belong."""

    def drop(self) -> None:
        """Do nothing: the bytes written so far stay."""
