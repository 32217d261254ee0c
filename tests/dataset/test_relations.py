"""Groups, sorting, distinct values, joins and stratified splits: what a plain loop over the samples gives."""

from __future__ import annotations

import math
import pickle
import random
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.codecs.features import ClassLabel, Value, features_of, metadata_of
from penstock.errors import DataError, PenstockError, PlanError
from penstock.testing import numbers

DICE = random.Random(0)
ROWS: list[dict[str, Any]] = [
    {"k": DICE.choice("abc"), "x": DICE.randrange(100), "y": DICE.random()} for _ in range(200)
]


def groups() -> dict[str, list[dict[str, Any]]]:
    by_key: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in ROWS:
        by_key[row["k"]].append(row)
    return dict(sorted(by_key.items()))


def test_count_gives_a_sorted_row_for_each_value() -> None:
    got = ps.from_items(ROWS).groupby("k").count().take_all()
    assert got == [{"k": k, "count": len(rows)} for k, rows in groups().items()]


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
def test_aggregates_are_those_of_a_plain_loop(how: str, expected: Any) -> None:
    got = getattr(ps.from_items(ROWS).groupby("k"), how)("x", "y").take_all()
    for row, (k, rows) in zip(got, groups().items(), strict=True):
        assert row["k"] == k
        for name in ("x", "y"):
            assert row[f"{name}_{how}"] == pytest.approx(expected([sample[name] for sample in rows]))


def test_the_deviation_of_one_value_is_nan() -> None:
    (row,) = ps.from_items([{"k": 1, "x": 5}]).groupby("k").std("x").take_all()
    assert math.isnan(row["x_std"])


def test_tuples_lists_and_arrays_are_equal_keys() -> None:
    rows = [{"dims": shape} for shape in [(4, 6), [4, 6], np.array([2, 2]), (2, 2, 3)]]
    got = ps.from_items(rows).groupby("dims").count().take_all()
    assert [(list(row["dims"]), row["count"]) for row in got] == [([2, 2], 1), ([2, 2, 3], 1), ([4, 6], 2)]


def test_none_and_nan_are_groups_at_the_end() -> None:
    rows: list[dict[str, Any]] = [{"k": None}, {"k": float("nan")}, {"k": 2}, {"k": np.float64("nan")}, {"k": 1.5}]
    got = ps.from_items(rows).groupby("k").count().take_all()
    assert [row["k"] for row in got[:2]] == [1.5, 2]
    assert sorted((str(row["k"]), row["count"]) for row in got[2:]) == [("None", 1), ("nan", 2)]


@pytest.mark.parametrize("descending", [False, True])
def test_sort_is_stable(descending: bool) -> None:
    got = ps.from_items(ROWS).sort("k", descending=descending).take_all()
    assert got == sorted(ROWS, key=lambda row: row["k"], reverse=descending)


def test_unique_keeps_the_order_of_first_occurrence() -> None:
    assert ps.from_items(ROWS).unique("k") == list(dict.fromkeys(row["k"] for row in ROWS))


LABELS = [{"k": "a", "label": 1}, {"k": "b", "label": 2}, {"k": "b", "label": 3}, {"k": "z", "label": 4}]


@pytest.mark.parametrize("how", ["inner", "left"])
def test_a_join_gives_what_two_loops_give(how: Any) -> None:
    want = []
    for row in ROWS:
        partners = [label for label in LABELS if label["k"] == row["k"]]
        want += [{**row, "label": partner["label"]} for partner in partners]
        want += [{**row, "label": None}] if how == "left" and not partners else []
    joined = ps.from_items(ROWS).join(ps.from_items(LABELS), on="k", how=how)
    assert list(joined) == want
    assert list(pickle.loads(pickle.dumps(joined))) == want
    assert list(joined.on("serial")) == want


def test_a_join_can_be_resumed() -> None:
    ds = ps.from_items(ROWS).join(ps.from_items(LABELS), "k", workers=2).shuffle(10).batched(7)
    want = [batch["x"].tolist() for batch in ds.loader()]
    loader = ds.loader()
    run = iter(loader)
    seen = [next(run)["x"].tolist() for _ in range(5)]
    again = ds.loader()
    again.load_state_dict(loader.state_dict())
    assert seen + [batch["x"].tolist() for batch in again] == want


def test_fields_that_both_sides_have_need_a_suffix() -> None:
    left, right = ps.from_items([{"k": 1, "x": 2}]), ps.from_items([{"k": 1, "x": 3, "__key__": "r"}])
    assert left.join(right, "k", suffix="_r").take_all() == [{"k": 1, "x": 2, "x_r": 3}]
    with pytest.raises(PenstockError, match="both sides have 'x'; pass suffix="):
        left.join(right, "k").take_all()


def test_groups_are_a_dataset() -> None:
    ds = numbers((5, 7)).map(lambda s: {**s, "odd": s["x"] % 2}).groupby("odd").count()
    assert len(ds) == 2
    assert ds.map(lambda row: row["count"]).take_all() == [6, 6]
    assert [row["odd"] for row in ds.shard(1, 2)] == [1]
    assert pickle.loads(pickle.dumps(ds)).take_all() == ds.take_all()
    assert "groupby('odd').count()" in repr(ds)


def test_nothing_runs_before_it_is_read() -> None:
    calls: list[int] = []

    def recorded(x: int) -> dict[str, int]:
        calls.append(x)
        return {"k": x}

    ds = ps.from_items([1, 2]).map(recorded).groupby("k").count().sort("count")
    assert not calls
    ds.take_all()
    assert sorted(calls) == [1, 2]


