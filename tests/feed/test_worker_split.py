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
from penstock.feed.worker_split import Dealt
from penstock.order import Order, Piece, ShardOrder
from penstock.plan import Cut, Plan
from penstock.testing import numbers


def _order(samples: int) -> Order:
    return ShardOrder(np.array([7], np.uint64), np.array([samples], np.int64), 0, 0, 0)


def _places(dealt: Order) -> list[int]:
    return [int(i) for i in dealt.at(np.arange(dealt.size)).index]


def _deal(ds: ps.Dataset, many: int, at_once: int = 1) -> list[WorkerShare]:
    return [WorkerShare.of(TorchWorker(id, many, 0), ds.plan, at_once) for id in range(many)]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30), st.integers(1, 4)), max_size=4),
    st.integers(1, 5),
    st.integers(1, 7),
)
def test_workers_take_runs_of_any_pieces_in_turn(parts: list[tuple[int, int, int]], many: int, run: int) -> None:
    pieces: list[Piece] = [[start, start + length, step, 0] for start, length, step in parts if length]
    whole = [p for start, stop, step, _ in pieces for p in range(start, stop, step)]
    shares = [_places(Dealt(_order(60), pieces, worker, many, run)) for worker in range(many)]
    turns = zip_longest(*([share[i : i + run] for i in range(0, len(share), run)] for share in shares), fillvalue=[])
    assert [p for turn in turns for one in turn for p in one] == whole


@pytest.mark.parametrize(
    ("ds", "run"),
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
def test_a_worker_takes_whole_batches_where_they_have_one_size(ds: ps.Dataset, run: int | None) -> None:
    assert _deal(ds, 2)[1].run == run
    assert _deal(ds, 2, at_once=16)[1].run == (run and 16 * run)


def test_where_sizes_differ_every_worker_has_many_turns() -> None:
    ds = numbers((1000,)).filter(bool)
    program = Program(ds.plan)
    order = program.order(0)
    sizes = [deal.share(ds.plan, order, Start(order.whole()))[0].size for deal in _deal(ds, 3)]
    assert sum(sizes) == 1000
    assert max(sizes) - min(sizes) <= 1000 // 48


def test_padding_stays_at_the_end_of_the_worker_that_has_it() -> None:
    plan = numbers((10,)).plan
    program = Program(plan)
    order = program.order(0)
    start = program.start(order, Cut(2, 4, uneven="pad"))  # 2 of its own, 1 repeated
    shares = [deal.share(plan, order, start) for deal in _deal(numbers((10,)), 2)]
    assert [share.quota for _, share in shares] == [2, 1]
    assert [sum(stop - begin for begin, stop, _, _ in share.left) for _, share in shares] == [1, 1]


def test_what_needs_the_whole_stream_is_the_work_of_one() -> None:
    ds = numbers((10,)).filter(bool).limit(3)
    program = Program(ds.plan)
    order = program.order(0)
    start = Start(order.whole())
    assert [deal.share(ds.plan, order, start)[1].left for deal in _deal(ds, 3)] == [order.whole(), [], []]


@pytest.mark.parametrize(
    "start",
    [Start([[3, 10, 1, 1]]), Start([[3, 10, 1, 0]], groups={1: (2, 0)}), Start([[3, 10, 1, 0]], seen={1: 2})],
)
def test_what_stands_in_the_middle_of_a_group_is_the_work_of_one(start: Start) -> None:
    ds = numbers((10,))
    shares = [deal.share(ds.plan, _order(10), start) for deal in _deal(ds, 2)]
    assert [share.left for _, share in shares] == [start.left, []]


def test_a_share_is_not_an_order_to_shuffle() -> None:
    with pytest.raises(PlanError, match="not shuffled"):
        Dealt(_order(9), [[0, 9, 1, 0]], 0, 2, 1).spans()


def test_an_order_without_end_has_shares_without_end() -> None:
    plan: Plan = numbers((10,)).repeat().plan
    order: Any = Program(plan).order(0)
    dealt = Dealt(order, order.whole(), 1, 2, 4)
    assert dealt.size == order.size
    assert dealt.at(np.arange(6)).index.tolist() == [4, 5, 6, 7, 2, 3]
