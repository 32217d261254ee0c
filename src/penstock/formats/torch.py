"""Map-style datasets of PyTorch's kind as a source of samples: anything with a length and items by number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import DataError, PlanError
from penstock.order import I64
from penstock.plan import ByObject, Fields, Resources
from penstock.plan.values import Workers

USUAL = ("image", "label")  # names that nobody had to give, so an item may have fewer values


@dataclass(frozen=True, slots=True)
class TorchSource:
    """A map-style dataset, compared by object; its items become samples by ``fields``.

    Nobody promises that such a dataset may be asked from several threads, so one thread asks unless ``workers``
    says otherwise.
    """

    dataset: ByObject
    fields: tuple[str, ...] = USUAL
    workers: Workers = None

    random_access = True

    def __post_init__(self) -> None:
        if len({*self.fields}) < len(self.fields):
            raise PlanError(f"fields={self.fields!r}: a name comes twice; give every value a name of its own")

    @property
    def resources(self) -> Resources | None:
        """A function of the user's runs there."""
        return Resources(1 if self.workers is None else self.workers)

    def open(self) -> TorchReader:
        """Nothing to open."""
        return TorchReader(self.dataset.value, self.fields)

    def describe(self) -> str:
        """The call that made it."""
        return f"from_torch({type(self.dataset.value).__name__}, {len(self.dataset.value)} items)"


class TorchReader:
    """One shard: the dataset."""

    at_hand = True  # in the memory of this process, and nowhere else

    def __init__(self, dataset: Any, fields: tuple[str, ...]) -> None:
        self.names = ["items"]
        self._dataset, self._fields = dataset, fields

    def counts(self, scan: bool) -> I64 | None:
        """The length of the dataset."""
        return np.array([len(self._dataset)], np.int64)

    def count(self, shard: int) -> int:
        """The length of the dataset."""
        return len(self._dataset)

    def sizes(self) -> list[int]:
        """Items have no size of their own."""
        return [0]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedTorchItems:
        """Remember which."""
        return LocatedTorchItems(self._dataset, self._fields, index, np.zeros(len(index), np.int64))

    def key(self, shard: int, index: int) -> str | None:
        """The item's number."""
        return str(index)

    def url(self, shard: int) -> str:
        """The dataset's class: items lie nowhere."""
        return type(self._dataset).__name__


@dataclass(slots=True)
class LocatedTorchItems:
    """Items by number."""

    dataset: Any
    fields: tuple[str, ...]
    index: I64
    nbytes: I64

    def take(self, sel: slice) -> LocatedTorchItems:
        """Some of them."""
        return LocatedTorchItems(self.dataset, self.fields, self.index[sel], self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        """Ask for the items; one that fails is a DataError with its number."""
        out: list[Any] = []
        bad: dict[int, DataError] = {}
        for place, number in enumerate(self.index.tolist()):
            try:
                out.append(named(self.dataset[number], self.fields))
            except Exception as exc:  # whatever a dataset of the user's may raise
                bad[place] = DataError(f"{type(exc).__name__}: {exc}", type(self.dataset).__name__, str(number))
                bad[place].__cause__ = exc
                out.append(None)
        return out, bad


def named(item: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    """Make a sample of an item: a mapping as it is, a tuple by the names of its places, anything else as the first.

    A list is one value where there is one name, and else like a tuple.

    Raises:
        ValueError: there are not as many values as names.
    """
    if isinstance(item, Mapping):
        return dict(item)
    parted = isinstance(item, tuple) or (isinstance(item, list) and len(fields) > 1)
    values = tuple(item) if parted else (item,)
    if len(values) > len(fields) or (len(values) < len(fields) and fields != USUAL):
        some = f"{len(values)} value{'s' * (len(values) != 1)}"
        raise ValueError(f"an item has {some} and there are names for {len(fields)}: {', '.join(fields)}")
    return dict(zip(fields, values, strict=False))
