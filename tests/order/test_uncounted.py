from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.order.hashing import name_hashes
from penstock.order.mixture import MixedOrder
from penstock.order.orders import (
    UNKNOWN,
    ChainedOrder,
    Order,
    Refs,
    RepeatedOrder,
    ShardOrder,
    ShuffledOrder,
    SlicedOrder,
    ZippedOrder,
)
from penstock.order.pieces import GROUP_STRIDE, Piece
from penstock.order.subset import SubsetOrder
from penstock.order.uncounted import UncountedOrder, to_counted

Sample = tuple[int, int, int]


@st.composite
def order_pairs(draw: st.DrawFn) -> tuple[UncountedOrder, ShardOrder | ShuffledOrder]:
    """Generate the same order without and with counts."""
    counts = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12))
    window, shards_per_group, shuffle = draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.booleans())
    names = name_hashes(f"{number}.tar" for number in range(len(counts)))
    uncounted = UncountedOrder(
        names, counts.__getitem__, 3, 1, 2, window=window, shards=shards_per_group, shuffle=shuffle
    )
    counted = ShardOrder(names, np.array(counts, np.int64), 3, 1, 2)
    return uncounted, ShuffledOrder(counted, 1, 2, window=window, shards=shards_per_group) if shuffle else counted


def samples(refs: Refs) -> list[Sample]:
    return list(zip(refs.shard.tolist(), refs.index.tolist(), refs.key.tolist(), strict=True))


def walked(order: Order, pieces: list[Piece]) -> list[Sample]:
    return [sample for piece in pieces for _, refs, _ in order.walk(piece) for sample in samples(refs)]


@given(order_pairs())
def test_the_order_is_the_same_as_with_counts(orders: tuple[UncountedOrder, Order]) -> None:
    uncounted, counted = orders
    assert walked(uncounted, uncounted.whole()) == walked(counted, counted.whole())


@given(order_pairs())
def test_positions_of_a_walk_can_be_looked_up_again(orders: tuple[UncountedOrder, Order]) -> None:
    uncounted, _ = orders
    chunks = [chunk for piece in uncounted.whole() for chunk in uncounted.walk(piece)]
    for p, refs, after in chunks:
        assert samples(uncounted.at(p[::-1])) == samples(refs)[::-1]
        assert after > int(p[-1])
    for (_, _, after), (p, _, _) in pairwise(chunks):
        assert after // GROUP_STRIDE <= int(p[0]) // GROUP_STRIDE


@given(order_pairs(), st.integers(1, 6), st.sampled_from(["range", "step"]))
def test_cuts_fall_between_groups_and_cover_everything(
    orders: tuple[UncountedOrder, Order], world: int, kind: str
) -> None:
    uncounted, counted = orders
    if world > uncounted.group_count:
        with pytest.raises(PlanError, match="penstock index"):
            uncounted.cut(uncounted.whole(), 0, world, kind)
        return
    shares = [walked(uncounted, uncounted.cut(uncounted.whole(), rank, world, kind)) for rank in range(world)]
    assert Counter(s for share in shares for s in share) == Counter(walked(counted, counted.whole()))
    touched = [
        {
            p // GROUP_STRIDE
            for c in uncounted.cut(uncounted.whole(), r, world, kind)
            for p in _chunk_starts(uncounted, c)
        }
        for r in range(world)
    ]
    assert sum(map(len, touched)) == len(set().union(*touched))


def _chunk_starts(uncounted: UncountedOrder, piece: Piece) -> list[int]:
    return [int(p[0]) for p, _, _ in uncounted.walk(piece)]


def test_a_step_cut_takes_every_world_th_group() -> None:
    uncounted = UncountedOrder(name_hashes("abcdefg"), lambda _: 2, 0, 0, 0, window=9, shards=1, shuffle=False)
    assert uncounted.cut(uncounted.whole(), 1, 3, "step") == [[GROUP_STRIDE, 5 * GROUP_STRIDE, 3 * GROUP_STRIDE, 0]]
    assert [s for s, _, _ in walked(uncounted, [[GROUP_STRIDE + 1, 5 * GROUP_STRIDE, 3 * GROUP_STRIDE, 0]])] == [
        1,
        4,
        4,
    ]


def test_shards_are_counted_when_their_group_is_opened() -> None:
    counted: list[int] = []

    def count(shard: int) -> int:
        counted.append(shard)
        return 5

    uncounted = UncountedOrder(name_hashes("abcdefgh"), count, 0, 0, 0, window=9, shards=2, shuffle=True)
    assert counted == []
    next(uncounted.walk(uncounted.whole()[0]))
    assert sorted(counted) == sorted(uncounted.shards_of(0))
    walked(uncounted, uncounted.whole())
    assert sorted(counted) == list(range(8))


