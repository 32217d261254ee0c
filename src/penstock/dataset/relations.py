"""What needs to see every sample: groups and order by value. Each is a dataset again, made when it is first read."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from penstock.engines import started
from penstock.errors import DataError, PlanError
from penstock.formats.items import ItemsReader
from penstock.plan import Plan, Resources, Select

_Of = TypeVar("_Of")


class Summary(Protocol):
    """What is made of all samples of a plan."""

    def __call__(self, items: Iterable[Any]) -> list[Any]:
        """The rows."""

    def describe(self) -> str:
        """The call that asked for it."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A source that runs another plan to its end when it is opened, and gives what a summary makes of it."""

    plan: Plan
    summary: Summary

    random_access = True

    @property
    def resources(self) -> Resources | None:
        """Its rows are in memory."""
        return None

    def open(self) -> ItemsReader:
        """Run the plan."""
        return ItemsReader(self.summary(started(self.plan, self.plan.epoch or 0).items()))

    def describe(self) -> str:
        """The calls that made it."""
        return f"{self.plan.source.describe()} ... {self.summary.describe()}"


def whole(plan: Plan, summary: Summary) -> Plan:
    """The plan of what a summary makes of everything; engine, seed and policy stay.

    Raises:
        PlanError: the plan is one rank's share.
    """
    if plan.cut is not None and plan.cut.world > 1:
        raise PlanError(f"{summary.describe()} needs the whole stream, which is cut for {plan.cut.world} ranks")
    return Plan(Whole(plan, summary), (), plan.seed, None, None, plan.errors, plan.engine)


def fields_of(plan: Plan, *names: str) -> Plan:
    """The plan that reads no more than these fields, where its items are samples."""
    return plan.then(Select(names)) if plan.commutes else plan


@dataclass(frozen=True, slots=True)
class Sorted:
    """All samples by the value of a field; equal ones stay in order."""

    field: str
    descending: bool = False

    def __call__(self, items: Iterable[Any]) -> list[Any]:
        return sorted(items, key=lambda sample: _rank(value_of(sample, self.field, "sort")), reverse=self.descending)

    def describe(self) -> str:
        return f"sort({self.field!r}{', descending=True' if self.descending else ''})"


@dataclass(frozen=True, slots=True)
class Aggregated:
    """A row for each value of a field, in its order: how many samples have it, or what their other fields amount to."""

    field: str
    how: str
    of: tuple[str, ...] = ()

    def __call__(self, items: Iterable[Any]) -> list[Any]:
        groups: dict[Hashable, list[Any]] = {}  # hashable -> [value, count, values of each field]
        for sample in items:
            value = value_of(sample, self.field, "groupby")
            group = groups.setdefault(hashable(value), [value, 0, [[] for _ in self.of]])
            group[1] += 1
            for name, kept in zip(self.of, group[2], strict=True):
                kept.append(value_of(sample, name, self.how))
        rows = sorted(groups.values(), key=lambda group: _rank(group[0]))
        return [self._row(*row) for row in rows]

    def _row(self, value: Any, count: int, columns: list[list[Any]]) -> dict[str, Any]:
        if self.how == "count":
            return {self.field: value, "count": count}
        made = ((f"{name}_{self.how}", _HOWS[self.how](kept)) for name, kept in zip(self.of, columns, strict=True))
        return {self.field: value, **dict(made)}

    def describe(self) -> str:
        return f"groupby({self.field!r}).{self.how}({', '.join(map(repr, self.of))})"


