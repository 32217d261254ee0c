"""Which inputs there are, what they are called, and what tells an input that has changed."""

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
from penstock.plan import ByObject, Fields, Resources
from penstock.storage import NotFound, Storage, expand, local_path, open_storage, redacted, spell
from penstock.storage.protocol import scheme

Sign = tuple[Any, ...]  # what tells an input that has changed: its size and time, or its size and tag

_WEIGHT = 1 << 30  # more than any block may weigh, so that every input is a block of its own
_ASKING = 32  # of a storage at a time: most of it is waiting


@dataclass(frozen=True, slots=True)
class Input:
    """One input.

    Attributes:
        number: Its place.
        url: Where it lies.
        key: What it is called in the journal and in messages: the URL, but for secrets in it.
    """

    number: int
    url: str
    key: str

    @property
    def path(self) -> str | None:
        """Its path, where it is a file of this machine."""
        return local_path(self.url) if scheme(self.url) == "file" else None


def inputs_of(given: Any, storage: Storage | None = None) -> list[Input]:
    """List the inputs that a user means: a glob, a folder, a URL, a list of them, a column of a dataset.

    What stands in a list or column and is there under that very name is taken as it is, whatever letters it has.

    Raises:
        PlanError: these are no inputs, or one comes twice.
        StorageError: a folder or glob holds nothing, or cannot be listed.
    """
    if isinstance(given, str | os.PathLike):
        text = os.fsdecode(given)
        names = [text] if _is_file(text) else expand(spell(text), (), storage)
    elif isinstance(given, Dataset):
        names = [_name(value, number) for number, value in enumerate(given.take_all())]
    elif isinstance(given, Iterable) and not isinstance(given, bytes):
        named = (_name(value, number) for number, value in enumerate(given))
        names = [name for one in named for name in _listed(one, storage)]
    else:
        raise PlanError(f"inputs={given!r}: give a list of paths, a glob, a folder, or a column of a dataset")
    made = [Input(number, name, key_of(name)) for number, name in enumerate(names)]
    _check_distinct(made)
    return made


def _is_file(name: str) -> bool:
    return scheme(name) == "file" and os.path.isfile(local_path(name))


def _name(value: Any, number: int) -> str:
    if isinstance(value, np.str_):
        value = str(value)
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        what = f"a row ({', '.join(map(str, value))})" if isinstance(value, dict) else repr(value)
        hint = '; choose a column, as in ds["input"]' if isinstance(value, dict) else ""
        raise PlanError(f"input {number} is {what}, and no path or URL{hint}")
    name = os.fsdecode(value)
    if "\0" in name:
        raise PlanError(f"input {number} is {name!r}, which cannot be a name")
    return name


def _listed(name: str, storage: Storage | None) -> list[str]:
    """What one entry of a list means: itself, or what its pattern or folder holds."""
    if scheme(name) == "file" and os.path.lexists(path := local_path(name)):
        return expand([name], (), storage) if os.path.isdir(path) and "{" not in name else [name]
    return expand([name], (), storage) if glob.has_magic(name) or "{" in name else [name]


def _check_distinct(inputs: Sequence[Input]) -> None:
    seen: dict[str, int] = {}
    for one in inputs:
        first = seen.setdefault(one.key, one.number)
        if first != one.number:
            raise PlanError(
                f"{one.key!r} comes twice among the inputs (numbers {first} and {one.number}); give each once, "
                'of a column: ds.unique("input")'
            )


def key_of(url: str) -> str:
    """What an input is called: its URL as it may be shown; a digest tells apart what cannot be shown.

    >>> key_of("inputs/a.txt")
    'inputs/a.txt'
    """
    key = redacted(url)
    return key if key == url else f"{key}#{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def sign(one: Input, storage: Storage | None) -> Sign:
    """What tells this content of an input from another one.

    Raises:
        StorageError: it is not there, or may not be looked at.
    """
    path = one.path
    if path is None:
        info = open_storage(one.url, storage).info(one.url)
        return (info.size, info.tag)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise NotFound("there is no such file", one.key) from None
    except OSError as exc:
        raise StorageError(f"it cannot be looked at: {(exc.strerror or str(exc)).lower()}", one.key) from exc
    return (status.st_size, status.st_mtime_ns)


def signs(inputs: Sequence[Input], storage: Storage | None) -> list[Sign | None]:
    """What each of them is now, in order; ``None``: that cannot be known. What is remote is asked for side by side."""

    def ask(one: Input) -> Sign | None:
        try:
            return sign(one, storage)
        except StorageError:
            return None

    if all(one.path is not None for one in inputs):
        return [ask(one) for one in inputs]
    with ThreadPoolExecutor(_ASKING, thread_name_prefix="penstock inputs") as pool:
        return list(pool.map(ask, inputs))


@dataclass(frozen=True, slots=True)
class InputsSource:
    """Inputs as the source of a plan, one in every block: how many workers are busy depends on nothing else."""

    inputs: ByObject

    random_access = True

    @property
    def resources(self) -> Resources | None:
        """Reading costs nothing."""
        return None

    def open(self) -> InputsReader:
        """Nothing to open."""
        return InputsReader(self.inputs.value)

    def describe(self) -> str:
        """The call that made it."""
        return f"inputs({len(self.inputs.value)})"


class InputsReader(ItemsReader):
    """One shard: the list of inputs."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        super().__init__(inputs)
        self.names = ["inputs"]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedItems:
        """Remember which."""
        return LocatedItems(self._items, index, np.full(len(index), _WEIGHT, np.int64))

    def key(self, shard: int, index: int) -> str | None:
        """What the input is called."""
        key: str = self._items[index].key
        return key

    def url(self, shard: int) -> str:
        """They lie in many places."""
        return "inputs"
