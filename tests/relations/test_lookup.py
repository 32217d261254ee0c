"""Rows are found by their hashes, and compared where hashes can collide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.relations import lookup
from penstock.relations.lookup import HashedRows, comparable
from tests.relations.conftest import EXAMPLES

NUMBERS = st.integers(-3, 3) | st.sampled_from([-(2**63), 2**63 - 1, 2**62])
KEYS = st.tuples(NUMBERS, st.sampled_from(["", "a", "\0", "\0\0", "aa", "ä"]))


def found(left: list[tuple[Any, ...]], right: list[tuple[Any, ...]], columns: list[int]) -> list[tuple[int, int]]:
    def arrays(rows: list[tuple[Any, ...]]) -> list[Any]:
        types = [pa.int64(), pa.string()]
        return [comparable(pa.array([row[column] for row in rows], types[column])) for column in columns]

    pairs = HashedRows(arrays(right)).pairs(arrays(left))
    return list(zip(*(side.tolist() for side in pairs), strict=True))


def wanted(left: list[tuple[Any, ...]], right: list[tuple[Any, ...]], columns: list[int]) -> list[tuple[int, int]]:
    def equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
        return all(one[column] == other[column] for column in columns)

    return [(i, j) for i, one in enumerate(left) for j, other in enumerate(right) if equal(one, other)]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(KEYS), st.lists(KEYS), st.sampled_from([[0], [1], [0, 1]]), st.booleans())
def test_pairs_are_those_of_two_loops(left: list[Any], right: list[Any], columns: list[int], coded: bool) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lookup, "DENSE", 1000 if coded else 0)
        assert found(left, right, columns) == wanted(left, right, columns)


@pytest.mark.parametrize("columns", [[1], [0, 1]])
def test_rows_with_one_hash_are_told_apart(columns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "DENSE", 0)
    monkeypatch.setattr(lookup, "_hashes", lambda arrays: np.full(len(arrays[0]), 7, np.uint64))
    left, right = [(1, "a"), (2, "b"), (3, "c")], [(2, "b"), (1, "a"), (2, "b"), (1, "c")]
    assert found(left, right, columns) == wanted(left, right, columns)


def test_a_text_is_found_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "DENSE", 0)
    monkeypatch.setattr(lookup, "_SLICE", 16)
    texts = ["x" * 40, "", "ab", "x" * 15, "yz" * 9, "ab"]
    left = comparable(pa.array(["front", *texts]).slice(1))
    right = comparable(pa.array(texts[::-1]))
    pairs = HashedRows([right]).pairs([left])
    want = [(i, j) for i, one in enumerate(texts) for j, other in enumerate(texts[::-1]) if one == other]
    assert list(zip(*(side.tolist() for side in pairs), strict=True)) == want


def test_only_integers_and_text_without_missing_values_are_comparable() -> None:
    assert comparable(pa.array([1, 2], pa.int8())).type == pa.int64()
    assert comparable(pa.array(["a"])).type == pa.large_string()
    for array in (pa.array([1.0]), pa.array([True]), pa.array([1, None]), pa.array([2**63], pa.uint64())):
        assert comparable(array) is None
