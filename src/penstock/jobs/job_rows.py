"""What a function may return, as rows of plain values, and such rows as text."""

from __future__ import annotations

import base64
import datetime
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.plan import is_tensor

_TIMES: dict[str, Any] = {"T": datetime.datetime, "D": datetime.date, "t": datetime.time}


def rows_of(answer: Any) -> list[dict[str, Any]]:
    """Read what a function returned: a row, several, a generator of rows, or nothing.

    Raises:
        DataError: it is none of these, or a row holds what no table can.
    """
    if answer is None:
        return []
    if isinstance(answer, Mapping):
        return [_row(answer)]
    if isinstance(answer, str | bytes) or not isinstance(answer, Iterable):
        raise _junk(answer)
    return [_row(one) for one in answer]


def _row(row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise _junk(row)
    if wrong := [name for name in row if not isinstance(name, str)]:
        raise DataError(f"a row has a field called {wrong[0]!r}; names are text")
    return {readable(name): _plain(name, value) for name, value in row.items()}


def _junk(answer: Any) -> DataError:
    said = repr(answer)
    kind = f"{said[:60]}{'...' * (len(said) > 60)} ({type(answer).__name__})"
    return DataError(f"the function gave {kind}; give a row (a dict), several rows, or None")


def readable(text: str) -> str:
    """The text as a file can hold it: bytes of a name that are no UTF-8 are spelled out."""
    return text.encode("utf-8", "surrogateescape" if _odd(text) else "strict").decode("utf-8", "backslashreplace")


def _odd(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


def _plain(name: str, value: Any) -> Any:
    """A value as it is whatever engine it came from: lists for tuples and arrays, text for paths."""
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind != "O":
        value = value.tolist()
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, os.PathLike):
        return _text(os.fsdecode(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(name, one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset | np.ndarray):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_plain(name, one) for one in items]
    raise DataError(
        f"field {name!r} of a row is a {type(value).__name__}; give numbers, text, bytes, times, lists or dicts"
    )


def _text(value: str) -> str:
    try:
        return readable(value)
    except UnicodeEncodeError:  # half of a pair, which stands for no byte of a name
        return value.encode("utf-8", "backslashreplace").decode()


def to_json(rows: list[dict[str, Any]]) -> str:
    """Rows as one line of JSON that says which values JSON does not know."""
    return json.dumps(_tagged(rows), separators=(",", ":"))


def from_json(rows: Any) -> list[dict[str, Any]]:
    """The rows that ``to_json`` wrote, after the text was parsed."""
    made: list[dict[str, Any]] = _untagged(rows)
    return made


def _tagged(value: Any) -> Any:
    """A value that JSON does not know becomes an object of one field, whose name begins with ``$``."""
    if isinstance(value, list):
        return [_tagged(one) for one in value]
    if isinstance(value, dict):
        inner = {name: _tagged(one) for name, one in value.items()}
        return {"$d": inner} if len(inner) == 1 and next(iter(inner)).startswith("$") else inner
    if isinstance(value, bytes):
        return {"$b": base64.b64encode(value).decode()}
    for tag, kind in _TIMES.items():
        if isinstance(value, kind):
            return {f"${tag}": value.isoformat()}
    return value


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(one) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((name, inner),) = value.items()
        if name == "$b":
            return base64.b64decode(inner)
        if name == "$d":
            return {key: _untagged(one) for key, one in inner.items()}
        if name[:1] == "$" and name[1:] in _TIMES:
            return _TIMES[name[1:]].fromisoformat(inner)
    return {name: _untagged(one) for name, one in value.items()}
