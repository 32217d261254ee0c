"""Text, integers, JSON, MessagePack, CBOR."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import cbor2
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs import text
from penstock.errors import MissingExtra

documents = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.text())
def test_text_round_trips(value: str) -> None:
    assert text.decode_text(text.encode_text(value)) == value


def test_text_is_strict_utf8_and_the_error_names_the_byte() -> None:
    with pytest.raises(ValueError, match="not UTF-8 at byte 17"):
        text.decode_text(b"seventeen letters\xff and more")


def test_text_keeps_white_space_and_byte_order_mark() -> None:
    assert text.decode_text(b"\xef\xbb\xbf a \n") == "\ufeff a \n"


@given(st.integers())
def test_integers_round_trip(value: int) -> None:
    assert text.decode_int(text.encode_int(value)) == value


@pytest.mark.parametrize(("data", "value"), [(b"3", 3), (b" -12\n", -12), (b"+7", 7), (b"007", 7)])
def test_an_integer_may_have_a_sign_leading_zeros_and_white_space(data: bytes, value: int) -> None:
    assert text.decode_int(data) == value


@pytest.mark.parametrize("data", [b"", b"x", b"1_000", b"1.0", b"0x1", b"1 2", b"--1", b"+", "٣".encode()])
def test_anything_else_is_not_an_integer(data: bytes) -> None:
    with pytest.raises(ValueError, match="cls is not an integer"):
        text.decode_int(data, "cls")


def test_a_long_invalid_integer_is_shown_in_part() -> None:
    with pytest.raises(ValueError, match=r"\.\.\.") as caught:
        text.decode_int(b"word " * 1000)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (True, b"1"),
        (np.int64(5), b"5"),
        (np.uint8(5), b"5"),
        (np.bool_(False), b"0"),
        (np.array(4), b"4"),
        (torch.tensor(6), b"6"),
        ("3", b"3"),
    ],
)
def test_every_kind_of_integer_is_written_in_digits(value: Any, data: bytes) -> None:
    assert text.encode_int(value) == data


@pytest.mark.parametrize("value", [1.0, None, "three", np.float32(1), [1]])
def test_a_value_that_is_not_an_integer_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"expected an integer|not an integer"):
        text.encode_int(value)


@given(documents)
def test_json_round_trips(value: Any) -> None:
    assert text.decode_json(text.encode_json(value)) == value


def test_json_reads_nan_a_byte_order_mark_and_escapes() -> None:
    assert math.isnan(text.decode_json(b"[NaN]")[0])
    assert text.decode_json(b"\xef\xbb\xbf[1]") == [1]
    lone = text.decode_json(b'"\\ud800"')
    assert text.decode_json(text.encode_json(lone)) == lone


def test_json_in_another_encoding_is_refused() -> None:
    assert json.loads('{"a": 1}'.encode("utf-16"))
    with pytest.raises(ValueError, match="not UTF-8"):
        text.decode_json('{"a": 1}'.encode("utf-16"))


def test_json_that_is_invalid_or_too_deep_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"not JSON: .*column 2"):
        text.decode_json(b"{1}")
    with pytest.raises(ValueError, match="nested too deeply"):
        text.decode_json(b"[" * 200_000)


ENCODERS = [text.encode_json, text.encode_msgpack, text.encode_cbor]
ENCODERS_AND_DECODERS = [
    (text.encode_json, text.decode_json),
    (text.encode_msgpack, text.decode_msgpack),
    (text.encode_cbor, text.decode_cbor),
]


@pytest.mark.parametrize(("encode", "decode"), ENCODERS_AND_DECODERS)
def test_numpy_values_become_python_values(encode: Any, decode: Any) -> None:
    value = {"n": np.int32(3), "x": np.float64(0.5), "a": np.arange(4).reshape(2, 2), "b": np.bool_(True)}
    assert decode(encode(value)) == {"n": 3, "x": 0.5, "a": [[0, 1], [2, 3]], "b": True}


@pytest.mark.parametrize("encode", ENCODERS)
def test_a_value_that_cannot_be_represented_is_refused(encode: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="object"):
        encode({"a": object()})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match=r"(?i)circular|recursion|cyclic"):
        encode(loop)


@given(documents)
def test_msgpack_round_trips(value: Any) -> None:
    assert text.decode_msgpack(text.encode_msgpack(value)) == value


@given(documents)
def test_cbor_round_trips(value: Any) -> None:
    assert text.decode_cbor(text.encode_cbor(value)) == value


def test_documents_are_exchanged_with_msgpack_and_cbor2() -> None:
    value = {"a": [1, 2.5, "x", None, b"raw"]}
    assert text.decode_msgpack(msgpack.packb(value)) == value == msgpack.unpackb(text.encode_msgpack(value))
    assert text.decode_cbor(cbor2.dumps(value)) == value == cbor2.loads(text.encode_cbor(value))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\xdd\xff\xff\xff\xff",  # a list that declares four billion items
        b"\xdb\xff\xff\xff\xff",  # text of that length
        b"\xa1\xff",
        b"\x81\x01\x02",  # a map whose key is a number
        b"\x91" * 200_000 + b"\x01",
    ],
)
def test_damaged_or_hostile_msgpack_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not MessagePack: [\w']"):
        text.decode_msgpack(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x01",
        b"\x9b\x00\x00\x00\xff\xff\xff\xff\xff",
        b"\x5b\x00\x00\x00\xff\xff\xff\xff\xff",
        b"\xc5\x82\x1b\x7f\xff\xff\xff\xff\xff\xff\xff\x01",  # a big float: 1 * 2**(2**63)
        b"\x81" * 200_000 + b"\x01",
    ],
)
def test_damaged_or_hostile_cbor_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not (one )?CBOR"):
        text.decode_cbor(data)


@pytest.mark.parametrize(("package", "build"), [("msgpack", text.msgpack_decoder), ("cbor2", text.cbor_decoder)])
def test_a_missing_package_is_named_when_the_decoder_is_built(
    monkeypatch: pytest.MonkeyPatch, package: str, build: Any
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"penstock\[formats\]"):
        build()


@pytest.mark.parametrize("data", ["d81c81d81d00", "d81ca101d81d00", "d81c8201d9001d00"])
def test_a_cbor_document_that_holds_itself_is_refused(data: str) -> None:
    with pytest.raises(ValueError, match="CBOR"):
        text.decode_cbor(bytes.fromhex(data))


def test_a_cbor_document_may_refer_to_a_value_twice() -> None:
    assert text.decode_cbor(bytes.fromhex("82d81c8101d81d00")) == [[1], [1]]
