"""Samples that are already in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.order import I64
from penstock.plan import ByObject, Fields, Resources


@dataclass(frozen=True, slots=True)
class ItemsSource:
    """A list of items, compared by object; dicts are handed out as copies, so stages may change them."""

    items: ByObject

    random_access = True

    @property
    def resources(self) -> Resources | None:
        """Reading costs nothing."""
        return None

    def open(self) -> ItemsReader:
        """Nothing to open."""
        return ItemsReader(self.items.value)

    def describe(self) -> str:
        """The call that made it."""
        return f"from_items({len(self.items.value)} items)"


class ItemsReader:
    """One shard: the list."""

    at_hand = True  # in the memory of this process, and nowhere else

    def __init__(self, items: Sequence[Any]) -> None:
        self.names = ["items"]
        self._items = items

    def counts(self, scan: bool) -> I64 | None:
        """The length of the list."""
        return np.array([len(self._items)], np.int64)

    def count(self, shard: int) -> int:
        """The length of the list."""
        return len(self._items)

    def sizes(self) -> list[int]:
        """Items have no size of their own."""
        return [0]

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedItems:
        """Remember which."""
        return LocatedItems(self._items, index, np.zeros(len(index), np.int64))

    def key(self, shard: int, index: int) -> str | None:
        """The item's number, unless it carries a key."""
        item = self._items[index]
        return str(item["__key__"]) if isinstance(item, dict) and "__key__" in item else str(index)

    def url(self, shard: int) -> str:
        """Items lie nowhere."""
        return "items"


@dataclass(slots=True)
class LocatedItems:
    """Items by number."""

    items: Sequence[Any]
    index: I64
    nbytes: I64

    def take(self, sel: slice) -> LocatedItems:
        """Some of them."""
        return LocatedItems(self.items, self.index[sel], self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        """The items; a dict as a copy."""
        chosen = [self.items[i] for i in self.index.tolist()]
        return [item.copy() if isinstance(item, dict) else item for item in chosen], {}
