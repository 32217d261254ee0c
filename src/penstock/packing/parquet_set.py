"""A set of Parquet files on its way: hidden until the last is complete, then named one right after the other."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.blobs.draft import put_object, read_object, replace_file
from penstock.errors import PlanError
from penstock.formats.tables.parquet_writer import Written
from penstock.formats.tables.source import ParquetSource
from penstock.formats.tar.shard_names import on_disk
from penstock.packing.folder_lock import folder_lock
from penstock.packing.tar_output import Packed
from penstock.storage import Storage, local_path, open_storage, redacted

_DRAFT = ".penstock-parquet"  # the folder of what is not published, in the target
_NAMES = "names.json"  # the names that the files are being given
_DONE = ".penstock-parquet.json"  # beside the files of a packing: what they are made of
_NAME = re.compile(r"(?:append-(\d{3,})-)?\d{5,}-of-\d{5,}\.parquet")
_PIECE = 8 << 20
_FACTS = 5  # that are noted of a file


@contextmanager
def publishing(url: str, storage: Storage | None) -> Iterator[Folder]:
    """The folder to write to, and one for drafts: in it where it is on a disk, else a temporary one."""
    if on_disk(url):
        folder = local_path(url).rstrip("/") or "/"
        os.makedirs(folder, exist_ok=True)
        with folder_lock(folder):
            yield Folder(folder, os.path.join(folder, _DRAFT), None)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-parquet-") as draft:
        yield Folder(url.rstrip("/"), draft, open_storage(url, storage))


@dataclass(frozen=True, slots=True)
class Folder:
    """Where files are published, and where they are until then."""

    folder: str
    draft: str
    storage: Storage | None  # None: it is on a disk

    def sets(self) -> dict[str, int | None]:
        """The files that are there and named as these are, with their bytes."""
        if self.storage is None:
            with os.scandir(self.folder) as found:
                return {one.name: one.stat().st_size for one in found if _NAME.fullmatch(one.name)}
        listed = {one.url.rpartition("/")[2]: one.size for one in self.storage.list(self.folder + "/")}
        return {name: size for name, size in listed.items() if _NAME.fullmatch(name)}

    def rows(self, names: Iterable[str]) -> int:
        """How many rows these files have."""
        paths = tuple(f"{self.folder}/{name}" for name in names)
        counts = ParquetSource(paths, storage=self.storage).open().counts(True)
        return 0 if counts is None else int(counts.sum())

    def prefix(self, there: Collection[str], append: bool, packing: bool) -> str:
        """What the names of a new set begin with.

        Raises:
            PlanError: there is a set, and nobody said that another one goes beside it.
        """
        if not there:
            return ""
        if not append:
            more = " of something else, or made otherwise" if packing else ""
            other = "resume=False replaces them" if packing else "or choose another folder"
            holds = f"{redacted(self.folder)} holds {len(there)} Parquet files{more}"
            raise PlanError(f"{holds}; append=True adds a set beside them, {other}")
        return f"append-{1 + max(int(match[1] or 0) for match in map(_NAME.fullmatch, there) if match):03d}-"

    def packed(self, note: dict[str, Any]) -> Packed:
        """What a run wrote that was completed."""
        names = tuple(name for _, name, *_ in note["files"])
        return Packed(redacted(self.folder), names, note["rows"], note["nbytes"], note["skipped"])

    def done(self) -> dict[str, Any] | None:
        """What the packing wrote that was completed here, if it is all there."""
        note = read_note(self.folder, self.storage)
        there = self.sets() if note is not None else {}
        whole = note is not None and all(there.get(name) == size for _, name, _, size, _ in note["files"])
        return note if whole else None

    def finish(self) -> dict[str, Any] | None:
        """Give the rest of their names to the files of a run that was interrupted while it did so; what it wrote."""
        try:
            note: dict[str, Any] = json.loads(Path(self.draft, _NAMES).read_bytes())
        except (OSError, ValueError):
            return None
        for name in note.get("old", ()):
            Path(self.folder, name).unlink(missing_ok=True)
        for own, name, *_ in note["files"]:
            if os.path.exists(path := os.path.join(self.draft, own)):
                os.replace(path, os.path.join(self.folder, name))
        if note.get("packing"):
            replace_file(Path(self.folder, _DONE), self._noted(note))
        elif not note.get("append"):
            Path(self.folder, _DONE).unlink(missing_ok=True)  # it told of files that are gone
        shutil.rmtree(self.draft, ignore_errors=True)
        return note

    def publish(self, files: Sequence[Written], names: Sequence[str], note: dict[str, Any]) -> None:
        """Give all files their names, one right after the other."""
        note["files"] = [
            [os.path.basename(file.path), name, file.rows, file.nbytes, _sha256(file.path) if note["packing"] else ""]
            for file, name in zip(files, names, strict=True)
        ]
        if self.storage is None:
            replace_file(Path(self.draft, _NAMES), json.dumps(note).encode())
            self.finish()
            return
        with ExitStack() as stack:
            uploads = []
            for file, name in zip(files, names, strict=True):
                upload = stack.enter_context(self.storage.put(f"{self.folder}/{name}", size_hint=file.nbytes))
                with open(file.path, "rb") as source:
                    while piece := source.read(_PIECE):
                        upload.write(piece)
                uploads.append(upload)
            for name in note["old"]:
                self.storage.delete(f"{self.folder}/{name}")
            for upload in uploads:
                upload.commit()
        if note["packing"]:
            put_object(self.storage, f"{self.folder}/{_DONE}", self._noted(note))

    def _noted(self, note: dict[str, Any]) -> bytes:
        """What stays beside the files of a packing; several sets are not one packing that could be complete."""
        if note["append"]:
            before = read_note(self.folder, self.storage)
            known = {name: [own, name, *rest] for own, name, *rest in before["files"]} if before is not None else {}
            known |= {name: [own, name, *rest] for own, name, *rest in note["files"]}
            note = {**note, "what": "", "files": list(known.values())}
        return json.dumps(note, separators=(",", ":")).encode()


def read_note(folder: str, storage: Storage | None) -> dict[str, Any] | None:
    """What a packing that was completed in a folder noted: of every file its draft, name, rows, bytes and SHA-256."""
    folder = folder.rstrip("/")
    try:
        data = read_object(open_storage(folder, storage), f"{folder}/{_DONE}", optional=True)
        note: dict[str, Any] = json.loads(data or b"")
        return note if all(len(file) == _FACTS for file in note["files"]) else None
    except (ValueError, KeyError, TypeError):
        return None


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
