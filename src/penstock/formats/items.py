"""Samples from a list in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.lazy import cached_property
from penstock.order import I64
from penstock.plan import ByObject, Fields, Reader, Source, Traits


@dataclass(frozen=True, slots=True)
class ItemsSource(Source):
    """A list of items, compared by object; dicts are copied when they are read, so stages may change them."""

    items: ByObject

    random_access = True

    def open(self) -> ItemsReader:
        return ItemsReader(self.items.value)

    def describe(self) -> str:
        return f"from_items({len(self.items.value)} items)"


_FIRST_ITEMS = 1000  # items whose fields are looked at; those of a list or tuple, which cost little, are all


class ItemsReader(Reader):
    """Reads a list as one shard."""

    traits = Traits(in_memory=True, fields_vary=True)

    def __init__(self, items: Sequence[Any]) -> None:
        self.names = ["items"]
        self._items = items

    def counts(self, scan: bool) -> I64 | None:
        return np.array([len(self._items)], np.int64)

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedItems:
        return LocatedItems(self._items, index, np.zeros(len(index), np.int64))

    def key(self, shard: int, index: int) -> str | None:
        """Return the ``__key__`` of an item, or its index if it has none."""
        item = self._items[index]
        return str(item["__key__"]) if isinstance(item, dict) and "__key__" in item else str(index)

    def fields(self, shard: int) -> tuple[str, ...]:
        """Return the fields of the items; empty if one of these is not a sample."""
        return self._fields

    @cached_property
    def _fields(self) -> tuple[str, ...]:
        count = len(self._items) if isinstance(self._items, list | tuple) else _FIRST_ITEMS
        names: dict[Any, None] = {}
        for index in range(min(len(self._items), count)):
            item = self._items[index]
            if not isinstance(item, dict):
                return ()
            if item.keys() - names.keys():
                names.update(dict.fromkeys(item))
        return tuple(names) if all(isinstance(name, str) for name in names) else ()

    def url(self, shard: int) -> str:
        return "items"


@dataclass(slots=True)
class LocatedItems:
    """Items of a list by index."""

    items: Sequence[Any]
    index: I64
    nbytes: I64

    def take(self, sel: slice) -> LocatedItems:
        return LocatedItems(self.items, self.index[sel], self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        chosen = [self.items[i] for i in self.index.tolist()]
        return [item.copy() if isinstance(item, dict) else item for item in chosen], {}
