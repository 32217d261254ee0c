"""Where outputs go: a folder on a disk, where drafts are renamed, or a place elsewhere, where workers upload."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from penstock.blobs.draft import partial_path
from penstock.errors import PlanError
from penstock.storage import Storage

Outputs = tuple[tuple[str, int], ...]  # names and sizes


class Folder(Protocol):
    """The folder of outputs, as the one who settles outcomes sees it."""

    def holds(self, outputs: Outputs) -> bool:
        """Whether all of them are there, with these sizes."""

    def strangers(self, names: Iterable[str]) -> list[str]:
        """Those of the names that stand for something already."""

    def publish(self, draft: str | None, outputs: Outputs) -> None:
        """Give the files of a draft their names.

        Raises:
            OSError: one of them cannot have its name; some may have theirs.
            PlanError: a name leads out of the folder.
        """

    def remove(self, names: Iterable[str]) -> None:
        """Take outputs away, and folders that are empty then."""


class DiskFolder:
    """A folder of this machine."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._real = os.path.realpath(folder)
        self._parents: set[str] = set()  # known to lie in the folder

    def holds(self, outputs: Outputs) -> bool:
        for name, size in outputs:
            try:
                if os.stat(os.path.join(self.folder, name), follow_symlinks=False).st_size != size:
                    return False
            except OSError:
                return False
        return True

    def strangers(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if os.path.lexists(os.path.join(self.folder, name))]

    def publish(self, draft: str | None, outputs: Outputs) -> None:
        assert draft is not None
        for name, _ in outputs:
            source, target = os.path.join(draft, name), os.path.join(self.folder, name)
            if (parent := os.path.dirname(target)) not in self._parents:
                os.makedirs(parent, exist_ok=True)
                self._check_inside(parent, name)
                self._parents.add(parent)
            try:
                os.replace(source, target)
            except FileNotFoundError:  # somebody took the folder away meanwhile
                os.makedirs(parent, exist_ok=True)
                os.replace(source, target)
            except OSError as exc:
                if exc.errno != errno.EXDEV:
                    raise
                _copy(source, target)
        shutil.rmtree(draft, ignore_errors=True)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(os.path.join(self.folder, name))
            parent = os.path.dirname(name)
            while parent:
                try:
                    os.rmdir(os.path.join(self.folder, parent))
                except OSError:  # not empty
                    break
                self._parents.discard(os.path.join(self.folder, parent))
                parent = os.path.dirname(parent)

    def _check_inside(self, parent: str, name: str) -> None:
        real = os.path.realpath(parent)
        if os.path.commonpath([real, self._real]) != self._real:
            raise PlanError(f"the output {name!r} leads out of the folder, by a link to {real}")


def _copy(source: str, target: str) -> None:
    """Where a folder within the folder lies on another disk."""
    partial = partial_path(Path(target))
    try:
        shutil.copyfile(source, partial)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


class FarFolder:
    """A place that a storage serves; what is there is listed once, when that is first asked for."""

    def __init__(self, url: str, storage: Storage) -> None:
        self.url, self._storage = url, storage
        self._sizes: dict[str, int | None] | None = None

    def holds(self, outputs: Outputs) -> bool:
        if self._sizes is None:
            below = f"{self.url}/"
            self._sizes = {one.url.removeprefix(below): one.size for one in self._storage.list(below)}
        return all(name in self._sizes and self._sizes[name] in (None, size) for name, size in outputs)

    def strangers(self, names: Iterable[str]) -> list[str]:
        return []  # the worker has put them there by now

    def publish(self, draft: str | None, outputs: Outputs) -> None:
        """Nothing is left to do: the worker has."""

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._storage.delete(f"{self.url}/{name}")
