from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import DataError
from penstock.jobs.job_rows import decode_rows, encode_rows, escape_bytes, to_rows


@pytest.mark.parametrize(
    ("returned", "rows"),
    [
        (None, []),
        ({"a": 1}, [{"a": 1}]),
        ([{"a": 1}, {"b": 2}], [{"a": 1}, {"b": 2}]),
        (({"a": n} for n in range(2)), [{"a": 0}, {"a": 1}]),
        ([], []),
    ],
    ids=["none", "one", "several", "generator", "empty list"],
)
def test_a_function_may_return_rows_in_several_ways(returned: Any, rows: list[dict[str, Any]]) -> None:
    assert to_rows(returned) == rows


@pytest.mark.parametrize(
    "returned", [3, "text", b"bytes", [1, 2], {1: 2}, {"a": object()}, {"a": {"b": [object()]}}, object()]
)
def test_a_result_that_is_not_rows_is_refused(returned: Any) -> None:
    with pytest.raises(DataError, match=r"return a row|return numbers, text|names must be text"):
        to_rows(returned)


def test_values_become_plain_python_values() -> None:
    row = {
        "np": np.float32(0.5),
        "array": np.arange(4).reshape(2, 2),
        "tensor": torch.tensor([1, 2]),
        "path": Path("a/b"),
        "tuple": (1, "x"),
        "set": {2, 1},
        "view": memoryview(b"ab"),
    }
    assert to_rows(row) == [
        {
            "np": 0.5,
            "array": [[0, 1], [2, 3]],
            "tensor": [1, 2],
            "path": "a/b",
            "tuple": [1, "x"],
            "set": [1, 2],
            "view": b"ab",
        }
    ]


def test_encoded_rows_decode_to_the_same_rows() -> None:
    rows = [
        {
            "text": "ü\n\u2028",
            "bytes": b"\x00\xff",
            "time": datetime.datetime(2020, 5, 20, 1, 2, 3, 4),
            "day": datetime.date(2020, 5, 20),
            "hour": datetime.time(1, 2),
            "nested": [{"a": [b"x", None, True]}, {"$b": "not bytes"}, {"$d": {"$T": 1}}],
            "numbers": [1, 2.5, 1 << 70, float("inf")],
        }
    ]
    text = encode_rows(rows)
    assert "\n" not in text
    assert decode_rows(json.loads(text)) == rows


def test_bytes_that_are_not_utf8_are_escaped() -> None:
    assert escape_bytes("ok-ü") == "ok-ü"
    assert escape_bytes(b"a\xff.txt".decode("utf-8", "surrogateescape")) == "a\\xff.txt"
    assert to_rows({"a": "\ud800"}) == [{"a": "\\ud800"}]
