"""Whether every sample came exactly once: what the records of an epoch add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from penstock.engines import DELIVERED, DROPPED, INDEX, ITEM, KIND, LEAF, OUTPUT, PADDED, PASSED, POSITION, SHARD
from penstock.feed.ledger.history import EVER, History, Stretch, Torn
from penstock.order import ENDLESS, I64


@dataclass(frozen=True, slots=True)
class Sample:
    """Which sample: source (counted over the plan), shard, index in the shard; the number of one of its outputs."""

    source: int
    shard: str
    index: int
    output: int = 0
    padding: bool = False  # there to fill up

    def __str__(self) -> str:
        source = f"source {self.source}: " if self.source else ""
        output = f" output {self.output}" if self.output else ""
        return f"{source}{self.shard}[{self.index}]{output}{' (padding)' if self.padding else ''}"


@dataclass(frozen=True, slots=True)
class Names:
    """What the numbers in a table stand for."""

    shards: list[list[str]]  # by source
    counts: list[list[int]]

    def samples(self, rows: I64) -> list[Sample]:
        """The samples of a table."""
        columns = rows[[LEAF, SHARD, INDEX, OUTPUT, KIND]].T.tolist()
        return [Sample(a, self.shards[a][s], i, o, kind == PADDED) for a, s, i, o, kind in columns]


@dataclass(frozen=True, slots=True)
class Missing:
    """A sample that no rank got; where its name is not known, its position in the epoch's order."""

    epoch: int
    sample: Sample | None
    position: int | None = None

    def __str__(self) -> str:
        return f"epoch {self.epoch}: {f'position {self.position}' if self.sample is None else self.sample}"


@dataclass(frozen=True, slots=True)
class Seen:
    """Where a sample came."""

    step: int
    rank: int
    world: int

    def __str__(self) -> str:
        return f"step {self.step} of rank {self.rank} of {self.world}"


@dataclass(frozen=True, slots=True)
class Repeated:
    """A sample that came more than once."""

    epoch: int
    sample: Sample
    seen: list[Seen]

    def __str__(self) -> str:
        return f"epoch {self.epoch}: {self.sample} in {', '.join(map(str, self.seen))}"


@dataclass(frozen=True, slots=True)
class Epoch:
    """What the records of one epoch add up to; numbers are of samples."""

    dataset: str
    epoch: int
    world: int  # ranks at last
    sessions: int
    delivered: int
    passed: int  # looked at, and gave nothing: filtered, skipped, in a last batch that was not whole
    padded: int
    dropped: int
    again: int  # delivered after a state that was gone back to, and void
    before: int  # came before the ledger began, as far as it knows
    left_out: int  # not asked for: behind a limit
    to_come: int
    missing: int
    repeated: int
    finished: bool

    def __str__(self) -> str:
        said = ["delivered", "passed", "padded", "dropped", "before", "left_out", "to_come", "missing", "repeated"]
        counts = [f"{getattr(self, name)} {name.replace('_', ' ')}" for name in said if getattr(self, name)]
        again = [f"{self.again} done again"] if self.again else []
        end = "" if self.finished else " (not finished)"
        return f"epoch {self.epoch}: {', '.join(counts + again) or 'nothing'}{end}"


