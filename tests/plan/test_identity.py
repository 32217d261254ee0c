from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PlanError
from penstock.plan import Identity, Place, Skipped, exclusions, parse_identity
from penstock.plan.identity import digest


def test_samples_are_given_by_identity_or_as_skipped_entries() -> None:
    one = Identity(1, "s", 2)
    assert parse_identity((1, "s", 2)) == parse_identity(one) == parse_identity((1, "s", 2, 0)) == one
    assert exclusions(
        [
            "bad.jsonl",
            Path("x"),
            [(1, "s", 2), Skipped(0, Place("/data/a/0.tar", "k3", 0, 3, "a/0.tar"), "map", "no")],
            (1, "s", 2),
        ]
    ) == (
        "bad.jsonl",
        "x",
        one,
        Identity(0, "a/0.tar", 3),
        one,
    )


@pytest.mark.parametrize("value", [3, None, (1, "s"), ("s", 1, 2), (0, "s", -1), [3], {"source": 0}, b"bad.jsonl"])
def test_a_value_that_identifies_no_sample_is_refused(value: Any) -> None:
    with pytest.raises(PlanError, match=r"does not identify a sample: expected \(source, shard, index\)"):
        exclusions([value])


def test_the_digest_does_not_depend_on_order_or_repetition() -> None:
    one, two = Identity(0, "s", 1), Identity(0, "s", 2)
    assert digest([one, two]) == digest([two, one, one]) != digest([one])
