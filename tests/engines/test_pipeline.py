"""One pipeline with several consumers: they get what loaders get, share its pools, and do not disturb each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engines import Pipeline, Start
from penstock.errors import EngineError, PlanError
from penstock.plan import Cut
from penstock.testing import numbers
from penstock.testing.plans import noise


def _numbers(count: int) -> ps.Dataset:
    return numbers([count // 2, count - count // 2])


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def _start(pipeline: Pipeline, epoch: int, rank: int = 0, world: int = 1) -> Start:
    cut = Cut(rank, world, "range", "drop" if world > 1 else "keep")
    return pipeline.program.start(pipeline.order(epoch), cut)


def _joined(pipeline: Pipeline, epoch: int, start: Start, servers: int) -> list[tuple[Any, Start]]:
    """Return the items of several shares in the order of the stream, each with the progress after it."""
    shares = [list(pipeline.batches(epoch, start, part=(index, servers))) for index in range(servers)]
    joined = [shares[number % servers][number // servers] for number in range(sum(map(len, shares)) - servers)]
    return [(served.item, served.after) for served in joined]


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_consumers_in_different_epochs_and_ranks_share_the_pools(on: Any) -> None:
    ds = _numbers(300).shuffle().map(noise, on=on, workers=2).batched(7)
    pipeline = Pipeline(ds.plan)
    got: dict[tuple[int, int, int], list[Any]] = {}

    def consume(epoch: int, rank: int, world: int) -> None:
        batches = pipeline.batches(epoch, _start(pipeline, epoch, rank, world))
        got[epoch, rank, world] = [served.item for served in batches if not served.ended]

    wanted = [(0, 0, 2), (0, 1, 2), (3, 0, 1)]
    threads = [threading.Thread(target=consume, args=consumer) for consumer in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pools = pipeline.meters.segments
    pipeline.close()
    assert [meter.workers for meter in pools] == [2]
    for epoch, rank, world in wanted:
        np.testing.assert_equal(got[epoch, rank, world], list(ds.loader(rank, world, epoch=epoch)))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_split_batches_are_the_stream_and_each_has_its_state(world: int, drop_last: bool) -> None:
    ds = _numbers(100).shuffle().map(noise).batched(7, drop_last=drop_last).map(noise)
    pipeline = Pipeline(ds.plan)
    assert pipeline.split_problem is None
    start = _start(pipeline, 1, 0, world)
    whole = [served for served in pipeline.batches(1, start) if not served.ended]
    for servers in (2, 3):
        joined = _joined(pipeline, 1, start, servers)
        np.testing.assert_equal([item for item, _ in joined], [served.item for served in whole])
        assert [after for _, after in joined] == [served.after for served in whole]
    pipeline.close()


def test_padding_is_split_with_its_mark() -> None:
    ds = _numbers(10).map(dict).batched(2)
    pipeline = Pipeline(ds.plan)
    padded = 0
    for rank in range(3):
        start = pipeline.program.start(pipeline.order(0), Cut(rank, 3, "range", "pad"))
        want = [served.item for served in pipeline.batches(0, start) if not served.ended]
        np.testing.assert_equal([item for item, _ in _joined(pipeline, 0, start, 2)], want)
        padded += sum("__pad__" in batch for batch in want)
    pipeline.close()
    assert padded == 2


def test_a_run_continues_after_any_batch() -> None:
    ds = _numbers(60).shuffle().filter(_odd).batched(4)
    pipeline = Pipeline(ds.plan)
    whole = [served for served in pipeline.batches(0, _start(pipeline, 0)) if not served.ended]
    for number, served in enumerate(whole, 1):
        rest = [after.item for after in pipeline.batches(0, served.after) if not after.ended]
        np.testing.assert_equal(rest, [served.item for served in whole[number:]])
    pipeline.close()


def test_traced_batches_name_their_positions_also_when_they_are_joined() -> None:
    pipeline = Pipeline(_numbers(20).shuffle().batched(3).plan)
    start = _start(pipeline, 0)
    tables = [
        [rows[:, :].tolist() for rows, _ in served.rows]
        for part in ((0, 1), (0, 2), (1, 2))
        for served in pipeline.batches(0, start, part=part, traced=True)
        if not served.ended
    ]
    assert sorted(map(str, tables[:7])) == sorted(map(str, tables[7:]))
    pipeline.close()


@pytest.mark.parametrize(
    ("ds", "problem"),
    [
        (_numbers(9).filter(_odd).batched(2), "filter"),
        (_numbers(9).batched(2).on_error("skip"), "skip"),
        (_numbers(9).batched_by(lambda _: 1, 3), "batched_by"),
        (_numbers(9).batched(2).shuffle(2), "shuffle"),
    ],
)
def test_plans_whose_batches_cannot_be_split_say_why(ds: ps.Dataset, problem: str) -> None:
    pipeline = Pipeline(ds.plan)
    assert problem in (pipeline.split_problem or "")
    with pytest.raises(PlanError, match="cannot be split"):
        next(pipeline.batches(0, _start(pipeline, 0), part=(0, 2)))
    pipeline.close()


def test_a_cut_or_unordered_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="rank and world"):
        Pipeline(_numbers(9).shard(0, 2).plan)
    with pytest.raises(PlanError, match="ordered"):
        Pipeline(_numbers(9).map(dict).on("local", ordered=False).plan)


def test_a_consumer_that_waits_holds_a_bounded_share_and_others_go_on() -> None:
    made = []

    def make(sample: dict[str, Any]) -> dict[str, Any]:
        made.append(1)
        return {**sample, "payload": np.zeros(100_000, np.uint8)}

    pipeline = Pipeline(_numbers(4000).map(make, workers=2).on("local", memory="8MB").plan)
    waiting = [pipeline.batches(epoch, _start(pipeline, epoch)) for epoch in range(3)]
    for consumer in waiting:
        next(consumer)
    _wait(lambda: _is_steady(made))
    assert len(made) < 3 * 8_000_000 / 100_000
    others = pipeline.batches(9, _start(pipeline, 9))
    assert len(list(islice(others, 300))) == 300
    for consumer in (*waiting, others):
        consumer.close()
    assert pipeline.runs == 0
    pipeline.close()


def _is_steady(made: list[int]) -> bool:
    before = len(made)
    time.sleep(0.3)
    return len(made) == before


def test_a_closed_run_leaves_no_parts_in_a_worker_that_others_use() -> None:
    many = lambda sample: [{**sample, "payload": bytes(200_000)} for _ in range(40)]  # noqa: E731
    pipeline = Pipeline(_numbers(50).flat_map(many, on="processes", workers=1).plan)
    for _ in range(3):
        run = pipeline.batches(0, _start(pipeline, 0))
        next(run)
        run.close()
    want = [sample["x"] for sample in islice(_numbers(50).flat_map(many), 45)]
    again = pipeline.batches(0, _start(pipeline, 0))
    assert [served.item["x"] for served in islice(again, 45)] == want
    again.close()
    pipeline.close()


def test_closing_the_pipeline_ends_its_runs_and_threads() -> None:
    before = threading.active_count()
    pipeline = Pipeline(_numbers(1000).map(dict, workers=2).plan)
    run = pipeline.batches(0, _start(pipeline, 0))
    next(run)
    pipeline.close()
    with pytest.raises(EngineError, match="closed"):
        list(run)
    with pytest.raises(EngineError, match="closed"):
        next(pipeline.batches(0, _start(pipeline, 0)))
    _wait(lambda: threading.active_count() <= before)
