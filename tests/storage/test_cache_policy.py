"""The policy of the cache evicts what no plan names first, and then what is used last."""

from __future__ import annotations

import numpy as np

from penstock.storage.cache_policy import (
    NEVER,
    Stored,
    Uses,
    choose_evictions,
)


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
