"""The tuner against a simulated run: pools joined by short queues, cores and an interpreter lock to share."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from penstock.engines.tuner import TICK_S, Reading, Tuner

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
    under_way: deque[list[float]] = field(default_factory=deque)  # in order: [items left]
    waiting: deque[list[float]] = field(default_factory=deque)
    in_work: list[list[float]] = field(default_factory=list)
    over: list[float] = field(default_factory=list)  # items of the next blocks that were done in the last step
    busy: float = 0.0
    cpu: float = 0.0
    awaited: float = 0.0
    finished: int = 0
    starting: list[float] = field(default_factory=list)  # when new processes will be there

    def room(self) -> bool:
        return len(self.under_way) < 2 * self.workers

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
    start_s: float = 0.3  # until a new process works
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
                pool.starting += [self.now + self.start_s] * (size - pool.workers)
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
            pool.starting = [then for then in pool.starting if then > self.now]
            while pool.waiting and len(pool.in_work) < max(1, pool.workers - len(pool.starting)):
                block = pool.waiting.popleft()
                block[0] += pool.over.pop() if pool.over else 0.0
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
        for source, target in reversed(list(zip(self.pools, self.pools[1:], strict=False))):
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
        wanted = [len(p.in_work) * p.stage.cpu / ((p.stage.wait + p.stage.cpu) or 1.0) for p in self.pools]
        locked = sum(want for want, pool in zip(wanted, self.pools, strict=True) if pool.stage.lock)
        got = [want / max(1.0, locked) if pool.stage.lock else want for want, pool in zip(wanted, self.pools, strict=True)]
        slower = max(1.0, sum(got) / self.cores)
        for pool in self.pools:
            stage = pool.stage
            slowness = slower * (max(1.0, locked) if stage.lock else 1.0)
            items = STEP_S / (stage.wait + stage.cpu * slowness)
            pool.busy += len(pool.in_work) * STEP_S
            pool.cpu += len(pool.in_work) * items * stage.cpu
            for block in pool.in_work:
                block[0] -= items
            pool.over = [block[0] for block in pool.in_work if block[0] <= 0]
            if pool.over:
                pool.in_work = [block for block in pool.in_work if block[0] > 0]
                pool.finished += len(pool.over) * self.block
