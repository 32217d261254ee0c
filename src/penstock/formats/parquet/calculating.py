"""Expressions on Arrow columns: what Python gives of every row, or nothing where Arrow would give something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.plan.expressions import Arithmetic, Constant, Expression
from penstock.plan.where import Column

_EXACT = 1 << 53  # whole numbers up to here are exact in floating point
_CHECKED = {"+": "add_checked", "-": "subtract_checked", "*": "multiply_checked"}


def calculated(given: Expression, arrays: Mapping[str, Any], rows: int) -> Any:
    """The values of an expression for every row as an Arrow array; ``None``: only Python can tell."""
    import pyarrow as pa

    if isinstance(given, Column):
        (name,) = given.fields()
        return arrays[name]
    try:
        found = _value(given, arrays)
    except (pa.ArrowException, _Other):
        return None
    if isinstance(found, pa.Scalar):
        return pa.array([found.as_py()], found.type).take(pa.array([0] * rows))
    return found


class _Other(Exception):
    """What Arrow does otherwise than Python."""


def _value(given: Expression, arrays: Mapping[str, Any]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(given, Column):
        (name,) = given.fields()
        return _number(arrays[name])
    if isinstance(given, Constant):
        if type(given.value) in (int, float):
            return pa.scalar(given.value)
        if type(given.value) in (str, bytes, bool):
            return pa.scalar(given.value)
        raise _Other
    if not isinstance(given, Arithmetic):
        raise _Other
    left, right = _number(_value(given.left, arrays)), _number(_value(given.right, arrays))
    floating = any(pa.types.is_floating(one.type) for one in (left, right))
    if given.how == "/" or floating:
        left, right = _as_float(left), _as_float(right)
    if given.how == "/":
        if pc.any(pc.equal(right, 0.0)).as_py():  # an error, of the rows that have it
            raise _Other
        return pc.divide(left, right)
    if given.how not in _CHECKED:
        raise _Other
    return getattr(pc, _CHECKED[given.how])(left, right)


def _number(value: Any) -> Any:
    """Numbers as Python has them: of 64 bits."""
    import pyarrow as pa

    kind = value.type
    if pa.types.is_integer(kind):
        return value.cast(pa.int64())
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return value.cast(pa.float64())
    raise _Other


def _as_float(value: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(value.type):
        return value
    ends = [pc.abs(value)] if isinstance(value, pa.Scalar) else [pc.max(pc.abs_checked(value))]
    if any((one.as_py() or 0) > _EXACT for one in ends):
        raise _Other
    return value.cast(pa.float64())
