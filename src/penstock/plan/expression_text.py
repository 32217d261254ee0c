"""Conditions written as text, for the command-line tools: parsed, checked and interpreted, never executed as code.

Supported: fields by name, ``_["seg.png"]`` for names that are not identifiers, ``key`` and ``shard``, numbers and
strings, comparisons, ``in``, ``and``, ``or``, ``not``, arithmetic, ``[...]``, ``x if c else y``, and a few functions.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.errors import DataError, PlanError

_AST_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "float": float,
    "int": int,
    "len": len,
    "lower": lambda text: text.lower(),
    "max": max,
    "min": min,
    "str": str,
    "startswith": lambda text, start: text.startswith(start),
    "endswith": lambda text, end: text.endswith(end),
    "upper": lambda text: text.upper(),
}
_MAX_LENGTH = 2000  # characters
_MAX_RESULT = 1 << 20  # elements of a repeated string or list: no condition needs more
_MAX_DEPTH = 50  # of nested operations


class SampleFields(Protocol):
    """The sample that an expression is evaluated on."""

    @property
    def key(self) -> str: ...

    @property
    def shard(self) -> str: ...

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names of its fields."""

    def value(self, field: str) -> Any:
        """Return the bytes of a field, or the value that a table holds; ``None`` if the sample does not have it."""


@dataclass(frozen=True, slots=True)
class TextExpression:
    """A condition on a sample, as text: ``cls == 3 and "dog" in txt``.

    The value of a field depends on its name and content: an integer if it is called ``cls``, ``index`` or ``count``,
    the parsed JSON if it is called ``json``, otherwise text without the trailing newline if it is UTF-8, else bytes. A
    field that the sample does not have is ``None``; every comparison of ``None`` except ``==`` and ``!=`` is false.
    ``size("jpg")`` is the size of a field in bytes, ``has("jpg")`` whether the sample has it.

    Raises:
        PlanError: ``text`` is not an expression, or contains something that is not allowed.
    """

    text: str
    _tree: ast.expr = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.text) > _MAX_LENGTH:
            raise PlanError(f"the expression has {len(self.text):,} characters; the limit is {_MAX_LENGTH:,}")
        try:
            tree = ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
            hint = "; a comparison is written ==" if re.search(r"[^=!<>]=(?!=)", self.text) else ""
            raise PlanError(f"{self.text!r} is not an expression: {getattr(exc, 'msg', exc)}{hint}") from exc
        _check(tree, self.text, 0)
        object.__setattr__(self, "_tree", tree)

    def fields(self) -> frozenset[str]:
        """Return the fields that the expression uses, except those that it only tests with ``has``."""
        return frozenset(_fields_in(self._tree)) - {"key", "shard"}

    def of(self, sample: SampleFields) -> Any:
        """Return the value of the expression for a sample.

        Raises:
            DataError: The evaluation fails, for example by comparing text with a number or dividing by zero.
        """
        try:
            return _evaluate(self._tree, sample)
        except DataError:
            raise
        except Exception as exc:  # operators may raise anything: the values come from the data
            problem = f"{self.text!r} cannot be evaluated: {type(exc).__name__}: {exc}"
            raise DataError(problem, sample.shard, sample.key) from exc


def decode_field(name: str, data: Any) -> Any:
    """Return the value of a field by its name and content, as described in :class:`TextExpression`.

    A value that is not bytes, as tables hold them, is returned as it is.

    Raises:
        ValueError: The field is called ``json`` and is not JSON.
    """
    if not isinstance(data, bytes):
        return data
    extension = name.rpartition(".")[2]
    if extension in ("cls", "cls2", "class", "count", "index", "inx", "id"):
        text = data.decode("utf-8", "replace").strip()
        try:
            return int(text)
        except ValueError:
            return text
    if extension in ("json", "jsn"):
        return json.loads(data)
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError:
        return data


