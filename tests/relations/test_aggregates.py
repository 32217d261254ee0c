"""Aggregates of groups are what a plain loop computes, on rows, on columns and spilled."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import DataError, PlanError
from tests.relations.conftest import EXAMPLES, ROWS, datasets, groups, in_groups, same, tables


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sum", sum),
        ("mean", statistics.fmean),
        ("min", min),
        ("max", max),
        ("std", statistics.stdev),
        ("list", list),
    ],
)
def test_aggregates_of_several_fields_are_those_of_a_plain_loop(how: str, expected: Any) -> None:
    got = getattr(ps.from_items(ROWS).groupby("k"), how)("x", "y").take_all()
    for row, (k, rows) in zip(got, groups().items(), strict=True):
        assert row["k"] == k
        for name in ("x", "y"):
            assert row[f"{name}_{how}"] == pytest.approx(expected([sample[name] for sample in rows]))


def test_the_standard_deviation_of_one_value_is_nan() -> None:
    (row,) = ps.from_items([{"k": 1, "x": 5}]).groupby("k").std("x").take_all()
    assert math.isnan(row["x_std"])


def deviation(given: list[Any]) -> float:
    if len(given) < 2 or any(math.isnan(value) for value in given):
        return math.nan
    mean = math.fsum(given) / len(given)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in given) / (len(given) - 1))


def extreme(best: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    return lambda given: best([v for v in given if v == v], default=math.nan)


EXPECTED: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "mean": lambda given: sum(given) / len(given),
    "min": extreme(min),
    "max": extreme(max),
    "std": deviation,
}


@settings(max_examples=EXAMPLES, deadline=None)
@given(tables(), st.sampled_from(sorted(EXPECTED)), st.sampled_from([("k",), ("k", "j")]))
def test_aggregates_are_those_of_a_plain_loop(rows: list[dict[str, Any]], how: str, fields: tuple[str, ...]) -> None:
    want = []
    for group in in_groups(rows, fields):
        given = [row["x"] for row in group if row["x"] is not None]
        if how == "std" and given and max(map(abs, given)) > 2**50:
            return  # differences of such numbers lose all their digits
        want.append({**{f: group[0][f] for f in fields}, f"x_{how}": EXPECTED[how](given) if given else None})
    for ds in datasets(rows):
        assert same(getattr(ds.groupby(*fields), how)("x").take_all(), want)


def test_sums_do_not_depend_on_where_blocks_end() -> None:
    x = np.random.default_rng(0).normal(size=4000) * 10.0 ** np.arange(-10, 10).repeat(200)
    ds = ps.from_arrow(pa.table({"k": np.arange(4000) % 3, "x": x}))
    want = [sum(x[k::3].tolist()) if k else float(np.add.accumulate(x[::3])[-1]) for k in range(3)]
    sums = [row["x_sum"] for row in ds.groupby("k").sum("x")]
    assert sums == pytest.approx(want)
    small_batches = pa.Table.from_batches(pa.table({"k": np.arange(4000) % 3, "x": x}).to_batches(max_chunksize=7))
    assert [row["x_sum"] for row in ps.from_arrow(small_batches).groupby("k").sum("x").on("serial")] == sums
    assert [row["x_sum"] for row in ps.from_arrow(small_batches).on("local", memory=1).groupby("k").sum("x")] == sums


@pytest.mark.parametrize("how", ["sum", "mean", "std"])
def test_values_that_are_not_numbers_are_named(how: str) -> None:
    with pytest.raises(DataError, match=f"{how} needs numbers, but field 'x' has string"):
        getattr(ps.from_items([{"k": 1, "x": "a"}]).groupby("k"), how)("x").take_all()
    times = ps.from_arrow(pa.table({"k": [1], "x": pa.array([9], pa.timestamp("us"))}))
    for ds in (times, times.on("local", memory=1)):
        with pytest.raises(DataError, match=f"{how} needs numbers, but field 'x' has timestamp"):
            getattr(ds.groupby("k"), how)("x").take_all()
    mixed: list[dict[str, Any]] = [{"k": 1, "x": "a"}, {"k": 1, "x": 2}]
    with pytest.raises(PlanError, match="'x' must have one type, but are int and str"):
        getattr(ps.from_items(mixed).groupby("k"), how)("x").take_all()


@pytest.mark.parametrize("cpus", [1, 2, 5])
def test_sums_of_floats_do_not_depend_on_threads(cpus: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=20_000) * 10.0 ** rng.integers(-200, 200, 20_000)
    x[:3] = [math.inf, -math.inf, math.nan]
    table = pa.table({"k": np.arange(20_000) % 7, "x": x})
    sums = ps.from_arrow(table).on("local", cpus=cpus).groupby("k").sum("x").take_all()
    want = [math.fsum(x[k::7].tolist()) for k in range(3, 7)]
    assert [row["x_sum"] for row in sums[3:]] == pytest.approx(want, rel=1e-15)
    assert [str(row["x_sum"]) for row in sums[:3]] == ["inf", "-inf", "nan"]
    assert sums[3:] == ps.from_arrow(table).groupby("k").sum("x").take_all()[3:]


@pytest.mark.parametrize("key", [0.5, "a", 1, None, float("nan")], ids=str)
def test_a_deviation_is_computed_for_keys_of_any_type(key: Any) -> None:
    groups = ps.from_items([{"k": key, "x": 0}, {"k": key, "x": 2}]).groupby("k")
    assert [row["x_std"] for row in groups.std("x")] == [2**0.5]
