"""The statistics of a run, and its bottleneck as a sentence.

``snapshot`` reads the meters of a run, at any time and from any thread. ``bottleneck`` writes the sentence; the gains
that it predicts come from ``ceiling``, a simple model: every sample needs the same work in every part of the run, so a
part that is busy for a share ``b`` of its capacity can reach ``1 / b`` times the rate, and the lowest of these bounds
applies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, NamedTuple

from penstock.codecs.markup import tag
from penstock.engines.meter import Meter, Meters
from penstock.plan.values import available_cores

MIN_BLOCKS = 5  # fewer blocks are not conclusive
MIN_SECONDS = 0.05  # a shorter run is not conclusive
BUSY = 0.75  # the share of time from which a segment counts as always busy
SATURATED = 0.9  # the share of a resource from which it counts as fully used
WAITING = 0.3  # a segment whose busy time has a smaller share of cpu mostly waits
MIN_SPEEDUP = 1.1  # a smaller gain is within the noise of a machine
MIN_BLOCKED = 0.25  # the share of time from which waiting for the order is the problem
MAX_GROWTH = 4  # the largest factor by which to raise the workers: beyond, the measurements say little
SAME_WAIT = 0.05  # waits whose shares of time differ by less count as equal
ONE_CORE = (0.75, 1.1)  # cores that all threads use together if the interpreter lock lets only one run at a time
CROWDED = 1.5  # load average per core above which other programs must be using the machine
NAME_WIDTH = 44  # of a segment's name in a table

READING = "reading"
LIGHT = ("read", "select", "drop", "rename", "to_tuple")  # stages that a sentence names only if there are no others
_AS_COUNTED = ("name", "on", "least", "most", "items", "blocks", "retries", "skips", "deaths", "timeouts")
CONSUMER, CORES, DRIVER = "consumer", "cores", "driver"
_SUBJECTS = {CONSUMER: "the consumer is", CORES: "the cores are", DRIVER: "the thread that moves blocks is"}


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """The statistics of one segment.

    Attributes:
        name: The segment, as it describes itself.
        on: "threads", "processes", "actors" or "inline".
        workers: The current number of workers, or the last one.
        least: The minimum number of workers.
        most: The maximum number of workers.
        samples_per_s: Output items per second, over the whole run.
        mb_per_s: Output megabytes (10^6 bytes) per second, over the whole run.
        busy: Share of the workers' time inside stages.
        starved: Share of the workers' time spent waiting for input.
        blocked: Share of the workers' time without input because finished blocks were waiting to be consumed.
        cpu_share: Share of the busy time that used a processor.
        queue_fill: Blocks in flight now.
        items: Output items.
        blocks: Output blocks.
        retries: Repeated calls.
        skips: Samples that failed and were skipped.
        deaths: Workers that died and were replaced.
        timeouts: Samples that took longer than ``timeout_s``.
        sizes: (seconds since the run began, workers) at each change of ``workers``.
    """

    name: str
    on: str
    workers: int
    least: int
    most: int
    samples_per_s: float
    mb_per_s: float
    busy: float
    starved: float
    blocked: float
    cpu_share: float
    queue_fill: int
    items: int
    blocks: int
    retries: int
    skips: int
    deaths: int
    timeouts: int
    sizes: tuple[tuple[float, int], ...]

    @property
    def faults(self) -> str:
        """The faults as text: ``retries 3, deaths 1``; empty if there are none."""
        counts = {"retries": self.retries, "skips": self.skips, "deaths": self.deaths, "timeouts": self.timeouts}
        return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)


@dataclass(frozen=True, slots=True)
class Stats:
    """The statistics of a run, so far or in total.

    Attributes:
        engine: The name of the engine.
        seconds: The duration of the run.
        items: Items that were delivered.
        samples_per_s: Items that were delivered, per second.
        consumer: Share of the time in which the consumer did not wait for items.
        segments: The segments, in the order of the plan.
        bottleneck: What limits the run and what would help, as a sentence.
        running: Whether the run has not ended yet.
    """

    engine: str
    seconds: float
    items: int
    samples_per_s: float
    consumer: float
    segments: tuple[SegmentStats, ...]
    bottleneck: str
    running: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as dicts, lists and numbers that ``json`` can write."""
        segments = [{**asdict(segment), "sizes": [list(size) for size in segment.sizes]} for segment in self.segments]
        return {**asdict(replace(self, segments=())), "segments": segments}

    def __str__(self) -> str:
        """Return a table with a line for each segment, and the bottleneck after it."""
        table = _aligned([HEADINGS, *map(_cells, self.segments)]) if self.segments else []
        return "\n".join([self.summary, *table, self.bottleneck])

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        rows = [tag("tr", [tag("td", cell) for cell in _cells(segment)]) for segment in self.segments]
        heads = tag("tr", [tag("th", heading) for heading in HEADINGS])
        table = tag("table", heads, rows) if rows else None
        return tag("div", tag("div", self.summary), table, tag("b", self.bottleneck))

    @property
    def summary(self) -> str:
        """The run as a whole, in one line."""
        state = "running" if self.running else "ended"
        delivered = f"{self.items:,} delivered, {number(self.samples_per_s)}/s"
        return f"{self.engine}, {state}, {self.seconds:.1f} s: {delivered}; consumer busy {percent(self.consumer)}"


