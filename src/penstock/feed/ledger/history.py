"""The sessions of a ledger, and which of their steps count: those that led to where things stand.

A session is one rank's way through an epoch, or the rest of one. It says what it goes on from: nothing, its own
earlier session, or the sessions of all ranks of another world. Where a later session goes on from an earlier step, what
the earlier one did after that step was done again and does not count.
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
from penstock.feed.ledger.records import BEGIN, END, STEPS, Steps, contents, read_steps, read_words
from penstock.feed.ledger.writer import LEDGER_SUFFIX
from penstock.order import I64

EVER = 1 << 62  # a step that never comes


@dataclass(slots=True, eq=False)
class Session:
    """One rank's way through an epoch, or the rest of one."""

    facts: dict[str, Any]
    data: memoryview
    offsets: array[int] = field(default_factory=lambda: array("Q"))  # where the records of steps lie
    lengths: array[int] = field(default_factory=lambda: array("I"))
    ended: int | None = None  # the step behind the last, when the epoch ended
    held: bool = False  # what was noted behind it was not delivered after all

    @property
    def name(self) -> str:
        """What states and later sessions call it."""
        return str(self.facts["session"])

    @property
    def rank(self) -> int:
        """Its rank."""
        return int(self.facts["rank"])

    @property
    def epoch(self) -> tuple[str, int]:
        """Its dataset and epoch."""
        return str(self.facts["dataset"]), int(self.facts["epoch"])

    @property
    def age(self) -> tuple[int, str]:
        """What sorts sessions by when they began."""
        return int(self.facts["clock"]), self.name

    def parents(self) -> list[tuple[str, int] | None]:
        """The sessions it goes on from, each with the step it had come to."""
        return [None if parent is None else (str(parent[0]), int(parent[1])) for parent in self.facts["parents"]]

    def records(self) -> Iterator[Steps]:
        """Its steps, as they were written."""
        for at, length in zip(self.offsets, self.lengths, strict=True):
            yield read_steps(self.data[at : at + length])


@dataclass(frozen=True, slots=True)
class Torn:
    """A file that cannot be read to its end: a crash cut off its last record, or it is damaged."""

    file: str
    nbytes: int  # that are left out


def load(folder: Path) -> tuple[list[Session], list[Torn]]:
    """Read the sessions of all files.

    Raises:
        StorageError: there is no ledger, or a file cannot be read.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(LEDGER_SUFFIX))
        if not names:
            raise StorageError("there is no ledger in this folder", str(folder))
        sessions: list[Session] = []
        torn: list[Torn] = []
        for name in names:
            data = _mapped(folder / name)
            whole = _sessions(data, sessions)
            torn += [Torn(name, len(data) - whole)] if whole < len(data) else []
    except StorageError:
        raise
    except OSError as exc:
        raise StorageError(f"the ledger cannot be read: {exc.strerror or exc}", str(folder)) from exc
    return sorted(sessions, key=lambda session: session.age), torn


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.path.getsize(path) else b"")


def _sessions(data: memoryview, into: list[Session]) -> int:
    """Add a file's sessions; say up to where it is whole."""
    whole = 0
    session: Session | None = None
    for whole, content in contents(data):
        kind = bytes(content[:1])
        if kind == BEGIN:
            session = Session(read_words(content), data)
            into.append(session)
        elif session is not None and kind == STEPS:
            session.offsets.append(whole - len(content))
            session.lengths.append(len(content))
        elif session is not None and kind == END:
            facts = read_words(content)
            session.ended, session.held = int(facts["step"]), bool(facts["held"])
    return whole


