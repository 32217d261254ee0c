from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.order.hashing import name_hashes
from penstock.order.mixture import MixedOrder
from penstock.order.orders import Order, RepeatedOrder, ShardOrder, ShuffledOrder
from penstock.order.pieces import ENDLESS


def source(leaf: int, count: int, epoch: int = 0) -> Order:
    return ShardOrder(name_hashes([f"{leaf}.tar"]), np.array([count], np.int64), leaf, 0, epoch)


def endless(leaf: int, count: int) -> Order:
    return RepeatedOrder(lambda epoch: source(leaf, count, epoch), 0, None)


Changes = list[tuple[int, list[float]]]


def mixed(
    counts: list[int], weights: list[float], stop: str, epoch: int = 0, changes: Changes | None = None
) -> MixedOrder:
    return MixedOrder(
        [source(leaf, count) for leaf, count in enumerate(counts)], weights, stop, 3, epoch, changes or []
    )


def leaves(order: Order, n: int | None = None) -> list[int]:
    found: list[int] = order.at(np.arange(order.size if n is None else n, dtype=np.int64)).leaf.tolist()
    return found


SOURCES = st.lists(st.tuples(st.integers(0, 300), st.floats(0.01, 1)), min_size=1, max_size=5)


@given(SOURCES, st.sampled_from(["first", "all"]), st.integers(0, 3))
def test_every_source_is_read_in_its_own_order(sources: list[tuple[int, float]], stop: str, epoch: int) -> None:
    order = mixed([n for n, _ in sources], [w for _, w in sources], stop, epoch)
    refs = order.at(np.arange(order.size, dtype=np.int64))
    for leaf, (count, _) in enumerate(sources):
        given_by = refs.index[refs.leaf == leaf].tolist()
        assert given_by == list(range(count if stop == "all" else len(given_by)))


@given(SOURCES, st.integers(0, 3))
def test_stop_first_ends_with_the_first_exhausted_source(sources: list[tuple[int, float]], epoch: int) -> None:
    order = mixed([n for n, _ in sources], [w for _, w in sources], "first", epoch)
    used = np.bincount(leaves(order), minlength=len(sources)).tolist()
    assert all(n <= count for n, (count, _) in zip(used, sources, strict=True))
    assert any(n == count for n, (count, _) in zip(used, sources, strict=True))


@given(SOURCES)
def test_the_size_is_the_same_in_every_epoch(sources: list[tuple[int, float]]) -> None:
    counts, weights = [n for n, _ in sources], [w for _, w in sources]
    for stop in ("first", "all"):
        assert len({mixed(counts, weights, stop, epoch).size for epoch in range(4)}) == 1


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=6), st.integers(1, 20_000))
def test_every_prefix_has_the_shares_within_two_cycles(weights: list[float], n: int) -> None:
    order = mixed([10**9] * len(weights), weights, "first")
    indices = np.arange(max(0, n - 200), n, dtype=np.int64)
    refs = order.at(indices)
    for leaf, weight in enumerate(weights):
        of_leaf = refs.index[refs.leaf == leaf]
        if of_leaf.size:
            expected = (float(indices[refs.leaf == leaf][-1]) + 1) * weight / sum(weights)
            assert abs(float(of_leaf[-1]) + 1 - expected) <= 128


def test_shares_hold_after_ten_billion_samples() -> None:
    order = mixed([10**12, 10**12, 10**12], [0.7, 0.2999, 0.0001], "first")
    p = 10**10 + np.arange(60_000, dtype=np.int64)
    refs = order.at(p)
    for leaf, weight in enumerate((0.7, 0.2999, 0.0001)):
        last = int(refs.index[refs.leaf == leaf][-1])
        assert last == pytest.approx(int(p[-1]) * weight, rel=1e-5)


def test_stop_all_shares_the_rest_by_the_weights_that_remain() -> None:
    order = mixed([100, 10_000, 10_000], [0.5, 0.25, 0.25], "all")
    found = np.array(leaves(order))
    assert order.size == 20_100
    assert int(np.flatnonzero(found == 0)[-1]) < 100 / 0.5 + 128
    later = np.bincount(found[1000:9000], minlength=3)
    assert later[1] == pytest.approx(4000, abs=128)
    assert later[2] == pytest.approx(4000, abs=128)


