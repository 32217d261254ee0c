"""The inputs of a job: the files that a user names, their keys in the journal, and fingerprints that show a change."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.dataset import Dataset
from penstock.errors import PlanError, StorageError
from penstock.formats.items import ItemsReader, LocatedItems
from penstock.order import I64
from penstock.plan import ByObject, Fields, Source
from penstock.storage import NotFound, Storage, expand, local_path, open_storage, redacted, url_patterns
from penstock.storage.protocol import scheme

Fingerprint = tuple[Any, ...]  # size and modification time of a file, size and tag of a remote object

_INPUT_BYTES = 1 << 30  # pretended size, more than a block may hold, so that every input is a block of its own
_CONCURRENT_REQUESTS = 32  # for fingerprints of remote inputs: most of the time is latency


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a job.

    Attributes:
        number: Its position in the list of inputs.
        url: Its path or URL.
        key: Its name in the journal and in messages: the URL without secrets.
    """

    number: int
    url: str
    key: str

    @property
    def path(self) -> str | None:
        """Its path, if it is a local file."""
        return local_path(self.url) if scheme(self.url) == "file" else None


def resolve_inputs(given: Any, storage: Storage | None = None) -> list[Input]:
    """Return the inputs that a user names: a glob, a folder, a URL, a list of them, or a column of a dataset.

    An entry of a list or column that names an existing file is that file, even if it looks like a pattern.

    Raises:
        PlanError: A value is not a path or URL, or an input appears twice.
        StorageError: A folder or glob has no files, or cannot be listed.
    """
    if isinstance(given, str | os.PathLike):
        text = os.fsdecode(given)
        urls = [text] if _is_file(text) else expand(url_patterns(text), (), storage)
    elif isinstance(given, Dataset):
        urls = [_check_name(value, number) for number, value in enumerate(given.take_all())]
    elif isinstance(given, Iterable) and not isinstance(given, bytes):
        entries = (_check_name(value, number) for number, value in enumerate(given))
        urls = [url for entry in entries for url in _expand_entry(entry, storage)]
    else:
        raise PlanError(f"inputs={given!r}: give a list of paths, a glob, a folder, or a column of a dataset")
    inputs = [Input(number, url, journal_key(url)) for number, url in enumerate(urls)]
    _check_distinct(inputs)
    return inputs


def _is_file(name: str) -> bool:
    return scheme(name) == "file" and os.path.isfile(local_path(name))


def _check_name(value: Any, number: int) -> str:
    if isinstance(value, np.str_):
        value = str(value)
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        shown = f"a row ({', '.join(map(str, value))})" if isinstance(value, dict) else repr(value)
        hint = '; choose a column, as in ds["input"]' if isinstance(value, dict) else ""
        raise PlanError(f"input {number} is {shown}, not a path or URL{hint}")
    name = os.fsdecode(value)
    if "\0" in name:
        raise PlanError(f"input {number} is {name!r}, which cannot be a file name")
    return name


def _expand_entry(name: str, storage: Storage | None) -> list[str]:
    """Return the URLs that an entry of a list stands for: itself, or the files of its pattern or folder."""
    if scheme(name) == "file" and os.path.lexists(path := local_path(name)):
        return expand([name], (), storage) if os.path.isdir(path) and "{" not in name else [name]
    return expand([name], (), storage) if glob.has_magic(name) or "{" in name else [name]


def _check_distinct(inputs: Sequence[Input]) -> None:
    numbers: dict[str, int] = {}
    for job_input in inputs:
        first = numbers.setdefault(job_input.key, job_input.number)
        if first != job_input.number:
            raise PlanError(
                f"{job_input.key!r} appears twice among the inputs (numbers {first} and {job_input.number}); name each "
                'input once, or pass a column without duplicates: ds.unique("input")'
            )


def journal_key(url: str) -> str:
    """Return the key of an input: its URL without secrets, followed by a digest of the URL if it has secrets.

    >>> journal_key("inputs/a.txt")
    'inputs/a.txt'
    """
    key = redacted(url)
    return key if key == url else f"{key}#{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def take_fingerprint(job_input: Input, storage: Storage | None) -> Fingerprint:
    """Return a value that changes when the content of an input changes.

    Raises:
        StorageError: The input does not exist or cannot be accessed.
    """
    path = job_input.path
    if path is None:
        info = open_storage(job_input.url, storage).info(job_input.url)
        return (info.size, info.tag)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise NotFound("there is no such file", job_input.key) from None
    except OSError as exc:
        raise StorageError(f"cannot access the input: {(exc.strerror or str(exc)).lower()}", job_input.key) from exc
    return (status.st_size, status.st_mtime_ns)


def fingerprints(inputs: Sequence[Input], storage: Storage | None) -> list[Fingerprint | None]:
    """Return the fingerprints of inputs, in order; ``None`` for one that cannot be accessed or compared.

    Changes are not seen on a server that sends neither an ETag nor a time: its inputs are processed again.
    """

    def fingerprint_or_none(job_input: Input) -> Fingerprint | None:
        try:
            found = take_fingerprint(job_input, storage)
        except StorageError:
            return None
        return None if found[1] is None else found

    if all(job_input.path is not None for job_input in inputs):
        return [fingerprint_or_none(job_input) for job_input in inputs]
    with ThreadPoolExecutor(_CONCURRENT_REQUESTS, thread_name_prefix="penstock inputs") as pool:
        return list(pool.map(fingerprint_or_none, inputs))


@dataclass(frozen=True, slots=True)
class InputsSource(Source):
    """A source of a plan that yields the inputs, one per block, so that every worker gets one input at a time."""

    inputs: ByObject

    random_access = True

    def open(self) -> InputsReader:
        return InputsReader(self.inputs.value)

    def describe(self) -> str:
        return f"inputs({len(self.inputs.value)})"


class InputsReader(ItemsReader):
    """Reads the list of inputs as one shard."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        super().__init__(inputs)
        self.names = ["inputs"]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedItems:
        return LocatedItems(self._items, index, np.full(len(index), _INPUT_BYTES, np.int64))

    def key(self, shard: int, index: int) -> str | None:
        key: str = self._items[index].key
        return key

    def url(self, shard: int) -> str:
        return "inputs"
