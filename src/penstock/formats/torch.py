"""Samples from a map-style dataset: any object with a length and items by index, as PyTorch defines it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import DataError, PlanError
from penstock.order import I64
from penstock.plan import ByObject, Fields, Reader, Resources, Source, Traits
from penstock.plan.values import Workers

DEFAULT_FIELDS = ("image", "label")  # not chosen by the user, so items with fewer values are accepted


@dataclass(frozen=True, slots=True)
class TorchSource(Source):
    """A map-style dataset, compared by object; ``fields`` name the values of its items.

    Such a dataset need not be thread-safe, so a single thread reads it unless ``workers`` says otherwise.

    Raises:
        PlanError: ``fields`` holds a name twice.
    """

    dataset: ByObject
    fields: tuple[str, ...] = DEFAULT_FIELDS
    workers: Workers = None

    random_access = True

    def __post_init__(self) -> None:
        if len({*self.fields}) < len(self.fields):
            raise PlanError(f"fields={self.fields!r}: a name occurs twice; give every value a name of its own")

    @property
    def resources(self) -> Resources | None:
        """Always set, since reading runs the user's code."""
        return Resources(1 if self.workers is None else self.workers)

    def open(self) -> TorchReader:
        return TorchReader(self.dataset.value, self.fields)

    def describe(self) -> str:
        return f"from_torch({type(self.dataset.value).__name__}, {len(self.dataset.value)} items)"


class TorchReader(Reader):
    """Reads a map-style dataset as one shard."""

    traits = Traits(in_memory=True)

    def __init__(self, dataset: Any, fields: tuple[str, ...]) -> None:
        self.names = ["items"]
        self._dataset, self._fields = dataset, fields

    def counts(self, scan: bool) -> I64 | None:
        return np.array([len(self._dataset)], np.int64)

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedTorchItems:
        return LocatedTorchItems(self._dataset, self._fields, index, np.zeros(len(index), np.int64))

    def url(self, shard: int) -> str:
        """Return the name of the dataset's class."""
        return type(self._dataset).__name__


@dataclass(slots=True)
class LocatedTorchItems:
    """Items of a map-style dataset by index."""

    dataset: Any
    fields: tuple[str, ...]
    index: I64
    nbytes: I64

    def take(self, sel: slice) -> LocatedTorchItems:
        return LocatedTorchItems(self.dataset, self.fields, self.index[sel], self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        samples: list[Any] = []
        errors: dict[int, DataError] = {}
        for position, index in enumerate(self.index.tolist()):
            try:
                samples.append(item_to_sample(self.dataset[index], self.fields))
            except Exception as exc:  # the user's dataset may raise anything
                errors[position] = DataError(f"{type(exc).__name__}: {exc}", type(self.dataset).__name__, str(index))
                errors[position].__cause__ = exc
                samples.append(None)
        return samples, errors


def item_to_sample(item: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    """Return an item as a sample: the entries of a mapping, the values of a tuple by ``fields``, else one value.

    A list is one value if there is one field, else it is treated like a tuple.

    Raises:
        ValueError: The numbers of values and of fields differ; fewer values are allowed with ``DEFAULT_FIELDS``.
    """
    if isinstance(item, Mapping):
        return dict(item)
    has_several_values = isinstance(item, tuple) or (isinstance(item, list) and len(fields) > 1)
    values = tuple(item) if has_several_values else (item,)
    if len(values) > len(fields) or (len(values) < len(fields) and fields != DEFAULT_FIELDS):
        count = f"{len(values)} value{'s' * (len(values) != 1)}"
        raise ValueError(
            f"an item has {count}, but there are {len(fields)} field names: {', '.join(fields)}; pass fields="
        )
    return dict(zip(fields, values, strict=False))
