"""Files of rows, published together when the last is complete: one file, or a numbered set in a folder."""

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

_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_UPLOAD_CHUNK_BYTES = 1 << 20
_CHECKPOINT_BYTES = 64 << 20  # bytes written after which another checkpoint is worth its cost
_JOURNAL = "journal.json"


class FileSet:
    """Writes rows to files of at most ``max_bytes`` (a single row may be larger).

    ``url`` is a file if it ends in one of ``suffixes``, else a folder with files named ``00000-of-00010`` and the first
    suffix. The files are hidden drafts until ``publish`` renames them. Leaving the context before that removes the
    drafts, unless ``write_checkpoint`` was called: then a later run can ``resume`` from the checkpoint.

    Not thread-safe. Two processes must not write to one ``url`` at the same time.

    Raises:
        PlanError: ``url`` is a compressed file, or a single file and ``max_bytes`` is given.
    """

    def __init__(
        self, url: str, suffixes: tuple[str, ...], max_bytes: int | None = None, storage: Storage | None = None
    ) -> None:
        self._suffix, self._max_bytes, self._storage = suffixes[0], max_bytes, storage
        self._is_single_file = url.endswith(suffixes)
        if url.endswith(_COMPRESSED_SUFFIXES):
            problem = "compressed files cannot be written; give a folder, or a file ending in"
            raise PlanError(f"{redacted(url)}: {problem} {suffixes[0]}")
        if self._is_single_file and max_bytes is not None:
            raise PlanError(f"{redacted(url)}: max_bytes splits the rows into several files, so give a folder")
        self.folder, _, self._name = url.rpartition("/") if self._is_single_file else (url.rstrip("/") or "/", "", "")
        self.on_disk = scheme(url) == "file"
        self._local_folder = Path(local_path(self.folder or ".")) if self.on_disk else None
        self._is_new_folder = self._local_folder is not None and not self._local_folder.exists()
        self.head = b""  # the header of every file
        self.rows = self.nbytes = 0
        self._sizes: list[int] = []
        self._at_checkpoint = (0, 0)  # complete files, and bytes written, at the last checkpoint
        self._has_drafts = self._has_checkpoint = False
        self._file: IO[bytes] | None = None
        self.drafts = (
            Path(tempfile.mkdtemp(prefix="penstock-rows-"))
            if self._local_folder is None
            else self._local_folder / f".{self._name or f'rows{self._suffix}'}.partial"
        )

    def check_empty(self) -> None:
        """Check that the folder holds no files with the suffix of this set.

        Raises:
            StorageError: The folder holds such files.
        """
        if self._is_single_file or self._is_new_folder:
            return
        existing = (
            os.listdir(self._local_folder)
            if self._local_folder is not None
            else _list_names(open_storage(self.folder, self._storage), self.folder)
        )
        if any(name.endswith(self._suffix) and not name.startswith(".") for name in existing):
            problem = f"the folder holds {self._suffix} files already; choose another folder"
            raise StorageError(problem, redacted(self.folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        if self._has_checkpoint:
            return
        if self._has_drafts or not self.on_disk:
            shutil.rmtree(self.drafts, ignore_errors=True)
        new_folders = [self._local_folder] if self._is_new_folder and self._local_folder is not None else []
        for folder in (self.drafts, *new_folders):
            if folder.is_dir() and not os.listdir(folder):  # files and drafts of others stay
                folder.rmdir()

    def _draft(self, number: int) -> Path:
        return self.drafts / f"{number:05d}"

    def add(self, rows: Iterable[bytes]) -> None:
        """Write rows to the current file, or to a new one if it is full."""
        for row in rows:
            is_full = self._max_bytes is not None and self._sizes and self._sizes[-1] + len(row) > self._max_bytes
            if self._file is None or (is_full and self._sizes[-1] > len(self.head)):
                self._open_next()
            assert self._file is not None
            self._file.write(row)
            self._sizes[-1] += len(row)
            self.rows += 1

    def _open_next(self) -> None:
        if not self._has_drafts:
            self.drafts.mkdir(parents=True, exist_ok=True)
            (self.drafts / _JOURNAL).unlink(missing_ok=True)
            self._has_drafts = True
        self._close()
        self._file = open(self._draft(len(self._sizes)), "wb")  # noqa: SIM115 - closed by _close or __exit__
        self._file.write(self.head)
        self._sizes.append(len(self.head))

    def _close(self) -> None:
        if self._file is not None:
            self._sync()
            self._file.close()
            self._file = None

    def _sync(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def checkpoint_due(self) -> bool:
        """Whether enough has been written since the last checkpoint for another: a file, or 64 MiB of one."""
        files, nbytes = self._at_checkpoint
        return self.on_disk and (len(self._sizes) > files + 1 or sum(self._sizes) > nbytes + _CHECKPOINT_BYTES)

    def write_checkpoint(self, details: Mapping[str, Any]) -> None:
        """Write a checkpoint: the rows written so far, and ``details``, which ``resume`` returns.

        ``details["what"]`` identifies what is written; ``resume`` compares it.
        """
        self._sync()
        self._at_checkpoint = max(0, len(self._sizes) - 1), sum(self._sizes)
        self._write_journal({**details, "rows": self.rows, "sizes": self._sizes, "head": self.head.decode("latin-1")})
        self._has_checkpoint = True

    def _write_journal(self, journal: Mapping[str, Any]) -> None:
        replace_file(self.drafts / _JOURNAL, json.dumps(journal, separators=(",", ":")).encode())

    def resume(self, what: str) -> dict[str, Any] | None:
        """Resume from the checkpoint of an earlier run that wrote the same ``what``.

        Returns:
            The details of the checkpoint; ``None`` if there is no such checkpoint or its drafts are not complete.
        """
        try:
            journal: dict[str, Any] = json.loads((self.drafts / _JOURNAL).read_bytes())
            sizes, head, rows = list(journal["sizes"]), journal["head"].encode("latin-1"), int(journal["rows"])
            actual = [self._draft(number).stat().st_size for number in range(len(sizes))]
            is_complete = actual[:-1] == sizes[:-1] and actual[-1] >= sizes[-1]
            if journal["what"] != what or not is_complete:
                return None
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return None
        self._file = open(self._draft(len(sizes) - 1), "r+b")  # noqa: SIM115 - closed by _close or __exit__
        self._file.truncate(sizes[-1])
        self._file.seek(0, os.SEEK_END)
        self._sizes, self.head, self.rows = sizes, head, rows
        self._at_checkpoint = max(0, len(sizes) - 1), sum(sizes)
        self._has_drafts = self._has_checkpoint = True
        return journal

    def publish(self) -> tuple[str, ...]:
        """Give the files their final names and return them; without any rows there is one empty file."""
        if not self._sizes:
            self._open_next()
        self._close()
        count = len(self._sizes)
        names = tuple(self._name or f"{number:05d}-of-{count:05d}{self._suffix}" for number in range(count))
        if self._local_folder is not None:
            self._write_journal({"publish": names})
            self.finish()
        else:
            for number, name in enumerate(names):
                self._upload(self._draft(number), f"{self.folder}/{name}")
        self.nbytes = sum(self._sizes)
        self._has_checkpoint = False
        return names

    def finish(self) -> None:
        """Complete the renames of ``publish``, also those of a run that was killed during them."""
        try:
            names = json.loads((self.drafts / _JOURNAL).read_bytes()).get("publish")
        except (OSError, ValueError):
            return
        if names is None or self._local_folder is None:
            return
        for number, name in enumerate(names):
            if self._draft(number).exists():
                self._draft(number).replace(self._local_folder / name)
        (self.drafts / _JOURNAL).unlink()

    def _upload(self, draft: Path, url: str) -> None:
        size = draft.stat().st_size
        with open_storage(url, self._storage).put(url, size_hint=size) as upload, draft.open("rb") as file:
            while chunk := file.read(_UPLOAD_CHUNK_BYTES):
                upload.write(chunk)
            upload.commit()


def _list_names(storage: Storage, folder: str) -> list[str]:
    """Return the names of the objects directly in a folder."""
    prefix = folder.rstrip("/") + "/"
    names = (entry.url.removeprefix(prefix) for entry in storage.list(prefix))
    return [name for name in names if "/" not in name]
