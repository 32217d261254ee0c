"""Writes the ledger of a loader: its sessions, and the samples of every step."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.engines import COLUMNS, DROPPED, INDEX, ITEM, KIND, LEAF, POSITION, SHARD, Program
from penstock.errors import PlanError, StateError, StorageError
from penstock.feed.ledger.records import BEGIN, END, MAGIC, encode_fields, encode_steps, frame_record
from penstock.order import I64, UNKNOWN, Order, Piece, State
from penstock.plan import Cut, Scope

LEDGER_SUFFIX = ".ledger"
_DROPPED_PER_RECORD = 8192
_MAX_PENDING, _FLUSH_INTERVAL_S = 32, 0.01  # limits of what is written as one record if steps are fast
_URL = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a session resumes.

    Attributes:
        how: ``"fresh"``: from the start of the epoch; ``"own"``: from a session of the same rank and world;
            ``"recut"``: from the sessions of all ranks of another world.
        parents: These sessions, each with its next step; None for a state that was saved without a ledger. A rank
            that had delivered nothing of the epoch has none.
        left: The positions that were still to come in the loaded states.
        within_group: A loaded state is within a group, whose samples are neither all delivered nor all to come.
        cut: How the epoch was cut for a state at its start; None: as the loader cuts it.
    """

    how: Literal["fresh", "own", "recut"] = "fresh"
    parents: tuple[tuple[str, int] | None, ...] = ()
    left: tuple[Piece, ...] = ()
    within_group: bool = False
    cut: str | None = None

    @property
    def step(self) -> int:
        """The first step of the session."""
        return max((parent[1] for parent in self.parents if parent), default=0)


@dataclass(frozen=True, slots=True)
class SessionDataset:
    """What a ledger records about the dataset of a session.

    Attributes:
        name: Identifies the order of the dataset's epochs.
        size: The number of positions of an epoch.
        times: How often a sample of each source occurs in an epoch; None if that differs between samples.
        loose: An epoch may end before its last position although no sample is lost.
        sources: Returns the names and counts of the shards of each source.
    """

    name: str
    size: int
    times: list[int] | None
    loose: bool
    sources: Callable[[], list[dict[str, Any]]]


def session_dataset(program: Program, order: Order) -> SessionDataset:
    """Return what a ledger records about the dataset of a program."""
    name = f"{program.identity(counts=order.size != UNKNOWN)}-{program.seed}"
    sources = partial(_shard_names, program)
    return SessionDataset(name, order.size, program.plan.occurrences(), _may_end_early(program), sources)


def _shard_names(program: Program) -> list[dict[str, Any]]:
    """Return the names and counts of the shards of each source."""
    counts = [reader.counts(scan=True) for reader in program.readers]
    return [
        {"names": reader.names, "counts": [] if shard_counts is None else shard_counts.tolist()}
        for reader, shard_counts in zip(program.readers, counts, strict=True)
    ]


def resume_point(states: Sequence[State], own: State | None) -> ResumePoint:
    """Return where a loader with ``states`` resumes; one of them may be its own.

    Raises:
        StateError: The entry of a state about its ledger is damaged.
    """
    used = list(states) if own is None else [own]
    begun = [state for state in used if (state.counted or {}).get("ledger") != []]
    if not begun:
        return ResumePoint(cut=None if own is None else own.cut)
    return ResumePoint(
        "recut" if own is None else "own",
        tuple(map(_parent, begun)),
        tuple(piece for state in used for piece in state.left),
        any(state.tail for state in used),
    )


def _parent(state: State) -> tuple[str, int] | None:
    entry = (state.counted or {}).get("ledger")
    if entry is None:
        return None
    match entry:
        case [str(session), int(step)] if step >= 0 and not isinstance(step, bool):
            return session, step
    raise StateError(f"the state's 'ledger' holds {entry!r:.60}, not [session, step]")