@dataclass(frozen=True, slots=True)
class SegmentLoad:
    """The load of one segment, as means over the run.

    Attributes:
        name: The segment, as a sentence names it.
        on: "threads", "processes", "actors" or "inline".
        workers: The current number of workers.
        blocks: Output blocks.
        bounds: The minimum and the maximum number of workers.
        mean_workers: The number of workers.
        busy: The number of busy workers.
        blocked: The number of workers without input because finished blocks were waiting to be consumed.
        cpu: The number of cores in use.
        awaited: Share of the time in which everything after the segment waited for it.
    """

    name: str
    on: str
    workers: int
    blocks: int
    bounds: tuple[int, int]
    mean_workers: float
    busy: float
    blocked: float
    cpu: float
    awaited: float

    @property
    def share(self) -> float:
        """The share of the workers' time that is busy."""
        return min(1.0, _ratio(self.busy, self.mean_workers))

    @property
    def waits(self) -> bool:
        """Whether busy workers mostly wait, so that more workers need no more cores; False if cpu is unknown."""
        return 0 < self.cpu < WAITING * self.busy


@dataclass(frozen=True, slots=True)
class RunLoad:
    """The load of a whole run: everything that its bottleneck is derived from.

    Attributes:
        loads: The segments.
        seconds: The duration of the run.
        consumer: Share of the time in which the consumer did not wait.
        cores: The number of cores that the run may use.
        engine: The name of the engine.
        items: Items that were delivered.
        crowded: Other programs use the cores too, so that waiting for a core looks like any other waiting.
    """

    loads: tuple[SegmentLoad, ...]
    seconds: float
    consumer: float
    cores: float
    engine: str = "local"
    items: int = 0
    crowded: bool = False

    @property
    def slowest(self) -> int:
        """The number of the segment that is awaited most, unless it mostly waits itself; of equal ones, the busiest."""
        busiest = sorted(range(len(self.loads)), key=lambda number: -self.loads[number].share)
        longest = max(load.awaited for load in self.loads)
        first = next(number for number in busiest if self.loads[number].awaited >= longest - SAME_WAIT)
        waits = (
            self.loads[first].share < BUSY and self.loads[first].blocked < MIN_BLOCKED * self.loads[first].mean_workers
        )
        return busiest[0] if waits else first

    @property
    def inline(self) -> float:
        """The share of the time in which the thread that moves blocks is busy."""
        return sum(load.busy for load in self.loads if load.on == "inline")

    @property
    def cpu(self) -> float:
        """How many cores are in use."""
        return sum(load.cpu for load in self.loads)

    @property
    def interpreter_cpu(self) -> float:
        """How many cores are in use by threads that share the interpreter lock."""
        return sum(load.cpu for load in self.loads if load.on not in ("processes", "actors"))


class Ceiling(NamedTuple):
    """The highest rate that a run can reach.

    Attributes:
        gain: The rate, as a multiple of the current one.
        by: What limits the run at that rate: the number of a segment, or CONSUMER, CORES or DRIVER.
    """

    gain: float
    by: int | str


def ceiling(run: RunLoad, workers: Mapping[int, float] | None = None) -> Ceiling:
    """Return the highest rate that a run can reach.

    The consumer counts as using a core while it is busy: whether it does cannot be measured.

    Args:
        run: The load of the run.
        workers: Segment number -> the number of workers to assume instead of the current one.
    """
    limits = [
        Ceiling(_ratio(1, run.consumer, inf), CONSUMER),
        Ceiling(_ratio(run.cores, run.cpu + run.consumer, inf), CORES),
        Ceiling(_ratio(1, run.inline, inf), DRIVER),
    ]
    pools = [(n, load) for n, load in enumerate(run.loads) if load.on != "inline"]
    limits += [Ceiling(_ratio((workers or {}).get(n, load.workers), load.busy, inf), n) for n, load in pools]
    lowest = min(limits, key=lambda limit: limit.gain)
    return lowest._replace(gain=max(1.0, lowest.gain))  # the run reaches its current rate: less is noise


