"""The tuner against a simulated run: pools joined by short queues, cores and an interpreter lock to share."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import pytest

from penstock.engines.local.tuner import TICK_S, Reading, Tuner

STEP_S = 0.002
READY = 4  # finished blocks that wait for the consumer


@dataclass(frozen=True, slots=True)
class Stage:
    """What an item costs in one pool."""

    wait: float = 0.0  # seconds asleep
    cpu: float = 0.0  # seconds of a core
    lock: bool = False  # which hold the interpreter lock
    processes: bool = False
    least: int = 1
    most: int = 64


@dataclass(slots=True, eq=False)
class Pool:
    stage: Stage
    workers: int
    starting: int = 0  # processes that have yet to take their first block
    under_way: deque[list[float]] = field(default_factory=deque)  # in order: [items left]
    waiting: deque[list[float]] = field(default_factory=deque)
    in_work: list[list[float]] = field(default_factory=list)
    over: list[float] = field(default_factory=list)  # items of the next blocks that were done in the last step
    busy: float = 0.0
    cpu: float = 0.0
    awaited: float = 0.0
    finished: int = 0

    def room(self) -> bool:
        return len(self.under_way) < 2 * self.workers

    def cores_wanted(self) -> float:
        return len(self.in_work) * self.stage.cpu / (self.stage.wait + self.stage.cpu)

    def head_is_done(self) -> bool:
        return bool(self.under_way) and self.under_way[0][0] <= 0


@dataclass(slots=True)
class Simulation:
    """A run of blocks, delivered in order, whose costs vary by ``noise``."""

    stages: Sequence[Stage]
    workers: Iterable[int]
    cores: float = 2.0
    consumer: float = 0.0  # seconds it takes for an item
    block: int = 16
    noise: float = 0.3
    seed: int = 0
    start_s: float = 0.3  # that a new process takes longer for its first block
    now: float = 0.0
    delivered: int = 0
    waited: float = 0.0
    in_hand: float = 0.0  # seconds until the consumer wants the next block
    ready: int = 0
    pools: list[Pool] = field(init=False)
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.pools = [Pool(stage, workers) for stage, workers in zip(self.stages, self.workers, strict=True)]
        self.rng = random.Random(self.seed)

    def tick(self) -> tuple[list[Reading], float]:
        """Run for one tick and read the meters."""
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

    def _reading(self, pool: Pool) -> Reading:
        stage = pool.stage
        busy, cpu, awaited = pool.busy / TICK_S, pool.cpu / TICK_S, pool.awaited / TICK_S
        rate = pool.finished / TICK_S
        return Reading(pool.workers, stage.least, stage.most, stage.processes, busy, cpu, awaited, rate)

    def _step(self) -> None:
        self.now += STEP_S
        self._consume()
        self._move()
        for pool in self.pools:
            while pool.waiting and len(pool.in_work) < pool.workers:
                block = pool.waiting.popleft()
                block[0] += pool.over.pop() if pool.over else 0.0
                if pool.starting:
                    pool.starting -= 1
                    block[0] += self.start_s / (pool.stage.wait + pool.stage.cpu)
                pool.in_work.append(block)
        self._work()

    def _consume(self) -> None:
        self.in_hand -= STEP_S
        while self.in_hand <= 0 and self.ready:
            self.ready -= 1
            self.delivered += self.block
            self.in_hand += self.consumer * self.block
        if self.in_hand <= 0:
            self.in_hand = 0.0
            self.waited += STEP_S
            for pool in reversed(self.pools):
                if pool.in_work:
                    pool.awaited += STEP_S
                    break

    def _move(self) -> None:
        last = self.pools[-1]
        while last.head_is_done() and self.ready < READY:
            last.under_way.popleft()
            self.ready += 1
        for source, target in reversed(list(pairwise(self.pools))):
            while source.head_is_done() and target.room():
                source.under_way.popleft()
                self._put(target)
        while self.pools[0].room():
            self._put(self.pools[0])

    def _put(self, pool: Pool) -> None:
        block = [self.block * max(0.05, self.rng.gauss(1.0, self.noise))]
        pool.under_way.append(block)
        pool.waiting.append(block)

    def _work(self) -> None:
        """Give every busy worker its part of the cores; threads that hold the lock have one among them."""
        locked = sum(pool.cores_wanted() for pool in self.pools if pool.stage.lock)
        free = sum(pool.cores_wanted() for pool in self.pools if not pool.stage.lock)
        crowded = max(1.0, (free + min(1.0, locked)) / self.cores)
        for pool in self.pools:
            stage = pool.stage
            slower = crowded * (max(1.0, locked) if stage.lock else 1.0)
            items = STEP_S / (stage.wait + stage.cpu * slower)
            pool.busy += len(pool.in_work) * STEP_S
            pool.cpu += len(pool.in_work) * items * stage.cpu
            for block in pool.in_work:
                block[0] -= items
            pool.over = [block[0] for block in pool.in_work if block[0] <= 0]
            if pool.over:
                pool.in_work = [block for block in pool.in_work if block[0] > 0]
                pool.finished += len(pool.over) * self.block


@dataclass(frozen=True, slots=True)
class Course:
    """What a tuned run did, tick by tick."""

    delivered: list[int]
    sizes: list[list[int]]

    def rate(self, since: float, until: float) -> float:
        low, high = round(since / TICK_S), round(until / TICK_S)
        return (self.delivered[high - 1] - self.delivered[low - 1]) / (until - since)

    def changes(self, since: float = 0.0) -> int:
        return sum(a != b for a, b in pairwise(self.sizes[round(since / TICK_S) :]))


def tuned(run: Simulation, seconds: float) -> Course:
    tuner = Tuner(run.cores)
    course = Course([], [])
    for _ in range(round(seconds / TICK_S)):
        readings, waited = run.tick()
        run.resize(tuner.tick(readings, waited))
        course.delivered.append(run.delivered)
        course.sizes.append([pool.workers for pool in run.pools])
    return course


def best_rate(stages: Sequence[Stage], choices: Iterable[tuple[int, ...]]) -> float:
    """Of all fixed sizes."""

    def rate(workers: tuple[int, ...]) -> float:
        run = Simulation(stages, workers)
        for _ in range(5):
            run.tick()
        begun = run.delivered
        for _ in range(15):
            run.tick()
        return (run.delivered - begun) / (15 * TICK_S)

    return max(map(rate, choices))


def three(decode: float, python: float) -> list[Stage]:
    """A stage that sleeps, one on threads that release the lock, one on processes."""
    return [Stage(wait=0.005), Stage(cpu=decode), Stage(cpu=python, processes=True)]


COSTS = [(0.001, 0.001), (0.0005, 0.002), (0.002, 0.0005), (0.0003, 0.0003), (0.0001, 0.004)]


@pytest.mark.parametrize(("decode", "python"), COSTS)
def test_three_unlike_pools_come_near_the_best_fixed_sizes_within_three_seconds(decode: float, python: float) -> None:
    stages = three(decode, python)
    best = best_rate(stages, product((4, 8, 16, 32), (1, 2, 3), (1, 2, 3)))
    for seed in range(4):
        assert tuned(Simulation(stages, (2, 2, 1), seed=seed), 5).rate(3, 5) >= 0.8 * best


def test_more_cores_are_put_to_use() -> None:
    course = tuned(Simulation([Stage(cpu=0.004), Stage(cpu=0.004, processes=True)], (1, 1), cores=8.0, block=8), 12)
    assert course.rate(10, 12) >= 0.8 * 8 / 0.008


@pytest.mark.parametrize("block", [4, 16, 64])
def test_a_pool_that_sleeps_grows_to_its_bound_while_it_holds_up_the_run(block: int) -> None:
    course = tuned(Simulation([Stage(wait=0.02, most=48), Stage(cpu=0.0001)], (2, 2), block=block), 10)
    assert course.sizes[-1][0] == 48


def test_items_that_take_many_seconds_are_waited_for_before_a_growth_is_judged() -> None:
    course = tuned(Simulation([Stage(wait=10.0)], (2,), block=1, noise=0.1), 120)
    assert [sizes[0] for sizes in course.sizes[300:]] == [64] * 900


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("block", "noise"), [(16, 0.3), (128, 0.5)])
def test_threads_that_hold_the_interpreter_lock_do_not_multiply(workers: int, block: int, noise: float) -> None:
    for seed in range(4):
        run = Simulation([Stage(cpu=0.001, lock=True)], (workers,), cores=8.0, block=block, noise=noise, seed=seed)
        course = tuned(run, 30)
        assert course.sizes.count([workers]) > 150
        assert max(sizes[0] for sizes in course.sizes) == workers + 1


def test_two_pools_do_not_race_for_the_interpreter_lock() -> None:
    for seed in range(4):
        run = Simulation([Stage(cpu=0.001, lock=True)] * 2, (2, 2), cores=8.0, seed=seed)
        course = tuned(run, 40)
        assert max(max(sizes) for sizes in course.sizes) <= 4
        assert course.sizes.count([2, 2]) > 200


def test_pools_that_only_together_raise_the_rate_both_grow() -> None:
    course = tuned(Simulation([Stage(wait=0.004), Stage(wait=0.004)], (2, 2), block=8), 5)
    assert course.rate(4, 5) >= 3 * 500


def test_a_process_that_starts_slowly_is_not_taken_back() -> None:
    course = tuned(Simulation([Stage(cpu=0.002, processes=True)], (1,), start_s=2.5), 10)
    assert [sizes[0] for sizes in course.sizes[20:]] == [2] * 80


def test_pools_shrink_to_what_a_slow_consumer_needs() -> None:
    course = tuned(Simulation(three(0.001, 0.001), (16, 4, 4), consumer=0.02), 30)
    assert course.sizes[-1] == [1, 1, 1]
    assert course.delivered[-1] >= 0.95 * 30 / 0.02


def test_pools_keep_up_with_a_consumer_and_no_more() -> None:
    course = tuned(Simulation(three(0.0005, 0.0005), (2, 2, 1), consumer=0.002), 30)
    assert course.rate(20, 30) >= 0.95 / 0.002
    assert course.sizes[-1][0] <= 6
    assert course.sizes[-1][2] == 1


@pytest.mark.parametrize(("consumer", "block", "noise"), [(0.0, 16, 0.3), (0.0, 64, 0.6), (0.0015, 16, 0.3)])
def test_a_steady_load_settles(consumer: float, block: int, noise: float) -> None:
    for seed in range(2):
        run = Simulation(three(0.001, 0.001), (2, 2, 1), consumer=consumer, block=block, noise=noise, seed=seed)
        course = tuned(run, 60)
        assert course.changes() <= 16
        assert course.changes(since=30) <= 6


def test_sizes_stay_in_their_bounds_and_at_most_one_pool_grows_whatever_is_read() -> None:
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


def told(tuner: Tuner, ticks: int, *, share: float = 1.0, rate: float = 100.0, each: float = 0.0) -> list[int]:
    """The sizes of a pool of two threads, always busy, which finish so much together and so much more each."""
    sizes = [2]
    for _ in range(ticks):
        now = sizes[-1]
        sizes += tuner.tick([Reading(now, 1, 64, False, now, share * now, 1.0, rate + each * now)], 1.0)
    return sizes


def test_a_pool_that_computes_stops_growing_when_the_cores_are_used() -> None:
    assert set(told(Tuner(2.0), 100, each=50)) == {2}
    assert told(Tuner(6.0), 100, each=50)[-1] == 6


def test_a_pool_that_waits_outgrows_the_cores() -> None:
    assert told(Tuner(2.0), 100, each=50, share=0.01)[-1] == 64


def test_workers_that_mostly_wait_stop_too_when_the_cores_are_used() -> None:
    assert told(Tuner(2.0), 100, each=50, share=0.1)[-1] == 20


def test_a_growth_without_use_is_undone_and_tried_again_ever_later() -> None:
    sizes = told(Tuner(8.0), 2000)
    tried = [tick for tick, (a, b) in enumerate(pairwise(sizes)) if b > a]
    undone = [tick for tick, (a, b) in enumerate(pairwise(sizes)) if b < a]
    pauses = [again - back for back, again in zip(undone, tried[1:], strict=False)]
    assert set(sizes) == {2, 3}
    assert pauses[0] >= 50
    assert len(pauses) >= 4
    assert all(later >= 1.9 * pause for pause, later in pairwise(pauses))


def test_a_pool_is_tried_again_at_once_when_its_rate_rises_by_itself() -> None:
    tuner = Tuner(8.0)
    assert told(tuner, 30)[-1] == 2
    assert 3 in told(tuner, 30, rate=200.0)


def test_nothing_grows_while_the_consumer_does_not_wait() -> None:
    tuner = Tuner(8.0)
    reading = Reading(2, 1, 64, False, 2.0, 0.0, 1.0, 100.0)
    assert {tuner.tick([reading], 0.05)[0] for _ in range(100)} == {2}


def test_idle_workers_go_after_two_seconds_and_leave_no_pool_that_would_grow_again() -> None:
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


def test_a_pool_that_next_to_nothing_reaches_does_not_keep_the_others_small() -> None:
    tuner, workers = Tuner(8.0), 2
    for _ in range(100):
        first = Reading(workers, 1, 64, False, workers, 0.0, 1.0, 50.0 * workers)
        workers = tuner.tick([first, Reading(1, 1, 8, False, 0.0, 0.0, 0.0, 0.0)], 1.0)[0]
    assert workers == 64


def test_a_pool_that_goes_missing_is_an_error() -> None:
    tuner = Tuner(2.0)
    reading = Reading(1, 1, 4, False, 0.5, 0.0, 0.0, 1.0)
    assert tuner.tick([], 1.0) == []
    assert tuner.tick([reading, reading], 1.0) == [1, 1]
    with pytest.raises(ValueError, match="shorter"):
        tuner.tick([reading], 1.0)
