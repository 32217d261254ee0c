"""Text, whole numbers, and the documents made of them: JSON, MessagePack, CBOR."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from io import BytesIO
from types import ModuleType
from typing import Any

import numpy as np

from penstock.errors import MissingExtra

_SHOWN_BYTES = 40  # enough of a wrong value to recognise it in a message


def decode_text(data: bytes) -> str:
    """Return the text, as it stands: nothing is stripped, a byte order mark stays.

    Raises:
        ValueError: It is not UTF-8; the message says from which byte on.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise ValueError(f"not UTF-8 at byte {exc.start}: {exc.reason}") from exc


def encode_text(value: Any) -> bytes:
    """Return text as UTF-8.

    Raises:
        TypeError: It is not text.
        ValueError: It holds half a surrogate pair, which UTF-8 cannot say.
    """
    if not isinstance(value, str):
        raise TypeError("text is expected")
    return value.encode("utf-8")


def decode_int(data: bytes, name: str = "value") -> int:
    """Return the number written in ASCII digits, white space around it allowed.

    Raises:
        ValueError: It is anything else; ``name`` is what the message calls it.
    """
    written = data.strip()
    digits = written[1:] if written[:1] in (b"+", b"-") else written
    # int() would also take b"1_000".
    if not digits.isdigit():
        shown = data if len(data) <= _SHOWN_BYTES else data[:_SHOWN_BYTES] + b"..."
        raise ValueError(f"{name} is not an integer: {shown!r}")
    return int(written)


def encode_int(value: Any) -> bytes:
    """Return a whole number (also numpy's, a bool, or its text) in ASCII digits.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is text that is not a whole number.
    """
    if isinstance(value, str):
        return b"%d" % decode_int(value.encode("utf-8"), "text")
    try:
        number = int(value) if isinstance(value, np.bool_) else int(operator.index(value))
    except TypeError:
        raise TypeError("a whole number is expected") from None
    return b"%d" % number


def decode_json(data: bytes) -> Any:
    """Return the JSON document, in UTF-8 with or without a byte order mark; NaN and Infinity are allowed.

    Raises:
        ValueError: It is not JSON, or nested too deeply.
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
        TypeError: Some part of it has no JSON form.
        ValueError: It contains itself.
    """
    written = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
    try:
        return written.encode("utf-8")
    except UnicodeEncodeError:
        # Half a surrogate pair, as json.loads gives for "\ud800": only the escaped form can carry it.
        return json.dumps(value, separators=(",", ":"), default=_plain).encode("ascii")


def msgpack_decoder() -> Callable[[bytes], Any]:
    """Return the decoder of MessagePack documents; map keys must be text or bytes.

    Raises:
        MissingExtra: The package msgpack is not installed.
    """
    _msgpack()
    return decode_msgpack


def decode_msgpack(data: bytes) -> Any:
    """Return the MessagePack document. No length it declares may exceed the data itself.

    Raises:
        ValueError: It is not one document, or a map key is neither text nor bytes.
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
        TypeError: Some part of it has no MessagePack form.
        ValueError: It is nested too deeply, or contains itself.
        MissingExtra: The package msgpack is not installed.
    """
    packed: bytes = _msgpack().packb(value, default=_plain)
    return packed


def cbor_decoder() -> Callable[[bytes], Any]:
    """Return the decoder of CBOR documents.

    Raises:
        MissingExtra: The package cbor2 is not installed.
    """
    _cbor2()
    return decode_cbor


def decode_cbor(data: bytes) -> Any:
    """Return the CBOR document; tags of unknown meaning stay ``CBORTag`` values.

    Raises:
        ValueError: It is not one CBOR document.
        MissingExtra: The package cbor2 is not installed.
    """
    cbor2 = _cbor2()
    stream = BytesIO(data)
    try:
        value = cbor2.load(stream)
    except (cbor2.CBORDecodeError, ValueError, EOFError, RecursionError) as exc:
        raise ValueError(f"not CBOR: {exc}") from exc
    if stream.tell() != len(data):
        raise ValueError(f"not one CBOR document: it ends at byte {stream.tell()} of {len(data)}")
    return value


def encode_cbor(value: Any) -> bytes:
    """Return a value as CBOR; numpy numbers and arrays become numbers and lists.

    Raises:
        TypeError: Some part of it has no CBOR form.
        ValueError: It contains itself.
        MissingExtra: The package cbor2 is not installed.
    """
    cbor2 = _cbor2()
    try:
        written: bytes = cbor2.dumps(value, default=lambda encoder, part: encoder.encode(_plain(part)))
    except cbor2.CBOREncodeError as exc:
        raise ValueError(str(exc)) from exc
    return written


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no such form")


def _msgpack() -> ModuleType:
    try:
        import msgpack
    except ImportError as exc:
        raise MissingExtra("MessagePack", "formats") from exc
    module: ModuleType = msgpack
    return module


def _cbor2() -> ModuleType:
    try:
        import cbor2
    except ImportError as exc:
        raise MissingExtra("CBOR", "formats") from exc
    return cbor2
