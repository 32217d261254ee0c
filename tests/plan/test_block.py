from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import DataError
from penstock.order import I64
from penstock.plan import Block, Lineage, Place, Skipped, Slot, estimate_nbytes


class FakeOrigin:
    """An origin whose cursors and locations are its arguments."""

    def cursor(self, done: int, sub: int) -> Any:
        return (done, sub)

    def place(self, number: int) -> Place:
        return Place("s", str(number))

    def slot(self, number: int) -> Slot:
        raise NotImplementedError

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        raise NotImplementedError


def _block(count: int = 4) -> Block:
    items: list[Any] = [f"i{n}" for n in range(count)]
    return Block(items, np.arange(count, dtype=np.uint64), Lineage(FakeOrigin(), count))


def test_the_cursor_of_a_one_to_one_block_counts_items() -> None:
    assert [_block().cursor(n) for n in range(5)] == [(n, 0) for n in range(5)]


def test_inputs_without_outputs_are_passed_with_the_item_before() -> None:
    block = _block(5).keep([1, 3], ["i1", "i3"])
    assert [block.cursor(n) for n in range(3)] == [(1, 0), (3, 0), (5, 0)]


def test_outputs_of_one_input_are_counted_within_it() -> None:
    block = _block(3).keep([0, 0, 2, 2, 2], list("abcde"))
    assert [block.cursor(n) for n in range(6)] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2), (3, 0)]


def test_an_item_has_the_location_of_its_input() -> None:
    block = _block(5).keep([1, 3], ["i1", "i3"])
    assert [block.place(n).key for n in range(2)] == ["1", "3"]
    assert block.keep([1], ["x"]).place(0).key == "3"


def test_items_that_a_block_keeps_have_their_old_keys() -> None:
    assert _block(5).keep([1, 3], ["i1", "i3"]).keys.tolist() == [1, 3]
    assert _block(3).with_items([0, 0, 0]).keys.tolist() == [0, 1, 2]


def test_skips_are_passed_with_the_cursor() -> None:
    block = _block(5).keep([1, 4], ["i1", "i4"])
    block.lineage = block.lineage.with_skips(*(Skipped(n, Place("s", str(n)), "map", "no") for n in (0, 2, 3)))
    assert [[skip.input for skip in block.skips_before(n)] for n in range(3)] == [[0], [0, 2, 3], [0, 2, 3]]


def test_an_error_ends_the_block_before_the_failing_item() -> None:
    skips = [Skipped(n, Place("s", str(n)), "map", "no") for n in (1, 4)]
    error = DataError("bad")
    lineage = _block(5).lineage.with_skips(*skips).stopped(3, error)
    assert (lineage.inputs, lineage.error, [skip.input for skip in lineage.skips]) == (3, error, [1])


def test_skips_of_several_stages_are_in_the_order_of_their_inputs() -> None:
    lineage = _block(5).lineage
    for number in (3, 0, 2):
        lineage = lineage.with_skips(Skipped(number, Place("s", str(number)), "map", "no"))
    before, after = lineage.split_skips(3)
    assert [skip.input for skip in lineage.skips] == [0, 2, 3]
    assert ([skip.input for skip in before], [skip.input for skip in after.skips]) == ([0, 2], [3])


def test_a_generator_depends_only_on_key_and_stage_number() -> None:
    block = _block(4)
    first = [g.integers(1 << 40) for g in block.generators(1)]
    assert first == [g.integers(1 << 40) for g in block.generators(1)]
    assert first != [g.integers(1 << 40) for g in block.generators(2)]
    part = block.keep([2], ["i2"]).generators(1)[0]
    assert part.integers(1 << 40) == pytest.approx(first[2], abs=0)


def test_the_size_of_a_value_that_holds_itself_is_finite() -> None:
    endless: list[Any] = [b"12345"]
    endless += [endless] * 40
    assert estimate_nbytes({"x": endless, "y": b"abc"}) >= 3
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert estimate_nbytes(deep) == 0
