"""How many workers each pool should have, decided from what the pools measured.

Nothing here has a clock or a thread: the engine reads its meters every ``TICK_S``, calls ``Tuner.tick`` and sets the
pools to the answer. The rules:

- **Grow.** While the consumer waits, a pool holds up the run if nearly all of its workers are busy and it is waited
  for, or is the last such pool. The one waited for most gets more workers: twice as many if they mostly wait for
  something, half as many again if they compute, and no more than there are cores for.
- **Try.** A growth is a trial, one at a time. It has paid once the run's rate has risen beyond doubt. If another pool
  is in the way by then, the trial goes on with that one too, as only both together may show. Workers that cost next to
  nothing double again before the rate can tell.
- **Go back.** If the rate has not risen, all of the trial is undone: the interpreter lock or a full network has no use
  for more workers. Its pools are left alone, each time twice as long, unless their rate rises by itself: the refusal
  was about a run that is no more. Only if nothing holds up the run any longer they keep what they have.
- **Shrink.** Half of the workers that were idle for two seconds on end go, but only so many that the rest is less busy
  than a pool that would grow, so that it does not swing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TICK_S = 0.1

SMOOTH = 0.3  # the weight of the newest tick: about the last half second counts
SEEN = 3  # ticks until the smoothed readings show a change
WAITING = 0.1  # share of the time from which on somebody is really waiting
FULL = 0.85  # share of busy workers from which on a pool could use more
CALM = 0.75  # and up to which it may lose some: far enough below not to want them back
COMPUTES = 0.3  # cores a busy worker uses, from which on it does more than wait
CHEAP = 0.25  # cores a whole pool uses, up to which more of its workers cost next to nothing
PAYS = 0.2  # of what a growth could add to the rate, the part that it must add
NOTICED = 0.08  # and of the rate itself, as less is not told from noise
DOUBT = 2.5  # standard errors within which a difference of rates is open: it is looked at again and again
FINISHED = 3  # ticks in which something was finished that a rate needs
RECENT = 40  # ticks it looks at, or more if it takes more to see something finished
WARM = (2, 30)  # ticks until new threads, new processes work: those import what they need first
LONGEST = 50  # ticks until an open trial ends
HISTORY = 600  # and if next to nothing is finished
IDLE = 1.5  # idle workers, from which on one is too many
IDLE_TICKS = 20
PAUSE = (50, 6400)  # ticks that a pool is left alone after a growth that did not pay: at first, at most


@dataclass(frozen=True, slots=True)
class Reading:
    """What one pool did during the last tick."""

    workers: int  # that it is set to, even if some are still starting
    least: int
    most: int
    processes: bool
    busy: float  # mean number of workers inside stages
    cpu: float  # mean number of cores those used
    awaited: float  # share of the tick in which everything behind waited for this pool
    rate: float  # inputs finished per second


@dataclass(frozen=True, slots=True)
class _Rate:
    """A rate, and the error it may have."""

    mean: float = 0.0
    error: float = 0.0
    certain: bool = False  # enough was finished to speak of a rate

    @classmethod
    def of(cls, newest_first: Iterable[float]) -> _Rate:
        """The rate of the last ticks, going back as far as it takes."""
        seen: list[float] = []
        finished = 0
        for rate in newest_first:
            if len(seen) >= RECENT and finished >= FINISHED:
                break
            seen.append(rate)
            finished += rate > 0
        n = max(2, len(seen))
        mean = sum(seen) / n
        variance = sum((rate - mean) ** 2 for rate in seen) / (n - 1)
        few = 1 + 3 / n  # the spread of a few ticks is a guess itself
        return cls(mean, few * math.sqrt(variance / n), finished >= FINISHED)

    def surplus_over(self, goal: float, before: _Rate) -> tuple[float, float]:
        """How much this is above ``goal`` times what it was before, and how far that may be off."""
        return self.mean - goal * before.mean, DOUBT * math.hypot(self.error, goal * before.error)


@dataclass(slots=True)
class _Pool:
    """What is remembered of one pool."""

    busy: float = 0.0
    cpu: float = 0.0
    awaited: float = 0.0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))  # since a pool last grew
    silent: int = 0  # ticks since it last finished something
    idle_ticks: int = 0
    pause: int = PAUSE[0]
    alone_until: int = 0  # the tick
    refused_at: _Rate = _Rate()  # the rate at which more workers were of no use

    def add(self, reading: Reading) -> None:
        self.busy += SMOOTH * (reading.busy - self.busy)
        self.cpu += SMOOTH * (reading.cpu - self.cpu)
        self.awaited += SMOOTH * (reading.awaited - self.awaited)
        self.rates.append(reading.rate)
        self.silent = 0 if reading.rate else self.silent + 1

    @property
    def share(self) -> float:
        """Cores that one busy worker uses."""
        return min(1.0, self.cpu / self.busy) if self.busy else 0.0

    @property
    def rate(self) -> _Rate:
        return _Rate.of(reversed(self.rates))

    @property
    def turn(self) -> int:
        """The most ticks it takes until every worker has finished something: as if never two did in one tick."""
        return math.ceil(self.busy * len(self.rates) / max(1, sum(rate > 0 for rate in self.rates)))

    def refuse(self, now: int) -> None:
        """Leave it alone for a while."""
        self.alone_until, self.refused_at = now + self.pause, self.rate
        self.pause = min(2 * self.pause, PAUSE[1])

    def refused(self, now: int) -> bool:
        if now >= self.alone_until:
            return False
        surplus, doubt = self.rate.surplus_over(1.25, self.refused_at)
        return surplus <= doubt


@dataclass(slots=True)
class _Trial:
    """A growth that has yet to show that it pays."""

    teller: _Pool  # whose rate is the run's
    before: _Rate
    goal: float  # how many times that it must be
    sizes: dict[int, int] = field(default_factory=dict)  # of the pools that grew, before
    warm: int = 0  # ticks until all of the new workers show in the rate
    age: int = 0  # ticks since a pool last grew


class Tuner:
    """Decides how many workers each pool of a run should have."""

    def __init__(self, cores: float) -> None:
        """Share ``cores`` among the pools."""
        self._cores = cores
        self._pools: list[_Pool] = []
        self._trial: _Trial | None = None
        self._waited = 0.0
        self._now = 0

    def tick(self, readings: Sequence[Reading], consumer_waited: float) -> list[int]:
        """The workers each pool should have from now on, in its bounds; at most one pool gets more.

        Readings come in the order of the stream, for the same pools every time; new ones come last.

        Raises:
            ValueError: a pool is missing.
        """
        self._now += 1
        self._waited += SMOOTH * (consumer_waited - self._waited)
        self._pools += [_Pool() for _ in readings[len(self._pools) :]]
        for pool, reading in zip(self._pools, readings, strict=True):
            pool.add(reading)
        sizes = [reading.workers for reading in readings]
        self._shrink(readings, sizes)
        holders = self._holders(readings)
        if self._trial is not None:
            self._judge(self._trial, holders, sizes)
        if self._trial is None:
            self._begin(holders, readings, sizes)
        elif self._trial.age > SEEN:
            self._go_on(self._trial, holders, readings, sizes)
        return [min(max(size, reading.least), reading.most) for size, reading in zip(sizes, readings, strict=True)]

    def _holders(self, readings: Sequence[Reading]) -> list[int]:
        """The pools that hold up the run, the one waited for most first."""
        if self._waited < WAITING:
            return []
        pools = self._pools
        full = [i for i, reading in enumerate(readings) if pools[i].busy >= FULL * reading.workers]
        holding = [i for i in full if pools[i].awaited >= WAITING or i == full[-1]]
        return sorted(holding, key=lambda i: -pools[i].awaited)

    def _begin(self, holders: list[int], readings: Sequence[Reading], sizes: list[int]) -> None:
        """Give the first pool that may have them more workers, and remember how it was."""
        teller = self._teller() if holders else None
        if teller is None or not teller.rate.certain:
            return
        for number in holders:
            more, fit = self._room(number, readings[number])
            if more and not self._pools[number].refused(self._now):
                hoped = min(more, fit) / sizes[number]
                goal = 1 + max(PAYS * hoped, min(NOTICED, hoped / 2))
                self._trial = _Trial(teller, teller.rate, goal)
                self._grow(self._trial, number, more, readings, sizes)
                return

    def _go_on(self, trial: _Trial, holders: list[int], readings: Sequence[Reading], sizes: list[int]) -> None:
        """Let the pool that now holds up the run take part in the trial, or cheap workers grow again."""
        for number in holders[:1]:
            pool = self._pools[number]
            more, _ = self._room(number, readings[number])
            may = pool.cpu < CHEAP if number in trial.sizes else not pool.refused(self._now)
            if more and may:
                self._grow(trial, number, more, readings, sizes)

    def _grow(self, trial: _Trial, number: int, more: int, readings: Sequence[Reading], sizes: list[int]) -> None:
        pool = self._pools[number]
        trial.sizes.setdefault(number, sizes[number])
        trial.warm = max(trial.warm, WARM[readings[number].processes], pool.turn)
        pool.cpu += more * pool.share  # taken at once, so that these cores are not given away twice
        pool.busy += more
        trial.age = 0
        sizes[number] += more
        self._measure_anew()

    def _judge(self, trial: _Trial, holders: list[int], sizes: list[int]) -> None:
        """End the trial if it is decided."""
        trial.age += 1
        if trial.age == trial.warm:
            self._measure_anew()
        after = trial.teller.rate
        surplus, doubt = after.surplus_over(trial.goal, trial.before)
        settled = after.certain and trial.age > trial.warm + SEEN
        overdue = trial.age >= trial.warm + (LONGEST if after.certain else HISTORY)
        passed_on = not trial.sizes.keys() & set(holders)
        if after.certain and surplus >= (doubt / 2 if overdue else doubt):
            self._end(trial, paid=True)
        elif settled and passed_on and (not holders or after.mean >= (1 + NOTICED) * trial.before.mean):
            self._end(trial, paid=surplus >= 0)
        elif overdue or (settled and (passed_on or surplus <= -doubt)):
            self._end(trial, paid=False)
            for number, size in trial.sizes.items():
                sizes[number] = min(size, sizes[number])
            self._measure_anew()

    def _end(self, trial: _Trial, paid: bool) -> None:
        self._trial = None
        for pool in (self._pools[number] for number in trial.sizes):
            if paid:
                pool.pause = PAUSE[0]
            else:
                pool.refuse(self._now)

    def _shrink(self, readings: Sequence[Reading], sizes: list[int]) -> None:
        """Let go of workers that had nothing to do for long."""
        tried = self._trial.sizes if self._trial is not None else {}
        for number, (pool, reading) in enumerate(zip(self._pools, readings, strict=True)):
            idle = reading.workers - pool.busy
            spare = min(int(reading.workers - pool.busy / CALM), reading.workers - reading.least)
            pool.idle_ticks = pool.idle_ticks + 1 if idle >= IDLE and spare > 0 and number not in tried else 0
            if pool.idle_ticks >= IDLE_TICKS:
                sizes[number] -= min(spare, max(1, int(idle / 2)))
                pool.idle_ticks = 0

    def _room(self, number: int, reading: Reading) -> tuple[int, float]:
        """How many more workers the pool should get, and for how many there are cores."""
        share = self._pools[number].share
        free = max(0.0, self._cores - sum(pool.cpu for pool in self._pools))
        fit = free / share if share else math.inf
        more = reading.workers if share < COMPUTES else max(1, reading.workers // 2)
        more = max(0, min(more, reading.most - reading.workers))
        # The last of them must find a quarter of what it could use, or it is not worth a trial.
        return more if more <= fit else min(more, int(fit + 0.75)), fit

    def _teller(self) -> _Pool:
        """The pool whose rate is the run's: the last one, or the last that anything reaches.

        Earlier ones tell less, as they are ahead of the run while the queues between them fill.
        """
        return next((pool for pool in reversed(self._pools) if pool.silent < RECENT), self._pools[-1])

    def _measure_anew(self) -> None:
        """Forget what was finished by fewer workers, or by more."""
        for pool in self._pools:
            pool.rates.clear()
