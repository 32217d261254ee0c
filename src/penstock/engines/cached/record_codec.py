"""Encode the outputs of one sample as bytes, and back: values of data types only, never pickles.

A record is the length of a header, the header, and the bytes of arrays, tensors and byte strings, each aligned. The
header is JSON: numbers, text and None stand for themselves, anything else is a list that begins with its kind.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.plan import is_tensor

Output = tuple[tuple[int, ...], Any]  # its number among the outputs of each flat_map, and its value
_ALIGNMENT = 16
_LENGTH = struct.Struct("<I")
_PLAIN = (type(None), bool, int, float, str)
_ARRAY_KINDS = "biufcSUmM"


_to_json = json.JSONEncoder(separators=(",", ":")).encode
_dtype = cache(np.dtype)


class NotStorable(TypeError):
    """A value is of a type that records cannot hold."""


def encode_outputs(outputs: Sequence[Output]) -> bytes:
    """Return the record of a sample's outputs.

    Raises:
        NotStorable: A value is not of a data type; the message names its type and where it is.
    """
    writer = _TreeWriter()
    text = _to_json([[list(path), writer.tree(value, "")] for path, value in outputs]).encode()
    start = _LENGTH.size + len(text)
    return b"".join([_LENGTH.pack(len(text)), text, bytes(-start % _ALIGNMENT), *writer.parts])


def decode_outputs(record: NDArray[np.uint8]) -> list[Output]:
    """Return the outputs in a record. Arrays and tensors are views into it, and writable if the record is.

    Raises:
        DataError: The bytes are not a record.
    """
    try:
        (length,) = _LENGTH.unpack_from(record.data)
        header = json.loads(record[_LENGTH.size : _LENGTH.size + length].tobytes())
        begin = _LENGTH.size + length
        reader = _TreeReader(record, begin + -begin % _ALIGNMENT)
        return [(tuple(path), reader.value(tree)) for path, tree in header]
    except (ValueError, KeyError, TypeError, IndexError, struct.error, RecursionError) as exc:
        raise DataError(f"a cached result cannot be decoded: {exc}") from exc


class _TreeWriter:
    """Turns values into trees for the header, and collects the bytes that follow it."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def tree(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is dict:
            return ["dict", *(self._pair(name, inner, where) for name, inner in value.items())]
        if kind in (list, tuple):
            return [kind.__name__, *(self.tree(inner, where) for inner in value)]
        if kind in (bytes, bytearray):
            self._append(value, len(value))
            return [kind.__name__, len(value)]
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _ARRAY_KINDS:
            return self._array("array" if kind is np.ndarray else "scalar", np.asarray(value))
        if is_tensor(value):
            return self._tensor(value)
        if kind in _AS_TEXT:
            return [kind.__name__, _AS_TEXT[kind][0](value)]
        place = f" in field {where!r}" if where else ""
        raise NotStorable(f"a value of type {kind.__module__}.{kind.__qualname__}{place} cannot be stored")

    def _pair(self, name: Any, value: Any, where: str) -> list[Any]:
        return [self.tree(name, where), self.tree(value, where or str(name))]

    def _array(self, kind: str, array: NDArray[Any]) -> list[Any]:
        data = np.ascontiguousarray(array).reshape(-1)
        self._append(data.view(np.uint8).data if array.nbytes else b"", array.nbytes)
        return [kind, array.dtype.str, list(array.shape)]

    def _tensor(self, tensor: Any) -> list[Any]:
        torch = sys.modules["torch"]
        plain = tensor.detach().cpu().contiguous()
        nbytes = plain.numel() * plain.element_size()
        data = plain.reshape(-1).view(torch.uint8).numpy().data if nbytes else b""
        self._append(data, nbytes)
        return ["tensor", str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]

    def _append(self, data: Any, nbytes: int) -> None:
        self.parts += [data, bytes(-nbytes % _ALIGNMENT)]


class _TreeReader:
    """Turns trees back into values; the bytes are taken in the order in which they were written."""

    def __init__(self, record: NDArray[np.uint8], offset: int) -> None:
        self._record, self._offset = record, offset

    def value(self, tree: Any) -> Any:
        if type(tree) is not list:
            return tree
        kind, *rest = tree
        if kind == "dict":
            return {self.value(name): self.value(inner) for name, inner in rest}
        if kind in ("list", "tuple"):
            values = map(self.value, rest)
            return list(values) if kind == "list" else tuple(values)
        if kind in ("bytes", "bytearray"):
            data = self._take(rest[0]).tobytes()
            return data if kind == "bytes" else bytearray(data)
        if kind in ("array", "scalar"):
            array = self._array(*rest)
            return array if kind == "array" else array[()]
        return self._tensor(*rest) if kind == "tensor" else _FROM_TEXT[kind](rest[0])

    def _array(self, dtype: str, shape: list[int]) -> NDArray[Any]:
        found = _dtype(dtype)
        if found.kind not in _ARRAY_KINDS:
            raise ValueError(f"{dtype!r} is not a type of numbers or text")
        if not found.itemsize:
            return np.empty(shape, found)
        return self._take(found.itemsize * math.prod(shape)).view(found).reshape(shape)

    def _tensor(self, name: str, shape: list[int]) -> Any:
        import torch

        dtype = getattr(torch, name)
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self._take(count * dtype.itemsize)).view(dtype).reshape(shape)

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        begin, end = self._offset, self._offset + nbytes
        if not 0 <= begin <= end <= len(self._record):
            raise ValueError("the record ends too early")
        self._offset = end + -nbytes % _ALIGNMENT
        return self._record[begin:end]


# Values that are written as text: how, and how they are read.
_AS_TEXT: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    timedelta: (lambda value: [value.days, value.seconds, value.microseconds], lambda parts: timedelta(*parts)),
    Decimal: (str, Decimal),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
}
_FROM_TEXT = {kind.__name__: read for kind, (_, read) in _AS_TEXT.items()}
