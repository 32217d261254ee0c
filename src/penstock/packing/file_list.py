"""A source of files that are packed unchanged: a folder of class folders, or a list with a path in every row."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.files import IMAGE_SUFFIXES
from penstock.order import I64
from penstock.plan import Fields, Reader, Resources, Source
from penstock.plan.values import Workers

LIST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")
EXTENSION_ALIASES = {"jpeg": "jpg", "jpe": "jpg", "tiff": "tif"}
_PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image", "img", "image_path")
_LABEL_COLUMNS = ("label", "cls", "class", "target", "labels")
_TEXT_COLUMNS = ("text", "txt", "caption")
_READ_BYTES = 1 << 16  # smaller files are read without a call for their size, which takes longer than finding the end
_UNSAFE_IN_KEY = re.compile(r"[^A-Za-z0-9_-]+")
_SAFE_IN_KEY = re.compile(r"[A-Za-z0-9_-]*")
_MAX_STEM_CHARS = 60  # so that a key fits a plain tar header


class FileEntry(NamedTuple):
    """One sample: the path of its file, and its other fields (entries may share one dict)."""

    path: str | None
    fields: dict[str, bytes]
    line: int = 0  # in the list, from 1; 0 for a file of a folder


@dataclass(frozen=True, slots=True, eq=False)
class FileList(Source):
    """A source of files and their labels.

    Attributes:
        origin: The folder or list, for messages.
        entries: The samples, in order.
        classes: The class names by number, for the numbers in ``cls``.
        workers: How many threads read files.
        sizes_only: Whether samples are the sizes of their fields instead of the fields.
    """

    origin: str
    entries: list[FileEntry]
    classes: tuple[str, ...] | None = None
    workers: Workers = None
    sizes_only: bool = False

    random_access = True

    @property
    def resources(self) -> Resources | None:
        """Always set: opening many small files is worth a pool of its own."""
        return Resources(self.workers)

    def open(self) -> FileListReader:
        return FileListReader(self)

    def describe(self) -> str:
        return f"files of {self.origin} ({len(self.entries):,})"

    def field_names(self) -> list[str]:
        """Return the names of all fields that samples have: those of the files first."""
        files = dict.fromkeys(_split_name(path)[1] for path, _, _ in self.entries if path is not None)
        distinct = {id(fields): fields for _, fields, _ in self.entries}
        return list(files | dict.fromkeys(name for fields in distinct.values() for name in fields))

    def identity(self) -> str:
        """Return a fingerprint of the relative paths, sizes and times of the files, and of the labels and classes."""
        root = os.path.dirname(self.origin) if self.entries and self.entries[0].line else self.origin
        known: dict[int, str] = {}  # entries share dicts of fields
        digest = hashlib.sha256()
        for path, fields, _ in self.entries:
            text = known.get(id(fields)) or known.setdefault(id(fields), repr(sorted(fields.items())))
            name = "" if path is None else path.removeprefix(root)
            digest.update(f"{name}\0{text}\0{_stamp(path)}\0".encode("utf-8", "surrogateescape"))
        digest.update(repr(self.classes).encode())
        return f"files {digest.hexdigest()}"


def _stamp(path: str | None) -> str:
    try:
        status = None if path is None else os.stat(path)
    except OSError:  # a missing file is an error of its sample
        status = None
    return "" if status is None else f"{status.st_size} {status.st_mtime_ns}"


class FileListReader(Reader):
    """Reads a list of files as one shard."""

    def __init__(self, source: FileList) -> None:
        self.names = ["files"]
        self._source = source

    def counts(self, scan: bool) -> I64 | None:
        return np.array([len(self._source.entries)], np.int64)

    def count(self, shard: int) -> int:
        return len(self._source.entries)

    def sizes(self) -> list[int]:
        """Return 0: asking the disk for the size of every file would take too long."""
        return [0]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedEntries:
        entries = self._source.entries
        return LocatedEntries(self._source, [entries[i] for i in index.tolist()], np.zeros(len(index), np.int64))

    def key(self, shard: int, index: int) -> str | None:
        """Return the path of the file, or the line in the list if the sample has no file."""
        entry = self._source.entries[index]
        return entry.path if entry.path is not None else f"line {entry.line}"

    def url(self, shard: int) -> str:
        return self._source.origin


@dataclass(slots=True)
class LocatedEntries:
    """Entries whose files are still to be read."""

    source: FileList
    entries: list[FileEntry]
    nbytes: I64

    def take(self, sel: slice) -> LocatedEntries:
        return LocatedEntries(self.source, self.entries[sel], self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        """Read every file; return the samples, and an error with path and line for each file that cannot be read."""
        samples: list[Any] = []
        errors: dict[int, DataError] = {}
        read_entry = _field_sizes if self.source.sizes_only else _read_sample
        for number, entry in enumerate(self.entries):
            try:
                samples.append(read_entry(entry))
            except OSError as exc:
                where = f"line {entry.line}: " if entry.line else ""
                errors[number] = DataError(
                    f"{where}cannot read {entry.path}: {exc.strerror or exc}", self.source.origin, entry.path
                )
                samples.append(None)
        return samples, errors


def _read_sample(entry: FileEntry) -> dict[str, Any]:
    if entry.path is None:
        return {"__key__": "", **entry.fields}
    stem, field = _split_name(entry.path)
    return {"__key__": safe_stem(stem), field: _read_file(entry.path), **entry.fields}


def _split_name(path: str) -> tuple[str, str]:
    """Return the name of a file without its extension, and the field that holds its bytes."""
    stem, _, suffix = path.rpartition("/")[2].rpartition(".")
    field = suffix.lower() if stem else "bin"
    return stem or suffix, EXTENSION_ALIASES.get(field, field)


def _read_file(path: str) -> bytes:
    """Read a file with as few system calls as possible: they take most of the time for small files."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(handle, _READ_BYTES)
        more = os.read(handle, 1)
        if not more:
            return data
        parts = [data, more, os.read(handle, max(os.fstat(handle).st_size - len(data), 1))]
        while parts[-1]:  # one call reads at most 2 GiB, and a pipe does not know its size
            parts.append(os.read(handle, _READ_BYTES))
        return b"".join(parts)
    finally:
        os.close(handle)


