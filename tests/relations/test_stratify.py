"""A stratified split takes the same share of every value."""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import DataError
from tests.relations.conftest import ROWS, groups


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


def test_values_that_cannot_be_compared_are_not_stratified() -> None:
    train, _ = ps.from_items([{"k": {1}}]).train_test_split(0.25, stratify="k")
    with pytest.raises(DataError, match="values of type set cannot be compared"):
        train.take_all()
