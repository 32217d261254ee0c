"""Features as values, and as the metadata that Hugging Face writes and reads."""

from __future__ import annotations

import json
import pickle
from typing import Any

import datasets
import pyarrow as pa
import pytest

import penstock as ps
from penstock.codecs.features import (
    Audio,
    ClassLabel,
    Image,
    OtherFeature,
    Sequence,
    Struct,
    Tensor,
    Value,
    arrow_schema,
    arrow_type,
    described,
    feature_of,
    features_by_type,
    features_from,
    features_of,
    metadata_of,
)
from penstock.errors import PlanError

THEIRS = datasets.Features(
    {
        "text": datasets.Value("string"),
        "when": datasets.Value("timestamp[us, tz=UTC]"),
        "price": datasets.Value("decimal128(10, 2)"),
        "image": datasets.Image(),
        "gray": datasets.Image(mode="L", decode=False),
        "sound": datasets.Audio(sampling_rate=16000),
        "label": datasets.ClassLabel(names=["cat", "dog"]),
        "grid": datasets.Array2D((2, 3), "float32"),
        "frames": datasets.Array3D((None, 4, 4), "uint8"),
        "tokens": datasets.List(datasets.Value("int64")),
        "box": datasets.List(datasets.Value("float32"), length=4),
        "people": {"name": datasets.Value("string"), "photos": datasets.List(datasets.Image())},
        "clip": datasets.Video(),
        "many": datasets.LargeList(datasets.Value("int8")),
    }
)
OURS = {
    "text": Value("string"),
    "when": Value("timestamp[us, tz=UTC]"),
    "price": Value("decimal128(10, 2)"),
    "image": Image(),
    "gray": Image("L", decode=False),
    "sound": Audio(16000),
    "label": ClassLabel(("cat", "dog")),
    "grid": Tensor((2, 3), "float32"),
    "frames": Tensor((None, 4, 4), "uint8"),
    "tokens": Sequence(Value("int64")),
    "box": Sequence(Value("float32"), 4),
    "people": Struct((("name", Value("string")), ("photos", Sequence(Image())))),
    "clip": OtherFeature('{"_type": "Video"}'),
    "many": OtherFeature('{"_type": "LargeList", "feature": {"_type": "Value", "dtype": "int8"}}'),
}


def test_their_metadata_is_read() -> None:
    assert features_of(THEIRS.arrow_schema.metadata) == OURS


def test_they_read_our_metadata_even_of_kinds_that_are_not_known_here() -> None:
    schema = pa.schema([], metadata=metadata_of(OURS))
    found = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert {name: datasets.Features.from_dict({name: told})[name] for name, told in found.items()} == dict(THEIRS)


@pytest.mark.parametrize("name", [name for name in OURS if name not in ("clip", "many", "grid", "frames")])
def test_a_field_is_stored_as_they_store_it(name: str) -> None:
    assert arrow_type(OURS[name]) == THEIRS.arrow_schema.field(name).type


@pytest.mark.parametrize("name", ["grid", "frames"])
def test_arrays_are_stored_as_theirs_are(name: str) -> None:
    assert arrow_type(OURS[name]) == THEIRS.arrow_schema.field(name).type.storage_type


def test_a_schema_describes_its_own_features() -> None:
    features: dict[str, Any] = {"a": Value("int32"), "inside": {"b": Image()}}
    schema = arrow_schema(features)
    assert features_of(schema.metadata) == {"a": Value("int32"), "inside": Struct((("b", Image()),))}
    assert schema.names == ["a", "inside"]


@pytest.mark.parametrize(
    ("told", "feature"),
    [
        ([{"dtype": "int8", "_type": "Value"}], Sequence(Value("int8"))),
        ({"feature": {"dtype": "int8", "_type": "Value"}, "length": -1, "_type": "Sequence"}, Sequence(Value("int8"))),
        (
            {"feature": {"a": {"dtype": "int8", "_type": "Value"}}, "length": 2, "_type": "Sequence"},
            Struct((("a", Sequence(Value("int8"), 2)),)),
        ),
        ({"num_classes": 2, "_type": "ClassLabel"}, ClassLabel(("0", "1"))),
        ({"sampling_rate": 8000, "mono": True, "_type": "Audio"}, Audio(8000)),
    ],
)
def test_older_descriptions_are_understood(told: Any, feature: Any) -> None:
    assert features_from({"x": told}) == {"x": feature}


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {b"pandas": b"{}"},
        {b"huggingface": b"{"},
        {b"huggingface": b"{}"},
        {b"huggingface": b"[]"},
        {b"huggingface": b'{"info": {"features": [1]}}'},
        {b"huggingface": b'{"info": {"features": {"a": 3}}}'},
        {b"huggingface": b'{"info": {"features": {"a": {"dtype": 3, "_type": "Value"}}}}'},
    ],
)
def test_metadata_that_says_nothing_is_as_good_as_none(metadata: dict[bytes, bytes] | None) -> None:
    assert features_of(metadata) is None


def test_tensors_of_one_axis_are_lists_to_others() -> None:
    assert described({"v": Tensor((3,), "int16")}) == described({"v": Sequence(Value("int16"), 3)})
    assert arrow_type(Tensor((3,), "int16")) == pa.list_(pa.int16())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Value("Not A Type"),
        lambda: ClassLabel(("a", "a")),
        lambda: Tensor((2, -1)),
        lambda: Tensor((2, None)),
        lambda: Tensor((2,), "string"),
        lambda: Audio(sampling_rate=0),
        lambda: Audio(sampling_rate=True),
        lambda: Sequence(3),  # type: ignore[arg-type]
        lambda: feature_of("int64"),
        lambda: arrow_type(Value("int65")),
        lambda: arrow_type(OtherFeature("{}")),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_is_written(make: Any) -> None:
    with pytest.raises(PlanError):
        make()


def test_features_are_values() -> None:
    for feature in OURS.values():
        assert pickle.loads(pickle.dumps(feature)) == feature
        assert hash(feature) == hash(pickle.loads(pickle.dumps(feature)))
    assert ps.features.Image is Image


def test_a_class_is_found_by_its_name() -> None:
    assert ClassLabel(("cat", "dog")).number("dog") == 1
    with pytest.raises(ValueError, match="'fox' is none of the classes cat, dog"):
        ClassLabel(("cat", "dog")).number("fox")


def test_types_alone_tell_something() -> None:
    columns = [
        ("a", pa.float32()),
        ("b", pa.list_(pa.large_string())),
        ("c", pa.struct([("d", pa.date32())])),
        ("e", pa.dictionary(pa.int8(), pa.string())),
        ("f", pa.list_(pa.bool_(), 2)),
    ]
    assert features_by_type(columns) == {
        "a": Value("float32"),
        "b": Sequence(Value("large_string")),
        "c": Struct((("d", Value("date32")),)),
        "e": Value("string"),
        "f": Sequence(Value("bool"), 2),
    }
    assert [arrow_type(feature) for feature in features_by_type(columns[:3]).values()] == [
        kind for _, kind in columns[:3]
    ]
