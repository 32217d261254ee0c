from __future__ import annotations

import statistics
import threading
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.order.hashing import fold, name_hash, name_hashes
from penstock.order.mixture import MixedOrder
from penstock.order.orders import (
    ChainedOrder,
    Order,
    Refs,
    RepeatedOrder,
    ShardOrder,
    ShuffledOrder,
    SlicedOrder,
    ZippedOrder,
)
from penstock.order.pieces import ENDLESS, cut
from penstock.order.subset import SubsetOrder

Sample = tuple[int, int, int]


def shards(counts: list[int], leaf: int = 0, seed: int = 0, epoch: int = 0) -> ShardOrder:
    names = name_hashes(f"{leaf}/{number:04}.tar" for number in range(len(counts)))
    return ShardOrder(names, np.array(counts, np.int64), leaf, seed, epoch)


def shuffled(inner: Order, seed: int = 0, epoch: int = 0, window: int | None = 10, per: int = 3) -> ShuffledOrder:
    return ShuffledOrder(inner, seed, epoch, window=window, shards=per)


def samples(refs: Refs) -> list[Sample]:
    return list(zip(refs.leaf.tolist(), refs.shard.tolist(), refs.index.tolist(), strict=True))


def everything(order: Order) -> list[Sample]:
    return samples(order.at(np.arange(order.size, dtype=np.int64)))


COUNTS = st.lists(st.integers(0, 12), max_size=8)


@st.composite
def trees(draw: st.DrawFn, epoch: int = 1) -> tuple[Order, Counter[Sample]]:
    """Generate a tree of orders, with the samples that it must contain."""
    leaves = iter(range(100))

    def grow(depth: int) -> tuple[Order, Counter[Sample]]:
        kinds = ["shards"] if depth == 0 else ["shards", "shuffle", "all", "union", "mix", "zip", "split", "repeat"]
        kind = draw(st.sampled_from(kinds))
        if kind == "shards":
            counts, leaf = draw(COUNTS), next(leaves)
            expected = Counter((leaf, s, i) for s, count in enumerate(counts) for i in range(count))
            return shards(counts, leaf, 0, epoch), expected
        if kind == "split":
            counts, leaf = draw(COUNTS), next(leaves)
            parts = [SubsetOrder(shards(counts, leaf, 0, epoch), 0.3, 0, test) for test in (True, False)]
            expected = Counter((leaf, s, i) for s, count in enumerate(counts) for i in range(count))
            return ChainedOrder(parts), expected
        inner, expected = grow(depth - 1)
        if kind == "shuffle":
            window, shards_per_group = draw(st.integers(1, 30)), draw(st.integers(1, 5))
            return ShuffledOrder(inner, 0, epoch, window=window, shards=shards_per_group), expected
        if kind == "all":
            return ShuffledOrder(inner, 0, epoch, window=None, all=True), expected
        if kind == "repeat":
            times = draw(st.integers(0, 3))
            return RepeatedOrder(lambda _: inner, epoch, times), Counter(
                {s: n * times for s, n in expected.items() if times}
            )
        other, other_expected = grow(depth - 1)
        if kind == "union":
            return ChainedOrder([inner, other]), expected + other_expected
        if kind == "mix":
            return MixedOrder([inner, other], [0.7, 0.3], "all", 0, epoch), expected + other_expected
        short = SlicedOrder(inner, 0, other.size)
        return ZippedOrder(short, other, strict=False), Counter(everything(short)[: other.size])

    return grow(draw(st.integers(0, 3)))


@given(trees())
def test_any_tree_of_orders_contains_every_sample_as_often_as_expected(
    tree: tuple[Order, Counter[Sample]],
) -> None:
    order, expected = tree
    assert order.size == sum(expected.values())
    assert Counter(everything(order)) == expected


@given(trees(), st.data())
def test_any_position_can_be_looked_up_alone(tree: tuple[Order, Counter[Sample]], data: st.DataObject) -> None:
    order, _ = tree
    whole = order.at(np.arange(order.size, dtype=np.int64))
    positions = data.draw(st.lists(st.integers(0, order.size - 1), max_size=5)) if order.size else []
    some = order.at(np.array(positions, np.int64))
    assert samples(some) == [samples(whole)[p] for p in positions]
    assert some.key.tolist() == [whole.key.tolist()[p] for p in positions]


@given(trees())
def test_spans_cover_the_order(tree: tuple[Order, Counter[Sample]]) -> None:
    order, _ = tree
    spans = order.spans()
    assert len(spans.bounds) == len(spans.keys) + 1
    assert (int(spans.bounds[0]), int(spans.bounds[-1])) == (0, order.size)
    assert (np.diff(spans.bounds) >= 0).all()


