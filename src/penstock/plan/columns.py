"""Samples that are still columns: what a block may hold in place of a list of dicts.

Whoever wants rows iterates or indexes and gets dicts; whoever can work on columns asks for them. So a batch of a table
is cut out of the table, and no row is made on the way.
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


class Columns(Sequence[Any]):
    """A run of samples with the same fields, held by column; immutable.

    Rows are made when they are asked for, each a dict of its own. A row whose values are not there, since its source
    knows that no filter lets it through, or since it cannot be read, is ``None``.
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The fields, in order."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """About how many bytes they hold."""

    @abstractmethod
    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, which: int) -> Any: ...

    @overload
    def __getitem__(self, which: slice) -> Columns: ...

    @abstractmethod
    def __getitem__(self, which: int | slice) -> Any: ...

    @abstractmethod
    def pick(self, which: I64) -> Columns:
        """Some rows, in the order given."""

    @abstractmethod
    def renamed(self, names: Mapping[str, str]) -> Columns:
        """The same rows with other fields: new name -> the one it has here."""

    @abstractmethod
    def joined(self, others: Sequence[Columns]) -> Columns | None:
        """These rows, then those of the others; ``None`` where they do not fit together."""

    @abstractmethod
    def collate(self) -> dict[str, Any]:
        """What ``collate`` makes of the rows, without making rows."""

    @abstractmethod
    def present(self) -> I64 | None:
        """The numbers of the rows whose values are there; ``None``: all of them."""

    @abstractmethod
    def mask(self, where: Condition) -> NDArray[np.bool_] | None:
        """Which rows fulfil a condition; ``None``: only asking each row tells."""

    @abstractmethod
    def computed(self, named: Mapping[str, Expression]) -> Columns | None:
        """The same rows with fields added, or others in their place; ``None``: only asking each row tells."""


def join_columns(parts: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """All items of some runs: columns where all of them are columns that fit together, else a list."""
    if len(parts) == 1:
        return parts[0]
    columns = [part for part in parts if isinstance(part, Columns)]
    if parts and len(columns) == len(parts) and (whole := columns[0].joined(columns[1:])) is not None:
        return whole
    return [item for part in parts for item in part]


def pick_rows(items: Sequence[Any], which: Sequence[int] | I64) -> Sequence[Any]:
    """Some items: of columns as columns, of a list as a list."""
    if isinstance(items, Columns):
        return items.pick(np.asarray(which, np.int64))
    return [items[int(i)] for i in which]
