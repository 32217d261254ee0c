"""Stages are fused into segments and levels."""

from __future__ import annotations

from typing import Any

from penstock.dataset import Dataset, from_items
from penstock.engines import Level, Program, Segment
from penstock.engines.segments import DEFAULT_RESOURCES, build_levels
from penstock.plan import MapFn, PlacedStage, Resources
from penstock.testing import numbers


def f(sample: Any) -> Any:
    return sample


def levels(ds: Dataset) -> list[Level]:
    return Program(ds.plan).levels


def fused(ds: Dataset) -> list[list[str]]:
    """Return the names of the stages, by level and segment."""
    return [
        [" ".join(placed.stage.name for placed in segment.stages) for segment in level.segments] for level in levels(ds)
    ]


def heads(ds: Dataset) -> list[str | None]:
    return [level.head.stage.name if level.head else None for level in levels(ds)]


def test_a_plan_that_only_reads_gets_no_pool() -> None:
    [level] = levels(numbers((3,)).select("x").rename(y="x"))
    [segment] = level.segments
    assert not segment.needs_pool


def test_stages_without_requests_are_fused_with_their_neighbours() -> None:
    assert fused(numbers((3,)).select("x").map(f).drop("x").filter(f)) == [["read select map drop filter"]]


def test_a_stage_without_workers_is_fused_with_one_that_has_them() -> None:
    for ds in (numbers((3,)).map(f).map(f, workers=3), numbers((3,)).map(f, workers=3).map(f)):
        [[segment]] = [level.segments for level in levels(ds)]
        assert segment.resources == Resources(3)


def test_stages_with_different_resources_have_separate_pools() -> None:
    ds = numbers((3,)).map(f, workers=1).map(f, workers=1).map(f, workers=2).map(f, on="processes")
    assert fused(ds) == [["read map map", "map", "map"]]


def test_stages_with_different_retries_share_a_pool() -> None:
    assert fused(numbers((3,)).map(f, workers=2, retries=3).map(f, workers=2)) == [["read map map"]]


def test_a_stage_without_gpus_is_not_fused_with_one_that_has_them() -> None:
    assert fused(numbers((3,)).map(f).map(f, gpus=1).map(f)) == [["read map", "map", "map"]]


def test_a_stage_that_sees_several_items_begins_a_level() -> None:
    ds = numbers((9,)).map(f).batched(2).map(f).unbatched().shuffle(3).limit(2)
    assert heads(ds) == [None, "batched", "shuffle", "limit"]
    assert fused(ds) == [["read map"], ["map unbatched"], [], []]


def test_reading_with_workers_gets_a_pool() -> None:
    [level] = build_levels([], Resources(4))
    assert level.segments[0].needs_pool


def test_a_segment_describes_its_stages() -> None:
    [[segment]] = [level.segments for level in levels(numbers((3,)).map(f).filter(f))]
    assert segment.describe() == "read -> map(f) -> filter(f)"


def test_fusing_a_stage_without_requests_keeps_the_resources() -> None:
    stage = from_items([1]).map(f, workers=2).plan.body[0]
    light = from_items([1]).select("x").plan.body[0]
    segment = Segment([PlacedStage(stage, 0)], stage.resources)
    segment.fuse(PlacedStage(light, 1))
    assert segment.resources == Resources(2)
    assert segment.can_fuse(MapFn(dict, resources=DEFAULT_RESOURCES))
    assert not segment.can_fuse(MapFn(dict, resources=Resources(3)))


def test_a_stage_that_asks_for_rows_is_fused_only_behind_stages_that_keep_the_count() -> None:
    def segments(ds: Dataset) -> list[tuple[str, int]]:
        return [(segment.describe(), segment.rows) for level in levels(ds) for segment in level.segments]

    base = numbers((3,))
    assert segments(base.map(f).map_batches(f, 10).filter(f)) == [
        ("read -> map(f) -> map_batches(f, batch_size=10) -> filter(f)", 10)
    ]
    assert segments(base.filter(f).map_batches(f, 10)) == [
        ("read -> filter(f)", 1),
        ("map_batches(f, batch_size=10)", 10),
    ]
    assert [rows for _, rows in segments(base.map_batches(f, 10).map_batches(f, 10).map_batches(f, 4))] == [10, 4]
