"""What shards hold: samples, bytes, fields with their sizes, classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.engines import Program, Run
from penstock.formats.manifest import read_manifest_at
from penstock.formats.tar.index import Index
from penstock.formats.tar.remote import remote_index
from penstock.formats.tar.scan import load_index
from penstock.formats.tar.shard_names import on_disk
from penstock.formats.tar.source import TarSource
from penstock.inspection.verify import make_index
from penstock.plan import Context, Fields, Map, OnError, Plan
from penstock.storage import Storage, local_path, open_storage


@dataclass(frozen=True, slots=True)
class Field:
    """How often a field is there, and its bytes: least, median, most, all."""

    name: str
    samples: int
    least: int
    median: int
    most: int
    total: int


def index_of(url: str, storage: Storage | None = None) -> Index:
    """Give the index of a shard: the one beside it where there is one, else a new one.

    Raises:
        StorageError: The shard cannot be read.
    """
    if on_disk(url):
        return load_index(local_path(url), shard=url)
    return remote_index(url, open_storage(url, storage)) or make_index(url, storage)


def fields_of(indexes: Iterable[Index]) -> list[Field]:
    """Measure the fields of all shards, by name."""
    sizes: dict[str, list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = {}
    for index in indexes:
        for number, names in enumerate(index.kinds):
            first = index.first[index.kind == number]
            for place, name in enumerate(names):
                sizes.setdefault(name, []).append(index.size[first + place])
    out = []
    for name in sorted(sizes):
        every = np.concatenate(sizes[name])
        if len(every):
            numbers = (every.min(), np.median(every), every.max(), every.sum())
            out.append(Field(name, len(every), *(int(number) for number in numbers)))
    return out


@dataclass(frozen=True)
class _Label(Map):
    """The class of a sample, and nothing else of it."""

    def needs(self, after: Fields) -> Fields:
        return Fields(frozenset({"cls"}))

    def function(self, ctx: Context) -> Callable[..., Any]:
        return _label


def _label(sample: dict[str, Any]) -> Any:
    return sample.get("cls")


def classes_of(urls: list[str], storage: Storage | None = None) -> dict[str, int]:
    """Count the samples of each class, most first; by name where the manifest has names.

    Raises:
        DataError: A sample cannot be read.
        StorageError: A shard cannot be read.
    """
    source: Any = TarSource(tuple(urls), storage=storage)
    program = Program(Plan(source, (_Label(),), errors=OnError("skip")))
    order = program.order(0)
    run = Run(program, order, 0, program.start(order, None))
    counts = Counter(label.decode("utf-8", "replace").strip() for label in run.items() if label is not None)
    manifest = read_manifest_at(urls[0].rpartition("/")[0] or ".", storage)
    names = manifest.classes if manifest is not None else None
    return {_name(label, names): many for label, many in counts.most_common()}


def _name(label: str, names: tuple[str, ...] | None) -> str:
    known = names is not None and label.isdecimal() and int(label) < len(names)
    return names[int(label)] if names is not None and known else label
