"""The manifest of a folder of shards: the samples, size and checksum of each shard, and which shards are current.

A run that replaces shards, or adds some, writes its files under new names and the manifest last. A file whose name
belongs to a set that the manifest records, but that the manifest does not list, is therefore not current: it is being
written, or about to be deleted. Readers leave it out with a warning, because someone may have put it there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from penstock.blobs.draft import put_object, read_object, replace_file
from penstock.errors import DataError, StorageError
from penstock.storage import Storage, local_path, open_storage, redacted
from penstock.storage.protocol import scheme, without_query

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"  # of tar shards; other formats have a hidden one, which tools that read folders ignore
_MAX_SAMPLES = 1 << 40  # of one shard: sums over millions of shards stay within 64 bits
_NUMBERED = re.compile(r"((?:[^%]|%%)*)%(?:0\d+)?d((?:[^%]|%%)*)")  # the pattern of shards
_LISTINGS = 5  # of a folder, until the listing and the manifest are of one time
_NUMBERED_FILE = re.compile(r"(.*?)(\d{5,})-of-(\d{5,})(?:-(\d{1,6}))?(\.\w+)")  # a longer last number is a hash


class ShardEntry(NamedTuple):
    """The entry of one shard in a manifest.

    Attributes:
        name: The name of the file in the folder.
        samples: How many samples the shard holds.
        bytes: The size of the file.
        sha256: The checksum of the file, in hex.
    """

    name: str
    samples: int
    bytes: int
    sha256: str


class Manifest:
    """The shards of a folder, sorted by name.

    Attributes:
        shards: The entry of each shard.
        format: The format of the shards, such as ``"tar"``.
        classes: The class names by number, for the numbers in ``cls``; ``None`` if unknown.
        made: The fingerprint of the run that wrote each set, by the label of the set (see :func:`set_pattern`); empty
            if the set was written by several runs.
    """

    __slots__ = ("_by_name", "classes", "format", "made", "shards")

    def __init__(
        self,
        shards: Iterable[ShardEntry],
        format: str = "tar",
        classes: Iterable[str] | None = None,
        made: Mapping[str, str] | None = None,
    ) -> None:
        self.shards = tuple(sorted(shards, key=lambda shard: shard.name))
        self.format = format
        self.classes = None if classes is None else tuple(classes)
        self.made = dict(made or {})
        self._by_name = {shard.name: shard for shard in self.shards}

    def entry(self, name: str) -> ShardEntry | None:
        """Return the entry of a shard, ``None`` if it is not listed."""
        return self._by_name.get(name)

    def entry_of(self, url: str) -> ShardEntry | None:
        """Return the entry of a shard by its path or URL: the one with the longest name that the path ends with."""
        parts = _unquoted(url).split("/")
        names = ("/".join(parts[first:]) for first in range(len(parts)))
        return next((self._by_name[name] for name in names if name in self._by_name), None)

    def is_current(self, name: str) -> bool:
        """Return whether a file is listed, or belongs to no set that the manifest records."""
        return name in self._by_name or not any(set_pattern(self.format, label).fullmatch(name) for label in self.made)

    def merged(
        self,
        entries: Iterable[ShardEntry],
        without: Iterable[str],
        classes: Sequence[str] | None,
        made: Mapping[str, str] | None,
    ) -> Manifest:
        """Return this manifest with more entries, which replace those of the same names; ``without`` are removed.

        A set that is one file is removed with it. ``made`` is added to the sets that the manifest records; None:
        nothing is known about any set any more.
        """
        removed = {*without}
        by_name = {n: e for n, e in (self._by_name | {e.name: e for e in entries}).items() if n not in removed}
        known = None if made is None else {n: run for n, run in self.made.items() if n not in removed} | {**made}
        return Manifest(by_name.values(), self.format, self.classes if classes is None else classes, known)

    def to_bytes(self) -> bytes:
        """Return the content of the manifest file: JSON, with a line for each shard."""
        lines = ",\n".join(json.dumps(shard._asdict()) for shard in self.shards)
        optional = f'"classes": {json.dumps(self.classes)}, ' if self.classes is not None else ""
        made: Any = self.made[""] if self.made.keys() == {""} else self.made
        optional += f'"made": {json.dumps(made)}, ' if self.made else ""
        return f'{{"v": 1, "format": {json.dumps(self.format)}, {optional}"shards": [\n{lines}\n]}}\n'.encode()


def read_manifest(folder: str | os.PathLike[str], format: str = "tar") -> Manifest | None:
    """Read the manifest of a local folder; ``None`` if there is none. The shards themselves are not checked.

    Raises:
        DataError: The file is not a manifest.
        OSError: The file exists but cannot be read.
    """
    path = os.path.join(folder, manifest_name(format))
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _read_once(path, status.st_mtime_ns, status.st_size, status.st_ino)


def write_manifest(
    folder: str | os.PathLike[str],
    entries: Iterable[ShardEntry],
    format: str = "tar",
    *,
    without: Iterable[str] = (),
    classes: Sequence[str] | None = None,
    made: Mapping[str, str] | None = None,
) -> Manifest:
    """Add entries to the manifest of a local folder; they replace entries of the same names.

    The entries named in ``without`` are removed. Several processes may call this at the same time.

    Raises:
        DataError: The existing file is not a manifest.
        OSError: The folder cannot be written.
    """
    with _locked(folder):
        existing = read_manifest(folder, format) or Manifest((), format)
        manifest = existing.merged(entries, without, classes, made)
        replace_file(Path(folder, manifest_name(format)), manifest.to_bytes())
    return manifest


def read_manifest_at(
    url: str, storage: Storage | None = None, *, format: str = "tar", optional: bool = False
) -> Manifest | None:
    """Read the manifest of a folder on any storage; ``None`` if there is none.

    With ``optional``, the result is also ``None`` if access to the manifest is denied.

    Raises:
        DataError: The object is not a manifest.
        StorageError: The manifest cannot be read.
    """
    location = manifest_url(url, format)
    data = read_object(open_storage(url, storage), location, optional=optional)
    return None if data is None else _from_bytes(data, redacted(location))


def write_manifest_at(
    url: str,
    storage: Storage | None,
    entries: Iterable[ShardEntry],
    format: str = "tar",
    *,
    without: Iterable[str] = (),
    classes: Sequence[str] | None = None,
    made: Mapping[str, str] | None = None,
) -> Manifest:
    """Do what :func:`write_manifest` does for a folder on any storage; in a remote one, without a lock.

    Raises:
        DataError: The existing file is not a manifest.
        StorageError: The folder cannot be written.
    """
    if scheme(url) == "file":
        return write_manifest(local_path(url), entries, format, without=without, classes=classes, made=made)
    location = manifest_url(url, format)
    existing = read_manifest_at(url, storage, format=format) or Manifest((), format)
    manifest = existing.merged(entries, without, classes, made)
    put_object(open_storage(url, storage), location, manifest.to_bytes())
    return manifest


def read_manifest_file(url: str, storage: Storage | None = None) -> Manifest | None:
    """Read a manifest that is stored apart from its shards, whose names may have folders; ``None`` if there is none.

    Raises:
        DataError: The object is not a manifest.
        StorageError: The manifest cannot be read.
    """
    data = read_object(open_storage(url, storage), url)
    return None if data is None else _from_bytes(data, redacted(url), nested=True)


def write_manifest_file(url: str, entries: Iterable[ShardEntry]) -> None:
    """Add entries to a manifest that is stored apart from its shards; they replace entries of the same names.

    Raises:
        DataError: The existing file is not a manifest.
        StorageError: The manifest cannot be written.
    """
    existing = read_manifest_file(url) or Manifest(())
    put_object(open_storage(url), url, existing.merged(entries, (), None, None).to_bytes())


def manifest_name(format: str) -> str:
    """Return the name of the manifest of the files of a format."""
    return MANIFEST if format == "tar" else f".penstock-manifest-{format}.json"


def manifest_url(folder: str, format: str = "tar") -> str:
    """Return the URL of the manifest of a folder."""
    return f"{folder.rstrip('/')}/{manifest_name(format)}"


def shard_url(folder: str, name: str) -> str:
    """Return the path or URL of a shard that a manifest names; characters that mean something in a URL are quoted."""
    return f"{folder.rstrip('/')}/{quote(name) if scheme(folder) in ('http', 'https') else name}"


def shard_name(url: str) -> str:
    """Return the name of a shard in the manifest of its folder: the inverse of ``shard_url``."""
    return _unquoted(url).rpartition("/")[2]


def _unquoted(url: str) -> str:
    """Return a path or URL without its query, as names in manifests are written."""
    path = without_query(url)
    return unquote(path) if scheme(url) in ("http", "https") else path


@cache
def set_pattern(format: str, label: str) -> re.Pattern[str]:
    """Return the names of the files of a set; group 1 is a number that is higher in files that were added later.

    A file of a range that was split ends in its number in the range: ``shard-000003-1.tar``.

    Args:
        format: The format of the files.
        label: The name or pattern of the files (``train-%06d.tar``), as the user wrote it; empty for a whole folder.
    """
    if format == "tar" and (match := _NUMBERED.fullmatch(label)):
        before, after = (text.replace("%%", "%") for text in match.groups())
        stem, dot, suffix = after.partition(".")
        return re.compile(rf"{re.escape(before)}(\d+){re.escape(stem)}(?:-\d+)?{re.escape(dot + suffix)}")
    if label:
        return re.compile(rf"{re.escape(label)}()")
    if format == "tar":
        return re.compile(r"shard-(\d{6,})(?:-\d+)?\.tar(?:\.(?:gz|zst|bz2|xz))?")
    return re.compile(rf"(?:set-(\d{{3,}})-)?\d{{5,}}-of-\d{{5,}}(?:-\d+)?\.{format}")


def current_files(
    list_files: Callable[[], list[str]], patterns: Iterable[str], format: str, storage: Storage | None
) -> list[str]:
    """List files as the manifests of folders say: a run that is replacing files is not seen before it is complete.

    A warning names the files that are left out.

    Args:
        list_files: Lists the paths or URLs.
        patterns: What the user gave; the manifests of those that are folders are followed.
        format: The format of the files.
        storage: The storage of URLs.

    Raises:
        StorageError: A manifest lists a file that does not exist.
    """
    folders = [(local_path(url) if scheme(url) == "file" else url).rstrip("/") or "/" for url in patterns]
    for attempt in range(_LISTINGS):
        paths = list_files()
        listed, missing, left_out = set(paths), None, dict[str, list[str]]()
        for folder in {*folders} & {*map(_folder_of, paths)}:
            given = storage if scheme(folder) != "file" else None
            manifest = read_manifest_at(folder, given, format=format, optional=True)
            if manifest is None:
                continue
            named = (shard_url(folder, entry.name) for entry in manifest.shards)
            missing = missing or next((url for url in named if url not in listed), None)
            left_out[folder] = [path for path in paths if not _is_current(path, folder, manifest)]
            paths = [path for path in paths if _is_current(path, folder, manifest)]
        if missing is None:
            for folder, files in left_out.items():
                _warn_of_left_out(redacted(folder), tuple(map(shard_name, files)), format)
            return paths
        if attempt == _LISTINGS - 1:
            raise StorageError("the manifest names a shard that does not exist", redacted(missing))
    return []


def _is_current(path: str, folder: str, manifest: Manifest) -> bool:
    return _folder_of(path) != folder or manifest.is_current(shard_name(path))


@lru_cache(maxsize=256)  # one warning, however often the folder is opened
def _warn_of_left_out(folder: str, names: tuple[str, ...], format: str) -> None:
    if names:
        shown = ", ".join(names[:3]) + f", ... ({len(names):,} in all)" * (len(names) > 3)
        advice = f"`penstock index {folder}` adds them" if format == "tar" else f"{folder}/*.{format} reads them too"
        problem = "left out, because the manifest does not list them"
        log.warning("%s: %s: %s; unless a run is still writing them, %s", folder, problem, shown, advice)


def check_sets(paths: Sequence[str], storage: Storage | None) -> None:
    """Check that sets of files named ``00000-of-00003`` are complete: an incomplete one is an unfinished write.

    Of a range that was split, such as ``00000-of-00003-1``, the first file becomes visible last. A set that a manifest
    lists is complete: what it does not name is an empty range.

    Raises:
        StorageError: A file of a set is missing.
    """
    sets: dict[tuple[str, str, str, str, str], dict[int, set[int]]] = {}
    for path in paths:
        folder, _, name = without_query(path).rpartition("/")
        if match := _NUMBERED_FILE.fullmatch(name):
            prefix, number, total, part, suffix = match.groups()
            found = sets.setdefault((folder, prefix, total, "" if part is None else "-{}", suffix), {})
            found.setdefault(int(number), set()).add(int(part or 0))
    for (folder, prefix, total, part_format, suffix), found in sets.items():
        names = (
            (f"{prefix}{number:05d}-of-{total}{part_format.format(part)}{suffix}", part in found.get(number, ()))
            for number in range(int(total))
            for part in range(1 + max(found.get(number, (0,))))
        )
        if missing := next((name for name, is_found in names if not is_found), None):
            number, parts = next(iter(found.items()))
            known = f"{prefix}{number:05d}-of-{total}{part_format.format(min(parts))}{suffix}"
            url, given = f"{folder}/{missing}", storage if scheme(folder) != "file" else None
            manifest = read_manifest_at(folder or "/", given, format=suffix[1:], optional=True)
            if manifest is not None and manifest.entry(known) and not manifest.entry(shard_name(url)):
                continue
            kind = "ranges" if part_format else "files"
            raise StorageError(
                f"the set of {int(total)} {kind} is incomplete, as after an interrupted write: this file is missing",
                redacted(url),
            )


def _folder_of(path: str) -> str:
    return without_query(path).rpartition("/")[0]


@contextmanager
def _locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@lru_cache(maxsize=16)
def _read_once(path: str, mtime_ns: int, size: int, inode: int) -> Manifest:
    """Read a manifest; the arguments after ``path`` differ if the file has changed, so it is then read again."""
    return _from_bytes(Path(path).read_bytes(), path)


def _from_bytes(data: bytes, path: str, *, nested: bool = False) -> Manifest:
    try:
        content: Any = json.loads(data)
        if content["v"] != 1:
            raise DataError(f"the manifest has version {content['v']!r}, but only version 1 can be read", path)
        entries = [_entry(**shard, nested=nested) for shard in content["shards"]]
        classes = [_text(name) for name in content["classes"]] if "classes" in content else None
        made = content.get("made")
        if made is not None and not isinstance(made, dict):
            made = {"": _text(made)}
        made = {_text(label): _text(fingerprint) for label, fingerprint in (made or {}).items()}
        manifest = Manifest(entries, _text(content["format"]), classes, made)
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as exc:
        raise DataError(f"the manifest is malformed: {exc!r}", path) from exc
    if len(manifest.shards) != len(manifest._by_name):
        raise DataError("the manifest lists a shard twice", path)
    return manifest


def file_sha256(path: str) -> str:
    """Return the checksum of a file, as an entry has it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(name: str, samples: int, bytes: int, sha256: str, nested: bool) -> ShardEntry:
    if not (type(samples) is type(bytes) is int and 0 <= samples <= _MAX_SAMPLES and 0 <= bytes < 1 << 60):
        raise ValueError(f"invalid counts: {samples!r} samples, {bytes!r} bytes")
    parts = _text(name).split("/") if nested else [_text(name)]
    if any(not part or part[0] == "." or "/" in part or "\0" in part for part in parts):
        raise ValueError(f"invalid file name: {name!r}")
    return ShardEntry(name, samples, bytes, _text(sha256))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not a string: {value!r}")
    return value
