from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.inspection.bench import BenchReport, BenchResult, _rate, bench


def test_a_rate_is_the_sum_of_counts_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def counts() -> Iterator[int]:
        while True:
            now[0] += 0.01
            yield 5

    assert 450 < _rate(counts(), 0.1) <= 500.1
    assert _rate(islice(counts(), 1), 0.1) == pytest.approx(500)


def test_the_slowest_step_is_the_bottleneck_and_results_are_found_by_name() -> None:
    steps = (BenchResult("read", 30.0), BenchResult("decode", 10.0), BenchResult("batch", 20.0))
    report = BenchReport(
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
    assert report.bottleneck == BenchResult("decode", 10.0)
    assert report.result("limit: read") == BenchResult("limit: read", 40.0)
    assert report.result("augment") is None


def test_only_steps_on_stored_samples_have_a_rate_in_bytes() -> None:
    ps.from_items([{"txt": "a" * 1000}] * 200).write_tar("memory://inspection-bench/out")
    report = bench("memory://inspection-bench/out", batch=2, workers=1, seconds=0.03)
    assert (report.shards, report.sample_bytes, report.workers) == (1, 1000, 1)
    read, batch = report.steps[0], report.steps[-1]
    assert read.bytes_s == pytest.approx(1000 * read.samples_s)
    assert batch.bytes_s is None


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"size": 0}, {"seconds": 0}, {"workers": 0}], ids=str)
def test_numbers_that_are_not_above_0_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="must be above 0"):
        bench("somewhere/", **wrong)  # type: ignore[arg-type]