def _field_sizes(entry: FileEntry) -> list[int]:
    sizes = [len(value) for value in entry.fields.values()]
    return sizes if entry.path is None else [os.stat(entry.path).st_size, *sizes]


def safe_stem(stem: str) -> str:
    """Return the stem of a file name as a part of a key: shortened, and without dots and slashes."""
    return (stem if _SAFE_IN_KEY.fullmatch(stem) else _UNSAFE_IN_KEY.sub("_", stem))[:_MAX_STEM_CHARS]


def list_folder(folder: str, workers: Workers = None) -> FileList:
    """List a folder of class folders, sorted by class name and path; without class folders, list its files.

    Raises:
        PlanError: There are images beside the class folders.
        StorageError: The folder holds no files, or cannot be read.
    """
    with _storage_errors(folder), os.scandir(folder) as found:
        top = sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
        classes = tuple(entry.name for entry in top if entry.is_dir())
        loose = [entry.path for entry in top if entry.is_file()]
        if not classes:
            return _check_not_empty(FileList(folder, [FileEntry(path, {}) for path in loose], None, workers))
        if images := [path for path in loose if path.lower().endswith(IMAGE_SUFFIXES)]:
            raise PlanError(
                f"{images[0]} is beside the class folders, so its class is unknown; move it into one of them, or pack "
                "a CSV list"
            )
        entries = []
        for number, name in enumerate(classes):
            label = {"cls": b"%d" % number}
            entries += [FileEntry(path, label) for path in _find_files(os.path.join(folder, name))]
    return _check_not_empty(FileList(folder, entries, classes, workers))


@contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    """Turn an ``OSError`` into a ``StorageError`` that names the file or folder."""
    try:
        yield
    except StorageError:
        raise
    except OSError as exc:
        raise StorageError(f"cannot read: {exc.strerror or exc}", exc.filename or path) from exc


def _find_files(folder: str) -> list[str]:
    """Return the paths of all files in a folder and its subfolders, sorted, without hidden ones."""
    paths: list[str] = []
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as found:
            for entry in found:
                if not entry.name.startswith("."):
                    (folders if entry.is_dir() else paths).append(entry.path)
    return sorted(paths)


