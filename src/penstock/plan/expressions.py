"""Expressions and conditions on fields: ``ps.col("price") * 2 + 1``, ``ps.col("label") == 3``.

Unlike a function, an expression can be evaluated on whole columns, and a condition lets a source skip rows. As in SQL,
an expression of a missing value (``None``) is missing, and a comparison with one is neither true nor false.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import DataError, PlanError
from penstock.plan.block import Block, Context, Place
from penstock.plan.columns import Columns
from penstock.plan.stage import Filter, Map, MissingField, sample_error
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
    """A value computed from the fields of a sample; combine with ``+ - * / // % **``, compare for a condition."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    @abstractmethod
    def of(self, sample: Mapping[str, Any]) -> Any:
        """Return the value of the expression for a sample."""

    @abstractmethod
    def fields(self) -> frozenset[str]:
        """Return the names of the fields that it uses."""

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

    def __rpow__(self, other: Any) -> Expression:
        return Arithmetic("**", expression(other), self)

    def __neg__(self) -> Expression:
        return Arithmetic("*", Constant(-1), self)

    def __bool__(self) -> bool:
        raise PlanError(f"{self} is neither true nor false: it is evaluated for each sample")

    def _compared(self, op: str, value: Any) -> Condition:
        if value is None or isinstance(value, Condition):
            hint = "use is_null() of a field" if value is None else "a condition is not a value"
            raise PlanError(f"{self} {op} {value!r}: {hint}")
        return CompareExpressions(self, op, expression(value))

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


def _literal(value: Any) -> str:
    """Return code for a value; ``repr`` alone returns none for infinity and NaN."""
    return f"float('{value}')" if type(value) is float and not math.isfinite(value) else repr(value)


def expression(value: Any) -> Expression:
    """Return ``value`` as an expression: unchanged, or as a constant."""
    return value if isinstance(value, Expression) else Constant(value)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Constant(Expression):
    """The same value for every sample."""

    value: Any

    def __repr__(self) -> str:
        return _literal(self.value)

    def of(self, sample: Mapping[str, Any]) -> Any:
        return self.value

    def fields(self) -> frozenset[str]:
        return frozenset()


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Arithmetic(Expression):
    """An arithmetic operation on two expressions."""

    op: str
    left: Expression
    right: Expression

    def __repr__(self) -> str:
        return f"({self.left} {self.op} {self.right})"

    def of(self, sample: Mapping[str, Any]) -> Any:
        left, right = self.left.of(sample), self.right.of(sample)
        return None if left is None or right is None else OPERATORS[self.op](left, right)

    def fields(self) -> frozenset[str]:
        return self.left.fields() | self.right.fields()


@dataclass(frozen=True)
class WithColumns(Map):
    """``with_columns(b=ps.col("a") * 2)``: adds fields, or replaces them."""

    named: ByObject  # a dict of name -> Expression or function of the sample

    @property
    def name(self) -> str:
        return "with_columns"

    def describe(self) -> str:
        shown = (
            f"{name}={value if isinstance(value, Expression) else name_of(value)}" for name, value in self._columns()
        )
        return f"with_columns({', '.join(shown)})"

    def _columns(self) -> list[tuple[str, Any]]:
        return list(self.named.value.items())

    def needs(self, after: Fields) -> Fields:
        if any(not isinstance(value, Expression) for _, value in self._columns()):
            return Fields()
        used = {name for _, value in self._columns() for name in value.fields()}
        return after.without(name for name, _ in self._columns()).with_(used)

    @property
    def named_fields(self) -> tuple[tuple[str, ...], ...]:
        expressions = (value for _, value in self._columns() if isinstance(value, Expression))
        return tuple((name,) for value in expressions for name in sorted(value.fields()))

    def names_after(self, names: frozenset[str]) -> frozenset[str]:
        return names.union(name for name, _ in self._columns())

    def failure(self, exc: Exception, place: Place) -> Exception:
        return sample_error(exc.problem, place, exc) if isinstance(exc, DataError) else super().failure(exc, place)

    def function(self, ctx: Context) -> Callable[..., Any]:
        columns = self._columns()

        def add_columns(sample: Any) -> dict[str, Any]:
            if not isinstance(sample, dict):
                raise DataError(f"with_columns needs samples with fields, not {type(sample).__name__}")
            values = {
                name: column.of(sample) if isinstance(column, Expression) else column(sample)
                for name, column in columns
            }
            return {**sample, **values}

        return add_columns

    def run(self, block: Block, ctx: Context) -> Block:
        """Compute whole columns if possible, otherwise sample by sample."""
        if isinstance(block.items, Columns) and all(isinstance(value, Expression) for _, value in self._columns()):
            computed = block.items.computed(dict(self._columns()))
            if computed is not None:
                return block.with_items(computed)
        return super().run(block, ctx)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Extent(NamedTuple):
    """What is known about the values of a field over many rows; ``None``: unknown."""

    low: Any = None
    high: Any = None
    nulls: int | None = None
    rows: int = 0


