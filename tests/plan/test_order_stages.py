from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engines.quarantine import read_identities
from penstock.errors import PlanError, StorageError
from penstock.order import Order, ShardOrder, name_hashes
from penstock.plan import (
    Exclude,
    Identity,
    Mix,
    OrderFactory,
    OrderStage,
    Plan,
    Repeat,
    Shuffle,
    Slice,
    SplitSide,
    Union,
    Zip,
)
from penstock.testing import Numbers


def _factory(count: int = 20, leaf: int = 0) -> OrderFactory:
    names = name_hashes([f"{leaf}.tar"])
    return lambda epoch: ShardOrder(names, np.array([count], np.int64), leaf, 0, epoch)


def _samples(order: Order, count: int | None = None) -> list[tuple[int, int]]:
    refs = order.at(np.arange(order.size if count is None else count, dtype=np.int64))
    return list(zip(refs.leaf.tolist(), refs.index.tolist(), strict=True))


def _indices(stage: OrderStage, epoch: int = 0, seed: int = 0) -> list[int]:
    return [index for _, index in _samples(stage.wrap(_factory(), seed, 0)(epoch))]


@pytest.mark.parametrize(
    ("stage", "description"),
    [
        (Shuffle(), "shuffle()"),
        (Shuffle(9, 2, True), "shuffle(window=9, shards=2, all=True)"),
        (Slice(0, 3), "limit(3)"),
        (Slice(3), "skip(3)"),
        (Repeat(), "repeat()"),
        (Repeat(2), "repeat(2)"),
        (SplitSide(0.2, 0, True), "train_test_split(test_size=0.2)[1]"),
        (Exclude(("bad.jsonl",)), "exclude('bad.jsonl')"),
        (Exclude(()), "exclude(0 samples: 71857576257465c7)"),
    ],
)
def test_a_stage_is_described_as_the_call_that_created_it(stage: OrderStage, description: str) -> None:
    assert stage.describe() == description


def test_a_shuffle_depends_on_seed_and_epoch() -> None:
    orders = [_indices(Shuffle(8), epoch, seed) for epoch, seed in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert _indices(Shuffle(8)) == orders[0]


def test_limit_and_skip_are_slices_of_the_positions() -> None:
    assert _indices(Slice(0, 3)) == [0, 1, 2]
    assert _indices(Slice(17)) == [17, 18, 19]


def test_a_repeat_takes_one_epoch_per_pass() -> None:
    shuffled = Shuffle(8).wrap(_factory(), 0, 0)
    repeated = Repeat(2).wrap(shuffled, 0, 0)(3)
    assert _samples(repeated) == _samples(shuffled(6)) + _samples(shuffled(7))


@pytest.mark.parametrize("tail", [False, True])
def test_the_sides_of_a_split_are_disjoint_and_complete(tail: bool) -> None:
    train, test = (_indices(SplitSide(0.25, 0, side, tail)) for side in (False, True))
    assert sorted(train + test) == list(range(20))
    assert len(test) == 5
    assert (test == [15, 16, 17, 18, 19]) is tail


def test_excluded_samples_are_left_out_of_every_epoch() -> None:
    stage = Exclude((Identity(0, "0.tar", 3), Identity(0, "0.tar", 5), Identity(1, "0.tar", 7)), 0, 1)
    for epoch in (0, 1):
        assert _indices(stage, epoch) == [index for index in range(20) if index not in (3, 5)]


def test_the_exclusions_of_a_branch_are_those_of_its_own_sources() -> None:
    identities = tuple(Identity(source, "0.tar", source) for source in range(4))
    branch = Exclude(identities).for_branch(1, 3)
    assert (branch.first, branch.until) == (1, 3)
    assert branch.describe() == Exclude(identities[1:3]).describe()
    assert (branch.for_branch(1, None).first, branch.for_branch(1, None).until) == (2, 3)
    found = _samples(branch.wrap(_factory(5, leaf=8), 0, 8)(0))
    assert found == [(8, 0), (8, 1), (8, 2), (8, 3), (8, 4)]  # of its shard 8.tar, nothing is listed
    own = Exclude((Identity(1, "8.tar", 1), Identity(3, "8.tar", 3))).for_branch(1, 3)
    assert _samples(own.wrap(_factory(5, leaf=8), 0, 8)(0)) == [(8, 0), (8, 2), (8, 3), (8, 4)]


def test_exclusion_files_are_read_once_and_without_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"source": 0, "shard": "0.tar", "index": 4}\n{"source": 0, "shard": "0.tar", "index": 2}\n')
    stage = Exclude((str(path), Identity(0, "0.tar", 4)))
    assert stage.files == (str(path),)
    settled = stage.resolve(read_identities)
    assert settled.entries == (Identity(0, "0.tar", 4), Identity(0, "0.tar", 2))
    assert settled.files == ()
    with pytest.raises(StorageError):
        Exclude((str(tmp_path / "missing.jsonl"),)).resolve(read_identities)


