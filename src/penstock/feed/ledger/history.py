"""The sessions of a ledger, and which of their steps count.

A session is one rank's run of an epoch, or of the rest of one. It names its parents, from which it resumed: none, an
earlier session of the same rank, or the sessions of all ranks of another world. If a session resumed from an earlier
step of its parent, the later steps of the parent were repeated and do not count.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engines import ITEM, KIND, PASSED
from penstock.errors import StorageError
from penstock.feed.ledger.records import BEGIN, END, STEPS, StepsRecord, decode_fields, decode_steps, iter_contents
from penstock.feed.ledger.writer import LEDGER_SUFFIX
from penstock.order import I64

# The fields of the first and the last record of a session.
_BEGIN_FIELDS = {
    **dict.fromkeys(("session", "dataset", "cut", "how"), str),
    **dict.fromkeys(("epoch", "rank", "world", "step", "size", "clock"), int),
    **{"parents": list, "left": list, "times": list | None, "loose": bool},
}
_END_FIELDS = {"step": int, "held": bool}
NO_LIMIT = 1 << 62  # greater than the number of any step


@dataclass(slots=True, eq=False)
class Session:
    """One rank's run of an epoch, or of the rest of one.

    Attributes:
        fields: The fields of its first record, see ``LedgerWriter.begin``.
        data: The file.
        offsets: Where the contents of its records of steps begin in the file.
        lengths: The lengths of these contents.
        end_step: The step after its last one; None if it did not reach the end of the epoch.
        retracted: A step that was recorded after ``end_step`` was not delivered.
    """

    fields: dict[str, Any]
    data: memoryview
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("I"))
    end_step: int | None = None
    retracted: bool = False

    @property
    def name(self) -> str:
        """The name by which states and later sessions refer to it."""
        return str(self.fields["session"])

    @property
    def rank(self) -> int:
        """The rank whose steps it records."""
        return int(self.fields["rank"])

    @property
    def epoch(self) -> tuple[str, int]:
        """The dataset and the epoch."""
        return str(self.fields["dataset"]), int(self.fields["epoch"])

    @property
    def sort_key(self) -> tuple[int, str]:
        """A key that sorts sessions by the time at which they began."""
        return int(self.fields["clock"]), self.name

    def parents(self) -> list[tuple[str, int] | None]:
        """Return the names of the sessions from which it resumed, each with the next step at that time."""
        return [None if parent is None else (str(parent[0]), int(parent[1])) for parent in self.fields["parents"]]

    def records(self) -> Iterator[StepsRecord]:
        """Yield its records of steps in the order in which they were written."""
        for offset, length in zip(self.offsets, self.lengths, strict=True):
            yield decode_steps(self.data[offset : offset + length])


@dataclass(frozen=True, slots=True)
class TornFile:
    """A file that cannot be read to its end: its last record was cut off by a crash, or is damaged.

    Attributes:
        file: The name of the file.
        nbytes: The number of bytes at its end that are ignored.
    """

    file: str
    nbytes: int


def load_sessions(folder: Path) -> tuple[list[Session], list[TornFile]]:
    """Read the sessions of all files in a folder.

    Raises:
        StorageError: There is no ledger, or a file cannot be read.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(LEDGER_SUFFIX))
        if not names:
            raise StorageError("there is no ledger in this folder", str(folder))
        sessions: list[Session] = []
        torn: list[TornFile] = []
        for name in names:
            data = _map_file(folder / name)
            try:
                end = _read_sessions(data, sessions)
            except ValueError as exc:
                problem = f"the ledger file is damaged, or of another version: {exc}"
                raise StorageError(problem, str(folder / name)) from exc
            torn += [TornFile(name, len(data) - end)] if end < len(data) else []
    except StorageError:
        raise
    except OSError as exc:
        raise StorageError(f"the ledger cannot be read: {exc.strerror or exc}", str(folder)) from exc
    return sorted(sessions, key=lambda session: session.sort_key), torn


def _map_file(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.path.getsize(path) else b"")


def _read_sessions(data: memoryview, sessions: list[Session]) -> int:
    """Append the sessions of a file to ``sessions``, and return where its last whole record ends."""
    end = 0
    session: Session | None = None
    for end, content in iter_contents(data):
        record_type = bytes(content[:1])
        if record_type == BEGIN:
            session = Session(decode_fields(content, _BEGIN_FIELDS), data)
            sessions.append(session)
        elif session is not None and record_type == STEPS:
            session.offsets.append(end - len(content))
            session.lengths.append(len(content))
        elif session is not None and record_type == END:
            fields = decode_fields(content, _END_FIELDS)
            session.end_step, session.retracted = fields["step"], fields["held"]
    return end


