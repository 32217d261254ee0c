"""Publish a set of Parquet files in a folder together: drafts until the last one is complete, then renamed."""

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
from penstock.formats.tables.parquet_writer import WrittenFile
from penstock.formats.tables.source import ParquetSource
from penstock.formats.tar.shard_names import on_disk
from penstock.packing.folder_lock import folder_lock
from penstock.packing.tar_output import Packed
from penstock.storage import Storage, local_path, open_storage, redacted

_DRAFT_FOLDER = ".penstock-parquet"  # in the target folder
_PUBLISH_JOURNAL = "names.json"  # in the draft folder, while its files are renamed
_PACK_RECORD = ".penstock-parquet.json"  # beside the files of a complete packing run
_FILE_NAME = re.compile(r"(?:append-(\d{3,})-)?\d{5,}-of-\d{5,}\.parquet")
_UPLOAD_CHUNK_BYTES = 8 << 20
_FILE_VALUES = 5  # in a record: the draft, name, rows, bytes and SHA-256 of a file


@contextmanager
def open_parquet_set(url: str, storage: Storage | None) -> Iterator[ParquetSet]:
    """Lock a folder to write a set of files there; drafts of a remote folder are in a temporary folder.

    Raises:
        PlanError: Another run is writing to the folder.
        OSError: The folder cannot be created.
    """
    if on_disk(url):
        folder = local_path(url).rstrip("/") or "/"
        os.makedirs(folder, exist_ok=True)
        with folder_lock(folder):
            yield ParquetSet(folder, os.path.join(folder, _DRAFT_FOLDER), None)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-parquet-") as draft:
        yield ParquetSet(url.rstrip("/"), draft, open_storage(url, storage))


@dataclass(frozen=True, slots=True)
class ParquetSet:
    """The files of a run: drafts in one folder, published to another.

    A *record* is what a run stores about itself when it publishes: a fingerprint, totals, and the facts of every file.
    """

    folder: str
    draft: str
    storage: Storage | None  # None: the folder is on a disk

    def list_files(self) -> dict[str, int | None]:
        """Return the names and sizes of the files in the folder that belong to a set, of this run or another."""
        if self.storage is None:
            with os.scandir(self.folder) as found:
                return {one.name: one.stat().st_size for one in found if _FILE_NAME.fullmatch(one.name)}
        listed = {one.url.rpartition("/")[2]: one.size for one in self.storage.list(self.folder + "/")}
        return {name: size for name, size in listed.items() if _FILE_NAME.fullmatch(name)}

    def count_rows(self, names: Iterable[str]) -> int:
        """Return the number of rows in the files of these names."""
        paths = tuple(f"{self.folder}/{name}" for name in names)
        counts = ParquetSource(paths, storage=self.storage).open().counts(True)
        return 0 if counts is None else int(counts.sum())

    def name_prefix(self, existing: Collection[str], append: bool, packing: bool) -> str:
        """Return the prefix of the names of a new set.

        Args:
            existing: The names of the files in the folder.
            append: Whether a set may be added to existing ones.
            packing: Whether the set is written by ``ps.pack``, for the error message.

        Raises:
            PlanError: There are files, and ``append`` is False.
        """
        if not existing:
            return ""
        if not append:
            other = " of another source or with other options" if packing else ""
            advice = "resume=False replaces them" if packing else "or choose another folder"
            holds = f"{redacted(self.folder)} holds {len(existing)} Parquet files{other}"
            raise PlanError(f"{holds}; append=True adds a set of files to them, {advice}")
        return f"append-{1 + max(int(match[1] or 0) for match in map(_FILE_NAME.fullmatch, existing) if match):03d}-"

    def result(self, record: dict[str, Any]) -> Packed:
        """Return the result of the run that stored a record."""
        names = tuple(name for _, name, *_ in record["files"])
        return Packed(redacted(self.folder), names, record["rows"], record["nbytes"], record["skipped"])

    def complete_run(self) -> dict[str, Any] | None:
        """Return the record of the packing run that was completed here; None if one of its files is gone or changed."""
        record = read_pack_record(self.folder, self.storage)
        sizes = self.list_files() if record is not None else {}
        is_whole = record is not None and all(sizes.get(name) == size for _, name, _, size, _ in record["files"])
        return record if is_whole else None

    def finish_publishing(self) -> dict[str, Any] | None:
        """Complete the renames of a run that was interrupted during them, and return its record, if there is one."""
        try:
            record: dict[str, Any] = json.loads(Path(self.draft, _PUBLISH_JOURNAL).read_bytes())
        except (OSError, ValueError):
            return None
        for name in record.get("old", ()):
            Path(self.folder, name).unlink(missing_ok=True)
        for draft_name, name, *_ in record["files"]:
            if os.path.exists(path := os.path.join(self.draft, draft_name)):
                os.replace(path, os.path.join(self.folder, name))
        if record.get("packing"):
            replace_file(Path(self.folder, _PACK_RECORD), self._encode_record(record))
        elif not record.get("append"):
            Path(self.folder, _PACK_RECORD).unlink(missing_ok=True)  # its files are gone
        shutil.rmtree(self.draft, ignore_errors=True)
        return record

    def publish(self, files: Sequence[WrittenFile], names: Sequence[str], record: dict[str, Any]) -> None:
        """Give all files their names, one right after the other, and store the record of a packing run."""
        record["files"] = [
            [os.path.basename(file.path), name, file.rows, file.nbytes, _sha256(file.path) if record["packing"] else ""]
            for file, name in zip(files, names, strict=True)
        ]
        if self.storage is None:
            replace_file(Path(self.draft, _PUBLISH_JOURNAL), json.dumps(record).encode())
            self.finish_publishing()
            return
        with ExitStack() as stack:
            uploads = []
            for file, name in zip(files, names, strict=True):
                upload = stack.enter_context(self.storage.put(f"{self.folder}/{name}", size_hint=file.nbytes))
                with open(file.path, "rb") as source:
                    while chunk := source.read(_UPLOAD_CHUNK_BYTES):
                        upload.write(chunk)
                uploads.append(upload)
            for name in record["old"]:
                self.storage.delete(f"{self.folder}/{name}")
            for upload in uploads:
                upload.commit()
        if record["packing"]:
            put_object(self.storage, f"{self.folder}/{_PACK_RECORD}", self._encode_record(record))

    def _encode_record(self, record: dict[str, Any]) -> bytes:
        """Return the record to store; that of an appended set lists all files, and is never that of a complete run."""
        if record["append"]:
            before = read_pack_record(self.folder, self.storage)
            by_name = {file[1]: file for file in before["files"]} if before is not None else {}
            by_name |= {file[1]: file for file in record["files"]}
            record = {**record, "what": "", "files": list(by_name.values())}
        return json.dumps(record, separators=(",", ":")).encode()


def read_pack_record(folder: str, storage: Storage | None) -> dict[str, Any] | None:
    """Return the record of the complete packing run in a folder; None if there is none.

    ``record["files"]`` has the draft, name, rows, bytes and SHA-256 of every file.
    """
    folder = folder.rstrip("/")
    try:
        data = read_object(open_storage(folder, storage), f"{folder}/{_PACK_RECORD}", optional=True)
        record: dict[str, Any] = json.loads(data or b"")
        return record if all(len(file) == _FILE_VALUES for file in record["files"]) else None
    except (ValueError, KeyError, TypeError):
        return None


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
