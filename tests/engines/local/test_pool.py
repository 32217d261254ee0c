from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from penstock.engines.local.pool import (
    BlockJob,
    BlockResult,
    Channel,
    Closed,
    Pool,
    ReassignJob,
    WorkerProxy,
    join_all,
    map_ordered,
    map_unordered,
)
from penstock.engines.meter import Event, Meter, Meters
from penstock.engines.read_stage import BufferedSamples, PieceRows, Span
from penstock.order import Refs
from penstock.plan import Block, Lineage

InterruptAt = Callable[[int], AbstractContextManager[list[int]]]

DEADLINE_S = 30


def block(number: int) -> Block:
    none = np.zeros(1, np.int64)
    refs = Refs(none, none, none, none.astype(np.uint64))
    span = Span(none, (PieceRows(0, 0, 0, 1),), refs, [], BufferedSamples([], {}, none))
    return Block([number], refs.key, Lineage(span, 1))


@dataclass(slots=True)
class FakeProxy:
    """A worker proxy that calls a function."""

    work: Callable[[BlockJob], BlockResult]
    closing: Callable[[], Any] = bool
    aborted: bool = False
    since: float | None = None  # when it began with an item, if there is a time limit

    def prepare(self) -> None:
        pass

    def __call__(self, job: BlockJob) -> BlockResult:
        return self.work(job)

    def cpu_seconds(self) -> float:
        return time.thread_time()

    def close(self) -> None:
        self.closing()

    def abort(self) -> None:
        self.aborted = True

    def overdue_error(self, timeout_s: float) -> Exception | None:
        late = self.since is not None and time.monotonic() - self.since > timeout_s
        return TimeoutError("it hangs") if late else None


def in_one_part(work: Callable[[Block], Block]) -> Callable[[BlockJob], BlockResult]:
    """Adapt a function on blocks: what it returns is the only part of the block."""

    def done(job: BlockJob) -> BlockResult:
        assert isinstance(job, Block)
        return work(job), None

    return done


def pool_of(work: Callable[[Block], Block], workers: int = 2) -> Pool:
    return pool_with(lambda number: FakeProxy(in_one_part(work)), workers)


def pool_with(
    make: Callable[[int], WorkerProxy], workers: int, meters: Meters | None = None, name: str = "test"
) -> Pool:
    pool = Pool(name, make, Meter(name, "threads", 1, 9, workers), meters or Meters())
    pool.resize(workers)
    return pool


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ends(pool: Pool) -> bool:
    pool.stop()
    return pool.join(time.monotonic() + 60) == []


def slow_when_even(job: Block) -> Block:
    time.sleep(0.004 * (job.items[0] % 2 == 0))
    return job


def numbers_of(blocks: Iterator[Block]) -> list[int]:
    return [block.items[0] for block in blocks]


def test_map_ordered_yields_blocks_in_the_order_of_its_input() -> None:
    pool = pool_of(slow_when_even, 3)
    assert numbers_of(map_ordered(map(block, range(20)), pool, lambda: 6)) == list(range(20))
    assert ends(pool)


def test_map_unordered_yields_blocks_as_they_are_finished() -> None:
    later_begun = threading.Event()

    def first_waits(job: Block) -> Block:
        if job.items[0] == 0:
            assert later_begun.wait(60)
        elif job.items[0] == 3:
            later_begun.set()
        return job

    pool = pool_of(first_waits, 2)
    got = numbers_of(map_unordered(map(block, range(6)), pool, lambda: 8))
    assert sorted(got) == list(range(6))
    assert got[0] != 0
    assert ends(pool)


@pytest.mark.parametrize("map_blocks", [map_ordered, map_unordered])
def test_the_blocks_in_progress_are_bounded(map_blocks: Any) -> None:
    started: list[int] = []

    def source() -> Iterator[Block]:
        for number in range(30):
            started.append(number)
            yield block(number)

    pool = pool_of(lambda job: job)
    for taken, _ in enumerate(map_blocks(source(), pool, lambda: 4)):
        assert len(started) - taken <= 4
    assert len(started) == 30
    assert ends(pool)


