from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.formats.tables.columns import ArrowColumns
from penstock.plan import Columns, join_columns, pick_rows


def _columns(**fields: list[Any]) -> Columns:
    batch = pa.RecordBatch.from_pydict(fields)
    return ArrowColumns([batch], np.arange(batch.num_rows))


def test_columns_are_joined_as_columns() -> None:
    joined = join_columns([_columns(x=[1, 2]), _columns(x=[3])])
    assert isinstance(joined, Columns)
    assert list(joined) == [{"x": 1}, {"x": 2}, {"x": 3}]


def test_columns_that_do_not_fit_together_are_joined_as_a_list() -> None:
    joined = join_columns([_columns(x=[1]), _columns(y=["a"])])
    assert joined == [{"x": 1}, {"y": "a"}]
    assert isinstance(joined, list)


def test_columns_and_a_list_are_joined_as_a_list() -> None:
    assert join_columns([_columns(x=[1]), [{"x": 2}]]) == [{"x": 1}, {"x": 2}]


def test_a_single_part_is_returned_unchanged() -> None:
    part = _columns(x=[1])
    assert join_columns([part]) is part
    assert join_columns([]) == []


@pytest.mark.parametrize("indices", [[2, 0], np.array([2, 0])], ids=["list", "array"])
def test_rows_are_picked_in_the_given_order(indices: Any) -> None:
    picked = pick_rows(_columns(x=[1, 2, 3]), indices)
    assert isinstance(picked, Columns)
    assert list(picked) == [{"x": 3}, {"x": 1}]
    assert pick_rows(["a", "b", "c"], indices) == ["c", "a"]
