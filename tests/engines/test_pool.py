from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from penstock.engines.pool import Channel, Closed, Done, Job, ThreadPool, as_finished, in_order, join_all
from penstock.engines.reading import Held, Span
from penstock.order import Refs
from penstock.plan import Block


def block(number: int) -> Block:
    none = np.zeros(1, np.int64)
    refs = Refs(none, none, none, none.astype(np.uint64))
    return Block([number], refs.key, Span(0, 0, none, 1, refs, [], Held([], {}, none)), 1)


def pool_of(work: Callable[[Block], Block], workers: int = 2) -> ThreadPool:
    def done(job: Job) -> Done:
        assert isinstance(job, Block)
        return work(job), None

    return ThreadPool("test", workers, lambda: done)


def ended(pool: ThreadPool) -> bool:
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
    def make() -> Callable[[Job], Done]:
        def work(job: Job) -> Done:
            if isinstance(job, Block):
                first = job.items[0]
                job = iter([(block(first + part), part < 2) for part in range(3)])
            made, again = next(job)
            return made, job if again else None

        return work

    pool = ThreadPool("test", 2, make)
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


def test_each_thread_makes_its_own_work_function() -> None:
    made: list[str] = []
    both = threading.Barrier(2)

    def make() -> Callable[[Job], Done]:
        made.append(threading.current_thread().name)

        def work(job: Job) -> Done:
            assert isinstance(job, Block)
            if job.items[0] < 2:
                both.wait(5)
            return job, None

        return work

    pool = ThreadPool("decode", 2, make)
    assert numbers_of(in_order(map(block, range(8)), pool, lambda: 4)) == list(range(8))
    assert sorted(made) == ["penstock decode 0", "penstock decode 1"]
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
    monkeypatch.setattr("penstock.engines.pool.PATIENCE_S", 0.05)
    going = threading.Event()
    driver = threading.Thread(target=going.wait, name="penstock driver")
    driver.start()
    idle = pool_of(lambda job: job)
    idle.stop()
    with caplog.at_level(logging.WARNING):
        join_all([driver], [idle])
    assert "left behind: penstock driver" in caplog.text
    going.set()
    driver.join(5)