@given(trees(), st.integers(1, 9), st.sampled_from(["range", "step"]))
def test_cuts_of_any_order_are_disjoint_and_cover_everything(
    tree: tuple[Order, Counter[Sample]], world: int, kind: str
) -> None:
    order, expected = tree
    found: Counter[Sample] = Counter()
    for rank in range(world):
        for piece in order.cut(order.whole(), rank, world, kind):
            for _, refs, _ in order.walk(piece):
                found.update(samples(refs))
    assert found == expected


def test_a_walk_yields_a_piece_in_growing_chunks() -> None:
    order = shards([50_000])
    chunks = list(order.walk([3, 49_000, 2, 0]))
    assert [len(p) for p, _, _ in chunks[:14]] == [1, *(1 << i for i in range(13))]
    assert np.concatenate([p for p, _, _ in chunks]).tolist() == list(range(3, 49_000, 2))
    assert all(int(p[-1]) + 2 == after for p, _, after in chunks)
    assert [samples(refs) for _, refs, _ in chunks] == [samples(order.at(p)) for p, _, _ in chunks]


def test_whole_is_one_piece_or_none() -> None:
    assert shards([3, 4]).whole() == [[0, 7, 1, 0]]
    assert shards([0]).whole() == []


def test_unshuffled_shards_are_read_front_to_back() -> None:
    assert everything(shards([2, 0, 1])) == [(0, 0, 0), (0, 0, 1), (0, 2, 0)]


def test_the_key_of_a_sample_is_the_hash_of_its_identity() -> None:
    refs = shards([2, 3], leaf=4, seed=5, epoch=6).at(np.array([3]))
    assert refs.key.tolist() == [fold(5, 6, 4, name_hash("4/0001.tar"), 1)]


def test_the_windowed_shuffle_never_changes() -> None:
    order = shuffled(shards([4, 5, 0, 6, 3], seed=7, epoch=2), 7, 2, window=5, per=2)
    assert [(s, i) for _, s, i in everything(order)] == [
        (3, 0),
        (3, 1),
        (1, 0),
        (3, 2),
        (1, 1),
        (3, 3),
        (1, 2),
        (3, 5),
        (1, 4),
        (3, 4),
        (1, 3),
        (0, 0),
        (4, 0),
        (0, 1),
        (4, 1),
        (0, 3),
        (4, 2),
        (0, 2),
    ]


def test_the_shuffle_of_everything_never_changes() -> None:
    order = ShuffledOrder(shards([3000, 3000]), 7, 2, window=None, all=True)
    assert [(s, i) for _, s, i in everything(order)[:6]] == [
        (0, 764),
        (1, 2520),
        (1, 84),
        (1, 1726),
        (0, 39),
        (0, 787),
    ]


def test_epochs_and_seeds_have_different_but_reproducible_orders() -> None:
    orders = {(s, e): tuple(everything(shuffled(shards([9] * 9), s, e))) for s in range(3) for e in range(3)}
    assert len(set(orders.values())) == 9
    assert orders[1, 2] == tuple(everything(shuffled(shards([9] * 9), 1, 2)))


def test_the_order_of_shards_does_not_depend_on_counts() -> None:
    def visits(counts: list[int]) -> list[int]:
        return list(dict.fromkeys(s for _, s, _ in everything(shuffled(shards(counts), window=1, per=1))))

    assert visits([3] * 8) == visits([5, 1, 2, 9, 4, 4, 4, 4])


