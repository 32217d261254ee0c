"""Groups that numpy counts and adds have the results of DuckDB, to the last bit."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.relations.memory_groups import MemoryGroups, _rounded
from tests.relations.conftest import EXAMPLES

FULL = os.environ.get("PENSTOCK_FULL") == "1"
ROWS = 6000
UNUSUAL: dict[str, Any] = {
    "not finite": [*np.full(ROWS - 3, 0.5), np.nan, np.inf, -np.inf],
    "missing": [None, *np.full(ROWS - 1, 0.25)],
    "far apart": [1e-200, *np.full(ROWS - 1, 1e200)],
    "zeros": np.zeros(ROWS),
    "beyond 64 bits": np.full(ROWS, 2**62),
    "float32": np.linspace(0, 9, ROWS, dtype=np.float32),
    "integers": np.arange(ROWS) % 200 - 7,
}


def _table(spread: int = 1, **columns: Any) -> pa.Table:
    rng = np.random.default_rng(3)
    keys = rng.integers(-900, 900, ROWS) * spread
    return pa.table({"k": keys, "n": rng.integers(-(10**9), 10**9, ROWS), "x": rng.normal(size=ROWS), **columns})


def _both(monkeypatch: pytest.MonkeyPatch, rows: Any) -> tuple[list[Any], list[Any]]:
    """Return the rows by numpy and by DuckDB, as text, in which NaN equals NaN and floats keep all bits."""
    monkeypatch.setattr("penstock.relations.memory_groups._SLICE", 700)
    used: list[MemoryGroups] = []
    inner = MemoryGroups.of

    def noted(*args: Any) -> Any:
        groups = inner(*args)
        used.append(groups) if groups is not None else None
        return groups

    monkeypatch.setattr(MemoryGroups, "of", noted)
    by_numpy = list(map(repr, rows()))
    assert used
    monkeypatch.setattr(MemoryGroups, "of", lambda *args: None)
    return by_numpy, list(map(repr, rows()))


@pytest.mark.parametrize("how", ["sum", "mean", "min", "max", "std", "list"])
@pytest.mark.parametrize("groups", [5, 1800] if FULL else [1800])
@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300, 3e7] if FULL else [3e7], ids=str)
def test_aggregates_are_those_of_duckdb(monkeypatch: pytest.MonkeyPatch, how: str, groups: int, scale: float) -> None:
    values = np.random.default_rng(4).normal(size=ROWS) * scale + (1e9 if scale > 1e6 else 0)
    table = _table(x=values)
    ds = ps.from_arrow(table.set_column(0, "k", pa.array(table["k"].to_numpy() % groups)))
    found, expected = _both(monkeypatch, lambda: getattr(ds.groupby("k"), how)("x", "n"))
    assert found == expected


@pytest.mark.parametrize("values", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("how", ["sum", "mean", "std", "min", "max"] if FULL else ["std", "min"])
def test_unusual_values_are_aggregated_as_by_duckdb(monkeypatch: pytest.MonkeyPatch, how: str, values: Any) -> None:
    ds = ps.from_arrow(_table(x=values))
    found, expected = _both(monkeypatch, lambda: getattr(ds.groupby("k"), how)("x"))
    assert found == expected


def test_a_sum_of_one_value_is_that_value() -> None:
    rng = np.random.default_rng(7)
    values = (1 + rng.random(ROWS)) * np.exp2(rng.integers(-38, 0, ROWS)) * rng.choice([-1, 1], ROWS)
    sums = ps.from_arrow(pa.table({"k": np.arange(ROWS), "x": values})).groupby("k").sum("x").take_all()
    assert [row["x_sum"] for row in sums] == values.tolist()


def test_deviations_of_the_largest_floats_give_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    ds = ps.from_arrow(pa.table({"k": [0, 0, 1, 1], "x": [1.7e308, -1.7e308, 1.7e308, 1.7e308]}))
    for how in ("sum", "mean", "std"):
        with monkeypatch.context() as patched:
            found, expected = _both(patched, getattr(ds.groupby("k"), how)("x").take_all)
        assert found == expected


@pytest.mark.parametrize("spread", [1, 1 << 40, 1 << 53], ids=["narrow", "wide", "widest"])
def test_counts_are_those_of_duckdb(monkeypatch: pytest.MonkeyPatch, spread: int) -> None:
    ds = ps.from_arrow(_table(spread))
    for rows in (lambda: ds.groupby("k").count(), lambda: ds.value_counts("k")):
        with monkeypatch.context() as patched:
            found, expected = _both(patched, rows)
        assert found == expected


@pytest.mark.parametrize("keys", ["narrow", "wide"])
@pytest.mark.parametrize("descending", [False, True])
def test_a_sort_by_integers_keeps_the_order_of_equal_ones(keys: str, descending: bool) -> None:
    rng = np.random.default_rng(5)
    ends = np.array([-(2**63), 2**63 - 1, 0, 1])
    numbers = rng.integers(-5, 5, ROWS) if keys == "narrow" else ends[rng.integers(0, 4, ROWS)]
    ds = ps.from_arrow(pa.table({"k": numbers, "at": np.arange(ROWS)}))
    found = [row["at"] for row in ds.sort("k", descending=descending)]
    sign = -1 if descending else 1
    assert found == sorted(range(ROWS), key=lambda at: sign * int(numbers[at]))


def test_times_are_grouped_as_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    times = pa.array(np.arange(ROWS) % 2999 * 1_000_000, pa.timestamp("us", "UTC"))
    ds = ps.from_arrow(pa.table({"t": times, "x": np.arange(ROWS)}))
    found, expected = _both(monkeypatch, lambda: ds.groupby("t").max("x"))
    assert found == expected


@pytest.mark.parametrize("fields", [("t",), ("t", "k"), ("k", "t"), ("t", "s")], ids="-".join)
def test_texts_and_several_fields_are_grouped_as_by_duckdb(
    monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(6)
    numbered = [f"key {number:08d}" for number in rng.integers(0, 3000, ROWS)]
    words = np.array(["", "a", "b", "a\0", "bc", "\N{LATIN SMALL LETTER E WITH ACUTE}"])[rng.integers(0, 6, ROWS)]
    ds = ps.from_arrow(_table(t=numbered, s=pa.array(words.tolist())))
    verbs = [lambda: ds.groupby(*fields).sum("n"), lambda: ds.groupby(*fields).list("n"), lambda: ds.distinct(*fields)]
    for rows in verbs:
        with monkeypatch.context() as patched:
            found, expected = _both(patched, rows)
        assert found == expected


def test_the_first_row_of_each_group_is_its_first() -> None:
    ds = ps.from_arrow(pa.table({"k": [3, 1, 3, 2, 1], "at": np.arange(5)}))
    assert [row["at"] for row in ds.distinct("k")] == [0, 1, 3]


@settings(max_examples=10 * EXAMPLES, deadline=None)
@given(st.sampled_from([(30, 4), (40, 3), (55, 2), (58, 2)]), st.data())
def test_sums_of_limbs_of_any_size_are_added_up(limbs: tuple[int, int], data: st.DataObject) -> None:
    bits, count = limbs
    lower = [data.draw(st.integers(0, 2**62)) for _ in range(count - 1)]
    largest = 2 ** min(62, 120 - bits * (count - 1))
    highest = data.draw(st.integers(-largest, largest))
    total = sum(limb << bits * place for place, limb in enumerate([*lower, highest]))
    (found,) = _rounded(np.array([[limb] for limb in [*lower, highest]]), bits)
    assert found == pytest.approx(float(total), rel=1e-15)
