"""Items are collected into groups by count or weight, and a run resumes inside a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.engines import Program, Start, StartPart
from penstock.engines.cursor import Cursor, GroupCursor
from penstock.engines.flow import BlockSizer, walk
from penstock.engines.grouping import Grouping, take_skips
from penstock.engines.lineage import GroupOrigin
from penstock.engines.segments import run_segment
from penstock.errors import DataError, StageError
from penstock.plan import Block, GroupStage, Lineage, Place, Skipped
from penstock.testing import numbers


def read_blocks(program: Program, start: Start) -> Iterator[Block]:
    """Yield blocks of three samples at most, through the stages of the first level."""
    (segment,) = program.levels[0].segments
    contexts = program.contexts(segment, 0)
    for block in walk(program, program.order(0), start, BlockSizer(count=3, max_samples=3)):
        for part, _ in run_segment(segment, contexts, block):
            yield part


def grouped(ds: Dataset, start: Start | None = None) -> list[Block]:
    """Run the first group stage of a plan, and return its blocks."""
    program = Program(ds.plan)
    if start is None:
        start = program.start(program.order(0), None)
    placed = program.levels[1].head
    assert placed is not None
    assert isinstance(placed.stage, GroupStage)
    return list(Grouping(program, placed, placed.stage, 1, 0, start).run(read_blocks(program, start)))


def xs(blocks: list[Block]) -> list[list[int]]:
    return [[sample["x"] for sample in batch] for block in blocks for batch in block.items]


def failing_collate(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if samples[0]["x"] == 4:
        raise ValueError("cannot be collated")
    return samples


def test_groups_are_cut_by_count_across_blocks() -> None:
    assert xs(grouped(numbers((10,)).batched(4, collate=list))) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_groups_are_cut_by_weight() -> None:
    ds = numbers((8,)).batched_by(lambda sample: sample["x"], 6, collate=list)
    assert xs(grouped(ds)) == [[0, 1, 2, 3], [4], [5], [6], [7]]


def test_a_group_knows_the_cursors_around_and_inside_it() -> None:
    first, second, _ = grouped(numbers((10,)).batched(4, collate=list))
    assert isinstance(second.lineage.origin, GroupOrigin)
    assert (first.cursor(0), first.cursor(1)) == (Cursor(0, 0, 0, 0), Cursor(0, 0, 4, 0))
    assert second.lineage.origin.cursor(0, 1) == GroupCursor(1, Cursor(0, 0, 4, 0), Cursor(0, 0, 8, 0), 4, 0, 1)


def test_outputs_of_the_first_group_that_were_delivered_before_are_omitted() -> None:
    ds = numbers((10,)).map(dict).batched(2, collate=list).shuffle(3)
    program = Program(ds.plan)
    start = Start([[4, 10, 1, 0]], groups={1: (1, 0)})
    batch = program.levels[1].head
    assert batch is not None
    assert isinstance(batch.stage, GroupStage)
    blocks = list(Grouping(program, batch, batch.stage, 1, 0, start).run(read_blocks(program, start)))
    assert xs(blocks) == [[6, 7], [8, 9]]


def test_an_open_window_is_replayed_with_its_own_size() -> None:
    ds = numbers((12,)).flat_map(lambda sample: [sample]).shuffle(5)
    whole = [item["x"] for block in grouped(ds) for item in block.items]
    window = StartPart([[0, 5, 1, 0]], n=5, done=2)
    resumed = grouped(ds, Start([[5, 12, 1, 0]], (window,)))
    assert [item["x"] for block in resumed for item in block.items] == whole[2:]


def test_a_failing_stage_is_an_error_that_names_stage_and_sample() -> None:
    first, failed, *_ = grouped(numbers((10,)).batched(4, collate=failing_collate))
    assert xs([first]) == [[0, 1, 2, 3]]
    assert isinstance(failed.lineage.error, StageError)
    assert (failed.lineage.error.key, failed.lineage.error.stage) == ("4", "batched(4, collate=failing_collate)")
    assert isinstance(failed.lineage.error.__cause__, ValueError)


def test_a_group_whose_stage_fails_is_skipped_on_request() -> None:
    blocks = grouped(numbers((10,)).batched(4, collate=failing_collate).on_error("skip"))
    assert xs(blocks) == [[0, 1, 2, 3], [8, 9]]
    ((skip,),) = [block.lineage.skips for block in blocks if block.lineage.skips]
    assert (skip.place.key, skip.place.samples, skip.stage) == ("4", 4, "batched")


def test_a_group_that_an_error_cuts_short_is_not_run() -> None:
    *blocks, last = grouped(numbers((10,), bad=[6]).batched(4, collate=list))
    assert xs(blocks) == [[0, 1, 2, 3]]
    assert isinstance(last.lineage.error, DataError)


def test_skips_are_delivered_with_the_group_around_them() -> None:
    blocks = grouped(numbers((12,), bad=[0, 2, 5, 11]).batched(4, collate=list).on_error("skip"))
    assert xs(blocks) == [[1, 3, 4, 6], [7, 8, 9, 10]]
    assert [[skip.place.key for skip in block.lineage.skips] for block in blocks] == [["0", "2", "5"], [], ["11"]]


def test_skips_up_to_an_input_can_be_taken() -> None:
    skips = tuple(Skipped(number, Place(None, None), "map", "") for number in (0, 1, 3))
    origin = GroupOrigin(1, None, None, 0, [], True, 0)  # type: ignore[arg-type]
    block = Block([], np.zeros(0, np.uint64), Lineage(origin, 4, None, skips))
    assert [skip.input for skip in take_skips(block, 3)] == [0, 1]
    assert [skip.input for skip in block.lineage.skips] == [3]


@pytest.mark.parametrize("outputs", [1, 256, 257, 600])
def test_the_outputs_of_a_large_group_are_split_into_blocks(outputs: int) -> None:
    blocks = grouped(numbers((outputs,)).flat_map(lambda sample: [sample]).shuffle(1000))
    assert [len(block) for block in blocks] == [min(256, outputs - low) for low in range(0, outputs, 256)]
    assert sorted(item["x"] for block in blocks for item in block.items) == list(range(outputs))
