"""Values of data types go into a record and come back the same; nothing else does."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.cached.record_codec import NotStorable, decode_outputs, encode_outputs
from penstock.errors import DataError
from penstock.testing.laws import fingerprint

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner)
)


def _there_and_back(value: Any) -> Any:
    record = np.frombuffer(bytearray(encode_outputs([((), value)])), np.uint8)
    ((path, found),) = decode_outputs(record)
    assert path == ()
    return found


@given(VALUES)
def test_plain_values_come_back(value: Any) -> None:
    assert fingerprint(_there_and_back(value)) == fingerprint(value)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.array(3.5),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::2],
        np.array(["a", "bcd"]),
        np.array([b"a", b"bc"]),
        np.array([], "U"),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.float32(1.5),
        np.int64(-3),
        np.bool_(True),
        bytearray(b"abc"),
        float("inf"),
        "\ud800",
        1 << 100,
        datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=UTC),
        date(2024, 5, 6),
        time(7, 8, 9),
        timedelta(days=-1, microseconds=5),
        Decimal("1.50"),
        3 + 4j,
    ],
    ids=repr,
)
def test_arrays_scalars_and_times_come_back(value: Any) -> None:
    found = _there_and_back({"a": value, "b": [value, b"x", value]})
    assert fingerprint(found) == fingerprint({"a": value, "b": [value, b"x", value]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    found = _there_and_back(tensor)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


def test_arrays_that_come_back_can_be_changed_and_are_aligned() -> None:
    found = _there_and_back({"name": "a", "array": np.arange(5.0)})["array"]
    found += 1
    assert found.flags.aligned
    assert found.tolist() == [1, 2, 3, 4, 5]


def test_outputs_keep_their_paths() -> None:
    outputs = [((0, 1), {"a": 1}), ((2, 0), {"a": b"x"})]
    assert decode_outputs(np.frombuffer(encode_outputs(outputs), np.uint8)) == outputs
    assert decode_outputs(np.frombuffer(encode_outputs([]), np.uint8)) == []


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, [lambda: 0], np.array([object()]), st])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(NotStorable, match="type"):
        encode_outputs([((), value)])


@given(st.binary(max_size=200))
def test_bytes_that_are_not_a_record_are_a_data_error(data: bytes) -> None:
    try:
        decode_outputs(np.frombuffer(data, np.uint8))
    except DataError:
        return


def test_a_record_that_ends_early_is_a_data_error() -> None:
    data = encode_outputs([((), b"x" * 100)])
    with pytest.raises(DataError, match="ends too early"):
        decode_outputs(np.frombuffer(data[:-50], np.uint8))
