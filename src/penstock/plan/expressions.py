"""Values and conditions made of fields: ``ps.col("price") * 2 + 1``, ``ps.col("label") == 3``.

Columns can answer an expression at once and sources can use a condition to skip rows; a function they can only call.
A missing value (``None``) makes an expression a missing value and a comparison neither true nor false, as in SQL."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import DataError, PlanError
from penstock.plan.block import Block, Context, Place
from penstock.plan.columns import Columns
from penstock.plan.stage import Filter, Map, fault
from penstock.plan.values import ByObject, Fields, name_of

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}


class Expression(ABC):
    """A value made of the fields of a sample; ``+ - * / // % **`` make further ones."""

    __slots__ = ()

    @abstractmethod
    def of(self, sample: Mapping[str, Any]) -> Any:
        """Its value for a sample."""

    @abstractmethod
    def fields(self) -> frozenset[str]:
        """The fields it looks at."""

    def __add__(self, other: Any) -> Expression:
        return Arithmetic("+", self, expression(other))

    def __radd__(self, other: Any) -> Expression:
        return Arithmetic("+", expression(other), self)

    def __sub__(self, other: Any) -> Expression:
        return Arithmetic("-", self, expression(other))

    def __rsub__(self, other: Any) -> Expression:
        return Arithmetic("-", expression(other), self)

    def __mul__(self, other: Any) -> Expression:
        return Arithmetic("*", self, expression(other))

    def __rmul__(self, other: Any) -> Expression:
        return Arithmetic("*", expression(other), self)

    def __truediv__(self, other: Any) -> Expression:
        return Arithmetic("/", self, expression(other))

    def __rtruediv__(self, other: Any) -> Expression:
        return Arithmetic("/", expression(other), self)

    def __floordiv__(self, other: Any) -> Expression:
        return Arithmetic("//", self, expression(other))

    def __rfloordiv__(self, other: Any) -> Expression:
        return Arithmetic("//", expression(other), self)

    def __mod__(self, other: Any) -> Expression:
        return Arithmetic("%", self, expression(other))

    def __rmod__(self, other: Any) -> Expression:
        return Arithmetic("%", expression(other), self)

    def __pow__(self, other: Any) -> Expression:
        return Arithmetic("**", self, expression(other))

    def __neg__(self) -> Expression:
        return Arithmetic("*", Constant(-1), self)

    def __bool__(self) -> bool:
        raise PlanError(f"{self} is neither true nor false by itself; it has a value for each sample")


def expression(value: Any) -> Expression:
    """The value as an expression: as it is, or a constant."""
    return value if isinstance(value, Expression) else Constant(value)


