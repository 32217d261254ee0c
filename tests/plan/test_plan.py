from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import PlanError
from penstock.plan import (
    Batched,
    Cut,
    FilterFn,
    FlatMapFn,
    MapFn,
    OnError,
    Plan,
    Shuffle,
    Slice,
    StreamLimit,
    Union,
    Zip,
    check_branch,
)
from penstock.testing import Numbers

SOURCE = Numbers((3,))


def _plan(*stages: Any, **options: Any) -> Plan:
    return Plan(SOURCE, tuple(stages), **options)


def test_adding_a_stage_returns_a_new_plan() -> None:
    plan = _plan()
    assert plan.then(Slice(0, 3)) == plan.then(Slice(0, 3))
    assert plan.stages == ()


def test_stages_on_items_and_on_positions_are_separated() -> None:
    plan = _plan(MapFn(len), Shuffle(), Batched(2), Slice(0, 3))
    assert [stage.describe() for stage in plan.body] == ["map(len)", "batched(2)"]
    assert [stage.describe() for stage in plan.ordering] == ["shuffle()", "limit(3)"]


@pytest.mark.parametrize(
    ("stages", "counted", "changes", "commutes"),
    [
        ((MapFn(len), Shuffle()), True, False, True),
        ((FilterFn(len),), False, True, True),
        ((FlatMapFn(len),), False, True, True),
        ((Batched(2),), False, False, False),
        ((StreamLimit(2),), False, False, False),
    ],
)
def test_a_plan_knows_how_its_stages_affect_the_count(
    stages: tuple[Any, ...], counted: bool, changes: bool, commutes: bool
) -> None:
    plan = _plan(*stages)
    assert (plan.keeps_count, plan.changes_count, plan.commutes) == (counted, changes, commutes)


def test_a_branch_that_changes_the_count_changes_it_for_the_whole() -> None:
    whole = Plan(Union((_plan(FilterFn(len)), _plan())))
    assert (whole.keeps_count, whole.changes_count) == (False, True)
    assert [source for source in whole.sources() if source is SOURCE] == [SOURCE, SOURCE]


def test_a_plan_can_be_cut_only_once() -> None:
    with pytest.raises(PlanError, match="already cut for rank 0 of 2"):
        _plan().shard(Cut(0, 2)).shard(Cut(0, 2))


def test_a_stage_on_the_whole_stream_cannot_be_cut() -> None:
    plan = _plan(FilterFn(len), StreamLimit(3))
    with pytest.raises(PlanError, match=r"limit\(3\) needs the whole stream"):
        plan.shard(Cut(0, 2))
    assert plan.shard(Cut(0, 1)).cut == Cut(0, 1)


def test_equal_ranks_are_refused_where_the_count_may_change() -> None:
    cut = Cut(0, 2, uneven="drop")
    for stages, options in (((FilterFn(len),), {}), ((), {"errors": OnError("skip")})):
        with pytest.raises(PlanError, match="uneven='drop'"):
            _plan(*stages, cut=cut, **options)
    assert _plan(MapFn(len), Batched(2), cut=cut)


def test_a_combination_of_a_cut_plan_is_refused() -> None:
    for name in ("union", "mix", "zip"):
        with pytest.raises(PlanError, match=f"{name}: a branch is already cut"):
            check_branch(_plan().shard(Cut(0, 2)), name)


def test_the_stages_allowed_in_a_branch_depend_on_the_combination() -> None:
    check_branch(_plan(FilterFn(len)), "union")
    with pytest.raises(PlanError, match="changes the count; call it on the result of"):
        check_branch(_plan(FilterFn(len)), "zip")
    with pytest.raises(PlanError, match="more than one sample at a time; call it on the result of"):
        check_branch(_plan(Batched(2)), "union")
    with pytest.raises(PlanError, match="a branch must not be a zip"):
        check_branch(Plan(Zip((_plan(), _plan()))), "mix")
    with pytest.raises(PlanError, match=r"filter\(len\)"):
        check_branch(Plan(Union((_plan(FilterFn(len)), _plan()))), "zip")


def test_a_plan_describes_itself_line_by_line() -> None:
    plan = _plan(Slice(2), MapFn(len), seed=3, epoch=1, cut=Cut(0, 2), errors=OnError("skip"))
    assert plan.describe().splitlines() == [
        "numbers([3])",
        "  .skip(2)",
        "  .map(len)",
        "  .seed(3)",
        "  .epoch(1)",
        "  .shard(0, 2, cut='range', uneven='keep')",
        "  .on_error('skip')",
    ]
