"""Blocks have the right size, keep their cursors through all stages, and are located one ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataset import Dataset
from penstock.engines import EngineName
from penstock.engines.flow import BlockSizer, _closing, finish_level, look_ahead
from penstock.errors import DataError, StageError
from penstock.feed import Loader
from penstock.order import I64
from penstock.plan import Block, Lineage, Place, Skipped, Slot
from penstock.storage.retry import wanted
from penstock.testing import numbers, outputs


@given(
    sizes=st.lists(st.integers(0, 900_000), max_size=300),
    count=st.integers(1, 64),
    least=st.integers(1, 40),
)
def test_cuts_cover_all_samples_within_the_bounds(sizes: list[int], count: int, least: int) -> None:
    sizer = BlockSizer(count=count, max_samples=64, min_samples=least)
    cuts = list(sizer.cuts(np.array(sizes, np.int64)))
    assert [n for low, high in cuts for n in range(low, high)] == list(range(len(sizes)))
    for low, high in cuts:
        assert high - low <= max(64, least)
        assert high - low == 1 or sum(sizes[low:high]) <= sizer.max_stored_bytes


def test_blocks_double_up_to_the_maximum() -> None:
    sizer = BlockSizer(count=1, max_samples=8)
    assert [high - low for low, high in sizer.cuts(np.zeros(30, np.int64))] == [1, 2, 4, 8, 8, 7]


def test_a_sample_above_the_bound_is_a_block_of_its_own() -> None:
    sizes = np.array([10, 2_000_000, 10], np.int64)
    assert list(BlockSizer().cuts(sizes)) == [(0, 1), (1, 2), (2, 3)]


def test_a_stage_on_rows_gets_the_minimum_it_requests() -> None:
    sizer = BlockSizer(count=1, max_samples=4, min_samples=32)
    assert [high - low for low, high in sizer.cuts(np.zeros(70, np.int64))] == [32, 32, 6]


def test_blocks_that_take_long_become_smaller() -> None:
    sizer = BlockSizer(count=64)
    sizer.limit().adjust(64, 0.5, 0)
    assert sizer.max_samples == 6
    assert sizer.count == 6


def test_blocks_that_grow_large_become_smaller() -> None:
    sizer = BlockSizer(count=64, max_output_bytes=16_000_000)
    sizer.limit().adjust(64, 0.0, 320_000_000)
    assert sizer.max_samples == 3
    sizer.limit().adjust(1, 0.0, 900_000_000)
    assert sizer.max_samples == 1


def test_cheap_blocks_grow_again_up_to_the_ceiling() -> None:
    sizer = BlockSizer(count=1, max_samples=1)
    limit = sizer.limit()
    for _ in range(20):
        assert sum(1 for _ in sizer.cuts(np.zeros(600, np.int64)))
        limit.adjust(sizer.count, 0.0001, 10)
    assert sizer.max_samples == 512


def test_blocks_of_moderate_cost_keep_their_size() -> None:
    sizer = BlockSizer(count=8, max_samples=16)
    sizer.limit().adjust(8, 0.03, 0)
    assert (sizer.count, sizer.max_samples) == (8, 16)


class FakeOrigin:
    """An origin whose cursors are the arguments of the call."""

    def cursor(self, done: int, sub: int) -> Any:
        return (done, sub)

    def place(self, number: int) -> Place:
        return Place("shard", str(number))

    def slot(self, number: int) -> Slot:
        raise NotImplementedError

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        raise NotImplementedError


def block(items: str, owner: list[int], inputs: int, **more: Any) -> Block:
    lineage = Lineage(FakeOrigin(), inputs, np.array(owner, np.int64), **more)
    return Block(list(items), np.zeros(len(items), np.uint64), lineage)


def test_outputs_delivered_before_are_dropped() -> None:
    [got] = finish_level(iter([block("abcd", [0, 0, 0, 1], 2, base=2)]))
    assert got.items == ["c", "d"]
    assert [got.cursor(n) for n in range(3)] == [(0, 2), (1, 0), (2, 0)]


def test_the_outputs_of_an_input_are_numbered_across_blocks() -> None:
    parts = [
        block("ab", [0, 1], 1, more=True),
        block("cd", [1, 1], 1, begin=1, more=True),
        block("e", [1], 3, begin=1),
    ]
    first, second, third = finish_level(iter(parts))
    assert [first.cursor(n) for n in (1, 2)] == [(1, 0), (1, 1)]
    assert [second.cursor(n) for n in (1, 2)] == [(1, 2), (1, 3)]
    assert [third.cursor(n) for n in (0, 1)] == [(1, 3), (3, 0)]


def test_outputs_delivered_before_may_span_several_blocks() -> None:
    parts = [
        block("ab", [0, 0], 0, base=3, more=True),
        block("cd", [0, 0], 0, base=3, more=True),
        block("ef", [0, 1], 2, base=3),
    ]
    got = list(finish_level(iter(parts)))
    assert [part.items for part in got] == [[], ["d"], ["e", "f"]]
    assert got[1].cursor(1) == (0, 4)
    assert got[2].cursor(1) == (1, 0)


def test_a_skip_belongs_to_the_block_that_passes_its_input() -> None:
    skips = [Skipped(0, Place(None, None), "map", "a"), Skipped(1, Place(None, None), "map", "b")]
    parts = [block("ab", [0, 1], 1, more=True, skips=skips), block("c", [1], 2, begin=1)]
    first, second = finish_level(iter(parts))
    assert [skip.problem for skip in first.lineage.skips] == ["a"]
    assert [skip.problem for skip in second.lineage.skips] == ["b"]


def frames(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for number in range(100 + sample["x"]):
        yield {"x": sample["x"], "frame": number}


def restored(ds: Dataset, state: Any) -> Loader:
    loader = ds.loader()
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_state_within_a_large_flat_map_restores_the_rest(engine: EngineName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.plan.stage.MAX_PART_ITEMS", 30)
    ds = numbers((2, 2)).flat_map(frames).filter(lambda s: s["frame"] % 3).map(dict, workers=2).on(engine)
    want = outputs(ds.epoch(0))
    loader = ds.loader()
    for done, _ in enumerate(loader, 1):
        if done % 29 == 0:
            assert outputs(restored(ds, loader.state_dict())) == want[done:]


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_size_function_that_fails_names_stage_and_sample(engine: EngineName) -> None:
    ds = numbers((9,)).batched_by(lambda s: 1 / abs(s["x"] - 5), 2).on(engine)
    with pytest.raises(StageError, match=r"ZeroDivisionError.*batched_by.*key: 5"):
        list(ds)


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_size_that_is_not_a_number_fails(engine: EngineName) -> None:
    with pytest.raises(StageError, match="TypeError"):
        list(numbers((9,)).batched_by(lambda s: None, 2).on(engine))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_sample_that_cannot_be_weighed_can_be_skipped(engine: EngineName) -> None:
    ds = numbers((9,)).batched_by(lambda s: 1 // abs(s["x"] - 5), 2).on_error("skip").on(engine)
    loader = ds.loader()
    assert [x for batch in loader for x in batch["x"].tolist()] == [0, 1, 2, 3, 4, 6, 7, 8]
    assert [(skip.place.key, skip.stage) for skip in loader.skipped] == [("5", "batched_by")]


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_whole_batches_before_an_error_are_delivered(engine: EngineName) -> None:
    got: list[Any] = []
    with pytest.raises(DataError, match="made to fail"):
        got.extend(batch["x"].tolist() for batch in numbers((20,), bad=[10]).batched(4).on(engine))
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("uneven", ["drop", "pad"])
@pytest.mark.parametrize("stages", ["plain", "batched", "batches shuffled"])
@pytest.mark.parametrize("engine", ["serial", "local"])
def test_equal_ranks_can_be_restored_after_every_item(uneven: Any, stages: str, engine: EngineName) -> None:
    ds = numbers((5, 6)).map(dict).on(engine)
    batches = ds.batched(2, collate=list)
    ds = {"plain": ds, "batched": batches, "batches shuffled": batches.shuffle(2)}[stages]
    for rank in range(3):
        cut: dict[str, Any] = {"rank": rank, "world": 3, "uneven": uneven}
        want = outputs(ds.loader(**cut))
        loader = ds.loader(**cut)
        run = iter(loader)
        for done in range(len(want)):
            again = ds.loader(**cut)
            again.load_state_dict(loader.state_dict())
            assert outputs(again) == want[done:], f"rank {rank} after {done}"
            assert again.epoch == 1
            next(run)
        assert loader.epoch == 1


def test_the_slowest_segment_decides_the_size_of_blocks() -> None:
    sizer = BlockSizer(count=64)
    slow, quick = sizer.limit(), sizer.limit()
    slow.adjust(64, 0.5, 0)
    for _ in range(5):
        quick.adjust(6, 0.0, 0)
    assert sizer.max_samples == 6


def test_after_an_error_the_first_iterator_is_closed() -> None:
    closed = []

    def locating() -> Iterator[Any]:
        try:
            yield from range(3)
        finally:
            closed.append(True)

    def failing(blocks: Iterator[Any]) -> Iterator[Any]:
        for _ in blocks:
            raise DataError("gone")
        yield

    first = locating()
    with pytest.raises(DataError, match="gone"):
        list(_closing(failing(first), first))
    assert closed


def lookahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock lookahead"]


def lookahead_ends() -> bool:
    for thread in lookahead_threads():
        thread.join(60)
    return not lookahead_threads()


def test_lookahead_yields_every_pair_in_order() -> None:
    assert list(look_ahead(range(100), str)) == [(i, str(i)) for i in range(100)]
    assert lookahead_ends()


def test_exactly_one_pair_is_computed_in_advance() -> None:
    found: list[int] = []
    pairs = look_ahead(range(10), found.append)
    for taken in range(4):
        next(pairs)
        deadline = time.monotonic() + 60
        while len(found) < taken + 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert len(found) == taken + 2
    pairs.close()  # type: ignore[attr-defined]
    assert lookahead_ends()


def test_a_failure_during_lookahead_is_raised_in_its_place() -> None:
    def find(number: int) -> int:
        return 1 // (3 - number)

    pairs = look_ahead(range(10), find)
    assert [next(pairs)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        next(pairs)
    assert lookahead_ends()


def test_values_that_fail_do_not_end_lookahead_silently() -> None:
    def values() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    pairs = look_ahead(values(), str)
    assert next(pairs) == (1, "1")
    with pytest.raises(OSError, match="gone"):
        next(pairs)


def test_closing_does_not_wait_for_a_stuck_lookahead() -> None:
    stuck = threading.Event()

    def find(number: int) -> int:
        if number:
            stuck.wait(60)
        return number

    pairs = look_ahead(range(3), find)
    next(pairs)
    started_at = time.monotonic()
    pairs.close()  # type: ignore[attr-defined]
    assert time.monotonic() - started_at < 30
    stuck.set()
    assert lookahead_ends()


def test_closing_cancels_the_reads_of_a_lookahead() -> None:
    started, released, results = threading.Event(), threading.Event(), []

    def find(number: int) -> int:
        if number:
            started.set()
            released.wait(60)
        results.append(wanted())
        return number

    pairs = look_ahead(range(3), find)
    next(pairs)
    assert started.wait(60)
    pairs.close()  # type: ignore[attr-defined]
    released.set()
    for thread in lookahead_threads():
        thread.join(60)
    assert results == [True, False]
