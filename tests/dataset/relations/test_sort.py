"""Sorting is stable, on rows, on columns and spilled."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import DataError
from tests.dataset.relations.conftest import EXAMPLES, ROWS, datasets, sort_key, tables


@pytest.mark.parametrize("descending", [False, True])
def test_sort_is_stable(descending: bool) -> None:
    got = ps.from_items(ROWS).sort("k", descending=descending).take_all()
    assert got == sorted(ROWS, key=lambda row: row["k"], reverse=descending)


@settings(max_examples=EXAMPLES, deadline=None)
@given(tables(), st.lists(st.booleans(), min_size=2, max_size=2))
def test_sorting_is_stable_by_every_field(rows: list[dict[str, Any]], downs: list[bool]) -> None:
    want = [{**row, "n": n} for n, row in enumerate(rows)]
    for field, down in (("j", downs[1]), ("k", downs[0])):
        want.sort(key=lambda row: sort_key(row[field]), reverse=down)
    for ds in datasets(rows):
        assert [row["n"] for row in ds.sort("k", "j", descending=downs)] == [row["n"] for row in want]


def test_items_without_fields_are_refused() -> None:
    with pytest.raises(DataError, match="needs samples with fields"):
        ps.from_items([1, 2]).sort("k").take_all()