class Condition(ABC):
    """A condition on the fields of a sample; combine with ``&``, ``|`` and ``~``."""

    @abstractmethod
    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        """Return whether the condition holds for a sample; ``None`` if a missing value makes it undecidable."""

    @abstractmethod
    def fields(self) -> frozenset[str]:
        """Return the names of the fields that it uses."""

    @abstractmethod
    def defined_for(self, kinds: Mapping[str, type | None]) -> bool:
        """Return whether evaluating the condition cannot fail for fields of these types; if in doubt, False.

        Args:
            kinds: For each field, ``float`` (any number), ``str`` or ``bytes``; ``None``: any other type.
        """

    @abstractmethod
    def possible(self, extents: Mapping[str, Extent], outcome: bool = True) -> bool:
        """Return whether the condition may have this ``outcome`` for at least one of many rows; if in doubt, True.

        Raises:
            TypeError: A value cannot be compared with the values of its field.
        """

    def __and__(self, other: Condition) -> Condition:
        return Both(self, _condition(other))

    def __or__(self, other: Condition) -> Condition:
        return Either(self, _condition(other))

    def __invert__(self) -> Condition:
        return Not(self)

    def __bool__(self) -> bool:
        raise PlanError(
            f"{self} is neither true nor false: combine conditions with &, | and ~, not with and, or and not"
        )


def _condition(value: Any) -> Condition:
    if not isinstance(value, Condition):
        raise PlanError(f"& and | combine conditions such as (ps.col('x') > 3), not {value!r}; check the parentheses")
    return value


def _operand(condition: Condition) -> str:
    """Return code for a condition as an operand of ``&``, ``|`` and ``~``, which bind tighter than comparisons."""
    return f"({condition})" if isinstance(condition, Compare | CompareExpressions | Both | Either) else repr(condition)


@dataclass(frozen=True, slots=True, repr=False)
class Compare(Condition):
    """A comparison of a field with a value."""

    field: str
    op: str
    value: Any

    def __repr__(self) -> str:
        return f"col({self.field!r}) {self.op} {_literal(self.value)}"

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        value = _field_value(sample, self.field)
        return None if value is None else bool(_COMPARISONS[self.op](value, self.value))

    def fields(self) -> frozenset[str]:
        return frozenset((self.field,))

    def defined_for(self, kinds: Mapping[str, type | None]) -> bool:
        kind = kinds[self.field]
        return kind is not None and isinstance(self.value, int | float | np.number if kind is float else kind)

    def possible(self, extents: Mapping[str, Extent], outcome: bool = True) -> bool:
        extent = extents.get(self.field, Extent())
        if extent.rows and extent.nulls == extent.rows:
            return False
        if extent.low is None or extent.high is None:
            return True
        if isinstance(extent.low, float) and (self.op == "!=") == outcome:
            return True  # bounds do not cover NaN, which differs from every value
        return _range_may_match(self.op if outcome else _NEGATED[self.op], extent.low, extent.high, self.value)


_NEGATED = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


