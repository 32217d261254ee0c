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
from penstock.order.pieces import Piece, V
from penstock.order.subset import SubsetOrder
from penstock.order.uncounted import UncountedOrder, to_known

Sample = tuple[int, int, int]


@st.composite
def twins(draw: st.DrawFn) -> tuple[UncountedOrder, ShardOrder | ShuffledOrder]:
    """The same order without and with counts."""
    counts = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12))
    window, per, shuffle = draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.booleans())
    names = name_hashes(f"{number}.tar" for number in range(len(counts)))
    lazy = UncountedOrder(names, counts.__getitem__, 3, 1, 2, window=window, shards=per, shuffle=shuffle)
    known = ShardOrder(names, np.array(counts, np.int64), 3, 1, 2)
    return lazy, ShuffledOrder(known, 1, 2, window=window, shards=per) if shuffle else known


def samples(refs: Refs) -> list[Sample]:
    return list(zip(refs.shard.tolist(), refs.index.tolist(), refs.key.tolist(), strict=True))


def walked(order: Order, pieces: list[Piece]) -> list[Sample]:
    return [sample for piece in pieces for _, refs, _ in order.walk(piece) for sample in samples(refs)]


@given(twins())
def test_the_order_is_the_one_with_counts(pair: tuple[UncountedOrder, Order]) -> None:
    lazy, known = pair
    assert walked(lazy, lazy.whole()) == walked(known, known.whole())


@given(twins())
def test_positions_of_a_walk_can_be_asked_again(pair: tuple[UncountedOrder, Order]) -> None:
    lazy, _ = pair
    chunks = [chunk for piece in lazy.whole() for chunk in lazy.walk(piece)]
    for p, refs, after in chunks:
        assert samples(lazy.at(p[::-1])) == samples(refs)[::-1]
        assert after > int(p[-1])
    for (_, _, after), (p, _, _) in pairwise(chunks):
        assert after // V <= int(p[0]) // V


@given(twins(), st.integers(1, 6), st.sampled_from(["range", "step"]))
def test_cuts_fall_between_groups_and_cover(pair: tuple[UncountedOrder, Order], world: int, how: str) -> None:
    lazy, known = pair
    if world > lazy.group_count:
        with pytest.raises(PlanError, match="penstock index"):
            lazy.cut(lazy.whole(), 0, world, how)
        return
    shares = [walked(lazy, lazy.cut(lazy.whole(), rank, world, how)) for rank in range(world)]
    assert Counter(s for share in shares for s in share) == Counter(walked(known, known.whole()))
    touched = [{p // V for c in lazy.cut(lazy.whole(), r, world, how) for p in _starts(lazy, c)} for r in range(world)]
    assert sum(map(len, touched)) == len(set().union(*touched))


def _starts(lazy: UncountedOrder, piece: Piece) -> list[int]:
    return [int(p[0]) for p, _, _ in lazy.walk(piece)]


def test_a_step_cut_takes_every_world_th_group() -> None:
    lazy = UncountedOrder(name_hashes("abcdefg"), lambda _: 2, 0, 0, 0, window=9, shards=1, shuffle=False)
    assert lazy.cut(lazy.whole(), 1, 3, "step") == [[V, 5 * V, 3 * V, 0]]
    assert [s for s, _, _ in walked(lazy, [[V + 1, 5 * V, 3 * V, 0]])] == [1, 4, 4]


def test_shards_are_counted_when_their_group_is_opened() -> None:
    asked: list[int] = []

    def count(shard: int) -> int:
        asked.append(shard)
        return 5

    lazy = UncountedOrder(name_hashes("abcdefgh"), count, 0, 0, 0, window=9, shards=2, shuffle=True)
    assert asked == []
    next(lazy.walk(lazy.whole()[0]))
    assert sorted(asked) == sorted(lazy.shards_of(0))
    walked(lazy, lazy.whole())
    assert sorted(asked) == list(range(8))


@given(twins(), st.data())
def test_what_is_left_can_be_taken_up_with_counts(
    pair: tuple[UncountedOrder, ShardOrder | ShuffledOrder], data: st.DataObject
) -> None:
    lazy, known = pair
    world = data.draw(st.integers(1, lazy.group_count))
    how = data.draw(st.sampled_from(["range", "step"]))
    for rank in range(world):
        mine = lazy.cut(lazy.whole(), rank, world, how)
        assert walked(known, to_known(mine, known.groups())) == walked(lazy, mine)
        for piece in mine:
            positions = [q for p, _, _ in lazy.walk(piece) for q in p.tolist()]
            if positions:
                start = data.draw(st.sampled_from(positions))
                rest = [[start, *piece[1:3], 2]]
                assert walked(known, to_known(rest, known.groups())) == walked(lazy, rest)
                assert to_known(rest, known.groups())[0][3] == 2


def test_a_known_run_is_one_piece() -> None:
    groups = np.array([0, 10, 10, 25], np.int64)
    assert to_known([[4, 3 * V, 1, 0]], groups) == [[4, 25, 1, 0]]
    assert to_known([[4, 3 * V, 2 * V, 1]], groups) == [[4, 25, 1, 1]]
    assert to_known([[V, 2 * V, 1, 0]], groups) == []


@pytest.mark.parametrize(
    "wrap",
    [
        lambda lazy: SlicedOrder(lazy, 0, 3),
        lambda lazy: ChainedOrder([lazy]),
        lambda lazy: ZippedOrder(lazy, lazy, True),
        lambda lazy: RepeatedOrder(lambda _: lazy, 0, 2),
        lambda lazy: ShuffledOrder(lazy, 0, 0, window=None),
        lambda lazy: MixedOrder([lazy], [1.0], "all", 0, 0),
        lambda lazy: SubsetOrder(lazy, 0.5, 0, True),
        lambda lazy: lazy.spans(),
    ],
)
def test_what_needs_counts_says_how_to_get_them(wrap: object) -> None:
    lazy = UncountedOrder(name_hashes("ab"), lambda _: 2, 0, 0, 0, window=9, shards=1, shuffle=False)
    assert lazy.size == UNKNOWN
    assert callable(wrap)
    with pytest.raises(PlanError, match="penstock index"):
        wrap(lazy)


def test_merged_groups_are_few_pieces() -> None:
    lazy = UncountedOrder(name_hashes(map(str, range(400))), lambda _: 2, 0, 0, 0, window=9, shards=2, shuffle=True)
    shares = [piece for rank in range(8) for piece in lazy.cut(lazy.whole(), rank, 8, "step")]
    assert lazy.merge(shares, 8) == lazy.whole()
    begun = [[start + 3, stop, step, 0] for start, stop, step, _ in shares]
    assert len(lazy.merge(begun, 8)) == 8


def test_a_merge_keeps_groups_that_are_held_in_part() -> None:
    lazy = UncountedOrder(name_hashes(map(str, range(9))), lambda _: 6, 0, 0, 0, window=9, shards=1, shuffle=False)
    pieces = [
        [2, 2 * V + 4, 1, 0],
        [2 * V + 4, 2 * V + 5, 1, 1],
        [3 * V + 1, 7 * V + 3, 2 * V, 0],
        [8 * V, 9 * V, 1, 0],
    ]
    merged = lazy.merge(pieces, 2)
    assert Counter(walked(lazy, merged)) == Counter(walked(lazy, pieces))
    assert [piece[3] for piece in merged if piece[3]] == [1]
