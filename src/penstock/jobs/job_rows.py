"""The rows that a job's function returns: converted to plain values, and encoded as JSON for the journal."""

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

_SHOWN_LENGTH = 60  # characters of a wrong value in a message
_TIME_TYPES: dict[str, Any] = {"T": datetime.datetime, "D": datetime.date, "t": datetime.time}  # by tag


def to_rows(returned: Any) -> list[dict[str, Any]]:
    """Return the rows in what a function returned: a row, several rows, a generator of rows, or None.

    Raises:
        DataError: The function returned something else, or a row holds a value that a table cannot.
    """
    if returned is None:
        return []
    if isinstance(returned, Mapping):
        return [_to_row(returned)]
    if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
        raise _not_a_row(returned)
    return [_to_row(row) for row in returned]


def _to_row(row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise _not_a_row(row)
    if wrong := [name for name in row if not isinstance(name, str)]:
        raise DataError(f"a row has a field named {wrong[0]!r}; names must be text")
    return {escape_bytes(name): _to_plain(name, value) for name, value in row.items()}


def _not_a_row(returned: Any) -> DataError:
    text = repr(returned)
    shown = f"{text[:_SHOWN_LENGTH]}{'...' * (len(text) > _SHOWN_LENGTH)} ({type(returned).__name__})"
    return DataError(f"the function returned {shown}; return a row (a dict), several rows, or None")


def escape_bytes(text: str) -> str:
    r"""Return a text that can be encoded as UTF-8: bytes of a file name that are not UTF-8 become ``\xff``.

    Raises:
        UnicodeEncodeError: The text has a surrogate that does not stand for a byte.
    """
    errors = "surrogateescape" if _has_surrogates(text) else "strict"
    return text.encode("utf-8", errors).decode("utf-8", "backslashreplace")


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


def _to_plain(name: str, value: Any) -> Any:
    """Return a value as a plain one, which is the same on every engine: tuples and arrays as lists, paths as text."""
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind != "O":
        value = value.tolist()
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return _to_text(value)
    if isinstance(value, os.PathLike):
        return _to_text(os.fsdecode(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_plain(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | np.ndarray):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_to_plain(name, item) for item in items]
    raise DataError(
        f"field {name!r} of a row is of type {type(value).__name__}; return numbers, text, bytes, times, lists or dicts"
    )


def _to_text(value: str) -> str:
    try:
        return escape_bytes(value)
    except UnicodeEncodeError:  # half of a surrogate pair, which does not stand for a byte
        return value.encode("utf-8", "backslashreplace").decode()


def encode_rows(rows: list[dict[str, Any]]) -> str:
    """Return rows as one line of JSON; values that JSON does not have are tagged."""
    return json.dumps(_tag(rows), separators=(",", ":"))


def decode_rows(rows: Any) -> list[dict[str, Any]]:
    """Return the rows that :func:`encode_rows` encoded, from the parsed JSON."""
    decoded: list[dict[str, Any]] = _untag(rows)
    return decoded


def _tag(value: Any) -> Any:
    """Replace a value that JSON does not have by an object of one field, whose name begins with ``$``."""
    if isinstance(value, list):
        return [_tag(item) for item in value]
    if isinstance(value, dict):
        tagged = {name: _tag(item) for name, item in value.items()}
        return {"$d": tagged} if len(tagged) == 1 and next(iter(tagged)).startswith("$") else tagged
    if isinstance(value, bytes):
        return {"$b": base64.b64encode(value).decode()}
    for tag, time_type in _TIME_TYPES.items():
        if isinstance(value, time_type):
            return {f"${tag}": value.isoformat()}
    return value


def _untag(value: Any) -> Any:
    if isinstance(value, list):
        return [_untag(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((name, inner),) = value.items()
        if name == "$b":
            return base64.b64decode(inner)
        if name == "$d":
            return {key: _untag(item) for key, item in inner.items()}
        if name[:1] == "$" and name[1:] in _TIME_TYPES:
            return _TIME_TYPES[name[1:]].fromisoformat(inner)
    return {name: _untag(item) for name, item in value.items()}
