"""Distinct values and samples are those of first occurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings

import penstock as ps
from penstock.errors import DataError
from tests.relations.conftest import EXAMPLES, ROWS, datasets, key_of, same, tables


def test_unique_keeps_the_order_of_first_occurrence() -> None:
    assert ps.from_items(ROWS).unique("k") == list(dict.fromkeys(row["k"] for row in ROWS))


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


def test_distinct_without_names_needs_samples_with_the_same_fields() -> None:
    with pytest.raises(DataError, match="samples differ in their fields"):
        ps.from_items([{"a": 1}, {"b": 1}]).distinct().take_all()
    assert ps.from_items([{"a": 1, "__key__": "x"}, {"a": 1, "__key__": "y"}]).distinct().count() == 1