def _check_not_empty(files: FileList) -> FileList:
    if not files.entries:
        raise StorageError("there is no file to pack", files.origin)
    return files


def read_list(path: str, workers: Workers = None) -> FileList:
    """Read a CSV, TSV or JSON-lines list with columns for paths, labels and texts; other columns become ``json``.

    Paths are relative to the list. Labels that are not integers are numbered by their sorted names.

    Raises:
        DataError: A row is not valid.
        PlanError: No column holds paths or texts.
        StorageError: The list is empty or cannot be read.
    """
    with _storage_errors(path):
        rows = list(_json_rows(path) if path.lower().endswith(("json", "jsonl", "ndjson")) else _csv_rows(path))
    if not rows:
        raise StorageError("the list is empty", path)
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    columns = (_find_column(names, known) for known in (_PATH_COLUMNS, _LABEL_COLUMNS, _TEXT_COLUMNS))
    path_column, label, text = columns
    if path_column is None and text is None:
        expected = ", ".join((*_PATH_COLUMNS[:3], *_TEXT_COLUMNS))
        raise PlanError(
            f"{path}: no column holds paths or texts (by names such as {expected}); its columns are {names}"
        )
    classes = _class_names([row.get(label) for _, row in rows]) if label is not None else None
    numbers = {name: number for number, name in enumerate(classes)} if classes else None
    folder, entries = os.path.dirname(path), []
    for line, row in rows:
        file = row.get(path_column) if path_column is not None else None
        if path_column is not None and not (isinstance(file, str) and file):
            raise DataError(f"line {line}: no path in column {path_column!r}", path)
        fields: dict[str, bytes] = {}
        if label is not None and row.get(label) not in (None, ""):
            fields["cls"] = _encode_label(row[label], numbers, path, line)
        if text is not None and row.get(text) is not None:
            fields["txt"] = str(row[text]).encode()
        if rest := {name: value for name, value in row.items() if name not in (path_column, label, text)}:
            fields["json"] = json.dumps(rest, sort_keys=True).encode()
        entries.append(FileEntry(os.path.join(folder, file) if file else None, fields, line))
    return FileList(path, entries, classes, workers)


def _find_column(names: Iterable[str], known: tuple[str, ...]) -> str | None:
    by_name = {name.lower(): name for name in reversed(list(names))}
    return next((by_name[name] for name in known if name in by_name), None)


def _csv_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the columns of every row of a CSV or TSV file."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, delimiter="\t" if path.lower().endswith(".tsv") else ",")
        try:
            names = next(filter(None, rows), [])
            for row in filter(None, rows):
                if len(row) != len(names):
                    problem = f"expected {len(names)} columns, as in the first line, but found {len(row)}"
                    raise DataError(f"line {rows.line_num}: {problem}", path)
                yield rows.line_num, dict(zip(names, row, strict=True))
        except (csv.Error, UnicodeDecodeError) as exc:
            raise DataError(f"line {rows.line_num}: {exc}", path) from exc


def _json_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of every line of a JSON-lines file."""
    with open(path, encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as exc:
                raise DataError(f"line {line}: not valid JSON: {exc}", path) from exc
            if not isinstance(row, dict):
                raise DataError(f"line {line}: expected a JSON object, not {type(row).__name__}", path)
            yield line, row


def _class_names(labels: list[Any]) -> tuple[str, ...] | None:
    """Return the sorted class names if labels are names; None if all of them are integers."""
    names = {label for label in labels if label not in (None, "")}
    if all(_is_integer(label) for label in names):
        return None
    return tuple(sorted(map(str, names)))


def _is_integer(label: Any) -> bool:
    return (isinstance(label, int) and not isinstance(label, bool)) or (
        isinstance(label, str) and re.fullmatch(r"-?[0-9]+", label) is not None
    )


def _encode_label(label: Any, numbers: dict[str, int] | None, path: str, line: int) -> bytes:
    if numbers is not None:
        return b"%d" % numbers[str(label)]
    if not _is_integer(label):
        raise DataError(f"line {line}: the label {label!r} is not an integer", path)
    return b"%d" % int(label)
