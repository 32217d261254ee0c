"""The policy of the cache is within 2% of the best possible, whatever its size and whether epochs are reshuffled."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.storage.cache_policy import (
    NEVER,
    Stored,
    Uses,
    belady_hits,
    choose_evictions,
    planned_hits,
    recency_hits,
)

EPOCHS = 8


def _epochs(shards: int, reshuffled: bool) -> list[list[int]]:
    rng = np.random.default_rng(shards)
    return [rng.permutation(shards).tolist() if reshuffled else [*range(shards)] for _ in range(EPOCHS)]


@pytest.mark.parametrize("reshuffled", [True, False])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("shards", [50, 1000])
def test_it_serves_within_2_percent_of_what_the_best_cache_serves(shards: int, share: float, reshuffled: bool) -> None:
    epochs = _epochs(shards, reshuffled)
    sizes = np.random.default_rng(1).integers(500, 1500, shards).tolist()
    capacity = int(sum(sizes) * share)
    best, planned = (sum(policy(epochs, sizes, capacity)[1:-1]) for policy in (belady_hits, planned_hits))
    recent = sum(recency_hits(epochs, sizes, capacity)[1:-1])
    assert planned >= 0.98 * best
    assert best > 0.9 * share * sum(sizes) * (EPOCHS - 2)
    assert recent < planned


def test_the_best_cache_is_the_best_by_trying_all_on_a_small_case() -> None:
    assert belady_hits([[0, 1, 2], [0, 1, 2], [0, 1, 2]], [1, 1, 1], 2) == [0, 2, 2]
    assert belady_hits([[0, 1, 2], [2, 1, 0], [0, 1, 2]], [1, 1, 1], 2) == [0, 2, 2]
    assert recency_hits([[0, 1, 2], [0, 1, 2]], [1, 1, 1], 2) == [0, 0]
    assert planned_hits([[0, 1], [1, 0]], [5, 5], 10) == [0, 10]
    assert planned_hits([[0]], [5], 10) == [0]


def test_what_no_plan_names_goes_first_and_then_what_is_used_last() -> None:
    stored = [
        Stored("soon", 10, 1.0),
        Stored("late", 10, 9.0),
        Stored("never", 10, NEVER),
        Stored("old", 10, None, used_ns=1),
        Stored("young", 10, None, used_ns=2),
    ]

    def chosen(nbytes: int, until: float | None, spare: int = 0) -> list[str]:
        return [one.key for one in choose_evictions(stored, nbytes, spare, until)]

    assert chosen(10, 5.0) == ["old"]
    assert chosen(10, 5.0, spare=5) == ["old", "young"]
    assert chosen(40, 5.0) == ["old", "young", "never", "late"]
    assert chosen(50, 5.0) == ["old", "young", "never", "late"]
    assert chosen(50, 0.5) == ["old", "young", "never", "late", "soon"]
    assert chosen(50, None) == ["old", "young"]


def test_uses_tell_the_next_use_and_the_one_after_it() -> None:
    uses = Uses(np.array([3, 5], np.uint64), np.array([0.0, 50.0]), np.array([10.0, 60.0]), np.array([150.0, 120.0]))
    assert uses.upcoming(0.0).tolist() == [0.0, 50.0]
    assert uses.upcoming(20.0).tolist() == [130.0, 30.0]
    assert uses.upcoming(55.0).tolist() == [95.0, 0.0]
    assert uses.after_next(0.0).tolist() == [150.0, 120.0]
    assert uses.after_next(20.0).tolist() == [NEVER, 100.0]
    assert (uses.row(3), uses.row(5), uses.row(4), uses.row(9)) == (0, 1, None, None)
