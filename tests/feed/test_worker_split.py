from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.engines import Program, Start
from penstock.errors import PlanError
from penstock.feed import TorchWorker, WorkerShare
from penstock.order import Order, Piece, ShardOrder, WorkerOrder
from penstock.plan import Cut, Plan
from penstock.testing import numbers


def _order(samples: int) -> Order:
    return ShardOrder(np.array([7], np.uint64), np.array([samples], np.int64), 0, 0, 0)


def _indices(order: Order) -> list[int]:
    return [int(i) for i in order.at(np.arange(order.size)).index]


def _shares(ds: ps.Dataset, workers: int, items_per_batch: int = 1) -> list[WorkerShare]:
    return [WorkerShare.of(TorchWorker(id, workers, 0), ds.plan, items_per_batch) for id in range(workers)]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30), st.integers(1, 4)), max_size=4),
    st.integers(1, 5),
    st.integers(1, 7),
)
def test_workers_take_alternating_runs_of_any_pieces(
    parts: list[tuple[int, int, int]], workers: int, run_length: int
) -> None:
    pieces: list[Piece] = [[start, start + length, step, 0] for start, length, step in parts if length]
    whole = [p for start, stop, step, _ in pieces for p in range(start, stop, step)]
    shares = [_indices(WorkerOrder(_order(60), pieces, worker, workers, run_length)) for worker in range(workers)]
    runs = [[share[i : i + run_length] for i in range(0, len(share), run_length)] for share in shares]
    assert [p for one_of_each in zip_longest(*runs, fillvalue=[]) for run in one_of_each for p in run] == whole


@pytest.mark.parametrize(
    ("ds", "run_length"),
    [
        (numbers((9,)), 1),
        (numbers((9,)).batched(4), 4),
        (numbers((9,)).batched(4).map(lambda batch: batch).batched(3), 12),
        (numbers((9,)).batched(4).shuffle(5), 4),
        (numbers((9,)).filter(bool).batched(4), None),
        (numbers((9,)).batched(4).unbatched(), None),
        (numbers((9,)).batched_by(len, 4), None),
        (numbers((9,)).on_error("skip").batched(4), None),
    ],
)
def test_a_run_is_a_whole_batch_if_batches_have_one_size(ds: ps.Dataset, run_length: int | None) -> None:
    assert _shares(ds, 2)[1].run_length == run_length
    assert _shares(ds, 2, items_per_batch=16)[1].run_length == (run_length and 16 * run_length)


def test_if_batch_sizes_differ_every_worker_has_several_runs() -> None:
    ds = numbers((1000,)).filter(bool)
    program = Program(ds.plan)
    order = program.order(0)
    sizes = [share.apply(ds.plan, order, Start(order.whole()))[0].size for share in _shares(ds, 3)]
    assert sum(sizes) == 1000
    assert max(sizes) - min(sizes) <= 1000 // 48


def test_padding_stays_at_the_end_of_its_workers_share() -> None:
    plan = numbers((10,)).plan
    program = Program(plan)
    order = program.order(0)
    start = program.start(order, Cut(2, 4, uneven="pad"))  # 2 of its own, 1 repeated
    starts = [share.apply(plan, order, start)[1] for share in _shares(numbers((10,)), 2)]
    assert [own.quota for own in starts] == [2, 1]
    assert [sum(stop - begin for begin, stop, _, _ in own.left) for own in starts] == [1, 1]


def test_a_stage_that_sees_the_whole_stream_runs_in_the_first_worker() -> None:
    ds = numbers((10,)).filter(bool).limit(3)
    program = Program(ds.plan)
    order = program.order(0)
    start = Start(order.whole())
    assert [share.apply(ds.plan, order, start)[1].left for share in _shares(ds, 3)] == [order.whole(), [], []]


@pytest.mark.parametrize(
    "start",
    [Start([[3, 10, 1, 1]]), Start([[3, 10, 1, 0]], groups={1: (2, 0)}), Start([[3, 10, 1, 0]], seen={1: 2})],
)
def test_a_start_within_a_group_belongs_to_the_first_worker(start: Start) -> None:
    ds = numbers((10,))
    starts = [share.apply(ds.plan, _order(10), start)[1] for share in _shares(ds, 2)]
    assert [own.left for own in starts] == [start.left, []]


def test_the_workers_share_the_rest_of_an_epoch() -> None:
    ds = numbers((10,))
    order = _order(10)
    shares = [WorkerShare(id, 2, 1, Start([[4, 10, 1, 0]])) for id in range(2)]
    assert [_indices(share.apply(ds.plan, order, Start(order.whole()))[0]) for share in shares] == [
        [4, 6, 8],
        [5, 7, 9],
    ]


def test_a_share_cannot_be_shuffled() -> None:
    with pytest.raises(PlanError, match="cannot be shuffled"):
        WorkerOrder(_order(9), [[0, 9, 1, 0]], 0, 2, 1).spans()


def test_an_endless_order_has_endless_shares() -> None:
    plan: Plan = numbers((10,)).repeat().plan
    order: Any = Program(plan).order(0)
    share = WorkerOrder(order, order.whole(), 1, 2, 4)
    assert share.size == order.size
    assert share.at(np.arange(6)).index.tolist() == [4, 5, 6, 7, 2, 3]
