"""Lists of arrays as bytes, in the format of the ``ten`` fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.codecs.arrays import decode_tenbin, encode_tenbin


def encode_buffer(l: list[Any], infos: Any = None) -> bytes:  # noqa: E741  # WebDataset's name
    if not isinstance(l, list):
        raise ValueError("requires list")
    return encode_tenbin(l)


def decode_buffer(buf: Any, infos: Any = False) -> list[Any]:
    return list(decode_tenbin(bytes(buf)))


def save(fname: str, *args: Any, infos: Any = None, nocheck: bool = False) -> None:
    Path(fname).write_bytes(encode_buffer(list(args)))


def load(fname: str, infos: Any = False, nocheck: bool = False) -> list[Any]:
    return decode_buffer(Path(fname).read_bytes())
