"""Whole files as samples: any file, or images by folder."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.codecs import Limits, decoder
from penstock.errors import DataError, PlanError, StorageError
from penstock.order import I64
from penstock.plan import Fields, Resources
from penstock.plan.values import Workers
from penstock.storage import Storage, braces, expand, local_path, open_storage, redacted, relative
from penstock.storage.protocol import scheme

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".pbm", ".bmp", ".gif", ".webp", ".tif", ".tiff")
FAR = 16  # workers that read remote files: each file is a trip of its own
_MODES = {None: None, "RGB": "rgb8", "L": "l8", "RGBA": "rgba8"}

Finish = Callable[[str, bytes, Fields], dict[str, Any]]  # (path, content, wanted) -> sample


@dataclass(frozen=True, slots=True)
class FilesSource:
    """Every file is a sample: its path and its bytes."""

    patterns: tuple[str, ...]
    workers: int | tuple[int, int] | None = None
    storage: Storage | None = None

    random_access = True

    @property
    def resources(self) -> Resources | None:
        """A pool of its own if asked for, and where every file is a request."""
        workers = _workers(self.workers, self.patterns)
        return None if workers is None else Resources(workers)

    def open(self) -> FilesReader:
        """List the files.

        Raises:
            StorageError: nothing is there.
        """
        return FilesReader(find(self.patterns, (), self.storage), _plain, self.storage)

    def describe(self) -> str:
        """The call that made it."""
        return f"read_files({', '.join(repr(redacted(pattern)) for pattern in self.patterns)})"


def _workers(asked: Workers, patterns: tuple[str, ...]) -> Workers:
    """As many as asked for; many that mostly wait where files are far away."""
    far = asked is None and any(scheme(pattern) != "file" for pattern in patterns)
    return FAR if far else asked


def _plain(path: str, content: bytes, fields: Fields) -> dict[str, Any]:
    sample = {"path": path, "bytes": content}
    return {name: value for name, value in sample.items() if fields.wants(name)}


@dataclass(frozen=True, slots=True)
class ImagesSource:
    """Image files in the order of their paths, decoded; ``labels="folder"`` adds the number of the class folder."""

    patterns: tuple[str, ...]
    mode: str | None = None
    labels: str | None = None
    workers: int | tuple[int, int] | None = None
    storage: Storage | None = None

    random_access = True

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise PlanError(f"mode={self.mode!r}: choose one of {', '.join(map(repr, _MODES))}")
        if self.labels not in (None, "folder"):
            raise PlanError(f"labels={self.labels!r}: give 'folder', or None")

    @property
    def resources(self) -> Resources | None:
        """Decoding happens while reading, so reading has workers."""
        return Resources(_workers(self.workers, self.patterns))

    def open(self) -> FilesReader:
        """List the images.

        Raises:
            StorageError: there are none.
        """
        paths = find(self.patterns, IMAGE_SUFFIXES, self.storage)
        folders = sorted({_folder(path) for path in paths})
        labels = {name: number for number, name in enumerate(folders)} if self.labels else None
        return FilesReader(paths, ImageOf(_MODES[self.mode], labels), self.storage)

    def describe(self) -> str:
        """The call that made it."""
        words = [repr(redacted(pattern)) for pattern in self.patterns]
        words += [f"mode={self.mode!r}"] * bool(self.mode) + [f"labels={self.labels!r}"] * bool(self.labels)
        return f"read_images({', '.join(words)})"


def _folder(path: str) -> str:
    return os.path.basename(os.path.dirname(os.path.abspath(path) if scheme(path) == "file" else path))


@dataclass(frozen=True, slots=True)
class ImageOf:
    """Makes an image sample of a file's bytes."""

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
            sample["label"] = self.labels[_folder(path)]
        return sample


