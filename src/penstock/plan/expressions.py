"""Values made of fields, said as values: ``ps.col("price") * 2 + 1``. Columns can answer them at once, a function not.

A missing value makes the whole a missing value, as in SQL. Numbers are those of Python: whole ones have no bound, and
``/`` gives a number with a fraction.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import DataError, PlanError
from penstock.plan.block import Block, Context, Place
from penstock.plan.columns import Columns
from penstock.plan.stage import Map, fault
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
        return after.but(name for name, _ in self._all()).also(looked)

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