def test_the_description_of_an_exclusion_does_not_depend_on_the_order_of_its_samples() -> None:
    one, two = Identity(0, "0.tar", 1), Identity(0, "0.tar", 2)
    assert Exclude((one, two)).describe() == Exclude((two, one)).describe() != Exclude((one,)).describe()


def test_missing_samples_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    stage = Exclude((Identity(0, "0.tar", 1), Identity(0, "no-such-shard.tar", 11), Identity(0, "0.tar", 99)))
    with caplog.at_level(logging.WARNING, "penstock"):
        for epoch in (0, 1):
            assert len(_indices(stage, epoch)) == 19
    assert [record.getMessage() for record in caplog.records] == [
        "exclude: 2 samples are not in this dataset and are ignored, such as (0, 'no-such-shard.tar', 11)"
    ]


def _branches(*counts: int) -> tuple[Plan, ...]:
    return tuple(Plan(Numbers((count,))) for count in counts)


@pytest.mark.parametrize(
    ("source", "description"),
    [
        (Union(_branches(1, 2)), "union"),
        (Mix(_branches(1, 2), (1.0, 2.0)), "mix(weights=[1.0, 2.0], stop='first')"),
        (
            Mix(_branches(1, 2), (1.0, 0.0), "all", ((5, (0.0, 1.0)),)),
            "mix(weights=[(0, [1.0, 0.0]), (5, [0.0, 1.0])], stop='all')",
        ),
        (Zip(_branches(1, 1)), "zip(strict=True)"),
        (Zip(_branches(1, 1), False, "_r"), "zip(strict=False, suffix='_r')"),
    ],
)
def test_a_combination_is_described_without_its_branches(source: Any, description: str) -> None:
    assert source.describe() == description


def test_a_union_is_one_order_after_another() -> None:
    order = Union(_branches(2, 1)).join([_factory(2, 0), _factory(1, 1)], 0)(0)
    assert _samples(order) == [(0, 0), (0, 1), (1, 0)]


def test_a_mix_draws_by_weight() -> None:
    order = Mix(_branches(9, 9), (1.0, 0.0), "all", ((3, (0.0, 1.0)),)).join([_factory(9, 0), _factory(9, 1)], 0)(0)
    assert _samples(order, 5) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_a_zip_pairs_by_position() -> None:
    order = Zip(_branches(2, 2)).join([_factory(2, 0), _factory(2, 1)], 0)(0)
    pair = order.at(np.arange(2)).pair
    assert pair is not None
    assert (pair.leaf.tolist(), pair.index.tolist()) == ([1, 1], [0, 1])
    with pytest.raises(PlanError, match="zip of 2 samples with 3 samples"):
        Zip(_branches(2, 3)).join([_factory(2, 0), _factory(3, 1)], 0)(0)


class _RandomAccess(Numbers):
    random_access = True


def test_a_combination_has_random_access_if_every_branch_has() -> None:
    fast, slow = Plan(_RandomAccess((2,))), Plan(Numbers((2,)))
    assert Union((fast, fast)).random_access
    assert not Union((fast, slow)).random_access
