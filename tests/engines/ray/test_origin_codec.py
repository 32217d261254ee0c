"""A decoded origin answers as the origin itself."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.engines import Program
from penstock.engines.ray.origin_codec import DeferredSamples, EncodedOrigin, decode_origin, encode_origin
from penstock.engines.read_stage import PieceRows, Span
from penstock.order import Refs
from penstock.testing import BASE, numbers


def zipped() -> Dataset:
    return numbers(BASE).zip(numbers((67,), name="b"), suffix="_b").shuffle()


def span(program: Program) -> Span:
    order = program.order(0)
    positions, refs, after = max(order.walk([0, order.size, 1, 0]), key=lambda chunk: len(chunk[0]))
    return Span(positions, (PieceRows(0, 0, 0, after),), refs, program.readers, program.finder.locate(refs))


@pytest.mark.parametrize("has_sources", [True, False], ids=["by number", "by name"])
def test_places_and_operands_survive_encoding(has_sources: bool) -> None:
    program = Program(zipped().plan)
    origin = span(program)
    finder = program.finder if has_sources else None
    count = len(origin.positions)
    assert count > 12
    encoded = pickle.loads(pickle.dumps(encode_origin(origin, count, finder, program.arrangement.slots)))
    decoded = decode_origin(encoded, pickle.loads(pickle.dumps(finder)), unread=False)
    assert isinstance(decoded, EncodedOrigin) is not has_sources
    for number in range(count):
        assert decoded.place(number) == origin.place(number)
        for slot in (0, 1):
            assert decoded.slot(slot).place(number) == origin.slot(slot).place(number)
            assert decoded.slot(slot).keys.tolist() == origin.slot(slot).keys.tolist()
    assert decoded.place(count) == origin.place(count), "an unknown place, in both"


def test_deferred_samples_are_read_as_located_ones_are() -> None:
    program = Program(zipped().plan)
    origin = span(program)
    deferred = DeferredSamples(origin.refs, program.finder, np.zeros(len(origin.refs), np.int64)).take(slice(5, 12))
    assert repr(deferred.read()) == repr(program.finder.locate(origin.refs.take(slice(5, 12))).read())


def test_a_sample_without_a_partner_has_no_place() -> None:
    program = Program(numbers(BASE).plan)
    origin = span(program)
    count = len(origin.positions)
    missing = np.full(count, -1, np.int64)
    origin.refs = origin.refs.paired(Refs(missing, missing, missing, np.zeros(count, np.uint64)))
    encoded = encode_origin(origin, count, None, 2)
    assert isinstance(encoded, EncodedOrigin)
    assert encoded.slots[1].places[3].key is None