def _range_may_match(op: str, low: Any, high: Any, value: Any) -> bool:
    """Return whether some value between two bounds may satisfy the comparison."""
    if op == "==":
        return bool(low <= value) and bool(value <= high)
    if op == "!=":
        return not (bool(low == value) and bool(high == value))
    return bool(_COMPARISONS[op](low if op in ("<", "<=") else high, value))


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class CompareExpressions(Condition):
    """A comparison of two expressions, which is evaluated sample by sample."""

    left: Expression
    op: str
    right: Expression

    def __repr__(self) -> str:
        return f"{self.left} {self.op} {self.right}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompareExpressions) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        left, right = self.left.of(sample), self.right.of(sample)
        return None if left is None or right is None else bool(_COMPARISONS[self.op](left, right))

    def fields(self) -> frozenset[str]:
        return self.left.fields() | self.right.fields()

    def defined_for(self, kinds: Mapping[str, type | None]) -> bool:
        return False

    def possible(self, extents: Mapping[str, Extent], outcome: bool = True) -> bool:
        return True


@dataclass(frozen=True, slots=True, repr=False)
class IsIn(Condition):
    """A field whose value is one of several."""

    field: str
    values: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"col({self.field!r}).isin([{', '.join(map(_literal, self.values))}])"

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        value = _field_value(sample, self.field)
        return None if value is None else bool(value in self.values)

    def fields(self) -> frozenset[str]:
        return frozenset((self.field,))

    def defined_for(self, kinds: Mapping[str, type | None]) -> bool:
        plain = (int, float, np.number, str, bytes)
        return kinds[self.field] is not None and all(isinstance(value, plain) for value in self.values)

    def possible(self, extents: Mapping[str, Extent], outcome: bool = True) -> bool:
        if not outcome:
            extent = extents.get(self.field, Extent())
            return not (extent.rows and extent.nulls == extent.rows)
        return any(Compare(self.field, "==", value).possible(extents) for value in self.values)


@dataclass(frozen=True, slots=True, repr=False)
class IsNull(Condition):
    """A field whose value is missing."""

    field: str

    def __repr__(self) -> str:
        return f"col({self.field!r}).is_null()"

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        return _field_value(sample, self.field) is None

    def fields(self) -> frozenset[str]:
        return frozenset((self.field,))

    def defined_for(self, kinds: Mapping[str, type | None]) -> bool:
        return True

    def possible(self, extents: Mapping[str, Extent], outcome: bool = True) -> bool:
        extent = extents.get(self.field, Extent())
        return extent.nulls is None or extent.nulls != (0 if outcome else extent.rows)


@dataclass(frozen=True, slots=True, repr=False)
class Both(Condition):
    """Two conditions that both hold."""

    left: Condition
    right: Condition

    def __repr__(self) -> str:
        return f"{_operand(self.left)} & {_operand(self.right)}"

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        left, right = self.left.holds(sample), self.right.holds(sample)
        return False if left is False or right is False else None if left is None or right is None else True

    def fields(self) -> frozenset[str]:
        return self.left.fields() | self.right.fields()

    def defined_for(self, kinds: Mapping[str, type | None]) -> bool:
        return self.left.defined_for(kinds) and self.right.defined_for(kinds)

    def possible(self, extents: Mapping[str, Extent], outcome: bool = True) -> bool:
        sides = (side.possible(extents, outcome) for side in (self.left, self.right))
        return all(sides) if outcome else any(sides)


@dataclass(frozen=True, slots=True, repr=False)
class Either(Condition):
    """Two conditions of which at least one holds."""

    left: Condition
    right: Condition

    def __repr__(self) -> str:
        return f"{_operand(self.left)} | {_operand(self.right)}"

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        left, right = self.left.holds(sample), self.right.holds(sample)
        return True if left or right else None if left is None or right is None else False

    def fields(self) -> frozenset[str]:
        return self.left.fields() | self.right.fields()

    def defined_for(self, kinds: Mapping[str, type | None]) -> bool:
        return self.left.defined_for(kinds) and self.right.defined_for(kinds)

    def possible(self, extents: Mapping[str, Extent], outcome: bool = True) -> bool:
        sides = (side.possible(extents, outcome) for side in (self.left, self.right))
        return any(sides) if outcome else all(sides)


