"""Limits on the size of decoded fields."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from penstock.codecs.limits import Limits, OverLimit
from penstock.errors import PlanError


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "1MB", None])
@pytest.mark.parametrize("name", ["pixels", "bytes", "ratio"])
def test_a_limit_must_be_a_positive_integer(name: str, bad: Any) -> None:
    with pytest.raises(PlanError, match=name):
        Limits(**{name: bad})


def test_a_value_at_the_limit_passes_and_one_beyond_it_does_not() -> None:
    limits = Limits(pixels=100, bytes=50)
    limits.check_pixels(10, 10)
    limits.check_bytes(50, "thing")
    with pytest.raises(OverLimit, match=r"image of 101x1 pixels exceeds the limit of 100 pixels.*pixels="):
        limits.check_pixels(101, 1)
    with pytest.raises(OverLimit, match=r"thing of 51 bytes exceeds the limit of 50 bytes.*bytes="):
        limits.check_bytes(51, "thing")


def test_the_ratio_is_checked_only_beyond_one_mebibyte() -> None:
    limits = Limits(ratio=10)
    limits.check_ratio(1, 1 << 20, "thing")
    limits.check_ratio(1 << 20, 10 << 20, "thing")
    with pytest.raises(OverLimit, match="beyond 10 times its size"):
        limits.check_ratio(1, (1 << 20) + 1, "thing")


def test_limits_compare_hash_and_pickle_by_value() -> None:
    limits = Limits(pixels=5)
    assert limits == pickle.loads(pickle.dumps(limits))
    assert hash(limits) == hash(Limits(pixels=5))
    assert limits != Limits()
