"""Aggregates as queries whose results do not depend on the order in which DuckDB visits the rows.

Integers are added as 128-bit integers. So are floats: each is scaled by a power of two to an integer, in bands of
magnitude, and the exact sums of the bands are added from the largest to the smallest. NaN and infinity, whose sums do
not depend on the order, are added separately. Missing values are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.errors import DataError
from penstock.relations.database import StagedTable

_BAND_BITS = 40  # bits of magnitude in a band: with 53 of the number itself, 2**34 rows fit into 127 bits
SQUARE_BITS = 93  # of squares that are at most 1: 2**34 of them fit into 127 bits


def aggregated(con: Any, table: StagedTable, keys: Sequence[str], how: str, columns: Sequence[str]) -> str:
    """Return a query for one row per group: the keys, and an aggregate of each column, named ``r0``, ``r1``, ..."""
    if how == "std":
        return _deviations(con, table, keys, columns)
    found = ["count(*) as r0"] if how == "count" else []
    for number, column in enumerate(columns):
        kind = table.schema.field(column).type
        if how in ("sum", "mean"):
            total = total_of(con, table.name, column, kind)
            value = total if how == "sum" else f"({total})::double / count({column})"
        else:
            value = extreme_of(how, column, kind)
        found.append(f"{value} as r{number}")
    return _grouped(table.name, keys, found)


def _grouped(table: str, keys: Sequence[str], values: Sequence[str]) -> str:
    group = f" group by {', '.join(keys)}" if keys else ""
    return f"select {', '.join([*keys, *values])} from {table}{group}"


def check_numbers(table: StagedTable, how: str, columns: Sequence[str]) -> None:
    """Check that columns can be added, unless only their extremes are wanted.

    Raises:
        DataError: A column has other values than numbers.
    """
    import pyarrow as pa

    types = pa.types
    for column in columns if how not in ("min", "max") else ():
        kind = table.schema.field(column).type
        numbers = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
        if not (numbers or types.is_null(kind)):
            raise DataError(f"{how} needs numbers, but field {table.field_name(column)!r} has {kind}")


def extreme_of(how: str, column: str, kind: Any) -> str:
    """Return the minimum or maximum of a column; NaN, the largest number of DuckDB, only if there is no other."""
    import pyarrow as pa

    if how == "max" and pa.types.is_floating(kind):
        return f"coalesce(max({column}) filter (not isnan({column})), max({column}))"
    return f"{how}({column})"


def total_of(con: Any, table: str, column: str, kind: Any) -> str:
    """Return the exact sum of a column, in every group; a float if the column has floats."""
    import pyarrow as pa

    if not pa.types.is_floating(kind):
        return f"sum({column})"  # of integers: a 128-bit one
    size = f"abs({column}::double)"
    smallest, largest, finite = con.execute(
        f"select min({size}) filter ({column} != 0 and isfinite({column})), "
        f"max({size}) filter (isfinite({column})), coalesce(bool_and(isfinite({column})), true) from {table}"
    ).fetchall()[0]
    bands = magnitude_bands(smallest or 1.0, largest or 1.0)
    total = " + ".join(_band_total(column, *band, alone=finite and len(bands) == 1) for band in bands)
    return total if finite else f"coalesce(sum({column}::double) filter (not isfinite({column})), {total})"


def magnitude_bands(smallest: float, largest: float) -> list[tuple[float, float, int]]:
    """Return the bands that cover the magnitudes: the lower bound, the upper bound, and the exponent of the scale."""
    top = math.frexp(largest)[1]  # largest < 2**top
    bands: list[tuple[float, float, int]] = []
    while True:
        low = top - _BAND_BITS
        last = math.ldexp(1.0, low) <= smallest
        upper = math.inf if not bands else math.ldexp(1.0, top)
        bands.append((0.0 if last else math.ldexp(1.0, low), upper, 53 + _BAND_BITS - top))
        if last:
            return bands
        top = low


def _band_total(column: str, low: float, upper: float, exponent: int, alone: bool) -> str:
    value = f"({_times(f'{column}::double', exponent)})::hugeint"
    if not alone:
        size = f"abs({column}::double)"
        inside = f"isfinite({column}) and {size} >= {_sql(low)} and {size} < {_sql(upper)}"
        value = f"case when {inside} then {value} when {column} is not null then 0 end"
    return _times(f"sum({value})::double", -exponent)


def _times(value: str, exponent: int) -> str:
    """Return a value times a power of two, in two steps: one factor may be beyond the range of a float."""
    return f"{value} * {_sql(math.ldexp(1.0, exponent // 2))} * {_sql(math.ldexp(1.0, exponent - exponent // 2))}"


def _sql(number: float) -> str:
    return f"'{number!r}'::double"


def _deviations(con: Any, table: StagedTable, keys: Sequence[str], columns: Sequence[str]) -> str:
    """Return a query for sample standard deviations, from the squares of the differences to the mean.

    The differences of a group are divided by the largest of them. Their squares, at most 1, are added as integers with
    93 bits below the point, which is more than a float can hold of their sum.
    """
    means = []
    for number, column in enumerate(columns):
        kind = table.schema.field(column).type
        mean = f"({total_of(con, table.name, column, kind)})::double / count({column})"
        means += [f"{mean} as m{number}", f"min({column})::double as l{number}", f"max({column})::double as h{number}"]
    # Other names for the keys: what comes after the query names them without a table.
    renamed = [f"{key} as k{number}" for number, key in enumerate(keys)]
    same = " and ".join(f"{key} is not distinct from k{number}" for number, key in enumerate(keys)) or "true"
    by_key = f" group by {', '.join(keys)}" if keys else ""
    groups = f"select {', '.join([*renamed, *means])} from {table.name}{by_key}"
    found = []
    for number, column in enumerate(columns):
        mean, count = f"m{number}", f"count({column})"
        spread = f"greatest(h{number} - {mean}, {mean} - l{number})"
        ratio = f"(({column}::double - {mean}) / {spread})"
        scaled = f"{ratio} * {ratio} * {_sql(math.ldexp(1.0, SQUARE_BITS))}"
        total = f"sum(case when {spread} > 0 and isfinite({spread}) then {scaled} else 0 end::hugeint)"
        deviation = (
            f"sqrt({total}::double * {_sql(math.ldexp(1.0, -SQUARE_BITS))} / ({count} - 1)) * any_value({spread})"
        )
        found.append(f"case when {count} > 1 then {deviation} when {count} > 0 then 'nan'::double end as r{number}")
    return f"select {', '.join([*keys, *found])} from {table.name} join ({groups}) on {same}{by_key}"