class LedgerWriter:
    """Writes the file of one loader in the folder of a ledger.

    Every step is written to the operating system at once, so it survives a process that is killed. Steps that follow
    each other within milliseconds are written together.

    Attributes:
        folder: The folder of the ledger.
        step: The number of the next step.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Nothing is written before a session begins.

        Raises:
            PlanError: The folder is not a local one.
        """
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder) or _URL.match(str(folder)):
            raise PlanError(f"ledger={folder!r}: give a local folder, such as 'runs/ledger'")
        self.folder = Path(folder)
        self.step = 0
        self._epoch: int | None = None  # of the current session; None: it has ended
        self._session = ""
        self._resumed = False  # the current session has parents
        self._retracted = False  # the last step of the current session was not delivered
        self._session_count = 0
        self._token = secrets.token_hex(6)
        self._clock = 0
        self._path: Path | None = None
        self._file: int | None = None
        self._file_bytes = 0
        self._pending: list[tuple[I64, int]] = []  # not written yet
        self._flushed_at = 0.0

    def has_session(self, epoch: int) -> bool:
        """Return whether the current session is one of this epoch."""
        return self._epoch == epoch

    def has_begun(self, epoch: int) -> bool:
        """Return whether the current session is one of this epoch, and has steps or resumed from other sessions."""
        return self.has_session(epoch) and (self._resumed or self.step > 0)

    def begin(self, dataset: SessionDataset, epoch: int, cut: Cut, resumed: ResumePoint) -> None:
        """Begin a session.

        Raises:
            PlanError: The samples are not counted.
            StorageError: The folder cannot be written.
        """
        if dataset.size == UNKNOWN:
            raise PlanError("a ledger needs the number of samples in every shard: run `penstock index` on them first")
        self._clock = max(time.time_ns(), self._clock + 1)
        if self._path is None:
            self._create(dataset, cut)
        self._session = f"{self._token}.{self._session_count}"
        self._session_count += 1
        self.flush()
        self._epoch, self.step, self._retracted = epoch, resumed.step, False
        self._resumed = bool(resumed.parents)
        fields = {
            "session": self._session,
            "dataset": dataset.name,
            "epoch": epoch,
            "rank": cut.rank,
            "world": cut.world,
            "cut": resumed.cut or cut.kind,
            "how": resumed.how,
            "parents": resumed.parents,
            "left": resumed.left,
            "step": self.step,
            "size": dataset.size,
            "times": dataset.times,
            "loose": resumed.within_group or dataset.loose,
            "clock": self._clock,
        }
        self._write(encode_fields(BEGIN, fields))

    def _create(self, dataset: SessionDataset, cut: Cut) -> None:
        """Create the file, with a name that sorts after all existing ones even if the clock was set back."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_shard_names(self.folder / f"dataset-{dataset.name}.json", dataset)
            for name in os.listdir(self.folder):
                if name.endswith(LEDGER_SUFFIX) and name.partition("-")[0].isdigit():
                    self._clock = max(self._clock, int(name.partition("-")[0]) + 1)
        except OSError as exc:
            raise self._failed(exc) from exc
        self._path = self.folder / f"{self._clock:020d}-{cut.rank}of{cut.world}-{self._token}{LEDGER_SUFFIX}"
        self._append(MAGIC)

    def record(self, rows: I64, steps: int) -> None:
        """Record the samples of the next ``steps`` steps, or, if it is 0, samples that belong to no step.

        Raises:
            StorageError: The folder cannot be written.
        """
        if steps or rows.shape[1]:
            self._pending.append((rows, steps))
            self.step += steps
            if len(self._pending) >= _MAX_PENDING or time.perf_counter() - self._flushed_at > _FLUSH_INTERVAL_S:
                self.flush()

    def flush(self) -> None:
        """Write what was recorded.

        Raises:
            StorageError: The folder cannot be written.
        """
        if self._pending:
            pending, self._pending = self._pending, []
            steps = sum(count for _, count in pending)
            self._write(encode_steps(self.step - steps, steps, _merge(pending)))
            self._flushed_at = time.perf_counter()

    def retract_step(self) -> ResumePoint:
        """Withdraw the last step, which was not delivered, and return where the next session resumes: before it."""
        self.flush()
        self.step, self._retracted = self.step - 1, True
        return ResumePoint("own", (self.position(),))

    def position(self) -> tuple[str, int]:
        """Return the current session and its next step, for a state; everything before is written."""
        self.flush()
        return self._session, self.step

    def end(self, dropped: Iterable[I64]) -> None:
        """Record the dropped samples, given as tables, and that the epoch of the session has ended."""
        count = 0
        for rows in dropped:
            self.record(rows, 0)
            count += rows.shape[1]
        self.flush()
        self._write(encode_fields(END, {"step": self.step, "held": self._retracted, "dropped": count}))
        self._epoch = None
        self.close()

    def close(self) -> None:
        """Write everything to the disk and close the file; a later record opens it again."""
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
                self._file_bytes = os.fstat(self._file).st_size
            written = os.write(self._file, data)
            if written < len(data):
                os.ftruncate(self._file, self._file_bytes)  # a torn record would hide those after it
                raise OSError("no space left on device")
        except OSError as exc:
            raise self._failed(exc) from exc
        self._file_bytes += written

    def _failed(self, exc: OSError) -> StorageError:
        return StorageError(f"the ledger cannot be written: {exc.strerror or exc}", str(self.folder))


def _merge(pending: Sequence[tuple[I64, int]]) -> I64:
    """Join tables into one and number their items consecutively; samples of no step get a neighbouring item."""
    if len(pending) == 1:
        return pending[0][0]
    rows = np.concatenate([rows for rows, _ in pending], axis=1)
    counts = np.array([steps for _, steps in pending])
    rows[ITEM] += np.repeat(np.cumsum(counts) - counts, [rows.shape[1] for rows, _ in pending])
    rows[ITEM] = np.minimum(rows[ITEM], max(0, int(counts.sum()) - 1))
    return rows


def dropped_rows(order: Order, dropped: Sequence[Piece]) -> Iterator[I64]:
    """Yield tables of the samples at the positions of ``dropped``, for ``LedgerWriter.end``."""
    for start, stop, step, _ in dropped:
        for low in range(start, stop, step * _DROPPED_PER_RECORD):
            high = min(stop, low + step * _DROPPED_PER_RECORD)
            yield _dropped_table(order, np.arange(low, high, step, dtype=np.int64))


def _dropped_table(order: Order, positions: I64) -> I64:
    refs = order.at(positions)
    rows = np.zeros((COLUMNS, len(positions)), np.int64)
    rows[KIND], rows[POSITION] = DROPPED, positions
    rows[LEAF], rows[SHARD], rows[INDEX] = refs.leaf, refs.shard, refs.index
    return rows


def _write_shard_names(path: Path, dataset: SessionDataset) -> None:
    """Write the names and counts of the shards, which the records refer to by number."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    draft.write_text(json.dumps({"v": 1, "sources": dataset.sources()}, separators=(",", ":")))
    draft.replace(path)  # other ranks write the same


def _may_end_early(program: Program) -> bool:
    """Return whether an epoch may end before its last position although no sample is lost."""
    counts = any(stage.scope is Scope.ALL for stage in program.plan.body)
    return counts or any(stage.applies_per_rank for stage in program.plan.ordering)
