from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from penstock.engines.local.pool import (
    Channel,
    Closed,
    Done,
    Job,
    Pool,
    Stranded,
    WorkerProxy,
    as_finished,
    in_order,
    join_all,
)
from penstock.engines.meter import Event, Meter, Meters
from penstock.engines.read_stage import Held, Span
from penstock.order import Refs
from penstock.plan import Block


def block(number: int) -> Block:
    none = np.zeros(1, np.int64)
    refs = Refs(none, none, none, none.astype(np.uint64))
    return Block([number], refs.key, Span(0, 0, none, 1, refs, [], Held([], {}, none)), 1)


@dataclass(slots=True)
class Calls:
    """A hand that calls a function, and notes what else is asked of it."""

    work: Callable[[Job], Done]
    closing: Callable[[], Any] = bool
    aborted: bool = False
    since: float | None = None  # when it began with an item, where somebody watches

    def prepare(self) -> None:
        pass

    def __call__(self, job: Job) -> Done:
        return self.work(job)

    def cpu(self) -> float:
        return time.thread_time()

    def close(self) -> None:
        self.closing()

    def abort(self) -> None:
        self.aborted = True

    def overdue(self, limit: float) -> Exception | None:
        late = self.since is not None and time.monotonic() - self.since > limit
        return TimeoutError("it hangs") if late else None


def whole(work: Callable[[Block], Block]) -> Callable[[Job], Done]:
    def done(job: Job) -> Done:
        assert isinstance(job, Block)
        return work(job), None

    return done


def pool_of(work: Callable[[Block], Block], workers: int = 2) -> Pool:
    return pool_with(lambda number: Calls(whole(work)), workers)


def pool_with(
    make: Callable[[int], WorkerProxy], workers: int, meters: Meters | None = None, name: str = "test"
) -> Pool:
    return Pool(name, workers, make, Meter(name, "threads", 1, 9, workers), meters or Meters())


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ended(pool: Pool) -> bool:
    pool.stop()
    return pool.join(time.monotonic() + 5) == []


def slow_when_even(job: Block) -> Block:
    time.sleep(0.004 * (job.items[0] % 2 == 0))
    return job


def numbers_of(blocks: Iterator[Block]) -> list[int]:
    return [one.items[0] for one in blocks]


def test_blocks_come_in_the_order_they_went_in() -> None:
    pool = pool_of(slow_when_even, 3)
    assert numbers_of(in_order(map(block, range(20)), pool, lambda: 6)) == list(range(20))
    assert ended(pool)


def test_whatever_is_finished_comes_first_where_order_does_not_matter() -> None:
    turn = threading.Event()

    def first_waits(job: Block) -> Block:
        if job.items[0] == 0:
            assert turn.wait(5)
        elif job.items[0] == 3:
            turn.set()
        return job

    pool = pool_of(first_waits, 2)
    got = numbers_of(as_finished(map(block, range(6)), pool, lambda: 8))
    assert sorted(got) == list(range(6))
    assert got[0] != 0
    assert ended(pool)


@pytest.mark.parametrize("how", [in_order, as_finished])
def test_at_most_so_many_are_under_way(how: Any) -> None:
    begun: list[int] = []

    def source() -> Iterator[Block]:
        for number in range(30):
            begun.append(number)
            yield block(number)

    pool = pool_of(lambda job: job)
    for taken, _ in enumerate(how(source(), pool, lambda: 4)):
        assert len(begun) - taken <= 4
    assert len(begun) == 30
    assert ended(pool)


