"""Sorting is stable, on rows, on columns and spilled."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import DataError, PlanError
from tests.relations.conftest import EXAMPLES, ROWS, datasets, sort_key, tables


@pytest.mark.parametrize("descending", [False, True])
def test_sort_is_stable(descending: bool) -> None:
    got = ps.from_items(ROWS).sort("k", descending=descending).take_all()
    assert got == sorted(ROWS, key=lambda row: row["k"], reverse=descending)


@settings(max_examples=EXAMPLES, deadline=None)
@given(tables(), st.lists(st.booleans(), min_size=2, max_size=2))
def test_sorting_is_stable_by_every_field(rows: list[dict[str, Any]], downs: list[bool]) -> None:
    want = [{**row, "n": n} for n, row in enumerate(rows)]
    for field, down in (("j", downs[1]), ("k", downs[0])):
        present = [row for row in want if sort_key(row[field])[0] == 0]
        missing = [row for row in want if sort_key(row[field])[0] > 0]
        present.sort(key=lambda row: sort_key(row[field]), reverse=down)
        want = present + sorted(missing, key=lambda row: sort_key(row[field]))  # last, in both directions
    for ds in datasets(rows):
        assert [row["n"] for row in ds.sort("k", "j", descending=downs)] == [row["n"] for row in want]


def test_items_without_fields_are_refused() -> None:
    with pytest.raises(DataError, match="needs a sample with fields"):
        ps.from_items([1, 2]).sort("k").take_all()


def test_a_sort_is_an_order(tmp_path: Path) -> None:
    rows = [{"k": (i * 37) % 100, "n": i} for i in range(100)]
    ps.from_items(rows).write_parquet(tmp_path / "t", max_samples=30)
    ds = ps.read_parquet(str(tmp_path / "t")).map(dict).sort("k")
    want = sorted(rows, key=lambda row: row["k"])
    assert len(ds) == 100
    assert list(ds) == list(ds) == want
    assert ds[7] == want[7]
    assert [row for rank in range(4) for row in ds.shard(rank, 4)] == want
    before = ps.read_parquet(str(tmp_path / "t"))
    assert [row for rank in range(4) for row in before.shard(rank, 4).sort("k")] == want
    assert list(ds.shuffle()) != want
    assert sorted(row["k"] for row in ds.shuffle()) == list(range(100))
    assert pickle.loads(pickle.dumps(ds)).take_all() == want
    assert ds.train_test_split(0.1, shuffle=False)[1].take_all() == want[90:]


def test_a_sort_keeps_states_and_can_be_cut_again() -> None:
    rows = [{"k": (i * 37) % 60} for i in range(60)]
    ds = ps.from_items(rows).sort("k").batched(5)
    loader = ds.loader(0, 1)
    seen = [batch["k"].tolist() for batch in itertools.islice(loader, 4)]
    state = loader.state_dict()
    rest = ds.loader(0, 1)
    rest.load_state_dict(state)
    assert [k for batch in seen + [b["k"].tolist() for b in rest] for k in batch] == list(range(60))
    ranks = [ds.loader(rank, 2, uneven="keep") for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(states=[state])
    assert sorted(k for rank in ranks for batch in rank for k in batch["k"].tolist()) == list(range(20, 60))


def test_samples_that_fail_keep_their_place() -> None:
    ds = ps.from_items([{"k": k} for k in (3, 0, 2, 1)]).map(lambda s: {"k": s["k"], "inverse": 6 // s["k"]})
    assert [row["k"] for row in ds.on_error("skip").sort("inverse")] == [3, 2, 1]


def test_a_sort_by_a_random_value_is_sorted_in_every_epoch() -> None:
    ds = ps.from_items([{"n": n} for n in range(50)]).map(lambda s, rng: {**s, "r": float(rng.random())}).sort("r")
    epochs = [[row["r"] for row in ds.epoch(epoch)] for epoch in range(2)]
    assert all(epoch == sorted(epoch) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_branch_may_be_sorted() -> None:
    one, two = (ps.from_items([{"k": k} for k in ks]) for ks in ([3, 1, 2], [9, 7, 8]))
    assert [row["k"] for row in one.union(two.map(dict).sort("k"))] == [3, 1, 2, 7, 8, 9]
    assert [row["k"] for row in one.union(two).sort("k", descending=True)] == [9, 8, 7, 3, 2, 1]


def test_behind_stages_that_change_the_count_the_whole_stream_is_sorted() -> None:
    ds = ps.from_items([{"k": k} for k in (3, 1, 2)]).flat_map(lambda s: [s, {"k": -s["k"]}])
    assert [row["k"] for row in ds.sort("k")] == [-3, -2, -1, 1, 2, 3]
    with pytest.raises(PlanError, match="needs the whole stream"):
        ds.shard(0, 2).sort("k")


@pytest.mark.parametrize("keys", [[1, "a"], [(1, 2)], [2**70], ["a", b"b"], [True, 2]], ids=str)
def test_keys_without_one_type_are_refused_by_name(keys: list[Any]) -> None:
    with pytest.raises(PlanError, match="sort: the values of field 'k' must have one type"):
        ps.from_items([{"k": key} for key in keys]).sort("k").take_all()
