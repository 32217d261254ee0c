"""Files to be packed as they are: a folder of class folders, or a list with a path in every row."""

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
from penstock.plan import Fields, Resources
from penstock.plan.values import Workers

LISTS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")
_PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "img", "image_path")
_LABELS = ("label", "cls", "class", "target", "labels")
_TEXTS = ("text", "txt", "caption")
_SAME = {"jpeg": "jpg", "jpe": "jpg", "tiff": "tif"}
_SMALL = 1 << 16  # bytes: read without asking for the size, which takes longer than to find the end
_STEM = re.compile(r"[^A-Za-z0-9_-]+")
_PLAIN = re.compile(r"[A-Za-z0-9_-]*")


class Entry(NamedTuple):
    """One sample to be: a file, and fields that are known beforehand (one dict may serve many)."""

    path: str | None
    fields: dict[str, bytes]
    line: int = 0  # in the list, from 1; 0: of a folder


@dataclass(frozen=True, slots=True, eq=False)
class FileList:
    """A source of files and their labels.

    Attributes:
        origin: The folder or list, for messages.
        entries: What it holds.
        classes: What the numbers in ``cls`` mean.
        workers: How many read at a time.
        measured: Give the sizes of fields in place of their bytes.
    """

    origin: str
    entries: list[Entry]
    classes: tuple[str, ...] | None = None
    workers: Workers = None
    measured: bool = False

    random_access = True

    @property
    def resources(self) -> Resources | None:
        """Opening small files is work."""
        return Resources(self.workers)

    def open(self) -> ListReader:
        """Nothing to open yet."""
        return ListReader(self)

    def describe(self) -> str:
        """What it is."""
        return f"files of {self.origin} ({len(self.entries):,})"

    def names(self) -> list[str]:
        """The fields that its samples have: those of files, and those that are known beforehand."""
        files = dict.fromkeys(_named(path)[1] for path, _, _ in self.entries if path is not None)
        known = {id(fields): fields for _, fields, _ in self.entries}
        return list(files | dict.fromkeys(name for fields in known.values() for name in fields))

    def identity(self) -> str:
        """A fingerprint of names and labels, wherever the folder lies."""
        root = os.path.dirname(self.origin) if self.entries and self.entries[0].line else self.origin
        known: dict[int, str] = {}  # one dict serves many entries
        digest = hashlib.sha256()
        for path, fields, _ in self.entries:
            said = known.get(id(fields)) or known.setdefault(id(fields), repr(sorted(fields.items())))
            name = "" if path is None else path.removeprefix(root)
            digest.update(f"{name}\0{said}\0".encode("utf-8", "surrogateescape"))
        return f"files {digest.hexdigest()}"


class ListReader:
    """One shard: the list."""

    def __init__(self, source: FileList) -> None:
        self.names = ["files"]
        self._source = source

    def counts(self, scan: bool) -> I64 | None:
        """The length of the list."""
        return np.array([len(self._source.entries)], np.int64)

    def count(self, shard: int) -> int:
        """The length of the list."""
        return len(self._source.entries)

    def sizes(self) -> list[int]:
        """Not asked of the disk."""
        return [0]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedList:
        """Remember which."""
        entries = self._source.entries
        return LocatedList(self._source, [entries[i] for i in index.tolist()], np.zeros(len(index), np.int64))

    def key(self, shard: int, index: int) -> str | None:
        """The file's path."""
        entry = self._source.entries[index]
        return entry.path if entry.path is not None else f"line {entry.line}"

    def url(self, shard: int) -> str:
        """The folder or list."""
        return self._source.origin


