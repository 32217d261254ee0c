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
from io import BytesIO, TextIOWrapper
from typing import IO, Any, NamedTuple

import numpy as np

from penstock.blobs.small_objects import ObjectFetcher
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.files import IMAGE_SUFFIXES
from penstock.formats.manifest import MANIFEST
from penstock.formats.tar.shard_names import TAR_SUFFIXES
from penstock.lazy import cached_property
from penstock.order import I64
from penstock.plan import Fields, Reader, Resources, Source, Traits
from penstock.plan.values import Workers
from penstock.storage import Storage, open_storage, redacted
from penstock.storage.protocol import bare_url, scheme, without_query

LIST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json")
EXTENSION_ALIASES = {"jpeg": "jpg", "jpe": "jpg", "tiff": "tif"}
_PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image", "img", "image_path")
_LABEL_COLUMNS = ("label", "cls", "class", "target", "labels")
_TEXT_COLUMNS = ("text", "txt", "caption")
_REMOTE_FILE_BYTES = 64 << 10  # assumed for a remote file of unknown size
_READ_BYTES = 1 << 20  # of a file whose size is not known
_UNSAFE_IN_KEY = re.compile(r"[^A-Za-z0-9_-]+")
_SAFE_IN_KEY = re.compile(r"[A-Za-z0-9_-]*")
_MAX_STEM_CHARS = 60  # so that a key fits a plain tar header


class FileEntry(NamedTuple):
    """One sample: the path or URL of its file, and its other fields (entries may share one dict)."""

    path: str | None
    fields: dict[str, bytes]
    line: int = 0  # in the list, from 1; 0 for a file of a folder
    tag: str | int | None = None  # changes with the content: the time of a file, the tag of an object; None if unknown
    size: int | None = None  # None if unknown

    @property
    def remote_path(self) -> str | None:
        """The URL of the file, if it is not on this machine."""
        return None if self.path is None or scheme(self.path) == "file" else self.path


@dataclass(frozen=True, slots=True, eq=False)
class FileList(Source):
    """A source of files and their labels.

    Attributes:
        origin: The folder or list, for messages.
        entries: The samples, in order.
        classes: The class names by number, for the numbers in ``cls``.
        workers: How many threads read files.
        sizes_only: Whether samples are the sizes of their fields instead of the fields.
        storage: The storage of files that are remote; None: chosen by their schemes.
    """

    origin: str
    entries: list[FileEntry]
    classes: tuple[str, ...] | None = None
    workers: Workers = None
    sizes_only: bool = False
    storage: Storage | None = None

    random_access = True

    @property
    def resources(self) -> Resources | None:
        """Always set: opening many small files is worth a pool of its own."""
        return Resources(self.workers)

    def open(self) -> FileListReader:
        return FileListReader(self)

    def describe(self) -> str:
        return f"files of {redacted(self.origin)} ({len(self.entries):,})"

    def field_names(self) -> list[str]:
        """Return the names of all fields that samples have: those of the files first."""
        files = dict.fromkeys(_split_name(entry.path)[1] for entry in self.entries if entry.path is not None)
        distinct = {id(entry.fields): entry.fields for entry in self.entries}
        return list(files | dict.fromkeys(name for fields in distinct.values() for name in fields))

    def identity(self) -> str:
        """Return a fingerprint of the relative paths, sizes and times of the files, and of the labels and classes."""
        root = os.path.dirname(self.origin) if self.entries and self.entries[0].line else self.origin
        known: dict[int, str] = {}  # entries share dicts of fields
        digest = hashlib.sha256()
        for path, fields, _, tag, size in self.entries:
            text = known.get(id(fields)) or known.setdefault(id(fields), repr(sorted(fields.items())))
            name = "" if path is None else path.removeprefix(root)
            digest.update(f"{name}\0{text}\0{size} {tag}\0".encode("utf-8", "surrogateescape"))
        digest.update(repr(self.classes).encode())
        return f"files {digest.hexdigest()}"


def file_entry(path: str | None, fields: dict[str, bytes], line: int = 0) -> FileEntry:
    """Return the entry of a file, with its size and time if it is on this machine."""
    try:
        status = os.stat(path) if path is not None and scheme(path) == "file" else None
    except OSError:  # a missing file is an error of its sample
        status = None
    return FileEntry(path, fields, line, *((status.st_mtime_ns, status.st_size) if status is not None else ()))


