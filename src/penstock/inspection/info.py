"""The summary behind ``penstock info``: the sizes of fields, and the number of samples of each class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.engines import Program, Run
from penstock.formats.manifest import read_manifest_at
from penstock.formats.tar.index import Index
from penstock.formats.tar.indexing import build_index
from penstock.formats.tar.remote import remote_index
from penstock.formats.tar.scan import load_index
from penstock.formats.tar.shard_names import on_disk
from penstock.formats.tar.source import TarSource
from penstock.plan import Context, Fields, Map, OnError, Plan
from penstock.storage import local_path, open_storage


@dataclass(frozen=True, slots=True)
class FieldSizes:
    """How many samples have a field, and the sizes of its values in bytes; part of ``penstock info --json``."""

    name: str
    samples: int
    least: int
    median: int
    most: int
    total: int


def load_shard_index(url: str) -> Index:
    """Return the index of a shard: the one stored beside it, or a new one if there is none.

    Raises:
        StorageError: The shard cannot be read.
    """
    if on_disk(url):
        return load_index(local_path(url), shard=url)
    return remote_index(url, open_storage(url)) or build_index(url)


def measure_fields(indexes: Iterable[Index]) -> list[FieldSizes]:
    """Return the sizes of all fields of the shards together, sorted by name."""
    sizes: dict[str, list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = {}
    for index in indexes:
        for kind, names in enumerate(index.kinds):
            first = index.first[index.kind == kind]
            for position, name in enumerate(names):
                sizes.setdefault(name, []).append(index.size[first + position])
    fields = []
    for name in sorted(sizes):
        values = np.concatenate(sizes[name])
        if len(values):
            statistics = (values.min(), np.median(values), values.max(), values.sum())
            fields.append(FieldSizes(name, len(values), *(int(number) for number in statistics)))
    return fields


@dataclass(frozen=True)
class _Label(Map):
    """Replaces a sample by its ``cls`` field, so that nothing else of it is read."""

    def needs(self, after: Fields) -> Fields:
        return Fields(frozenset({"cls"}))

    def function(self, ctx: Context) -> Callable[..., Any]:
        return _label


def _label(sample: dict[str, Any]) -> Any:
    return sample.get("cls")


def count_classes(urls: list[str]) -> dict[str, int]:
    """Count the samples of each class, most frequent first; classes are named as in the manifest.

    Samples that cannot be read are not counted.

    Raises:
        StorageError: A shard cannot be read.
    """
    source: Any = TarSource(tuple(urls))
    program = Program(Plan(source, (_Label(),), errors=OnError("skip")))
    order = program.order(0)
    run = Run(program, order, 0, program.start(order, None))
    counts = Counter(label.decode("utf-8", "replace").strip() for label in run.items() if label is not None)
    manifest = read_manifest_at(urls[0].rpartition("/")[0] or ".")
    names = manifest.classes if manifest is not None else None
    return {_class_name(label, names): samples for label, samples in counts.most_common()}


def _class_name(label: str, names: tuple[str, ...] | None) -> str:
    if names is not None and label.isdecimal() and int(label) < len(names):
        return names[int(label)]
    return label