@dataclass(slots=True)
class LocatedList:
    """Files that will be read."""

    source: FileList
    entries: list[Entry]
    nbytes: I64

    def take(self, sel: slice) -> LocatedList:
        """Some of them."""
        return LocatedList(self.source, self.entries[sel], self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        """Read every file; one that cannot be is a DataError with its path and line."""
        out: list[Any] = []
        bad: dict[int, DataError] = {}
        made = _measured if self.source.measured else _sample
        for number, entry in enumerate(self.entries):
            try:
                out.append(made(entry))
            except OSError as exc:
                where = f"line {entry.line}: " if entry.line else ""
                bad[number] = DataError(
                    f"{where}cannot read {entry.path}: {exc.strerror or exc}", self.source.origin, entry.path
                )
                out.append(None)
        return out, bad


def _sample(entry: Entry) -> dict[str, Any]:
    if entry.path is None:
        return {"__key__": "", **entry.fields}
    stem, field = _named(entry.path)
    return {"__key__": safe_stem(stem), field: _content(entry.path), **entry.fields}


def _named(path: str) -> tuple[str, str]:
    """What a file is called, and the field that its bytes are."""
    stem, _, suffix = path.rpartition("/")[2].rpartition(".")
    field = suffix.lower() if stem else "bin"
    return stem or suffix, _SAME.get(field, field)


def _content(path: str) -> bytes:
    """Read a file with as few calls as there can be: most of the time of small ones goes there."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(handle, _SMALL)
        more = os.read(handle, 1)
        if not more:
            return data
        parts = [data, more, os.read(handle, max(os.fstat(handle).st_size - len(data), 1))]
        while parts[-1]:  # huge files come in parts, and what is no plain file does not know its size
            parts.append(os.read(handle, _SMALL))
        return b"".join(parts)
    finally:
        os.close(handle)


def _measured(entry: Entry) -> list[int]:
    """The sizes of a sample's fields."""
    known = [len(value) for value in entry.fields.values()]
    return known if entry.path is None else [os.stat(entry.path).st_size, *known]


def safe_stem(stem: str) -> str:
    """The name of a file as a part of a key: no dots, no slashes, and short enough for a plain header."""
    return (stem if _PLAIN.fullmatch(stem) else _STEM.sub("_", stem))[:60]


def list_folder(folder: str, workers: Workers = None) -> FileList:
    """List a folder of class folders: classes by name, files by path; without class folders just the files.

    Raises:
        PlanError: there are images beside the class folders.
        StorageError: nothing is there, or it cannot be read.
    """
    with failing_listing(folder), os.scandir(folder) as found:
        top = sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
        classes = tuple(entry.name for entry in top if entry.is_dir())
        loose = [entry.path for entry in top if entry.is_file()]
        if not classes:
            return _some(FileList(folder, [Entry(path, {}) for path in loose], None, workers))
        if images := [path for path in loose if path.lower().endswith(IMAGE_SUFFIXES)]:
            raise PlanError(
                f"{images[0]} lies beside the class folders, so its class is not known; move it, or give a CSV"
            )
        entries = []
        for number, name in enumerate(classes):
            label = {"cls": b"%d" % number}
            entries += [Entry(path, label) for path in _below(os.path.join(folder, name))]
    return _some(FileList(folder, entries, classes, workers))


@contextmanager
def failing_listing(folder: str) -> Iterator[None]:
    """Turn what the system says about a folder into a StorageError that names it."""
    try:
        yield
    except StorageError:
        raise
    except OSError as exc:
        raise StorageError(f"cannot be listed: {exc.strerror or exc}", exc.filename or folder) from exc


def _below(folder: str) -> list[str]:
    """All files of a folder and those within, by path, but hidden ones."""
    out: list[str] = []
    open_ = [folder]
    while open_:
        with os.scandir(open_.pop()) as found:
            for entry in found:
                if not entry.name.startswith("."):
                    (open_ if entry.is_dir() else out).append(entry.path)
    return sorted(out)


def _some(files: FileList) -> FileList:
    if not files.entries:
        raise StorageError("there is no file to pack", files.origin)
    return files


def read_list(path: str, workers: Workers = None) -> FileList:
    """Read a CSV, TSV or JSON-lines list: a column with paths, a label, a text; the other columns become ``json``.

    Paths are relative to the list. Labels that are no numbers become numbers by their sorted names.

    Raises:
        DataError: a row cannot be understood.
        PlanError: no column holds paths or texts.
        StorageError: it cannot be read.
    """
    with failing_listing(path):
        rows = list(_json_rows(path) if path.lower().endswith(("json", "jsonl", "ndjson")) else _csv_rows(path))
    if not rows:
        raise StorageError("the list is empty", path)
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    files, label, text = (_column(names, known) for known in (_PATHS, _LABELS, _TEXTS))
    if files is None and text is None:
        raise PlanError(f"{path}: no column is called {', '.join(_PATHS[:3])} or {', '.join(_TEXTS)}; it has {names}")
    classes = _classes([row.get(label) for _, row in rows]) if label is not None else None
    numbers = {name: number for number, name in enumerate(classes)} if classes else None
    folder, entries = os.path.dirname(path), []
    for line, row in rows:
        file = row.get(files) if files is not None else None
        if files is not None and not (isinstance(file, str) and file):
            raise DataError(f"line {line}: no path in column {files!r}", path)
        fields: dict[str, bytes] = {}
        if label is not None and row.get(label) not in (None, ""):
            fields["cls"] = _number(row[label], numbers, path, line)
        if text is not None and row.get(text) is not None:
            fields["txt"] = str(row[text]).encode()
        if rest := {name: value for name, value in row.items() if name not in (files, label, text)}:
            fields["json"] = json.dumps(rest, sort_keys=True).encode()
        entries.append(Entry(os.path.join(folder, file) if file else None, fields, line))
    return FileList(path, entries, classes, workers)


def _column(names: Iterable[str], known: tuple[str, ...]) -> str | None:
    by_name = {name.lower(): name for name in reversed(list(names))}
    return next((by_name[name] for name in known if name in by_name), None)


def _csv_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file, delimiter="\t" if path.lower().endswith(".tsv") else ",")
        try:
            names = next(filter(None, rows), [])
            for row in filter(None, rows):
                if len(row) != len(names):
                    raise DataError(f"line {rows.line_num}: it has not as many columns as the first line", path)
                yield rows.line_num, dict(zip(names, row, strict=True))
        except (csv.Error, UnicodeDecodeError) as exc:
            raise DataError(f"line {rows.line_num}: {exc}", path) from exc


def _json_rows(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(path, encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError as exc:
                raise DataError(f"line {line}: no JSON: {exc}", path) from exc
            if not isinstance(row, dict):
                raise DataError(f"line {line}: a JSON object is needed, not {type(row).__name__}", path)
            yield line, row


def _classes(labels: list[Any]) -> tuple[str, ...] | None:
    """The names of classes, where labels are names and not numbers."""
    names = {label for label in labels if label not in (None, "")}
    if all(_is_number(label) for label in names):
        return None
    return tuple(sorted(map(str, names)))


def _is_number(label: Any) -> bool:
    return (isinstance(label, int) and not isinstance(label, bool)) or (
        isinstance(label, str) and re.fullmatch(r"-?[0-9]+", label) is not None
    )


def _number(label: Any, numbers: dict[str, int] | None, path: str, line: int) -> bytes:
    if numbers is not None:
        return b"%d" % numbers[str(label)]
    if not _is_number(label):
        raise DataError(f"line {line}: the label {label!r} is no whole number", path)
    return b"%d" % int(label)
