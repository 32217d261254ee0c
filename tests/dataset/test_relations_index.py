"""Where values are among many: what a dict would say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.codecs.features import ClassLabel, Value, features_of, metadata_of
from penstock.dataset.relations import key_index as index
from penstock.dataset.relations.key_index import Index

KINDS: dict[str, tuple[Any, Any]] = {
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "float": (pa.float64(), st.floats(allow_nan=False).map(lambda x: x + 0.0)),
    "float32": (pa.float32(), st.floats(width=32, allow_nan=False).map(lambda x: x + 0.0)),
    "text": (pa.string(), st.text(max_size=20)),
    "large": (pa.large_string(), st.text(st.sampled_from("ab\0"), max_size=18)),
    "bytes": (pa.binary(), st.binary(max_size=20)),
    "moment": (pa.timestamp("ns"), st.integers(-(2**62), 2**62)),
    "day": (pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    "truth": (pa.bool_(), st.booleans()),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_places_are_those_a_dict_would_give(kind: str, data: st.DataObject) -> None:
    made, values = KINDS[kind]
    found = data.draw(st.lists(st.none() | values, unique=True, max_size=40))
    asked = data.draw(st.lists(st.sampled_from(found) | values if found else values, max_size=40))
    places = {value: number for number, value in enumerate(found)}
    lead = data.draw(st.integers(0, 3))  # arrays that begin within others
    array = pa.array(asked[:1] * lead + asked, made)[lead if asked else 0 :]
    assert Index(pa.array(found, made)).numbers(array).tolist() == [places.get(value, -1) for value in asked]


def test_nan_is_found_whatever_its_bits() -> None:
    other = np.array([0x7FF8000000000001], np.uint64).view(np.float64)
    found = Index(pa.array([1.0, float("nan"), 0.0]))
    assert found.numbers(pa.array(np.concatenate([other, [-0.0, 2.0, 1.0]]))).tolist() == [1, 2, -1, 0]


def test_texts_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_hashes_of_text", lambda array: np.full(len(array), 7, np.uint64))
    one, several = Index(pa.array(["a"])), Index(pa.array(["a", None, "b"]))
    assert one.numbers(pa.array(["b", "a", None])).tolist() == [-1, 0, -1]
    assert several.numbers(pa.array(["b", "x", "a", None])).tolist() == [2, -1, 0, 1]


def test_groups_that_are_put_off_are_one_whatever_the_type_of_their_values() -> None:
    rows = [{"k": kind(k)} for kind in (int, float) for k in range(6_000)]
    counts = ps.from_items(rows).on("local", memory="60KB").groupby("k").count().take_all()
    assert [(row["k"], row["count"]) for row in counts] == [(k, 2) for k in range(6_000)]


def test_a_group_that_lies_on_several_pieces_is_one_list() -> None:
    table = pa.table({"k": np.arange(20_000) % 3, "x": np.arange(20_000), "text": ["some more bytes" * 4] * 20_000})
    got = ps.from_arrow(table).on("local", memory="1MB").groupby("k").list("x", "text").take_all()
    assert [row["k"] for row in got] == [0, 1, 2]
    assert [row["x_list"] for row in got] == [list(range(k, 20_000, 3)) for k in range(3)]


def test_rows_that_are_samples_still_keep_what_is_known_of_their_fields(tmp_path: Path) -> None:
    features = {"label": ClassLabel(("cat", "dog")), "x": Value("int64")}
    schema = pa.schema([("label", pa.int64()), ("x", pa.int64())], metadata=metadata_of(features))
    pq.write_table(pa.table({"label": [1, 0, 1], "x": [3, 2, 1]}, schema=schema), tmp_path / "a.parquet")
    ds = ps.read_parquet(str(tmp_path / "a.parquet"))
    for number, made in enumerate((ds.sort("x"), ds.distinct("label"), ds.value_counts("label"))):
        made.write_parquet(tmp_path / str(number))
        found = features_of(pq.read_schema(tmp_path / str(number) / "00000-of-00001.parquet").metadata)
        assert found is not None
        assert found["label"] == features["label"]
