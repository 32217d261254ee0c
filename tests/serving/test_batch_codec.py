"""Batches as Arrow messages: every value that can be sent arrives as it was, and others are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.errors import PlanError
from penstock.serving.batch_codec import decode_message, encode_message


def _sent(header: dict[str, Any], item: Any = None, tables: Any = ()) -> tuple[Any, Any, Any]:
    """Encode a message, send it through Arrow's own stream format, and decode it."""
    message, _ = encode_message(header, item, tables)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, message.schema) as writer:
        writer.write_batch(message)
    return decode_message(pa.ipc.open_stream(sink.getvalue()).read_next_batch())


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=40)
ARRAYS = hnp.arrays(
    hnp.integer_dtypes() | hnp.floating_dtypes() | hnp.boolean_dtypes() | hnp.complex_number_dtypes(),
    hnp.array_shapes(min_dims=0, max_side=4, min_side=0),
)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.lists(st.binary(max_size=30), max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=30, deadline=None)
@given(VALUES)
def test_values_arrive_as_they_were(value: Any) -> None:
    _, got, _ = _sent({}, value)
    _check_same(got, value)


def _check_same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, np.ndarray):
        assert got.dtype == want.dtype
        assert got.flags.writeable
        np.testing.assert_array_equal(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for name in want:
            _check_same(got[name], want[name])
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            _check_same(one, other)
    else:
        assert got == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64])
def test_tensors_arrive_as_tensors(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 2).to(dtype).t()
    _, got, _ = _sent({}, {"t": tensor, "scalar": torch.tensor(3)})
    assert torch.equal(got["t"], tensor)
    assert got["t"].dtype == dtype
    assert got["scalar"].item() == 3


def test_conjugated_tensors_arrive_computed() -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    _, got, _ = _sent({}, {"conjugate": tensor, "imaginary": tensor.imag})
    assert torch.equal(got["conjugate"], tensor)
    assert torch.equal(got["imaginary"], tensor.imag)


@pytest.mark.parametrize(
    "value",
    [
        np.float16(1.5),
        np.int8(-3),
        np.bool_(True),
        np.datetime64("2020-01-02"),
        np.str_("a"),
        np.str_(""),
        np.bytes_(b""),
        np.bytes_(b"a\0"),
    ],
)
def test_numpy_scalars_keep_their_type(value: Any) -> None:
    _, got, _ = _sent({}, value)
    assert type(got) is type(value)
    assert got == value


def test_headers_and_tables_come_along() -> None:
    header, item, tables = _sent({"after": {"left": [[1, 2, 3, 0]]}}, None, [np.arange(6).reshape(2, 3)])
    assert header == {"after": {"left": [[1, 2, 3, 0]]}}
    assert item is None
    assert tables[0].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_large_arrays_are_not_copied_when_they_are_encoded() -> None:
    array = np.zeros(1_000_000, np.uint8)
    message, nbytes = encode_message({}, {"a": array})
    assert nbytes >= array.nbytes
    assert any(buffer is not None and buffer.address == array.ctypes.data for buffer in message.column(0).buffers())


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": {"b": object()}}, r"field 'a\.b' is a object, which cannot be sent"),
        ({"a": [1, {2, 3}]}, r"field 'a\[1\]' is a set"),
        ({"a": np.array([None, 1])}, "field 'a' is an array of object"),
        ({"a": np.ma.masked_array([1, 2], [True, False])}, "field 'a' is a masked array of int64"),
        ({"a": torch.eye(2).to_sparse()}, "field 'a' is a tensor of float32 that cannot be sent"),
        ({"a": [torch.ones(2).to(torch.float8_e4m3fn)]}, r"field 'a\[0\]' is a tensor of float8_e4m3fn"),
        ({1: 2}, "the item has the key 1, and only text keys"),
        ({0: 2}, "the item has the key 0, and only text keys"),
        ({(): 2}, r"the item has the key \(\), and only text keys"),
        ((lambda: None), "the item is a function"),
    ],
)
def test_a_value_that_cannot_be_sent_is_named(value: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        encode_message({}, value)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(PlanError, match="nested"):
        encode_message({}, {"a": value})


def test_a_damaged_message_is_refused() -> None:
    views = np.zeros(4, np.int32)
    views[0], views[2] = 100, 7  # a long value in a buffer that does not exist
    column = pa.Array.from_buffers(pa.binary_view(), 1, [None, pa.py_buffer(views)])
    with pytest.raises(ValueError, match="bytes that it does not have"):
        decode_message(pa.RecordBatch.from_arrays([column], ["data"]))
    unknown, _ = encode_message({})
    assert decode_message(unknown)[0] == {}
