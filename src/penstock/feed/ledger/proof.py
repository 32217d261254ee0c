"""Prove from the records of an epoch that every sample came exactly once, or list what is missing or repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from penstock.engines import DELIVERED, DROPPED, INDEX, ITEM, KIND, LEAF, OUTPUT, PADDED, PASSED, POSITION, SHARD
from penstock.errors import StorageError
from penstock.feed.ledger.history import NO_LIMIT, CountedSteps, History, TornFile
from penstock.order import ENDLESS, I64

_Bits = np.ndarray[Any, np.dtype[np.bool_]]
_MAX_LISTED = 10  # samples of each list that the text of a proof names


@dataclass(frozen=True, slots=True)
class Sample:
    """Identifies a sample in a step.

    Attributes:
        source: The number of its source in the plan.
        shard: The name of its shard.
        index: Its index in the shard.
        output: The number of the output, among all outputs of the sample.
        padding: It was repeated so that ranks are equal.
    """

    source: int
    shard: str
    index: int
    output: int = 0
    padding: bool = False

    def __str__(self) -> str:
        source = f"source {self.source}: " if self.source else ""
        output = f" output {self.output}" if self.output else ""
        return f"{source}{self.shard}[{self.index}]{output}{' (padding)' if self.padding else ''}"


@dataclass(frozen=True, slots=True)
class ShardNames:
    """The names and counts of the shards of each source; tables refer to them by number."""

    shards: list[list[str]]
    counts: list[list[int]]

    def samples(self, rows: I64) -> list[Sample]:
        """Return the samples of a table.

        Raises:
            StorageError: The table refers to a shard that is not in the list.
        """
        columns = rows[[LEAF, SHARD, INDEX, OUTPUT, KIND]].T.tolist()
        try:
            return [Sample(a, self.shards[a][s], i, o, kind == PADDED) for a, s, i, o, kind in columns]
        except IndexError:
            raise StorageError("the ledger's list of shards is too short: it is damaged") from None


@dataclass(frozen=True, slots=True)
class MissingSample:
    """A sample that no rank received, or its position in the order of the epoch if its name is not known."""

    epoch: int
    sample: Sample | None
    position: int | None = None

    def __str__(self) -> str:
        return f"epoch {self.epoch}: {f'position {self.position}' if self.sample is None else self.sample}"


@dataclass(frozen=True, slots=True)
class RankStep:
    """A step of one rank."""

    step: int
    rank: int
    world: int

    def __str__(self) -> str:
        return f"step {self.step} of rank {self.rank} of {self.world}"


@dataclass(frozen=True, slots=True)
class RepeatedSample:
    """A sample that was delivered more than once, and the steps that delivered it."""

    epoch: int
    sample: Sample
    seen: list[RankStep]

    def __str__(self) -> str:
        return f"epoch {self.epoch}: {self.sample} in {', '.join(map(str, self.seen))}"


@dataclass(frozen=True, slots=True)
class EpochProof:
    """What the records of one epoch add up to.

    Attributes:
        dataset: Identifies the dataset and its seed.
        epoch: The number of the epoch.
        world: The number of ranks, in the last session.
        sessions: The number of sessions.
        delivered: Samples that were delivered.
        passed: Samples that were read and gave no output: filtered, skipped, or in a short last batch.
        padded: Samples that were repeated so that ranks are equal.
        dropped: Samples that were left out so that ranks are equal.
        again: Deliveries that do not count, because the run resumed from a state before them.
        before: Samples that were delivered before the ledger began.
        left_out: Samples that were not requested, because of a limit.
        to_come: Samples still to be delivered.
        missing: Samples that no rank received.
        repeated: Samples that were delivered more than once.
        finished: Whether every rank reached the end of the epoch.
    """

    dataset: str
    epoch: int
    world: int
    sessions: int
    delivered: int
    passed: int
    padded: int
    dropped: int
    again: int
    before: int
    left_out: int
    to_come: int
    missing: int
    repeated: int
    finished: bool

    def __str__(self) -> str:
        names = ["delivered", "passed", "padded", "dropped", "before", "left_out", "to_come", "missing", "repeated"]
        counts = [f"{getattr(self, name)} {name.replace('_', ' ')}" for name in names if getattr(self, name)]
        again = [f"{self.again} done again"] if self.again else []
        end = "" if self.finished else " (not finished)"
        return f"epoch {self.epoch}: {', '.join(counts + again) or 'nothing'}{end}"


@dataclass(frozen=True, slots=True)
class Proof:
    """What a ledger proves, or what is wrong; lists have an upper length, counts include every sample.

    Attributes:
        epochs: The counts of each epoch.
        missing: Samples that no rank received.
        repeated: Samples that were delivered more than once.
        lost: Steps that should be in the ledger and are not, each with its epoch.
        dropped: Samples that were left out so that ranks are equal, each with its epoch.
        torn: Files whose last record was cut off.
    """

    epochs: list[EpochProof]
    missing: list[MissingSample]
    repeated: list[RepeatedSample]
    lost: list[tuple[int, RankStep]]
    dropped: list[tuple[int, Sample]]
    torn: list[TornFile] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether so far no sample is missing or repeated, and no step is lost."""
        return not (self.lost or any(epoch.missing or epoch.repeated for epoch in self.epochs))

    @property
    def finished(self) -> bool:
        """Whether every epoch that was begun has ended on every rank."""
        return all(epoch.finished for epoch in self.epochs)

    @property
    def delivered(self) -> int:
        """The number of samples that were delivered, in all epochs."""
        return sum(epoch.delivered for epoch in self.epochs)

    def to_json(self) -> dict[str, Any]:
        """Return the proof as plain lists, dicts and numbers that ``json`` can write."""
        return {"ok": self.ok, "finished": self.finished, **asdict(self)}

    def __str__(self) -> str:
        lines = [str(epoch) for epoch in self.epochs]
        lines += _listing("missing", self.missing, sum(epoch.missing for epoch in self.epochs))
        lines += _listing("repeated", self.repeated, sum(epoch.repeated for epoch in self.epochs))
        lines += _listing("not in the ledger", [f"epoch {epoch}: {step}" for epoch, step in self.lost], len(self.lost))
        dropped = [f"epoch {epoch}: {sample}" for epoch, sample in self.dropped]
        lines += _listing("dropped", dropped, sum(epoch.dropped for epoch in self.epochs))
        lines += [f"{torn.file}: its last {torn.nbytes} bytes are not a whole record" for torn in self.torn]
        last = "every sample came exactly once" if self.finished else "every sample so far came exactly once"
        return "\n".join([*lines, last if self.ok else "NOT every sample came exactly once"])


