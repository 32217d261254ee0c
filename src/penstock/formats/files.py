"""Samples that are whole files: files of any kind as bytes, or image files decoded."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.blobs.small_objects import ObjectFetcher
from penstock.codecs import Limits, decoder
from penstock.errors import DataError, PlanError, StorageError
from penstock.lazy import cached_property
from penstock.order import I64
from penstock.plan import Fields, Reader, Resources, Source, Traits
from penstock.storage import (
    Storage,
    expand,
    expand_braces,
    folder_times,
    local_path,
    open_storage,
    redacted,
    relative_names,
    traits_of,
)
from penstock.storage.cache import check_places
from penstock.storage.protocol import bare_url, scheme, without_query
from penstock.storage.urls import is_folder

LIST_SUFFIX = ".txt"  # of a file that lists images
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".pbm", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_REMOTE_FILE_BYTES = 64 << 10  # assumed: sizes are not known before files are read
_SPECS_BY_MODE = {None: None, "RGB": "rgb8", "L": "l8", "RGBA": "rgba8"}

MakeSample = Callable[[str, bytes, Fields], dict[str, Any]]  # (path, content, fields to include) -> sample


@dataclass(frozen=True, slots=True)
class FilesSource(Source):
    """Files of any kind; a sample holds the path and the bytes of a file."""

    patterns: tuple[str, ...]
    workers: int | tuple[int, int] | None = None
    storage: Storage | None = None

    random_access = True

    def __post_init__(self) -> None:
        check_places(self.storage)

    @property
    def resources(self) -> Resources | None:
        """Set if the user asked for workers."""
        return None if self.workers is None else Resources(self.workers)

    def open(self) -> FilesReader:
        return FilesReader(find_files(self.patterns, (), self.storage), _bytes_sample, self.storage, ("path", "bytes"))

    def describe(self) -> str:
        return f"read_files({', '.join(repr(redacted(pattern)) for pattern in self.patterns)})"


def _bytes_sample(path: str, content: bytes, fields: Fields) -> dict[str, Any]:
    sample = {"path": path, "bytes": content}
    return {name: value for name, value in sample.items() if fields.wants(name)}


@dataclass(frozen=True, slots=True)
class ImagesSource(Source):
    """Image files in the order of their paths, decoded; ``labels="folder"`` adds the number of the class folder.

    Raises:
        PlanError: ``mode`` or ``labels`` is not one of the allowed values.
    """

    patterns: tuple[str, ...]
    mode: str | None = None
    labels: str | None = None
    workers: int | tuple[int, int] | None = None
    storage: Storage | None = None

    random_access = True

    def __post_init__(self) -> None:
        check_places(self.storage)
        if self.mode not in (*_SPECS_BY_MODE,):
            raise PlanError(f"mode={self.mode!r}: choose one of {', '.join(map(repr, _SPECS_BY_MODE))}")
        if self.labels not in (None, "folder"):
            raise PlanError(f"labels={self.labels!r}: give 'folder' or None")

    @property
    def resources(self) -> Resources | None:
        """Always set, since reading includes decoding."""
        return Resources(self.workers)

    def open(self) -> FilesReader:
        paths = find_files(self.patterns, IMAGE_SUFFIXES, self.storage)
        folders = sorted({_folder_name(path) for path in paths})
        labels = {name: number for number, name in enumerate(folders)} if self.labels else None
        fields = ("image", "path", "label") if labels else ("image", "path")
        return FilesReader(paths, MakeImageSample(_SPECS_BY_MODE[self.mode], labels), self.storage, fields)

    def describe(self) -> str:
        arguments = [repr(redacted(pattern)) for pattern in self.patterns]
        arguments += [f"mode={self.mode!r}"] * bool(self.mode) + [f"labels={self.labels!r}"] * bool(self.labels)
        return f"read_images({', '.join(arguments)})"


def _folder_name(path: str) -> str:
    return os.path.basename(os.path.dirname(os.path.abspath(path) if scheme(path) == "file" else bare_url(path)))


@dataclass(frozen=True, slots=True)
class MakeImageSample:
    """Decodes the bytes of an image file to a sample; ``labels`` are the numbers of the class folders."""

    spec: str | None
    labels: dict[str, int] | None

    def __call__(self, path: str, content: bytes, fields: Fields) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        if fields.wants("image"):
            decode = decoder("jpg", self.spec, limits=Limits(), trust_pickle=False)
            assert decode is not None
            sample["image"] = decode(content)
        if fields.wants("path"):
            sample["path"] = path
        if self.labels is not None and fields.wants("label"):
            sample["label"] = self.labels[_folder_name(path)]
        return sample


def find_files(
    patterns: tuple[str, ...],
    suffixes: tuple[str, ...],
    storage: Storage | None = None,
    key: Callable[[str], Any] = str,
) -> list[str]:
    """List the files that patterns match, sorted by path for each pattern; a folder is listed recursively.

    Hidden files in folders are left out. An empty ``suffixes`` matches every file; otherwise a text file lists files.
    ``key`` returns what paths are sorted by.

    Raises:
        StorageError: A folder or glob matches no file, or none of the paths exists.
    """
    paths: list[str] = []
    names = [single for given in patterns for single in expand_braces(given)]
    for pattern in names:
        if suffixes and pattern.partition("?")[0].endswith(LIST_SUFFIX):
            paths += _read_list(pattern, storage)
            continue
        if scheme(pattern) != "file":
            paths += sorted(_list_remote(pattern, suffixes, storage, len(names) == 1), key=key)
            continue
        path = local_path(pattern)
        if os.path.isdir(path):
            below = [os.path.join(root, name) for root, _, names in os.walk(path) for name in names]
            matching = [p for p in below if not os.path.basename(p).startswith(".") and _has_suffix(p, suffixes)]
            if not matching:
                raise _no_files(suffixes, pattern)
            paths += sorted(matching, key=key)
        else:
            paths += sorted((local_path(name) for name in expand((pattern,), suffixes)), key=key)
    # A single missing file is an error of its sample only.
    if not any(scheme(path) != "file" or os.path.lexists(path) for path in paths):
        raise StorageError("no such file or folder", patterns[0])
    return paths


def _read_list(url: str, storage: Storage | None) -> list[str]:
    """Return the files that a text file lists, one a line: paths relative to its folder, or URLs.

    Raises:
        DataError: The file is not text.
        StorageError: The file cannot be read, or lists nothing.
    """
    content = b"".join(open_storage(url, None if scheme(url) == "file" else storage).stream(url))
    try:
        names = [line.strip() for line in content.decode("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as exc:
        raise DataError(f"the list of files is not UTF-8: {exc.reason}", redacted(url)) from exc
    if not names:
        raise StorageError("the list of files is empty", redacted(url))
    folder = without_query(url).rpartition("/")[0] or "."
    paths = [name if "://" in name or name.startswith("/") else f"{folder}/{name}" for name in names]
    return [local_path(path) if scheme(path) == "file" else path for path in paths]


def _list_remote(pattern: str, suffixes: tuple[str, ...], storage: Storage | None, alone: bool) -> list[str]:
    """List the objects of a URL: the object itself, those that a glob matches, or all below a folder.

    Only a URL that is given alone is looked up if its name is that of a file: each lookup takes a request.
    """
    last, opened = pattern.rpartition("/")[2], open_storage(pattern, storage)
    if glob.has_magic(pattern) or (last and scheme(pattern) in ("http", "https")):
        return expand((pattern,), suffixes, storage)
    if "." in last and _has_suffix(last, suffixes) and not (alone and is_folder(pattern, opened)):
        return [pattern]
    urls = [entry.url for entry in opened.list(pattern.rstrip("/") + "/")]
    if not urls and "." in last:
        return [pattern]
    matching = [url for url in urls if not url.rpartition("/")[2].startswith(".") and _has_suffix(url, suffixes)]
    if not matching:
        raise _no_files(suffixes, redacted(pattern))
    return matching


def _has_suffix(path: str, suffixes: tuple[str, ...]) -> bool:
    return path.lower().endswith(suffixes or ("",))


def _no_files(suffixes: tuple[str, ...], url: str) -> StorageError:
    wanted = f"files ending in {', '.join(suffixes)}" if suffixes else "files"
    return StorageError(f"the folder holds no {wanted}", url)


class FilesReader(Reader):
    """Reads files by index; each folder is a shard. A file is opened only when its sample is read."""

    def __init__(
        self, paths: list[str], make_sample: MakeSample, storage: Storage | None = None, fields: tuple[str, ...] = ()
    ) -> None:
        folders = [os.path.dirname(bare_url(path)) for path in paths]
        starts = [i for i, folder in enumerate(folders) if not i or folder != folders[i - 1]]
        self._paths, self._make_sample, self._fetcher = paths, make_sample, ObjectFetcher(storage)
        self._fields = fields
        self._starts = np.array([*starts, len(paths)], np.int64)
        self._folders = sorted({parent for folder in {*folders} for parent in (folder, os.path.dirname(folder))})
        self.names = relative_names([os.path.join(folders[i], "files") for i in starts])

    @cached_property
    def traits(self) -> Traits:
        return traits_of(self._folders)

    def stamp(self) -> object:
        return folder_times(f"{folder}/" for folder in self._folders)

    def suspend(self) -> None:
        """Stop fetching ahead; later reads begin again."""
        fetcher, self._fetcher = self._fetcher, self._fetcher.anew()
        fetcher.stop()

    def counts(self, scan: bool) -> I64 | None:
        return np.diff(self._starts)

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedFiles:
        paths = [self._paths[i] for i in (self._starts[shard] + index).tolist()]
        if remote := [path for path in paths if scheme(path) != "file"]:
            self._fetcher.announce(remote)
        nbytes = np.full(len(paths), _REMOTE_FILE_BYTES if remote else 0, np.int64)
        return LocatedFiles(paths, fields, self._make_sample, nbytes, self._fetcher)

    def key(self, shard: int, index: int) -> str | None:
        """Return the base name of the file."""
        return os.path.basename(bare_url(self._paths[int(self._starts[shard]) + index]))

    def fields(self, shard: int) -> tuple[str, ...]:
        return self._fields

    def url(self, shard: int) -> str:
        """Return the folder."""
        return os.path.dirname(bare_url(self._paths[int(self._starts[shard])])) or "."

    def objects(self, shard: int) -> list[str]:
        """Return the files of the folder."""
        return self._paths[int(self._starts[shard]) : int(self._starts[shard + 1])]


@dataclass(slots=True)
class LocatedFiles:
    """Files by path."""

    paths: list[str]
    fields: Fields
    make_sample: MakeSample
    nbytes: I64
    fetcher: ObjectFetcher

    def take(self, sel: slice) -> LocatedFiles:
        return LocatedFiles(self.paths[sel], self.fields, self.make_sample, self.nbytes[sel], self.fetcher)

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        samples: list[Any] = []
        errors: dict[int, DataError] = {}
        for position, path in enumerate(self.paths):
            try:
                samples.append(self.make_sample(redacted(path), self._content(path), self.fields))
            except (OSError, ValueError) as exc:
                folder, _, name = bare_url(path).rpartition("/")
                errors[position] = DataError(str(exc), folder or ".", name)
                errors[position].__cause__ = exc
                samples.append(None)
        return samples, errors

    def _content(self, path: str) -> bytes:
        if scheme(path) != "file":
            return self.fetcher.read(path)
        with open(path, "rb") as file:
            return file.read()
