"""Keys become numbers that sort as the keys do."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.relations.database import StagedTable, database
from penstock.relations.key_codes import KeyCoder, KeyCodes, key_codes, sorted_rows
from tests.relations.conftest import EXAMPLES

PLAN = ps.from_items([{"k": 1}]).plan
INTEGERS = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)
TEXTS = st.text("ab\0\N{LATIN SMALL LETTER E WITH ACUTE}", max_size=3)  # of at most 6 bytes


def _codes(*columns: Any, descending: tuple[bool, ...] = ()) -> KeyCodes | None:
    rows = pa.table({f"c{number}": column for number, column in enumerate(columns)})
    with database(PLAN, "sort") as con:
        table = StagedTable(con, "samples", "sort", rows.schema.names, 1 << 30)
        table.add(rows)
        table.finish()
        return key_codes(table, rows.schema.names, descending)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(INTEGERS, min_size=1, max_size=40))
def test_codes_of_integers_sort_as_they_do(keys: list[int]) -> None:
    codes = _codes(pa.array(keys, pa.int64()))
    if codes is None:
        assert max(keys) - min(keys) == 2**64 - 1
        return
    assert sorted_rows(codes).tolist() == sorted(range(len(keys)), key=keys.__getitem__)
    assert int(codes.values.max()) == codes.span - 1


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.integers(-9, 9)), min_size=1, max_size=40), st.tuples(st.booleans(), st.booleans()))
def test_codes_of_several_columns_sort_as_tuples(keys: list[tuple[str, int]], descending: tuple[bool, ...]) -> None:
    texts, numbers = zip(*keys, strict=True)
    codes = _codes(pa.array(texts, pa.string()), pa.array(numbers), descending=descending)
    assert codes is not None
    rows = sorted(range(len(keys)), key=numbers.__getitem__, reverse=descending[1])
    rows.sort(key=lambda row: texts[row].encode(), reverse=descending[0])
    assert sorted_rows(codes).tolist() == rows


@pytest.mark.parametrize(
    "columns",
    [
        [[-(2**63), 2**63 - 1]],
        [[0, 2**40], [0, 2**40]],
        [[1, None]],
        [["a", None]],
        [[0.5, 1.5]],
        [["\0" * 16, "z" * 16]],
        [["a" * 65, "b"]],
        [[]],
    ],
    ids=[
        "all of 64 bits",
        "more than 64 bits",
        "missing number",
        "missing text",
        "floats",
        "too different",
        "long",
        "none",
    ],
)
def test_other_keys_are_left_to_duckdb(columns: list[list[Any]]) -> None:
    assert _codes(*map(pa.array, columns)) is None


def test_the_whole_range_beside_a_constant_is_left_to_duckdb() -> None:
    constant, ends = pa.array([7, 7]), pa.array([-(2**63), 2**63 - 1])
    assert _codes(constant, ends) is None
    assert _codes(constant, ends.slice(0, 1).take([0, 0])) is not None


def test_slices_and_several_chunks_of_texts_have_codes() -> None:
    texts = pa.chunked_array([pa.array(["x", "b", "a"]).slice(1), pa.array([], pa.string()), pa.array(["c", ""])])
    codes = _codes(texts)
    assert codes is not None
    assert sorted_rows(codes).tolist() == [3, 1, 0, 2]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=9), st.lists(TEXTS | st.text(max_size=9), max_size=9))
def test_other_texts_have_the_code_of_an_equal_one_or_a_code_of_no_text(known: list[str], others: list[str]) -> None:
    coder = KeyCoder.of([pa.array(known)])
    assert coder is not None
    codes = dict(zip(known, coder.codes([pa.array(known)]).tolist(), strict=True))
    assert len({*codes.values()}) == len(codes)
    assert max(codes.values()) < coder.span
    for text, code in zip(others, coder.codes([pa.array(others, pa.string())]).tolist(), strict=True):
        assert code == codes.get(text, code)
        assert text in codes or code not in codes.values()


def test_a_key_with_one_value_outside_the_range_has_the_code_of_no_key() -> None:
    coder = KeyCoder.of([pa.array([3, 5]), pa.array(["a", "c"])])
    assert coder is not None
    assert coder.codes([pa.array([3, 4, 2, 5, 3]), pa.array(["a", "b", "a", "d", "aa"])]).tolist() == [0, 4, 9, 9, 9]
