"""``train_test_split(stratify=...)``: the same share of samples for every value of a field."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.engines import DELIVERED, INDEX, KIND, LEAF, SHARD, Program, Run
from penstock.order import I64, fold_into, name_hashes
from penstock.plan import Exclude, Identity, Plan
from penstock.relations.keys import hashable, value_of
from penstock.relations.source import select_fields


class Strata:
    """The two sides of a split, computed on first use from the field of every sample."""

    def __init__(self, plan: Plan, name: str, share: float, seed: int) -> None:
        self._args = (plan, name, share, seed)
        self._lock = threading.Lock()
        self._sides: tuple[list[Identity], list[Identity]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Strata, self._args

    def sides(self) -> tuple[list[Identity], list[Identity]]:
        """Return the samples of the train side and of the test side."""
        with self._lock:
            if self._sides is None:
                self._sides = self._compute()
            return self._sides

    def _compute(self) -> tuple[list[Identity], list[Identity]]:
        plan, name, share, seed = self._args
        program = Program(replace(select_fields(plan, "train_test_split", name), cut=None))
        order = program.order(0)
        tables: list[I64] = []
        run = Run(program, order, 0, program.start(order, None), on_delivered=lambda table, items: tables.append(table))
        with closing(iter(run)) as items:
            values = [hashable(value_of(item, name, "train_test_split")) for item in items]
        found = np.concatenate([np.zeros((len(tables[0]), 0), np.int64), *tables], axis=1) if tables else None
        if found is None:
            return [], []
        found = found[:, found[KIND] == DELIVERED]
        names = [reader.names for reader in program.readers]
        identities = [
            Identity(leaf, names[leaf][shard], index)
            for leaf, shard, index in zip(*(found[row].tolist() for row in (LEAF, SHARD, INDEX)), strict=True)
        ]
        return _sides(identities, values, share, seed)


def _sides(
    identities: list[Identity], values: list[Hashable], share: float, seed: int
) -> tuple[list[Identity], list[Identity]]:
    hashes = name_hashes(f"{seed}:{identity.source}:{identity.shard}" for identity in identities)
    hashes = fold_into(hashes, np.array([identity.index for identity in identities], np.int64))
    groups: dict[Hashable, list[int]] = {}
    for number, value in enumerate(values):
        groups.setdefault(value, []).append(number)
    test = np.zeros(len(identities), bool)
    for group in groups.values():
        numbers = np.array(group)
        numbers = numbers[np.argsort(hashes[numbers], kind="stable")]
        test[numbers[: int(len(numbers) * share + 0.5)]] = True
    return [identities[i] for i in np.flatnonzero(~test)], [identities[i] for i in np.flatnonzero(test)]


@dataclass(frozen=True, slots=True)
class Stratified(Exclude):
    """One side of the split: the order without the samples of the other side."""

    strata: Strata | None = field(default=None)
    test: bool = False
    call: str = ""

    def resolve(self, read: Callable[[str], Iterable[Identity]]) -> Exclude:
        """Return a stage that excludes the samples of the other side by name."""
        assert self.strata is not None
        train, test = self.strata.sides()
        return Exclude(tuple(train if self.test else test), self.first, self.until)

    def describe(self) -> str:
        return f"{self.call}[{int(self.test)}]"