@dataclass(frozen=True, slots=True)
class Proof:
    """What a ledger proves, or what is wrong. Lists name the first of many; the counts are those of all."""

    epochs: list[Epoch]
    missing: list[Missing]
    repeated: list[Repeated]
    lost: list[tuple[int, Seen]]  # (epoch, a step that should be in the ledger and is not)
    dropped: list[tuple[int, Sample]]
    torn: list[Torn] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is missing and nothing came twice, so far."""
        return not (self.lost or any(epoch.missing or epoch.repeated for epoch in self.epochs))

    @property
    def finished(self) -> bool:
        """Whether every epoch that was begun is at its end on every rank."""
        return all(epoch.finished for epoch in self.epochs)

    @property
    def delivered(self) -> int:
        """Samples delivered in all epochs."""
        return sum(epoch.delivered for epoch in self.epochs)

    def to_json(self) -> dict[str, Any]:
        """The same as plain lists, dicts and numbers."""
        return {"ok": self.ok, "finished": self.finished, **asdict(self)}

    def __str__(self) -> str:
        lines = [str(epoch) for epoch in self.epochs]
        lines += _some("missing", self.missing, sum(epoch.missing for epoch in self.epochs))
        lines += _some("repeated", self.repeated, sum(epoch.repeated for epoch in self.epochs))
        lines += _some("not in the ledger", [f"epoch {epoch}: {seen}" for epoch, seen in self.lost], len(self.lost))
        dropped = [f"epoch {epoch}: {sample}" for epoch, sample in self.dropped]
        lines += _some("dropped", dropped, sum(epoch.dropped for epoch in self.epochs))
        lines += [f"{torn.file}: its last {torn.nbytes} bytes are not a whole record" for torn in self.torn]
        last = "every sample came exactly once" if self.finished else "every sample so far came exactly once"
        return "\n".join([*lines, last if self.ok else "NOT every sample came exactly once"])


def _some(word: str, things: Sequence[Any], many: int) -> list[str]:
    lines = [f"{word}: {thing}" for thing in things[:10]]
    return [*lines, f"{word}: {many - len(lines)} more"] if many > len(lines) else lines


class _Marks:
    """Yes or no for each position; it grows where nobody knows how many there are."""

    def __init__(self, size: int) -> None:
        self.bits = np.zeros(size if size < ENDLESS else 0, bool)

    def set(self, positions: I64) -> None:
        if len(positions) and (top := int(positions.max())) >= len(self.bits):
            self.bits = np.concatenate([self.bits, np.zeros(max(top + 1 - len(self.bits), len(self.bits)), bool)])
        self.bits[positions] = True


class Sums:
    """What the tables of an epoch add up to."""

    def __init__(self, size: int) -> None:
        self.delivered = self.padded = 0
        self.first, self.seen, self.passed, self.dropped = (_Marks(size) for _ in range(4))
        self.firsts = 0  # samples delivered, each by its first output
        self.outputs: list[I64] = []  # (position, output) of the others

    def add(self, rows: I64) -> None:
        """Add a table."""
        kind = rows[KIND]
        if kind.any():
            self.padded += int(np.count_nonzero(kind == PADDED))
            self.passed.set(rows[POSITION][kind == PASSED])
            self.dropped.set(rows[POSITION][kind == DROPPED])
            rows = rows[:, kind == DELIVERED]
        positions, more = rows[POSITION], rows[OUTPUT] > 0
        self.delivered += len(positions)
        self.seen.set(positions)
        if more.any():
            self.outputs.append(rows[[POSITION, OUTPUT]][:, more])
            positions = positions[~more]
        self.first.set(positions)
        self.firsts += len(positions)

    def twice(self) -> I64 | None:
        """The (position, output) that came more than once, of those behind a first output."""
        if not self.outputs:
            return None
        pairs = np.concatenate(self.outputs, axis=1)
        pairs = pairs[:, np.lexsort(pairs[::-1])]
        same = (pairs[:, 1:] == pairs[:, :-1]).all(axis=0)
        return np.unique(pairs[:, 1:][:, same], axis=1) if same.any() else None


def tables(history: History) -> Iterator[I64]:
    """The tables that count."""
    for stretch in history.stretches:
        for _, rows in stretch.tables():
            yield rows


class Examination:
    """One epoch, looked at.

    Args:
        history: What counts of it.
        names: Of its samples.
        later: Whether the dataset went on to a later epoch.
        most: How many samples of a kind to name.
        find: Gives a table that names the samples at positions of an epoch.
    """

    def __init__(
        self, history: History, names: Names, later: bool, most: int, find: Callable[[int, I64], I64] | None = None
    ) -> None:
        self.history, self.names, self.later, self.most, self.find = history, names, later, most, find
        self.latest = max(history.heads.values(), key=lambda session: session.age)
        self.dataset, self.epoch = self.latest.epoch
        self.size = int(self.latest.facts["size"])
        self.sums = Sums(self.size)
        for rows in tables(history):
            self.sums.add(rows)

    def unseen(self) -> I64:
        """The positions that no record speaks of."""
        sums = self.sums
        many = max(len(marks.bits) for marks in (sums.seen, sums.passed, sums.dropped))
        spoken = np.zeros(many, bool)
        for marks in (sums.seen, sums.passed, sums.dropped):
            spoken[: len(marks.bits)] |= marks.bits
        return np.flatnonzero(~spoken)

    def before(self, unseen: I64) -> I64:
        """Those of them that had come before the ledger knows of anything."""
        unknown = self.history.unknown()
        if not unknown or not len(unseen):
            return unseen[:0]
        left = np.zeros(int(unseen.max()) + 1, bool)
        for session in unknown:
            for start, stop, step, _ in session.facts["left"]:
                left[start:stop:step] = True
        return unseen[~left[unseen]]

    def run(self) -> tuple[Epoch, list[Missing], list[Repeated], list[tuple[int, Seen]], list[tuple[int, Sample]]]:
        """The sums, and what is missing, repeated, lost and dropped, by name."""
        history, sums, unseen = self.history, self.sums, self.unseen()
        before = self.before(unseen)
        unseen = np.setdiff1d(unseen, before, assume_unique=True)
        loose = any(stretch.session.facts["loose"] for stretch in history.stretches)
        over = history.ended or self.later
        finished = len(history.heads) == history.world and history.ended
        absent = unseen if over and not loose else unseen[:0]
        again = self._repeats()
        dropped = sums.dropped.bits & ~_wide(sums.seen.bits, len(sums.dropped.bits))
        gave = _wide(sums.seen.bits, len(sums.passed.bits))
        report = Epoch(
            dataset=self.dataset,
            epoch=self.epoch,
            world=history.world,
            sessions=len(history.stretches) + len(history.void),
            delivered=sums.delivered,
            passed=int(np.count_nonzero(sums.passed.bits & ~gave)),
            padded=sums.padded,
            dropped=int(np.count_nonzero(dropped)),
            again=self._void(),
            before=len(before),
            left_out=len(unseen) if over and loose else 0,
            to_come=0 if over else self._to_come(len(unseen)),
            missing=len(absent),
            repeated=len(again),
            finished=finished or (not len(unseen) and not loose and self.size < ENDLESS),
        )
        return report, self._missing(absent), self._named_repeats(again), self._lost(), self._dropped(dropped)

    def _to_come(self, unseen: int) -> int:
        return ENDLESS if self.size >= ENDLESS else unseen

    def _void(self) -> int:
        """Samples that were delivered and do not count."""
        void = [Stretch(session, 0) for session in self.history.void]
        cut = [stretch for stretch in self.history.stretches if stretch.session.ended != stretch.until < EVER]
        beyond = (rows for stretch in [*void, *cut] for rows in stretch.beyond())
        return sum(int(np.count_nonzero(rows[KIND] == DELIVERED)) for rows in beyond)

    def _repeats(self) -> list[tuple[int, int]]:
        """The (position, output) that came more than once."""
        found: list[tuple[int, int]] = []
        if self.sums.firsts != int(np.count_nonzero(self.sums.first.bits)):
            many = np.zeros(len(self.sums.first.bits), np.uint16)
            for rows in tables(self.history):
                np.add.at(many, rows[POSITION][(rows[KIND] == DELIVERED) & (rows[OUTPUT] == 0)], 1)
            found += [(position, 0) for position in np.flatnonzero(many > 1).tolist()]
        if (twice := self.sums.twice()) is not None:
            found += [(position, output) for position, output in twice.T.tolist()]
        return found

    def _named_repeats(self, repeats: list[tuple[int, int]]) -> list[Repeated]:
        wanted = dict.fromkeys(repeats[: self.most])
        seen: dict[tuple[int, int], list[Seen]] = {key: [] for key in wanted}
        who: dict[tuple[int, int], Sample] = {}
        places = np.array([position for position, _ in wanted], np.int64)
        for stretch in self.history.stretches if wanted else ():
            facts = stretch.session.facts
            for record, rows in stretch.tables():
                rows = rows[:, (rows[KIND] == DELIVERED) & np.isin(rows[POSITION], places)]
                for row, sample in zip(rows.T.tolist(), self.names.samples(rows), strict=True):
                    key = row[POSITION], row[OUTPUT]
                    if key in wanted:
                        who[key] = sample
                        seen[key].append(Seen(record.first + row[ITEM], facts["rank"], facts["world"]))
        return [Repeated(self.epoch, who[key], seen[key]) for key in wanted]

    def _lost(self) -> list[tuple[int, Seen]]:
        lost = []
        for stretch in self.history.stretches:
            facts = stretch.session.facts
            lost += [(self.epoch, Seen(step, facts["rank"], facts["world"])) for step in stretch.gaps()]
        return lost

    def _dropped(self, dropped: np.ndarray[Any, np.dtype[np.bool_]]) -> list[tuple[int, Sample]]:
        named: dict[int, Sample] = {}
        for rows in tables(self.history) if dropped.any() else ():
            rows = rows[:, rows[KIND] == DROPPED]
            for position, sample in zip(rows[POSITION].tolist(), self.names.samples(rows), strict=True):
                if dropped[position] and len(named) < self.most:
                    named[position] = sample
        return [(self.epoch, named[position]) for position in sorted(named)]

    def _missing(self, positions: I64) -> list[Missing]:
        if not len(positions):
            return []
        if self.find is not None:
            found = self.find(self.epoch, positions[: self.most])
            samples = zip(self.names.samples(found), positions.tolist(), strict=False)
            return [Missing(self.epoch, sample, position) for sample, position in samples]
        times = self.latest.facts["times"]
        if times is None or self.history.unknown():
            return [Missing(self.epoch, None, position) for position in positions[: self.most].tolist()]
        return [Missing(self.epoch, sample) for sample in self._complement(times)][: self.most]

    def _complement(self, times: list[int]) -> list[Sample]:
        """The samples that came less often than they should have."""
        sizes = [np.array(counts, np.int64) for counts in self.names.counts]
        due = [np.full(int(counts.sum()), many, np.int64) for counts, many in zip(sizes, times, strict=True)]
        starts = [np.cumsum(counts) - counts for counts in sizes]
        taken = np.zeros(max(self.size, len(self.sums.seen.bits)), bool)
        for rows in tables(self.history):
            rows = rows[:, (rows[KIND] != PADDED) & ~taken[rows[POSITION]]]
            _, at = np.unique(rows[POSITION], return_index=True)
            rows = rows[:, at]
            taken[rows[POSITION]] = True
            for leaf in np.unique(rows[LEAF]).tolist():
                own = rows[:, rows[LEAF] == leaf]
                np.subtract.at(due[leaf], starts[leaf][own[SHARD]] + own[INDEX], 1)
        return list(self._at(due, starts))

    def _at(self, due: list[I64], starts: list[I64]) -> Iterator[Sample]:
        for leaf, many in enumerate(due):
            for number in np.flatnonzero(many > 0)[: self.most].tolist():
                shard = int(np.searchsorted(starts[leaf], number, "right")) - 1
                yield Sample(leaf, self.names.shards[leaf][shard], number - int(starts[leaf][shard]))


def _wide(bits: np.ndarray[Any, np.dtype[np.bool_]], many: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The same, as long as another."""
    return np.concatenate([bits, np.zeros(max(0, many - len(bits)), bool)])[:many]