def test_the_arrangement_changes_with_the_epoch() -> None:
    assert leaves(mixed([500, 500], [1, 1], "all", 0)) != leaves(mixed([500, 500], [1, 1], "all", 1))


def test_the_mix_never_changes() -> None:
    assert leaves(mixed([20, 10], [2, 1], "all", 1)) == [
        0,
        1,
        1,
        1,
        0,
        0,
        1,
        0,
        0,
        0,
        0,
        1,
        1,
        0,
        1,
        1,
        0,
        0,
        1,
        0,
        0,
        1,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    ]


def test_a_source_of_weight_zero_gives_nothing() -> None:
    for stop in ("first", "all"):
        assert set(leaves(mixed([50, 50], [0, 1], stop))) == {1}
    assert mixed([], [], "all").size == 0


def test_a_mix_of_endless_sources_is_endless() -> None:
    for stop in ("first", "all"):
        order = MixedOrder([endless(0, 7), endless(1, 5)], [3, 1], stop, 0, 0)
        assert order.size == ENDLESS
        far = order.at(10**17 + np.arange(4000, dtype=np.int64))
        assert np.bincount(far.leaf).tolist() == pytest.approx([3000, 1000], abs=128)


def test_a_mix_with_an_endless_source_ends_under_stop_first_only() -> None:
    sources = [endless(0, 7), source(1, 100)]
    first, never = (MixedOrder(sources, [3, 1], stop, 0, 0) for stop in ("first", "all"))
    assert first.size == pytest.approx(400, abs=64)
    assert leaves(first).count(1) == 100
    assert never.size == ENDLESS
    assert leaves(never, 5000).count(1) == 100
    assert set(never.at(np.arange(600, 9000, dtype=np.int64)).leaf.tolist()) == {0}


def test_positions_can_be_looked_up_in_any_order() -> None:
    order = mixed([300, 700, 40], [0.3, 0.6, 0.1], "all")
    whole = order.at(np.arange(order.size, dtype=np.int64))
    indices = np.random.default_rng(0).permutation(order.size)
    some = order.at(indices)
    assert some.index.tolist() == whole.index[indices].tolist()
    assert some.leaf.tolist() == whole.leaf[indices].tolist()
    assert order.at(np.array([999])).index.tolist() == [whole.index[999]]


def test_a_mix_can_be_shuffled() -> None:
    order = mixed([9000, 1000], [0.9, 0.1], "all")
    assert np.diff(order.spans().bounds).tolist() == [4096, 4096, 1808]
    again = ShuffledOrder(order, 0, 0, window=500, shards=2)
    refs = again.at(np.arange(10_000))
    assert len(set(zip(refs.leaf.tolist(), refs.index.tolist(), strict=True))) == 10_000


def at(order: Order, indices: np.ndarray) -> list[tuple[int, int]]:
    refs = order.at(indices.astype(np.int64))
    return list(zip(refs.leaf.tolist(), refs.index.tolist(), strict=True))


@st.composite
def changing_mixtures(draw: st.DrawFn) -> tuple[list[int], list[list[float]], list[int]]:
    """Generate sizes of sources, rows of weights that are not all zero, and the positions where the weights change."""
    source_count = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 400), min_size=source_count, max_size=source_count))
    weight = st.one_of(st.just(0.0), st.floats(0.001, 1))
    row = st.lists(weight, min_size=source_count, max_size=source_count).filter(any)
    rows = draw(st.lists(row, min_size=1, max_size=5))
    positions = draw(st.lists(st.integers(1, 900), min_size=len(rows) - 1, max_size=len(rows) - 1, unique=True))
    return sizes, rows, sorted(positions)


@given(changing_mixtures(), st.sampled_from(["first", "all"]), st.integers(0, 2))
def test_changing_weights_keep_every_source_in_its_own_order(
    mixture: tuple[list[int], list[list[float]], list[int]], stop: str, epoch: int
) -> None:
    sizes, rows, positions = mixture
    order = mixed(sizes, rows[0], stop, epoch, list(zip(positions, rows[1:], strict=True)))
    refs = order.at(np.arange(order.size, dtype=np.int64))
    used = [0] * len(sizes)
    for leaf, size in enumerate(sizes):
        indexes = refs.index[refs.leaf == leaf].tolist()
        assert indexes == list(range(len(indexes)))
        assert len(indexes) <= size
        used[leaf] = len(indexes)
    if stop == "all":  # sources with samples left have a final weight of 0
        assert all(n == size or not rows[-1][leaf] for leaf, (n, size) in enumerate(zip(used, sizes, strict=True)))
    else:
        assert any(n == size for n, size in zip(used, sizes, strict=True))
    assert order.size == mixed(sizes, rows[0], stop, epoch + 1, list(zip(positions, rows[1:], strict=True))).size


