"""Files of rows that appear when the last of them is done: one file, or a numbered set in a folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from penstock.errors import PlanError, StorageError
from penstock.formats.publish import partial_path
from penstock.storage import Storage, local_path, open_storage, shown
from penstock.storage.protocol import scheme

_PACKED = (".gz", ".bz2", ".xz", ".zst")
_CHUNK = 1 << 20


class FileSet:
    """Takes rows and cuts them into files of at most ``max_bytes`` (a row alone may be larger).

    ``url`` is a file, if it ends in one of ``suffixes``, else a folder, where files are called ``00000-of-00010.csv``
    (by the first of them). Nothing is visible under these names before ``publish``; leaving the context without it
    leaves nothing behind.

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
            raise PlanError(f"{shown(url)}: compressed files are not written; give a folder, or a file{suffixes[0]}")
        if self._single and max_bytes is not None:
            raise PlanError(f"{shown(url)}: max_bytes cuts into several files, so give a folder")
        self.folder, _, self._name = url.rpartition("/") if self._single else (url.rstrip("/") or "/", "", "")
        self._local = scheme(url) == "file"
        self.head = b""  # what every file begins with
        self.rows = self.nbytes = 0
        self._drafts: list[Path] = []
        self._sizes: list[int] = []
        self._file: IO[bytes] | None = None
        self._check_empty()

    def _check_empty(self) -> None:
        place = local_path(self.folder or ".") if self._local else self.folder
        if self._local:
            os.makedirs(place, exist_ok=True)
        if self._single:
            return
        inside = os.listdir(place) if self._local else _names(open_storage(place, self._storage), place)
        if any(name.endswith(self._suffix) and not name.startswith(".") for name in inside):
            raise StorageError(f"the folder holds {self._suffix} files already; choose another", shown(self.folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        for draft in self._drafts:
            draft.unlink(missing_ok=True)

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
        self._end()
        folder = Path(local_path(self.folder or ".") if self._local else tempfile.gettempdir())
        self._drafts.append(partial_path(folder / f"rows{self._suffix}"))
        self._file = open(self._drafts[-1], "xb")  # noqa: SIM115 - closed by the next, by publish, or at the end
        self._file.write(self.head)
        self._sizes.append(len(self.head))

    def _end(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def publish(self) -> tuple[str, ...]:
        """Give the files their names; a set of no rows is one empty file."""
        if not self._drafts:
            self._begin()
        self._end()
        many = len(self._drafts)
        names = [self._name or f"{number:05d}-of-{many:05d}{self._suffix}" for number in range(many)]
        for draft, name in zip(self._drafts, names, strict=True):
            if self._local:
                draft.replace(Path(local_path(self.folder or ".")) / name)
            else:
                self._send(draft, f"{self.folder}/{name}")
        self.nbytes = sum(self._sizes)
        return tuple(names)

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
