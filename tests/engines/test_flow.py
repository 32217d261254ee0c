from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataset import Dataset
from penstock.engines.flow import BlockSizer, _ended, finish_level
from penstock.errors import DataError, StageError
from penstock.feed import Loader
from penstock.order import I64
from penstock.plan import Block, Place, Skipped, Slot
from penstock.testing import numbers, outputs


@given(
    sizes=st.lists(st.integers(0, 900_000), max_size=300),
    count=st.integers(1, 64),
    least=st.integers(1, 40),
)
def test_cuts_cover_everything_and_keep_to_the_bounds(sizes: list[int], count: int, least: int) -> None:
    pace = BlockSizer(count=count, most=64, least=least)
    cuts = list(pace.cuts(np.array(sizes, np.int64)))
    assert [n for low, high in cuts for n in range(low, high)] == list(range(len(sizes)))
    for low, high in cuts:
        assert high - low <= max(64, least)
        assert high - low == 1 or sum(sizes[low:high]) <= pace.nbytes


def test_blocks_grow_from_few_to_many() -> None:
    pace = BlockSizer(count=1, most=8)
    assert [high - low for low, high in pace.cuts(np.zeros(30, np.int64))] == [1, 2, 4, 8, 8, 7]


def test_one_sample_above_the_bound_stands_alone() -> None:
    sizes = np.array([10, 2_000_000, 10], np.int64)
    assert list(BlockSizer().cuts(sizes)) == [(0, 1), (1, 2), (2, 3)]


def test_a_stage_on_rows_gets_as_many_as_it_likes() -> None:
    pace = BlockSizer(count=1, most=4, least=32)
    assert [high - low for low, high in pace.cuts(np.zeros(70, np.int64))] == [32, 32, 6]


def test_blocks_that_take_long_become_smaller() -> None:
    pace = BlockSizer(count=64)
    pace.limit().measured(64, 0.5, 0)
    assert pace.most == 6
    assert pace.count == 6


def test_blocks_that_grow_large_become_smaller() -> None:
    pace = BlockSizer(count=64, large=16_000_000)
    pace.limit().measured(64, 0.0, 320_000_000)
    assert pace.most == 3
    pace.limit().measured(1, 0.0, 900_000_000)
    assert pace.most == 1


def test_cheap_blocks_may_grow_again_up_to_the_limit() -> None:
    pace = BlockSizer(count=1, most=1)
    limit = pace.limit()
    for _ in range(20):
        assert sum(1 for _ in pace.cuts(np.zeros(600, np.int64)))
        limit.measured(pace.count, 0.0001, 10)
    assert pace.most == 512


def test_blocks_of_middling_cost_stay_as_they_are() -> None:
    pace = BlockSizer(count=8, most=16)
    pace.limit().measured(8, 0.03, 0)
    assert (pace.count, pace.most) == (8, 16)


class Here:
    """An origin that answers with what it was asked."""

    def cursor(self, done: int, sub: int) -> Any:
        return (done, sub)

    def place(self, number: int) -> Place:
        return Place("shard", str(number))

    def slot(self, number: int) -> Slot:
        raise NotImplementedError

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        raise NotImplementedError


def block(items: str, owner: list[int], inputs: int, **more: Any) -> Block:
    return Block(list(items), np.zeros(len(items), np.uint64), Here(), inputs, np.array(owner, np.int64), **more)


def test_what_was_delivered_before_is_left_out() -> None:
    [got] = finish_level(iter([block("abcd", [0, 0, 0, 1], 2, base=2)]))
    assert got.items == ["c", "d"]
    assert [got.cursor(n) for n in range(3)] == [(0, 2), (1, 0), (2, 0)]


def test_the_parts_of_one_input_are_numbered_on() -> None:
    parts = [
        block("ab", [0, 1], 1, more=True),
        block("cd", [1, 1], 1, begin=1, more=True),
        block("e", [1], 3, begin=1),
    ]
    first, second, third = finish_level(iter(parts))
    assert [first.cursor(n) for n in (1, 2)] == [(1, 0), (1, 1)]
    assert [second.cursor(n) for n in (1, 2)] == [(1, 2), (1, 3)]
    assert [third.cursor(n) for n in (0, 1)] == [(1, 3), (3, 0)]


