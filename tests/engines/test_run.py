"""A run reports where it can be resumed after any item, what it skipped, and what it leaves out."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.dataset import Dataset
from penstock.engines import EngineName, Program, Run, Start, start_run
from penstock.engines.run import ENGINES
from penstock.errors import DataError
from penstock.plan import Cut
from penstock.testing import numbers

ENGINE_NAMES = ["serial", "local"]


def run_of(ds: Dataset, start: Start | None = None, cut: Cut | None = None, **how: Any) -> Run:
    program = Program(ds.plan)
    order = program.order(0)
    return Run(program, order, 0, program.start(order, cut) if start is None else start, **how)


def xs(items: Any) -> list[int]:
    return [item["x"] for item in items]


def test_every_engine_can_be_chosen() -> None:
    assert set(ENGINES) == {"local", "ray", "serial"}


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_a_run_can_be_resumed_after_every_item(engine: EngineName) -> None:
    ds = numbers((7, 6)).shuffle(seed=3).map(dict, workers=2).on(engine)
    whole = xs(run_of(ds).items())
    run = run_of(ds, tracked=True)
    assert run.here() == run.start
    for done, _ in enumerate(run, 1):
        assert xs(run_of(ds, run.here()).items()) == whole[done:]
    assert run.here() == Start([])


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_a_run_can_be_resumed_after_every_block(engine: EngineName) -> None:
    ds = numbers((40,)).map(dict).on(engine)
    run, done = run_of(ds), 0
    for items in run.runs():
        done += len(items)
        assert xs(run_of(ds, run.here()).items()) == list(range(done, 40))
    assert done == 40


def test_closing_a_run_ends_its_iteration_and_keeps_its_position() -> None:
    run = run_of(numbers((10,)).map(dict))
    items = iter(run)
    assert [next(items)["x"] for _ in range(3)] == [0, 1, 2]
    run.close()
    run.close()
    assert list(items) == []
    assert run.here() == Start([[3, 10, 1, 0]])
    assert not run.stats().running


def test_an_item_that_is_held_back_is_delivered_again() -> None:
    run = run_of(numbers((10,)))
    items = iter(run)
    assert [next(items)["x"] for _ in range(3)] == [0, 1, 2]
    run.hold_back()
    assert run.here() == Start([[2, 10, 1, 0]])


def test_an_error_is_raised_after_the_items_before_it() -> None:
    run = run_of(numbers((10,), bad=[4]))
    got: list[int] = []
    with pytest.raises(DataError, match="made to fail"):
        got.extend(item["x"] for item in run)
    assert got == [0, 1, 2, 3]
    assert run.here() == Start([[4, 10, 1, 0]])


@pytest.mark.parametrize("limit", [1, 0.15])
def test_too_many_skipped_samples_are_an_error_that_names_the_last(limit: float) -> None:
    run = run_of(numbers((10,), bad=[2, 5]).on_error("skip", limit=limit))
    with pytest.raises(
        DataError, match=rf"2 samples failed, more than on_error's limit of {limit}; the last: "
    ) as caught:
        list(run)
    assert caught.value.key == "5"


def test_skipped_samples_are_counted_when_the_cursor_passes_them() -> None:
    run = run_of(numbers((10,), bad=[2, 5]).on_error("skip").on("serial"))
    passed = {item["x"]: [skip.place.key for skip in run.skips_so_far()] for item in run}
    assert passed[0] == []
    assert passed[3] == ["2"]
    assert [skip.place.key for skip in run.skipped] == ["2", "5"]


@pytest.mark.parametrize(
    ("uneven", "lengths", "dropped", "padded"),
    [
        ("keep", [5, 6], [[], []], [[], []]),
        ("drop", [5, 5], [[], [[10, 11, 1, 0]]], [[], []]),
        ("pad", [6, 6], [[], []], [[[0, 1, 1, 0]], []]),
    ],
)
def test_a_run_names_the_positions_that_are_dropped_or_repeated(
    uneven: Any, lengths: list[int], dropped: list[Any], padded: list[Any]
) -> None:
    runs = [run_of(numbers((11,)), cut=Cut(rank, 2, uneven=uneven)) for rank in range(2)]
    assert [len(list(run)) for run in runs] == lengths
    assert [run.start.left_out(run.here()) for run in runs] == dropped
    assert [run.start.repeated() for run in runs] == padded


def test_a_callback_is_called_for_every_delivered_item() -> None:
    counts: list[int] = []
    run = run_of(numbers((10,)).on("local"), on_delivered=lambda rows, count: counts.append(count))
    items = iter(run)
    for _ in range(3):
        next(items)
    run.report_delivered()
    assert sum(counts) == 3
    list(items)
    assert sum(counts) == 10


def test_an_unordered_run_is_ordered_if_its_progress_could_not_be_recorded() -> None:
    ds = numbers((20,)).flat_map(lambda sample: [sample]).shuffle(4).on("local", ordered=False)
    want = xs(ds.on("serial").epoch(0))
    assert xs(run_of(ds, tracked=True)) == want


def test_the_time_that_the_consumer_waits_is_measured() -> None:
    def slow(sample: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.02)
        return sample

    run = run_of(numbers((5,)).map(slow).on("serial"))
    list(run)
    assert run.meters.items == 5
    assert 0.1 <= run.meters.waited <= run.meters.seconds


def test_a_run_from_the_beginning_needs_only_a_plan() -> None:
    assert xs(start_run(numbers((4,)).plan, 0).items()) == [0, 1, 2, 3]
    assert xs(start_run(numbers((4,)).shard(1, 2).plan, 0).items()) == [2, 3]