@pytest.mark.parametrize("map_blocks", [map_ordered, map_unordered])
def test_the_parts_of_a_block_stay_together(map_blocks: Any) -> None:
    def work(job: BlockJob) -> BlockResult:
        if isinstance(job, Block):
            first = job.items[0]
            job = iter([(block(first + part), part < 2) for part in range(3)])
        part, again = next(job)
        return part, job if again else None

    pool = pool_with(lambda number: FakeProxy(work), 2)
    got = numbers_of(map_blocks(map(block, range(0, 50, 10)), pool, lambda: 4))
    assert sorted(got) == [tens + part for tens in range(0, 50, 10) for part in range(3)]
    for tens in range(0, 50, 10):
        assert [n for n in got if n // 10 == tens // 10] == [tens, tens + 1, tens + 2]
    if map_blocks is map_ordered:
        assert got == sorted(got)
    assert ends(pool)


def test_an_error_in_a_worker_is_raised_where_its_block_is_taken() -> None:
    def fails(job: Block) -> Block:
        if job.items[0] == 3:
            raise KeyboardInterrupt
        return job

    pool = pool_of(fails)
    blocks = map_ordered(map(block, range(9)), pool, lambda: 4)
    assert [next(blocks).items[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(blocks)
    assert ends(pool)


def test_each_thread_creates_and_closes_its_own_proxy() -> None:
    created: list[tuple[int, str]] = []
    closed: list[str] = []
    both = threading.Barrier(2)

    def work(job: Block) -> Block:
        if job.items[0] < 2:
            both.wait(60)
        return job

    def make(number: int) -> FakeProxy:
        created.append((number, threading.current_thread().name))
        return FakeProxy(in_one_part(work), lambda: closed.append(threading.current_thread().name))

    pool = pool_with(make, 2, name="decode")
    assert numbers_of(map_ordered(map(block, range(8)), pool, lambda: 4)) == list(range(8))
    assert sorted(created) == [(0, "penstock decode 0"), (1, "penstock decode 1")]
    assert ends(pool)
    assert sorted(closed) == ["penstock decode 0", "penstock decode 1"]


def test_a_pool_can_be_resized_while_it_works() -> None:
    alive: set[int] = set()

    def make(number: int) -> FakeProxy:
        alive.add(number)
        return FakeProxy(in_one_part(slow_when_even), lambda: alive.discard(number))

    pool = pool_with(make, 1)
    blocks = map_ordered(map(block, range(300)), pool, lambda: 8)
    got = [next(blocks).items[0] for _ in range(5)]
    pool.resize(4)
    got += [next(blocks).items[0] for _ in range(100)]
    assert alive == {0, 1, 2, 3}
    pool.resize(2)
    got += numbers_of(blocks)
    assert got == list(range(300))
    wait_until(lambda: len(alive) == 2)
    assert [size for _, size in pool.meter.sizes] == [1, 4, 2]
    assert ends(pool)
    assert not alive


def test_a_worker_that_is_slow_to_leave_is_not_counted() -> None:
    leaving, resume = threading.Event(), threading.Event()

    def close() -> None:
        leaving.set()
        assert resume.wait(60)

    both = threading.Barrier(2)

    def work(job: Block) -> Block:
        if job.items[0] < 2:
            both.wait(60)  # so that each worker has a proxy to close
        return job

    pool = pool_with(lambda number: FakeProxy(in_one_part(work), close), 2)
    for future in [pool.submit(block(0)), pool.submit(block(1))]:
        future.result(60)
    pool.resize(1)
    assert leaving.wait(60)
    assert pool.size == 1
    pool.resize(1)  # as on every tick
    assert pool.submit(block(7)).result(60)[0].items == [7], "the last worker is still there"
    resume.set()
    wait_until(lambda: len([t for t in threading.enumerate() if pool.owns(t)]) == 1)
    assert pool.size == 1
    assert ends(pool)


def test_the_number_of_a_worker_that_left_is_reused() -> None:
    numbers: list[int] = []

    def make(number: int) -> FakeProxy:
        numbers.append(number)
        return FakeProxy(in_one_part(lambda job: job))

    pool = pool_with(make, 1)
    pool.submit(block(0)).result(60)
    pool.resize(2)
    wait_until(lambda: pool.submit(block(0)).result(60) and numbers == [0, 1])
    pool.resize(1)
    wait_until(lambda: len([t for t in threading.enumerate() if pool.owns(t)]) == 1)
    numbers.clear()
    pool.resize(2)
    wait_until(lambda: pool.submit(block(0)).result(60) and numbers)
    assert numbers in ([0], [1])
    assert ends(pool)


def test_a_worker_that_hangs_is_abandoned_and_its_block_fails() -> None:
    resume = threading.Event()
    proxies: list[FakeProxy] = []

    def make(number: int) -> FakeProxy:
        def work(job: Block) -> Block:
            proxy.since = time.monotonic()
            if job.items[0] == 1:
                assert resume.wait(60)
            proxy.since = None
            return job

        proxy = FakeProxy(in_one_part(work))
        proxies.append(proxy)
        return proxy

    seen: list[Event] = []
    pool = pool_with(make, 1, Meters(observer=seen.append))
    assert pool.submit(block(0)).result(60)[0].items == [0]
    stuck = pool.submit(block(1))
    wait_until(lambda: proxies and proxies[0].since is not None)
    pool.fail_overdue(10)
    assert not stuck.done()
    time.sleep(0.02)
    pool.fail_overdue(0.01)
    pool.fail_overdue(0.01)  # the second call does nothing
    with pytest.raises(TimeoutError, match="it hangs"):
        stuck.result(60)
    assert pool.meter.timeouts == 1
    assert [(event.worker, event.problem) for event in seen if event.kind == "timeout"] == [(0, "it hangs")]
    pool.stop()
    before = time.monotonic()
    assert pool.join(time.monotonic() + 60) == ["penstock test 0"]
    assert time.monotonic() - before < 30, "join does not wait for it"
    resume.set()


def test_a_worker_that_can_be_aborted_is_aborted() -> None:
    aborted = threading.Event()

    class Abortable(FakeProxy):
        def abort(self) -> None:
            aborted.set()

    def work(job: Block) -> Block:
        assert aborted.wait(60)
        return job

    pool = pool_with(lambda number: Abortable(in_one_part(work)), 1)
    future = pool.submit(block(0))
    wait_until(lambda: future.running() or pool.busy() > 0)
    assert ends(pool)
    assert aborted.is_set()


def test_a_pool_counts_what_it_does() -> None:
    began = time.monotonic()
    pool = pool_of(slow_when_even, 1)
    assert len(numbers_of(map_ordered(map(block, range(10)), pool, lambda: 2))) == 10
    meter = pool.meter
    assert (meter.blocks, meter.inputs, meter.items) == (10, 10, 10)
    assert 0.015 < meter.busy < time.monotonic() - began
    assert meter.busy <= pool.busy() + 1e-3
    assert ends(pool)


def test_a_stopped_pool_accepts_nothing_and_cancels_queued_blocks() -> None:
    resume, started = threading.Event(), threading.Event()

    def work(job: Block) -> Block:
        started.set()
        assert resume.wait(60)
        return job

    pool = pool_of(work, 1)
    first, second = pool.submit(block(0)), pool.submit(block(1))
    assert started.wait(60)
    pool.stop()
    resume.set()
    assert first.result(60)[0].items == [0]
    with pytest.raises(CancelledError):
        second.result(60)
    with pytest.raises(Closed):
        pool.submit(block(2))
    assert ends(pool)


def test_a_channel_holds_no_more_than_its_capacity() -> None:
    channel = Channel(lambda: 2)
    put: list[int] = []

    def fill() -> None:
        for number in range(5):
            channel.put(number)
            put.append(number)

    thread = threading.Thread(target=fill)
    thread.start()
    deadline = time.monotonic() + 60
    while len(put) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert put == [0, 1]
    assert [channel.get() for _ in range(5)] == list(range(5))
    thread.join(60)
    assert not thread.is_alive()


def test_an_interrupt_at_any_line_of_get_is_an_interrupt_and_leaves_the_channel_usable(
    interrupt_at: InterruptAt,
) -> None:
    def use(channel: Channel) -> None:
        channel.put(2)
        channel.close()

    def get(line: int) -> int:
        """Wait for a block that comes late, with an interrupt at a line; return the number of executed lines."""
        channel = Channel(lambda: 9)
        late = threading.Timer(0.002, channel.put, (1,))
        late.start()
        with nullcontext() if line == 0 else pytest.raises(KeyboardInterrupt), interrupt_at(line) as count:
            channel.get()
        late.join()
        others = threading.Thread(target=use, args=(channel,), daemon=True)
        others.start()
        others.join(DEADLINE_S)
        assert not others.is_alive(), f"locked by an interrupt at line {line}"
        return count[0]

    for line in range(1, get(0) + 1):
        get(line)


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
        thread.join(60)
    assert sorted(woken) == ["get", "put"]
    with pytest.raises(Closed):
        full.put(2)


def test_a_thread_that_does_not_end_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.engines.local.pool.WORKER_JOIN_TIMEOUT_S", 0.05)
    resume = threading.Event()
    driver = threading.Thread(target=resume.wait, name="penstock driver")
    driver.start()
    idle = pool_of(lambda job: job)
    assert ends(idle)
    with caplog.at_level(logging.WARNING):
        join_all([driver], [idle])
    assert "threads left behind, still inside a user's function: penstock driver" in caplog.text
    resume.set()
    driver.join(60)


def test_a_reassigned_job_is_done_by_another_worker_while_the_first_recovers() -> None:
    taken_over, recovered = threading.Event(), threading.Event()

    @dataclass(slots=True)
    class Reassigns(FakeProxy):
        number: int = 0
        lost: bool = False

        def prepare(self) -> None:
            if self.lost:
                assert taken_over.wait(60), "no other worker has taken the job"
                recovered.set()

        def __call__(self, job: BlockJob) -> BlockResult:
            assert isinstance(job, Block)
            if job.items == [3] and not lost_workers:
                lost_workers.append(self.number)
                self.lost = True
                raise ReassignJob(job)
            if job.items == [3]:
                assert self.number not in lost_workers
                taken_over.set()
            return job, None

    lost_workers: list[int] = []
    pool = pool_with(lambda number: Reassigns(in_one_part(lambda b: b), number=number), 2)
    done = map_ordered((block(number) for number in range(8)), pool, lambda: 4)
    assert [out.items for out in done] == [[number] for number in range(8)]
    assert recovered.wait(60)
    pool.stop()
    join_all([], [pool])
    assert len(lost_workers) == 1