class FileListReader(Reader):
    """Reads a list of files as one shard."""

    def __init__(self, source: FileList) -> None:
        self.names = ["files"]
        self._source = source
        self._fetcher = ObjectFetcher(source.storage)

    @cached_property
    def traits(self) -> Traits:
        return Traits(remote=any(entry.remote_path is not None for entry in self._source.entries))

    def suspend(self) -> None:
        """Stop fetching ahead; later reads begin again."""
        fetcher, self._fetcher = self._fetcher, self._fetcher.anew()
        fetcher.stop()

    def objects(self, shard: int) -> list[str]:
        """Return the files of all entries."""
        return [entry.path for entry in self._source.entries if entry.path is not None]

    def counts(self, scan: bool) -> I64 | None:
        return np.array([len(self._source.entries)], np.int64)

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedEntries:
        entries = [self._source.entries[i] for i in index.tolist()]
        nbytes = np.zeros(len(index), np.int64)
        if self.traits.remote:
            nbytes[:] = [0 if one.remote_path is None else one.size or _REMOTE_FILE_BYTES for one in entries]
            if not self._source.sizes_only:
                self._fetcher.announce([url for one in entries if (url := one.remote_path) is not None])
        return LocatedEntries(self._source, entries, nbytes, self._fetcher)

    def key(self, shard: int, index: int) -> str | None:
        """Return the path of the file, or the line in the list if the sample has no file."""
        entry = self._source.entries[index]
        return redacted(entry.path) if entry.path is not None else f"line {entry.line}"

    def url(self, shard: int) -> str:
        return redacted(self._source.origin)


@dataclass(slots=True)
class LocatedEntries:
    """Entries whose files are still to be read."""

    source: FileList
    entries: list[FileEntry]
    nbytes: I64
    fetcher: ObjectFetcher

    def take(self, sel: slice) -> LocatedEntries:
        return LocatedEntries(self.source, self.entries[sel], self.nbytes[sel], self.fetcher)

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        """Read every file; return the samples, and an error with path and line for each file that cannot be read."""
        samples: list[Any] = []
        errors: dict[int, DataError] = {}
        read_entry = self._field_sizes if self.source.sizes_only else self._sample
        for number, entry in enumerate(self.entries):
            try:
                samples.append(read_entry(entry))
            except OSError as exc:
                where = f"line {entry.line}: " if entry.line else ""
                path = redacted(entry.path or "")
                problem = f"{where}cannot read {path}: {exc.strerror or exc}"
                errors[number] = DataError(problem, redacted(self.source.origin), path)
                samples.append(None)
        return samples, errors

    def _sample(self, entry: FileEntry) -> dict[str, Any]:
        if entry.path is None:
            return {"__key__": "", **entry.fields}
        stem, field = _split_name(entry.path)
        data = _read_file(entry.path, entry.size) if entry.remote_path is None else self.fetcher.read(entry.path)
        return {"__key__": safe_stem(stem), field: data, **entry.fields}

    def _field_sizes(self, entry: FileEntry) -> list[int]:
        sizes = [len(value) for value in entry.fields.values()]
        if entry.path is None:
            return sizes
        size = entry.size
        if size is None:
            size = open_storage(entry.path, self.source.storage).info(entry.path).size
        return [size or 0, *sizes]


def _split_name(path: str) -> tuple[str, str]:
    """Return the name of a file without its extension, and the field that holds its bytes."""
    stem, _, suffix = (path if scheme(path) == "file" else without_query(path)).rpartition("/")[2].rpartition(".")
    field = suffix.lower() if stem else "bin"
    return stem or suffix, EXTENSION_ALIASES.get(field, field)


