"""Writes rows to files, CSV, JSON lines or TFRecord, with a checkpoint after every file and within large ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO, Any

from penstock.errors import DataError, PlanError
from penstock.formats.manifest import ShardEntry
from penstock.formats.rows.encoding import RowStage
from penstock.landing.commit import OpenSet
from penstock.landing.position import Positions
from penstock.landing.target import Target, check_suffix, target_text
from penstock.storage import Storage, local_path, redacted
from penstock.storage.protocol import scheme

_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_CHECKPOINT_BYTES = 64 << 20  # bytes written after which another checkpoint is worth its cost


def row_target(
    url: str | os.PathLike[str], suffixes: tuple[str, ...], max_bytes: int | None, storage: Storage | None
) -> Target:
    """Return the target for files of rows: a file if it ends in one of ``suffixes``, else a folder.

    Raises:
        PlanError: The URL is a compressed file, or a single file and ``max_bytes`` is given.
    """
    text = target_text(url)
    is_file = text.endswith(suffixes)
    if text.endswith(_COMPRESSED_SUFFIXES):
        problem = "compressed files cannot be written; give a folder, or a file ending in"
        raise PlanError(f"{redacted(text)}: {problem} {suffixes[0]}")
    check_suffix(text, f"{suffixes[0]} files", suffixes)
    if is_file and max_bytes is not None:
        raise PlanError(f"{redacted(text)}: max_bytes splits the rows into several files, so give a folder")
    path = local_path(text) if scheme(text) == "file" else text
    folder, _, name = path.rpartition("/") if is_file else (path.rstrip("/") or "/", "", "")
    return Target(folder or ("/" if path.startswith("/") else "."), suffixes[0][1:], suffixes, name, storage)


class RowSink:
    """Writes rows to drafts of at most ``max_bytes``; a single row may be larger.

    Args:
        encoder: Frames the rows, which it has encoded as the last stage of the plan.
        max_bytes: When a file is full; None: never.
    """

    def __init__(self, encoder: RowStage, max_bytes: int | None) -> None:
        self._encoder, self._max_bytes = encoder, max_bytes
        self._head = b""  # the header of every file
        self._first: Any = None  # the first row, whose fields all rows have
        self._file: IO[bytes] | None = None
        self._rows = self._size = self._unsaved = 0  # of the open file; bytes since the last checkpoint
        self._number = self._done = 0  # of the open file; rows before it

    def open(self, landing: OpenSet, samples: Positions) -> None:
        """Begin after the last checkpoint, where the last draft is cut off."""
        self._landing, self._samples = landing, samples
        if not landing.entries:
            return
        last = [*landing.entries.values()][-1]
        self._head = str(landing.state["head"]).encode("latin-1")
        self._first = (tuple(landing.state["fields"]), b"") if landing.state["fields"] is not None else b""
        self._done = sum(entry.samples for entry in landing.entries.values()) - last.samples
        self._number, self._rows, self._size = len(landing.entries) - 1, last.samples, last.bytes
        handle = os.open(os.path.join(landing.drafts, last.name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._file = open(handle, "r+b")  # noqa: SIM115 - closed by _complete or drop
        self._file.truncate(last.bytes)
        self._file.seek(0, os.SEEK_END)

    def add(self, items: Sequence[Any]) -> None:
        """Write rows to the open file, or to a new one if it is full.

        Raises:
            DataError: A row has other fields than the first.
        """
        if self._first is None:
            self._first = items[0]
            self._head = self._encoder.head(items[0])
        try:
            framed = self._encoder.frame(list(items), self._first)
        except ValueError as exc:
            raise DataError(f"{self._encoder.name}: {exc}", redacted(self._landing.target.folder)) from exc
        complete = self._number
        for row in framed:
            if self._max_bytes is not None and self._rows and self._size + len(row) > self._max_bytes:
                self._complete()
            if self._file is None:
                self._begin()
            assert self._file is not None
            self._file.write(row)
            self._rows += 1
            self._size += len(row)
            self._unsaved += len(row)
        if self._unsaved >= _CHECKPOINT_BYTES or self._number > complete:
            self._samples.mark()
            self._checkpoint()

    def close(self) -> None:
        """Complete the last file; a set without any rows is one empty file."""
        if self._file is None and not self._landing.entries and not self._landing.may_be_empty:
            self._begin()
        if self._file is not None:
            self._complete()

    def drop(self) -> None:
        """Close the open file as it is."""
        if self._file is not None:
            self._file.close()

    def _draft(self) -> str:
        return f"{self._number:05d}.{self._landing.target.format}"

    def _begin(self) -> None:
        self._file = open(os.path.join(self._landing.drafts, self._draft()), "xb")  # noqa: SIM115 - closed later
        self._file.write(self._head)
        self._rows, self._size = 0, len(self._head)

    def _complete(self) -> None:
        assert self._file is not None
        self._checkpoint()
        self._file.close()
        self._file = None
        self._done += self._rows
        self._number += 1
        self._rows = 0

    def _checkpoint(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        fields = list(self._first[0]) if isinstance(self._first, tuple) else None
        entry = ShardEntry(self._draft(), self._rows, self._size, "")
        state = {"head": self._head.decode("latin-1"), "fields": fields}
        self._landing.checkpoint(entry, self._samples.position(self._done + self._rows), state)
        self._unsaved = 0
