"""Running aggregates of the values of each group: on columns if the values are numbers or text, else one by one.

Sums are added from left to right, so neither the block size nor the memory limit changes a result. Missing values are
ignored; a group that has no other values has a missing result.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DataError
from penstock.order import I64

F64 = npt.NDArray[np.float64]
_EXACT_ROWS = 1 << 20  # the sum of this many 32-bit numbers is exact in 64-bit floating point


class Aggregate(ABC):
    """An aggregate of one field, group by group."""

    def __init__(self, field: str) -> None:
        self.field = field

    @abstractmethod
    def add(self, numbers: I64, groups: int, column: Any) -> None:
        """Add values, an Arrow array or a list; ``numbers`` has the group number of each value, below ``groups``."""

    @abstractmethod
    def result(self) -> Any:
        """Return the result of each group: an Arrow array, or a list."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The estimated size in memory."""


class Sum(Aggregate):
    """Sums integers exactly, other numbers in 64-bit floating point, and anything else with ``+``."""

    how = "sum"

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.count: I64 = np.zeros(0, np.int64)
        self._high: I64 = np.zeros(0, np.int64)  # the upper bits of integer sums; _low has the lower 32
        self._low: I64 = np.zeros(0, np.int64)
        self._float: F64 | None = None
        self._plain: list[Any] | None = None

    @property
    def nbytes(self) -> int:
        return 40 * len(self.count) + (60 * len(self._plain) if self._plain is not None else 0)

    def add(self, numbers: I64, groups: int, column: Any) -> None:
        self._grow(groups)
        numbers, column = without_missing(numbers, column)
        self.count += np.bincount(numbers, minlength=groups)
        kind = _kind(column)
        if kind == "int" and self._float is None and self._plain is None:
            self._add_integers(numbers, groups, column)
        elif kind == "float" and self._plain is None and not self._has_integers():
            start = np.zeros(groups) if self._float is None else self._float
            self._float = left_to_right(start, numbers, _floats(column))
        else:
            self._add_plain(numbers, as_list(column))

    def _grow(self, groups: int) -> None:
        new = groups - len(self.count)
        if new <= 0:
            return
        self.count, self._high, self._low = (
            np.concatenate([array, np.zeros(new, np.int64)]) for array in (self.count, self._high, self._low)
        )
        if self._float is not None:
            self._float = np.concatenate([self._float, np.zeros(new)])
        if self._plain is not None:
            self._plain += [0] * new

    def _has_integers(self) -> bool:
        return self._float is None and bool(self._high.any() or self._low.any())

    def _add_integers(self, numbers: I64, groups: int, column: Any) -> None:
        values = _integers(column)
        for low in range(0, len(values), _EXACT_ROWS):
            part, which = values[low : low + _EXACT_ROWS], numbers[low : low + _EXACT_ROWS]
            lower = (part & part.dtype.type(0xFFFFFFFF)).astype(np.float64)
            upper = (part >> part.dtype.type(32)).astype(np.float64)
            self._low += np.bincount(which, lower, groups).astype(np.int64)
            if upper.any():
                self._high += np.bincount(which, upper, groups).astype(np.int64)

    def _totals(self) -> list[Any]:
        if self._plain is not None:
            return self._plain
        if self._float is not None:
            return list(self._float.tolist())
        return [(high << 32) + low for high, low in zip(self._high.tolist(), self._low.tolist(), strict=True)]

    def _add_plain(self, numbers: I64, values: Sequence[Any]) -> None:
        totals = self._plain = self._totals()
        try:
            for number, value in zip(numbers.tolist(), values, strict=True):
                totals[number] = totals[number] + value
        except TypeError as exc:
            raise not_numbers(self.how, self.field, values, exc) from exc

    def result(self) -> Any:
        missing = self.count == 0
        if self._float is not None and self._plain is None:
            return _array(self._float, missing)
        high = self._high + (self._low >> 32)
        if self._plain is None and bool((np.abs(high) < 1 << 30).all()):
            return _array((high << 32) + (self._low & 0xFFFFFFFF), missing)
        return [None if absent else total for total, absent in zip(self._totals(), missing.tolist(), strict=True)]


