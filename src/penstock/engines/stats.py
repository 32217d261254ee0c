"""What a run did, as values to look at, and what holds it up, as a sentence.

``snapshot`` reads the meters of a run, at any time and from any thread. ``bottleneck`` finds the sentence; what it
promises comes from ``ceiling``, the only model there is: every sample asks the same work of every part of the run, so
a part that is at work for a share of what it could do can take so many times the rate, and the least of these holds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, NamedTuple

from penstock.engines.meter import Meter, Meters

BLOCKS = 5  # fewer say nothing
SECONDS = 0.05  # the same, of time
HIGH = 0.75  # from here on a segment counts as busy throughout
FULL = 0.9  # and this is as good as all of something
WAITING = 0.3  # a segment with a smaller share of cpu waits for something else most of the time
WORTH = 1.1  # a smaller gain is no advice: it drowns in the noise of a machine
IDLE = 0.25  # of the time: from here on waiting for the order is what costs
LEAP = 4  # what was measured says little about more than so many times the workers
NEAR = 0.05  # of the time: waits closer to each other than this are the same
LOCKED = (0.75, 1.1)  # cores that threads use between them where the interpreter lock lets only one run
CROWD = 1.5  # times the cores: a load from here on is more than one run's
WIDTH = 44  # of a segment's name in a table

READING = "reading"
QUIET = ("read", "select", "drop", "rename", "to_tuple")  # stages that no sentence need name beside others
_AS_COUNTED = ("name", "on", "least", "most", "items", "blocks", "retries", "skips", "deaths", "timeouts")
CONSUMER, CORES, MOVER = "consumer", "cores", "mover"
_LAST = {CONSUMER: "the consumer is", CORES: "the cores are", MOVER: "the thread that moves blocks is"}


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """What one segment did; rates are over the whole run, shares are of the time its workers existed."""

    name: str
    on: str  # "threads", "processes", "actors" or "inline"
    workers: int  # now; once the run is over, the last
    least: int
    most: int
    samples_per_s: float
    mb_per_s: float
    busy: float
    starved: float
    blocked: float
    cpu_share: float  # of the busy time
    queue_fill: int  # blocks under way now
    items: int
    blocks: int
    retries: int
    skips: int
    deaths: int
    timeouts: int
    sizes: tuple[tuple[float, int], ...]  # (seconds since the begin, workers) at each change

    @property
    def faults(self) -> str:
        """What went wrong, as in ``retries 3, deaths 1``; empty where nothing did."""
        counts = {"retries": self.retries, "skips": self.skips, "deaths": self.deaths, "timeouts": self.timeouts}
        return ", ".join(f"{what} {many:,}" for what, many in counts.items() if many)


@dataclass(frozen=True, slots=True)
class Stats:
    """What a run did so far, or did."""

    engine: str
    seconds: float
    items: int  # delivered
    samples_per_s: float
    consumer: float  # share of the time in which the consumer was busy elsewhere
    segments: tuple[SegmentStats, ...]
    bottleneck: str
    running: bool

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        segments = [{**asdict(segment), "sizes": [list(size) for size in segment.sizes]} for segment in self.segments]
        return {**asdict(replace(self, segments=())), "segments": segments}

    def __str__(self) -> str:
        """A table: a line for each segment, then the sentence."""
        table = _aligned([HEADINGS, *map(_cells, self.segments)]) if self.segments else []
        return "\n".join([self.summary, *table, self.bottleneck])

    @property
    def summary(self) -> str:
        """The run as a whole, in a line."""
        state = "running" if self.running else "ended"
        delivered = f"{self.items:,} delivered, {number(self.samples_per_s)}/s"
        return f"{self.engine}, {state}, {self.seconds:.1f} s: {delivered}; consumer busy {percent(self.consumer)}"


@dataclass(frozen=True, slots=True)
class Load:
    """What a run asks of one segment, on average over its time."""

    name: str
    on: str
    workers: int  # now
    blocks: int
    bounds: tuple[int, int]  # of its workers
    size: float  # workers there were
    busy: float  # of those there were, at work
    blocked: float  # of those there were, waiting for somebody to take what is finished
    cpu: float  # cores they used
    awaited: float  # share of the time in which everything behind waited for it

    @property
    def share(self) -> float:
        """How much of its workers' time is work."""
        return min(1.0, _per(self.busy, self.size))

    @property
    def waits(self) -> bool:
        """Whether its work is mostly waiting, so that more workers need no more cores; no, where cpu is not counted."""
        return 0 < self.cpu < WAITING * self.busy


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is known about what holds a run up."""

    loads: tuple[Load, ...]
    seconds: float
    consumer: float
    cores: float
    engine: str = "local"
    items: int = 0
    crowded: bool = False  # other programs want the cores too, so that waiting for one looks like any waiting

    @property
    def slowest(self) -> int:
        """The segment that is waited for most, if it waits for no other itself; between equals the busier one."""
        busiest = sorted(range(len(self.loads)), key=lambda at: -self.loads[at].share)
        most = max(load.awaited for load in self.loads)
        first = next(at for at in busiest if self.loads[at].awaited >= most - NEAR)
        waits = self.loads[first].share < HIGH and self.loads[first].blocked < IDLE * self.loads[first].size
        return busiest[0] if waits else first

    @property
    def inline(self) -> float:
        """How busy the thread is that moves the blocks."""
        return sum(load.busy for load in self.loads if load.on == "inline")

    @property
    def cpu(self) -> float:
        """Cores in use."""
        return sum(load.cpu for load in self.loads)

    @property
    def locked(self) -> float:
        """Cores in use by those who share the interpreter lock."""
        return sum(load.cpu for load in self.loads if load.on not in ("processes", "actors"))


class Ceiling(NamedTuple):
    """How many times its rate a run could reach, and what holds it then: a segment's number, or one of the rest."""

    gain: float
    by: int | str


