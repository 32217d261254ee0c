"""Stages on the order: limit, skip, union, zip, mix, train_test_split, shard, split."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest

import penstock as ps
from penstock.errors import DataError, PlanError
from penstock.testing import numbers

SIZES = (30, 0, 25, 7, 40)


def _xs(ds: Any) -> list[int]:
    return [int(sample["x"]) for sample in ds]


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def _other(count: int) -> ps.Dataset:
    return numbers((count,), name="other").rename(y="x").select("y")


def _ids(ds: ps.Dataset) -> list[tuple[int, int]]:
    return [(sample["shard"], sample["index"]) for sample in ds]


# limit and skip


def test_limit_and_skip_count_positions() -> None:
    ds = numbers(SIZES)
    assert _xs(ds.limit(3)) == [0, 1, 2]
    assert _xs(ds.skip(100)) == [100, 101]
    assert _xs(ds.skip(5).limit(2)) == [5, 6]
    assert _xs(ds.limit(5).skip(3)) == [3, 4]
    assert _xs(ds.limit(0)) == _xs(ds.skip(1000)) == []
    assert (len(ds.limit(3)), len(ds.skip(100)), len(ds.limit(1000))) == (3, 2, 102)


def test_limit_takes_the_first_samples_of_the_epoch() -> None:
    ds = numbers(SIZES).shuffle()
    assert _xs(ds.limit(10).epoch(2)) == _xs(ds.epoch(2))[:10]
    assert sorted(_xs(ds.map(dict).limit(10).epoch(2))) == sorted(_xs(ds.epoch(2))[:10])


@pytest.mark.parametrize("how", ["range", "step"])
def test_a_limit_is_exact_under_every_cut(how: Literal["range", "step"]) -> None:
    ds = numbers(SIZES).shuffle().map(dict).limit(23).epoch(1)
    want = sorted(_xs(ds))
    for world in (1, 2, 5):
        assert sorted(x for rank in range(world) for x in _xs(ds.shard(rank, world, how))) == want


def test_after_filter_limit_and_skip_count_the_stream() -> None:
    ds = numbers(SIZES).filter(_odd)
    assert _xs(ds.limit(3)) == [1, 3, 5]
    assert _xs(ds.skip(49)) == [99, 101]
    assert [b["x"].tolist() for b in numbers(SIZES).batched(2).skip(1).limit(2)] == [[2, 3], [4, 5]]
    assert list(ps.from_items([2, 3]).flat_map(range).limit(3)) == [0, 1, 0]


@pytest.mark.parametrize("stage", ["limit", "skip"])
@pytest.mark.parametrize(
    "counted", [lambda ds: ds.filter(_odd), lambda ds: ds.flat_map(list), lambda ds: ds.batched(2)]
)
def test_counting_the_stream_needs_a_world_of_one(stage: str, counted: Any) -> None:
    ds = counted(numbers(SIZES))
    with pytest.raises(PlanError, match=rf"{stage}\(3\)"):
        getattr(ds.shard(0, 2), stage)(3)
    with pytest.raises(PlanError, match=rf"{stage}\(3\)"):
        getattr(ds, stage)(3).shard(0, 2)
    with pytest.raises(PlanError, match=rf"{stage}\(3\)"):
        getattr(ds, stage)(3).loader(0, 2, uneven="keep")
    assert getattr(ds, stage)(3).shard(0, 1)


def test_a_limit_after_shard_is_per_rank() -> None:
    ds = numbers((10,))
    assert [_xs(ds.shard(rank, 2).limit(3)) for rank in range(2)] == [[0, 1, 2], [5, 6, 7]]
    assert [_xs(ds.shard(rank, 2).skip(3)) for rank in range(2)] == [[3, 4], [8, 9]]
    assert [_xs(ds.shard(rank, 2, "step").skip(1).limit(2)) for rank in range(2)] == [[2, 4], [3, 5]]
    assert [len(ds.shard(rank, 2).limit(3)) for rank in range(2)] == [3, 3]


# union, zip, mix


def test_a_union_is_a_concatenation() -> None:
    ds = numbers((3,)).union(numbers((2,), name="b"), numbers((1,), name="c"))
    assert _xs(ds) == [0, 1, 2, 0, 1, 0]
    assert len(ds) == 6


def test_a_union_with_a_filter_does_not_know_its_length() -> None:
    ds = numbers((3,)).filter(_odd).union(numbers((2,), name="b"))
    with pytest.raises(TypeError, match="count"):
        len(ds)
    assert ds.count() == len(list(ds)) == 3


def test_stages_of_a_branch_apply_to_its_samples_only() -> None:
    ds = numbers((2,)).map(lambda s: {"x": -1}).union(numbers((2,), name="b"))
    assert _xs(ds) == [-1, -1, 0, 1]


def test_a_union_can_be_shuffled_as_a_whole() -> None:
    ds = ps.from_items(range(50)).union(ps.from_items(range(50, 100))).shuffle()
    got = list(ds.epoch(0))
    assert sorted(got) == list(range(100))
    assert min(got[:50]) < 50 <= max(got[:50])


def test_zip_pairs_by_position_and_merges_fields() -> None:
    ds = numbers((3,)).zip(_other(3))
    assert list(ds) == [{"shard": 0, "index": i, "x": i, "y": i} for i in range(3)]
    assert len(ds) == 3


def test_zip_takes_underscored_fields_from_the_left() -> None:
    left = ps.from_items([{"__key__": "left", "a": 1}])
    right = ps.from_items([{"__key__": "right", "__url__": "u", "b": 2}])
    assert left.zip(right).first() == {"__key__": "left", "a": 1, "b": 2}


def test_fields_that_both_sides_of_a_zip_have_need_a_suffix() -> None:
    left, right = ps.from_items([{"a": 1, "b": 1}]), ps.from_items([{"a": 2, "c": 2}])
    with pytest.raises(DataError, match="both sides have a; rename one, or pass suffix="):
        list(left.zip(right))
    assert left.zip(right, suffix="_r").first() == {"a": 1, "b": 1, "a_r": 2, "c": 2}
    taken = ps.from_items([{"a": 1, "a_r": 1}])
    for first, second in ((taken, right), (right, taken)):
        with pytest.raises(DataError, match="suffix='_r' produces a field name that already exists"):
            list(first.zip(second, suffix="_r"))


def test_a_strict_zip_refuses_different_lengths() -> None:
    with pytest.raises(PlanError, match="zip of 3 samples with 5 samples"):
        list(numbers((3,)).zip(_other(5)))
    assert len(list(numbers((3,)).zip(_other(5), strict=False))) == 3
    assert len(list(numbers((5,)).zip(_other(3), strict=False))) == 3


def test_zip_needs_samples_with_fields() -> None:
    with pytest.raises(DataError, match="int and int"):
        list(ps.from_items([1]).zip(ps.from_items([2])))


def test_shuffling_a_zip_permutes_pairs() -> None:
    ds = numbers(SIZES).zip(_other(102)).shuffle()
    pairs = [(s["x"], s["y"]) for s in ds.epoch(0)]
    assert sorted(pairs) == [(i, i) for i in range(102)]
    assert pairs != sorted(pairs)


def test_zipping_shuffled_datasets_pairs_their_orders() -> None:
    left, right = numbers(SIZES).shuffle(), _other(102)
    assert [s["x"] for s in left.zip(right).epoch(1)] == _xs(left.epoch(1))


def test_a_skipped_sample_drops_its_pair_and_shifts_nothing() -> None:
    ds = numbers((6,), bad=(2,)).zip(numbers((6,), name="b", bad=(4,)), suffix="_b").on_error("skip")
    assert [(s["x"], s["x_b"]) for s in ds] == [(i, i) for i in (0, 1, 3, 5)]


@pytest.mark.parametrize(
    "branch",
    [
        lambda ds: ds.filter(_odd),
        lambda ds: ds.flat_map(list),
        lambda ds: ds.batched(2),
        lambda ds: ds.shard(0, 2),
        lambda ds: ds.filter(_odd).limit(3),
        lambda ds: ds.filter(_odd).union(numbers((3,), name="c")),
        lambda ds: ps.mix([ds.flat_map(list), numbers((3,), name="c")]),
    ],
)
def test_a_branch_of_a_zip_keeps_the_count(branch: Any) -> None:
    for left, right in ((branch(numbers((4,))), _other(4)), (_other(4), branch(numbers((4,))))):
        with pytest.raises(PlanError, match="zip: a branch"):
            left.zip(right)


@pytest.mark.parametrize(
    "branch",
    [
        lambda ds: ds.batched(2),
        lambda ds: ds.flat_map(list).shuffle(3),
        lambda ds: ds.filter(_odd).limit(3),
        lambda ds: ds.shard(0, 2),
        lambda ds: ds.zip(_other(4)),
    ],
)
def test_a_branch_of_a_union_or_mix_works_on_single_samples(branch: Any) -> None:
    ds = branch(numbers((4,)))
    with pytest.raises(PlanError, match="union: a branch"):
        numbers((4,), name="b").union(ds)
    with pytest.raises(PlanError, match="mix: a branch"):
        ps.mix([numbers((4,), name="b"), ds])


def test_mix_takes_samples_by_weight() -> None:
    a, b = numbers((1000,)), numbers((1000,), name="b").map(lambda s: {"x": -1})
    mixed = _xs(ps.mix([a, b], [0.8, 0.2]).limit(500))
    assert 70 <= mixed.count(-1) <= 130
    assert [x for x in mixed if x >= 0] == list(range(500 - mixed.count(-1)))


def test_mix_stops_after_the_first_or_after_all() -> None:
    a, b = numbers((100,)), numbers((10,), name="b").map(lambda s: {"x": -1})
    first, every = _xs(ps.mix([a, b])), _xs(ps.mix([a, b], stop="all"))
    assert first.count(-1) == 10
    assert len(first) < 110
    assert Counter(every) == Counter([*range(100), *[-1] * 10])


def test_no_sample_of_a_mix_repeats_unless_its_branch_does() -> None:
    a, b = numbers((100,)), numbers((5,), name="b").map(lambda s: {"x": -1 - s["x"]}).repeat()
    got = Counter(_xs(ps.mix([a, b])))
    assert all(got[x] == 1 for x in range(100))
    assert got[-1] > 10


def test_a_mix_is_different_in_every_epoch() -> None:
    mixed = ps.mix([numbers((50,)), numbers((50,), name="b").map(lambda s: {"x": -1})])
    assert _xs(mixed.epoch(0)) == _xs(mixed.epoch(0)) != _xs(mixed.epoch(1))


def test_a_combination_has_the_error_policy_and_engine_of_its_first_branch() -> None:
    ds = numbers((3,), bad=(1,)).on_error("skip").on("serial").union(numbers((2,), name="b"))
    assert "engine serial" in ds.explain()
    assert _xs(ds) == [0, 2, 0, 1]


# train_test_split


@pytest.mark.parametrize("by", [None, "x"])
def test_a_split_partitions_the_samples(by: str | None) -> None:
    train, test = numbers((200, 300)).train_test_split(0.2, by=by)
    assert sorted(_ids(train) + _ids(test)) == _ids(numbers((200, 300)))
    assert abs(len(_ids(test)) - 100) <= (0 if by is None else 30)


def test_a_split_of_small_shards_has_about_its_share() -> None:
    _, test = numbers((1,) * 400).train_test_split(0.2)
    assert 55 <= len(test) <= 105


@pytest.mark.parametrize("by", [None, "x"])
def test_the_sides_are_the_same_in_every_epoch_and_under_shuffle(by: str | None) -> None:
    want = sorted(_ids(numbers(SIZES).train_test_split(0.3, by=by)[1]))
    for ds in (numbers(SIZES).shuffle(), numbers(SIZES).shuffle(all=True), numbers(SIZES).map(dict).shuffle(9)):
        test = ds.train_test_split(0.3, by=by)[1]
        orders = [_ids(test.epoch(k)) for k in range(3)]
        assert [sorted(order) for order in orders] == [want] * 3
        assert orders[0] != orders[1]


def test_a_side_can_be_shuffled_after_the_split() -> None:
    train = numbers(SIZES).train_test_split(0.3)[0]
    assert sorted(_ids(train.shuffle().epoch(4))) == sorted(_ids(train))


def test_adding_shards_moves_no_sample() -> None:
    small, large = numbers(SIZES), numbers((*SIZES, 20, 20))
    for by in (None, "x"):
        before, after = (
            set(_ids(small.train_test_split(0.3, by=by)[1])),
            set(_ids(large.train_test_split(0.3, by=by)[1])),
        )
        assert before == {(shard, index) for shard, index in after if shard < len(SIZES)}


def test_a_split_by_field_keeps_equal_values_together() -> None:
    ds = ps.from_items([{"who": f"p{i % 17}", "i": i} for i in range(200)])
    train, test = ds.train_test_split(0.3, by="who")
    assert {s["who"] for s in train}.isdisjoint({s["who"] for s in test})
    assert len(list(train)) + len(list(test)) == 200


def test_the_seed_selects_the_split() -> None:
    ds = numbers(SIZES)
    assert _ids(ds.train_test_split(0.3, seed=1)[1]) != _ids(ds.train_test_split(0.3, seed=2)[1])
    assert _ids(ds.seed(9).train_test_split(0.3)[1]) == _ids(ds.train_test_split(0.3)[1])


def test_without_shuffle_the_end_of_the_order_is_the_test_side() -> None:
    train, test = numbers((10,)).shuffle().train_test_split(0.3, shuffle=False)
    assert (sorted(_xs(train)), sorted(_xs(test))) == (list(range(7)), [7, 8, 9])


def test_a_split_cannot_come_after_batches() -> None:
    with pytest.raises(PlanError, match="train_test_split"):
        numbers((10,)).batched(2).train_test_split()


def test_a_mix_is_split_branch_by_branch() -> None:
    mixed = ps.mix([numbers((50,)).shuffle(), numbers((50,), name="b").map(lambda s: {**s, "shard": 1})], stop="all")
    train, test = mixed.train_test_split(0.2)
    for epoch in range(2):
        assert sorted(_ids(train.epoch(epoch)) + _ids(test.epoch(epoch))) == sorted(_ids(mixed.epoch(0)))
    assert sorted(_ids(test.epoch(0))) == sorted(_ids(test.epoch(1)))


# shard and split


def test_a_range_is_contiguous_and_a_step_takes_every_nth() -> None:
    ds = numbers((10,))
    assert [_xs(ds.shard(rank, 3)) for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert [_xs(ds.shard(rank, 3, "step")) for rank in range(3)] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


def test_a_cut_applies_to_the_source_order_wherever_it_is_called() -> None:
    ds = numbers(SIZES)
    want = _xs(ds.shuffle().map(dict).filter(_odd).shard(1, 3).epoch(0))
    assert _xs(ds.shard(1, 3).shuffle().map(dict).filter(_odd).epoch(0)) == want
    assert _xs(ds.shuffle().shard(1, 3).map(dict).filter(_odd).epoch(0)) == want


def test_all_ranks_together_have_every_sample_once() -> None:
    ds = numbers(SIZES).shuffle().epoch(1)
    assert sorted(x for rank in range(4) for x in _xs(ds.shard(rank, 4))) == list(range(102))


@pytest.mark.parametrize("how", ["range", "step"])
def test_dropping_makes_ranks_equal(how: Literal["range", "step"]) -> None:
    parts = [_xs(numbers((11,)).shard(rank, 3, how, "drop")) for rank in range(3)]
    assert [len(part) for part in parts] == [3, 3, 3]
    assert len({x for part in parts for x in part}) == 9
    assert [len(numbers((11,)).shard(rank, 3, how, "drop")) for rank in range(3)] == [3, 3, 3]


@pytest.mark.parametrize("how", ["range", "step"])
def test_padding_makes_ranks_equal_and_is_marked(how: Literal["range", "step"]) -> None:
    parts = [list(numbers((11,)).shard(rank, 3, how, "pad")) for rank in range(3)]
    assert [len(part) for part in parts] == [4, 4, 4]
    assert sorted(s["x"] for part in parts for s in part if "__pad__" not in s) == list(range(11))
    assert sum(s.get("__pad__", False) for part in parts for s in part) == 1


def test_padding_goes_into_batches() -> None:
    batches = list(numbers((5,)).shard(0, 2, uneven="pad").batched(3))
    assert batches[0]["__pad__"].tolist() == [False, False, True]


@pytest.mark.parametrize("uneven", ["drop", "pad"])
@pytest.mark.parametrize(
    "chain",
    [
        lambda ds, cut: cut(ds.filter(_odd)),
        lambda ds, cut: cut(ds).filter(_odd),
        lambda ds, cut: cut(ds).flat_map(list),
        lambda ds, cut: cut(ds.on_error("skip")),
        lambda ds, cut: cut(ds).on_error("skip"),
        lambda ds, cut: cut(ds.filter(_odd).union(numbers((3,), name="b"))),
    ],
)
def test_ranks_cannot_be_equal_where_the_count_changes(chain: Any, uneven: Any) -> None:
    with pytest.raises(PlanError, match=f"uneven='{uneven}'.*uneven='keep'"):
        chain(numbers((9,)), lambda ds: ds.shard(0, 2, uneven=uneven))


def test_a_second_cut_is_refused() -> None:
    cut = numbers((9,)).shard(0, 2)
    for again in (
        lambda: cut.shard(0, 2),
        lambda: cut.split(2),
        lambda: cut.loader(0, 2),
        lambda: cut.loader(uneven="drop"),
        lambda: cut.loader(cut="step"),
    ):
        with pytest.raises(PlanError, match="already cut"):
            again()


def test_the_parts_of_a_split_are_disjoint_and_picklable() -> None:
    parts = pickle.loads(pickle.dumps(numbers((11,)).shuffle().split(3)))
    assert sorted(x for part in parts for x in _xs(part)) == list(range(11))
    assert numbers((11,)).streaming_split(3) == numbers((11,)).split(3)


def test_an_equal_split_drops_fewer_samples_than_it_has_parts() -> None:
    for count in range(1, 12):
        parts = [_xs(part) for part in numbers((count,)).split(4, equal=True)]
        assert {len(part) for part in parts} == {count // 4}
        assert len({x for part in parts for x in part}) == count // 4 * 4


def test_tar_shards_are_cut_by_samples(tiny_shards: list[Path]) -> None:
    ds = ps.read_tar(list(map(str, tiny_shards))).shuffle().to_tuple("__key__")
    parts = [list(ds.shard(rank, 3).epoch(0)) for rank in range(3)]
    assert [len(part) for part in parts] == [33, 33, 34]
    assert len({key for part in parts for key in part}) == 100
