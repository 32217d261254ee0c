"""The output folder of a job: a local one, into which drafts are moved, or a remote one, to which workers upload."""

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


class OutputFolder(Protocol):
    """An output folder, as the committer of outputs uses it."""

    def holds(self, outputs: Outputs) -> bool:
        """Return whether all outputs exist with these sizes."""

    def existing(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that are taken by a file."""

    def publish(self, draft: str | None, outputs: Outputs) -> None:
        """Move the files of a draft to their names, and remove the draft.

        Raises:
            OSError: A file cannot be moved; others may have been.
            PlanError: A name leads out of the folder.
        """

    def remove(self, names: Iterable[str]) -> None:
        """Remove the outputs that exist, and the folders that become empty."""


class LocalOutputFolder:
    """A local output folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._real = os.path.realpath(folder)
        self._checked_parents: set[str] = set()  # exist, and are known to be inside the folder

    def holds(self, outputs: Outputs) -> bool:
        for name, size in outputs:
            try:
                if os.stat(os.path.join(self.folder, name), follow_symlinks=False).st_size != size:
                    return False
            except OSError:
                return False
        return True

    def existing(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if os.path.lexists(os.path.join(self.folder, name))]

    def publish(self, draft: str | None, outputs: Outputs) -> None:
        assert draft is not None
        for name, _ in outputs:
            source, target = os.path.join(draft, name), os.path.join(self.folder, name)
            if (parent := os.path.dirname(target)) not in self._checked_parents:
                os.makedirs(parent, exist_ok=True)
                self._check_inside(parent, name)
                self._checked_parents.add(parent)
            try:
                os.replace(source, target)
            except FileNotFoundError:  # another program has removed the parent in the meantime
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
                self._checked_parents.discard(os.path.join(self.folder, parent))
                parent = os.path.dirname(parent)

    def _check_inside(self, parent: str, name: str) -> None:
        real = os.path.realpath(parent)
        if os.path.commonpath([real, self._real]) != self._real:
            raise PlanError(f"the output {name!r} leads out of the folder, through a link to {real}; remove the link")


def _copy(source: str, target: str) -> None:
    """Copy a file to a folder that is mounted from another disk; the target appears whole."""
    partial = partial_path(Path(target))
    try:
        shutil.copyfile(source, partial)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


class RemoteOutputFolder:
    """A remote output folder; it is listed once, at the first call of ``holds``."""

    def __init__(self, url: str, storage: Storage) -> None:
        self.url, self._storage = url, storage
        self._sizes: dict[str, int | None] | None = None

    def holds(self, outputs: Outputs) -> bool:
        if self._sizes is None:
            prefix = f"{self.url}/"
            self._sizes = {info.url.removeprefix(prefix): info.size for info in self._storage.list(prefix)}
        return all(name in self._sizes and self._sizes[name] in (None, size) for name, size in outputs)

    def existing(self, names: Iterable[str]) -> list[str]:
        return []  # the worker has uploaded them by now

    def publish(self, draft: str | None, outputs: Outputs) -> None:
        pass  # the worker has uploaded the outputs

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._storage.delete(f"{self.url}/{name}")