def _read_file(path: str, size: int | None) -> bytes:
    """Read a file with as few system calls as possible: they take most of the time for small files."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(handle, _READ_BYTES if size is None else size + 1)]
        if len(parts[0]) == size:
            return parts[0]
        while parts[-1]:  # one call reads at most 2 GiB, a pipe has no size, and a file may have grown
            parts.append(os.read(handle, _READ_BYTES))
        return b"".join(parts)
    finally:
        os.close(handle)


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
            return _check_not_empty(FileList(folder, [file_entry(path, {}) for path in loose], None, workers))
        if images := [path for path in loose if path.lower().endswith(IMAGE_SUFFIXES)]:
            raise _beside_classes(images[0])
        entries = []
        for number, name in enumerate(classes):
            label = {"cls": b"%d" % number}
            entries += [file_entry(path, label) for path in _find_files(os.path.join(folder, name))]
    return _check_not_empty(FileList(folder, entries, classes, workers))


def list_remote_folder(url: str, workers: Workers, storage: Storage | None) -> FileList | None:
    """List a remote folder as ``list_folder`` lists a local one; None if it holds shards, or nothing.

    Raises:
        PlanError: There are images beside the class folders.
        StorageError: The folder cannot be listed.
    """
    below = url.rstrip("/") + "/"
    found = {one.url.removeprefix(below): one for one in open_storage(url, storage).list(below)}
    names = sorted(name for name in found if not any(part.startswith(".") for part in name.split("/")))
    loose = [name for name in names if "/" not in name]
    if not names or MANIFEST in loose or any(name.endswith(TAR_SUFFIXES) for name in loose):
        return None
    classes = tuple(sorted({name.partition("/")[0] for name in names if "/" in name}))
    if classes and (images := [name for name in loose if name.lower().endswith(IMAGE_SUFFIXES)]):
        raise _beside_classes(redacted(below + images[0]))
    labels = {name: {"cls": b"%d" % number} for number, name in enumerate(classes)}
    entries = [
        FileEntry(found[name].url, labels.get(name.partition("/")[0], {}), 0, found[name].tag, found[name].size)
        for name in names
        if "/" in name or not classes
    ]
    return FileList(url.rstrip("/"), entries, classes or None, workers, storage=storage)


def _beside_classes(image: str) -> PlanError:
    return PlanError(
        f"{image} is beside the class folders, so its class is unknown; move it into one of them, or pack a CSV list"
    )


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
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(entry.path)
                elif entry.is_file() or entry.is_symlink():  # not a pipe, which would be waited for
                    paths.append(entry.path)
    return sorted(paths)


def _check_not_empty(files: FileList) -> FileList:
    if not files.entries:
        raise StorageError("there are no files to pack", files.origin)
    return files


def read_list(path: str, workers: Workers = None, storage: Storage | None = None) -> FileList:
    """Read a CSV, TSV or JSON-lines list with columns for paths, labels and texts; other columns become ``json``.

    Paths are relative to the list, or URLs. Labels that are not integers are numbered by their sorted names.

    Raises:
        DataError: A row is not valid.
        PlanError: No column holds paths or texts.
        StorageError: The list is empty or cannot be read.
    """
    with _storage_errors(path):
        text = _list_text(path, storage)
        rows = list((_json_rows if path.lower().endswith(("json", "jsonl", "ndjson")) else _csv_rows)(path, text))
    if not rows:
        raise StorageError("the list is empty", path)
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    columns = (_find_column(names, known) for known in (_PATH_COLUMNS, _LABEL_COLUMNS, _TEXT_COLUMNS))
    path_column, label, text_column = columns
    if path_column is None and text_column is None:
        expected = ", ".join((*_PATH_COLUMNS[:3], *_TEXT_COLUMNS))
        raise PlanError(
            f"{path}: no column holds paths or texts (by names such as {expected}); its columns are {names}"
        )
    classes = _class_names([row.get(label) for _, row in rows]) if label is not None else None
    numbers = {name: number for number, name in enumerate(classes)} if classes else None
    folder, entries = os.path.dirname(path if scheme(path) == "file" else bare_url(path)), []
    for line, row in rows:
        file = row.get(path_column) if path_column is not None else None
        if path_column is not None and not (isinstance(file, str) and file):
            raise DataError(f"line {line}: no path in column {path_column!r}", path)
        fields: dict[str, bytes] = {}
        if label is not None and row.get(label) not in (None, ""):
            fields["cls"] = _encode_label(row[label], numbers, path, line)
        if text_column is not None and row.get(text_column) is not None:
            fields["txt"] = str(row[text_column]).encode()
        if rest := {name: value for name, value in row.items() if name not in (path_column, label, text_column)}:
            fields["json"] = json.dumps(rest, sort_keys=True).encode()
        entries.append(file_entry(_file_path(folder, file) if file else None, fields, line))
    return FileList(path, entries, classes, workers, storage=storage)


def _list_text(path: str, storage: Storage | None) -> IO[bytes]:
    """Open a list, which may be remote."""
    if scheme(path) == "file":
        return open(path, "rb")
    return BytesIO(b"".join(open_storage(path, storage).stream(path)))


def _file_path(folder: str, name: str) -> str:
    """Return the path or URL of a file that a list in ``folder`` names."""
    return name if "://" in name or not folder else os.path.join(folder, name)


def _find_column(names: Iterable[str], known: tuple[str, ...]) -> str | None:
    by_name = {name.lower(): name for name in reversed(list(names))}
    return next((by_name[name] for name in known if name in by_name), None)


def _csv_rows(path: str, text: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the columns of every row of a CSV or TSV file."""
    with TextIOWrapper(text, newline="", encoding="utf-8-sig") as file:
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


def _json_rows(path: str, text: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of every line of a JSON-lines file."""
    with TextIOWrapper(text, encoding="utf-8") as file:
        for line, record in enumerate(file, start=1):
            if not record.strip():
                continue
            try:
                row = json.loads(record)
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
