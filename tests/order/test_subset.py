from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PlanError
from penstock.formats.tar import ShardWriter
from penstock.order.hashing import name_hash, name_hashes
from penstock.order.mixture import MixedOrder
from penstock.order.orders import (
    EXCLUDED,
    NOT_FOUND,
    ChainedOrder,
    Order,
    RepeatedOrder,
    ShardOrder,
    ShuffledOrder,
    SlicedOrder,
    ZippedOrder,
)
from penstock.order.subset import ExcludingOrder, SubsetOrder

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=8)
Sample = tuple[int, int, int]


def shards(counts: list[int], leaf: int = 0, epoch: int = 0) -> ShardOrder:
    names = name_hashes(_name(leaf, number) for number in range(len(counts)))
    return ShardOrder(names, np.array(counts, np.int64), leaf, 0, epoch)


def _name(leaf: int, number: int) -> str:
    return f"{leaf}/{number}.tar"


def everything(order: Order) -> list[Sample]:
    refs = order.at(np.arange(order.size, dtype=np.int64))
    return list(zip(refs.leaf.tolist(), refs.shard.tolist(), refs.index.tolist(), strict=True))


def find(order: Order, samples: list[Sample]) -> list[int]:
    leaf, index = (np.array([sample[n] for sample in samples], np.int64) for n in (0, 2))
    names = np.array([name_hash(_name(leaf, number)) for leaf, number, _ in samples], np.uint64)
    found: list[int] = order.find(leaf, names, index).tolist()
    return found


@st.composite
def fixed_orders(draw: st.DrawFn) -> Order:
    """Generate orders that are the same in every epoch."""
    leaves = iter(range(100))

    def grow(depth: int) -> Order:
        kind = draw(
            st.sampled_from(["shards", "union", "limit", "skip", "split", "without", "zip"][: 7 if depth else 1])
        )
        if kind == "shards":
            return shards(draw(COUNTS), next(leaves))
        inner = grow(depth - 1)
        if kind == "union":
            return ChainedOrder([inner, grow(depth - 1)])
        if kind == "limit":
            return SlicedOrder(inner, 0, draw(st.integers(0, 40)))
        if kind == "skip":
            return SlicedOrder(inner, draw(st.integers(0, 9)), None)
        if kind == "split":
            return SubsetOrder(inner, 0.4, 0, draw(st.booleans()))
        if kind == "zip":
            return ZippedOrder(inner, shards([200], next(leaves)), strict=False)
        excluded = draw(st.lists(st.integers(0, max(0, inner.size - 1)), max_size=9)) if inner.size else []
        return ExcludingOrder(inner, np.array(excluded, np.int64))

    return grow(draw(st.integers(0, 3)))


@given(fixed_orders())
def test_every_sample_is_found_at_its_position(order: Order) -> None:
    assert find(order, everything(order)) == list(range(order.size))


@given(COUNTS, st.data())
def test_excluded_samples_are_gone_and_the_others_keep_their_order(counts: list[int], data: st.DataObject) -> None:
    whole = everything(shards(counts))
    excluded = data.draw(st.lists(st.sampled_from(range(len(whole))), max_size=20)) if whole else []
    order = ExcludingOrder(shards(counts), np.array(excluded, np.int64))
    assert everything(order) == [sample for position, sample in enumerate(whole) if position not in excluded]
    bounds = order.spans().bounds.tolist()
    for number, (low, high) in enumerate(pairwise(bounds)):
        assert {shard for _, shard, _ in everything(order)[low:high]} <= {number}
    assert bounds[-1] == order.size == len(whole) - len(set(excluded))


def test_a_shuffle_after_an_exclusion_contains_the_remaining_samples() -> None:
    order = ShuffledOrder(ExcludingOrder(shards([9, 0, 20, 5]), np.array([0, 8, 9, 33])), 0, 0, window=6, shards=2)
    assert sorted(everything(order)) == [
        s for p, s in enumerate(everything(shards([9, 0, 20, 5]))) if p not in {0, 8, 9, 33}
    ]


def test_missing_samples_are_distinguished_from_excluded_ones() -> None:
    order = SlicedOrder(ExcludingOrder(shards([5, 5]), np.array([1])), 0, 6)
    wanted_samples = [(0, 0, 0), (0, 0, 1), (0, 1, 4), (0, 1, 5), (0, 7, 0), (1, 0, 0)]
    assert find(order, wanted_samples) == [0, EXCLUDED, EXCLUDED, NOT_FOUND, NOT_FOUND, NOT_FOUND]
    assert find(shards([]), [(0, 0, 0)]) == [NOT_FOUND]
    zipped = ZippedOrder(shards([4]), shards([9], 1), strict=False)
    assert find(zipped, [(0, 0, 3), (1, 0, 3), (1, 0, 4), (2, 0, 0)]) == [3, 3, EXCLUDED, NOT_FOUND]


def test_an_order_that_changes_with_the_epoch_refuses_to_find_samples() -> None:
    inner = shards([9])
    for order in (
        ShuffledOrder(inner, 0, 0, window=4),
        MixedOrder([inner], [1.0], "all", 0, 0),
        RepeatedOrder(lambda epoch: inner, 0, 2),
        SlicedOrder(ShuffledOrder(inner, 0, 0, window=4), 0, 5),
    ):
        with pytest.raises(PlanError, match=r"put exclude\(\) before"):
            find(order, [(0, 0, 0)])


def test_adding_a_folder_moves_no_sample_to_the_other_side(tmp_path: Path) -> None:
    for folder in ("a", "b/c"):
        with ShardWriter(tmp_path / folder, max_samples=25) as writer:
            for number in range(100):
                writer.write({"__key__": f"{folder}/{number}", "txt": b""})
    one = ps.read_tar(str(tmp_path / "a"))
    other = ps.read_tar(str(tmp_path / "b/c"))
    both = ps.read_tar([str(tmp_path / "a"), str(tmp_path / "b/c")])
    expected = {sample["__key__"] for sample in one.train_test_split(0.2, seed=1)[1]}
    assert len(expected) == 20
    for larger in (both, one.union(other), other.union(one)):
        found = {sample["__key__"] for sample in larger.train_test_split(0.2, seed=1)[1]}
        assert {key for key in found if key.startswith("a/")} == expected
        assert len(found) == 40