def test_a_shuffle_reads_its_shards_front_to_back() -> None:
    """No shard is ever ahead of another one of its group by more than a window's slice."""
    order = ShuffledOrder(shards([1000] * 6), 0, 0, window=300, shards=3)
    for group in range(2):
        found = everything(order)[group * 3000 : (group + 1) * 3000]
        assert len({s for _, s, _ in found}) == 3
        for at in range(0, 3000, 300):
            assert {i // 100 for _, _, i in found[at : at + 300]} == {at // 300}


def test_groups_returns_where_the_groups_begin() -> None:
    assert shuffled(shards([2, 2, 2, 2, 2]), per=2).groups().tolist() == [0, 4, 8, 10]
    assert shards([2, 0, 3]).groups().tolist() == [0, 2, 2, 5]
    assert ShuffledOrder(shards([2, 3]), 0, 0, window=None, all=True).groups().tolist() == [0, 5]


@pytest.mark.parametrize(("window", "per"), [(0, 1), (1, 0), (-5, 3)])
def test_a_shuffle_with_an_empty_window_or_no_shards_is_refused(window: int, per: int) -> None:
    with pytest.raises(PlanError, match="1 or more"):
        ShuffledOrder(shards([3]), 0, 0, window=window, shards=per)


@given(COUNTS, st.integers(0, 40), st.one_of(st.none(), st.integers(0, 40)))
def test_a_sliced_order_is_a_slice_of_the_order(counts: list[int], start: int, stop: int | None) -> None:
    inner = shuffled(shards(counts))
    assert everything(SlicedOrder(inner, start, stop)) == everything(inner)[start:stop]


@given(COUNTS, st.integers(0, 40), st.integers(0, 40))
def test_the_spans_of_a_slice_are_clipped(counts: list[int], start: int, stop: int) -> None:
    order = SlicedOrder(shards(counts), start, stop)
    for group in range(len(order.spans().keys)):
        a, b = order.spans().bounds[group : group + 2].tolist()
        assert len({s for _, s, _ in everything(order)[a:b]}) <= 1
    assert Counter(everything(shuffled(order))) == Counter(everything(order))


def test_pairs_are_formed_by_position_and_have_the_left_identity() -> None:
    left, right = shuffled(shards([4, 5])), shards([3, 6], leaf=1)
    refs = ZippedOrder(left, right, strict=True).at(np.arange(9))
    assert refs.pair is not None
    assert samples(refs) == everything(left)
    assert samples(refs.pair) == everything(right)
    assert refs.key.tolist() == left.at(np.arange(9)).key.tolist()


def test_pairs_of_pairs_form_a_chain() -> None:
    a, b, c = (shards([3], leaf) for leaf in range(3))
    for order in (ZippedOrder(ZippedOrder(a, b, True), c, True), ZippedOrder(a, ZippedOrder(b, c, True), True)):
        refs = order.at(np.arange(3)).take(np.array([2, 0]))
        assert refs.pair is not None
        assert refs.pair.pair is not None
        assert [refs.leaf[0], refs.pair.leaf[0], refs.pair.pair.leaf[0]] == [0, 1, 2]
        assert refs.pair.pair.index.tolist() == [2, 0]


def test_a_union_of_pairs_and_samples_marks_those_without_a_partner() -> None:
    refs = ChainedOrder([ZippedOrder(shards([2]), shards([2], 1), True), shards([1], 2)]).at(np.array([2, 0]))
    assert refs.pair is not None
    assert refs.pair.leaf.tolist() == [-1, 1]


def test_a_strict_zip_of_two_sizes_names_both() -> None:
    with pytest.raises(PlanError, match="7 samples with 5 samples"):
        ZippedOrder(shards([7]), shards([5]), strict=True)
    assert ZippedOrder(shards([7]), shards([5]), strict=False).size == 5


def test_a_shuffle_keeps_pairs_together() -> None:
    refs = shuffled(ZippedOrder(shards([9, 9]), shards([18], 1), True)).at(np.arange(18))
    assert refs.pair is not None
    assert refs.pair.index.tolist() == (refs.shard * 9 + refs.index).tolist()


def test_pass_i_of_epoch_e_is_epoch_e_times_n_plus_i() -> None:
    def make(epoch: int) -> Order:
        return shuffled(shards([5, 6], epoch=epoch), 0, epoch)

    order = RepeatedOrder(make, 2, 3)
    assert everything(order) == everything(make(6)) + everything(make(7)) + everything(make(8))
    assert order.at(np.array([11])).key.tolist() == make(7).at(np.array([0])).key.tolist()


def test_an_endless_repeat_continues_with_the_following_epochs() -> None:
    def make(epoch: int) -> Order:
        return shuffled(shards([5, 6], epoch=epoch), 0, epoch)

    order = RepeatedOrder(make, 4, None)
    assert order.size == ENDLESS
    assert samples(order.at(np.arange(11 * 9, 11 * 10))) == everything(make(13))
    assert samples(order.at(np.array([11 * 10**15]))) == everything(make(4 + 10**15))[:1]
    assert RepeatedOrder(lambda _: shards([]), 0, None).size == 0


def test_a_repeated_shard_has_a_different_span_key_each_time() -> None:
    plain = shards([3, 3])
    for order in (ChainedOrder([plain, plain]), RepeatedOrder(lambda _: plain, 0, 2)):
        assert len(set(order.spans().keys.tolist())) == 4


def test_an_endless_order_can_be_cut_limited_and_then_shuffled() -> None:
    order = RepeatedOrder(lambda epoch: shards([5], epoch=epoch), 0, None)
    assert cut(order.whole(), 1, 2, "step") == [[1, ENDLESS, 2, 0]]
    limited = shuffled(SlicedOrder(order, 2, 13))
    assert Counter(i for _, _, i in everything(limited)) == Counter(p % 5 for p in range(2, 13))
    assert SlicedOrder(order, 10, None).size == ENDLESS
    with pytest.raises(PlanError, match=r"before repeat"):
        shuffled(order)


def test_threads_can_use_an_order_at_once() -> None:
    order = ShuffledOrder(
        RepeatedOrder(lambda e: SubsetOrder(shards([50] * 40, epoch=e), 0.3, 0, False), 0, 6), 0, 0, window=64, shards=5
    )
    expected = everything(order)
    wrong: list[int] = []

    def look_up(seed: int) -> None:
        positions = np.random.default_rng(seed).integers(0, order.size, (20, 64))
        wrong.extend(seed for p in positions if samples(order.at(p)) != [expected[q] for q in p])

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@given(COUNTS, st.floats(0, 1), st.integers(0, 5))
def test_the_sides_of_a_split_make_up_the_whole(counts: list[int], share: float, seed: int) -> None:
    inner = shards(counts)
    test, train = (SubsetOrder(inner, share, seed, part) for part in (True, False))
    assert sorted(everything(test) + everything(train)) == everything(inner)
    assert everything(test) == sorted(everything(test))
    assert everything(train) == sorted(everything(train))


def test_a_split_is_exact_where_it_can_be() -> None:
    for count in (10, 100, 5000, 12_345 * 5):
        assert SubsetOrder(shards([count] * 7), 0.2, 0, True).size == 7 * count // 5


def test_a_split_of_tiny_shards_has_the_share_on_average() -> None:
    assert SubsetOrder(shards([1] * 20_000), 0.2, 0, True).size == pytest.approx(4000, rel=0.05)


def test_new_shards_move_no_sample_between_the_sides() -> None:
    few_shards, many_shards = (set(everything(SubsetOrder(shards([7] * n), 0.3, 1, True))) for n in (5, 50))
    assert few_shards == {sample for sample in many_shards if sample[1] < 5}


def test_a_split_is_the_same_in_every_epoch_and_differs_by_seed() -> None:
    parts = {(s, e): everything(SubsetOrder(shards([9] * 9, epoch=e), 0.4, s, True)) for s in (0, 1) for e in (0, 1)}
    assert parts[0, 0] == parts[0, 1]
    assert parts[0, 0] != parts[1, 0]


def test_a_split_after_a_shuffle_is_refused() -> None:
    for order in (shuffled(shards([9])), MixedOrder([shards([9])], [1.0], "all", 0, 0)):
        with pytest.raises(PlanError, match="split first"):
            SubsetOrder(order, 0.5, 0, True)


def test_stable_and_fixed_state_whether_epochs_agree() -> None:
    plain, reordered = shards([9, 9]), shuffled(shards([9, 9]))
    assert (plain.stable, plain.fixed) == (True, True)
    assert (reordered.stable, reordered.fixed) == (True, False)
    assert SlicedOrder(plain, 0, 5).stable
    assert SlicedOrder(reordered, 0, 18).stable
    assert not SlicedOrder(reordered, 0, 5).stable
    assert not shuffled(SlicedOrder(reordered, 0, 5)).stable
    assert not ChainedOrder([plain, SlicedOrder(reordered, 0, 5)]).stable
    assert MixedOrder([plain, reordered], [1, 1], "all", 0, 0).stable
    assert not MixedOrder([plain, reordered], [2, 1], "first", 0, 0).stable


def test_a_billion_samples_in_a_hundred_thousand_shards_are_cheap() -> None:
    names = name_hashes(f"{number:06}.tar" for number in range(100_000))
    counts = np.full(100_000, 10_000, np.int64)
    positions = np.random.default_rng(0).integers(0, 10**9, 60)
    tracemalloc.start()
    order = ShuffledOrder(ShardOrder(names, counts, 0, 0, 0), 0, 0, window=None)
    one = ShuffledOrder(ShardOrder(names, counts, 0, 0, 0), 0, 0, window=None, all=True)
    for p in positions:
        order.at(np.array([p]))
        one.at(np.array([p]))
    order.at(500_000_000 + np.arange(8192))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16e6
    assert _median_seconds(order, positions) < 1e-3
    assert _median_seconds(one, positions) < 1e-3


def _median_seconds(order: Order, positions: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
    taken = []
    for p in positions:
        begin = time.perf_counter()
        order.at(np.array([p]))
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
