from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import DataError
from penstock.jobs.job_rows import from_json, readable, rows_of, to_json


@pytest.mark.parametrize(
    ("answer", "rows"),
    [
        (None, []),
        ({"a": 1}, [{"a": 1}]),
        ([{"a": 1}, {"b": 2}], [{"a": 1}, {"b": 2}]),
        (({"a": n} for n in range(2)), [{"a": 0}, {"a": 1}]),
        ([], []),
    ],
    ids=["nothing", "one", "several", "generator", "none of many"],
)
def test_an_answer_is_rows(answer: Any, rows: list[dict[str, Any]]) -> None:
    assert rows_of(answer) == rows


@pytest.mark.parametrize(
    "junk", [3, "text", b"bytes", [1, 2], {1: 2}, {"a": object()}, {"a": {"b": [object()]}}, object()]
)
def test_junk_is_refused_in_words(junk: Any) -> None:
    with pytest.raises(DataError, match=r"give|names are text"):
        rows_of(junk)


def test_values_are_plain_whatever_they_were() -> None:
    given = {
        "np": np.float32(0.5),
        "array": np.arange(4).reshape(2, 2),
        "tensor": torch.tensor([1, 2]),
        "path": Path("a/b"),
        "tuple": (1, "x"),
        "set": {2, 1},
        "view": memoryview(b"ab"),
    }
    assert rows_of(given) == [
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


def test_rows_come_back_from_text_as_they_were() -> None:
    rows = [
        {
            "text": "ü\n\u2028",
            "bytes": b"\x00\xff",
            "time": datetime.datetime(2020, 5, 20, 1, 2, 3, 4),
            "day": datetime.date(2020, 5, 20),
            "hour": datetime.time(1, 2),
            "nested": [{"a": [b"x", None, True]}, {"$b": "no bytes"}, {"$d": {"$T": 1}}],
            "numbers": [1, 2.5, 1 << 70, float("inf")],
        }
    ]
    text = to_json(rows)
    assert "\n" not in text
    assert from_json(json.loads(text)) == rows


def test_a_name_that_is_no_text_is_spelled_out() -> None:
    assert readable("ok-ü") == "ok-ü"
    assert readable(b"a\xff.txt".decode("utf-8", "surrogateescape")) == "a\\xff.txt"
    assert rows_of({"a": "\ud800"}) == [{"a": "\\ud800"}]
