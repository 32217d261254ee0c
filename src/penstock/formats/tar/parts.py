"""Samples on their way into an archive: their headers made, nothing written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.errors import DataError
from penstock.formats.tar.headers import check_key, checked, member_header
from penstock.formats.tar.members import BLOCK, ZEROS, padded


class Parts(NamedTuple):
    """Samples of the same fields ready to be written: their pieces, and where from their beginning the fields lie."""

    keys: list[str]
    kind: tuple[str, ...]
    pieces: list[Any]
    starts: list[int]
    sizes: list[int]
    nbytes: int


def parts_of(key: str, fields: Mapping[str, bytes]) -> Parts:
    """Make the headers of a sample; fields in the order of their names.

    Raises:
        DataError: The key or a field cannot be stored as it is.
    """
    check_key(key)
    kind = tuple(sorted(fields))
    if not kind:
        raise DataError("a sample without fields cannot be stored", None, key)
    stem = key.encode("utf-8", "surrogateescape")
    pieces: list[Any] = []
    starts: list[int] = []
    at = 0
    for field in kind:
        data = checked(fields[field], field, key)
        head = member_header(stem + b"." + field.encode("utf-8", "surrogateescape"), len(data))
        pieces += (head, data, ZEROS[: -len(data) % BLOCK])
        starts.append(at + len(head))
        at += len(head) + padded(len(data))
    return Parts([key], kind, pieces, starts, [len(fields[field]) for field in kind], at)