def ceiling(picture: Picture, workers: Mapping[int, float] | None = None) -> Ceiling:
    """The most a run can deliver, as a multiple of what it does.

    The consumer counts as if it used a core while it is busy: whether it does cannot be seen from here.

    Args:
        picture: Of the run.
        workers: Segments, by number, with the workers they would have instead of theirs.
    """
    limits = [
        Ceiling(_per(1, picture.consumer, inf), CONSUMER),
        Ceiling(_per(picture.cores, picture.cpu + picture.consumer, inf), CORES),
        Ceiling(_per(1, picture.inline, inf), MOVER),
    ]
    pools = [(at, load) for at, load in enumerate(picture.loads) if load.on != "inline"]
    limits += [Ceiling(_per((workers or {}).get(at, load.workers), load.busy, inf), at) for at, load in pools]
    least = min(limits, key=lambda limit: limit.gain)
    return least._replace(gain=max(1.0, least.gain))  # it does deliver what it does: less is noise


def snapshot(meters: Meters, cores: float | None = None, crowded: bool | None = None) -> Stats:
    """What the meters of a run say now; cheap, and safe while others write them.

    Args:
        meters: Of the run.
        cores: What the run may use; by default what this process may.
        crowded: Whether other programs keep the machine busy; by default as its load says.
    """
    cores = _cores() if cores is None else cores
    crowded = os.getloadavg()[0] > CROWD * (os.cpu_count() or 1) if crowded is None else crowded
    segments = [replace(meter, sizes=list(meter.sizes)) for meter in list(meters.segments)]
    running, seconds, items = meters.ended is None, meters.seconds, meters.items
    waited = meters.waiting() if running else meters.waited
    consumer = min(1.0, max(0.0, 1 - _per(waited, seconds, 1.0)))
    loads = tuple(_load(meter, seconds) for meter in segments)
    picture = Picture(loads, seconds, consumer, cores, meters.engine, items, crowded)
    stats = tuple(_segment(meter, seconds) for meter in segments)
    return Stats(meters.engine, seconds, items, _per(items, seconds), consumer, stats, bottleneck(picture), running)