def _check(node: ast.AST, text: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise PlanError(f"{text!r} is nested too deeply; the limit is {_MAX_DEPTH} levels")
    allowed = isinstance(
        node,
        ast.Name
        | ast.BoolOp
        | ast.UnaryOp
        | ast.BinOp
        | ast.Compare
        | ast.IfExp
        | ast.Subscript
        | ast.List
        | ast.Tuple
        | ast.Set
        | ast.Call
        | ast.Constant,
    )
    if isinstance(node, ast.Constant):
        allowed = isinstance(node.value, str | bytes | int | float | bool | None)
    elif isinstance(node, ast.UnaryOp):
        allowed = type(node.op) in _UNARY
    elif isinstance(node, ast.BinOp):
        allowed = type(node.op) in _ARITHMETIC
    elif isinstance(node, ast.Compare):
        allowed = all(type(op) in _AST_COMPARISONS for op in node.ops)
    elif isinstance(node, ast.Call):
        known_function = isinstance(node.func, ast.Name) and (
            node.func.id in _FUNCTIONS or node.func.id in ("size", "has")
        )
        allowed = known_function and not node.keywords
    elif isinstance(node, ast.Subscript):
        allowed = not isinstance(node.slice, ast.Slice)
    if not allowed:
        raise PlanError(f"{text!r}: {_source_text(node)} is not allowed in an expression")
    operands = node.args if isinstance(node, ast.Call) else [n for n in ast.iter_child_nodes(node) if _is_operand(n)]
    for child in operands:
        _check(child, text, depth + 1)


def _fields_in(node: ast.AST) -> Iterator[str]:
    """Yield the names of the fields that an expression reads."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("size", "has"):
        if node.func.id == "size":
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "_":
        if isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)
    elif isinstance(node, ast.Name):
        yield node.id
    else:
        operands = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
        for child in operands:
            yield from _fields_in(child)


def _is_operand(node: ast.AST) -> bool:
    return not isinstance(node, ast.expr_context | ast.operator | ast.cmpop | ast.boolop | ast.unaryop)


def _source_text(node: ast.AST) -> str:
    try:
        return repr(ast.unparse(node))
    except Exception:  # a node without a source text
        return type(node).__name__


def _evaluate(node: ast.AST, sample: SampleFields) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _evaluate_name(node.id, sample)
    if isinstance(node, ast.BoolOp):
        return _evaluate_bool(node, sample)
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_evaluate(node.operand, sample))
    if isinstance(node, ast.BinOp):
        return _evaluate_arithmetic(
            _ARITHMETIC[type(node.op)], _evaluate(node.left, sample), _evaluate(node.right, sample)
        )
    if isinstance(node, ast.Compare):
        return _evaluate_comparison(node, sample)
    if isinstance(node, ast.IfExp):
        return _evaluate(node.body if _evaluate(node.test, sample) else node.orelse, sample)
    if isinstance(node, ast.Subscript):
        return _evaluate_subscript(node, sample)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_evaluate(element, sample) for element in node.elts]
    assert isinstance(node, ast.Call)
    return _evaluate_call(node, sample)


def _evaluate_name(name: str, sample: SampleFields) -> Any:
    if name in ("key", "__key__") and name not in sample.field_names:
        return sample.key
    if name in ("shard", "__url__") and name not in sample.field_names:
        return sample.shard
    return decode_field(name, sample.value(name))


def _evaluate_bool(node: ast.BoolOp, sample: SampleFields) -> Any:
    deciding = isinstance(node.op, ast.Or)
    value: Any = None
    for operand in node.values:
        value = _evaluate(operand, sample)
        if bool(value) == deciding:
            return value
    return value


def _evaluate_arithmetic(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Return the result of an operation, unless it could exhaust the memory.

    Raises:
        TypeError: ``%`` is applied to text.
        ValueError: An operand or the result is too large.
    """
    if function is operator.mod and isinstance(left, str | bytes):
        raise TypeError("% is not supported for text")
    for operand, other in ((left, right), (right, left)):
        if isinstance(operand, str | bytes | list) and isinstance(other, int) and len(operand) * other > _MAX_RESULT:
            raise ValueError("the result would be too large")
        if isinstance(operand, int) and abs(operand) > 1 << 200:
            raise ValueError("the number is too large")
    return function(left, right)


def _evaluate_comparison(node: ast.Compare, sample: SampleFields) -> bool:
    left = _evaluate(node.left, sample)
    for op, other in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(other, sample)
        missing = left is None or right is None
        tests_equality = isinstance(op, ast.Eq | ast.NotEq)
        if missing and not tests_equality:
            return False
        if not _AST_COMPARISONS[type(op)](left, right):
            return False
        left = right
    return True


def _evaluate_subscript(node: ast.Subscript, sample: SampleFields) -> Any:
    index = _evaluate(node.slice, sample)
    if isinstance(node.value, ast.Name) and node.value.id == "_" and "_" not in sample.field_names:
        return _evaluate_name(str(index), sample)
    container = _evaluate(node.value, sample)
    if isinstance(container, Mapping):
        return container.get(index)
    return None if container is None else container[index]


def _evaluate_call(node: ast.Call, sample: SampleFields) -> Any:
    assert isinstance(node.func, ast.Name)
    arguments = [_evaluate(argument, sample) for argument in node.args]
    if node.func.id in ("size", "has"):
        data = sample.value(str(arguments[0]))
        return data is not None if node.func.id == "has" else len(data or b"")
    return _FUNCTIONS[node.func.id](*arguments)
