from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.inspection import bench as module
from penstock.inspection.bench import BenchResult, Paces, pace


def test_a_rate_is_what_was_counted_by_the_time_it_took() -> None:
    def counts() -> Iterator[int]:
        while True:
            time.sleep(0.01)
            yield 5

    assert 100 < module._rate(counts(), 0.1) <= 500
    assert module._rate(iter([3]), 0.1) > 0


def test_the_slowest_step_is_the_bottleneck_and_all_can_be_found_by_name() -> None:
    steps = (BenchResult("read", 30.0), BenchResult("decode", 10.0), BenchResult("batch", 20.0))
    paces = Paces(
        1,
        1.0,
        None,
        None,
        224,
        2,
        False,
        (BenchResult("limit: read", 40.0),),
        steps,
        BenchResult("all together", 9.0),
        (),
    )
    assert paces.bottleneck == BenchResult("decode", 10.0)
    assert paces.named("limit: read") == BenchResult("limit: read", 40.0)
    assert paces.named("augment") is None


def test_bytes_are_told_where_they_mean_something() -> None:
    ps.from_items([{"txt": "a" * 1000}]).write_tar("memory://dataset-pace/out")
    paces = pace("memory://dataset-pace/out", batch=2, workers=1, seconds=0.03)
    assert (paces.shards, paces.sample_bytes, paces.workers) == (1, 1000, 1)
    read, batch = paces.steps[0], paces.steps[-1]
    assert read.bytes_s == pytest.approx(1000 * read.samples_s)
    assert batch.bytes_s is None


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"size": 0}, {"seconds": 0}, {"workers": 0}], ids=str)
def test_numbers_that_make_no_sense_are_refused_where_they_are_given(wrong: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="must be above 0"):
        pace("somewhere/", **wrong)  # type: ignore[arg-type]
