"""Groups, sorting, distinct values and joins on columns, on rows and spilled to the disk: what a plain loop gives."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.dataset.relations import key_values
from penstock.errors import DataError, PenstockError, PlanError
from penstock.formats.tables.columns import ArrowColumns

EXAMPLES = 300 if os.environ.get("PENSTOCK_FULL") else 6

KEYS = [
    st.integers(-3, 3),
    st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf, -2.0]),
    st.sampled_from(["", "a", "b", "ä", "\U0001f600"]),
    st.sampled_from([b"", b"a", b"\xff"]),
    st.booleans(),
]
NUMBERS = [
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-5, 5),
    st.floats(-1e6, 1e6, width=32),
    st.sampled_from([math.nan, 1.0, -2.5, 0.0]),
]


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Samples whose fields have one type each, and some missing values."""
    kinds = {"k": draw(st.sampled_from(KEYS)), "j": draw(st.sampled_from(KEYS)), "x": draw(st.sampled_from(NUMBERS))}
    fields = {name: draw(st.sampled_from([kind, st.none() | kind])) for name, kind in kinds.items()}
    return draw(st.lists(st.fixed_dictionaries(fields), min_size=1, max_size=30))


def datasets(rows: list[dict[str, Any]]) -> list[ps.Dataset]:
    """The same samples as rows, as columns in two batches, and as columns that are all spilled."""
    numbered = [{**row, "n": n} for n, row in enumerate(rows)]
    table = pa.table({name: pa.array([row[name] for row in numbered], from_pandas=False) for name in numbered[0]})
    pieces = pa.concat_tables([table.slice(0, len(rows) // 2), table.slice(len(rows) // 2)])
    return [ps.from_items(numbered), ps.from_arrow(pieces), ps.from_arrow(pieces).on("local", memory=1)]


def same(got: Any, want: Any) -> bool:
    """Whether values and types are equal; NaN equals itself, and floating-point sums may differ in the last digits."""
    if isinstance(want, dict):
        return list(got) == list(want) and all(same(got[name], want[name]) for name in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, float):
        return type(got) is float and (got == pytest.approx(want, nan_ok=True, rel=1e-9, abs=1e-9))
    return type(got) is type(want) and bool(got == want)


def key_of(row: dict[str, Any], fields: Sequence[str]) -> tuple[Any, ...]:
    return tuple("NaN" if row[f] != row[f] else row[f] for f in fields)


def in_groups(rows: list[dict[str, Any]], fields: Sequence[str]) -> list[list[dict[str, Any]]]:
    """The samples grouped by their values, and sorted by these."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(key_of(row, fields), []).append(row)
    return sorted(found.values(), key=lambda group: [sort_key(group[0][field]) for field in fields])


def sort_key(value: Any) -> tuple[int, Any]:
    """Values, then ``None``, then NaN."""
    return (1, 0) if value is None else (2, 0) if value != value else (0, value)


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


@settings(max_examples=EXAMPLES, deadline=None)
@given(tables(), st.sampled_from([("k",), ("j", "k")]))
def test_counts_and_lists_keep_every_sample(rows: list[dict[str, Any]], fields: tuple[str, ...]) -> None:
    groups = in_groups([{**row, "n": n} for n, row in enumerate(rows)], fields)
    keys = [{f: group[0][f] for f in fields} for group in groups]
    for ds in datasets(rows):
        counts = [{**key, "count": len(group)} for key, group in zip(keys, groups, strict=True)]
        assert same(ds.groupby(*fields).count().take_all(), counts)
        lists = [{**key, "n_list": [row["n"] for row in group]} for key, group in zip(keys, groups, strict=True)]
        assert same(ds.groupby(*fields).list("n").take_all(), lists)


@settings(max_examples=EXAMPLES, deadline=None)
@given(tables(), st.lists(st.booleans(), min_size=2, max_size=2))
def test_sorting_is_stable_by_every_field(rows: list[dict[str, Any]], downs: list[bool]) -> None:
    want = [{**row, "n": n} for n, row in enumerate(rows)]
    for field, down in (("j", downs[1]), ("k", downs[0])):
        want.sort(key=lambda row: sort_key(row[field]), reverse=down)
    for ds in datasets(rows):
        assert [row["n"] for row in ds.sort("k", "j", descending=downs)] == [row["n"] for row in want]


@settings(max_examples=EXAMPLES, deadline=None)
@given(tables())
def test_distinct_samples_are_the_first_of_each_value(rows: list[dict[str, Any]]) -> None:
    firsts = {fields: sorted(_first(rows, fields)) for fields in [("k",), ("k", "j")]}
    for ds in datasets(rows):
        for fields, want in firsts.items():
            assert [row["n"] for row in ds.distinct(*fields)] == want
        assert same(ds.unique("k"), [rows[n]["k"] for n in firsts[("k",)]])


def _first(rows: list[dict[str, Any]], fields: Sequence[str]) -> list[int]:
    found: dict[Any, int] = {}
    for number, row in enumerate(rows):
        found.setdefault(key_of(row, fields), number)
    return list(found.values())


@settings(max_examples=EXAMPLES, deadline=None)
@given(tables(), st.sampled_from(["inner", "left"]), st.sampled_from([["k"], ["k", "j"]]), st.integers(0, 9))
def test_a_join_gives_what_two_loops_give(rows: list[dict[str, Any]], how: Any, on: list[str], seed: int) -> None:
    other = [{**{f: row[f] for f in on}, "y": n, "z": str(n)} for n, row in enumerate(rows)]
    other = random.Random(seed).sample(other, len(other) // 2) + other[:1]
    want = []
    for number, row in enumerate(rows):
        partners = [right for right in other if key_of(right, on) == key_of(row, on)]
        want += [(number, partner["y"], partner["z"]) for partner in partners]
        want += [(number, None, None)] if how == "left" and not partners else []
    table = pa.table({name: pa.array([row[name] for row in other]) for name in other[0]})
    for ds in datasets(rows):
        for side in (ps.from_items(other), ps.from_arrow(table), ps.from_arrow(table).on("local", memory=1)):
            got = ds.join(side, on=on, how=how).take_all()
            assert [(row["n"], row["y"], row["z"]) for row in got] == want


def test_columns_stay_columns() -> None:
    table = pa.table({"k": [3, 1, 2, 1], "x": pa.array([1.0, 2.0, None, 4.0], pa.float32())})
    ds = ps.from_arrow(table)
    for result in (ds.sort("k"), ds.distinct("k"), ds.join(ds.rename(y="x"), "k"), ds.with_columns(z=ps.col("x") * 2)):
        (found,) = {type(run) for run in result._run(0).runs() if len(run)}
        assert found is ArrowColumns
    assert ds.sort("k").to_arrow().schema.field("x").type == pa.float32()


def test_mixed_values_are_compared_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [{"k": k, "x": x} for k, x in [(1, 1), (1.0, 2.5), ("b", 1), (True, 1), (None, 3)]]
    rows += [{"k": (1, 2), "x": 2**70}, {"k": np.array([1, 2]), "x": 1}]
    for _ in range(2):
        got = ps.from_items(rows).groupby("k").sum("x").take_all()
        assert [(row["k"], row["x_sum"]) for row in got] == [(1, 4.5), ("b", 1), ((1, 2), 2**70 + 1), (None, 3)]
        assert [row["x"] for row in ps.from_items(rows).sort("k")] == [1, 2.5, 1, 1, 2**70, 1, 3]
        assert ps.from_items(rows).unique("k")[:2] == [1, "b"]
        monkeypatch.setattr(key_values, "has_arrow", lambda: False)  # as if pyarrow was not installed


def test_sums_do_not_depend_on_where_blocks_end() -> None:
    x = np.random.default_rng(0).normal(size=4000) * 10.0 ** np.arange(-10, 10).repeat(200)
    ds = ps.from_arrow(pa.table({"k": np.arange(4000) % 3, "x": x}))
    want = [sum(x[k::3].tolist()) if k else float(np.add.accumulate(x[::3])[-1]) for k in range(3)]
    sums = [row["x_sum"] for row in ds.groupby("k").sum("x")]
    assert sums == pytest.approx(want)
    small_batches = pa.Table.from_batches(pa.table({"k": np.arange(4000) % 3, "x": x}).to_batches(max_chunksize=7))
    assert [row["x_sum"] for row in ps.from_arrow(small_batches).groupby("k").sum("x").on("serial")] == sums
    assert [row["x_sum"] for row in ps.from_arrow(small_batches).on("local", memory=1).groupby("k").sum("x")] == sums


def test_value_counts_are_sorted_by_count_then_by_value() -> None:
    got = ps.from_items([{"k": k} for k in "cabbac?"]).value_counts("k").take_all()
    assert [(row["k"], row["count"]) for row in got] == [("a", 2), ("b", 2), ("c", 2), ("?", 1)]


def test_describe_summarises_every_field() -> None:
    rows = [
        {"x": 1, "s": "b", "v": np.zeros(2)},
        {"x": 4, "s": None, "v": np.ones(2)},
        {"x": None, "s": "a", "v": None},
    ]
    got = {row["field"]: row for row in ps.from_items(rows).describe()}
    summary = {
        "type": "int",
        "count": 2,
        "missing": 1,
        "mean": 2.5,
        "std": pytest.approx(2.1213203),
        "min": 1,
        "max": 4,
    }
    assert got["x"] == {"field": "x", **summary}
    assert (got["s"]["min"], got["s"]["max"], got["s"]["mean"], got["s"]["missing"]) == ("a", "b", None, 1)
    assert (got["v"]["count"], got["v"]["type"], got["v"]["min"]) == (2, "array<float64>[2]", None)
    table = pa.table({"x": [1, 4, None], "s": ["b", None, "a"]})
    assert ps.from_arrow(table).describe().take_all() == [got["x"], got["s"]]
    assert [row["field"] for row in ps.from_items(rows).describe("s")] == ["s"]


EXPRESSIONS: dict[str, Any] = {
    "product": ps.col("a") * 2 + ps.col("b"),
    "difference": 1 - ps.col("a"),
    "share": ps.col("a") / 4,
    "rest": ps.col("b") % 3 + ps.col("a") // 2,
    "minus": -ps.col("c"),
    "large": ps.col("d") * 4,
    "square": ps.col("a") ** 2,
    "copy": ps.col("c"),
    "constant": "train",
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_gives_what_python_computes(name: str) -> None:
    table = pa.table(
        {
            "a": pa.array([1, None, -3], pa.int32()),
            "b": pa.array([5, 6, 7], pa.uint8()),
            "c": pa.array([0.1, 0.25, None], pa.float32()),
            "d": pa.array([2**62, 1, None]),
        }
    )
    ds = ps.from_arrow(table)
    expression = {name: EXPRESSIONS[name]}
    want = ps.from_items(ds.take_all()).with_columns(**expression).take_all()
    assert same(ds.with_columns(**expression).take_all(), want)
    if name == "large":
        assert want[0]["large"] == 2**64
    if name == "rest":
        assert [row["rest"] for row in want] == [2, None, -1]


def test_new_fields_are_computed_from_the_original_sample() -> None:
    ds = ps.from_arrow(pa.table({"a": [1, 2]})).with_columns(a=ps.col("a") + 1, b=lambda s: s["a"] * 10, c=ps.col("a"))
    assert ds.take_all() == [{"a": 2, "b": 10, "c": 1}, {"a": 3, "b": 20, "c": 2}]
    assert "with_columns(a=(col('a') + 1)" in repr(ds)


def test_only_the_fields_of_an_expression_are_read(tmp_path: Any) -> None:
    ps.from_items([{"a": i, "b": i, "c": i} for i in range(4)]).write_parquet(tmp_path / "t")
    ds = ps.read_parquet(str(tmp_path / "t")).with_columns(d=ps.col("a") + 1).select("d")
    assert "fields read: a" in ds.explain()
    assert ds.take(1) == [{"d": 1}]


def test_a_division_by_zero_fails_one_sample() -> None:
    ds = ps.from_arrow(pa.table({"a": [1, 2], "b": [1, 0]})).with_columns(c=ps.col("a") / ps.col("b"))
    with pytest.raises(PenstockError, match="division by zero"):
        ds.take_all()
    assert [row["c"] for row in ds.on_error("skip")] == [1.0]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ds: ds.sort(),
        lambda ds: ds.sort("k", "k"),
        lambda ds: ds.sort("k", descending=[True, False]),
        lambda ds: ds.groupby(),
        lambda ds: ds.distinct(3),
        lambda ds: ds.with_columns(),
        lambda ds: ds.with_columns(c=ps.col("a") == 3),
        lambda ds: ds.join(ds, []),
        lambda ds: ds.shard(0, 2).distinct("k"),
        lambda ds: ds.shard(0, 2).describe(),
    ],
)
def test_wrong_arguments_are_refused_where_they_are_written(wrong: Any) -> None:
    with pytest.raises(PlanError):
        wrong(ps.from_items([{"k": 1}]))


@pytest.mark.parametrize("how", ["sum", "mean", "std", "min"])
def test_values_that_are_not_numbers_are_named(how: str) -> None:
    rows: list[dict[str, Any]] = [{"k": 1, "x": "a"}, {"k": 1, "x": 2}]
    with pytest.raises(DataError, match=f"{how} needs .*'x' has int and str"):
        getattr(ps.from_items(rows).groupby("k"), how)("x").take_all()


@pytest.mark.parametrize("verb", [lambda ds: ds.sort("z"), lambda ds: ds.distinct("z"), lambda ds: ds.join(ds, "z")])
def test_a_missing_column_is_named(verb: Any) -> None:
    with pytest.raises(DataError, match="no field 'z', only 'k'"):
        verb(ps.from_arrow(pa.table({"k": [1]}))).take_all()


def test_distinct_without_names_needs_samples_with_the_same_fields() -> None:
    with pytest.raises(DataError, match="other fields"):
        ps.from_items([{"a": 1}, {"b": 1}]).distinct().take_all()
    assert ps.from_items([{"a": 1, "__key__": "x"}, {"a": 1, "__key__": "y"}]).distinct().count() == 1