def _std(values: list[Any]) -> float:
    """Of a sample, as pandas and Ray Data have it; of a single value nobody knows it."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else math.nan


_HOWS: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "mean": lambda values: math.fsum(values) / len(values),
    "min": min,
    "max": max,
    "std": _std,
    "list": list,
}


@dataclass(frozen=True, slots=True)
class Groups(Generic[_Of]):
    """Samples by the value of a field; each method gives a dataset of one row for each value, in its order."""

    plan: Plan
    made: Callable[[Plan], _Of]  # a dataset of a plan
    field: str

    def count(self) -> _Of:
        """``{field: value, "count": n}``."""
        return self._rows("count")

    def sum(self, *fields: str) -> _Of:
        """``{field: value, "x_sum": ...}`` for each of ``fields``."""
        return self._rows("sum", fields)

    def mean(self, *fields: str) -> _Of:
        """``{field: value, "x_mean": ...}``."""
        return self._rows("mean", fields)

    def min(self, *fields: str) -> _Of:
        """``{field: value, "x_min": ...}``."""
        return self._rows("min", fields)

    def max(self, *fields: str) -> _Of:
        """``{field: value, "x_max": ...}``."""
        return self._rows("max", fields)

    def std(self, *fields: str) -> _Of:
        """``{field: value, "x_std": ...}``: of a sample (n - 1); NaN of a single value."""
        return self._rows("std", fields)

    def list(self, *fields: str) -> _Of:
        """``{field: value, "x_list": [...]}``, in the order of the samples."""
        return self._rows("list", fields)

    def _rows(self, how: str, fields: tuple[str, ...] = ()) -> _Of:
        if how != "count" and not fields:
            raise PlanError(f"{how}() needs the names of fields, as in groupby({self.field!r}).{how}('x')")
        read = fields_of(self.plan, self.field, *fields)
        return self.made(whole(read, Aggregated(self.field, how, fields)))


class Lookup:
    """Joins a sample with those of another plan that have the same value of a field.

    They are gathered when the first sample asks, once in every process that joins.
    """

    def __init__(self, plan: Plan, field: str, how: str, suffix: str | None) -> None:
        self._plan, self._field, self._how, self._suffix = plan, field, how, suffix
        self._lock = threading.Lock()
        self._rows: dict[Hashable, list[dict[str, Any]]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Lookup, (self._plan, self._field, self._how, self._suffix)

    def __repr__(self) -> str:
        return f"join on {self._field!r}"

    def __call__(self, sample: Any) -> list[Any]:
        found = self._gathered().get(hashable(value_of(sample, self._field, "join")), ())
        if not found:
            return [sample] if self._how == "left" else []
        return [{**sample, **self._named(row, sample)} for row in found]

    def _gathered(self) -> dict[Hashable, list[dict[str, Any]]]:
        with self._lock:
            if self._rows is None:
                rows: dict[Hashable, list[dict[str, Any]]] = {}
                for row in started(self._plan, self._plan.epoch or 0).items():
                    rows.setdefault(hashable(value_of(row, self._field, "join")), []).append(row)
                self._rows = rows
            return self._rows

    def _named(self, row: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
        """The other side's fields, but for the one they are joined on and those of its own kind."""
        own = {name: value for name, value in row.items() if name != self._field and not name.startswith("__")}
        clash = sorted(own.keys() & sample.keys())
        if clash and self._suffix is None:
            raise DataError(f"join: both sides have {', '.join(map(repr, clash))}; give suffix=")
        return {f"{name}{self._suffix}" if name in clash else name: value for name, value in own.items()}


def distinct(items: Iterator[Any], field: str) -> list[Any]:
    """The values of a field, each once, as they come."""
    seen: dict[Hashable, Any] = {}
    for sample in items:
        value = value_of(sample, field, "unique")
        seen.setdefault(hashable(value), value)
    return list(seen.values())


def value_of(sample: Any, field: str, verb: str) -> Any:
    """The value of a sample's field.

    Raises:
        DataError: it has none.
    """
    if not isinstance(sample, dict):
        raise DataError(f"{verb} needs samples with fields, not {type(sample).__name__}")
    if field not in sample:
        have = ", ".join(sorted(map(repr, sample)))
        raise DataError(
            f"{verb}: there is no field {field!r}, only {have}", sample.get("__url__"), sample.get("__key__")
        )
    return sample[field]


def hashable(value: Any) -> Hashable:
    """What stands for a value in a dict: itself, or the same as tuples."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(map(hashable, value))
    if isinstance(value, dict):
        return tuple((name, hashable(one)) for name, one in sorted(value.items()))
    if isinstance(value, float) and value != value:
        return math.nan  # one object, so that all of them are one group
    assert isinstance(value, Hashable)
    return value


def _rank(value: Any) -> tuple[Any, ...]:
    """What values are sorted by: numbers, then others by kind; nothing and NaN at the end."""
    plain = hashable(value)
    if plain is None or plain is math.nan:
        return (2, str(plain), 0)
    if isinstance(plain, bool | int | float):
        return (0, "", plain)
    return (1, type(plain).__name__, tuple(map(_rank, plain)) if isinstance(plain, tuple) else plain)