def snapshot(meters: Meters, cores: float | None = None, crowded: bool | None = None) -> Stats:
    """Return the statistics of a run, as its meters are now; cheap, and safe while other threads write the meters.

    Args:
        meters: The meters of the run.
        cores: The number of cores that the run may use; by default those of this process.
        crowded: Whether other programs keep the machine busy; by default derived from the load of the machine.
    """
    cores = available_cores() if cores is None else cores
    crowded = os.getloadavg()[0] > CROWDED * (os.cpu_count() or 1) if crowded is None else crowded
    segments = [replace(meter, sizes=list(meter.sizes)) for meter in list(meters.segments)]
    running, seconds, items = meters.ended is None, meters.seconds, meters.items
    waited = meters.waiting() if running else meters.waited
    consumer = min(1.0, max(0.0, 1 - _ratio(waited, seconds, 1.0)))
    loads = tuple(_load(meter, seconds) for meter in segments)
    run = RunLoad(loads, seconds, consumer, cores, meters.engine, items, crowded)
    stats = tuple(_segment(meter, seconds) for meter in segments)
    return Stats(meters.engine, seconds, items, _ratio(items, seconds), consumer, stats, bottleneck(run), running)


def _segment(meter: Meter, seconds: float) -> SegmentStats:
    worker_seconds = _worker_seconds(meter, seconds)
    return SegmentStats(
        workers=_workers(meter),
        samples_per_s=_ratio(meter.items, seconds),
        mb_per_s=_ratio(meter.nbytes / 1e6, seconds),
        busy=_ratio(meter.busy, worker_seconds),
        starved=_ratio(meter.starved, worker_seconds),
        blocked=_ratio(meter.blocked, worker_seconds),
        cpu_share=_ratio(meter.cpu, meter.busy),
        queue_fill=meter.pending,
        sizes=tuple(meter.sizes),
        **{name: getattr(meter, name) for name in _AS_COUNTED},
    )


def _load(meter: Meter, seconds: float) -> SegmentLoad:
    sums = (_worker_seconds(meter, seconds), meter.busy, meter.blocked, meter.cpu, meter.awaited)
    facts = (short_name(meter.name), meter.on, _workers(meter), meter.blocks, (meter.least, meter.most))
    return SegmentLoad(*facts, *(_ratio(total, seconds) for total in sums))


def _worker_seconds(meter: Meter, seconds: float) -> float:
    """Return the worker-seconds that the pool had; never less than the sum of busy, starved and blocked ones."""
    sizes = meter.sizes or [(0.0, meter.workers)]
    ends = [*(at for at, _ in sizes[1:]), seconds]
    total = sum(workers * max(0.0, end - at) for (at, workers), end in zip(sizes, ends, strict=True))
    return max(total, meter.busy + meter.starved + meter.blocked)


def _workers(meter: Meter) -> int:
    return meter.workers or next((workers for _, workers in reversed(meter.sizes) if workers), 0)


def _ratio(value: float, by: float, default: float = 0.0) -> float:
    return value / by if by > 0 else default


def bottleneck(run: RunLoad) -> str:
    """Return what limits a run and what would help, as one sentence."""
    causes = (_too_little, _consumer, _machine, _driver, _order, _lock, _workers_missing)
    return next(filter(None, (cause(run) for cause in causes)), None) or _unclear(run)


def _too_little(run: RunLoad) -> str | None:
    blocks = max((load.blocks for load in run.loads), default=0)
    if not blocks and not run.items:
        return "nothing has run yet"
    if run.seconds < MIN_SECONDS or (run.loads and blocks < MIN_BLOCKS):
        return "too little has run to find the bottleneck"
    return None


def _consumer(run: RunLoad, sure: bool = False) -> str | None:
    """Name the consumer if it is slower than everything before it, or in any case with ``sure``."""
    share = run.consumer
    busiest = max((load.share for load in run.loads), default=0.0)
    if not sure and (share <= 0.5 or share < min(SATURATED, busiest)):
        return None if run.loads else _unclear(run)
    max_gain = f"{1 / share:.2f}".rstrip("0").rstrip(".")
    promise = "not help" if max_gain == "1" else f"give at most {max_gain}x"
    return f"the consumer takes {percent(share)} of the time: a faster pipeline would {promise}"


