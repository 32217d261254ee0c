"""Where a function writes: a private folder, whose files are published under their names when the call succeeds."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import DataError, PlanError

HIDDEN = ".penstock-job"  # the folder of the journal and of drafts, in the folder of outputs


class Out:
    """What a function is given as ``out``.

    Attributes:
        input: The input as it was given: a path or URL.
    """

    __slots__ = ("_asked", "_folder", "input")

    def __init__(self, folder: str, input: str) -> None:
        self._folder, self.input = folder, input
        self._asked: dict[str, None] = {}

    def path(self, name: str | os.PathLike[str]) -> Path:
        """A path to write the output ``name`` to, a file or a folder of files; its parent folders are there.

        Raises:
            PlanError: the name leads out of the folder of outputs, or is none.
        """
        clean = checked(name)
        self._asked[clean] = None
        path = Path(self._folder, clean)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def written(self) -> list[tuple[str, int]]:
        """All files that were written, by name, with their sizes.

        Raises:
            DataError: a path was asked for and not written, or something is no file.
        """
        for name in self._asked:
            if not os.path.lexists(os.path.join(self._folder, name)):
                raise DataError(f"the function asked for a path for {name!r} and wrote nothing there")
        return sorted(_files(self._folder, ""))


def _files(folder: str, below: str) -> Iterator[tuple[str, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{below}{entry.name}"
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                yield from _files(entry.path, f"{name}/")
            elif stat.S_ISREG(status.st_mode):
                yield name, status.st_size
            else:
                raise DataError(f"the output {name!r} is no file, but a link or device; write a file")


def checked(name: str | os.PathLike[str]) -> str:
    """The name of an output, in one spelling.

    Raises:
        PlanError: it leads out of the folder, or cannot be a name.

    >>> checked("a//b.txt")
    'a/b.txt'
    """
    if not isinstance(name, str | os.PathLike):
        raise PlanError(f"out.path({name!r}): give a name, such as 'a.txt' or 'a/b.txt'")
    text = os.fsdecode(name)
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or "\0" in text or text.endswith(("/", "/.")):
        raise PlanError(f"out.path({text!r}): that cannot be the name of a file")
    if text.startswith("/") or ".." in parts:
        raise PlanError(f"out.path({text!r}) leads out of the folder of outputs; give a name below it")
    if parts[0] == HIDDEN:
        raise PlanError(f"out.path({text!r}): {HIDDEN} is where the journal is kept; choose another name")
    return "/".join(parts)