@given(changing_mixtures())
def test_between_changes_the_shares_follow_the_current_weights(
    mixture: tuple[list[int], list[list[float]], list[int]],
) -> None:
    _, rows, positions = mixture
    order = mixed([10**9] * len(rows[0]), rows[0], "first", 0, list(zip(positions, rows[1:], strict=True)))
    found = np.array(leaves(order, 2000))
    for row, begin, end in zip(rows, [0, *positions], [*positions, 2000], strict=True):
        drawn = np.bincount(found[begin:end], minlength=len(row))
        for leaf, weight in enumerate(row):
            assert abs(int(drawn[leaf]) - (end - begin) * weight / sum(row)) <= 64
            assert weight or not drawn[leaf]


def test_a_change_is_exact_to_the_sample() -> None:
    order = mixed([5000, 5000], [1, 0], "first", 2, [(1001, [0, 1]), (1003, [0.5, 0.5])])
    found = leaves(order, 1200)
    assert found[:1003] == [0] * 1001 + [1] * 2
    assert found[1003:].count(0) == pytest.approx(98, abs=33)


def test_the_samples_of_a_source_before_a_change_do_not_depend_on_the_epoch() -> None:
    counts = {
        tuple(np.bincount(leaves(mixed([900, 900], [0.61, 0.39], "all", epoch, [(501, [1, 3])]), 501)).tolist())
        for epoch in range(6)
    }
    assert len(counts) == 1


def test_weights_that_never_change_are_plain_weights() -> None:
    plain, none = mixed([300, 200], [2, 1], "all", 1), mixed([300, 200], [2, 1], "all", 1, [])
    late = mixed([300, 200], [2, 1], "all", 1, [(600, [1, 5])])
    assert leaves(plain) == leaves(none) == leaves(late)


def test_stop_all_applies_a_change_early_when_only_weights_of_zero_are_left() -> None:
    order = mixed([100, 50], [1, 0], "all", 0, [(1000, [1, 1])])
    assert leaves(order) == [0] * 100 + [1] * 50


def test_stop_first_may_end_before_a_change() -> None:
    order = mixed([100, 500], [1, 1], "first", 0, [(150, [1, 4]), (10_000, [1, 1])])
    found = leaves(order)
    assert found.count(0) == 100
    assert order.size == pytest.approx(150 + 25 * 5, abs=64)


def test_any_position_far_after_the_last_change_is_found_at_once() -> None:
    changes: Changes = [(10**6 * k, [1 + k % 3, 2.0]) for k in range(1, 40)]
    order = mixed([10**12, 10**12], [3, 1], "first", 0, changes)
    began = time.process_time()
    indices = np.concatenate([np.arange(p, p + 500) for p in range(0, 10**11, 10**9)])
    some = at(order, indices)
    assert time.process_time() - began < 2  # 50,000 positions; walking there would take hours
    assert some[500:600] == at(order, indices[500:600])
    endless_one = MixedOrder([endless(0, 7), endless(1, 5)], [3, 1], "first", 0, 0, [(100, [1, 3])])
    far = endless_one.at(10**17 + np.arange(4000, dtype=np.int64))
    assert np.bincount(far.leaf).tolist() == pytest.approx([1000, 3000], abs=128)


def test_positions_around_changes_can_be_looked_up_in_any_order() -> None:
    order = mixed([700, 300, 90], [1, 2, 0], "all", 0, [(77, [1, 1, 1]), (600, [3, 1, 1])])
    whole = at(order, np.arange(order.size))
    indices = np.random.default_rng(0).permutation(order.size)
    assert at(order, indices) == [whole[p] for p in indices.tolist()]
    assert len(set(whole)) == order.size == 1090