def find(patterns: tuple[str, ...], suffixes: tuple[str, ...], storage: Storage | None = None) -> list[str]:
    """List files in the order of their paths; a folder with everything below it.

    Raises:
        StorageError: nothing is there.
    """
    out: list[str] = []
    for pattern in (name for one in patterns for name in braces(one)):
        if scheme(pattern) != "file":
            out += _remote(pattern, suffixes, storage)
            continue
        path = local_path(pattern)
        if os.path.isdir(path):
            below = sorted(os.path.join(root, name) for root, _, names in os.walk(path) for name in names)
            found = [p for p in below if not os.path.basename(p).startswith(".") and _ends(p, suffixes)]
            if not found:
                raise StorageError("no file of the wanted kind is there", pattern)
            out += found
        else:
            out += [local_path(name) for name in expand((pattern,), suffixes)]
    if not any(scheme(path) != "file" or os.path.lexists(path) for path in out):
        raise StorageError("no such file or folder", patterns[0])  # one that is gone is its own sample's fault
    return out


def _remote(pattern: str, suffixes: tuple[str, ...], storage: Storage | None) -> list[str]:
    """What a URL means: itself, what a glob matches, or everything below a folder."""
    if glob.has_magic(pattern) or "." in pattern.rpartition("/")[2] or scheme(pattern) in ("http", "https"):
        return expand((pattern,), suffixes, storage)
    listed = [one.url for one in open_storage(pattern, storage).list(pattern.rstrip("/") + "/")]
    found = [url for url in listed if not url.rpartition("/")[2].startswith(".") and _ends(url, suffixes)]
    if not found:
        raise StorageError("no file of the wanted kind is there", redacted(pattern))
    return found


def _ends(path: str, suffixes: tuple[str, ...]) -> bool:
    return path.lower().endswith(suffixes or ("",))


class FilesReader:
    """Files by number; a folder is a shard. Nothing is opened before its sample is read."""

    def __init__(self, paths: list[str], finish: Finish, storage: Storage | None = None) -> None:
        folders = [os.path.dirname(path) for path in paths]
        starts = [i for i, folder in enumerate(folders) if not i or folder != folders[i - 1]]
        self._paths, self._finish, self._storage = paths, finish, storage
        self._starts = np.array([*starts, len(paths)], np.int64)
        self.names = relative([os.path.join(folders[i], "files") for i in starts])

    def counts(self, scan: bool) -> I64 | None:
        """Files in each folder."""
        return np.diff(self._starts)

    def count(self, shard: int) -> int:
        """Files in one folder."""
        return int(self._starts[shard + 1] - self._starts[shard])

    def sizes(self) -> list[int]:
        """Not asked of the disk: the counts are known."""
        return [0] * len(self.names)

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedFiles:
        """Remember which."""
        which = [self._paths[i] for i in (self._starts[shard] + index).tolist()]
        return LocatedFiles(which, fields, self._finish, np.zeros(len(which), np.int64), self._storage)

    def key(self, shard: int, index: int) -> str | None:
        """The file's name."""
        return os.path.basename(self._paths[int(self._starts[shard]) + index])

    def url(self, shard: int) -> str:
        """The folder."""
        return redacted(os.path.dirname(self._paths[int(self._starts[shard])])) or "."


@dataclass(slots=True)
class LocatedFiles:
    """Files that will be read."""

    paths: list[str]
    fields: Fields
    finish: Finish
    nbytes: I64
    storage: Storage | None = None

    def take(self, sel: slice) -> LocatedFiles:
        """Some of them."""
        return LocatedFiles(self.paths[sel], self.fields, self.finish, self.nbytes[sel], self.storage)

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        """Read and finish every file; one that cannot be is a DataError with its path."""
        out: list[Any] = []
        bad: dict[int, DataError] = {}
        for number, path in enumerate(self.paths):
            try:
                out.append(self.finish(redacted(path), self._content(path), self.fields))
            except (OSError, ValueError) as exc:
                bad[number] = DataError(str(exc), redacted(os.path.dirname(path)) or ".", os.path.basename(path))
                bad[number].__cause__ = exc
                out.append(None)
        return out, bad

    def _content(self, path: str) -> bytes:
        if scheme(path) != "file":
            return b"".join(open_storage(path, self.storage).stream(path))
        with open(path, "rb") as file:
            return file.read()
