"""The ``out`` argument of a job's function: a private folder, whose files are published if the call succeeds."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import DataError
from penstock.landing.output_sink import normalize_name


class Out:
    """The second argument of a job's function: gives paths for its outputs.

    Attributes:
        input: The input as it was given: a path or URL.
    """

    __slots__ = ("_folder", "_requested", "input")

    def __init__(self, folder: str, input: str) -> None:
        self._folder, self.input = folder, input
        self._requested: dict[str, None] = {}

    def path(self, name: str | os.PathLike[str]) -> Path:
        """Return a path for the output ``name``, a file or a folder of files; its parent folders exist.

        Raises:
            PlanError: The name is not valid, or leads out of the output folder.
        """
        normalized = normalize_name(name)
        self._requested[normalized] = None
        path = Path(self._folder, normalized)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def written(self) -> list[tuple[str, int]]:
        """Return the names and sizes of all files that were written, sorted by name.

        Raises:
            DataError: A path was requested but not written, or is not a regular file.
        """
        for name in self._requested:
            if not os.path.lexists(os.path.join(self._folder, name)):
                raise DataError(f"the function requested out.path({name!r}), but wrote nothing there")
        return sorted(_files(self._folder, ""))


def _files(folder: str, prefix: str) -> Iterator[tuple[str, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                yield from _files(entry.path, f"{name}/")
            elif stat.S_ISREG(status.st_mode):
                yield name, status.st_size
            else:
                raise DataError(f"the output {name!r} is a link or device; write a regular file")
