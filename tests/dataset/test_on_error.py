"""Failing samples end the run, or are skipped, counted and listed by identity."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import penstock as ps
from penstock.engines import EngineName
from penstock.errors import DataError, StageError
from penstock.testing import numbers

ENGINES = ["serial", "local"]


def _xs(ds: Any) -> list[int]:
    return [int(sample["x"]) for sample in ds]


def _no_fives(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["x"] % 5 == 0:
        raise ValueError(f"{sample['x']} is a multiple")
    return sample


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_failure_stops_the_run(engine: EngineName) -> None:
    got: list[int] = []
    with pytest.raises(StageError, match="5 is a multiple"):
        got.extend(x for x in _iter(numbers((20,)).skip(1).map(_no_fives).on(engine)))
    assert got == [1, 2, 3, 4]


def _iter(ds: ps.Dataset) -> Any:
    return (sample["x"] for sample in ds)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", ["before", "after"])
def test_the_policy_applies_to_the_whole_plan_wherever_it_is_set(engine: EngineName, where: str) -> None:
    ds = numbers((12,), bad=(3,))
    ds = ds.on_error("skip").map(_no_fives) if where == "before" else ds.map(_no_fives).on_error("skip")
    assert _xs(ds.on(engine)) == [1, 2, 4, 6, 7, 8, 9, 11]


@pytest.mark.parametrize("engine", ENGINES)
def test_skipped_samples_are_listed_with_shard_key_stage_and_problem(engine: EngineName) -> None:
    loader = numbers((4, 8), bad=(3,)).map(_no_fives).on_error("skip").on(engine).loader()
    list(loader)
    assert [(s.place.shard, s.place.key, s.stage) for s in loader.skipped] == [
        ("shard-0000", "0", "map"),
        ("shard-0000", "3", "read"),
        ("shard-0001", "5", "map"),
        ("shard-0001", "10", "map"),
    ]
    assert "made to fail" in loader.skipped[1].problem
    assert "10 is a multiple" in loader.skipped[3].problem


def test_a_sample_is_counted_when_the_cursor_passes_it() -> None:
    loader = numbers((30,)).map(_no_fives).on_error("skip").loader()
    counts = {}
    for sample in loader:
        counts[sample["x"]] = len(loader.skipped)
    # The cursor passes a failing sample together with the sample before it.
    assert (counts[1], counts[3], counts[6], counts[13]) == (1, 1, 2, 3)
    assert len(loader.skipped) == 6


def test_a_skipped_sample_keeps_its_position() -> None:
    ds = numbers((20,)).map(_no_fives).on_error("skip")
    assert _xs(ds.limit(7)) == [1, 2, 3, 4, 6]
    assert _xs(ds.skip(14)) == [14, 16, 17, 18, 19]
    assert _xs(ds.shard(1, 2, "step")) == [1, 3, 7, 9, 11, 13, 17, 19]


def test_batches_are_filled_over_skipped_samples() -> None:
    ds = numbers((10,)).map(_no_fives).on_error("skip").batched(4)
    assert [batch["x"].tolist() for batch in ds] == [[1, 2, 3, 4], [6, 7, 8, 9]]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("limit", "enough"), [(4, True), (3, False), (0.2, True), (0.19, False), (0, False)])
def test_a_limit_of_skips_is_a_number_or_a_share(limit: float, enough: bool, engine: EngineName) -> None:
    ds = numbers((20,)).map(_no_fives).on_error("skip", limit=limit).on(engine)
    if enough:
        assert len(_xs(ds)) == 16
    else:
        with pytest.raises(DataError, match=f"limit of {limit}.*is a multiple") as caught:
            list(ds)
        assert caught.value.key is not None


def test_a_share_refers_to_the_samples_of_one_rank() -> None:
    ds = numbers((40,)).map(_no_fives).on_error("skip", limit=0.2)
    assert [len(_xs(ds.shard(rank, 2))) for rank in range(2)] == [16, 16]


def test_count_runs_if_samples_may_be_skipped() -> None:
    assert numbers((20,)).map(_no_fives).on_error("skip").count() == 16


def test_a_run_that_skipped_samples_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock"):
        list(numbers((20,)).map(_no_fives).on_error("skip"))
    assert [record.getMessage() for record in caplog.records] == [
        "skipped 4 samples that failed (shard-0000:0, shard-0000:5, shard-0000:10, ...)"
    ]


def test_errors_that_no_sample_causes_are_not_skipped() -> None:
    def missing(sample: Any) -> Any:
        raise ps.errors.MissingExtra("this", "audio")

    with pytest.raises(ps.errors.MissingExtra):
        list(numbers((3,)).map(missing).on_error("skip"))


def test_the_last_policy_applies() -> None:
    with pytest.raises(StageError):
        list(numbers((3,)).map(_no_fives).on_error("skip").on_error("raise"))