def _machine(run: RunLoad) -> str | None:
    if run.cpu < SATURATED * run.cores:
        return None
    first = max(run.loads, key=lambda load: load.cpu)
    cores = "the only core is" if run.cores == 1 else f"all {run.cores:g} cores are"
    return f"{cores} in use, {first.cpu:.1f} by {first.name}: the machine is the limit, not a setting"


def _driver(run: RunLoad, sure: bool = False) -> str | None:
    """Name work in the thread that moves blocks if it limits the run, or in any case with ``sure``."""
    slowest = run.loads[run.slowest]
    enough = WAITING if slowest.on == "inline" else max(BUSY, slowest.share)
    if not sure and run.inline < enough:
        return None
    load = max((load for load in run.loads if load.on == "inline"), key=lambda load: load.busy)
    takes = f"{load.name} takes {percent(min(1.0, load.busy))} of the time"
    if run.engine == "serial":
        return takes + _serial(run)
    if load.name != READING:
        return f"{takes}, in the single thread that moves blocks: in a map before it, workers would share the work"
    if load.waits:
        return f"{takes}, mostly waiting for storage: workers= at the source or a closer copy would help"
    return f"{takes}, in a single thread"


def _serial(run: RunLoad) -> str:
    more = f'; on("local") would use {run.cores:g} cores' if run.cores > 1 else ""
    return f": the serial engine runs everything in one thread{more}" if run.engine == "serial" else ""


def _order(run: RunLoad) -> str | None:
    """Name a segment whose workers are idle because one slow block must be delivered before their finished ones."""
    load, gain = run.loads[run.slowest], ceiling(run).gain
    idle = _ratio(load.blocked, load.mean_workers)
    if load.share >= BUSY or idle < MIN_BLOCKED or load.awaited < MIN_BLOCKED or not MIN_SPEEDUP <= gain < float("inf"):
        return None
    return (
        f"{load.name} is held up by single slow blocks: its workers are busy {percent(load.share)} and wait "
        f"{percent(idle)} for those to be delivered; ordered=False would give up to {number(gain)}x"
    )


def _lock(run: RunLoad) -> str | None:
    """Name threads that use only one core together."""
    load = max(run.loads, key=lambda load: load.cpu * (load.on == "threads"))
    one_core = ONE_CORE[0] <= run.interpreter_cpu <= ONE_CORE[1]
    waits_for_lock = one_core and load.busy >= 1.5 * load.cpu >= 0.6 * run.interpreter_cpu
    if load.on != "threads" or load.share < 0.5 or not waits_for_lock or run.crowded:
        return None
    gain = _gain_of_processes(run, load)
    advice = f', and on="processes" would give up to {number(gain)}x' if gain >= MIN_SPEEDUP else ""
    finding = "but all threads of this run together use one core: the interpreter lock seems to be the limit"
    return f"{load.name} is busy {percent(load.share)}, {finding}{advice}"


def _gain_of_processes(run: RunLoad, load: SegmentLoad) -> float:
    """Return the gain of moving a segment to processes; threads count as busy while they wait for the lock."""
    moved = replace(load, on="processes", workers=max(1, round(run.cores)), busy=load.cpu)
    rest = (each for each in run.loads if each is not load)
    freed = [replace(each, busy=each.cpu) if each.on == "threads" else each for each in rest]
    changed = replace(run, loads=(moved, *freed))
    return min(ceiling(changed).gain, _ratio(1, changed.interpreter_cpu, inf))


def _workers_missing(run: RunLoad) -> str | None:
    """Name the segments that have too few workers: one, or several that are equally busy."""
    slowest, enough = run.loads[run.slowest], MIN_SPEEDUP * ceiling(run).gain
    if slowest.share < BUSY:
        return None
    raised = [run.slowest] if slowest.workers < enough * slowest.busy else []  # else another segment is as slow
    while (best := ceiling(run, dict.fromkeys(raised, inf))).gain < enough:
        if not isinstance(best.by, int):
            return _no_room_text(run, raised or [run.slowest], best.by)
        raised.append(best.by)
    return _more_workers_text(run, raised, best.gain)


