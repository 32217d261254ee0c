"""Features, and the metadata in which Hugging Face describes them."""

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

HUGGINGFACE = datasets.Features(
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
FEATURES = {
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


def test_metadata_written_by_huggingface_is_read() -> None:
    assert features_of(HUGGINGFACE.arrow_schema.metadata) == FEATURES


def test_huggingface_reads_the_metadata_even_of_features_without_a_class() -> None:
    schema = pa.schema([], metadata=metadata_of(FEATURES))
    descriptions = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert {
        name: datasets.Features.from_dict({name: description})[name] for name, description in descriptions.items()
    } == dict(HUGGINGFACE)


@pytest.mark.parametrize("name", [name for name in FEATURES if name not in ("clip", "many", "grid", "frames")])
def test_a_field_has_the_arrow_type_that_huggingface_gives_it(name: str) -> None:
    assert arrow_type(FEATURES[name]) == HUGGINGFACE.arrow_schema.field(name).type


@pytest.mark.parametrize("name", ["grid", "frames"])
def test_an_array_has_the_storage_type_of_huggingface(name: str) -> None:
    assert arrow_type(FEATURES[name]) == HUGGINGFACE.arrow_schema.field(name).type.storage_type


def test_a_schema_describes_its_own_features() -> None:
    features: dict[str, Any] = {"a": Value("int32"), "inside": {"b": Image()}}
    schema = arrow_schema(features)
    assert features_of(schema.metadata) == {"a": Value("int32"), "inside": Struct((("b", Image()),))}
    assert schema.names == ["a", "inside"]


@pytest.mark.parametrize(
    ("description", "feature"),
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
def test_descriptions_of_older_versions_are_read(description: Any, feature: Any) -> None:
    assert features_from({"x": description}) == {"x": feature}


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
def test_metadata_without_a_valid_description_is_ignored(metadata: dict[bytes, bytes] | None) -> None:
    assert features_of(metadata) is None


def test_a_tensor_with_one_axis_is_described_as_a_list() -> None:
    assert described({"v": Tensor((3,), "int16")}) == described({"v": Sequence(Value("int16"), 3)})
    assert arrow_type(Tensor((3,), "int16")) == pa.list_(pa.int16())


@pytest.mark.parametrize(
    "build",
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
def test_an_invalid_feature_is_refused(build: Any) -> None:
    with pytest.raises(PlanError):
        build()


def test_features_hash_and_pickle_by_value() -> None:
    for feature in FEATURES.values():
        assert pickle.loads(pickle.dumps(feature)) == feature
        assert hash(feature) == hash(pickle.loads(pickle.dumps(feature)))
    assert ps.features.Image is Image


def test_the_number_of_a_class_is_found_by_its_name() -> None:
    assert ClassLabel(("cat", "dog")).number("dog") == 1
    with pytest.raises(ValueError, match="'fox' is not one of the classes cat, dog"):
        ClassLabel(("cat", "dog")).number("fox")


def test_features_are_inferred_from_arrow_types() -> None:
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
        arrow for _, arrow in columns[:3]
    ]


def test_a_number_of_classes_without_names_is_bounded() -> None:
    assert features_from({"y": {"num_classes": 3, "_type": "ClassLabel"}}) == {"y": ClassLabel(("0", "1", "2"))}
    assert features_from({"y": {"num_classes": 200_000_000, "_type": "ClassLabel"}}) == {"y": Value("int64")}


@pytest.mark.parametrize("depth", [100, 100_000])
def test_deeply_nested_features_are_ignored(depth: int) -> None:
    text = '{"info": {"features": {"x": ' + "[" * depth + '{"dtype": "int8", "_type": "Value"}' + "]" * depth + "}}}"
    assert features_of({b"huggingface": text.encode()}) is None
    assert (
        features_of({b"huggingface": b'{"info": {"features": {"x": {"_type": "List", "length": Infinity}}}}'}) is None
    )
