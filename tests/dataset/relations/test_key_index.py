"""A key index finds the positions that a dict would give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dataset.relations import key_index
from penstock.dataset.relations.key_index import KeyIndex

KINDS: dict[str, tuple[Any, Any]] = {
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "float": (pa.float64(), st.floats(allow_nan=False).map(lambda x: x + 0.0)),
    "float32": (pa.float32(), st.floats(width=32, allow_nan=False).map(lambda x: x + 0.0)),
    "text": (pa.string(), st.text(max_size=20)),
    "large": (pa.large_string(), st.text(st.sampled_from("ab\0"), max_size=18)),
    "bytes": (pa.binary(), st.binary(max_size=20)),
    "timestamp": (pa.timestamp("ns"), st.integers(-(2**62), 2**62)),
    "date": (pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    "bool": (pa.bool_(), st.booleans()),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_positions_are_those_of_a_dict(kind: str, data: st.DataObject) -> None:
    arrow_type, values = KINDS[kind]
    found = data.draw(st.lists(st.none() | values, unique=True, max_size=40))
    asked = data.draw(st.lists(st.sampled_from(found) | values if found else values, max_size=40))
    positions = {value: number for number, value in enumerate(found)}
    lead = data.draw(st.integers(0, 3))  # slices that begin within their buffers
    array = pa.array(asked[:1] * lead + asked, arrow_type)[lead if asked else 0 :]
    assert KeyIndex(pa.array(found, arrow_type)).numbers(array).tolist() == [
        positions.get(value, -1) for value in asked
    ]


def test_nan_is_found_whatever_its_bits() -> None:
    other = np.array([0x7FF8000000000001], np.uint64).view(np.float64)
    found = KeyIndex(pa.array([1.0, float("nan"), 0.0]))
    assert found.numbers(pa.array(np.concatenate([other, [-0.0, 2.0, 1.0]]))).tolist() == [1, 2, -1, 0]


def test_texts_with_the_same_hash_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_hashes_of_text", lambda array: np.full(len(array), 7, np.uint64))
    one, several = KeyIndex(pa.array(["a"])), KeyIndex(pa.array(["a", None, "b"]))
    assert one.numbers(pa.array(["b", "a", None])).tolist() == [-1, 0, -1]
    assert several.numbers(pa.array(["b", "x", "a", None])).tolist() == [2, -1, 0, 1]
