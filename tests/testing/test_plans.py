"""The corpus holds plans of every kind, built anew by each call."""

from __future__ import annotations

import pytest

from penstock.errors import StateError
from penstock.testing import CORPUS, RECUT
from penstock.testing.plans import ORDER_DEPENDENT


@pytest.mark.parametrize("name", CORPUS)
def test_building_a_plan_twice_gives_equal_descriptions(name: str) -> None:
    assert repr(CORPUS[name]()) == repr(CORPUS[name]())


def test_the_lists_name_plans_of_the_corpus() -> None:
    assert set(RECUT) <= set(CORPUS)
    assert set(CORPUS) >= ORDER_DEPENDENT


@pytest.mark.parametrize("name", ["rebatched", "batched by size"])
def test_a_plan_that_is_not_listed_cannot_be_recut(name: str) -> None:
    ds = CORPUS[name]().on("serial")
    assert name not in RECUT
    states = [ds.loader(rank, 2, uneven="keep").state_dict() for rank in range(2)]
    with pytest.raises(StateError):
        ds.loader(uneven="keep").load_state_dict(states=states)
