"""The ledger as it is read: what was in every step, and the proof that every sample came exactly once."""

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
from penstock.feed.ledger.history import History, Stretch, by_epoch, history, load
from penstock.feed.ledger.proof import Examination, Names, Proof, Sample
from penstock.order import I64


@dataclass(frozen=True, slots=True)
class Step:
    """What every rank got in one step of an epoch."""

    epoch: int
    step: int
    ranks: dict[int, list[Sample]]

    def __str__(self) -> str:
        lines = [f"  rank {rank}: {', '.join(map(str, samples))}" for rank, samples in self.ranks.items()]
        return "\n".join([f"step {self.step} of epoch {self.epoch}", *lines])


class Ledger:
    """The ledger in a folder, as it stood when it was opened; iterating gives every step that counts."""

    def __init__(self, folder: Path) -> None:
        """Made by ``ledger``."""
        self.folder = folder
        self._sessions, self._torn = load(folder)
        self._epochs = by_epoch(self._sessions)
        self._names: dict[str, Names] = {}

    @property
    def epochs(self) -> list[int]:
        """The epochs that were begun."""
        return sorted({epoch for _, epoch in self._epochs})

    def verify(self, dataset: Any = None, *, most: int = 1000) -> Proof:
        """Add up every epoch.

        Args:
            dataset: The dataset, for plans with ``limit``, ``mix``, ``exclude`` or a split: without it what is missing
                there is told by its position. Nothing of it is read but how many samples its shards hold.
            most: How many samples of a kind to name; all are counted.

        Raises:
            StorageError: a file is missing.
        """
        proof = Proof([], [], [], [], [], list(self._torn))
        program = None if dataset is None else Program(dataset.plan)
        for (name, epoch), sessions in sorted(self._epochs.items(), key=lambda item: (item[1][0].age, item[0][1])):
            later = any(other == name and number > epoch for other, number in self._epochs)
            find = None if program is None or not _is(program, name) else _finder(program)
            found = Examination(history(sessions), self._named(name), later, most, find).run()
            report, *lists = found
            proof.epochs.append(report)
            for whole, part in zip((proof.missing, proof.repeated, proof.lost, proof.dropped), lists, strict=True):
                whole += part  # type: ignore[operator]
        return proof

    def step(self, step: int, epoch: int | None = None, rank: int | None = None) -> Step:
        """What was in the batches of a step: in the last epoch unless one is given, of all ranks unless one is given.

        Raises:
            PlanError: there is no such epoch or step.
        """
        past, names, which = self._history(epoch)
        ranks: dict[int, list[Sample]] = {}
        for stretch in past.stretches:
            if step < stretch.until and rank in (None, stretch.session.rank):
                for record in stretch.session.records():
                    if record.first <= step < record.first + record.many:
                        rows = record.table()
                        ranks[stretch.session.rank] = _shown(rows[:, rows[ITEM] == step - record.first], names)
        if not ranks:
            asked = "" if rank is None else f" of rank {rank}"
            raise PlanError(f"step={step}: epoch {which} has no such step{asked} in {self.folder}")
        return Step(which, step, dict(sorted(ranks.items())))

    def __iter__(self) -> Iterator[Step]:
        for epoch in self.epochs:
            yield from self.steps(epoch)

    def steps(self, epoch: int | None = None) -> Iterator[Step]:
        """The steps of an epoch (the last one unless given), in order.

        Raises:
            PlanError: there is no such epoch.
        """
        past, names, which = self._history(epoch)
        rows = heapq.merge(*(_by_step(stretch) for stretch in past.stretches), key=lambda row: row[:2])
        for step, found in groupby(rows, key=lambda row: row[0]):
            yield Step(which, step, {rank: _shown(table, names) for _, rank, table in found})

    def _history(self, epoch: int | None) -> tuple[History, Names, int]:
        """What counts of an epoch: of the dataset that came to it last, if there are several."""
        able = [key for key in self._epochs if epoch in (None, key[1])]
        if not able:
            raise PlanError(f"epoch={epoch}: {self.folder} has epochs {', '.join(map(str, self.epochs)) or 'none'}")
        dataset, which = max(able, key=lambda key: self._epochs[key][-1].age)
        return history(self._epochs[dataset, which]), self._named(dataset), which

    def _named(self, dataset: str) -> Names:
        if dataset not in self._names:
            path = self.folder / f"dataset-{dataset}.json"
            try:
                sources = json.loads(path.read_text())["sources"]
            except (OSError, ValueError, KeyError) as exc:
                raise StorageError(f"the ledger's list of shards cannot be read: {exc}", str(path)) from exc
            self._names[dataset] = Names([s["names"] for s in sources], [s["counts"] for s in sources])
        return self._names[dataset]


def ledger(folder: str | os.PathLike[str]) -> Ledger:
    """Open the ledger that loaders wrote with ``ledger=folder``; it may still grow.

    Raises:
        StorageError: there is none, or it cannot be read.
    """
    return Ledger(Path(folder))


def _shown(rows: I64, names: Names) -> list[Sample]:
    return names.samples(rows[:, (rows[KIND] != PASSED) & (rows[KIND] != DROPPED)])


def _by_step(stretch: Stretch) -> Iterator[tuple[int, int, I64]]:
    for record, rows in stretch.tables():
        for number in range(min(record.many, stretch.until - record.first)):
            yield record.first + number, stretch.session.rank, rows[:, rows[ITEM] == number]


def _is(program: Program, name: str) -> bool:
    return f"{program.identity(counts=True)}-{program.seed}" == name


def _finder(program: Program) -> Callable[[int, I64], I64]:
    def find(epoch: int, positions: I64) -> I64:
        refs = program.order(epoch).at(positions)
        rows = np.zeros((COLUMNS, len(positions)), np.int64)
        rows[POSITION], rows[LEAF], rows[SHARD], rows[INDEX] = positions, refs.leaf, refs.shard, refs.index
        return rows

    return find
