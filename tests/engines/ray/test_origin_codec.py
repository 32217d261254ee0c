"""What a worker is told of a block's samples is what it would have asked for."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.engines import Program
from penstock.engines.ray.origin_codec import EncodedOrigin, Later, decode_origin, encode_origin
from penstock.engines.read_stage import Span
from penstock.order import Refs
from penstock.testing import BASE, numbers


def zipped() -> Dataset:
    return numbers(BASE).zip(numbers((67,), name="b"), suffix="_b").shuffle()


def span(program: Program) -> Span:
    order = program.order(0)
    positions, refs, after = max(order.walk([0, order.size, 1, 0]), key=lambda chunk: len(chunk[0]))
    return Span(0, 0, positions, after, refs, program.readers, program.locate(refs))


@pytest.mark.parametrize("far", [True, False], ids=["by number", "by name"])
def test_places_and_operands_are_the_same_at_the_other_end(far: bool) -> None:
    program = Program(zipped().plan)
    origin = span(program)
    finder = program.finder if far else None
    many = len(origin.positions)
    assert many > 12
    words = pickle.loads(pickle.dumps(encode_origin(origin, many, finder, program.arrangement.slots)))
    there = decode_origin(words, pickle.loads(pickle.dumps(finder)), unread=False)
    assert isinstance(there, EncodedOrigin) is not far
    for number in range(many):
        assert there.place(number) == origin.place(number)
        for slot in (0, 1):
            assert there.slot(slot).place(number) == origin.slot(slot).place(number)
            assert there.slot(slot).keys.tolist() == origin.slot(slot).keys.tolist()
    assert there.place(many) == origin.place(many), "nowhere, in both"


def test_samples_that_are_found_later_are_the_ones_that_would_have_been_found() -> None:
    program = Program(zipped().plan)
    origin = span(program)
    later = Later(origin.refs, program.finder, np.zeros(len(origin.refs), np.int64)).take(slice(5, 12))
    assert repr(later.read()) == repr(program.locate(origin.refs.take(slice(5, 12))).read())


def test_a_sample_without_a_partner_has_no_place() -> None:
    program = Program(numbers(BASE).plan)
    origin = span(program)
    many = len(origin.positions)
    nobody = np.full(many, -1, np.int64)
    origin.refs = origin.refs.paired(Refs(nobody, nobody, nobody, np.zeros(many, np.uint64)))
    words = encode_origin(origin, many, None, 2)
    assert isinstance(words, EncodedOrigin)
    assert words.slots[1].places[3].key is None
