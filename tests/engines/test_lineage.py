"""Every item can be traced to the samples it came from, and inputs without output are named once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.engines import Program, Run
from penstock.engines.cursor import CountedCursor, Cursor, GroupCursor
from penstock.engines.lineage import (
    COLUMNS,
    DELIVERED,
    INDEX,
    ITEM,
    KIND,
    OUTPUT,
    PASSED,
    POSITION,
    REPEATED,
    CountedOrigin,
    EmptyOrigin,
    GroupOrigin,
    ItemLineage,
    concat_tables,
    empty_block,
)
from penstock.order import I64
from penstock.plan import Block, Lineage, Place, Slot
from penstock.testing import numbers

START, END = Cursor(0, 0, 0, 0), Cursor(0, 0, 9, 0)


class FakeOrigin:
    """An origin whose input ``i`` is sample ``i``."""

    def cursor(self, done: int, sub: int) -> Any:
        return (done, sub)

    def place(self, number: int) -> Place:
        return Place("shard", str(number))

    def slot(self, number: int) -> Slot:
        raise NotImplementedError

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        rows = np.zeros((COLUMNS, len(inputs)), np.int64)
        rows[ITEM], rows[KIND], rows[OUTPUT], rows[INDEX] = np.arange(len(inputs)), kind, outputs, inputs
        return rows


def block(owner: list[int] | None, inputs: int, **more: Any) -> Block:
    count = inputs if owner is None else len(owner)
    owners = None if owner is None else np.array(owner, np.int64)
    return Block(list(range(count)), np.zeros(count, np.uint64), Lineage(FakeOrigin(), inputs, owners, **more))


def samples(rows: I64) -> list[tuple[int, int, int]]:
    """Return the item, the index and the kind of every row."""
    return list(zip(rows[ITEM].tolist(), rows[INDEX].tolist(), rows[KIND].tolist(), strict=True))


def test_tables_are_joined_in_order() -> None:
    one, two = FakeOrigin().trace(np.arange(2), np.zeros(2, np.int64), DELIVERED), np.full((COLUMNS, 1), 7)
    assert concat_tables([one, two])[INDEX].tolist() == [0, 1, 7]
    assert concat_tables([]).shape == (COLUMNS, 0)


def test_items_that_are_inputs_are_traced_one_to_one() -> None:
    lineage = ItemLineage(block(None, 5).lineage, 1, 4, with_gaps=True)
    assert len(lineage) == 3
    assert lineage.outputs().tolist() == [0, 0, 0]
    assert samples(lineage.trace(DELIVERED)) == [(0, 1, DELIVERED), (1, 2, DELIVERED), (2, 3, DELIVERED)]


def test_the_outputs_of_an_input_are_numbered_across_blocks() -> None:
    lineage = ItemLineage(block([1, 1, 3], 4, begin=1, base=2).lineage, 0, 3, with_gaps=True)
    assert lineage.inputs().tolist() == [1, 1, 3]
    assert lineage.outputs().tolist() == [2, 3, 0]
    assert ItemLineage(block([1, 1, 3], 4, begin=1, base=2).lineage, 1, 3, with_gaps=True).outputs().tolist() == [3, 0]


def test_inputs_without_output_are_named_with_the_first_item() -> None:
    lineage = ItemLineage(block([1, 3], 5).lineage, 0, 2, with_gaps=True)
    assert lineage.gaps().tolist() == [0, 2, 4]
    passed = [(0, 0, PASSED), (0, 2, PASSED), (0, 4, PASSED)]
    assert samples(lineage.trace(DELIVERED)) == [*passed, (0, 1, DELIVERED), (1, 3, DELIVERED)]
    assert samples(ItemLineage(block([1, 3], 5).lineage, 1, 2, with_gaps=False).trace(DELIVERED)) == [(0, 3, DELIVERED)]


def test_an_input_with_outputs_in_an_earlier_block_is_not_a_gap() -> None:
    assert ItemLineage(block([3], 4, begin=1, base=2).lineage, 0, 1, with_gaps=True).gaps().tolist() == [2]
    assert ItemLineage(block([3], 4, begin=1).lineage, 0, 1, with_gaps=True).gaps().tolist() == [1, 2]


def test_an_empty_block_names_the_inputs_without_output() -> None:
    empty = empty_block(block([], 2))
    assert isinstance(empty.lineage.origin, EmptyOrigin)
    assert samples(empty.lineage.origin.trace(np.zeros(0, np.int64), np.zeros(0, np.int64), DELIVERED)) == [
        (0, 0, PASSED),
        (0, 1, PASSED),
    ]
    assert empty_block().lineage.origin.place(0) == Place(None, None)
    with pytest.raises(AssertionError, match="no cursor"):
        empty.cursor(0)


def test_items_after_a_counting_stage_are_traced_through_it() -> None:
    origin = CountedOrigin(2, block([1, 1, 3], 4), seen=10)
    assert origin.cursor(2, 1) == CountedCursor(2, (3, 0), 12, 1)  # type: ignore[arg-type]
    assert origin.place(2).key == "3"
    rows = origin.trace(np.array([0, 2, 2]), np.array([0, 0, 1]), DELIVERED)
    assert samples(rows) == [(0, 1, DELIVERED), (1, 3, DELIVERED), (2, 3, REPEATED)]


def group(whole: bool, **more: Any) -> GroupOrigin:
    members = [
        ItemLineage(block([1, 2], 3).lineage, 0, 2, with_gaps=True),
        ItemLineage(block(None, 2).lineage, 0, 2, with_gaps=True),
    ]
    settings: dict[str, Any] = {"total": 4, **more}
    return GroupOrigin(1, START, END, 4, members, whole, **settings)


def test_a_batch_is_traced_to_all_its_members_and_further_outputs_to_the_first() -> None:
    rows = group(whole=True).trace(np.array([0, 1]), np.array([0, 0]), DELIVERED)
    members = [(0, 0, PASSED), (0, 1, DELIVERED), (0, 2, DELIVERED), (0, 0, DELIVERED), (0, 1, DELIVERED)]
    assert samples(rows) == [*members, (1, 1, REPEATED)]


def test_a_permuted_group_traces_each_output_to_its_member() -> None:
    origin = group(whole=False, owner=np.array([3, 0, 2, 1]))
    rows = origin.trace(np.arange(4), np.zeros(4, np.int64), DELIVERED)
    outputs = [(0, 1, DELIVERED), (1, 1, DELIVERED), (2, 0, DELIVERED), (3, 2, DELIVERED)]
    assert samples(rows) == [(0, 0, PASSED), *outputs]
    assert [origin.place(number).key for number in range(4)] == ["1", "1", "0", "2"]


def test_a_cursor_is_at_the_start_inside_or_at_the_end_of_a_group() -> None:
    origin = group(whole=False, offset=2)
    assert group(whole=False).cursor(0, 0) == START
    assert origin.cursor(1, 5) == GroupCursor(1, START, END, 4, 3, 5)
    assert origin.cursor(2, 0) == END


def test_the_place_of_a_batch_counts_its_samples() -> None:
    place = group(whole=True).place(0)
    assert (place.key, place.samples) == ("1", 4)


def odd_copies(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for number in range(2 * (sample["x"] % 2)):
        yield {**sample, "copy": number}


def trace_run(ds: Dataset) -> tuple[list[Any], I64]:
    """Return the items of a run, and the samples that ``on_delivered`` was called with."""
    program = Program(ds.on("serial").plan)
    order = program.order(0)
    tables: list[I64] = []
    run = Run(program, order, 0, program.start(order, None), on_delivered=lambda rows, _: tables.append(rows))
    return list(run), concat_tables(tables)


@pytest.mark.parametrize(
    "build",
    [
        lambda ds: ds,
        lambda ds: ds.flat_map(odd_copies),
        lambda ds: ds.flat_map(odd_copies).shuffle(7),
        lambda ds: ds.flat_map(odd_copies).batched(4),
        lambda ds: ds.flat_map(odd_copies).batched(4).unbatched(),
    ],
    ids=["read", "flat_map", "late shuffle", "batched", "unbatched"],
)
def test_a_run_names_every_output_of_every_sample_once(build: Any) -> None:
    _, rows = trace_run(build(numbers((13, 20)).shuffle()))
    rows = rows[:, rows[KIND] != REPEATED]
    assert set(rows[POSITION].tolist()) == set(range(33)), "a sample is missing"
    assert len(np.unique(rows[[POSITION, OUTPUT]], axis=1).T) == rows.shape[1], "an output was named twice"


def test_items_after_a_counting_stage_are_traced_to_the_samples_they_contain() -> None:
    items, rows = trace_run(numbers((13, 20)).filter(lambda sample: sample["x"] % 3).skip(2).limit(9))
    assert rows[POSITION].tolist() == [item["x"] for item in items]
    assert rows[KIND].tolist() == [DELIVERED] * 9
