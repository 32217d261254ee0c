"""``describe()``: a summary of each field in one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.dataset.describe import type_of
from penstock.dataset.relations.aggregates import AGGREGATES, Aggregate, as_list, without_missing
from penstock.dataset.relations.groups import chunks
from penstock.dataset.relations.key_values import arrow_column
from penstock.errors import DataError
from penstock.plan import Columns

_OF_NUMBERS = ("mean", "std", "min", "max")
_OF_TEXT = ("min", "max")


@dataclass(slots=True)
class _FieldSummary:
    """The running summary of one field."""

    name: str
    type: str | None = None
    count: int = 0
    missing: int = 0
    aggregates: dict[str, Aggregate] = field(default_factory=dict)

    def add(self, items: Sequence[Any]) -> None:
        found = _field(items, self.name)
        numbers, found = without_missing(np.zeros(len(items), np.int64), found)
        self.missing += len(items) - len(numbers)
        first, self.count = not self.count, self.count + len(numbers)
        if not len(numbers):
            return
        if first:
            sample = as_list(found[:1])[0]
            self.type = type_of(sample)
            computed = _OF_NUMBERS if isinstance(sample, int | float) else _OF_TEXT if isinstance(sample, str) else ()
            self.aggregates = {how: AGGREGATES[how](self.name) for how in computed}
        for aggregate in self.aggregates.values():
            aggregate.add(numbers, 1, found)

    def row(self) -> dict[str, Any]:
        results = dict.fromkeys(_OF_NUMBERS) | {how: as_list(a.result())[0] for how, a in self.aggregates.items()}
        return {"field": self.name, "type": self.type, "count": self.count, "missing": self.missing, **results}


def _field(items: Sequence[Any], name: str) -> Any:
    if isinstance(items, Columns):
        found = arrow_column(items, name, "describe") if name in items.names else [None] * len(items)
        return [sample[name] for sample in items.renamed({name: name})] if found is None else found
    values = [sample.get(name) for sample in items]
    found = arrow_column([{name: value} for value in values], name, "describe")
    return values if found is None else found


@dataclass(frozen=True, slots=True)
class Described:
    """A row for each field: type, number of values, number of missing values, mean, deviation, minimum, maximum."""

    def __call__(self, runs: Iterator[Sequence[Any]], memory: int) -> Sequence[Sequence[Any]]:
        summaries: dict[str, _FieldSummary] = {}
        seen = 0
        for items in chunks(runs, None, memory):
            for name in _names(items):
                if name not in summaries:
                    summaries[name] = _FieldSummary(name, missing=seen)
            for summary in summaries.values():
                summary.add(items)
            seen += len(items)
        return [[summary.row() for summary in summaries.values()]]

    def typed(self, features: dict[str, Any]) -> dict[str, Any]:
        return {}

    def describe(self) -> str:
        return "describe()"


def _names(items: Sequence[Any]) -> list[str]:
    if isinstance(items, Columns):
        return [name for name in items.names if not name.startswith("__")]
    names: dict[str, None] = {}
    for item in items:
        if not isinstance(item, dict):
            raise DataError(f"describe needs samples with fields, not {type(item).__name__}")
        names.update(dict.fromkeys(name for name in item if not name.startswith("__")))
    return list(names)
