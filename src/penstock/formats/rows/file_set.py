"""Files of rows that appear when the last of them is done: one file, or a numbered set in a folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from penstock.blobs.draft import replace_file
from penstock.errors import PlanError, StorageError
from penstock.storage import Storage, local_path, open_storage, redacted
from penstock.storage.protocol import scheme

_PACKED = (".gz", ".bz2", ".xz", ".zst")
_CHUNK = 1 << 20
_DUE = 64 << 20  # bytes after which it is worth noting how far a file is
_JOURNAL = "journal.json"


class FileSet:
    """Takes rows and cuts them into files of at most ``max_bytes`` (a row alone may be larger).

    ``url`` is a file, if it ends in one of ``suffixes``, else a folder, where files are called ``00000-of-00010.csv``
    (by the first of them). Nothing is visible under these names before ``publish``; leaving the context without it
    leaves nothing behind, unless ``note`` said how far it is: then the same is gone on with by ``take_up``.

    Raises:
        PlanError: the arguments do not go together.
        StorageError: the folder holds such files already, or cannot be written.
    """

    def __init__(
        self, url: str, suffixes: tuple[str, ...], max_bytes: int | None = None, storage: Storage | None = None
    ) -> None:
        self._suffix, self._limit, self._storage = suffixes[0], max_bytes, storage
        self._single = url.endswith(suffixes)
        if url.endswith(_PACKED):
            raise PlanError(f"{redacted(url)}: compressed files are not written; give a folder, or a file{suffixes[0]}")
        if self._single and max_bytes is not None:
            raise PlanError(f"{redacted(url)}: max_bytes cuts into several files, so give a folder")
        self.folder, _, self._name = url.rpartition("/") if self._single else (url.rstrip("/") or "/", "", "")
        self.on_disk = scheme(url) == "file"
        self._place = Path(local_path(self.folder or ".")) if self.on_disk else None
        self._new = self._place is not None and not self._place.exists()
        self.head = b""  # what every file begins with
        self.rows = self.nbytes = 0
        self._sizes: list[int] = []
        self._noted = (0, 0)  # files and bytes of them when it was last noted how far this is
        self._begun = self._kept = False
        self._file: IO[bytes] | None = None
        self.drafts = (
            Path(tempfile.mkdtemp(prefix="penstock-rows-"))
            if self._place is None
            else self._place / f".{self._name or f'rows{self._suffix}'}.partial"
        )

    def check_empty(self) -> None:
        """Require that the folder holds no such files.

        Raises:
            StorageError: it does.
        """
        if self._single or self._new:
            return
        inside = (
            os.listdir(self._place)
            if self._place is not None
            else _names(open_storage(self.folder, self._storage), self.folder)
        )
        if any(name.endswith(self._suffix) and not name.startswith(".") for name in inside):
            raise StorageError(f"the folder holds {self._suffix} files already; choose another", redacted(self.folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        if self._kept:
            return
        if self._begun or not self.on_disk:
            shutil.rmtree(self.drafts, ignore_errors=True)
        for folder in (self.drafts, self._place) if self._new and self._place is not None else (self.drafts,):
            if folder.is_dir() and not os.listdir(folder):  # another's drafts, or files, are left alone
                folder.rmdir()

    def _draft(self, number: int) -> Path:
        return self.drafts / f"{number:05d}"

    def add(self, rows: Iterable[bytes]) -> None:
        """Append rows."""
        for row in rows:
            full = self._limit is not None and self._sizes and self._sizes[-1] + len(row) > self._limit
            if self._file is None or (full and self._sizes[-1] > len(self.head)):
                self._begin()
            assert self._file is not None
            self._file.write(row)
            self._sizes[-1] += len(row)
            self.rows += 1

    def _begin(self) -> None:
        if not self._begun:
            self.drafts.mkdir(parents=True, exist_ok=True)
            (self.drafts / _JOURNAL).unlink(missing_ok=True)
            self._begun = True
        self._end()
        self._file = open(self._draft(len(self._sizes)), "wb")  # noqa: SIM115 - closed by the next, or at the end
        self._file.write(self.head)
        self._sizes.append(len(self.head))

    def _end(self) -> None:
        if self._file is not None:
            self._sync()
            self._file.close()
            self._file = None

    def _sync(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def due(self) -> bool:
        """Whether enough was written to note how far this is: a file, or much of one."""
        files, nbytes = self._noted
        return self.on_disk and (len(self._sizes) > files + 1 or sum(self._sizes) > nbytes + _DUE)

    def note(self, more: Mapping[str, Any]) -> None:
        """Note how far this is, and what the caller wants to know of it when it goes on."""
        self._sync()
        self._noted = max(0, len(self._sizes) - 1), sum(self._sizes)
        self._write_note({**more, "rows": self.rows, "sizes": self._sizes, "head": self.head.decode("latin-1")})
        self._kept = True

    def _write_note(self, note: Mapping[str, Any]) -> None:
        replace_file(self.drafts / _JOURNAL, json.dumps(note, separators=(",", ":")).encode())

    def take_up(self, what: str) -> dict[str, Any] | None:
        """Go on with drafts of the same ``what``: what was noted of them, if they are all there."""
        try:
            note: dict[str, Any] = json.loads((self.drafts / _JOURNAL).read_bytes())
            sizes, head, rows = list(note["sizes"]), note["head"].encode("latin-1"), int(note["rows"])
            there = [self._draft(number).stat().st_size for number in range(len(sizes))]
            whole = there[:-1] == sizes[:-1] and there[-1] >= sizes[-1]
            if note["what"] != what or not whole:
                return None
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None
        self._file = open(self._draft(len(sizes) - 1), "r+b")  # noqa: SIM115 - closed by the next, or at the end
        self._file.truncate(sizes[-1])
        self._file.seek(0, os.SEEK_END)
        self._sizes, self.head, self.rows = sizes, head, rows
        self._noted = max(0, len(sizes) - 1), sum(sizes)
        self._begun = self._kept = True
        return note

    def publish(self) -> tuple[str, ...]:
        """Give the files their names; a set of no rows is one empty file."""
        if not self._sizes:
            self._begin()
        self._end()
        many = len(self._sizes)
        names = tuple(self._name or f"{number:05d}-of-{many:05d}{self._suffix}" for number in range(many))
        if self._place is not None:
            self._write_note({"publish": names})
            self.finish()
        else:
            for number, name in enumerate(names):
                self._send(self._draft(number), f"{self.folder}/{name}")
        self.nbytes = sum(self._sizes)
        self._kept = False
        return names

    def finish(self) -> None:
        """Give drafts their names that a run was about to name when it was killed."""
        try:
            names = json.loads((self.drafts / _JOURNAL).read_bytes()).get("publish")
        except (OSError, ValueError):
            return
        if names is None or self._place is None:
            return
        for number, name in enumerate(names):
            if self._draft(number).exists():
                self._draft(number).replace(self._place / name)
        (self.drafts / _JOURNAL).unlink()

    def _send(self, draft: Path, url: str) -> None:
        size = draft.stat().st_size
        with open_storage(url, self._storage).put(url, size_hint=size) as upload, draft.open("rb") as file:
            while chunk := file.read(_CHUNK):
                upload.write(chunk)
            upload.commit()


def _names(storage: Storage, folder: str) -> list[str]:
    below = folder.rstrip("/") + "/"
    rest = (one.url.removeprefix(below) for one in storage.list(below))
    return [name for name in rest if "/" not in name]
