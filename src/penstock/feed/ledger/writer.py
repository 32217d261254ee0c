"""What a loader writes into its ledger: sessions, and the samples of every step."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from penstock.engines import COLUMNS, DROPPED, INDEX, ITEM, KIND, LEAF, POSITION, SHARD, Program
from penstock.errors import PlanError, StateError, StorageError
from penstock.feed.ledger.records import BEGIN, END, MAGIC, frame_record, steps, words
from penstock.order import I64, UNKNOWN, Order, Piece, State, total
from penstock.plan import Combination, Cut, Mix, Plan, Repeat, Shuffle, Slice, StreamStage, Union, Zip

LEDGER_SUFFIX = ".ledger"
_CHUNK = 8192  # dropped samples in one record
_TOGETHER, _SOON_S = 32, 0.01  # notes in one record, where they come that fast
_URL = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a session goes on from: nothing, or sessions and the step each of them had come to."""

    how: Literal["fresh", "own", "recut"] = "fresh"
    parents: tuple[tuple[str, int] | None, ...] = ()  # None: that state knew of no ledger
    left: tuple[Piece, ...] = ()  # positions that were still to come in all states given
    halfway: bool = False  # one of the states stands inside a group, whose samples are not all before or behind it

    @property
    def step(self) -> int:
        """The first step that comes now."""
        return max((parent[1] for parent in self.parents if parent), default=0)


def lineage(states: Sequence[State], own: State | None) -> Lineage:
    """What a loader that was given these states goes on from.

    Raises:
        StateError: what a state says of its ledger is damaged.
    """
    used = list(states) if own is None else [own]
    return Lineage(
        "recut" if own is None else "own",
        tuple(map(_parent, used)),
        tuple(piece for state in used for piece in state.left),
        any(state.tail for state in used),
    )


def _parent(state: State) -> tuple[str, int] | None:
    told = (state.counted or {}).get("ledger")
    if told is None:
        return None
    match told:
        case [str(session), int(step)] if step >= 0 and not isinstance(step, bool):
            return session, step
    raise StateError(f"the state's 'ledger' holds {told!r:.60}, not [session, step]")


class Book:
    """The files of one loader in a ledger's folder.

    A note is handed to the system at once, so that it outlives the process however that ends; where notes come many in
    a few milliseconds they are handed over together.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Nothing is written before a session begins.

        Raises:
            PlanError: not a local folder.
        """
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder) or _URL.match(str(folder)):
            raise PlanError(f"ledger={folder!r}: give a local folder, such as 'runs/ledger'")
        self.folder = Path(folder)
        self.step = 0  # the one that comes next
        self._epoch: int | None = None  # of the session at hand
        self._session = ""
        self._held = False  # its last step was taken back
        self._many = 0  # sessions so far
        self._token = secrets.token_hex(6)
        self._clock = 0
        self._path: Path | None = None
        self._file: int | None = None
        self._size = 0
        self._notes: list[tuple[I64, int]] = []  # not handed over yet
        self._flushed = 0.0

    def goes_on(self, epoch: int) -> bool:
        """Whether the session at hand is of this epoch."""
        return self._epoch == epoch

    def begin(self, program: Program, order: Order, epoch: int, cut: Cut, before: Lineage) -> None:
        """Begin a session.

        Raises:
            PlanError: the samples are not counted.
            StorageError: the folder cannot be written.
        """
        if order.size == UNKNOWN:
            raise PlanError("a ledger needs the number of samples in every shard: run `penstock index` on them first")
        dataset = f"{program.identity(counts=True)}-{program.seed}"
        self._clock = max(time.time_ns(), self._clock + 1)
        if self._path is None:
            self._create(dataset, program, cut)
        self._session = f"{self._token}.{self._many}"
        self._many += 1
        self.flush()
        self._epoch, self.step, self._held = epoch, before.step, False
        facts = {
            "session": self._session,
            "dataset": dataset,
            "epoch": epoch,
            "rank": cut.rank,
            "world": cut.world,
            "cut": cut.how,
            "how": before.how,
            "parents": before.parents,
            "left": before.left,
            "step": self.step,
            "size": order.size,
            "times": times(program.plan),
            "loose": before.halfway or _loose(program),
            "clock": self._clock,
        }
        self._write(words(BEGIN, facts))

    def _create(self, dataset: str, program: Program, cut: Cut) -> None:
        """Make the file; its name puts it behind all that are there, whatever the clock says."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _describe(self.folder / f"dataset-{dataset}.json", program)
            for name in os.listdir(self.folder):
                if name.endswith(LEDGER_SUFFIX) and name.partition("-")[0].isdigit():
                    self._clock = max(self._clock, int(name.partition("-")[0]) + 1)
        except OSError as exc:
            raise self._failed(exc) from exc
        self._path = self.folder / f"{self._clock:020d}-{cut.rank}of{cut.world}-{self._token}{LEDGER_SUFFIX}"
        self._append(MAGIC)

    def note(self, rows: I64, many: int) -> None:
        """Note the samples of the next ``many`` steps, or, with 0, of none.

        Raises:
            StorageError: the folder cannot be written.
        """
        if many or rows.shape[1]:
            self._notes.append((rows, many))
            self.step += many
            if len(self._notes) >= _TOGETHER or time.perf_counter() - self._flushed > _SOON_S:
                self.flush()

    def flush(self) -> None:
        """Hand over what was noted.

        Raises:
            StorageError: the folder cannot be written.
        """
        if self._notes:
            notes, self._notes = self._notes, []
            many = sum(count for _, count in notes)
            self._write(steps(self.step - many, many, _together(notes)))
            self._flushed = time.perf_counter()

    def take_back(self) -> Lineage:
        """Say that the last step was not delivered after all: what comes next is a session that goes on before it."""
        self.flush()
        self.step, self._held = self.step - 1, True
        return Lineage("own", (self.here(),))

    def here(self) -> tuple[str, int]:
        """The session and how far it is, for a state: all of it has been handed over."""
        self.flush()
        return self._session, self.step

    def end(self, order: Order, dropped: Sequence[Piece]) -> None:
        """End the session's epoch, naming the positions that were left out."""
        for start, stop, step, _ in dropped:
            for low in range(start, stop, step * _CHUNK):
                self.note(_left_out(order, np.arange(low, min(stop, low + step * _CHUNK), step, dtype=np.int64)), 0)
        self.flush()
        self._write(words(END, {"step": self.step, "held": self._held, "dropped": total(dropped)}))
        self.close()

    def close(self) -> None:
        """Have everything on the disk and let go of the file; a later note opens it again."""
        self.flush()
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            with suppress(StorageError, OSError):
                self.close()

    def _write(self, content: bytes) -> None:
        self._append(frame_record(content))

    def _append(self, data: bytes) -> None:
        try:
            if self._file is None:
                assert self._path is not None
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                self._size = os.fstat(self._file).st_size
            written = os.write(self._file, data)
            if written < len(data):
                os.ftruncate(self._file, self._size)  # half a record would hide those that come after it
                raise OSError("no more room")
        except OSError as exc:
            raise self._failed(exc) from exc
        self._size += written

    def _failed(self, exc: OSError) -> StorageError:
        return StorageError(f"the ledger cannot be written: {exc.strerror or exc}", str(self.folder))


