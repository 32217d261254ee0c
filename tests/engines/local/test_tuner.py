"""The tuner on simulated runs: pools connected by short queues, which share cores and an interpreter lock."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import pytest

from penstock.engines.local.tuner import TICK_S, Reading, Tuner

STEP_S = 0.002
MAX_READY_BLOCKS = 4  # finished blocks that wait for the consumer


@dataclass(frozen=True, slots=True)
class Stage:
    """What an item costs in one pool."""

    wait_s: float = 0.0
    cpu_s: float = 0.0
    holds_lock: bool = False  # the interpreter lock, while it computes
    processes: bool = False
    min_workers: int = 1
    max_workers: int = 64


@dataclass(slots=True, eq=False)
class SimulatedPool:
    stage: Stage
    workers: int
    starting: int = 0  # processes that have not taken their first block yet
    pending: deque[list[float]] = field(default_factory=deque)  # blocks in order: [items left]
    waiting: deque[list[float]] = field(default_factory=deque)
    running: list[list[float]] = field(default_factory=list)
    overshoot: list[float] = field(default_factory=list)  # items of the next blocks that were done in the last step
    busy: float = 0.0
    cpu: float = 0.0
    awaited: float = 0.0
    finished: int = 0

    def has_room(self) -> bool:
        return len(self.pending) < 2 * self.workers

    def cores_wanted(self) -> float:
        return len(self.running) * self.stage.cpu_s / (self.stage.wait_s + self.stage.cpu_s)

    def head_is_done(self) -> bool:
        return bool(self.pending) and self.pending[0][0] <= 0


@dataclass(slots=True)
class Simulation:
    """A run of blocks, delivered in order, whose costs vary by ``noise``."""

    stages: Sequence[Stage]
    workers: Iterable[int]
    cores: float = 2.0
    consumer_s: float = 0.0  # that the consumer spends on an item
    block: int = 16  # items
    noise: float = 0.3
    seed: int = 0
    start_s: float = 0.3  # that a new process needs before its first block
    now: float = 0.0
    delivered: int = 0
    waited: float = 0.0
    consumer_busy_s: float = 0.0  # until the consumer wants the next block
    ready: int = 0
    pools: list[SimulatedPool] = field(init=False)
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.pools = [SimulatedPool(stage, workers) for stage, workers in zip(self.stages, self.workers, strict=True)]
        self.rng = random.Random(self.seed)

    def tick(self) -> tuple[list[Reading], float]:
        """Run for one tick and return the readings and the share of it that the consumer waited."""
        self.waited = 0.0
        for pool in self.pools:
            pool.busy = pool.cpu = pool.awaited = 0.0
            pool.finished = 0
        for _ in range(round(TICK_S / STEP_S)):
            self._step()
        return [self._reading(pool) for pool in self.pools], self.waited / TICK_S

    def resize(self, sizes: Sequence[int]) -> None:
        for pool, size in zip(self.pools, sizes, strict=True):
            if pool.stage.processes and size > pool.workers:
                pool.starting += size - pool.workers
            pool.workers = size

    def _reading(self, pool: SimulatedPool) -> Reading:
        stage = pool.stage
        busy, cpu, awaited = pool.busy / TICK_S, pool.cpu / TICK_S, pool.awaited / TICK_S
        rate = pool.finished / TICK_S
        return Reading(pool.workers, stage.min_workers, stage.max_workers, stage.processes, busy, cpu, awaited, rate)

    def _step(self) -> None:
        self.now += STEP_S
        self._consume()
        self._move()
        for pool in self.pools:
            while pool.waiting and len(pool.running) < pool.workers:
                block = pool.waiting.popleft()
                block[0] += pool.overshoot.pop() if pool.overshoot else 0.0
                if pool.starting:
                    pool.starting -= 1
                    block[0] += self.start_s / (pool.stage.wait_s + pool.stage.cpu_s)
                pool.running.append(block)
        self._work()

    def _consume(self) -> None:
        self.consumer_busy_s -= STEP_S
        while self.consumer_busy_s <= 0 and self.ready:
            self.ready -= 1
            self.delivered += self.block
            self.consumer_busy_s += self.consumer_s * self.block
        if self.consumer_busy_s <= 0:
            self.consumer_busy_s = 0.0
            self.waited += STEP_S
            for pool in reversed(self.pools):
                if pool.running:
                    pool.awaited += STEP_S
                    break

    def _move(self) -> None:
        last = self.pools[-1]
        while last.head_is_done() and self.ready < MAX_READY_BLOCKS:
            last.pending.popleft()
            self.ready += 1
        for source, target in reversed(list(pairwise(self.pools))):
            while source.head_is_done() and target.has_room():
                source.pending.popleft()
                self._put(target)
        while self.pools[0].has_room():
            self._put(self.pools[0])

    def _put(self, pool: SimulatedPool) -> None:
        block = [self.block * max(0.05, self.rng.gauss(1.0, self.noise))]
        pool.pending.append(block)
        pool.waiting.append(block)

    def _work(self) -> None:
        """Give every busy worker its share of the cores; all threads that hold the lock share one core."""
        locked = sum(pool.cores_wanted() for pool in self.pools if pool.stage.holds_lock)
        free = sum(pool.cores_wanted() for pool in self.pools if not pool.stage.holds_lock)
        crowded = max(1.0, (free + min(1.0, locked)) / self.cores)
        for pool in self.pools:
            stage = pool.stage
            slower = crowded * (max(1.0, locked) if stage.holds_lock else 1.0)
            items = STEP_S / (stage.wait_s + stage.cpu_s * slower)
            pool.busy += len(pool.running) * STEP_S
            pool.cpu += len(pool.running) * items * stage.cpu_s
            for block in pool.running:
                block[0] -= items
            pool.overshoot = [block[0] for block in pool.running if block[0] <= 0]
            if pool.overshoot:
                pool.running = [block for block in pool.running if block[0] > 0]
                pool.finished += len(pool.overshoot) * self.block


@dataclass(frozen=True, slots=True)
class History:
    """What a tuned run did, tick by tick."""

    delivered: list[int]
    sizes: list[list[int]]

    def rate(self, since: float, until: float) -> float:
        low, high = round(since / TICK_S), round(until / TICK_S)
        return (self.delivered[high - 1] - self.delivered[low - 1]) / (until - since)

    def changes(self, since: float = 0.0) -> int:
        return sum(a != b for a, b in pairwise(self.sizes[round(since / TICK_S) :]))


def tuned(run: Simulation, seconds: float) -> History:
    tuner = Tuner(run.cores)
    history = History([], [])
    for _ in range(round(seconds / TICK_S)):
        readings, waited = run.tick()
        run.resize(tuner.tick(readings, waited))
        history.delivered.append(run.delivered)
        history.sizes.append([pool.workers for pool in run.pools])
    return history


def best_rate(stages: Sequence[Stage], choices: Iterable[tuple[int, ...]]) -> float:
    """The highest rate that any of the fixed sizes reaches."""

    def rate(workers: tuple[int, ...]) -> float:
        run = Simulation(stages, workers)
        for _ in range(5):
            run.tick()
        delivered_before = run.delivered
        for _ in range(15):
            run.tick()
        return (run.delivered - delivered_before) / (15 * TICK_S)

    return max(map(rate, choices))


def three_stages(decode: float, python: float) -> list[Stage]:
    """A stage that waits, one on threads that release the lock, one on processes."""
    return [Stage(wait_s=0.005), Stage(cpu_s=decode), Stage(cpu_s=python, processes=True)]


COSTS = [(0.001, 0.001), (0.0005, 0.002), (0.002, 0.0005), (0.0003, 0.0003), (0.0001, 0.004)]


@pytest.mark.parametrize(("decode", "python"), COSTS)
def test_three_different_pools_approach_the_best_fixed_sizes_within_three_seconds(decode: float, python: float) -> None:
    stages = three_stages(decode, python)
    best = best_rate(stages, product((4, 8, 16, 32), (1, 2, 3), (1, 2, 3)))
    for seed in range(4):
        assert tuned(Simulation(stages, (2, 2, 1), seed=seed), 5).rate(3, 5) >= 0.8 * best


def test_all_cores_are_used() -> None:
    history = tuned(
        Simulation([Stage(cpu_s=0.004), Stage(cpu_s=0.004, processes=True)], (1, 1), cores=8.0, block=8), 12
    )
    assert history.rate(10, 12) >= 0.8 * 8 / 0.008


@pytest.mark.parametrize("block", [4, 16, 64])
def test_a_pool_that_waits_grows_to_its_maximum_while_it_is_the_bottleneck(block: int) -> None:
    history = tuned(Simulation([Stage(wait_s=0.02, max_workers=48), Stage(cpu_s=0.0001)], (2, 2), block=block), 10)
    assert history.sizes[-1][0] == 48


def test_a_growth_is_judged_only_after_items_that_take_many_seconds() -> None:
    history = tuned(Simulation([Stage(wait_s=10.0)], (2,), block=1, noise=0.1), 120)
    assert [sizes[0] for sizes in history.sizes[300:]] == [64] * 900


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("block", "noise"), [(16, 0.3), (128, 0.5)])
def test_threads_that_hold_the_interpreter_lock_do_not_multiply(workers: int, block: int, noise: float) -> None:
    for seed in range(4):
        run = Simulation(
            [Stage(cpu_s=0.001, holds_lock=True)], (workers,), cores=8.0, block=block, noise=noise, seed=seed
        )
        history = tuned(run, 30)
        assert history.sizes.count([workers]) > 150
        assert max(sizes[0] for sizes in history.sizes) == workers + 1


def test_two_pools_do_not_outgrow_each_other_for_the_interpreter_lock() -> None:
    for seed in range(4):
        run = Simulation([Stage(cpu_s=0.001, holds_lock=True)] * 2, (2, 2), cores=8.0, seed=seed)
        history = tuned(run, 40)
        assert max(max(sizes) for sizes in history.sizes) <= 4
        assert history.sizes.count([2, 2]) > 200


def test_two_pools_that_raise_the_rate_only_together_both_grow() -> None:
    history = tuned(Simulation([Stage(wait_s=0.004), Stage(wait_s=0.004)], (2, 2), block=8), 5)
    assert history.rate(4, 5) >= 3 * 500


def test_a_process_that_starts_slowly_is_not_removed() -> None:
    history = tuned(Simulation([Stage(cpu_s=0.002, processes=True)], (1,), start_s=2.5), 10)
    assert [sizes[0] for sizes in history.sizes[20:]] == [2] * 80


def test_pools_shrink_to_what_a_slow_consumer_needs() -> None:
    history = tuned(Simulation(three_stages(0.001, 0.001), (16, 4, 4), consumer_s=0.02), 30)
    assert history.sizes[-1] == [1, 1, 1]
    assert history.delivered[-1] >= 0.95 * 30 / 0.02


def test_pools_keep_up_with_a_consumer_without_excess_workers() -> None:
    history = tuned(Simulation(three_stages(0.0005, 0.0005), (2, 2, 1), consumer_s=0.002), 30)
    assert history.rate(20, 30) >= 0.95 / 0.002
    assert history.sizes[-1][0] <= 6
    assert history.sizes[-1][2] == 1


@pytest.mark.parametrize(("consumer_s", "block", "noise"), [(0.0, 16, 0.3), (0.0, 64, 0.6), (0.0015, 16, 0.3)])
def test_sizes_settle_under_a_steady_load(consumer_s: float, block: int, noise: float) -> None:
    for seed in range(2):
        run = Simulation(
            three_stages(0.001, 0.001), (2, 2, 1), consumer_s=consumer_s, block=block, noise=noise, seed=seed
        )
        history = tuned(run, 60)
        assert history.changes() <= 16
        assert history.changes(since=30) <= 6


def test_for_any_readings_sizes_stay_in_bounds_and_at_most_one_pool_grows() -> None:
    rng = random.Random(5)
    for _ in range(40):
        tuner = Tuner(rng.choice([1.0, 2.0, 16.0]))
        bounds = [(least, least + rng.randrange(20)) for least in rng.choices(range(1, 5), k=3)]
        sizes = [rng.randint(*bound) for bound in bounds]
        for _ in range(200):
            readings = [
                Reading(size, *bound, rng.random() < 0.5, size * rng.random() ** 0.2, rng.random(), rng.random(), rate)
                for size, bound, rate in zip(sizes, bounds, rng.choices([0.0, 10.0, 1000.0], k=3), strict=True)
            ]
            before, sizes = sizes, tuner.tick(readings, rng.random())
            assert all(least <= size <= most for size, (least, most) in zip(sizes, bounds, strict=True))
            assert sum(b > a for a, b in zip(before, sizes, strict=True)) <= 1


def sizes_over(
    tuner: Tuner, ticks: int, *, cores: float = 1.0, rate: float = 100.0, per_worker: float = 0.0
) -> list[int]:
    """The sizes of a pool that begins with two threads, which are always busy.

    Each of them uses ``cores``; together they finish ``rate`` items a second, and ``per_worker`` more for each worker.
    """
    sizes = [2]
    for _ in range(ticks):
        now = sizes[-1]
        sizes += tuner.tick([Reading(now, 1, 64, False, now, cores * now, 1.0, rate + per_worker * now)], 1.0)
    return sizes


def test_a_pool_that_computes_stops_growing_when_all_cores_are_used() -> None:
    assert set(sizes_over(Tuner(2.0), 100, per_worker=50)) == {2}
    assert sizes_over(Tuner(6.0), 100, per_worker=50)[-1] == 6


def test_a_pool_that_waits_grows_beyond_the_number_of_cores() -> None:
    assert sizes_over(Tuner(2.0), 100, per_worker=50, cores=0.01)[-1] == 64


def test_a_pool_that_mostly_waits_also_stops_growing_when_all_cores_are_used() -> None:
    assert sizes_over(Tuner(2.0), 100, per_worker=50, cores=0.1)[-1] == 20


def test_a_useless_growth_is_undone_and_tried_again_after_ever_longer_pauses() -> None:
    sizes = sizes_over(Tuner(8.0), 2000)
    tried = [tick for tick, (a, b) in enumerate(pairwise(sizes)) if b > a]
    undone = [tick for tick, (a, b) in enumerate(pairwise(sizes)) if b < a]
    pauses = [again - back for back, again in zip(undone, tried[1:], strict=False)]
    assert set(sizes) == {2, 3}
    assert pauses[0] >= 50
    assert len(pauses) >= 4
    assert all(later >= 1.9 * pause for pause, later in pairwise(pauses))


def test_growth_is_tried_again_at_once_when_the_rate_rises_by_itself() -> None:
    tuner = Tuner(8.0)
    assert sizes_over(tuner, 30)[-1] == 2
    assert 3 in sizes_over(tuner, 30, rate=200.0)


def test_nothing_grows_while_the_consumer_does_not_wait() -> None:
    tuner = Tuner(8.0)
    reading = Reading(2, 1, 64, False, 2.0, 0.0, 1.0, 100.0)
    assert {tuner.tick([reading], 0.05)[0] for _ in range(100)} == {2}


def test_idle_workers_leave_after_two_seconds_but_not_so_many_that_the_pool_grows_again() -> None:
    def sizes(busy: float, ticks: int) -> list[int]:
        tuner, sizes = Tuner(8.0), [10]
        for _ in range(ticks):
            sizes += tuner.tick([Reading(sizes[-1], 1, 64, False, min(busy, sizes[-1]), 0.0, 1.0, 100.0)], 1.0)
        return sizes

    assert set(sizes(5.0, 19)) == {10}
    assert sizes(5.0, 30)[-1] == 8
    assert sizes(5.0, 300)[-1] == 7
    assert set(sizes(9.0, 300)[1:]) >= {10}
    assert min(sizes(8.6, 300)) == 10
    assert sizes(0.0, 300)[-1] == 1


def test_a_pool_that_receives_next_to_nothing_does_not_keep_the_others_small() -> None:
    tuner, workers = Tuner(8.0), 2
    for _ in range(100):
        first = Reading(workers, 1, 64, False, workers, 0.0, 1.0, 50.0 * workers)
        workers = tuner.tick([first, Reading(1, 1, 8, False, 0.0, 0.0, 0.0, 0.0)], 1.0)[0]
    assert workers == 64


def test_a_missing_pool_is_an_error() -> None:
    tuner = Tuner(2.0)
    reading = Reading(1, 1, 4, False, 0.5, 0.0, 0.0, 1.0)
    assert tuner.tick([], 1.0) == []
    assert tuner.tick([reading, reading], 1.0) == [1, 1]
    with pytest.raises(ValueError, match="shorter"):
        tuner.tick([reading], 1.0)
