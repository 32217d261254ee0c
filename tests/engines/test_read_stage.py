"""Located samples of several sources keep their order, and those that cannot be read fail by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.engines import Program
from penstock.engines.cursor import Cursor
from penstock.engines.lineage import DELIVERED, INDEX, ITEM, KIND, LEAF, OUTPUT, PADDED, POSITION, SHARD
from penstock.engines.read_stage import BufferedSamples, PieceRows, Read, Span
from penstock.errors import DataError
from penstock.order import I64, Refs
from penstock.plan import Block, Context, Lineage
from penstock.testing import numbers


def first_positions(ds: Dataset, count: int) -> tuple[Program, Refs]:
    program = Program(ds.plan)
    return program, program.order(0).at(np.arange(count))


def span_of(ds: Dataset, count: int, *, padding: bool = False) -> Span:
    program, refs = first_positions(ds, count)
    runs = (PieceRows(0, 0, 2, 99, padding),)
    return Span(np.arange(10, 10 + count), runs, refs, program.readers, program.finder.locate(refs))


def block_of(span: Span) -> Block:
    return Block([], span.refs.key, Lineage(span, len(span.refs)))


def test_samples_of_several_sources_are_read_in_the_order_of_their_positions() -> None:
    ds = numbers((3,), name="a").union(numbers((4,), name="b", bad=[2])).shuffle(all=True)
    program, refs = first_positions(ds, 7)
    located = program.finder.locate(refs)
    items, bad = located.read()
    assert [(leaf, item["x"]) for leaf, item in zip(refs.leaf.tolist(), items, strict=True)] == list(
        zip(refs.leaf.tolist(), refs.index.tolist(), strict=True)
    )
    (failed,) = bad
    assert (refs.leaf[failed], refs.index[failed]) == (1, 2)
    for low in range(7):
        for high in range(low, 8):
            part = located.take(slice(low, high))
            assert part.read()[0] == items[low:high]
            assert list(part.read()[1]) == ([failed - low] if low <= failed < high else [])
            assert part.nbytes.tolist() == [100] * (high - low)


def test_the_operands_of_a_zip_are_read_side_by_side_and_the_left_error_wins() -> None:
    ds = numbers((5,), name="a", bad=[1]).zip(numbers((5,), name="b", bad=[1, 3]), suffix="_b")
    program, refs = first_positions(ds, 5)
    items, bad = program.finder.locate(refs).take(slice(1, 4)).read()
    assert [[value["x"] for value in item.values] for item in items] == [[1, 1], [2, 2], [3, 3]]
    assert {number: error and error.shard for number, error in bad.items()} == {0: "a-0000", 2: "b-0000"}


def test_samples_in_memory_keep_their_errors_when_they_are_cut() -> None:
    sizes: I64 = np.arange(4)
    held = BufferedSamples(["a", "b", "c", "d"], {2: DataError("bad")}, sizes).take(slice(1, 3))
    assert held.read()[0] == ["b", "c"]
    assert list(held.read()[1]) == [1]
    assert held.nbytes.tolist() == [1, 2]


def test_a_span_knows_the_cursor_and_the_sample_of_every_position() -> None:
    span = span_of(numbers((3, 4)), 5)
    assert span.cursor(2, 1) == Cursor(0, 2, 12, 1)
    assert span.cursor(5, 0) == Cursor(0, 2, 99, 0)
    assert [span.place(number).key for number in range(6)] == ["0", "1", "2", "3", "4", None]
    assert (span.place(3).shard, span.place(3).number) == ("shard-0001", 0)


@pytest.mark.parametrize(("padding", "kind"), [(False, DELIVERED), (True, PADDED)])
def test_a_span_traces_its_samples(padding: bool, kind: int) -> None:
    rows = span_of(numbers((3, 4)), 5, padding=padding).trace(np.array([1, 3]), np.array([0, 2]), DELIVERED)
    assert rows[ITEM].tolist() == [0, 1]
    assert rows[KIND].tolist() == [kind, kind]
    assert rows[POSITION].tolist() == [11, 13]
    assert rows[OUTPUT].tolist() == [0, 2]
    assert [rows[column].tolist() for column in (LEAF, SHARD, INDEX)] == [[0, 0], [0, 1], [1, 0]]


def test_reading_releases_the_located_samples() -> None:
    span = span_of(numbers((3, 4)), 5)
    block = Read().run(block_of(span), Context(-1))
    assert [item["x"] for item in block.items] == [0, 1, 2, 3, 4]
    assert span.located is None


def test_padding_is_marked_in_the_samples() -> None:
    block = Read().run(block_of(span_of(numbers((3,)), 2, padding=True)), Context(-1))
    assert [item["__pad__"] for item in block.items] == [True, True]


def test_a_block_stops_at_the_first_sample_that_cannot_be_read() -> None:
    block = Read().run(block_of(span_of(numbers((6,), bad=[2, 4]), 6)), Context(-1))
    assert [item["x"] for item in block.items] == [0, 1]
    assert isinstance(block.lineage.error, DataError)
    assert block.lineage.error.key == "2"


def test_samples_that_cannot_be_read_are_skipped_on_request() -> None:
    block = Read().run(block_of(span_of(numbers((6,), bad=[2, 4]), 6)), Context(-1, skip=True))
    assert [item["x"] for item in block.items] == [0, 1, 3, 5]
    assert [skip.place.key for skip in block.lineage.skips] == ["2", "4"]
    assert block.lineage.error is None
