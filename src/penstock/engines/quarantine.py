"""The quarantine: a file of JSON lines that lists failed samples, so that ``exclude`` leaves them out of later runs.

    {"source": 0, "shard": "train-0003.tar", "index": 17, "key": "a/0017", "stage": "decode", "problem": "..."}

Every write appends whole lines in one call, so that any number of ranks can share a file.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.errors import DataError, StorageError
from penstock.plan import Identity, Skipped, parse_identity

_LINE_START = b'{"source"'
_MAX_PROBLEM = 1000  # characters: a write of a few lines is atomic, one of megabytes is not


class Quarantine:
    """A file that lists failed samples, each once during the lifetime of this object.

    ``path`` is a file, or a folder (an existing one, or a path that ends with a slash) in which every process writes
    its own file. Use a folder for ranks on several hosts, whose file system may not append atomically.

    Raises:
        StorageError: The file cannot be written.
    """

    def __init__(self, path: str) -> None:
        """Create the file, so that a failure is reported at once."""
        self._folder = path.endswith(os.sep) or Path(path).is_dir()
        self._path = Path(path)
        self._written: set[Identity] = set()
        self._append(b"")

    def add(self, skips: Iterable[Skipped]) -> None:
        """Append samples to the list, except those that this object has already listed.

        Raises:
            StorageError: The file cannot be written.
        """
        lines = []
        for skip in skips:
            place = skip.place
            identity = Identity(place.leaf, place.name or "", place.number)
            if identity not in self._written:
                self._written.add(identity)
                lines.append(_format_line(skip))
        if lines:
            self._append("".join(lines).encode())

    def _append(self, data: bytes) -> None:
        path = self._path / f"{socket.gethostname()}-{os.getpid()}.jsonl" if self._folder else self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(file).st_size
                if data and size and os.pread(file, 1, size - 1) != b"\n":  # the disk was full in the middle of a line
                    data = b"\n" + data
                if os.write(file, data) < len(data):
                    raise OSError("only a part of a line was written: is the disk full?")
            finally:
                os.close(file)
        except OSError as exc:
            raise StorageError(f"the quarantine cannot be written: {exc.strerror or exc}", str(path)) from exc


def _format_line(skip: Skipped) -> str:
    place = skip.place
    entry: dict[str, Any] = {"source": place.leaf, "shard": place.name, "index": place.number, "key": place.key}
    if place.samples > 1:
        entry["samples"] = place.samples
    return json.dumps({**entry, "stage": skip.stage, "problem": skip.problem[:_MAX_PROBLEM]}) + "\n"


def read_identities(path: str) -> Iterator[Identity]:
    """Yield the samples that a quarantine lists; for a folder, those of all its ``.jsonl`` files.

    Lines about items computed from several samples, or read from a stream, do not identify one sample and are ignored;
    so is a line that was cut off because the disk was full.

    Raises:
        StorageError: The file cannot be read.
        DataError: A line is damaged; the message names its file and number.
    """
    for file in sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [Path(path)]:
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as exc:
            raise StorageError(
                f"the list of samples to exclude cannot be read: {exc.strerror or exc}", str(file)
            ) from exc
        for number, line in enumerate(lines, 1):
            if line.strip() and (identity := _parse_line(line, f"{file}, line {number}")) is not None:
                yield identity


def _parse_line(line: bytes, location: str) -> Identity | None:
    try:
        entry = json.loads(line)
        if entry.get("samples", 1) != 1 or entry["shard"] is None:
            return None
        return parse_identity((entry["source"], entry["shard"], entry["index"]))
    except (ValueError, LookupError, TypeError, AttributeError):
        if line.startswith(_LINE_START) and not line.rstrip().endswith(b"}"):
            return None  # half a line, after which the disk was full: its sample is listed again when it fails again
        shown = line[:60].decode(errors="replace")
        raise DataError(f'{location}: not a line of a quarantine, such as {{"source": 0, ...}}: {shown!r}') from None