def test_what_was_delivered_before_may_reach_over_several_parts() -> None:
    parts = [
        block("ab", [0, 0], 0, base=3, more=True),
        block("cd", [0, 0], 0, base=3, more=True),
        block("ef", [0, 1], 2, base=3),
    ]
    got = list(finish_level(iter(parts)))
    assert [part.items for part in got] == [[], ["d"], ["e", "f"]]
    assert got[1].cursor(1) == (0, 4)
    assert got[2].cursor(1) == (1, 0)


def test_a_skip_is_counted_when_its_input_is_passed() -> None:
    noted = [Skipped(0, Place(None, None), "map", "a"), Skipped(1, Place(None, None), "map", "b")]
    parts = [block("ab", [0, 1], 1, more=True, skips=noted), block("c", [1], 2, begin=1)]
    first, second = finish_level(iter(parts))
    assert [skip.problem for skip in first.skips] == ["a"]
    assert [skip.problem for skip in second.skips] == ["b"]


def frames(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for number in range(100 + sample["x"]):
        yield {"x": sample["x"], "frame": number}


def restored(ds: Dataset, state: Any) -> Loader:
    loader = ds.loader()
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_state_within_a_large_flat_map_restores_the_rest(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.plan.stage.PART_ITEMS", 30)
    ds = numbers((2, 2)).flat_map(frames).filter(lambda s: s["frame"] % 3).map(dict, workers=2).on(engine)
    want = outputs(ds.epoch(0))
    loader = ds.loader()
    for done, _ in enumerate(loader, 1):
        if done % 29 == 0:
            assert outputs(restored(ds, loader.state_dict())) == want[done:]


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_size_function_that_fails_names_stage_and_sample(engine: str) -> None:
    ds = numbers((9,)).batched_by(lambda s: 1 / (s["x"] - 5), 2).on(engine)
    with pytest.raises(StageError, match=r"ZeroDivisionError.*batched_by.*key: 5"):
        list(ds)


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_size_that_is_no_number_fails(engine: str) -> None:
    with pytest.raises(StageError, match="TypeError"):
        list(numbers((9,)).batched_by(lambda s: None, 2).on(engine))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_sample_that_cannot_be_weighed_can_be_skipped(engine: str) -> None:
    ds = numbers((9,)).batched_by(lambda s: 1 // abs(s["x"] - 5), 2).on_error("skip").on(engine)
    loader = ds.loader()
    assert [x for batch in loader for x in batch["x"].tolist()] == [0, 1, 2, 3, 4, 6, 7, 8]
    assert [(skip.place.key, skip.stage) for skip in loader.skipped] == [("5", "batched_by")]


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_whole_batches_before_an_error_are_delivered(engine: str) -> None:
    got: list[Any] = []
    with pytest.raises(DataError, match="made to fail"):
        got.extend(batch["x"].tolist() for batch in numbers((20,), bad=[10]).batched(4).on(engine))
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("uneven", ["drop", "pad"])
@pytest.mark.parametrize("stages", ["plain", "batched", "batches shuffled"])
@pytest.mark.parametrize("engine", ["serial", "local"])
def test_ranks_that_must_be_equal_are_restored_at_every_item(uneven: Any, stages: str, engine: str) -> None:
    ds = numbers((5, 6)).map(dict).on(engine)
    batches = ds.batched(2, collate=list)
    ds = {"plain": ds, "batched": batches, "batches shuffled": batches.shuffle(2)}[stages]
    for rank in range(3):
        where: dict[str, Any] = {"rank": rank, "world": 3, "uneven": uneven}
        want = outputs(ds.loader(**where))
        loader = ds.loader(**where)
        run = iter(loader)
        for done in range(len(want) + 1):
            again = ds.loader(**where)
            again.load_state_dict(loader.state_dict())
            assert outputs(again) == want[done:], f"rank {rank} after {done}"
            next(run, None)
        loader.close()


def test_the_slowest_of_those_who_work_on_a_block_decides_how_large_it_is() -> None:
    pace = BlockSizer(count=64)
    slow, quick = pace.limit(), pace.limit()
    slow.measured(64, 0.5, 0)
    for _ in range(5):
        quick.measured(6, 0.0, 0)
    assert pace.most == 6


def test_an_error_that_is_kept_keeps_nothing_going() -> None:
    closed = []

    def looking() -> Iterator[Any]:
        try:
            yield from range(3)
        finally:
            closed.append(True)

    def failing(blocks: Iterator[Any]) -> Iterator[Any]:
        for _ in blocks:
            raise DataError("gone")
        yield

    first = looking()
    with pytest.raises(DataError, match="gone"):
        list(_ended(failing(first), first))
    assert closed