@given(order_pairs(), st.data())
def test_remaining_pieces_can_be_resumed_with_counts(
    orders: tuple[UncountedOrder, ShardOrder | ShuffledOrder], data: st.DataObject
) -> None:
    uncounted, counted = orders
    world = data.draw(st.integers(1, uncounted.group_count))
    kind = data.draw(st.sampled_from(["range", "step"]))
    for rank in range(world):
        pieces = uncounted.cut(uncounted.whole(), rank, world, kind)
        assert walked(counted, to_counted(pieces, counted.groups())) == walked(uncounted, pieces)
        for piece in pieces:
            positions = [q for p, _, _ in uncounted.walk(piece) for q in p.tolist()]
            if positions:
                start = data.draw(st.sampled_from(positions))
                rest = [[start, *piece[1:3], 2]]
                assert walked(counted, to_counted(rest, counted.groups())) == walked(uncounted, rest)
                assert to_counted(rest, counted.groups())[0][3] == 2


def test_a_contiguous_run_becomes_one_counted_piece() -> None:
    groups = np.array([0, 10, 10, 25], np.int64)
    assert to_counted([[4, 3 * GROUP_STRIDE, 1, 0]], groups) == [[4, 25, 1, 0]]
    assert to_counted([[4, 3 * GROUP_STRIDE, 2 * GROUP_STRIDE, 1]], groups) == [[4, 25, 1, 1]]
    assert to_counted([[GROUP_STRIDE, 2 * GROUP_STRIDE, 1, 0]], groups) == []


@pytest.mark.parametrize(
    "wrap",
    [
        lambda uncounted: SlicedOrder(uncounted, 0, 3),
        lambda uncounted: ChainedOrder([uncounted]),
        lambda uncounted: ZippedOrder(uncounted, uncounted, True),
        lambda uncounted: RepeatedOrder(lambda _: uncounted, 0, 2),
        lambda uncounted: ShuffledOrder(uncounted, 0, 0, window=None),
        lambda uncounted: MixedOrder([uncounted], [1.0], "all", 0, 0),
        lambda uncounted: SubsetOrder(uncounted, 0.5, 0, True),
        lambda uncounted: uncounted.spans(),
    ],
)
def test_an_order_that_needs_counts_names_penstock_index(wrap: object) -> None:
    uncounted = UncountedOrder(name_hashes("ab"), lambda _: 2, 0, 0, 0, window=9, shards=1, shuffle=False)
    assert uncounted.size == UNKNOWN
    assert callable(wrap)
    with pytest.raises(PlanError, match="penstock index"):
        wrap(uncounted)


def test_merged_groups_are_few_pieces() -> None:
    uncounted = UncountedOrder(
        name_hashes(map(str, range(400))), lambda _: 2, 0, 0, 0, window=9, shards=2, shuffle=True
    )
    shares = [piece for rank in range(8) for piece in uncounted.cut(uncounted.whole(), rank, 8, "step")]
    assert uncounted.merge(shares, 8) == uncounted.whole()
    partly_delivered = [[start + 3, stop, step, 0] for start, stop, step, _ in shares]
    assert len(uncounted.merge(partly_delivered, 8)) == 8


def test_a_merge_keeps_partly_covered_groups() -> None:
    uncounted = UncountedOrder(name_hashes(map(str, range(9))), lambda _: 6, 0, 0, 0, window=9, shards=1, shuffle=False)
    pieces = [
        [2, 2 * GROUP_STRIDE + 4, 1, 0],
        [2 * GROUP_STRIDE + 4, 2 * GROUP_STRIDE + 5, 1, 1],
        [3 * GROUP_STRIDE + 1, 7 * GROUP_STRIDE + 3, 2 * GROUP_STRIDE, 0],
        [8 * GROUP_STRIDE, 9 * GROUP_STRIDE, 1, 0],
    ]
    merged = uncounted.merge(pieces, 2)
    assert Counter(walked(uncounted, merged)) == Counter(walked(uncounted, pieces))
    assert [piece[3] for piece in merged if piece[3]] == [1]


def test_a_shard_that_grows_is_walked_as_far_as_it_is_known() -> None:
    counts = [5, 0, 7, 1]
    asked: list[tuple[int, int]] = []
    expected: list[list[int]] = []

    def grow(shard: int, beyond: int) -> tuple[int, bool]:
        asked.append((shard, beyond))
        known = min(counts[shard], beyond + 2)  # two more at a time; the end is found only when nothing more comes
        return known, known <= beyond

    def count(shard: int) -> int:
        raise AssertionError("no shard is counted as a whole")

    order = UncountedOrder(
        name_hashes("abcd"), count, 0, 0, 0, grow=grow, expect=lambda shards, whole: expected.append(list(shards))
    )
    steps = list(order.walk(order.whole()[0]))
    pairs = [pair for _, refs, _ in steps for pair in zip(refs.shard.tolist(), refs.index.tolist(), strict=True)]
    assert pairs == [(shard, index) for shard, n in enumerate(counts) for index in range(n)]
    assert max(len(positions) for positions, _, _ in steps) == 2
    assert expected[0] == [0, 1, 2, 3]
    for number, (_, _, after) in enumerate(steps):
        rest = walked(order, [[after, order.whole()[0][1], 1, 0]])
        assert rest == [sample for _, refs, _ in steps[number + 1 :] for sample in samples(refs)]