@dataclass(frozen=True, slots=True, repr=False)
class Constant(Expression):
    """The same value for every sample."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)

    def of(self, sample: Mapping[str, Any]) -> Any:
        return self.value

    def fields(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True, slots=True, repr=False)
class Arithmetic(Expression):
    """Two values and what is done with them."""

    how: str
    left: Expression
    right: Expression

    def __repr__(self) -> str:
        return f"({self.left} {self.how} {self.right})"

    def of(self, sample: Mapping[str, Any]) -> Any:
        left, right = self.left.of(sample), self.right.of(sample)
        return None if left is None or right is None else OPERATORS[self.how](left, right)

    def fields(self) -> frozenset[str]:
        return self.left.fields() | self.right.fields()


@dataclass(frozen=True)
class WithColumns(Map):
    """``with_columns(b=ps.col("a") * 2)``: adds fields, or puts others in their place."""

    named: ByObject  # a dict of name -> Expression, or a function of the sample

    @property
    def name(self) -> str:
        return "with_columns"

    def describe(self) -> str:
        shown = (f"{name}={value if isinstance(value, Expression) else name_of(value)}" for name, value in self._all())
        return f"with_columns({', '.join(shown)})"

    def _all(self) -> list[tuple[str, Any]]:
        return list(self.named.value.items())

    def needs(self, after: Fields) -> Fields:
        """What the expressions look at; all, where there is a function."""
        if any(not isinstance(value, Expression) for _, value in self._all()):
            return Fields()
        looked = {name for _, value in self._all() for name in value.fields()}
        return after.without(name for name, _ in self._all()).with_(looked)

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key, where an expression failed."""
        return fault(exc.problem, place, exc) if isinstance(exc, DataError) else super().failure(exc, place)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Add the fields to one sample."""
        named = self._all()

        def added(sample: Any) -> dict[str, Any]:
            if not isinstance(sample, dict):
                raise DataError(f"with_columns needs samples with fields, not {type(sample).__name__}")
            made = {name: one.of(sample) if isinstance(one, Expression) else one(sample) for name, one in named}
            return {**sample, **made}

        return added

    def run(self, block: Block, ctx: Context) -> Block:
        """Ask the columns at once where there are columns, else every sample."""
        if isinstance(block.items, Columns) and all(isinstance(value, Expression) for _, value in self._all()):
            made = block.items.computed(dict(self._all()))
            if made is not None:
                return block.become(made)
        return super().run(block, ctx)


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Extent(NamedTuple):
    """What is known of the values of a field over many rows; ``None``: not known."""

    low: Any = None
    high: Any = None
    nulls: int | None = None
    rows: int = 0


class Condition(ABC):
    """A condition on the fields of a sample; combine with ``&``, ``|`` and ``~``."""

    @abstractmethod
    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        """Whether it is true of a sample; ``None``: a missing value keeps it from being either."""

    @abstractmethod
    def fields(self) -> frozenset[str]:
        """The fields it looks at."""

    @abstractmethod
    def possible(self, extents: Mapping[str, Extent], wanted: bool = True) -> bool:
        """Whether it may be true (or, not ``wanted``, false) of some of many rows; when in doubt, yes.

        Raises:
            TypeError: a value cannot be compared with those of its field.
        """

    def __and__(self, other: Condition) -> Condition:
        return Both(self, _condition(other))

    def __or__(self, other: Condition) -> Condition:
        return Either(self, _condition(other))

    def __invert__(self) -> Condition:
        return Not(self)

    def __bool__(self) -> bool:
        raise PlanError(f"{self} is neither true nor false by itself; combine conditions with &, | and ~")


def _condition(value: Any) -> Condition:
    if not isinstance(value, Condition):
        raise PlanError(f"& and | join conditions such as ps.col('x') > 3, not {value!r}; mind the parentheses")
    return value


@dataclass(frozen=True, slots=True, repr=False)
class Compare(Condition):
    """A field beside a value."""

    field: str
    how: str
    value: Any

    def __repr__(self) -> str:
        return f"col({self.field!r}) {self.how} {self.value!r}"

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        found = _value(sample, self.field)
        return None if found is None else bool(_COMPARE[self.how](found, self.value))

    def fields(self) -> frozenset[str]:
        return frozenset((self.field,))

    def possible(self, extents: Mapping[str, Extent], wanted: bool = True) -> bool:
        known = extents.get(self.field, Extent())
        if known.rows and known.nulls == known.rows:
            return False
        if known.low is None or known.high is None:
            return True
        if isinstance(known.low, float) and (self.how == "!=") == wanted:
            return True  # bounds say nothing of NaN, which differs from every value
        return _may(self.how if wanted else _OPPOSITE[self.how], known.low, known.high, self.value)


_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


def _may(how: str, low: Any, high: Any, value: Any) -> bool:
    """Whether a value between two bounds may compare so."""
    if how == "==":
        return bool(low <= value) and bool(value <= high)
    if how == "!=":
        return not (bool(low == value) and bool(high == value))
    return bool(_COMPARE[how](low if how in ("<", "<=") else high, value))


@dataclass(frozen=True, slots=True, repr=False)
class IsIn(Condition):
    """A field whose value is one of some."""

    field: str
    values: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"col({self.field!r}).isin({list(self.values)!r})"

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        found = _value(sample, self.field)
        return None if found is None else bool(found in self.values)

    def fields(self) -> frozenset[str]:
        return frozenset((self.field,))

    def possible(self, extents: Mapping[str, Extent], wanted: bool = True) -> bool:
        if not wanted:
            known = extents.get(self.field, Extent())
            return not (known.rows and known.nulls == known.rows)
        return any(Compare(self.field, "==", value).possible(extents) for value in self.values)


@dataclass(frozen=True, slots=True, repr=False)
class IsNull(Condition):
    """A field whose value is missing."""

    field: str

    def __repr__(self) -> str:
        return f"col({self.field!r}).is_null()"

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        return _value(sample, self.field) is None

    def fields(self) -> frozenset[str]:
        return frozenset((self.field,))

    def possible(self, extents: Mapping[str, Extent], wanted: bool = True) -> bool:
        known = extents.get(self.field, Extent())
        return known.nulls is None or known.nulls != (0 if wanted else known.rows)


@dataclass(frozen=True, slots=True, repr=False)
class Both(Condition):
    """Two conditions, of which both are true."""

    left: Condition
    right: Condition

    def __repr__(self) -> str:
        return f"({self.left} & {self.right})"

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        left, right = self.left.holds(sample), self.right.holds(sample)
        return False if left is False or right is False else None if left is None or right is None else True

    def fields(self) -> frozenset[str]:
        return self.left.fields() | self.right.fields()

    def possible(self, extents: Mapping[str, Extent], wanted: bool = True) -> bool:
        each = (side.possible(extents, wanted) for side in (self.left, self.right))
        return all(each) if wanted else any(each)


@dataclass(frozen=True, slots=True, repr=False)
class Either(Condition):
    """Two conditions, of which one is true."""

    left: Condition
    right: Condition

    def __repr__(self) -> str:
        return f"({self.left} | {self.right})"

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        left, right = self.left.holds(sample), self.right.holds(sample)
        return True if left or right else None if left is None or right is None else False

    def fields(self) -> frozenset[str]:
        return self.left.fields() | self.right.fields()

    def possible(self, extents: Mapping[str, Extent], wanted: bool = True) -> bool:
        each = (side.possible(extents, wanted) for side in (self.left, self.right))
        return any(each) if wanted else all(each)


@dataclass(frozen=True, slots=True, repr=False)
class Not(Condition):
    """A condition that is false."""

    inner: Condition

    def __repr__(self) -> str:
        return f"~({self.inner})"

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        found = self.inner.holds(sample)
        return None if found is None else not found

    def fields(self) -> frozenset[str]:
        return self.inner.fields()

    def possible(self, extents: Mapping[str, Extent], wanted: bool = True) -> bool:
        return self.inner.possible(extents, not wanted)


def field_missing(sample: Any, field: str) -> bool:
    """Whether a sample has no such field."""
    return not isinstance(sample, Mapping) or field not in sample


def _value(sample: Mapping[str, Any], field: str) -> Any:
    if not isinstance(sample, Mapping):
        raise DataError(f"filter needs a sample with fields, not {type(sample).__name__}")
    if field not in sample:
        raise DataError(f"filter: the sample has no field {field!r}")
    return sample[field]


class Column(Expression):
    """A field by name; comparing it gives a condition, calculating with it an expression."""

    __slots__ = ("_name",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"col({self._name!r})"

    def of(self, sample: Mapping[str, Any]) -> Any:
        """The value of the field."""
        if field_missing(sample, self._name):
            raise DataError(f"col({self._name!r}): the sample has no such field")
        return sample[self._name]

    def fields(self) -> frozenset[str]:
        """The field."""
        return frozenset((self._name,))

    def _compared(self, how: str, value: Any) -> Condition:
        if value is None or isinstance(value, Expression | Condition):
            hint = "use is_null()" if value is None else "compare a field with a value"
            raise PlanError(f"col({self._name!r}) {how} {value!r}: {hint}")
        return Compare(self._name, how, value)

    def __eq__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compared("==", value)

    def __ne__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compared("!=", value)

    def __lt__(self, value: Any) -> Condition:
        return self._compared("<", value)

    def __le__(self, value: Any) -> Condition:
        return self._compared("<=", value)

    def __gt__(self, value: Any) -> Condition:
        return self._compared(">", value)

    def __ge__(self, value: Any) -> Condition:
        return self._compared(">=", value)

    def isin(self, values: Iterable[Any]) -> Condition:
        """True where the value is one of ``values``.

        Raises:
            PlanError: they are no list of values, or one of them is ``None``.
        """
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise PlanError(f"col({self._name!r}).isin({values!r}): give a list of values")
        given = tuple(values)
        if any(value is None for value in given):
            raise PlanError(f"col({self._name!r}).isin: None is no value; add | ps.col({self._name!r}).is_null()")
        return IsIn(self._name, given)

    def is_null(self) -> Condition:
        """True where there is no value."""
        return IsNull(self._name)


def col(name: str) -> Column:
    """Name a field for a condition: ``ds.filter((ps.col("label") == 3) & ~ps.col("text").is_null())``.

    Raises:
        PlanError: ``name`` is no name.
    """
    if not isinstance(name, str) or not name:
        raise PlanError(f"col({name!r}): give the name of a field")
    return Column(name)


@dataclass(frozen=True)
class ConditionFilter(Filter):
    """``filter(ps.col("label") == 3)``: keeps the samples that fulfil a condition."""

    condition: Condition

    @property
    def name(self) -> str:
        return "filter"

    def describe(self) -> str:
        return f"filter({self.condition})"

    def needs(self, after: Fields) -> Fields:
        """The fields that decide, too."""
        return after.with_(self.condition.fields())

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key."""
        return fault(exc.problem if isinstance(exc, DataError) else f"{self.describe()}: {exc}", place, exc)

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Ask one sample."""
        return self.condition.holds

    def run(self, block: Block, ctx: Context) -> Block:
        """Ask the columns at once where there are columns, else every sample."""
        items = block.items
        if not isinstance(items, Columns):
            return super().run(block, ctx)
        if (there := items.present()) is not None:
            items = items.pick(there)
            block = block.keep(there, items)
        mask = items.mask(self.condition)
        if mask is None:
            return super().run(block, ctx)
        kept = np.flatnonzero(mask)
        return block.keep(kept, items.pick(kept))