def _segment(meter: Meter, seconds: float) -> SegmentStats:
    existed = _existed(meter, seconds)
    return SegmentStats(
        workers=_workers(meter),
        samples_per_s=_per(meter.items, seconds),
        mb_per_s=_per(meter.nbytes / 1e6, seconds),
        busy=_per(meter.busy, existed),
        starved=_per(meter.starved, existed),
        blocked=_per(meter.blocked, existed),
        cpu_share=_per(meter.cpu, meter.busy),
        queue_fill=meter.pending,
        sizes=tuple(meter.sizes),
        **{name: getattr(meter, name) for name in _AS_COUNTED},
    )


def _load(meter: Meter, seconds: float) -> Load:
    sums = (_existed(meter, seconds), meter.busy, meter.blocked, meter.cpu, meter.awaited)
    facts = (spoken(meter.name), meter.on, _workers(meter), meter.blocks, (meter.least, meter.most))
    return Load(*facts, *(_per(many, seconds) for many in sums))


def _existed(meter: Meter, seconds: float) -> float:
    """Worker-seconds there were; never less than what is accounted for."""
    sizes = meter.sizes or [(0.0, meter.workers)]
    ends = [*(at for at, _ in sizes[1:]), seconds]
    there = sum(workers * max(0.0, end - at) for (at, workers), end in zip(sizes, ends, strict=True))
    return max(there, meter.busy + meter.starved + meter.blocked)


def _workers(meter: Meter) -> int:
    return meter.workers or next((workers for _, workers in reversed(meter.sizes) if workers), 0)


def _per(many: float, of: float, none: float = 0.0) -> float:
    return many / of if of > 0 else none


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bottleneck(picture: Picture) -> str:
    """What holds a run up and what would help, in one sentence."""
    sayings = (_too_little, _consumer, _machine, _moving, _order, _lock, _more)
    return next(filter(None, (say(picture) for say in sayings)), None) or _unclear(picture)


def _too_little(picture: Picture) -> str | None:
    blocks = max((load.blocks for load in picture.loads), default=0)
    if not blocks and not picture.items:
        return "nothing has run yet"
    if picture.seconds < SECONDS or (picture.loads and blocks < BLOCKS):
        return "too little has run to tell what holds it up"
    return None


def _consumer(picture: Picture, sure: bool = False) -> str | None:
    """A consumer that is slower than everything before it, or of which one is ``sure``."""
    share = picture.consumer
    busiest = max((load.share for load in picture.loads), default=0.0)
    if not sure and (share <= 0.5 or share < min(FULL, busiest)):
        return None if picture.loads else _unclear(picture)
    most = f"{1 / share:.2f}".rstrip("0").rstrip(".")
    promise = "nothing" if most == "1" else f"at most {most}x"
    return f"the consumer takes {percent(share)} of the time: a faster pipeline would give {promise}"


def _machine(picture: Picture) -> str | None:
    if picture.cpu < FULL * picture.cores:
        return None
    first = max(picture.loads, key=lambda load: load.cpu)
    cores = "the one core is" if picture.cores == 1 else f"all {picture.cores:g} cores are"
    return f"{cores} in use, {first.cpu:.1f} by {first.name}: the machine is the limit, not a setting"


def _moving(picture: Picture, sure: bool = False) -> str | None:
    """Work in the one thread that moves blocks, if that is what holds the run up or one is ``sure`` of it."""
    slowest = picture.loads[picture.slowest]
    enough = WAITING if slowest.on == "inline" else max(HIGH, slowest.share)
    if not sure and picture.inline < enough:
        return None
    load = max((load for load in picture.loads if load.on == "inline"), key=lambda load: load.busy)
    takes = f"{load.name} takes {percent(min(1.0, load.busy))} of the time"
    if picture.engine == "serial":
        return takes + _serial(picture)
    if load.name != READING:
        return f"{takes}, in the one thread that moves blocks: what a map before it can do is done by workers"
    if load.waits:
        return f"{takes}, mostly waiting for storage: workers= at the source or a nearer copy would help"
    return f"{takes}, in one thread"