def _more_workers_text(run: RunLoad, raised: list[int], max_gain: float) -> str:
    loads = [run.loads[segment] for segment in raised]
    wanted = [_wanted(load, max_gain) for load in loads]
    reached = ceiling(run, dict(zip(raised, wanted, strict=True)))
    change = " and ".join(f"{load.workers} -> {workers}" for load, workers in zip(loads, wanted, strict=True))
    gain = number(reached.gain / ceiling(run).gain)
    promise = f"would give about {gain}x{_then(run, reached.by, raised)}{_unless(run, loads)}"
    first = loads[0]
    if len(loads) > 1:
        return f"{_busy(loads)}: more workers for all of them, {change}, {promise}"
    if first.bounds[0] == first.bounds[1]:
        return f"{_busy(loads)}: workers {change} {promise}"
    if first.workers < first.bounds[1]:
        comma = "," if first.waits else ""
        return f"{_busy(loads)}{comma} and may grow to {first.bounds[1]} workers: {change} {promise}"
    return f"{_busy(loads)} with its maximum of {first.bounds[1]} workers: a maximum of {wanted[0]} {promise}"


def _wanted(load: SegmentLoad, gain: float) -> int:
    """Return the workers for ``gain`` times the rate, within the bounds of a pool that can still grow."""
    limit = min(MAX_GROWTH * load.workers, load.bounds[1] if load.workers < load.bounds[1] else inf)
    return max(load.workers + 1, round(min(load.busy * gain, limit)))


def _no_room_text(run: RunLoad, raised: list[int], by: str) -> str | None:
    if by == CONSUMER:
        return _consumer(run, sure=True)
    if by == DRIVER:
        return _driver(run, sure=True)
    used = f"{run.cpu:.1f} of {run.cores:g} are in use, and the consumer needs one"
    return f"{_busy([run.loads[segment] for segment in raised])}, but no core is free for more workers: {used}"


def _busy(loads: list[SegmentLoad]) -> str:
    first = f"{loads[0].name} is busy {percent(loads[0].share)}"
    if len(loads) == 1:
        return f"{first}, mostly waiting" if loads[0].waits else first
    return " and ".join([first, *(f"{load.name} {percent(load.share)}" for load in loads[1:])])


def _then(run: RunLoad, by: int | str, raised: list[int]) -> str:
    subject = f"{run.loads[by].name} is" if isinstance(by, int) else _SUBJECTS[by]
    return "" if by in raised else f", then {subject} the limit"


def _unless(run: RunLoad, loads: list[SegmentLoad]) -> str:
    """Return a caveat about a gain: other programs or, with few threads, the interpreter lock may reduce it."""
    if run.crowded:
        return " (perhaps less: other programs keep the machine busy)"
    unseen = 0.5 <= run.interpreter_cpu <= ONE_CORE[1] and any(load.on == "threads" for load in loads)
    return ' (if the functions release the interpreter lock: pure Python needs on="processes")' if unseen else ""


def _unclear(run: RunLoad) -> str:
    waits = f"the consumer waits {percent(1 - run.consumer)} of the time"
    if not run.loads:
        return waits + _serial(run)
    busiest = max(run.loads, key=lambda load: load.share)
    return f"{waits}, but no segment is busy all the time: {busiest.name} is the busiest, at {percent(busiest.share)}"


def short_name(name: str) -> str:
    """Return a segment's name for a sentence: ``decode('rgb8')`` for ``read -> decode('rgb8') -> select('jpg')``."""
    heavy = [part for part in name.split(" -> ") if part.partition("(")[0] not in LIGHT]
    if heavy:
        return " -> ".join(heavy)
    return READING if name.partition(" ")[0] == "read" else name


def percent(share: float) -> str:
    """Format a share: ``97%``."""
    return f"{100 * share:.0f}%"


def number(value: float) -> str:
    """Format a rate or a factor: ``1.5``, ``12``, ``1,234``."""
    return f"{value:,.0f}" if value >= 9.95 or not value else f"{value:.1f}"


HEADINGS = ("segment", "on", "workers", "samples/s", "MB/s", "busy", "starved", "blocked", "cpu", "queue", "faults")


def _cells(segment: SegmentStats) -> tuple[str, ...]:
    name = segment.name if len(segment.name) <= NAME_WIDTH else segment.name[: NAME_WIDTH - 3] + "..."
    shares = (segment.busy, segment.starved, segment.blocked, segment.cpu_share)
    rates = (number(segment.samples_per_s), number(segment.mb_per_s))
    faults = segment.faults or "none"
    return (name, segment.on, f"{segment.workers}", *rates, *map(percent, shares), f"{segment.queue_fill}", faults)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align words to the left and numbers to the right."""
    columns = []
    for heading, *cells in zip(*rows, strict=True):
        width = max(map(len, (heading, *cells)))
        side = "<" if heading in ("segment", "on", "faults") else ">"
        columns.append([f"{cell:{side}{width}}" for cell in (heading, *cells)])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
