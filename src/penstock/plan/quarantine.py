"""Quarantine: samples that failed, by identity, in a file of JSON lines that can be given back to leave them out.

    {"source": 0, "shard": "train-0003.tar", "index": 17, "key": "a/0017", "stage": "decode", "problem": "..."}

A line is written whole by one call, so that any number of ranks may add to one file.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from penstock.errors import DataError, PlanError, StorageError
from penstock.plan.block import Skipped

_LONGEST = 1000  # characters of a problem: one call writes a few lines whole, not megabytes


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """Which sample: its source, counted over the plan, its shard's name as the dataset has it, its index there."""

    source: int
    shard: str
    index: int


class Quarantine:
    """A file that lists samples which failed, each once for as long as this object lives.

    ``path`` is a file, or a folder (one that is there, or ends with a slash) in which every process has a file of its
    own: for ranks on several hosts, whose file system may not append whole lines.

    Raises:
        StorageError: it cannot be written.
    """

    def __init__(self, path: str) -> None:
        """Create the file, so that what cannot be written is known at once."""
        self._folder = path.endswith(os.sep) or Path(path).is_dir()
        self._path = Path(path)
        self._listed: set[Identity] = set()
        self._append(b"")

    def add(self, skips: Iterable[Skipped]) -> None:
        """List samples; those that are listed already are not listed again.

        Raises:
            StorageError: they cannot be written.
        """
        lines = []
        for skip in skips:
            place = skip.place
            which = Identity(place.leaf, place.name or "", place.number)
            if which not in self._listed:
                self._listed.add(which)
                lines.append(_line(skip))
        if lines:
            self._append("".join(lines).encode())

    def _append(self, data: bytes) -> None:
        path = self._path / f"{socket.gethostname()}-{os.getpid()}.jsonl" if self._folder else self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if os.write(file, data) < len(data):
                    raise OSError("the line was not written whole: is the disk full?")
            finally:
                os.close(file)
        except OSError as exc:
            raise StorageError(f"the quarantine cannot be written: {exc.strerror or exc}", str(path)) from exc


def _line(skip: Skipped) -> str:
    place = skip.place
    said: dict[str, Any] = {"source": place.leaf, "shard": place.name, "index": place.number, "key": place.key}
    if place.samples > 1:
        said["samples"] = place.samples
    return json.dumps({**said, "stage": skip.stage, "problem": skip.problem[:_LONGEST]}) + "\n"


def listed(path: str) -> Iterator[Identity]:
    """Read the samples that a quarantine lists; of a folder, all its ``.jsonl`` files.

    Lines about what was made of several samples, or came from a stream, name no single sample and are passed over.

    Raises:
        StorageError: there is no such file.
        DataError: a line is damaged; its file and number are named.
    """
    for file in sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [Path(path)]:
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as exc:
            raise StorageError(f"the samples to exclude cannot be read: {exc.strerror or exc}", str(file)) from exc
        for number, line in enumerate(lines, 1):
            if line.strip() and (which := _read(line, f"{file}, line {number}")) is not None:
                yield which


def _read(line: bytes, where: str) -> Identity | None:
    try:
        said = json.loads(line)
        if said.get("samples", 1) != 1 or said["shard"] is None:
            return None
        return identity((said["source"], said["shard"], said["index"]))
    except (ValueError, LookupError, TypeError, AttributeError):
        shown = line[:60].decode(errors="replace")
        raise DataError(f'{where}: not a line of a quarantine, such as {{"source": 0, ...}}: {shown!r}') from None


def identity(value: Any) -> Identity:
    """Read one sample's identity: (source, shard, index), or an entry of ``loader.skipped``.

    Raises:
        PlanError: it is neither.
    """
    if isinstance(value, Skipped):
        value = (value.place.leaf, value.place.name, value.place.number)
    match value:
        case Identity():
            return value
        case (int() as source, str() as shard, int() as index, *_) if min(source, index) >= 0:
            return Identity(source, shard, index)
    raise PlanError(f"exclude: {value!r:.80} names no sample: give (source, shard, index), or the path of a file")


def exclusions(given: Iterable[Any]) -> tuple[str | Identity, ...]:
    """Check what is given to ``exclude``: paths, identities, or lists of identities.

    Raises:
        PlanError: something is neither.
    """
    out: list[str | Identity] = []
    for value in given:
        if isinstance(value, str | os.PathLike):
            out.append(os.fspath(value))
        elif isinstance(value, Iterable) and not isinstance(value, tuple | bytes):
            out += map(identity, value)
        else:
            out.append(identity(value))
    return tuple(out)


def digest(samples: Iterable[Identity]) -> str:
    """A short name for a set of samples, whatever their order."""
    text = json.dumps([astuple(which) for which in sorted(set(samples))])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
