"""Encode batches as Arrow: a JSON header that describes them, and their bytes, without a copy and without pickle.

A message is one record batch with one column of binary views. Its first row is the header, the others are the buffers
of arrays, tensors and bytes, in the order in which the header refers to them. A message is decoded in place: arrays
are writable views of what was received.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.errors import PlanError, import_extra
from penstock.plan import is_tensor

_VIEW = struct.Struct("<i4sii")  # length, first bytes, buffer, offset: how Arrow describes a long binary view
_INLINE = struct.Struct("<i12s")  # length and bytes of a short one
_INLINE_BYTES = 12
_SENDABLE_KINDS = "biufcSUmM"  # of numpy's types
_PLAIN = (bool, int, float, str, type(None))
_MAX_DEPTH = 32
_BYTES = {bytearray: "bytearray", np.bytes_: "numpy bytes"}
_TORCH_ONLY = {"bfloat16": "int16"}  # types that numpy does not have, and those with the same size


def _pyarrow() -> Any:
    return import_extra("pyarrow", "serving", "tables")


def message_schema() -> Any:
    """Return the schema of all messages."""
    arrow = _pyarrow()
    return arrow.schema([arrow.field("data", arrow.binary_view(), nullable=False)])


def encode_message(header: dict[str, Any], item: Any = None, tables: Sequence[Any] = ()) -> tuple[Any, int]:
    """Return a message as a record batch, and its size in bytes.

    Args:
        header: Anything that JSON can hold.
        item: The batch, if there is one.
        tables: Arrays that belong to the header.

    Raises:
        PlanError: The batch holds a value that cannot be sent; the message names its field.
    """
    buffers: list[Any] = []
    described = {**header, "item": _describe(item, "", buffers, 0)}
    if tables:
        described["tables"] = [_describe(table, "", buffers, 0) for table in tables]
    return _record_batch([json.dumps(described, separators=(",", ":")).encode(), *buffers])


def decode_message(batch: Any) -> tuple[dict[str, Any], Any, list[Any]]:
    """Return the header, the item and the tables that ``encode_message`` encoded.

    Raises:
        ValueError: The message is damaged.
    """
    first, *rows = _rows(batch.column(0))
    header = json.loads(first.to_pybytes())
    tables = [_restore(table, rows) for table in header.pop("tables", ())]
    return header, _restore(header.pop("item", None), rows), tables


def _record_batch(rows: list[Any]) -> tuple[Any, int]:
    arrow = _pyarrow()
    views: list[bytes] = []
    data: list[Any] = []
    total = 0
    for row in rows:
        buffer = memoryview(row).cast("B") if memoryview(row).nbytes else memoryview(b"")
        total += buffer.nbytes
        if buffer.nbytes <= _INLINE_BYTES:
            views.append(_INLINE.pack(buffer.nbytes, buffer.tobytes()))
        elif buffer.nbytes >= 1 << 31:
            raise PlanError(f"a batch holds an array of {buffer.nbytes:,} bytes, and at most 2 GiB can be sent")
        else:
            views.append(_VIEW.pack(buffer.nbytes, bytes(buffer[:4]), len(data), 0))
            data.append(arrow.py_buffer(buffer))
    column = arrow.Array.from_buffers(
        arrow.binary_view(), len(rows), [None, arrow.py_buffer(b"".join(views)), *data], null_count=0
    )
    return arrow.RecordBatch.from_arrays([column], schema=message_schema()), total


def _rows(column: Any) -> list[Any]:
    """Return the rows of a column of binary views as buffers; a row as Arrow returns it would be a copy."""
    _, views, *data = column.buffers()
    rows = []
    for row in range(column.offset, column.offset + len(column)):
        length, _, number, offset = _VIEW.unpack(views.slice(row * _VIEW.size, _VIEW.size))
        if length <= _INLINE_BYTES:
            rows.append(views.slice(row * _VIEW.size + 4, length))
        elif number >= len(data) or offset < 0 or offset + length > data[number].size:
            raise ValueError("a message refers to bytes that it does not have")
        else:
            rows.append(data[number].slice(offset, length))
    return rows


def _describe(value: Any, field: str, buffers: list[Any], depth: int) -> Any:
    """Return a description of a value as JSON, and append the bytes that it refers to by number to ``buffers``."""
    if type(value) in _PLAIN:
        return value
    if depth > _MAX_DEPTH:
        raise PlanError(f"{_at(field)} is nested more than {_MAX_DEPTH} levels deep, and cannot be sent")
    if isinstance(value, np.str_):
        return ["text", str(value)]
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.bytes_):
        return _describe_array(value, field, buffers)
    if is_tensor(value):
        return _describe_tensor(value, field, buffers)
    if isinstance(value, bytes | bytearray):
        return [_BYTES.get(type(value), "bytes"), _add(buffers, value)]
    if type(value) is dict:
        if bad := [name for name in value if not isinstance(name, str)]:
            raise PlanError(f"{_at(field)} has the key {bad[0]!r:.40}, and only text keys can be sent")
        inner = [[name, _describe(one, f"{field}.{name}", buffers, depth + 1)] for name, one in value.items()]
        return ["dict", inner]
    if type(value) is list and all(type(one) in _PLAIN for one in value):
        return ["plain", value]
    if type(value) is list and all(type(one) is bytes for one in value):
        return ["blobs", [len(one) for one in value], _add(buffers, b"".join(value))]
    if type(value) in (list, tuple):
        inner = [_describe(one, f"{field}[{number}]", buffers, depth + 1) for number, one in enumerate(value)]
        return ["list" if type(value) is list else "tuple", inner]
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise PlanError(
        f"{_at(field)} is a {kind}, which cannot be sent: servers send arrays, tensors, numbers, text, bytes, and "
        "dicts, tuples and lists of these; convert it with a map() before it is served"
    )


def _at(field: str) -> str:
    return f"field {field.lstrip('.')!r}" if field else "the item"


def _add(buffers: list[Any], data: Any) -> int:
    buffers.append(data)
    return len(buffers) - 1


def _describe_array(value: np.ndarray[Any, Any] | np.generic, field: str, buffers: list[Any]) -> list[Any]:
    if value.dtype.kind not in _SENDABLE_KINDS or isinstance(value, np.ma.MaskedArray):
        kind = "a masked array" if isinstance(value, np.ma.MaskedArray) else "an array"
        raise PlanError(
            f"{_at(field)} is {kind} of {value.dtype}, which cannot be sent: convert it with a map() to numbers, "
            "or to a list of text or bytes"
        )
    if isinstance(value, np.generic):
        return ["scalar", value.dtype.str, value.tobytes().hex()]
    return ["array", value.dtype.str, list(value.shape), _add(buffers, _as_bytes(value))]


def _as_bytes(value: np.ndarray[Any, Any]) -> Any:
    """Return the bytes of an array in the order of its elements; without a copy if they lie that way."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8) if value.size else b""