def test_only_the_grouped_fields_are_read(tmp_path: Any) -> None:
    ps.from_items([{"__key__": str(i), "txt": "x" * 99, "cls": i % 3} for i in range(9)]).write_tar(str(tmp_path))
    ds = ps.read_tar(str(tmp_path)).decode(txt=lambda data: 1 // 0).groupby("cls").count()
    assert [row["count"] for row in ds.take_all()] == [3, 3, 3]


def test_a_materialized_dataset_is_run_once() -> None:
    calls: list[int] = []

    def recorded(x: int) -> int:
        calls.append(x)
        return x + 1

    ds = ps.from_items([1, 2, 3]).map(recorded).materialize()
    assert [ds.take_all(), list(ds), len(ds)] == [[2, 3, 4], [2, 3, 4], 3]
    assert sorted(calls) == [1, 2, 3]


def test_a_materialized_table_keeps_its_types(tmp_path: Any) -> None:
    ds = ps.from_arrow(pa.table({"a": pa.array([1, 2, 3], pa.int8()), "b": ["x", None, "z"]})).filter(ps.col("a") > 1)
    for copy in (ds.materialize(), ds.materialize(tmp_path / "table")):
        assert copy.to_arrow().schema.field("a").type == pa.int8()
        assert copy.take_all() == [{"a": 2, "b": None}, {"a": 3, "b": "z"}]
        assert len(copy) == 2
    with pytest.raises(PlanError, match="holds 1 Parquet files"):
        ds.materialize(tmp_path / "table")


def test_data_frames_hold_the_same_rows() -> None:
    ds = ps.from_items(ROWS)
    assert ds.to_polars().rows(named=True) == ROWS
    assert ds.to_pandas().to_dict("records") == ROWS


@pytest.mark.parametrize(
    "make",
    [
        lambda: ps.from_items(ROWS),
        lambda: ps.from_items(ROWS).shuffle(),
        lambda: ps.from_items(ROWS[:90]).union(ps.from_items(ROWS[90:])).map(dict),
        lambda: ps.from_arrow(pa.Table.from_pylist(ROWS)).repeat(2),
    ],
)
def test_a_stratified_split_takes_the_same_share_of_every_value(make: Any) -> None:
    train, test = make().train_test_split(0.25, stratify="k", seed=3)
    found: list[dict[str, list[float]]] = [defaultdict(list), defaultdict(list)]
    for side, ds in zip(found, (train, pickle.loads(pickle.dumps(test))), strict=True):
        for row in {row["y"]: row for row in ds}.values():
            side[row["k"]].append(row["y"])
    for k, rows in groups().items():
        assert len(found[1][k]) == int(len(rows) * 0.25 + 0.5)
        assert sorted(found[0][k] + found[1][k]) == sorted(row["y"] for row in rows)
    assert len(test) == len(test.take_all())
    assert {row["y"] for row in test.epoch(3)} == {row["y"] for row in test.epoch(1)}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ds: ds.shard(0, 2).groupby("k"),
        lambda ds: ds.shard(0, 2).sort("k"),
        lambda ds: ds.groupby("k").sum(),
        lambda ds: ds.join(ds.shard(0, 2), "k"),
        lambda ds: ds.join(ROWS, "k"),
        lambda ds: ds.train_test_split(stratify="k", by="x"),
        lambda ds: ds.join(ds, "k", how="outer"),
    ],
    ids=[
        "groupby of a rank",
        "sort of a rank",
        "sum of nothing",
        "join a rank",
        "join a list",
        "stratify and by",
        "outer join",
    ],
)
def test_wrong_arguments_are_refused_where_they_are_written(wrong: Any) -> None:
    with pytest.raises(PlanError):
        wrong(ps.from_items(ROWS))


@pytest.mark.parametrize(
    "run", [lambda ds: ds.groupby("z").count().take_all(), lambda ds: ds.sort("z").take(1), lambda ds: ds.unique("z")]
)
def test_a_missing_field_is_named(run: Any) -> None:
    with pytest.raises(PenstockError, match="'z'"):
        run(ps.from_items(ROWS))


def test_items_without_fields_are_refused() -> None:
    with pytest.raises(DataError, match="needs samples with fields"):
        ps.from_items([1, 2]).sort("k").take_all()


@pytest.mark.parametrize(
    "use",
    [
        lambda ds: ds.groupby("count").count(),
        lambda ds: ds.value_counts("count"),
        lambda ds: ds.groupby("n_sum").sum("n"),
    ],
    ids=["count", "value_counts", "sum"],
)
def test_a_result_does_not_overwrite_the_field_it_groups_by(use: Any) -> None:
    ds = ps.from_items([{"count": 1, "n": 2, "n_sum": 3}])
    with pytest.raises(PlanError, match="rename"):
        use(ds)
    assert ds.groupby("count").sum("n").take_all() == [{"count": 1, "n_sum": 2}]


def test_rows_that_are_samples_keep_their_features(tmp_path: Path) -> None:
    features = {"label": ClassLabel(("cat", "dog")), "x": Value("int64")}
    schema = pa.schema([("label", pa.int64()), ("x", pa.int64())], metadata=metadata_of(features))
    pq.write_table(pa.table({"label": [1, 0, 1], "x": [3, 2, 1]}, schema=schema), tmp_path / "a.parquet")
    ds = ps.read_parquet(str(tmp_path / "a.parquet"))
    for number, rows in enumerate((ds.sort("x"), ds.distinct("label"), ds.value_counts("label"))):
        rows.write_parquet(tmp_path / str(number))
        found = features_of(pq.read_schema(tmp_path / str(number) / "00000-of-00001.parquet").metadata)
        assert found is not None
        assert found["label"] == features["label"]
