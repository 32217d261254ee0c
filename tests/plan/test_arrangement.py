from __future__ import annotations

from typing import Any

import numpy as np

from penstock.order import ShardOrder
from penstock.plan import (
    FilterFn,
    MapFn,
    Plan,
    Rename,
    Select,
    Shuffle,
    Slice,
    ToTuple,
    Union,
    Zip,
    arrange,
    unshuffled,
)
from penstock.testing import Numbers

A, B = Numbers((3,), name="a"), Numbers((3,), name="b")


def _leaf_order(leaf: int, seed: int, epoch: int) -> ShardOrder:
    return ShardOrder(np.array([leaf], np.uint64), np.array([3], np.int64), leaf, seed, epoch)


def _arrange(plan: Plan) -> Any:
    return arrange(plan, _leaf_order)


def test_stages_of_branches_precede_those_of_the_whole() -> None:
    plan = Plan(Union((Plan(A, (MapFn(len),)), Plan(B, (FilterFn(all),)))), (MapFn(any),))
    arrangement, make = _arrange(plan)
    assert arrangement.leaves == [A, B]
    assert [placed.stage.describe() for placed in arrangement.body] == ["map(len)", "filter(all)", "map(any)"]
    assert make(0).size == 6


def test_lifted_stages_know_whether_they_keep_the_count() -> None:
    arrangement, _ = _arrange(Plan(Union((Plan(A, (MapFn(len),)), Plan(B, (FilterFn(all),))))))
    assert [placed.stage.keeps_count for placed in arrangement.body] == [True, False]
    assert [placed.stage.length(5) for placed in arrangement.body] == [5, None]


def test_every_stage_has_its_own_number() -> None:
    plan = Plan(Union((Plan(A, (MapFn(len), MapFn(len))), Plan(B, (MapFn(len),)))), (MapFn(len), MapFn(len)))
    numbers = [placed.number for placed in _arrange(plan)[0].body]
    assert len(set(numbers)) == 5


def test_a_source_provides_the_fields_that_its_branch_and_the_whole_need() -> None:
    left = Plan(A, (Rename((("y", "x"),)), Select(("y",))))
    plan = Plan(Union((left, Plan(B))), (ToTuple(("y",)),))
    arrangement, _ = _arrange(plan)
    of_a, of_b = arrangement.fields(0), arrangement.fields(1)
    assert (of_a.wants("x"), of_a.wants("y"), of_b.wants("x"), of_b.wants("y")) == (True, False, False, True)


def test_the_operands_of_a_zip_have_slots() -> None:
    inner = Plan(Zip((Plan(A), Plan(B))))
    arrangement, make = _arrange(Plan(Zip((inner, Plan(A)))))
    assert arrangement.slots == 3
    assert [placed.stage.describe() for placed in arrangement.body] == ["zip(merge)", "zip(merge)"]
    assert make(0).size == 3


def test_an_unshuffled_plan_has_no_shuffle_in_any_branch() -> None:
    plan = Plan(Union((Plan(A, (Shuffle(), Slice(0, 2))), Plan(B))), (Shuffle(5), MapFn(len)))
    plain = unshuffled(plan)
    assert [stage.describe() for stage in plain.stages] == ["map(len)"]
    assert [stage.describe() for stage in plain.branches()[0].stages] == ["limit(2)"]