def _describe_tensor(value: Any, field: str, buffers: list[Any]) -> list[Any]:
    dtype = str(value.dtype).removeprefix("torch.")
    try:
        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if dtype in _TORCH_ONLY:
            tensor = tensor.view(getattr(_torch(), _TORCH_ONLY[dtype]))
        array = tensor.numpy()
    except (RuntimeError, TypeError) as exc:
        problem = f"{_at(field)} is a tensor of {dtype} that cannot be sent"
        raise PlanError(f"{problem}: convert it with a map() before it is served: {exc}") from exc
    return ["tensor", dtype, list(tensor.shape), _add(buffers, _as_bytes(array))]


def _torch() -> Any:
    return import_extra("torch", "tensors from a server", "torch")


def _restore(node: Any, rows: list[Any]) -> Any:
    """Return the value that ``_describe`` described."""
    if not isinstance(node, list):
        return node
    kind, *facts = node
    match kind:
        case "dict":
            return {name: _restore(inner, rows) for name, inner in facts[0]}
        case "list":
            return [_restore(inner, rows) for inner in facts[0]]
        case "tuple":
            return tuple(_restore(inner, rows) for inner in facts[0])
        case "plain":
            return facts[0]
        case "bytes":
            return rows[facts[0]].to_pybytes()
        case "bytearray":
            return bytearray(rows[facts[0]].to_pybytes())
        case "numpy bytes":
            return np.bytes_(rows[facts[0]].to_pybytes())
        case "text":
            return np.str_(facts[0])
        case "blobs":
            joined, ends = rows[facts[1]].to_pybytes(), np.cumsum([0, *facts[0]]).tolist()
            return [joined[low:high] for low, high in pairwise(ends)]
        case "scalar":
            return np.frombuffer(bytes.fromhex(facts[1]), np.dtype(facts[0]))[0]
        case "array":
            return _array(rows[facts[2]], np.dtype(facts[0]), facts[1])
        case "tensor":
            return _tensor(rows[facts[2]], facts[0], facts[1])
    raise ValueError(f"a message holds a {kind!r:.40}, which this release does not know")


class _Received:
    """A received buffer as numpy sees it: writable, because no other object refers to its bytes."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer  # keeps the bytes alive
        self.__array_interface__ = {
            "data": (buffer.address, False),
            "shape": (buffer.size,),
            "typestr": "|u1",
            "version": 3,
        }


def _array(buffer: Any, dtype: np.dtype[Any], shape: list[int]) -> np.ndarray[Any, Any]:
    if not buffer.size:
        return np.empty(shape, dtype)
    data = np.asarray(_Received(buffer))
    if buffer.address % (dtype.alignment or 1):
        data = data.copy()
    return data.view(dtype).reshape(shape)


def _tensor(buffer: Any, dtype: str, shape: list[int]) -> Any:
    torch = _torch()
    stored = np.dtype(_TORCH_ONLY.get(dtype, dtype))
    tensor = torch.from_numpy(_array(buffer, stored, shape))
    return tensor.view(getattr(torch, dtype)) if dtype in _TORCH_ONLY else tensor
