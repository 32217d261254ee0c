"""Consumers of a dataset: take, first, len, count, show, [i], iter_batches, materialize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import DataError, PlanError
from penstock.testing import numbers


def _xs(ds: Any) -> list[int]:
    return [int(sample["x"]) for sample in ds]


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def test_take_returns_the_first_samples() -> None:
    ds = numbers((30,))
    assert _xs(ds.take(3)) == [0, 1, 2]
    assert len(ds.take()) == 20
    assert (ds.take(0), len(ds.take(99)), len(ds.take_all())) == ([], 30, 30)
    assert ds.take_batch(3)["x"].tolist() == [0, 1, 2]
    assert ds.first()["x"] == 0


def test_take_reads_no_more_than_it_needs() -> None:
    seen: list[int] = []
    numbers((100_000,)).filter(lambda s: seen.append(s["x"]) is None, workers=1).take(1)  # type: ignore[func-returns-value]
    assert len(seen) < 2_000


@pytest.mark.parametrize("method", ["first", "take_batch", "schema"])
def test_an_empty_dataset_has_no_first_sample(method: str) -> None:
    with pytest.raises(PlanError, match="empty"):
        getattr(ps.from_items([]), method)()


def test_len_is_known_while_stages_keep_the_count() -> None:
    ds = numbers((7, 5))
    assert len(ds.shuffle().map(dict).decode().select("x")) == 12
    assert len(ds.repeat(3)) == 36
    assert len(ds.union(numbers((3,), name="b"))) == 15
    assert len(ds.batched(5)) == 3
    assert len(ds.batched(5).shuffle(2)) == 3
    assert len(ds.shard(1, 5)) == 2
    assert len(ds.train_test_split(0.25)[0]) + len(ds.train_test_split(0.25)[1]) == 12


@pytest.mark.parametrize(
    "ds",
    [
        numbers((7,)).filter(_odd),
        numbers((7,)).flat_map(list),
        numbers((7,)).batched(2).unbatched(),
        numbers((7,)).filter(_odd).batched(2),
        numbers((7,)).filter(_odd).limit(2),
        numbers((7,), hidden=True),
        numbers((7,)).repeat(),
    ],
    ids=lambda ds: ds.plan.describe().replace("\n", ""),
)
def test_the_error_of_an_unknown_length_names_count(ds: ps.Dataset) -> None:
    with pytest.raises(TypeError, match=r"count\(\)"):
        len(ds)


def test_count_runs_the_dataset_if_necessary() -> None:
    assert numbers((7,)).filter(_odd).count() == 3
    assert numbers((7, 6), hidden=True).count() == 13
    assert numbers((7,)).filter(_odd).limit(2).count() == 2


def test_count_does_not_run_if_the_length_is_known() -> None:
    def never(sample: Any) -> Any:
        raise AssertionError("ran")

    assert numbers((7,)).map(never).count() == 7


def test_items_are_in_the_unshuffled_order() -> None:
    ds = numbers((7, 5)).shuffle().map(lambda s: {**s, "x": s["x"] * 10})
    assert [ds[i]["x"] for i in range(12)] == [10 * i for i in range(12)]
    assert (ds[-1]["x"], ds[-12]["x"], ds[np.int64(3)]["x"]) == (110, 0, 30)


def test_cut_and_combined_datasets_have_items() -> None:
    assert numbers((10,)).shard(1, 2)[0]["x"] == 5
    assert numbers((10,)).skip(3).limit(2)[1]["x"] == 4
    assert numbers((3,)).union(numbers((3,), name="b"))[4]["x"] == 1
    assert numbers((3,)).shuffle().zip(numbers((3,), name="b"), suffix="_b")[2]["x_b"] == 2


def test_a_position_out_of_range_is_an_index_error() -> None:
    for i in (12, -13):
        with pytest.raises(IndexError, match="dataset of 12"):
            numbers((7, 5))[i]


def test_the_name_of_a_field_selects_its_values() -> None:
    ds = ps.from_items([{"a": n, "b": -n} for n in range(3)])
    assert ds["b"].take_all() == [0, -1, -2]
    assert ds["a"].map(str).take(2) == ["0", "1"]
    with pytest.raises(DataError, match=r"no field 'c'|no such field"):
        ds["c"].first()


@pytest.mark.parametrize("i", [1.5, None, slice(2)])
def test_a_position_is_an_integer(i: Any) -> None:
    with pytest.raises(TypeError, match="needs an integer"):
        numbers((7,))[i]


@pytest.mark.parametrize("ds", [numbers((7,)).filter(_odd), numbers((7,)).batched(2), numbers((7,)).flat_map(list)])
def test_an_item_needs_stages_that_keep_the_count(ds: ps.Dataset) -> None:
    with pytest.raises(TypeError, match="keep the count"):
        ds[0]


def test_an_item_needs_counts() -> None:
    with pytest.raises(TypeError, match="penstock index"):
        numbers((7,), hidden=True)[0]


def test_show_prints_no_more_than_asked(capsys: pytest.CaptureFixture[str]) -> None:
    numbers((30,)).show(2)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_iter_batches_yields_columns() -> None:
    batches = list(numbers((10,)).iter_batches(4))
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(list(numbers((10,)).iter_batches(4, drop_last=True))) == 2


def test_an_abandoned_iteration_ends_its_threads() -> None:
    # A fixture fails the test if a thread is left.
    for _ in numbers((1000,)).map(dict, workers=3):
        break


def test_two_iterations_at_once_are_independent(tiny_shards: list[Path]) -> None:
    ds = ps.read_tar(list(map(str, tiny_shards))).to_tuple("__key__").map(str)
    assert [a == b for a, b in zip(ds, ds, strict=True)] == [True] * 100


@pytest.mark.parametrize(
    "use",
    [
        ps.Dataset.take_all,
        ps.Dataset.to_arrow,
        ps.Dataset.materialize,
        ps.Dataset.count,
        lambda ds: ds[-1],
        lambda ds: ds.unique("x"),
        lambda ds: ds.sort("x").take(1),
        lambda ds: ds.groupby("x").count().take_all(),
    ],
    ids=["take_all", "to_arrow", "materialize", "count", "last", "unique", "sort", "groupby"],
)
def test_consuming_all_of_an_endless_dataset_is_refused(use: Any) -> None:
    ds = ps.from_items([{"x": 1}, {"x": 2}])
    with pytest.raises(PlanError, match=r"no end|endless"):
        use(ds.repeat())
    use(ds.repeat().limit(5) if use is not ps.Dataset.count else ds.repeat(2))


def test_an_empty_result_keeps_the_columns_of_the_table(tmp_path: Path) -> None:
    ps.from_items([{"id": number, "text": "x"} for number in range(10)]).write_parquet(tmp_path / "table")
    none = ps.read_parquet(tmp_path / "table").filter(ps.col("id") > 1000)
    assert none.to_arrow().schema.names == ["id", "text"]
    assert none.materialize(tmp_path / "none").take_all() == []


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
    assert ds.materialize(tmp_path / "table").count() == 2  # complete: read again as it is
    with pytest.raises(PlanError, match=r"holds 00000-of-00001\.parquet"):
        ds.limit(1).materialize(tmp_path / "table")


def test_data_frames_hold_the_same_rows() -> None:
    rows = [{"k": "abc"[i % 3], "x": i, "y": i / 7} for i in range(20)]
    ds = ps.from_items(rows)
    assert ds.to_polars().rows(named=True) == rows
    assert ds.to_pandas().to_dict("records") == rows


def write_rows(path: Path, rows: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("x\n" + "".join(f"{row}\n" for row in range(rows)))


def test_the_length_counts_what_an_iteration_yields_after_shards_were_added_or_rewritten(tmp_path: Path) -> None:
    write_rows(tmp_path / "a/a.csv", 3)
    nested, folder = ps.read_csv(str(tmp_path / "*/*.csv")), ps.read_csv(tmp_path / "a")
    assert (len(nested), len(folder), nested[0]) == (3, 3, {"x": 0})
    write_rows(tmp_path / "b/b.csv", 4)  # in a folder that did not exist
    assert len(nested) == len(list(nested)) == 7
    write_rows(tmp_path / "a/a.csv", 5)  # in place: the folder does not change
    assert len(nested) == len(list(nested)) == 9
    assert len(folder) == len(list(folder)) == folder.count() == 5
    assert folder[4] == {"x": 4}


def test_what_ray_train_looks_up_is_answered_with_what_to_pass() -> None:
    ds = numbers((3,))
    with pytest.raises(AttributeError, match=r"write ds.to_ray\(\) for the datasets= of Ray Train"):
        _ = ds.name  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no 'nothing'$"):
        _ = ds.nothing  # type: ignore[attr-defined]
    assert not hasattr(ds, "set_name")


def test_stats_before_the_first_run_say_that_nothing_has_run() -> None:
    ds = numbers((3,))
    for stats in (ds.stats(), ds.loader().stats()):
        assert (stats.running, stats.seconds, stats.bottleneck) == (False, 0.0, "nothing has run yet")
