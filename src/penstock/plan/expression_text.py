"""Conditions that a user writes as text: parsed, checked, and worked out without running any of it as code.

What can be written: fields by their names, ``_["seg.png"]`` for names that are no words, ``key`` and ``shard``, numbers
and texts, comparisons, ``in``, ``and``, ``or``, ``not``, arithmetic, ``[...]``, ``x if c else y``, and a few functions.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.errors import DataError, PlanError

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
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
_MOST = 2000  # characters of an expression
_LARGEST = 1 << 20  # what a product or a text may grow to: nothing here needs more
_DEPTH = 50


class Fielded(Protocol):
    """What an expression is worked out on: one sample."""

    @property
    def key(self) -> str: ...

    @property
    def shard(self) -> str: ...

    @property
    def kind(self) -> tuple[str, ...]: ...

    def value(self, field: str) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class TextExpression:
    """A condition on a sample, as text: ``cls == 3 and "dog" in txt``.

    A field is a whole number where it is called ``cls``, ``index`` or ``count``; what its JSON says where it is called
    ``json``; its text (without the newline at its end) where it is UTF-8; else its bytes. One that a sample does not
    have is ``None``, which is neither less nor more than anything. ``size("jpg")`` is how many bytes a field has,
    ``has("jpg")`` whether there is one.

    Raises:
        PlanError: It is no expression, or has parts that are not allowed.
    """

    text: str
    _tree: ast.expr = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.text) > _MOST:
            raise PlanError(f"the expression has {len(self.text):,} characters, more than {_MOST:,}")
        try:
            tree = ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
            raise PlanError(f"{self.text!r} is no expression: {getattr(exc, 'msg', exc)}") from exc
        _check(tree, self.text, 0)
        object.__setattr__(self, "_tree", tree)

    def of(self, sample: Fielded) -> Any:
        """Work it out on a sample.

        Raises:
            DataError: It has no value there: a text compared with a number, a division by zero.
        """
        try:
            return _value(self._tree, sample)
        except DataError:
            raise
        except Exception as exc:  # whatever its operators raise: the values are the user's
            problem = f"{self.text!r} has no value here: {type(exc).__name__}: {exc}"
            raise DataError(problem, sample.shard, sample.key) from exc


def decoded(name: str, data: bytes | None) -> Any:
    """The value of a field by its name and content, as :class:`TextExpression` says.

    Raises:
        ValueError: It is not what its name says.
    """
    if data is None:
        return None
    last = name.rpartition(".")[2]
    if last in ("cls", "cls2", "class", "count", "index", "inx", "id"):
        text = data.decode("utf-8", "replace").strip()
        try:
            return int(text)
        except ValueError:
            return text
    if last in ("json", "jsn"):
        return json.loads(data)
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError:
        return data


def _check(node: ast.AST, text: str, depth: int) -> None:
    if depth > _DEPTH:
        raise PlanError(f"{text!r} is nested too deeply")
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
        allowed = all(type(op) in _COMPARE for op in node.ops)
    elif isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and (node.func.id in _FUNCTIONS or node.func.id in ("size", "has"))
        allowed = known and not node.keywords
    elif isinstance(node, ast.Subscript):
        allowed = not isinstance(node.slice, ast.Slice)
    if not allowed:
        raise PlanError(f"{text!r}: {_spelled(node)} is not allowed here")
    inside = node.args if isinstance(node, ast.Call) else [n for n in ast.iter_child_nodes(node) if _is_value(n)]
    for child in inside:
        _check(child, text, depth + 1)


def _is_value(node: ast.AST) -> bool:
    return not isinstance(node, ast.expr_context | ast.operator | ast.cmpop | ast.boolop | ast.unaryop)


def _spelled(node: ast.AST) -> str:
    try:
        return repr(ast.unparse(node))
    except Exception:  # a node that stands for nothing written
        return type(node).__name__


def _value(node: ast.AST, sample: Fielded) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _named(node.id, sample)
    if isinstance(node, ast.BoolOp):
        return _either(node, sample)
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_value(node.operand, sample))
    if isinstance(node, ast.BinOp):
        return _worked_out(_ARITHMETIC[type(node.op)], _value(node.left, sample), _value(node.right, sample))
    if isinstance(node, ast.Compare):
        return _compared(node, sample)
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, sample) else node.orelse, sample)
    if isinstance(node, ast.Subscript):
        return _part(node, sample)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(one, sample) for one in node.elts]
    assert isinstance(node, ast.Call)
    return _called(node, sample)


def _named(name: str, sample: Fielded) -> Any:
    if name in ("key", "__key__") and name not in sample.kind:
        return sample.key
    if name in ("shard", "__url__") and name not in sample.kind:
        return sample.shard
    return decoded(name, sample.value(name))


def _either(node: ast.BoolOp, sample: Fielded) -> Any:
    wanted = isinstance(node.op, ast.Or)
    value: Any = None
    for one in node.values:
        value = _value(one, sample)
        if bool(value) == wanted:
            return value
    return value


def _worked_out(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Do arithmetic, unless its result could fill the memory."""
    if function is operator.mod and isinstance(left, str | bytes):
        raise TypeError("a text has no remainder")
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | bytes | list) and isinstance(other, int) and len(one) * other > _LARGEST:
            raise ValueError("the result would be too large")
        if isinstance(one, int) and abs(one) > 1 << 200:
            raise ValueError("the number is too large")
    return function(left, right)


def _compared(node: ast.Compare, sample: Fielded) -> bool:
    left = _value(node.left, sample)
    for op, other in zip(node.ops, node.comparators, strict=True):
        right = _value(other, sample)
        missing = left is None or right is None
        equal = isinstance(op, ast.Eq | ast.NotEq)
        if missing and not equal:
            return False
        if not _COMPARE[type(op)](left, right):
            return False
        left = right
    return True


def _part(node: ast.Subscript, sample: Fielded) -> Any:
    inside = _value(node.slice, sample)
    if isinstance(node.value, ast.Name) and node.value.id == "_" and "_" not in sample.kind:
        return _named(str(inside), sample)
    whole = _value(node.value, sample)
    if isinstance(whole, Mapping):
        return whole.get(inside)
    return None if whole is None else whole[inside]


def _called(node: ast.Call, sample: Fielded) -> Any:
    assert isinstance(node.func, ast.Name)
    values = [_value(one, sample) for one in node.args]
    if node.func.id in ("size", "has"):
        data = sample.value(str(values[0]))
        return data is not None if node.func.id == "has" else len(data or b"")
    return _FUNCTIONS[node.func.id](*values)