@dataclass(frozen=True, slots=True, repr=False)
class Not(Condition):
    """The negation of a condition."""

    inner: Condition

    def __repr__(self) -> str:
        return f"~{_operand(self.inner)}"

    def holds(self, sample: Mapping[str, Any]) -> bool | None:
        holds = self.inner.holds(sample)
        return None if holds is None else not holds

    def fields(self) -> frozenset[str]:
        return self.inner.fields()

    def defined_for(self, kinds: Mapping[str, type | None]) -> bool:
        return self.inner.defined_for(kinds)

    def possible(self, extents: Mapping[str, Extent], outcome: bool = True) -> bool:
        return self.inner.possible(extents, not outcome)


def _field_value(sample: Mapping[str, Any], field: str, user: object = "filter") -> Any:
    if not isinstance(sample, Mapping):
        raise DataError(f"{user} needs a sample with fields, not {type(sample).__name__}")
    if field not in sample:
        raise MissingField.of(str(user), (field,), sample)
    return sample[field]


class Column(Expression):
    """A field by name."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"col({self._name!r})"

    def of(self, sample: Mapping[str, Any]) -> Any:
        return _field_value(sample, self._name, self)

    def fields(self) -> frozenset[str]:
        return frozenset((self._name,))

    def _compared(self, op: str, value: Any) -> Condition:
        if value is None or isinstance(value, Expression | Condition):
            return super()._compared(op, value)
        return Compare(self._name, op, value)

    def isin(self, values: Iterable[Any]) -> Condition:
        """Return the condition that the value is one of ``values``; NaN equals none of them.

        Raises:
            PlanError: ``values`` is not a list of values, or contains ``None``.
        """
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise PlanError(f"col({self._name!r}).isin({values!r}): expected a list of values")
        candidates = tuple(values)
        if any(value is None for value in candidates):
            raise PlanError(
                f"col({self._name!r}).isin: None is not a value; add | ps.col({self._name!r}).is_null() instead"
            )
        kept = (value for value in candidates if not (isinstance(value, float | np.floating) and value != value))
        return IsIn(self._name, tuple(kept))

    def is_null(self) -> Condition:
        """Return the condition that the value is missing."""
        return IsNull(self._name)


def col(name: str) -> Column:
    """Return a field by name, for use in conditions and expressions.

    For example ``ds.filter((ps.col("label") == 3) & ~ps.col("text").is_null())``.

    Raises:
        PlanError: ``name`` is empty or not a string.
    """
    if not isinstance(name, str) or not name:
        raise PlanError(f"col({name!r}): expected the name of a field")
    return Column(name)


@dataclass(frozen=True)
class ConditionFilter(Filter):
    """``filter(ps.col("label") == 3)``: keeps the samples that meet a condition."""

    optional_fields = True

    condition: Condition

    @property
    def name(self) -> str:
        return "filter"

    def describe(self) -> str:
        return f"filter({self.condition})"

    def needs(self, after: Fields) -> Fields:
        return after.with_(self.condition.fields())

    @property
    def named_fields(self) -> tuple[tuple[str, ...], ...]:
        return tuple((name,) for name in sorted(self.condition.fields()))

    def failure(self, exc: Exception, place: Place) -> Exception:
        return sample_error(exc.problem if isinstance(exc, DataError) else f"{self.describe()}: {exc}", place, exc)

    def function(self, ctx: Context) -> Callable[..., Any]:
        return self.condition.holds

    def run(self, block: Block, ctx: Context) -> Block:
        """Evaluate the condition on whole columns if possible, otherwise sample by sample."""
        items = block.items
        if not isinstance(items, Columns):
            return super().run(block, ctx)
        mask = items.mask(self.condition)
        if mask is None:
            return super().run(block, ctx)
        kept = np.flatnonzero(mask)
        return block.keep(kept, items.pick(kept))
