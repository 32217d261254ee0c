"""A stage that asks for n rows gets n, and joining blocks changes neither the stream nor its cursors."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataset import Dataset
from penstock.engines import Program
from penstock.engines.flow import BlockSizer, flow
from penstock.engines.joining import JoinedOrigin, join_blocks
from penstock.engines.lineage import DELIVERED, ItemLineage
from penstock.engines.meter import Meters
from penstock.engines.read_stage import Span
from penstock.engines.segments import Segment, run_segment
from penstock.plan import Block, Lineage
from penstock.testing import numbers, outputs

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

PLANS: dict[str, Callable[[Dataset], Dataset]] = {
    "read": lambda ds: ds,
    "shuffled": lambda ds: ds.shuffle(),
    "filter": lambda ds: ds.filter(lambda sample: sample["x"] % 3 == 0),
    "flat_map": lambda ds: ds.flat_map(lambda sample: [{**sample, "n": n} for n in range(sample["x"] % 4)]),
    "late shuffle": lambda ds: ds.flat_map(lambda sample: [sample, sample]).shuffle(7),
    "limit": lambda ds: ds.filter(lambda sample: sample["x"] % 2 == 0).limit(11),
    "zip": lambda ds: ds.zip(numbers((40,), name="b"), suffix="_b"),
    "skips": lambda ds: ds.map(_fails_at_7).on_error("skip"),
}


def _fails_at_7(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["x"] % 10 == 7:
        raise ValueError("seven")
    return sample


def blocks_of(ds: Dataset, sizes: int, rows: int | None = None) -> list[Block]:
    """Run a plan in one thread, in blocks of up to ``sizes`` samples; with ``rows``, join them behind each segment."""
    program = Program(ds.plan)
    order = program.order(0)

    def each(blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        contexts = program.contexts(segment, 0)
        parts = (part for block in blocks for part, _ in run_segment(segment, contexts, block))
        return parts if rows is None else join_blocks(parts, rows, 1 << 40, "map_batches")

    sizer = BlockSizer(count=sizes, max_samples=sizes)
    start = replace(program.start(order, None), traced=True)
    return list(flow(program, order, 0, start, each, sizer, Meters()))


def facts(blocks: list[Block], cursors: bool) -> list[Any]:
    """What can be asked about every item of a stream: its value, key, place, lineage, and the cursor after it."""
    found = []
    for block in blocks:
        for item in range(len(block)):
            trace = ItemLineage(block.lineage, item, item + 1, with_gaps=False).trace(DELIVERED)
            cursor, _ = block.cursor_after(item)
            place = block.place(item)
            found.append((repr(block.items[item]), int(block.keys[item]), place, trace.tolist(), cursors and cursor))
    return found


def skips(blocks: list[Block]) -> list[str]:
    return [str(skip.place.key) for block in blocks for skip in block.lineage.skips]


@pytest.mark.parametrize("name", PLANS)
@given(sizes=st.integers(1, 9), rows=st.integers(2, 12))
def test_joining_changes_no_item_and_no_cursor(name: str, sizes: int, rows: int) -> None:
    ds = PLANS[name](numbers((13, 20, 7)))
    blocks, joined = blocks_of(ds, sizes), blocks_of(ds, sizes, rows)
    # After a limit, two cursors may differ in samples that a filter drops anyway.
    assert facts(joined, cursors=name != "limit") == facts(blocks, cursors=name != "limit")
    assert skips(joined) == skips(blocks)
    if name not in ("limit", "late shuffle"):  # those are cut anew behind the blocks that were joined
        assert all(len(block) % rows == 0 for block in joined[:-1])


def test_samples_are_joined_before_they_are_read() -> None:
    program = Program(numbers((5, 5)).plan)
    order = program.order(0)
    calls = []

    def each(blocks: Iterator[Block], segment: Segment) -> Iterator[Block]:
        for block in join_blocks(blocks, 4, 1 << 40, ""):
            assert isinstance(block.lineage.origin, Span)
            calls.append((len(block.items), block.lineage.inputs))
            yield from (part for part, _ in run_segment(segment, program.contexts(segment, 0), block))

    sizer = BlockSizer(count=3, max_samples=3)
    out = list(flow(program, order, 0, program.start(order, None), each, sizer, Meters()))
    assert calls == [(0, 4), (0, 4), (0, 2)]
    assert [item["x"] for block in out for item in block.items] == list(range(10))


@pytest.mark.parametrize(("size", "want"), [(1, [[0, 1, 2, 3], [4, 5], []]), (3, [[0, 1, 2, 3], [4, 5]])])
def test_an_error_comes_last_after_the_items_before_it(size: int, want: list[list[int]]) -> None:
    blocks = blocks_of(numbers((4, 4), bad=[6]), size)[:7]
    joined = list(join_blocks(iter(blocks), 4, 1 << 40, ""))
    assert [[item["x"] for item in block.items] for block in joined] == want
    assert [block.lineage.error is not None for block in joined] == [False] * (len(want) - 1) + [True]


def test_rows_beyond_the_memory_limit_come_in_smaller_blocks_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    blocks = [block for block in blocks_of(numbers((40,)), 2) if len(block) == 2]
    with caplog.at_level(logging.WARNING, "penstock"):
        joined = list(join_blocks(iter(blocks), 100, 200, "map_batches(f)"))
    assert {len(block) for block in joined} == {2}
    [record] = caplog.records
    assert "map_batches(f): 100 rows exceed the memory limit of 200 bytes" in record.getMessage()


def test_a_joined_origin_asks_the_origin_of_each_input() -> None:
    blocks = blocks_of(PLANS["late shuffle"](numbers((20,))), 5)
    whole = [block for block in blocks if len(block)]
    [joined] = join_blocks(iter(whole), 40, 1 << 40, "")
    assert isinstance(joined.lineage.origin, JoinedOrigin)
    assert len(joined) == 40


@pytest.mark.parametrize(
    ("engine", "on"),
    [("serial", {}), ("local", {}), ("local", {"on": "processes", "workers": 2})],
    ids=["serial", "threads", "processes"],
)
@pytest.mark.parametrize(
    "before",
    [
        lambda ds: ds,
        lambda ds: ds.map(_wide, workers=2),
        lambda ds: ds.filter(lambda sample: sample["x"] % 2 == 0),
        lambda ds: ds.flat_map(lambda sample: [sample] * (sample["x"] % 3)),
        lambda ds: ds.shuffle().map(_wide).batched(7).unbatched(),
    ],
    ids=["read", "map", "filter", "flat_map", "unbatched"],
)
def test_map_batches_gets_the_rows_it_asks_for(engine: str, on: dict[str, Any], before: Any) -> None:
    ds = before(numbers((130, 170))).map_batches(_size, batch_size=32, **on).on(engine)
    sizes = [sample["size"] for sample in ds]
    calls = len(sizes) // 32
    assert sizes == [32] * (32 * calls) + [len(sizes) - 32 * calls] * (len(sizes) - 32 * calls)


def _wide(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "pixels": np.zeros(200_000, np.uint8)}  # far fewer of these than 32 fit into a block


def _size(batch: dict[str, Any]) -> dict[str, Any]:
    count = len(batch["x"])
    return {"x": batch["x"], "size": np.full(count, count)}


@pytest.mark.parametrize("name", PLANS)
def test_the_stream_is_the_same_with_and_without_rows_to_join(name: str) -> None:
    ds = PLANS[name](numbers((13, 20, 7)))
    rows = random.Random(name).randrange(2, 30)
    assert outputs(ds.map_batches(_plus, batch_size=rows)) == outputs(ds.map_batches(_plus))


def _plus(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "y": batch["x"] + 1}


def test_a_marker_block_stays_in_its_place() -> None:
    first, second = blocks_of(numbers((6,)), 3)[-2:]
    marker = Block([], np.zeros(0, np.uint64), Lineage(first.lineage.origin, 0, ends_part=True))
    out = list(join_blocks(iter([first, marker, second]), 4, 1 << 40, ""))
    assert [len(block) for block in out] == [len(first), 0, len(second)]
    assert out[1] is marker
