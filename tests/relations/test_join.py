"""A join gives what two nested loops give, on rows, on columns and spilled."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PenstockError, PlanError
from tests.relations.conftest import EXAMPLES, ROWS, datasets, key_of, tables

LABELS = [{"k": "a", "label": 1}, {"k": "b", "label": 2}, {"k": "b", "label": 3}, {"k": "z", "label": 4}]


@pytest.mark.parametrize("how", ["inner", "left"])
def test_a_join_of_rows_gives_what_two_loops_give(how: Any) -> None:
    want = []
    for row in ROWS:
        partners = [label for label in LABELS if label["k"] == row["k"]]
        want += [{**row, "label": partner["label"]} for partner in partners]
        want += [{**row, "label": None}] if how == "left" and not partners else []
    joined = ps.from_items(ROWS).join(ps.from_items(LABELS), on="k", how=how)
    assert list(joined) == want
    assert list(pickle.loads(pickle.dumps(joined))) == want
    assert list(joined.on("serial")) == want


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


@pytest.mark.parametrize("how", ["semi", "anti", "right", "full"])
@pytest.mark.parametrize("columns", [False, True])
def test_every_kind_of_join_gives_what_two_loops_give(how: Any, columns: bool) -> None:
    left = [{"k": k, "x": n} for n, k in enumerate(["a", "b", None, "c", "b"])]
    right = [{"k": k, "y": n} for n, k in enumerate(["b", "z", None, "b"])]
    pairs = [{**one, "y": other["y"]} for one in left for other in right if one["k"] == other["k"]]
    alone = [one for one in left if not any(one["k"] == other["k"] for other in right)]
    rest = [{"k": other["k"], "x": None, "y": other["y"]} for other in right if other["k"] == "z"]
    whole = [
        row
        for one in left
        for row in [{**one, "y": other["y"]} for other in right if other["k"] == one["k"]] or [{**one, "y": None}]
    ]
    want = {
        "semi": [one for one in left if one not in alone],
        "anti": alone,
        "right": pairs + rest,
        "full": whole + rest,
    }
    one, other = (
        ps.from_arrow(pa.Table.from_pylist(rows)) if columns else ps.from_items(rows) for rows in (left, right)
    )
    joined = one.join(other, "k", how)
    assert joined.take_all() == want[how]
    assert [row for rank in range(2) for row in joined.shard(rank, 2)] == want[how]


@pytest.mark.parametrize("how", ["left", "full"])
def test_an_empty_right_side_has_its_fields(how: Any) -> None:
    empty = pa.table({"k": pa.array([], pa.int64()), "y": pa.array([], pa.int64())})
    rows = ps.from_arrow(pa.table({"k": [1, 2]}))
    some = ps.from_arrow(pa.table({"k": [1], "y": [3]}))
    for other in (ps.from_arrow(empty), ps.from_arrow(empty).rename(z="y"), some.filter(ps.col("k") > 5)):
        name = "z" if "rename" in repr(other) else "y"
        assert rows.join(other, "k", how).take_all() == [{"k": 1, name: None}, {"k": 2, name: None}]


@pytest.mark.parametrize("how", ["inner", "left", "right", "anti"])
@pytest.mark.parametrize("make", [ps.from_items, lambda rows: ps.from_arrow(pa.Table.from_pylist(rows))])
def test_keys_that_can_never_be_equal_are_refused(how: Any, make: Any) -> None:
    numbers, texts = make([{"k": 1}, {"k": None}]), make([{"k": "1", "y": 2}])
    with pytest.raises(PlanError, match=r"field 'k' has (int64|string) here and (int64|string) in the other dataset"):
        numbers.join(texts, on="k", how=how).take_all()
    assert numbers.join(make([{"k": 1.0, "y": 2}, {"k": None, "y": 3}]), on="k").select("y").take_all() == [
        {"y": 2},
        {"y": 3},
    ]
