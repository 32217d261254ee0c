"""Samples stored by column, which a block may contain in place of a list of dicts.

Iterating or indexing returns rows as dicts; stages that can work on columns use the columns directly. A batch of a
table is then a slice of the table, and no rows are created in between.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from penstock.order import I64

if TYPE_CHECKING:
    from penstock.plan.expressions import Condition, Expression


class JoinableItems(Sequence[Any]):
    """A sequence of items that is not a list, and that can be joined to others like it without touching the items."""

    @abstractmethod
    def joined(self, others: Sequence[Any]) -> Sequence[Any] | None:
        """Return these items followed by those of ``others``, or ``None`` if they do not fit together."""


class Columns(JoinableItems):
    """An immutable sequence of samples with the same fields, stored by column.

    Rows are created on access, each a new dict. A row is ``None`` if its values are absent: it cannot be read, or its
    source knows that a filter rejects it.
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the fields, in order."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The approximate size of the values in bytes."""

    @abstractmethod
    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, selection: int) -> Any: ...

    @overload
    def __getitem__(self, selection: slice) -> Columns: ...

    @abstractmethod
    def __getitem__(self, selection: int | slice) -> Any: ...

    @abstractmethod
    def pick(self, indices: I64) -> Columns:
        """Return the rows at ``indices``, in that order."""

    @abstractmethod
    def renamed(self, names: Mapping[str, str]) -> Columns:
        """Return the same rows with only the fields of ``names``, a mapping of new names to present ones."""

    @abstractmethod
    def joined(self, others: Sequence[Any]) -> Columns | None: ...

    @abstractmethod
    def collate(self) -> dict[str, Any]:
        """Return what ``collate`` returns for the rows, without creating them."""

    @abstractmethod
    def present(self) -> I64 | None:
        """Return the numbers of the rows that are not ``None``; ``None`` if that is all of them."""

    @abstractmethod
    def mask(self, where: Condition) -> NDArray[np.bool_] | None:
        """Return which rows meet a condition, or ``None`` if it must be evaluated row by row."""

    @abstractmethod
    def computed(self, expressions: Mapping[str, Expression]) -> Columns | None:
        """Return the rows with fields added or replaced, or ``None`` if they must be computed row by row."""


def join_columns(parts: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Concatenate sequences of items: as columns (or ``JoinableItems``) if they fit together, otherwise as a list."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0] if parts else None
    alike = isinstance(first, JoinableItems) and all(type(part) is type(first) for part in parts)
    if isinstance(first, JoinableItems) and alike and (whole := first.joined(parts[1:])) is not None:
        return whole
    return [item for part in parts for item in part]


def pick_rows(items: Sequence[Any], indices: Sequence[int] | I64) -> Sequence[Any]:
    """Return the items at ``indices``: as columns if ``items`` are columns, otherwise as a list."""
    if isinstance(items, Columns):
        return items.pick(np.asarray(indices, np.int64))
    return [items[int(i)] for i in indices]