def _serial(picture: Picture) -> str:
    more = f', on("local") in {picture.cores:g} cores' if picture.cores > 1 else ""
    return f": the serial engine does all in one thread{more}" if picture.engine == "serial" else ""


def _order(picture: Picture) -> str | None:
    """Workers with nothing to do, while all wait for a block of theirs."""
    load, gain = picture.loads[picture.slowest], ceiling(picture).gain
    idle = _per(load.blocked, load.size)
    if load.share >= HIGH or idle < IDLE or load.awaited < IDLE or gain < WORTH:
        return None
    return (
        f"{load.name} is held up by single slow blocks, its workers are busy {percent(load.share)} and wait "
        f"{percent(idle)} for those to be taken: ordered=False would give up to {number(gain)}x"
    )


def _lock(picture: Picture) -> str | None:
    """Threads that use one core between them."""
    load = max(picture.loads, key=lambda load: load.cpu * (load.on == "threads"))
    held = LOCKED[0] <= picture.locked <= LOCKED[1] and load.busy >= 1.5 * load.cpu >= 0.6 * picture.locked
    if load.on != "threads" or load.share < 0.5 or not held or picture.crowded:
        return None
    gain = _apart(picture, load)
    cure = f', and on="processes" would give up to {number(gain)}x' if gain >= WORTH else ""
    says = "but the threads of this run use one core between them: it looks held by the interpreter lock"
    return f"{load.name} is busy {percent(load.share)}, {says}{cure}"


def _apart(picture: Picture, load: Load) -> float:
    """What a segment in processes of its own would give, where threads are only busy waiting for the lock."""
    moved = replace(load, on="processes", workers=max(1, round(picture.cores)), busy=load.cpu)
    rest = (each for each in picture.loads if each is not load)
    freed = [replace(each, busy=each.cpu) if each.on == "threads" else each for each in rest]
    apart = replace(picture, loads=(moved, *freed))
    return min(ceiling(apart).gain, _per(1, apart.locked, inf))


def _more(picture: Picture) -> str | None:
    """Too few workers, in one segment or in several that are equally busy."""
    slowest, enough = picture.loads[picture.slowest], WORTH * ceiling(picture).gain
    if slowest.share < HIGH:
        return None
    raised = [picture.slowest] if slowest.workers < enough * slowest.busy else []  # else another one is too slow too
    while (best := ceiling(picture, dict.fromkeys(raised, inf))).gain < enough:
        if not isinstance(best.by, int):
            return _say_no_room(picture, raised or [picture.slowest], best.by)
        raised.append(best.by)
    return _say_more(picture, raised, best.gain)


def _say_more(picture: Picture, raised: list[int], most: float) -> str:
    loads = [picture.loads[at] for at in raised]
    wanted = [_wanted(load, most) for load in loads]
    reached = ceiling(picture, dict(zip(raised, wanted, strict=True)))
    change = " and ".join(f"{load.workers} -> {workers}" for load, workers in zip(loads, wanted, strict=True))
    gain = number(reached.gain / ceiling(picture).gain)
    promise = f"would give about {gain}x{_then(picture, reached.by, raised)}{_unless(picture, loads)}"
    first = loads[0]
    if len(loads) > 1:
        return f"{_busy(loads)}: more workers for all of them, {change}, {promise}"
    if first.bounds[0] == first.bounds[1]:
        return f"{_busy(loads)}: workers {change} {promise}"
    if first.workers < first.bounds[1]:
        return f"{_busy(loads)} and may grow to {first.bounds[1]} workers: {change} {promise}"
    return f"{_busy(loads)} with the {first.bounds[1]} workers it may grow to: letting it grow to {wanted[0]} {promise}"