@pytest.mark.parametrize("how", [in_order, as_finished])
def test_the_parts_of_a_block_come_one_after_the_other(how: Any) -> None:
    def work(job: Job) -> Done:
        if isinstance(job, Block):
            first = job.items[0]
            job = iter([(block(first + part), part < 2) for part in range(3)])
        made, again = next(job)
        return made, job if again else None

    pool = pool_with(lambda number: Calls(work), 2)
    got = numbers_of(how(map(block, range(0, 50, 10)), pool, lambda: 4))
    assert sorted(got) == [tens + part for tens in range(0, 50, 10) for part in range(3)]
    for tens in range(0, 50, 10):
        assert [n for n in got if n // 10 == tens // 10] == [tens, tens + 1, tens + 2]
    if how is in_order:
        assert got == sorted(got)
    assert ended(pool)


def test_what_a_worker_raises_reaches_whoever_takes_its_block() -> None:
    def fails(job: Block) -> Block:
        if job.items[0] == 3:
            raise KeyboardInterrupt
        return job

    pool = pool_of(fails)
    blocks = in_order(map(block, range(9)), pool, lambda: 4)
    assert [next(blocks).items[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(blocks)
    assert ended(pool)


def test_each_thread_makes_and_closes_its_own_hand() -> None:
    made: list[tuple[int, str]] = []
    closed: list[str] = []
    both = threading.Barrier(2)

    def work(job: Block) -> Block:
        if job.items[0] < 2:
            both.wait(5)
        return job

    def make(number: int) -> Calls:
        made.append((number, threading.current_thread().name))
        return Calls(whole(work), lambda: closed.append(threading.current_thread().name))

    pool = pool_with(make, 2, name="decode")
    assert numbers_of(in_order(map(block, range(8)), pool, lambda: 4)) == list(range(8))
    assert sorted(made) == [(0, "penstock decode 0"), (1, "penstock decode 1")]
    assert ended(pool)
    assert sorted(closed) == ["penstock decode 0", "penstock decode 1"]


def test_a_pool_grows_and_shrinks_while_it_works() -> None:
    alive: set[int] = set()

    def make(number: int) -> Calls:
        alive.add(number)
        return Calls(whole(slow_when_even), lambda: alive.discard(number))

    pool = pool_with(make, 1)
    blocks = in_order(map(block, range(300)), pool, lambda: 8)
    got = [next(blocks).items[0] for _ in range(5)]
    pool.resize(4)
    got += [next(blocks).items[0] for _ in range(100)]
    assert alive == {0, 1, 2, 3}
    pool.resize(2)
    got += numbers_of(blocks)
    assert got == list(range(300))
    until(lambda: len(alive) == 2)
    assert [size for _, size in pool.meter.sizes] == [1, 4, 2]
    assert ended(pool)
    assert not alive


def test_a_worker_that_takes_its_time_to_leave_is_not_counted() -> None:
    leaving, going = threading.Event(), threading.Event()

    def close() -> None:
        leaving.set()
        assert going.wait(5)

    both = threading.Barrier(2)

    def work(job: Block) -> Block:
        if job.items[0] < 2:
            both.wait(5)  # so that each worker has a hand to close
        return job

    pool = pool_with(lambda number: Calls(whole(work), close), 2)
    for future in [pool.submit(block(0)), pool.submit(block(1))]:
        future.result(5)
    pool.resize(1)
    assert leaving.wait(5)
    assert pool.size == 1
    pool.resize(1)  # as on every tick
    assert pool.submit(block(7)).result(2)[0].items == [7], "the last one is still there"
    going.set()
    until(lambda: len([t for t in threading.enumerate() if pool.owns(t)]) == 1)
    assert pool.size == 1
    assert ended(pool)


def test_the_number_of_a_worker_that_left_is_given_again() -> None:
    made: list[int] = []

    def make(number: int) -> Calls:
        made.append(number)
        return Calls(whole(lambda job: job))

    pool = pool_with(make, 1)
    pool.submit(block(0)).result(5)
    pool.resize(2)
    until(lambda: pool.submit(block(0)).result(5) and made == [0, 1])
    pool.resize(1)
    until(lambda: len([t for t in threading.enumerate() if pool.owns(t)]) == 1)
    made.clear()
    pool.resize(2)
    until(lambda: pool.submit(block(0)).result(5) and made)
    assert made in ([0], [1])
    assert ended(pool)


def test_a_worker_that_hangs_is_given_up_and_its_block_fails() -> None:
    going = threading.Event()
    hands: list[Calls] = []

    def make(number: int) -> Calls:
        def work(job: Block) -> Block:
            hand.since = time.monotonic()
            if job.items[0] == 1:
                assert going.wait(5)
            hand.since = None
            return job

        hand = Calls(whole(work))
        hands.append(hand)
        return hand

    seen: list[Event] = []
    pool = pool_with(make, 1, Meters(observer=seen.append))
    assert pool.submit(block(0)).result(5)[0].items == [0]
    stuck = pool.submit(block(1))
    until(lambda: hands and hands[0].since is not None)
    pool.give_up_after(10)
    assert not stuck.done()
    time.sleep(0.02)
    pool.give_up_after(0.01)
    pool.give_up_after(0.01)  # once is enough
    with pytest.raises(TimeoutError, match="it hangs"):
        stuck.result(5)
    assert pool.meter.timeouts == 1
    assert [(event.worker, event.problem) for event in seen if event.kind == "timeout"] == [(0, "it hangs")]
    pool.stop()
    before = time.monotonic()
    assert pool.join(time.monotonic() + 5) == ["penstock test 0"]
    assert time.monotonic() - before < 1, "nobody waits for it"
    going.set()


def test_a_worker_that_can_be_ended_is_ended() -> None:
    ended_early = threading.Event()

    class Abortable(Calls):
        def abort(self) -> None:
            ended_early.set()

    def work(job: Block) -> Block:
        assert ended_early.wait(5)
        return job

    pool = pool_with(lambda number: Abortable(whole(work)), 1)
    future = pool.submit(block(0))
    until(lambda: future.running() or pool.busy() > 0)
    assert ended(pool)
    assert ended_early.is_set()


def test_a_pool_counts_what_it_does() -> None:
    pool = pool_of(slow_when_even, 1)
    assert len(numbers_of(in_order(map(block, range(10)), pool, lambda: 2))) == 10
    meter = pool.meter
    assert (meter.blocks, meter.inputs, meter.items) == (10, 10, 10)
    assert 0.015 < meter.busy < 1
    assert meter.busy <= pool.busy() + 1e-3
    assert ended(pool)


def test_a_stopped_pool_takes_nothing_and_cancels_what_waits() -> None:
    going, begun = threading.Event(), threading.Event()

    def work(job: Block) -> Block:
        begun.set()
        assert going.wait(5)
        return job

    pool = pool_of(work, 1)
    first, second = pool.submit(block(0)), pool.submit(block(1))
    assert begun.wait(5)
    pool.stop()
    going.set()
    assert first.result(5)[0].items == [0]
    with pytest.raises(CancelledError):
        second.result(5)
    with pytest.raises(Closed):
        pool.submit(block(2))
    assert ended(pool)


def test_a_channel_holds_so_many_and_no_more() -> None:
    channel = Channel(lambda: 2)
    put: list[int] = []

    def fill() -> None:
        for number in range(5):
            channel.put(number)
            put.append(number)

    thread = threading.Thread(target=fill)
    thread.start()
    deadline = time.monotonic() + 5
    while len(put) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert put == [0, 1]
    assert [channel.get() for _ in range(5)] == list(range(5))
    thread.join(5)
    assert not thread.is_alive()


def test_closing_a_channel_wakes_both_sides() -> None:
    full, empty = Channel(lambda: 1), Channel(lambda: 1)
    full.put(0)
    woken: list[str] = []

    def waits(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Closed:
            woken.append(name)

    threads = [
        threading.Thread(target=waits, args=("put", lambda: full.put(1))),
        threading.Thread(target=waits, args=("get", empty.get)),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    full.close()
    empty.close()
    for thread in threads:
        thread.join(5)
    assert sorted(woken) == ["get", "put"]
    with pytest.raises(Closed):
        full.put(2)


def test_a_thread_that_does_not_come_back_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.engines.local.pool.PATIENCE_S", 0.05)
    going = threading.Event()
    driver = threading.Thread(target=going.wait, name="penstock driver")
    driver.start()
    idle = pool_of(lambda job: job)
    idle.stop()
    with caplog.at_level(logging.WARNING):
        join_all([driver], [idle])
    assert "left behind, still inside a function: penstock driver" in caplog.text
    going.set()
    driver.join(5)


def test_what_a_stranded_worker_had_is_done_by_another_while_it_gets_ready_again() -> None:
    rescued, readied = threading.Event(), threading.Event()

    @dataclass(slots=True)
    class Strands(Calls):
        number: int = 0
        lost: bool = False

        def prepare(self) -> None:
            if self.lost:
                assert rescued.wait(5), "nobody else has taken it"
                readied.set()

        def __call__(self, job: Job) -> Done:
            assert isinstance(job, Block)
            if job.items == [3] and not stranded:
                stranded.append(self.number)
                self.lost = True
                raise Stranded(job)
            if job.items == [3]:
                assert self.number not in stranded
                rescued.set()
            return job, None

    stranded: list[int] = []
    pool = Pool(
        "test", 2, lambda number: Strands(whole(lambda b: b), number=number), Meter("test", "threads"), Meters()
    )
    done = in_order((block(number) for number in range(8)), pool, lambda: 4)
    assert [out.items for out in done] == [[number] for number in range(8)]
    assert readied.wait(5)
    pool.stop()
    join_all([], [pool])
    assert len(stranded) == 1