def _together(notes: Sequence[tuple[I64, int]]) -> I64:
    """One table of several, its items counted through; what belongs to no step goes with a neighbour."""
    if len(notes) == 1:
        return notes[0][0]
    rows = np.concatenate([rows for rows, _ in notes], axis=1)
    counts = np.array([many for _, many in notes])
    rows[ITEM] += np.repeat(np.cumsum(counts) - counts, [rows.shape[1] for rows, _ in notes])
    rows[ITEM] = np.minimum(rows[ITEM], max(0, int(counts.sum()) - 1))
    return rows


def _left_out(order: Order, positions: I64) -> I64:
    refs = order.at(positions)
    rows = np.zeros((COLUMNS, len(positions)), np.int64)
    rows[KIND], rows[POSITION] = DROPPED, positions
    rows[LEAF], rows[SHARD], rows[INDEX] = refs.leaf, refs.shard, refs.index
    return rows


def _describe(path: Path, program: Program) -> None:
    """Write down once what the numbers in the records stand for."""
    if path.exists():
        return
    counts = [reader.counts(scan=True) for reader in program.readers]
    sources = [
        {"names": reader.names, "counts": [] if many is None else many.tolist()}
        for reader, many in zip(program.readers, counts, strict=True)
    ]
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    draft.write_text(json.dumps({"v": 1, "sources": sources}, separators=(",", ":")))
    draft.replace(path)  # other ranks write the same


def _loose(program: Program) -> bool:
    """Whether an epoch may end before its last position without anything being lost."""
    counts = any(level.head is not None and isinstance(level.head.stage, StreamStage) for level in program.levels)
    return counts or any(isinstance(stage, Slice) and stage.per_rank for stage in program.plan.ordering)


def times(plan: Plan) -> list[int] | None:
    """How often an epoch has each sample, by source; ``None`` where that differs from sample to sample."""
    source = plan.source
    if not isinstance(source, Combination):
        found: list[int] | None = [1]
    else:
        parts = [times(branch) for branch in source.branches]
        if isinstance(source, Zip) and parts[0] is not None and source.strict:
            right = sum(1 for one in source.branches[1].sources() if not isinstance(one, Combination))
            found = [*parts[0], *[0] * right]
        elif isinstance(source, Union) or (isinstance(source, Mix) and source.stop == "all"):
            found = None if None in parts else [many for part in parts if part for many in part]
        else:
            found = None
    for stage in plan.ordering:
        if isinstance(stage, Repeat) and stage.times is not None and found is not None:
            found = [many * stage.times for many in found]
        elif not isinstance(stage, Shuffle):
            found = None
    return found
