"""Lists of arrays as bytes, in the format of the ``ten`` fields."""

from __future__ import annotations

from typing import Any

from penstock.codecs.arrays import decode_tenbin, encode_tenbin


def encode_buffer(l: list[Any], infos: Any = None) -> bytes:  # noqa: E741  # WebDataset's name
    """Encode a list of arrays.

    Raises:
        ValueError: It is not a list, or an array has another type than numbers.
    """
    if not isinstance(l, list):
        raise ValueError("requires list")
    return encode_tenbin(l)


def decode_buffer(buf: Any, infos: Any = False) -> list[Any]:
    """Decode a list of arrays.

    Raises:
        ValueError: The bytes are damaged.
    """
    found = decode_tenbin(bytes(buf))
    return found if isinstance(found, list) else [found]


def save(fname: str, *args: Any, infos: Any = None, nocheck: bool = False) -> None:
    """Write arrays to a file."""
    with open(fname, "wb") as file:
        file.write(encode_buffer(list(args)))


def load(fname: str, infos: Any = False, nocheck: bool = False) -> list[Any]:
    """Read the arrays of a file."""
    with open(fname, "rb") as file:
        return decode_buffer(file.read())
