from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines import COLUMNS, ITEM
from penstock.feed.ledger.records import (
    BEGIN,
    MAGIC,
    decode_fields,
    decode_steps,
    encode_fields,
    encode_steps,
    frame_record,
    iter_contents,
)
from penstock.order import I64

_NUMBERS = st.one_of(st.just(0), st.integers(0, 300), st.integers(0, 1 << 62))


@st.composite
def _tables(draw: st.DrawFn) -> tuple[int, I64]:
    steps, samples = draw(st.integers(1, 5)), draw(st.integers(0, 12))
    rows = np.zeros((COLUMNS, samples), np.int64)
    for column in range(1, COLUMNS):
        even = draw(st.booleans())
        low = draw(_NUMBERS)
        values = draw(st.lists(_NUMBERS, min_size=samples, max_size=samples))
        rows[column] = [low + 3 * number for number in range(samples)] if even else values
    rows[ITEM] = np.sort(draw(st.lists(st.integers(0, steps - 1), min_size=samples, max_size=samples)))
    return steps, rows


@given(_tables(), st.integers(0, 1 << 40))
def test_a_table_is_decoded_as_it_was_encoded(table: tuple[int, I64], first: int) -> None:
    steps, rows = table
    record = decode_steps(memoryview(encode_steps(first, steps, rows)))
    assert (record.first, record.count) == (first, steps)
    assert np.array_equal(record.table(), rows)


def test_samples_that_belong_to_no_step_can_be_encoded() -> None:
    rows = np.ones((COLUMNS, 3), np.int64)
    rows[ITEM] = 0
    record = decode_steps(memoryview(encode_steps(7, 0, rows)))
    assert (record.first, record.count) == (7, 0)
    assert np.array_equal(record.table(), rows)


def test_fields_are_decoded_as_they_were_encoded() -> None:
    fields = {"rank": 3, "parents": [["a", 1], None]}
    assert decode_fields(memoryview(encode_fields(BEGIN, fields)), {}) == fields


def test_a_file_is_read_up_to_the_cut() -> None:
    whole = [
        encode_fields(BEGIN, {"n": 1}),
        encode_steps(0, 1, np.ones((COLUMNS, 5), np.int64)),
        encode_fields(BEGIN, {"n": 2}),
    ]
    data = MAGIC + b"".join(map(frame_record, whole))
    ends = np.cumsum([len(MAGIC), *(len(frame_record(one)) for one in whole)]).tolist()
    for cut in range(len(data) + 1):
        found = list(iter_contents(memoryview(data[:cut])))
        count = sum(end <= cut for end in ends[1:])
        assert [bytes(content) for _, content in found] == whole[:count]
        assert [end for end, _ in found] == ends[1 : count + 1]


@pytest.mark.parametrize("tail", [b"\0" * 64, b"\xff" * 64, b"\x04\0\0\0garbage"])
def test_bytes_that_are_not_a_record_end_the_file(tail: bytes) -> None:
    data = MAGIC + frame_record(encode_fields(BEGIN, {"n": 1}))
    assert len(list(iter_contents(memoryview(data + tail)))) == 1


def test_a_damaged_record_is_ignored() -> None:
    good = MAGIC + frame_record(encode_fields(BEGIN, {"n": 1}))
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 4
        assert list(iter_contents(memoryview(bytes(bad)))) == []