def _wanted(load: Load, gain: float) -> int:
    """Workers for so many times the rate; a pool with room to grow is asked for no more than that."""
    most = min(LEAP * load.workers, load.bounds[1] if load.workers < load.bounds[1] else inf)
    return max(load.workers + 1, round(min(load.busy * gain, most)))


def _say_no_room(picture: Picture, raised: list[int], by: str) -> str | None:
    if by == CONSUMER:
        return _consumer(picture, sure=True)
    if by == MOVER:
        return _moving(picture, sure=True)
    used = f"{picture.cpu:.1f} of {picture.cores:g} are in use, and the consumer needs its own"
    return f"{_busy([picture.loads[at] for at in raised])}, but more workers would find no free core: {used}"


def _busy(loads: list[Load]) -> str:
    first = f"{loads[0].name} is busy {percent(loads[0].share)}"
    if len(loads) == 1:
        return f"{first}, mostly waiting" if loads[0].waits else first
    return " and ".join([first, *(f"{load.name} {percent(load.share)}" for load in loads[1:])])


def _then(picture: Picture, by: int | str, raised: list[int]) -> str:
    last = f"{picture.loads[by].name} is" if isinstance(by, int) else _LAST[by]
    return "" if by in raised else f", then {last} the limit"


def _unless(picture: Picture, loads: list[Load]) -> str:
    """What cannot be seen: who takes the cores, and, with few threads, whether they let go of the interpreter lock."""
    if picture.crowded:
        return " (perhaps less: other programs keep the machine busy)"
    unseen = 0.5 <= picture.locked <= LOCKED[1] and any(load.on == "threads" for load in loads)
    return ' (if the interpreter lock lets it: pure Python needs on="processes")' if unseen else ""


def _unclear(picture: Picture) -> str:
    waits = f"the consumer waits {percent(1 - picture.consumer)} of the time"
    if not picture.loads:
        return waits + _serial(picture)
    busiest = max(picture.loads, key=lambda load: load.share)
    return f"{waits}, but no segment is busy throughout: {busiest.name} is the busiest, with {percent(busiest.share)}"


def spoken(name: str) -> str:
    """A segment's name in a sentence: ``decode('rgb8')`` for ``read -> decode('rgb8') -> select('jpg')``."""
    loud = [part for part in name.split(" -> ") if part.partition("(")[0] not in QUIET]
    if loud:
        return " -> ".join(loud)
    return READING if name.partition(" ")[0] == "read" else name


def percent(share: float) -> str:
    """A share, as people write it."""
    return f"{100 * share:.0f}%"


def number(value: float) -> str:
    """A rate or a factor, with as many digits as mean something."""
    return f"{value:,.0f}" if value >= 9.95 or not value else f"{value:.1f}"


HEADINGS = ("segment", "on", "workers", "samples/s", "MB/s", "busy", "starved", "blocked", "cpu", "queue", "faults")


def _cells(segment: SegmentStats) -> tuple[str, ...]:
    name = segment.name if len(segment.name) <= WIDTH else segment.name[: WIDTH - 3] + "..."
    shares = (segment.busy, segment.starved, segment.blocked, segment.cpu_share)
    rates = (number(segment.samples_per_s), number(segment.mb_per_s))
    faults = segment.faults or "none"
    return (name, segment.on, f"{segment.workers}", *rates, *map(percent, shares), f"{segment.queue_fill}", faults)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Words to the left, numbers to the right."""
    columns = []
    for heading, *cells in zip(*rows, strict=True):
        width = max(map(len, (heading, *cells)))
        side = "<" if heading in ("segment", "on", "faults") else ">"
        columns.append([f"{cell:{side}{width}}" for cell in (heading, *cells)])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