def by_epoch(sessions: Iterable[Session]) -> dict[tuple[str, int], list[Session]]:
    """The sessions by dataset and epoch, but for those from before the run went back to an earlier epoch."""
    found: dict[tuple[str, int], list[Session]] = {}
    lowest: dict[tuple[Any, ...], int] = {}  # the lowest epoch that came later: of a rank, and of a world
    for session in sorted(sessions, key=lambda session: session.age, reverse=True):
        (dataset, epoch), world = session.epoch, session.facts["world"]
        others = [low for key, low in lowest.items() if key[:2] == ("world", dataset) and key[2] != world]
        if epoch <= min([*others, lowest.get(("rank", dataset, session.rank), epoch)]):
            found.setdefault(session.epoch, []).insert(0, session)
        for key in (("rank", dataset, session.rank), ("world", dataset, world)):
            lowest[key] = min(epoch, lowest.get(key, epoch))
    return found


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps of a session: those before ``until`` count."""

    session: Session
    until: int

    def tables(self) -> Iterator[tuple[Steps, I64]]:
        """The records with the samples that count: of steps that do not, those that give nothing whoever asks."""
        for record in self.session.records():
            rows = record.table()
            if record.first + record.many > self.until:
                rows = rows[:, (rows[ITEM] < self.until - record.first) | (rows[KIND] == PASSED)]
            yield record, rows

    def beyond(self) -> Iterator[I64]:
        """The samples of steps that do not count."""
        for record in self.session.records():
            if record.first + record.many > self.until:
                rows = record.table()
                yield rows[:, rows[ITEM] >= self.until - record.first]

    def gaps(self) -> Iterator[int]:
        """Steps that should be there and are not."""
        due = int(self.session.facts["step"])
        for record in self.session.records():
            if record.many and record.first < self.until:
                yield from range(due, record.first)
                due = max(due, record.first + record.many)
        last = self.until if self.session.ended is None else min(self.until, self.session.ended)
        if last < EVER:
            yield from range(due, last)


@dataclass(frozen=True, slots=True)
class History:
    """What counts of one epoch, and what does not."""

    stretches: list[Stretch]
    void: list[Session]  # done again from the beginning, or given up
    heads: dict[int, Session]  # the last session of each rank
    world: int

    @property
    def ended(self) -> bool:
        """Whether every rank that came is at the end of the epoch."""
        return all(head.ended is not None for head in self.heads.values())

    def unknown(self) -> list[Session]:
        """The sessions that count and go on from something the ledger does not have."""
        known = {stretch.session.name for stretch in self.stretches}
        counted = [stretch.session for stretch in self.stretches]
        return [s for s in counted if any(parent is None or parent[0] not in known for parent in s.parents())]


def history(sessions: Iterable[Session]) -> History:
    """Tell which steps of one epoch's sessions count."""
    ordered = sorted(sessions, key=lambda session: session.age)
    known = {session.name: session for session in ordered}
    roots = {session.name: _root(session, known) for session in ordered}
    latest = ordered[-1]
    heads = {s.rank: s for s in ordered if roots[s.name] == roots[latest.name]}  # of each rank the latest
    until: dict[str, int] = {head.name: EVER for head in heads.values()}
    waiting = list(heads.values())
    while waiting:
        for parent in waiting.pop().parents():
            if parent is not None and parent[0] in known:
                name, step = parent
                if step > until.get(name, -1):
                    until[name] = step
                    waiting.append(known[name])
    ends = {name: s.ended if s.held and s.ended is not None else EVER for name, s in known.items()}
    stretches = [Stretch(known[name], min(step, ends[name])) for name, step in until.items()]
    stretches.sort(key=lambda stretch: stretch.session.age)
    void = [session for session in ordered if session.name not in until]
    return History(stretches, void, heads, int(latest.facts["world"]))


def _root(session: Session, known: dict[str, Session]) -> tuple[Any, ...]:
    """What ranks that belong together have in common: how the epoch was dealt out to them."""
    seen = set()
    while session.facts["how"] == "own" and session.name not in seen:
        seen.add(session.name)
        parent = session.parents()[0]
        if parent is None or parent[0] not in known:
            break
        session = known[parent[0]]
    facts = session.facts
    parents = tuple(sorted(map(str, facts["parents"]))) if facts["how"] == "recut" else ()
    return facts["how"], facts["world"], facts["cut"], parents
