"""Where a set of files lands: its folder and storage, the names of its files, and checks of what a user gives."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.engines import Program
from penstock.errors import PlanError
from penstock.formats.manifest import Manifest, read_manifest_at, set_pattern
from penstock.storage import Storage, local_path, open_storage, redacted
from penstock.storage.protocol import scheme
from penstock.storage.urls import expand_braces

_SUFFIXES = (  # that say what a file holds
    *(".tar", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz", ".tgz", ".parquet", ".arrow", ".feather", ".csv", ".tsv"),
    *(".json", ".jsonl", ".ndjson", ".tfrecord", ".tfrecords", ".txt"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a set of files lands.

    Attributes:
        folder: The folder: a path or URL.
        format: The format of the files, by which manifests are told apart: ``"tar"``, ``"parquet"``, ``"csv"``, ...
        suffixes: What the names of such files end with.
        label: The name or pattern of the files, if the user gave one; empty for a whole folder.
        given: The storage that the user gave for a remote folder.
        streamed: Whether files are numbered as they are written, so that remote ones are uploaded under their names.
    """

    folder: str
    format: str
    suffixes: tuple[str, ...]
    label: str = ""
    given: Storage | None = None
    streamed: bool = False

    @property
    def on_disk(self) -> bool:
        """Whether the folder is on a disk of this machine."""
        return scheme(self.folder) == "file"

    @property
    def is_file(self) -> bool:
        """Whether the label names one file: only shards are numbered by a pattern."""
        return bool(self.label) and not (self.format == "tar" and "%" in self.label)

    @property
    def storage(self) -> Storage:
        """The storage of the folder."""
        return open_storage(self.folder, None if self.on_disk else self.given)

    @property
    def work(self) -> str:
        """The hidden folder for the journal, the lock and the drafts."""
        return self.url(f".penstock-{self.label or self.format}")

    def url(self, name: str) -> str:
        """Return the path or URL of a file in the folder."""
        return f"{self.folder.rstrip('/')}/{name}"

    def number(self, name: str) -> int | None:
        """Return the number in the name of a file of this set; None if the name is not one of this set."""
        match = set_pattern(self.format, self.label).fullmatch(name)
        return None if match is None else int(match[1] or 0)

    def owns(self, name: str) -> bool:
        """Return whether a run may replace a file of this name: a base name of this set."""
        if self.number(name) is not None:
            return "/" not in name
        return not self.label and name.endswith(self.suffixes) and "/" not in name and not name.startswith(".")

    def sizes(self) -> dict[str, int | None]:
        """Return the names and sizes of the visible files of this format in the folder."""
        sizes: dict[str, int | None]
        if self.on_disk:
            try:
                with os.scandir(self.folder) as found:
                    sizes = {one.name: one.stat().st_size for one in found if one.is_file()}
            except FileNotFoundError:
                return {}
        else:
            prefix = self.url("")
            sizes = {one.url.removeprefix(prefix): one.size for one in self.storage.list(prefix)}
        return {name: size for name, size in sizes.items() if self.owns(name)}

    def manifest(self) -> Manifest | None:
        """Return the manifest of the folder."""
        return read_manifest_at(self.folder, None if self.on_disk else self.given, format=self.format)

    def next_number(self, names: Iterable[str]) -> int:
        """Return a number that no file of the set has: 0 if there are none."""
        return 1 + max((number for name in names if (number := self.number(name)) is not None), default=-1)

    def final_names(self, drafts: Sequence[str], first: int) -> list[str]:
        """Return the names under which the drafts of a run become visible; they sort after earlier names."""
        if self.streamed:
            return list(drafts)
        if self.label:
            return [self.label] * len(drafts)
        prefix = f"set-{first:03d}-" if first else ""
        count = len(drafts)
        return [f"{prefix}{number:05d}-of-{count:05d}.{self.format}" for number in range(count)]

    def check_not_source(self, program: Program, suffixes: tuple[str, ...] | None = None) -> None:
        """Refuse to write to a folder that the plan reads files of this format from.

        Raises:
            PlanError: The plan reads from the folder.
        """
        if program.stream is not None:
            return
        target, endings = _real(self.folder), self.suffixes if suffixes is None else suffixes
        for url in (reader.url(shard) for reader in program.readers for shard in range(len(reader.names))):
            name = os.path.basename(os.path.realpath(local_path(url)) if scheme(url) == "file" else url)
            same_file = not self.is_file or self.label == name
            if same_file and name.endswith(endings) and _source_folder(url) == target:
                raise PlanError(
                    f"the dataset reads from {redacted(self.folder)}, where it is to be written; choose another folder"
                )


def check_path(name: str, value: str | os.PathLike[str]) -> str:
    """Return a path or URL argument as text.

    Raises:
        PlanError: The value is not a path or URL.
    """
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str) and path and "\0" not in path:
        return path
    raise PlanError(f"{name}={value!r}: give a path or a URL")


def target_text(url: str | os.PathLike[str]) -> str:
    """Return the URL of a target as text.

    Raises:
        PlanError: The value is not a path or URL, or stands for a pipe or for several names.
    """
    text = check_path("url", url)
    if text == "-":
        raise PlanError("url='-': files cannot be written to a pipe; give a path, such as './-', or a URL")
    if "::" in text or [*islice(expand_braces(text), 2)] != [text]:
        sign = "'::' stands" if "::" in text else "braces stand"
        raise PlanError(f"{redacted(text)}: {sign} for several names when they are read; use another name")
    return text


def check_suffix(url: str, format: str, suffixes: Sequence[str]) -> None:
    """Check that a target does not have the suffix of another format.

    Raises:
        PlanError: The target has such a suffix.
    """
    name = url.rstrip("/").rpartition("/")[2].lower()
    if name.endswith(_SUFFIXES) and not name.endswith(tuple(suffixes)):
        suffix = next(one for one in _SUFFIXES if name.endswith(one))
        raise PlanError(f"{redacted(url)}: {suffix} is not a suffix of {format}; give a folder or another name")


def _source_folder(url: str) -> str | None:
    """Return the folder that holds a shard, or the shard itself if it is a folder; None if it does not exist."""
    if scheme(url) != "file":
        return url.rpartition("/")[0]
    path = os.path.realpath(local_path(url))
    return path if os.path.isdir(path) else os.path.dirname(path) if os.path.exists(path) else None


def _real(folder: str) -> str:
    return os.path.realpath(local_path(folder)) if scheme(folder) == "file" else folder.rstrip("/")
