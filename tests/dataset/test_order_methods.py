"""Stages on the order: where a shuffle acts, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.testing import numbers, outputs


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def test_shuffle_commutes_with_stages_on_single_samples() -> None:
    ds = numbers((20, 10))
    want = outputs(ds.shuffle(7).map(dict).filter(_odd).epoch(1))
    assert outputs(ds.map(dict).filter(_odd).shuffle(7).epoch(1)) == want
    assert outputs(ds.map(dict).shuffle(7).filter(_odd).epoch(1)) == want


def test_shuffle_after_flat_map_permutes_windows_of_outputs() -> None:
    ds = ps.from_items(range(10)).flat_map(lambda n: [2 * n, 2 * n + 1])
    got = list(ds.shuffle(5).epoch(0))
    assert got != list(range(20))
    assert [sorted(got[i : i + 5]) for i in range(0, 20, 5)] == [list(range(i, i + 5)) for i in range(0, 20, 5)]
    assert list(ds.shuffle(5).epoch(1)) != got


def test_shuffle_after_batched_permutes_batches() -> None:
    got = [tuple(batch["x"].tolist()) for batch in numbers((24,)).batched(2).shuffle(100).epoch(0)]
    assert sorted(got) == [(i, i + 1) for i in range(0, 24, 2)]
    assert got != sorted(got)


def test_a_whole_shuffle_cannot_come_after_flat_map() -> None:
    with pytest.raises(PlanError, match=r"flat_map.*put it before, or give a window"):
        numbers((3,)).flat_map(list).shuffle(all=True)


@pytest.mark.parametrize(
    "arguments", [{"by": "k", "shuffle": False}, {"by": "k", "stratify": "k"}, {"stratify": "k", "shuffle": False}]
)
def test_two_ways_to_split_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="different ways to split; give one of them"):
        ps.from_items([{"k": 1}]).train_test_split(0.5, **arguments)
