"""``train_test_split(stratify=...)``: every value of a field gives the same share of its samples."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.dataset.relations.key_values import hashable, value_of
from penstock.dataset.relations.source import fields_of
from penstock.engines import DELIVERED, INDEX, KIND, LEAF, SHARD, Program, Run
from penstock.order import I64, fold_into, name_hashes
from penstock.plan import Exclude, Identity, Plan


class Strata:
    """Which samples are on which side: found out when it is first asked for, by reading the field of every sample."""

    def __init__(self, plan: Plan, name: str, share: float, seed: int) -> None:
        self._args = (plan, name, share, seed)
        self._lock = threading.Lock()
        self._sides: tuple[list[Identity], list[Identity]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Strata, self._args

    def sides(self) -> tuple[list[Identity], list[Identity]]:
        """The samples for training, and those for the test."""
        with self._lock:
            if self._sides is None:
                self._sides = self._found()
            return self._sides

    def _found(self) -> tuple[list[Identity], list[Identity]]:
        plan, name, share, seed = self._args
        program = Program(replace(fields_of(plan, name), cut=None))
        order = program.order(0)
        tables: list[I64] = []
        run = Run(program, order, 0, program.start(order, None), witness=lambda table, items: tables.append(table))
        with closing(iter(run)) as items:  # type: ignore[type-var]
            values = [hashable(value_of(item, name, "train_test_split")) for item in items]
        found = np.concatenate([np.zeros((len(tables[0]), 0), np.int64), *tables], axis=1) if tables else None
        if found is None:
            return [], []
        found = found[:, found[KIND] == DELIVERED]
        names = [reader.names for reader in program.readers]
        own = [
            Identity(leaf, names[leaf][shard], index)
            for leaf, shard, index in zip(*(found[row].tolist() for row in (LEAF, SHARD, INDEX)), strict=True)
        ]
        return _sides(own, values, share, seed)


def _sides(
    own: list[Identity], values: list[Hashable], share: float, seed: int
) -> tuple[list[Identity], list[Identity]]:
    marks = name_hashes(f"{seed}:{one.source}:{one.shard}" for one in own)
    marks = fold_into(marks, np.array([one.index for one in own], np.int64))
    groups: dict[Hashable, list[int]] = {}
    for number, value in enumerate(values):
        groups.setdefault(value, []).append(number)
    test = np.zeros(len(own), bool)
    for group in groups.values():
        numbers = np.array(group)
        numbers = numbers[np.argsort(marks[numbers], kind="stable")]
        test[numbers[: int(len(numbers) * share + 0.5)]] = True
    return [own[i] for i in np.flatnonzero(~test)], [own[i] for i in np.flatnonzero(test)]


@dataclass(frozen=True, slots=True)
class Stratified(Exclude):
    """One side of the split: the order without the samples of the other."""

    strata: Strata | None = field(default=None)
    test: bool = False
    said: str = ""

    def settle(self) -> Exclude:
        """Find out which samples are on the other side."""
        assert self.strata is not None
        train, test = self.strata.sides()
        return Exclude(tuple(train if self.test else test), self.first, self.until)

    def describe(self) -> str:
        return f"{self.said}[{int(self.test)}]"