class Mean(Sum):
    """The mean: the sum divided by the number of values."""

    how = "mean"

    def result(self) -> Any:
        totals = super().result()
        if not isinstance(totals, list):
            with np.errstate(all="ignore"):
                return _array(_floats(totals.fill_null(0)) / self.count, self.count == 0)
        try:
            means = [None if t is None else t / n for t, n in zip(totals, self.count.tolist(), strict=True)]
        except (TypeError, OverflowError) as exc:
            raise not_numbers(self.how, self.field, totals, exc) from exc
        return means


class Std(Aggregate):
    """The sample standard deviation (n - 1), computed in one pass from differences to the first value of each group."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self._count: I64 = np.zeros(0, np.int64)
        self._first: F64 = np.zeros(0)
        self._sum: F64 = np.zeros(0)
        self._squares: F64 = np.zeros(0)

    @property
    def nbytes(self) -> int:
        return 32 * len(self._count)

    def add(self, numbers: I64, groups: int, column: Any) -> None:
        numbers, column = without_missing(numbers, column)
        try:
            values = _floats(column) if _kind(column) else np.array([float(value) for value in column])
        except (TypeError, ValueError, OverflowError) as exc:
            raise not_numbers("std", self.field, as_list(column), exc) from exc
        new = groups - len(self._count)
        self._first, self._sum, self._squares = (
            np.concatenate([array, np.zeros(new)]) for array in (self._first, self._sum, self._squares)
        )
        before = np.concatenate([self._count, np.zeros(new, np.int64)])
        first_at = np.full(groups, -1, np.int64)
        first_at[numbers[::-1]] = np.arange(len(numbers))[::-1]  # the last assignment wins
        begin = (before == 0) & (first_at >= 0)
        self._first[begin] = values[first_at[begin]]
        with np.errstate(all="ignore"):
            difference = values - self._first[numbers]
            self._sum = left_to_right(self._sum, numbers, difference)
            self._squares = left_to_right(self._squares, numbers, difference * difference)
        self._count = before + np.bincount(numbers, minlength=groups)

    def result(self) -> Any:
        counts = self._count
        with np.errstate(all="ignore"):
            spread = np.maximum(self._squares - self._sum * self._sum / counts, 0.0)
            spread[np.isnan(self._squares) | np.isnan(self._sum)] = math.nan
            found = np.sqrt(spread / (counts - 1))
        found[counts < 2] = math.nan
        return _array(found, counts == 0)


class Extreme(Aggregate):
    """The minimum or maximum; NaN only if a group has no other value."""

    def __init__(self, field: str, how: str) -> None:
        super().__init__(field)
        self._how, self._best = how, (min if how == "min" else max)
        self._column: Any = None
        self._plain: list[Any] | None = None
        self._nan: npt.NDArray[np.bool_] = np.zeros(0, bool)

    @property
    def nbytes(self) -> int:
        column_bytes = 0 if self._column is None else int(self._column.nbytes)
        return column_bytes + len(self._nan) + (100 * len(self._plain) if self._plain is not None else 0)

    def add(self, numbers: I64, groups: int, column: Any) -> None:
        self._nan = np.concatenate([self._nan, np.zeros(groups - len(self._nan), bool)])
        if self._plain is not None:
            self._plain += [None] * (groups - len(self._plain))
        numbers, column = without_missing(numbers, column)
        numbers, column = self._without_nan(numbers, column)
        same_type = not isinstance(column, list) and (self._column is None or self._column.type == column.type)
        if same_type and self._plain is None:
            self._add_column(numbers, groups, column)
            return
        if self._plain is None:
            self._plain = [None] * groups if self._column is None else as_list(self._column)
            self._plain += [None] * (groups - len(self._plain))
        self._add_plain(numbers, as_list(column))

    def _without_nan(self, numbers: I64, column: Any) -> tuple[I64, Any]:
        mask = _not_nan(column)
        if mask is None:
            return numbers, column
        self._nan[numbers[~mask]] = True
        return numbers[mask], _masked(column, mask)

    def _add_column(self, numbers: I64, groups: int, column: Any) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        known = 0 if self._column is None else len(self._column)
        parts = [column] if self._column is None else [self._column, column]
        if groups == 1:
            best = pc.min_max(pa.chunked_array(parts, column.type))[self._how]
            self._column = pa.array([best], column.type)
            return
        which = np.concatenate([np.arange(known), numbers])
        table = pa.table({"group": which, "value": pa.chunked_array(parts, column.type)})
        grouped = table.group_by("group", use_threads=False).aggregate([("value", self._how)])
        out = np.full(groups, -1, np.int64)
        out[grouped.column("group").to_numpy()] = np.arange(grouped.num_rows)
        values = grouped.column(f"value_{self._how}").combine_chunks()
        self._column = values.take(pa.array(out, mask=out < 0))

    def _add_plain(self, numbers: I64, values: Sequence[Any]) -> None:
        assert self._plain is not None
        best = self._plain
        try:
            for number, value in zip(numbers.tolist(), values, strict=True):
                best[number] = value if best[number] is None else self._best(best[number], value)
        except (TypeError, ValueError) as exc:
            raise not_numbers(self._how, self.field, values, exc, "values that can be compared") from exc

    def result(self) -> Any:
        if self._plain is None and self._column is not None and not self._nan.any():
            return self._column
        best = as_list(self._column) if self._plain is None and self._column is not None else self._plain or []
        best = best + [None] * (len(self._nan) - len(best))
        return [math.nan if b is None and nan else b for b, nan in zip(best, self._nan.tolist(), strict=True)]


AGGREGATES: dict[str, Callable[[str], Aggregate]] = {
    "sum": Sum,
    "mean": Mean,
    "std": Std,
    "min": lambda field: Extreme(field, "min"),
    "max": lambda field: Extreme(field, "max"),
}


def not_numbers(how: str, field: str, values: Sequence[Any], exc: Exception, wanted: str = "numbers") -> DataError:
    """Return the error for values that cannot be aggregated."""
    types = sorted({type(value).__name__ for value in values})[:3]
    return DataError(f"{how} needs {wanted}, but field {field!r} has {' and '.join(types)}: {exc}")


def left_to_right(start: F64, numbers: I64, values: F64) -> F64:
    """Return ``start`` plus the values of each group, added one after the other."""
    groups = len(start)
    which = np.concatenate([np.arange(groups), numbers])
    return np.bincount(which, np.concatenate([start, values]), groups).astype(np.float64, copy=False)  # in order


def without_missing(numbers: I64, column: Any) -> tuple[I64, Any]:
    """Return the group numbers and the values without those that are missing."""
    if isinstance(column, list):
        mask = np.array([value is not None for value in column], bool)
        return (numbers, column) if mask.all() else (numbers[mask], _masked(column, mask))
    if not column.null_count:
        return numbers, column
    mask = column.is_valid().to_numpy(zero_copy_only=False)
    return numbers[mask], _masked(column, mask)


def _masked(column: Any, mask: npt.NDArray[np.bool_]) -> Any:
    if isinstance(column, list):
        return [value for value, chosen in zip(column, mask.tolist(), strict=True) if chosen]
    import pyarrow as pa

    return column.filter(pa.array(mask))


def _not_nan(column: Any) -> npt.NDArray[np.bool_] | None:
    """Return which values are not NaN; ``None`` if there is no NaN."""
    if isinstance(column, list):
        mask = np.array([not (isinstance(value, float) and value != value) for value in column], bool)
    elif _kind(column) == "float":
        mask = ~np.isnan(column.to_numpy(zero_copy_only=False))
    else:
        return None
    return None if mask.all() else mask


def _kind(column: Any) -> str | None:
    """Return ``"int"`` or ``"float"`` for a column of such numbers, else ``None``."""
    if isinstance(column, list):
        return None
    import pyarrow as pa

    if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        return "int"
    return "float" if pa.types.is_floating(column.type) else None


def _integers(column: Any) -> Any:
    values = column.to_numpy(zero_copy_only=False)
    return values if values.dtype == np.uint64 else values.astype(np.int64)


def _floats(column: Any) -> F64:
    return column.to_numpy(zero_copy_only=False).astype(np.float64)  # type: ignore[no-any-return]


def as_list(column: Any) -> list[Any]:
    """Return a column as a list of Python values."""
    if isinstance(column, list):
        return column
    from penstock.formats.tables.values import values_of

    return values_of(column)


def _array(values: Any, missing: npt.NDArray[np.bool_]) -> Any:
    """Return an Arrow array, or a list if pyarrow is not installed."""
    from penstock.dataset.relations.key_values import has_arrow

    if not has_arrow():
        return [None if absent else value for value, absent in zip(values.tolist(), missing.tolist(), strict=True)]
    import pyarrow as pa

    return pa.array(values, mask=missing)