def _listing(label: str, entries: Sequence[Any], count: int) -> list[str]:
    lines = [f"{label}: {entry}" for entry in entries[:_MAX_LISTED]]
    return [*lines, f"{label}: {count - len(lines)} more"] if count > len(lines) else lines


class _PositionSet:
    """A set of positions as an array of booleans; it grows if their number is not known."""

    def __init__(self, size: int) -> None:
        self.bits: _Bits = np.zeros(size if size < ENDLESS else 0, bool)

    def add(self, positions: I64) -> None:
        if len(positions) and (top := int(positions.max())) >= len(self.bits):
            self.bits = np.concatenate([self.bits, np.zeros(max(top + 1 - len(self.bits), len(self.bits)), bool)])
        self.bits[positions] = True


class EpochTotals:
    """Adds up the tables of an epoch.

    Attributes:
        delivered: Outputs that were delivered.
        padded: Outputs that were repeated as padding.
        delivered_first: The positions of which output 0 was delivered.
        delivered_any: The positions of which any output was delivered.
        passed: The positions that gave no output.
        dropped: The positions that were left out.
        first_outputs: How often an output 0 was delivered.
        later_outputs: The (position, output) pairs of all other outputs that were delivered.
    """

    def __init__(self, size: int) -> None:
        self.delivered = self.padded = 0
        self.delivered_first, self.delivered_any = _PositionSet(size), _PositionSet(size)
        self.passed, self.dropped = _PositionSet(size), _PositionSet(size)
        self.first_outputs = 0
        self.later_outputs: list[I64] = []

    def add(self, rows: I64) -> None:
        """Add a table."""
        kind = rows[KIND]
        if kind.any():
            self.padded += int(np.count_nonzero(kind == PADDED))
            self.passed.add(rows[POSITION][kind == PASSED])
            self.dropped.add(rows[POSITION][kind == DROPPED])
            rows = rows[:, kind == DELIVERED]
        positions, is_later = rows[POSITION], rows[OUTPUT] > 0
        self.delivered += len(positions)
        self.delivered_any.add(positions)
        if is_later.any():
            self.later_outputs.append(rows[[POSITION, OUTPUT]][:, is_later])
            positions = positions[~is_later]
        self.delivered_first.add(positions)
        self.first_outputs += len(positions)

    def repeated_later_outputs(self) -> I64 | None:
        """Return the (position, output) pairs, with outputs above 0, that were delivered more than once."""
        if not self.later_outputs:
            return None
        pairs = np.concatenate(self.later_outputs, axis=1)
        pairs = pairs[:, np.lexsort(pairs[::-1])]
        same = (pairs[:, 1:] == pairs[:, :-1]).all(axis=0)
        return np.unique(pairs[:, 1:][:, same], axis=1) if same.any() else None