def group_by_epoch(sessions: Iterable[Session]) -> dict[tuple[str, int], list[Session]]:
    """Group sessions by dataset and epoch, without those that were discarded by a return to an earlier epoch."""
    found: dict[tuple[str, int], list[Session]] = {}
    lowest: dict[tuple[Any, ...], int] = {}  # the lowest epoch of later sessions, by rank and by world
    for session in sorted(sessions, key=lambda session: session.sort_key, reverse=True):
        (dataset, epoch), world = session.epoch, session.fields["world"]
        others = [low for key, low in lowest.items() if key[:2] == ("world", dataset) and key[2] != world]
        if epoch <= min([*others, lowest.get(("rank", dataset, session.rank), epoch)]):
            found.setdefault(session.epoch, []).insert(0, session)
        for key in (("rank", dataset, session.rank), ("world", dataset, world)):
            lowest[key] = min(epoch, lowest.get(key, epoch))
    return found


@dataclass(frozen=True, slots=True)
class CountedSteps:
    """The steps of a session that count: those before ``until``."""

    session: Session
    until: int

    def tables(self) -> Iterator[tuple[StepsRecord, I64]]:
        """Yield each record with its samples that count.

        Samples that give no output count in every step, since they never give one.
        """
        for record in self.session.records():
            rows = record.table()
            if record.first + record.count > self.until:
                rows = rows[:, (rows[ITEM] < self.until - record.first) | (rows[KIND] == PASSED)]
            yield record, rows

    def void_tables(self) -> Iterator[I64]:
        """Yield the samples of steps that do not count."""
        for record in self.session.records():
            if record.first + record.count > self.until:
                rows = record.table()
                yield rows[:, rows[ITEM] >= self.until - record.first]

    def lost_steps(self) -> Iterator[int]:
        """Yield the steps that should be in the ledger and are not."""
        due = int(self.session.fields["step"])
        for record in self.session.records():
            if record.count and record.first < self.until:
                yield from range(due, record.first)
                due = max(due, record.first + record.count)
        end = self.until if self.session.end_step is None else min(self.until, self.session.end_step)
        if end < NO_LIMIT:
            yield from range(due, end)


@dataclass(frozen=True, slots=True)
class History:
    """What counts of one epoch, and what does not.

    Attributes:
        counted: The steps that count, by session.
        void: The sessions of which nothing counts: they were started over, or abandoned.
        heads: The last session of each rank.
        world: The number of ranks of the last session.
    """

    counted: list[CountedSteps]
    void: list[Session]
    heads: dict[int, Session]
    world: int

    @property
    def ended(self) -> bool:
        """Whether every rank that has a session reached the end of the epoch."""
        return all(head.end_step is not None for head in self.heads.values())

    def with_unknown_parents(self) -> list[Session]:
        """Return the sessions that count and resumed from something that is not in the ledger."""
        counted = [steps.session for steps in self.counted]
        known = {session.name for session in counted}
        return [s for s in counted if any(parent is None or parent[0] not in known for parent in s.parents())]


def trace_history(sessions: Iterable[Session]) -> History:
    """Follow the sessions of one epoch back from the last session of each rank, to find which steps count."""
    ordered = sorted(sessions, key=lambda session: session.sort_key)
    known = {session.name: session for session in ordered}
    roots = {session.name: _root(session, known) for session in ordered}
    latest = ordered[-1]
    heads = {s.rank: s for s in ordered if roots[s.name] == roots[latest.name]}  # the latest of each rank
    until: dict[str, int] = {head.name: NO_LIMIT for head in heads.values()}
    waiting = list(heads.values())
    while waiting:
        for parent in waiting.pop().parents():
            if parent is not None and parent[0] in known:
                name, step = parent
                if step > until.get(name, -1):
                    until[name] = step
                    waiting.append(known[name])
    ends = {name: s.end_step if s.retracted and s.end_step is not None else NO_LIMIT for name, s in known.items()}
    counted = [CountedSteps(known[name], min(step, ends[name])) for name, step in until.items()]
    counted.sort(key=lambda steps: steps.session.sort_key)
    void = [session for session in ordered if session.name not in until]
    return History(counted, void, heads, int(latest.fields["world"]))


def _root(session: Session, known: dict[str, Session]) -> tuple[Any, ...]:
    """Return what the ranks of one run have in common: how the epoch was cut for them."""
    seen = set()
    while session.fields["how"] == "own" and session.name not in seen:
        seen.add(session.name)
        parent = session.parents()[0]
        if parent is None or parent[0] not in known:
            break
        session = known[parent[0]]
    fields = session.fields
    parents = tuple(sorted(map(str, fields["parents"]))) if fields["how"] == "recut" else ()
    return fields["how"], fields["world"], fields["cut"], parents
