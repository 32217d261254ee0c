"""When shards are used is derived from the orders of this epoch and the next one, with and without counts."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.engines import Program, shard_uses
from penstock.engines.upcoming import _two_epochs
from penstock.plan import Cut
from penstock.testing import numbers

COUNTS = (5, 5, 5, 5)


def _uses(ds: Dataset, epoch: int = 0, cut: Cut | None = None, leaf: int = 0) -> tuple[float, list[float], list[float]]:
    program = Program(ds.plan)
    order = program.order(epoch)
    length, first, last = shard_uses(program, leaf, order, program.start(order, cut).left)
    return length, first.tolist(), last.tolist()


def test_shards_in_one_order_are_used_one_after_another() -> None:
    assert _uses(numbers(COUNTS)) == (20.0, [0.0, 5.0, 10.0, 15.0], [4.0, 9.0, 14.0, 19.0])


def test_a_rank_uses_its_own_part() -> None:
    inf = float("inf")
    assert _uses(numbers(COUNTS), cut=Cut(1, 2)) == (10.0, [inf, inf, 0.0, 5.0], [-inf, -inf, 4.0, 9.0])


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_shuffle_uses_shards_as_the_samples_come(epoch: int) -> None:
    ds = numbers(COUNTS).shuffle(4, shards=2)
    shards = [sample["shard"] for sample in ds.epoch(epoch)]
    _, first, last = _uses(ds, epoch)
    assert first == [shards.index(shard) for shard in range(4)]
    assert last == [len(shards) - 1 - shards[::-1].index(shard) for shard in range(4)]


def test_without_counts_groups_of_shards_are_counted() -> None:
    assert _uses(numbers(COUNTS, hidden=True)) == (4.0, [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0])


def test_both_operands_of_a_zip_are_used() -> None:
    ds = numbers(COUNTS).zip(numbers((10, 10), name="b").select("x"), suffix="_b")
    assert _uses(ds, leaf=1)[1] == [0.0, 10.0]


def test_an_order_without_an_end_is_looked_at_for_a_while() -> None:
    length, first, _ = _uses(numbers(COUNTS).repeat())
    assert np.isfinite(length)
    assert np.isfinite(first).any()


def test_the_next_epoch_follows_this_one() -> None:
    program = Program(numbers(COUNTS).shuffle(all=True).plan)
    order = program.order(0)
    found = _two_epochs(program, 0, order, 0, program.start(order, None), None)
    assert found is not None
    following = shard_uses(program, 0, program.order(1), program.start(program.order(1), None).left)[1]
    assert found[2].tolist() == (20 + following).tolist()
