"""``ps.ledger``: open a ledger, list the samples of every step, and verify it."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from penstock.engines import COLUMNS, DROPPED, INDEX, ITEM, KIND, LEAF, PASSED, POSITION, SHARD, Program
from penstock.errors import PlanError, StorageError
from penstock.feed.ledger.history import CountedSteps, History, group_by_epoch, load_sessions, trace_history
from penstock.feed.ledger.proof import EpochCheck, Proof, Sample, ShardNames
from penstock.order import I64


@dataclass(frozen=True, slots=True)
class Step:
    """The samples of one step of an epoch, by rank."""

    epoch: int
    step: int
    ranks: dict[int, list[Sample]]

    def __str__(self) -> str:
        lines = [f"  rank {rank}: {', '.join(map(str, samples))}" for rank, samples in self.ranks.items()]
        return "\n".join([f"step {self.step} of epoch {self.epoch}", *lines])


class Ledger:
    """The ledger in a folder, as it was when it was opened; iterating yields every step that counts."""

    def __init__(self, folder: Path) -> None:
        """Use ``ps.ledger`` to create one."""
        self.folder = folder
        self._sessions, self._torn = load_sessions(folder)
        self._epochs = group_by_epoch(self._sessions)
        self._names: dict[str, ShardNames] = {}

    @property
    def epochs(self) -> list[int]:
        """The epochs that were begun."""
        return sorted({epoch for _, epoch in self._epochs})

    def verify(self, dataset: Any = None, *, most: int = 1000) -> Proof:
        """Check every epoch.

        Args:
            dataset: The dataset, for plans with ``limit``, ``mix``, ``exclude`` or a split: without it, their missing
                samples are identified by position only. Nothing but the counts of its shards is read.
            most: How many samples each list names; counts include all of them.

        Raises:
            StorageError: A file is missing.
        """
        proof = Proof([], [], [], [], [], list(self._torn))
        program = None if dataset is None else Program(dataset.plan)
        epochs = sorted(self._epochs.items(), key=lambda item: (item[1][0].sort_key, item[0][1]))
        for (name, epoch), sessions in epochs:
            has_later_epoch = any(other == name and number > epoch for other, number in self._epochs)
            find = None if program is None or not _is_named(program, name) else _sample_finder(program)
            check = EpochCheck(trace_history(sessions), self._shard_names(name), has_later_epoch, most, find)
            counts, missing, repeated, lost, dropped = check.run()
            proof.epochs.append(counts)
            proof.missing.extend(missing)
            proof.repeated.extend(repeated)
            proof.lost.extend(lost)
            proof.dropped.extend(dropped)
        return proof

    def step(self, step: int, epoch: int | None = None, rank: int | None = None) -> Step:
        """Return the samples of a step: by default of the last epoch, and of all ranks.

        Raises:
            PlanError: There is no such epoch or step.
        """
        history, names, found_epoch = self._history(epoch)
        ranks: dict[int, list[Sample]] = {}
        for steps in history.counted:
            if step < steps.until and rank in (None, steps.session.rank):
                for record in steps.session.records():
                    if record.first <= step < record.first + record.count:
                        rows = record.table()
                        ranks[steps.session.rank] = _delivered(rows[:, rows[ITEM] == step - record.first], names)
        if not ranks:
            of_rank = "" if rank is None else f" of rank {rank}"
            raise PlanError(f"step={step}: epoch {found_epoch} has no such step{of_rank} in {self.folder}")
        return Step(found_epoch, step, dict(sorted(ranks.items())))

    def __iter__(self) -> Iterator[Step]:
        for epoch in self.epochs:
            yield from self.steps(epoch)

    def steps(self, epoch: int | None = None) -> Iterator[Step]:
        """Yield the steps of an epoch, by default of the last one, in order.

        Raises:
            PlanError: There is no such epoch.
        """
        history, names, found_epoch = self._history(epoch)
        rows = heapq.merge(*(_by_step(steps) for steps in history.counted), key=lambda row: row[:2])
        for step, found in groupby(rows, key=lambda row: row[0]):
            yield Step(found_epoch, step, {rank: _delivered(table, names) for _, rank, table in found})

    def _history(self, epoch: int | None) -> tuple[History, ShardNames, int]:
        """Return the history, the shard names and the number of an epoch: of the dataset that began it last."""
        keys = [key for key in self._epochs if epoch in (None, key[1])]
        if not keys:
            raise PlanError(f"epoch={epoch}: {self.folder} has epochs {', '.join(map(str, self.epochs)) or 'none'}")
        dataset, found_epoch = max(keys, key=lambda key: self._epochs[key][-1].sort_key)
        return trace_history(self._epochs[dataset, found_epoch]), self._shard_names(dataset), found_epoch

    def _shard_names(self, dataset: str) -> ShardNames:
        if dataset not in self._names:
            path = self.folder / f"dataset-{dataset}.json"
            try:
                sources = json.loads(path.read_text())["sources"]
                names = ShardNames([list(s["names"]) for s in sources], [list(map(int, s["counts"])) for s in sources])
            except (OSError, ValueError, KeyError, TypeError) as exc:
                problem = f"the ledger's list of shards cannot be read: {type(exc).__name__}: {exc}"
                raise StorageError(problem, str(path)) from exc
            self._names[dataset] = names
        return self._names[dataset]


def ledger(folder: str | os.PathLike[str]) -> Ledger:
    """Open the ledger that loaders wrote with ``ledger=folder``; they may still be writing.

    Raises:
        StorageError: There is no ledger, or it cannot be read.
    """
    return Ledger(Path(folder))


def _delivered(rows: I64, names: ShardNames) -> list[Sample]:
    return names.samples(rows[:, (rows[KIND] != PASSED) & (rows[KIND] != DROPPED)])


def _by_step(steps: CountedSteps) -> Iterator[tuple[int, int, I64]]:
    for record, rows in steps.tables():
        for number in range(min(record.count, steps.until - record.first)):
            yield record.first + number, steps.session.rank, rows[:, rows[ITEM] == number]


def _is_named(program: Program, dataset: str) -> bool:
    return f"{program.identity(counts=True)}-{program.seed}" == dataset


def _sample_finder(program: Program) -> Callable[[int, I64], I64]:
    def find(epoch: int, positions: I64) -> I64:
        refs = program.order(epoch).at(positions)
        rows = np.zeros((COLUMNS, len(positions)), np.int64)
        rows[POSITION], rows[LEAF], rows[SHARD], rows[INDEX] = positions, refs.leaf, refs.shard, refs.index
        return rows

    return find
