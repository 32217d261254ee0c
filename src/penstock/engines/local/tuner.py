"""Decide how many workers each pool should have, from measurements of the pools.

Nothing here has a clock or a thread: the supervisor reads the meters every ``TICK_S``, calls ``Tuner.tick`` and resizes
the pools as it returns. The rules:

- **Grow.** While the consumer waits, a pool is a bottleneck if nearly all of its workers are busy and later stages
  wait for it, or if it is the last such pool. The most awaited bottleneck gets more workers: twice as many if they
  mostly wait, half as many again if they compute, and never more than there are cores for.
- **Try.** Growth is a trial; there is one trial at a time. It has paid off once the rate of the run has risen beyond
  doubt. If another pool has become the bottleneck by then, the trial continues with that pool too, as the gain may need
  both. Workers that cost next to nothing double again before the rate is certain.
- **Undo.** If the rate has not risen, the whole trial is undone: behind the interpreter lock or a full network, more
  workers are useless. Its pools are not resized for a while, twice as long each time, unless their rate rises by
  itself: then the trial says nothing about the run as it is now. If nothing is a bottleneck any longer, the pools keep
  their workers.
- **Shrink.** Half of the workers that were idle for two seconds end, but only so many that the others stay less busy
  than a pool that would grow, so that the size does not oscillate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TICK_S = 0.1

SMOOTHING = 0.3  # the weight of the newest tick: about the last half second counts
SETTLE_TICKS = 3  # until the smoothed readings show a change
WAITING_SHARE = 0.1  # of the time: a shorter wait is noise
FULL_SHARE = 0.85  # of busy workers, from which a pool could use more workers
CALM_SHARE = 0.75  # of busy workers, up to which a pool may shrink: far enough below FULL_SHARE not to grow again
COMPUTE_CORES = 0.3  # cores used by a busy worker, from which it does more than wait
CHEAP_CORES = 0.25  # cores used by a whole pool, up to which more workers cost next to nothing
MIN_GAIN_SHARE = 0.2  # of what a growth could add to the rate: the part that it must add
MIN_GAIN = 0.08  # of the rate itself: a smaller gain cannot be distinguished from noise
DOUBT_ERRORS = 2.5  # standard errors within which a difference of rates is not decided yet
MIN_FINISHED_TICKS = 3  # ticks in which something was finished, for a rate to be certain
RECENT_TICKS = 40  # over which a rate is measured, or more if too little was finished
WARMUP_TICKS = (2, 30)  # until new threads and new processes do work: processes import their modules first
MAX_TRIAL_TICKS = 50  # until an undecided trial ends
HISTORY_TICKS = 600  # the same if next to nothing is finished
MIN_IDLE_WORKERS = 1.5  # from which one worker is superfluous
IDLE_TICKS = 20  # until superfluous workers end
PAUSE_TICKS = (50, 6400)  # without resizing a pool after a growth that did not pay off: the first and the longest pause


@dataclass(frozen=True, slots=True)
class Reading:
    """The measurements of one pool during the last tick."""

    workers: int  # the current size, including workers that are still starting
    min_workers: int
    max_workers: int
    processes: bool
    busy: float  # mean number of workers inside stages
    cpu: float  # mean number of cores that they used
    awaited: float  # share of the tick in which everything after this pool waited for it
    rate: float  # inputs finished per second


@dataclass(frozen=True, slots=True)
class _Rate:
    """A measured rate and its standard error."""

    mean: float = 0.0
    error: float = 0.0
    certain: bool = False  # enough was finished to speak of a rate

    @classmethod
    def of(cls, newest_first: Iterable[float]) -> _Rate:
        """Return the rate over the last ticks, looking back as far as necessary."""
        seen: list[float] = []
        finished = 0
        for rate in newest_first:
            if len(seen) >= RECENT_TICKS and finished >= MIN_FINISHED_TICKS:
                break
            seen.append(rate)
            finished += rate > 0
        n = max(2, len(seen))
        mean = sum(seen) / n
        variance = sum((rate - mean) ** 2 for rate in seen) / (n - 1)
        widening = 1 + 3 / n  # the spread of a few ticks is a guess itself
        return cls(mean, widening * math.sqrt(variance / n), finished >= MIN_FINISHED_TICKS)

    def surplus_over(self, goal: float, before: _Rate) -> tuple[float, float]:
        """Return how far this rate exceeds ``goal`` times the rate before, and how uncertain that is."""
        return self.mean - goal * before.mean, DOUBT_ERRORS * math.hypot(self.error, goal * before.error)


@dataclass(slots=True)
class _PoolState:
    """What the tuner remembers about one pool."""

    busy: float = 0.0
    cpu: float = 0.0
    awaited: float = 0.0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_TICKS))  # since a pool last grew
    silent_ticks: int = 0  # since the pool last finished something
    idle_ticks: int = 0
    pause_ticks: int = PAUSE_TICKS[0]
    paused_until: int = 0  # the tick
    refused_at: _Rate = _Rate()  # the rate at which more workers were useless

    def add(self, reading: Reading) -> None:
        self.busy += SMOOTHING * (reading.busy - self.busy)
        self.cpu += SMOOTHING * (reading.cpu - self.cpu)
        self.awaited += SMOOTHING * (reading.awaited - self.awaited)
        self.rates.append(reading.rate)
        self.silent_ticks = 0 if reading.rate else self.silent_ticks + 1

    @property
    def cores_per_worker(self) -> float:
        """The cores that one busy worker uses."""
        return min(1.0, self.cpu / self.busy) if self.busy else 0.0

    @property
    def rate(self) -> _Rate:
        return _Rate.of(reversed(self.rates))

    @property
    def round_ticks(self) -> int:
        """An upper bound on the ticks until every worker has finished something: as if no two did in one tick."""
        return math.ceil(self.busy * len(self.rates) / max(1, sum(rate > 0 for rate in self.rates)))

    def refuse(self, now: int) -> None:
        """Pause the growth of the pool, each time twice as long."""
        self.paused_until, self.refused_at = now + self.pause_ticks, self.rate
        self.pause_ticks = min(2 * self.pause_ticks, PAUSE_TICKS[1])

    def refused(self, now: int) -> bool:
        """Return whether the pool must not grow: it is paused, and its rate has not risen by itself."""
        if now >= self.paused_until:
            return False
        surplus, doubt = self.rate.surplus_over(1.25, self.refused_at)
        return surplus <= doubt


@dataclass(slots=True)
class _Trial:
    """A growth that has yet to prove that it pays off."""

    reference: _PoolState  # the pool whose rate is the run's
    before: _Rate
    goal: float  # the factor by which the rate must rise
    sizes: dict[int, int] = field(default_factory=dict)  # of the pools that grew, before they did
    warmup_ticks: int = 0  # until all of the new workers show in the rate
    age: int = 0  # ticks since a pool last grew


class Tuner:
    """Decides how many workers each pool of a run should have."""

    def __init__(self, cores: float) -> None:
        """Share ``cores`` among the pools."""
        self._cores = cores
        self._pools: list[_PoolState] = []
        self._trial: _Trial | None = None
        self._waited = 0.0
        self._now = 0

    def tick(self, readings: Sequence[Reading], consumer_waited: float) -> list[int]:
        """Return the number of workers for each pool, within its bounds; at most one pool grows.

        Args:
            readings: One per pool, in the order of the stream, for the same pools every time; new pools come last.
            consumer_waited: The share of the tick in which the consumer waited.

        Raises:
            ValueError: A pool is missing.
        """
        self._now += 1
        self._waited += SMOOTHING * (consumer_waited - self._waited)
        self._pools += [_PoolState() for _ in readings[len(self._pools) :]]
        for pool, reading in zip(self._pools, readings, strict=True):
            pool.add(reading)
        sizes = [reading.workers for reading in readings]
        self._shrink(readings, sizes)
        bottlenecks = self._bottlenecks(readings)
        if self._trial is not None:
            self._judge(self._trial, bottlenecks, sizes)
        if self._trial is None:
            self._begin_trial(bottlenecks, readings, sizes)
        elif self._trial.age > SETTLE_TICKS:
            self._extend_trial(self._trial, bottlenecks, readings, sizes)
        return [
            min(max(size, reading.min_workers), reading.max_workers)
            for size, reading in zip(sizes, readings, strict=True)
        ]

    def _bottlenecks(self, readings: Sequence[Reading]) -> list[int]:
        """Return the pools that limit the run, the most awaited one first."""
        if self._waited < WAITING_SHARE:
            return []
        pools = self._pools
        full = [i for i, reading in enumerate(readings) if pools[i].busy >= FULL_SHARE * reading.workers]
        awaited = [i for i in full if pools[i].awaited >= WAITING_SHARE or i == full[-1]]
        return sorted(awaited, key=lambda i: -pools[i].awaited)

    def _begin_trial(self, bottlenecks: list[int], readings: Sequence[Reading], sizes: list[int]) -> None:
        """Grow the first bottleneck that may grow, and remember the rate before."""
        reference = self._reference_pool() if bottlenecks else None
        if reference is None or not reference.rate.certain:
            return
        for number in bottlenecks:
            more, fitting = self._growth(number, readings[number])
            if more and not self._pools[number].refused(self._now):
                best_gain = min(more, fitting) / sizes[number]
                goal = 1 + max(MIN_GAIN_SHARE * best_gain, min(MIN_GAIN, best_gain / 2))
                self._trial = _Trial(reference, reference.rate, goal)
                self._grow(self._trial, number, more, readings, sizes)
                return

    def _extend_trial(
        self, trial: _Trial, bottlenecks: list[int], readings: Sequence[Reading], sizes: list[int]
    ) -> None:
        """Let the current bottleneck join the trial, or grow again if its workers are cheap."""
        for number in bottlenecks[:1]:
            pool = self._pools[number]
            more, _ = self._growth(number, readings[number])
            allowed = pool.cpu < CHEAP_CORES if number in trial.sizes else not pool.refused(self._now)
            if more and allowed:
                self._grow(trial, number, more, readings, sizes)

    def _grow(self, trial: _Trial, number: int, more: int, readings: Sequence[Reading], sizes: list[int]) -> None:
        pool = self._pools[number]
        trial.sizes.setdefault(number, sizes[number])
        trial.warmup_ticks = max(trial.warmup_ticks, WARMUP_TICKS[readings[number].processes], pool.round_ticks)
        pool.cpu += more * pool.cores_per_worker  # reserved at once, so that these cores are not assigned twice
        pool.busy += more
        trial.age = 0
        sizes[number] += more
        self._restart_measurement()

    def _judge(self, trial: _Trial, bottlenecks: list[int], sizes: list[int]) -> None:
        """End the trial if it is decided."""
        trial.age += 1
        if trial.age == trial.warmup_ticks:
            self._restart_measurement()
        after = trial.reference.rate
        surplus, doubt = after.surplus_over(trial.goal, trial.before)
        settled = after.certain and trial.age > trial.warmup_ticks + SETTLE_TICKS
        overdue = trial.age >= trial.warmup_ticks + (MAX_TRIAL_TICKS if after.certain else HISTORY_TICKS)
        bottleneck_moved = not trial.sizes.keys() & set(bottlenecks)
        if after.certain and surplus >= (doubt / 2 if overdue else doubt):
            self._end_trial(trial, paid_off=True)
        elif settled and bottleneck_moved and (not bottlenecks or after.mean >= (1 + MIN_GAIN) * trial.before.mean):
            self._end_trial(trial, paid_off=surplus >= 0)
        elif overdue or (settled and (bottleneck_moved or surplus <= -doubt)):
            self._end_trial(trial, paid_off=False)
            for number, size in trial.sizes.items():
                sizes[number] = min(size, sizes[number])
            self._restart_measurement()

    def _end_trial(self, trial: _Trial, paid_off: bool) -> None:
        self._trial = None
        for pool in (self._pools[number] for number in trial.sizes):
            if paid_off:
                pool.pause_ticks = PAUSE_TICKS[0]
            else:
                pool.refuse(self._now)

    def _shrink(self, readings: Sequence[Reading], sizes: list[int]) -> None:
        """Remove workers that have long been idle."""
        on_trial = self._trial.sizes if self._trial is not None else {}
        for number, (pool, reading) in enumerate(zip(self._pools, readings, strict=True)):
            idle = reading.workers - pool.busy
            spare = min(int(reading.workers - pool.busy / CALM_SHARE), reading.workers - reading.min_workers)
            superfluous = idle >= MIN_IDLE_WORKERS and spare > 0 and number not in on_trial
            pool.idle_ticks = pool.idle_ticks + 1 if superfluous else 0
            if pool.idle_ticks >= IDLE_TICKS:
                sizes[number] -= min(spare, max(1, int(idle / 2)))
                pool.idle_ticks = 0

    def _growth(self, number: int, reading: Reading) -> tuple[int, float]:
        """Return the number of workers to add to the pool, and the number of additional workers that have cores."""
        cores = self._pools[number].cores_per_worker
        free = max(0.0, self._cores - sum(pool.cpu for pool in self._pools))
        fitting = free / cores if cores else math.inf
        more = reading.workers if cores < COMPUTE_CORES else max(1, reading.workers // 2)
        more = max(0, min(more, reading.max_workers - reading.workers))
        # The last new worker must have at least a quarter of the cores that it could use, or it is not worth a trial.
        return more if more <= fitting else min(more, int(fitting + 0.75)), fitting

    def _reference_pool(self) -> _PoolState:
        """Return the pool whose rate is the run's: the last one, or the last one that receives blocks.

        Earlier pools run ahead of the run while the queues between them fill.
        """
        return next((pool for pool in reversed(self._pools) if pool.silent_ticks < RECENT_TICKS), self._pools[-1])

    def _restart_measurement(self) -> None:
        """Forget the rates measured with other numbers of workers."""
        for pool in self._pools:
            pool.rates.clear()
