from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import PlanError
from penstock.formats.tables.columns import ArrowColumns
from penstock.order import I64
from penstock.plan import (
    Batched,
    BatchedBy,
    Block,
    Context,
    Fields,
    LateShuffle,
    Lineage,
    Place,
    Scope,
    Skipped,
    Slot,
    Stage,
    StreamLimit,
    StreamSkip,
    Unbatched,
    pad,
)


@dataclass
class FakeCursor:
    position: int

    def hash_words(self) -> list[int]:
        return [self.position]


@dataclass
class FakeOrigin:
    """An origin whose inputs begin at a position of the stream."""

    start: int = 0

    def cursor(self, done: int, sub: int) -> Any:
        return FakeCursor(self.start + done)

    def place(self, number: int) -> Place:
        return Place("s.tar", str(self.start + number))

    def slot(self, number: int) -> Slot:
        raise NotImplementedError

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        raise NotImplementedError


def _block(items: Any, start: int = 0) -> Block:
    return Block(items, np.arange(len(items), dtype=np.uint64), Lineage(FakeOrigin(start), len(items)))


@pytest.mark.parametrize(
    ("stage", "name", "description"),
    [
        (Unbatched(), "unbatched", "unbatched()"),
        (Batched(4), "batched", "batched(4)"),
        (Batched(4, True, len), "batched", "batched(4, drop_last=True, collate=len)"),
        (BatchedBy(len, 10), "batched_by", "batched_by(len, 10)"),
        (LateShuffle(8), "shuffle", "shuffle(window=8)"),
        (StreamLimit(3), "limit", "limit(3)"),
        (StreamSkip(3), "skip", "skip(3)"),
    ],
)
def test_a_stage_is_described_as_the_call_that_created_it(stage: Stage, name: str, description: str) -> None:
    assert (stage.name, stage.describe()) == (name, description)


@pytest.mark.parametrize("stage", [Unbatched(), Batched(2), LateShuffle(2), StreamLimit(2), StreamSkip(2)])
def test_group_stages_need_the_fields_they_pass_on(stage: Stage) -> None:
    wanted = Fields(frozenset({"x"}))
    assert stage.needs(wanted) == wanted


def test_a_group_becomes_one_batch() -> None:
    out = Batched(3).run(_block([{"x": 1}, {"x": 2}, {"x": 3}]), Context(0))
    assert [batch["x"].tolist() for batch in out.items] == [[1, 2, 3]]
    assert out.place(0).key == "0"


def test_the_key_of_a_batch_is_derived_from_its_first_sample() -> None:
    first, same, other = (
        Batched(2).run(_block([1, 2, 3]).keep(chosen, [0] * len(chosen)), Context(0)).keys.tolist()
        for chosen in ([0, 1], [0, 2], [1, 2])
    )
    assert first == same != other
    assert first != [0]


def test_drop_last_drops_an_incomplete_batch_only() -> None:
    stage = Batched(3, drop_last=True)
    assert len(stage.run(_block([1, 2]), Context(0)).items) == 0
    assert len(stage.run(_block([1, 2, 3]), Context(0)).items) == 1


def test_the_number_of_batches_is_known_in_advance() -> None:
    assert [Batched(3).length(items) for items in (0, 3, 4)] == [0, 1, 2]
    assert [Batched(3, drop_last=True).length(items) for items in (0, 3, 4)] == [0, 1, 1]
    assert BatchedBy(len, 3).length(4) is None


def test_a_users_collate_function_gets_a_list_of_samples() -> None:
    batch = pa.RecordBatch.from_pydict({"x": [1, 2]})
    for items in ([{"x": 1}, {"x": 2}], ArrowColumns([batch], np.arange(2))):
        out = Batched(2, collate=lambda samples: samples).run(_block(items), Context(0))
        assert out.items == [[{"x": 1}, {"x": 2}]]


def test_groups_are_measured_by_count_or_by_size() -> None:
    assert (Batched(3).capacity, Batched(3).weigh("abc"), Batched(3).weighs) == (3, 1, False)
    stage = BatchedBy(len, 10)
    assert (stage.capacity, stage.weigh("abc"), stage.weighs) == (10, 3, True)
    out = BatchedBy(len, 10, collate=pad()).run(_block([[1, 2], [3]]), Context(0))
    assert out.items[0].tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize("max_size", [0, -1, True, "10", float("nan")])
def test_a_capacity_that_is_not_positive_is_refused(max_size: Any) -> None:
    with pytest.raises(PlanError, match=r"max_size=.*above 0"):
        BatchedBy(len, max_size)


@pytest.mark.parametrize(
    ("kind", "arguments"), [(Batched, (0,)), (Batched, (2, False, 3)), (BatchedBy, (3, 1)), (BatchedBy, (len, 1, 3))]
)
def test_invalid_arguments_are_refused(kind: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(PlanError):
        kind(*arguments)


def test_unbatched_splits_a_batch_into_its_samples() -> None:
    out = Unbatched().run(_block([{"x": [1, 2]}, {"x": [3]}]), Context(0))
    assert out.items == [{"x": 1}, {"x": 2}, {"x": 3}]
    assert [out.place(item).key for item in range(3)] == ["0", "0", "1"]


def test_a_late_shuffle_depends_on_seed_epoch_stage_and_the_start_of_its_window() -> None:
    items = list(range(50))

    def order(start: int = 0, stage_number: int = 1, seed: int = 2, epoch: int = 3) -> list[int]:
        out = LateShuffle(50).run(_block(items, start), Context(stage_number, seed, epoch))
        assert [out.lineage.input_of(item) for item in range(50)] == list(out.items)
        return list(out.items)

    assert sorted(order()) == items
    assert order() == order()
    orders = [order(), order(start=7), order(stage_number=2), order(seed=3), order(epoch=4)]
    assert len({tuple(each) for each in orders}) == 5


def test_a_late_shuffle_keeps_the_count() -> None:
    assert (LateShuffle(5).keeps_count, LateShuffle(5).length(7), LateShuffle(5).capacity) == (True, 7, 5)


def test_a_stream_limit_passes_the_first_items_only() -> None:
    stage = StreamLimit(5)
    assert stage.scope is Scope.ALL
    assert [list(stage.pass_on(_block([1, 2, 3]), seen).items) for seen in (0, 3, 4, 9)] == [[1, 2, 3], [1, 2], [1], []]
    assert [stage.finished(seen) for seen in (4, 5, 6)] == [False, True, True]
    assert [stage.length(items) for items in (3, 9)] == [3, 5]


@pytest.mark.parametrize("n", [2, 3])
def test_a_stream_limit_reaches_nothing_after_its_last_item(n: int) -> None:
    block = _block([1, 2, 3])
    skips = [Skipped(number, Place("s.tar", str(number)), "read", "no") for number in (0, n - 1)]
    block.lineage = replace(block.lineage.with_skips(*skips), error=ValueError("the item after them failed"))
    passed = StreamLimit(n).pass_on(block, 0)
    assert (list(passed.items), passed.lineage.skips, passed.lineage.error) == ([1, 2, 3][:n], (skips[0],), None)
    assert StreamLimit(n + 2).pass_on(block, 0).lineage == block.lineage


def test_a_stream_skip_drops_the_first_items_only() -> None:
    stage = StreamSkip(5)
    assert [list(stage.pass_on(_block([1, 2, 3]), seen).items) for seen in (0, 3, 4, 9)] == [[], [3], [2, 3], [1, 2, 3]]
    assert not stage.finished(100)
    assert [stage.length(items) for items in (3, 9)] == [0, 4]