def _counted_tables(history: History) -> Iterator[I64]:
    for steps in history.counted:
        for _, rows in steps.tables():
            yield rows


class EpochCheck:
    """Checks one epoch.

    Args:
        history: The history of the epoch.
        names: The names of the shards.
        has_later_epoch: Whether a later epoch of the dataset was begun.
        most: How many samples each list names.
        find: Returns a table of the samples at some positions of an epoch.
    """

    def __init__(
        self,
        history: History,
        names: ShardNames,
        has_later_epoch: bool,
        most: int,
        find: Callable[[int, I64], I64] | None = None,
    ) -> None:
        self.history, self.names, self.most, self.find = history, names, most, find
        self.has_later_epoch = has_later_epoch
        self.latest = max(history.heads.values(), key=lambda session: session.sort_key)
        self.dataset, self.epoch = self.latest.epoch
        self.size = int(self.latest.fields["size"])
        self.totals = EpochTotals(self.size)
        for rows in _counted_tables(history):
            self.totals.add(rows)

    def run(
        self,
    ) -> tuple[
        EpochProof, list[MissingSample], list[RepeatedSample], list[tuple[int, RankStep]], list[tuple[int, Sample]]
    ]:
        """Return the counts, and what is missing, repeated, lost and dropped, by name."""
        history, totals, unseen = self.history, self.totals, self._unseen()
        before = self._delivered_before(unseen)
        unseen = np.setdiff1d(unseen, before, assume_unique=True)
        may_end_early = any(steps.session.fields["loose"] for steps in history.counted)
        over = history.ended or self.has_later_epoch
        finished = len(history.heads) == history.world and history.ended
        missing = unseen if over and not may_end_early else unseen[:0]
        repeated = self._repeated()
        dropped = totals.dropped.bits & ~_resized(totals.delivered_any.bits, len(totals.dropped.bits))
        delivered = _resized(totals.delivered_any.bits, len(totals.passed.bits))
        epoch = EpochProof(
            dataset=self.dataset,
            epoch=self.epoch,
            world=history.world,
            sessions=len(history.counted) + len(history.void),
            delivered=totals.delivered,
            passed=int(np.count_nonzero(totals.passed.bits & ~delivered)),
            padded=totals.padded,
            dropped=int(np.count_nonzero(dropped)),
            again=self._void_deliveries(),
            before=len(before),
            left_out=len(unseen) if over and may_end_early else 0,
            to_come=0 if over else self._to_come(len(unseen)),
            missing=len(missing),
            repeated=len(repeated),
            finished=finished or (not len(unseen) and not may_end_early and self.size < ENDLESS),
        )
        lost, named_dropped = self._lost_steps(), self._named_dropped(dropped)
        return epoch, self._named_missing(missing), self._named_repeated(repeated), lost, named_dropped

    def _unseen(self) -> I64:
        """Return the positions that are in no record."""
        sets = (self.totals.delivered_any, self.totals.passed, self.totals.dropped)
        seen = np.zeros(max(len(positions.bits) for positions in sets), bool)
        for positions in sets:
            seen[: len(positions.bits)] |= positions.bits
        return np.flatnonzero(~seen)

    def _delivered_before(self, unseen: I64) -> I64:
        """Return the unseen positions that were delivered before the ledger began."""
        first = self.history.with_unknown_parents()
        if not first or not len(unseen):
            return unseen[:0]
        left = np.zeros(int(unseen.max()) + 1, bool)
        for session in first:
            for start, stop, step, _ in session.fields["left"]:
                left[start:stop:step] = True
        return unseen[~left[unseen]]

    def _to_come(self, unseen: int) -> int:
        return ENDLESS if self.size >= ENDLESS else unseen

    def _void_deliveries(self) -> int:
        """Return how many samples were delivered in steps that do not count."""
        void = [CountedSteps(session, 0) for session in self.history.void]
        cut = [steps for steps in self.history.counted if steps.session.end_step != steps.until < NO_LIMIT]
        tables = (rows for steps in [*void, *cut] for rows in steps.void_tables())
        return sum(int(np.count_nonzero(rows[KIND] == DELIVERED)) for rows in tables)

    def _repeated(self) -> list[tuple[int, int]]:
        """Return the (position, output) pairs that were delivered more than once."""
        found: list[tuple[int, int]] = []
        if self.totals.first_outputs != int(np.count_nonzero(self.totals.delivered_first.bits)):
            deliveries = np.zeros(len(self.totals.delivered_first.bits), np.uint16)
            for rows in _counted_tables(self.history):
                np.add.at(deliveries, rows[POSITION][(rows[KIND] == DELIVERED) & (rows[OUTPUT] == 0)], 1)
            found += [(position, 0) for position in np.flatnonzero(deliveries > 1).tolist()]
        if (later := self.totals.repeated_later_outputs()) is not None:
            found += [(position, output) for position, output in later.T.tolist()]
        return found

    def _named_repeated(self, repeated: list[tuple[int, int]]) -> list[RepeatedSample]:
        wanted = dict.fromkeys(repeated[: self.most])
        seen: dict[tuple[int, int], list[RankStep]] = {key: [] for key in wanted}
        samples: dict[tuple[int, int], Sample] = {}
        positions = np.array([position for position, _ in wanted], np.int64)
        for steps in self.history.counted if wanted else ():
            fields = steps.session.fields
            for record, rows in steps.tables():
                rows = rows[:, (rows[KIND] == DELIVERED) & np.isin(rows[POSITION], positions)]
                for row, sample in zip(rows.T.tolist(), self.names.samples(rows), strict=True):
                    key = row[POSITION], row[OUTPUT]
                    if key in wanted:
                        samples[key] = sample
                        seen[key].append(RankStep(record.first + row[ITEM], fields["rank"], fields["world"]))
        return [RepeatedSample(self.epoch, samples[key], seen[key]) for key in wanted]

    def _lost_steps(self) -> list[tuple[int, RankStep]]:
        lost = []
        for steps in self.history.counted:
            fields = steps.session.fields
            lost += [(self.epoch, RankStep(step, fields["rank"], fields["world"])) for step in steps.lost_steps()]
        return lost

    def _named_dropped(self, dropped: _Bits) -> list[tuple[int, Sample]]:
        named: dict[int, Sample] = {}
        for rows in _counted_tables(self.history) if dropped.any() else ():
            rows = rows[:, rows[KIND] == DROPPED]
            for position, sample in zip(rows[POSITION].tolist(), self.names.samples(rows), strict=True):
                if dropped[position] and len(named) < self.most:
                    named[position] = sample
        return [(self.epoch, named[position]) for position in sorted(named)]

    def _named_missing(self, positions: I64) -> list[MissingSample]:
        if not len(positions):
            return []
        if self.find is not None:
            found = self.find(self.epoch, positions[: self.most])
            samples = zip(self.names.samples(found), positions.tolist(), strict=False)
            return [MissingSample(self.epoch, sample, position) for sample, position in samples]
        times = self.latest.fields["times"]
        if times is None or self.history.with_unknown_parents():
            return [MissingSample(self.epoch, None, position) for position in positions[: self.most].tolist()]
        return [MissingSample(self.epoch, sample) for sample in self._undelivered_samples(times)][: self.most]

    def _undelivered_samples(self, times: list[int]) -> list[Sample]:
        """Return the samples that were delivered fewer times than ``times``, which is given by source."""
        sizes = [np.array(counts, np.int64) for counts in self.names.counts]
        due = [np.full(int(counts.sum()), each, np.int64) for counts, each in zip(sizes, times, strict=True)]
        starts = [np.cumsum(counts) - counts for counts in sizes]
        counted = np.zeros(max(self.size, len(self.totals.delivered_any.bits)), bool)
        for rows in _counted_tables(self.history):
            rows = rows[:, (rows[KIND] != PADDED) & ~counted[rows[POSITION]]]
            _, first = np.unique(rows[POSITION], return_index=True)
            rows = rows[:, first]
            counted[rows[POSITION]] = True
            for leaf in np.unique(rows[LEAF]).tolist():
                own = rows[:, rows[LEAF] == leaf]
                np.subtract.at(due[leaf], starts[leaf][own[SHARD]] + own[INDEX], 1)
        return list(self._named_due(due, starts))

    def _named_due(self, due: list[I64], starts: list[I64]) -> Iterator[Sample]:
        for leaf, times in enumerate(due):
            for number in np.flatnonzero(times > 0)[: self.most].tolist():
                shard = int(np.searchsorted(starts[leaf], number, "right")) - 1
                yield Sample(leaf, self.names.shards[leaf][shard], number - int(starts[leaf][shard]))


def _resized(bits: _Bits, length: int) -> _Bits:
    """Return the first ``length`` bits, filled up with False."""
    return np.concatenate([bits, np.zeros(max(0, length - len(bits)), bool)])[:length]
