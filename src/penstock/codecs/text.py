"""Text, integers and documents: JSON, MessagePack, CBOR."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np

from penstock.errors import import_extra

_CBOR_REFERENCE = re.compile(rb"\xd8\x1d|[\xd9-\xdb]\0+\x1d")  # tag 29: a value that was read before
_SHOWN_BYTES = 40  # enough of an invalid value to recognise it in a message


def decode_text(data: bytes) -> str:
    """Decode UTF-8 text; nothing is stripped, not even a byte order mark.

    Raises:
        ValueError: The data is not UTF-8; the message gives the position of the first invalid byte.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ValueError(f"not UTF-8 at byte {exc.start}: {exc.reason}") from exc


def encode_text(value: Any) -> bytes:
    """Return text as UTF-8.

    Raises:
        TypeError: The value is not a string.
        ValueError: The text holds a lone surrogate, which UTF-8 cannot encode.
    """
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value.encode("utf-8")


def decode_int(data: bytes, name: str = "value") -> int:
    """Return the integer written in ASCII digits; white space around it is allowed.

    Raises:
        ValueError: The data is not an integer; the message calls it ``name``.
    """
    stripped = data.strip()
    digits = stripped[1:] if stripped[:1] in (b"+", b"-") else stripped
    # int() would also accept b"1_000".
    if not digits.isdigit():
        shown = data if len(data) <= _SHOWN_BYTES else data[:_SHOWN_BYTES] + b"..."
        raise ValueError(f"{name} is not an integer: {shown!r}")
    return int(stripped)


def encode_int(value: Any) -> bytes:
    """Return an integer in ASCII digits; also takes numpy integers, bools and text that is an integer.

    Raises:
        TypeError: The value is not an integer.
        ValueError: The value is text that is not an integer.
    """
    if isinstance(value, str):
        return b"%d" % decode_int(value.encode("utf-8"), "text")
    try:
        number = int(value) if isinstance(value, np.bool_) else int(operator.index(value))
    except TypeError:
        raise TypeError("expected an integer") from None
    return b"%d" % number


def decode_json(data: bytes) -> Any:
    """Decode a JSON document in UTF-8, with or without a byte order mark; NaN and Infinity are allowed.

    Raises:
        ValueError: The data is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(decode_text(data).removeprefix("\ufeff"))
    except json.JSONDecodeError as exc:
        raise ValueError(f"not JSON: {exc}") from exc
    except RecursionError as exc:
        raise ValueError("JSON is nested too deeply") from exc


def encode_json(value: Any) -> bytes:
    """Return a value as compact JSON in UTF-8; numpy numbers and arrays become numbers and lists.

    Raises:
        TypeError: JSON cannot represent a part of the value.
        ValueError: The value contains itself.
    """
    document = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_numpy_to_python)
    try:
        return document.encode("utf-8")
    except UnicodeEncodeError:
        # A lone surrogate, as json.loads gives for "\ud800": only its escaped form can be stored.
        return json.dumps(value, separators=(",", ":"), default=_numpy_to_python).encode("ascii")


def msgpack_decoder() -> Callable[[bytes], Any]:
    """Return a function that decodes MessagePack documents.

    Raises:
        MissingExtra: The package msgpack is not installed.
    """
    _msgpack()
    return decode_msgpack


def decode_msgpack(data: bytes) -> Any:
    """Decode one MessagePack document. A declared length beyond the end of the data is refused.

    Raises:
        ValueError: The data is not exactly one document, or a map key is neither text nor bytes.
        MissingExtra: The package msgpack is not installed.
    """
    msgpack = _msgpack()
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as exc:
        raise ValueError(f"not MessagePack: {str(exc) or type(exc).__name__}") from exc


def encode_msgpack(value: Any) -> bytes:
    """Return a value as MessagePack; numpy numbers and arrays become numbers and lists.

    Raises:
        TypeError: MessagePack cannot represent a part of the value.
        ValueError: The value is nested too deeply, or contains itself.
        MissingExtra: The package msgpack is not installed.
    """
    packed: bytes = _msgpack().packb(value, default=_numpy_to_python)
    return packed


def cbor_decoder() -> Callable[[bytes], Any]:
    """Return a function that decodes CBOR documents.

    Raises:
        MissingExtra: The package cbor2 is not installed.
    """
    _cbor2()
    return decode_cbor


def decode_cbor(data: bytes) -> Any:
    """Decode one CBOR document; unknown tags stay ``CBORTag`` values.

    Raises:
        ValueError: The data is not exactly one CBOR document.
        MissingExtra: The package cbor2 is not installed.
    """
    cbor2 = _cbor2()
    stream = BytesIO(data)
    try:
        value = cbor2.load(stream)
        endless = bool(_CBOR_REFERENCE.search(data)) and _holds_itself(value, [], set())
    except (cbor2.CBORDecodeError, ValueError, EOFError, RecursionError) as exc:
        raise ValueError(f"not CBOR: {exc}") from exc
    if stream.tell() != len(data):
        raise ValueError(f"not one CBOR document: it ends at byte {stream.tell()} of {len(data)}")
    if endless:
        raise ValueError("the CBOR document refers to itself: such a value has no end")
    return value


def _holds_itself(value: Any, above: list[int], checked: set[int]) -> bool:
    """Return whether a value contains itself; ``above`` are the ids of the containers that it is in."""
    if isinstance(value, Mapping):
        inner: Iterable[Any] = chain(value.keys(), value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    else:
        inner = [value.value] if hasattr(value, "tag") and hasattr(value, "value") else []
    if id(value) in checked or not inner:
        return False
    if id(value) in above:
        return True
    above.append(id(value))
    found = any(_holds_itself(part, above, checked) for part in inner)
    above.pop()
    checked.add(id(value))
    return found


def encode_cbor(value: Any) -> bytes:
    """Return a value as CBOR; numpy numbers and arrays become numbers and lists.

    Raises:
        TypeError: CBOR cannot represent a part of the value.
        ValueError: The value contains itself.
        MissingExtra: The package cbor2 is not installed.
    """
    cbor2 = _cbor2()
    try:
        document: bytes = cbor2.dumps(value, default=lambda encoder, part: encoder.encode(_numpy_to_python(part)))
    except cbor2.CBOREncodeError as exc:
        raise ValueError(str(exc)) from exc
    return document


def _numpy_to_python(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"this format cannot store a value of type {type(value).__name__}")


def _msgpack() -> Any:
    return import_extra("msgpack", "MessagePack", "formats")


def _cbor2() -> Any:
    return import_extra("cbor2", "CBOR", "formats")
