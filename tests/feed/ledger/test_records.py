from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines import COLUMNS, ITEM
from penstock.feed.ledger.records import BEGIN, MAGIC, contents, frame_record, read_steps, read_words, steps, words
from penstock.order import I64

_NUMBERS = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 1 << 62))


@st.composite
def _tables(draw: st.DrawFn) -> tuple[int, I64]:
    many, samples = draw(st.integers(1, 5)), draw(st.integers(0, 12))
    rows = np.zeros((COLUMNS, samples), np.int64)
    for column in range(1, COLUMNS):
        even = draw(st.booleans())
        low = draw(_NUMBERS)
        made = (
            range(low, low + 3 * samples, 3) if even else draw(st.lists(_NUMBERS, min_size=samples, max_size=samples))
        )
        rows[column] = list(made)[:samples]
    rows[ITEM] = np.sort(draw(st.lists(st.integers(0, many - 1), min_size=samples, max_size=samples)))
    return many, rows


@given(_tables(), st.integers(0, 1 << 40))
def test_a_table_comes_back_as_it_was(table: tuple[int, I64], first: int) -> None:
    many, rows = table
    back = read_steps(memoryview(steps(first, many, rows)))
    assert (back.first, back.many) == (first, many)
    assert np.array_equal(back.table(), rows)


def test_samples_of_no_step_can_be_noted() -> None:
    rows = np.ones((COLUMNS, 3), np.int64)
    rows[ITEM] = 0
    back = read_steps(memoryview(steps(7, 0, rows)))
    assert (back.first, back.many) == (7, 0)
    assert np.array_equal(back.table(), rows)


def test_words_come_back_as_they_were() -> None:
    assert read_words(memoryview(words(BEGIN, {"rank": 3, "parents": [["a", 1], None]}))) == {
        "rank": 3,
        "parents": [["a", 1], None],
    }


def test_a_file_is_read_up_to_where_it_was_cut_off() -> None:
    whole = [words(BEGIN, {"n": 1}), steps(0, 1, np.ones((COLUMNS, 5), np.int64)), words(BEGIN, {"n": 2})]
    data = MAGIC + b"".join(map(frame_record, whole))
    ends = np.cumsum([len(MAGIC), *(len(frame_record(one)) for one in whole)]).tolist()
    for cut in range(len(data) + 1):
        found = list(contents(memoryview(data[:cut])))
        many = sum(end <= cut for end in ends[1:])
        assert [bytes(content) for _, content in found] == whole[:many]
        assert [end for end, _ in found] == ends[1 : many + 1]


@pytest.mark.parametrize("tail", [b"\0" * 64, b"\xff" * 64, b"\x04\0\0\0garbage"])
def test_what_is_not_a_record_ends_the_file(tail: bytes) -> None:
    data = MAGIC + frame_record(words(BEGIN, {"n": 1}))
    assert len(list(contents(memoryview(data + tail)))) == 1


def test_a_damaged_record_is_not_believed() -> None:
    good = MAGIC + frame_record(words(BEGIN, {"n": 1}))
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 4
        assert list(contents(memoryview(bytes(bad)))) == []
