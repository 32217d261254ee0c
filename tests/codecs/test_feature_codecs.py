"""Decoding and storing fields by their features, and inferring features from values."""

from __future__ import annotations

import datetime
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image as PILImage

import penstock as ps
from penstock.codecs.feature_codecs import feature_decoder, infer_features, store_sample, stored
from penstock.codecs.features import (
    Audio,
    ClassLabel,
    Feature,
    Image,
    Sequence,
    Struct,
    Tensor,
    Value,
    arrow_schema,
    metadata_of,
)
from penstock.codecs.limits import Limits, OverLimit
from penstock.errors import DataError, PlanError


def png(value: int = 7) -> bytes:
    out = io.BytesIO()
    PILImage.fromarray(np.full((2, 3, 3), value, np.uint8)).save(out, "png")
    return out.getvalue()


def wav(rate: int = 8000, channels: int = 1) -> bytes:
    out = io.BytesIO()
    array = np.tile(np.sin(np.arange(rate // 10) / 9).astype(np.float32)[:, None], (1, channels))
    soundfile.write(out, array, rate, format="WAV", subtype="FLOAT")
    return out.getvalue()


def decoded(feature: Feature, value: Any, spec: str | None = None) -> Any:
    decode = feature_decoder(feature, spec, limits=Limits())
    return value if decode is None else decode(value)


def file(data: bytes | None, path: str | None = None) -> dict[str, Any]:
    return {"bytes": data, "path": path}


def test_images_become_arrays_as_stored_or_in_the_requested_mode() -> None:
    assert decoded(Image(), file(png())).shape == (2, 3, 3)
    assert decoded(Image("L"), file(png())).shape == (2, 3)
    assert decoded(Image(), file(png()), "l8").shape == (2, 3)
    assert decoded(Image(), png()).shape == (2, 3, 3)
    assert decoded(Image(decode=False), file(png())) == file(png())


def test_audio_is_resampled_to_the_rate_of_its_feature() -> None:
    plain = decoded(Audio(), file(wav()))
    assert (plain["sampling_rate"], plain["array"].shape) == (8000, (800,))
    faster = decoded(Audio(16000), file(wav()))
    assert (faster["sampling_rate"], faster["array"].shape) == (16000, (1600,))
    assert decoded(Audio(), file(wav(channels=2)))["array"].shape == (800, 2)
    assert decoded(Audio(num_channels=1), file(wav(channels=2)))["array"].shape == (800,)


def test_decoded_values_and_none_are_returned_unchanged() -> None:
    array = np.zeros((2, 2), np.uint8)
    assert decoded(Image(), array) is array
    assert decoded(Image(), None) is None
    assert decoded(Tensor((2,), "int8"), None) is None
    assert decoded(Struct((("a", Image()),)), None) is None


def test_nested_values_are_decoded() -> None:
    feature = Struct((("name", Value()), ("shots", Sequence(Image())), ("grid", Tensor((1, 2), "int16"))))
    got = decoded(feature, {"name": "x", "shots": [file(png()), None], "grid": [[1, 2]]})
    assert got["name"] == "x"
    assert got["shots"][0].shape == (2, 3, 3)
    assert got["shots"][1] is None
    assert got["grid"].dtype == np.int16


def test_an_array_of_another_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"has the shape \(1, 2\), but its feature has \(2, 2\)"):
        decoded(Tensor((2, 2), "int8"), [[1, 2]])
    assert decoded(Tensor((None, 2), "int8"), [[1, 2]]).shape == (1, 2)


def test_a_file_stored_only_by_path_is_not_opened() -> None:
    with pytest.raises(ValueError, match="the path '/etc/passwd' is stored without the bytes of its file"):
        decoded(Image(), file(None, "/etc/passwd"))


ROUND_TRIPS: list[tuple[Feature, Any]] = [
    (Image(), np.arange(18, dtype=np.uint8).reshape(2, 3, 3)),
    (Image(), np.arange(6, dtype=np.uint8).reshape(2, 3)),
    (Audio(8000), {"array": np.linspace(-1, 1, 50, dtype=np.float32), "sampling_rate": 8000}),
    (Tensor((2, 2), "float64"), np.array([[0.1, 2], [3, 4]])),
    (Tensor((None, 1), "uint8"), np.zeros((0, 1), np.uint8)),
    (ClassLabel(("a", "b")), 1),
    (ClassLabel(("a", "b")), -1),
    (Sequence(Value("int64")), [1, 2]),
    (Sequence(Tensor((1,), "int8")), [np.array([1], np.int8)]),
    (Struct((("a", Value("string")), ("b", Sequence(Image())))), {"a": "x", "b": [np.zeros((1, 1), np.uint8)]}),
    (Value("binary"), b"\0"),
    (Image(), None),
]


@pytest.mark.parametrize(("feature", "value"), ROUND_TRIPS, ids=lambda value: type(value).__name__)
def test_storing_is_the_inverse_of_decoding(feature: Feature, value: Any) -> None:
    encoded = stored(feature, value)
    np.testing.assert_equal(decoded(feature, encoded), value)
    assert stored(feature, encoded) == encoded  # a value in stored form does not change


def test_a_path_is_stored_as_its_file_only_with_a_read_function(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png())
    got = stored(Image(), str(path), read=lambda name: Path(name).read_bytes())
    assert got == file(png(), "a.png")
    with pytest.raises(ValueError, match="stored without the bytes of its file"):
        stored(Image(), str(path))


def test_classes_are_stored_by_name_or_number() -> None:
    label = ClassLabel(("cat", "dog"))
    assert stored(label, "dog") == 1
    assert stored(label, np.int32(0)) == 0
    for wrong in ("fox", 2, -2, 1.0, True):
        with pytest.raises((TypeError, ValueError)):
            stored(label, wrong)


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        ({"n": 1, "more": 2}, "'more' is not among the features: n, list"),
        ({"list": [1]}, "'list': expected a list of length 2, as its feature says, not 1"),
        ({"list": 3}, "'list': expected a list, as its feature says, not int"),
    ],
)
def test_the_error_of_a_sample_that_does_not_match_names_its_field(sample: dict[str, Any], problem: str) -> None:
    features: dict[str, Feature] = {"n": Value("int64"), "list": Sequence(Value("int64"), 2)}
    with pytest.raises(ValueError, match=problem):
        store_sample(features, sample)
    assert store_sample(features, {"n": 1}) == {"n": 1, "list": None}


def test_features_are_inferred_from_values() -> None:
    sample = {
        "jpg": b"..",
        "flac": b"..",
        "bin": b"..",
        "n": 1,
        "small": np.int16(2),
        "x": 0.5,
        "yes": True,
        "t": "x",
        "day": datetime.date(2020, 1, 1),
        "at": datetime.datetime(2020, 1, 1),
        "vector": np.zeros(3, np.float32),
        "matrix": np.zeros((2, 3), np.uint8),
        "numbers": [1, None, 2.5],
        "inside": {"a": 1},
        "sound": {"array": np.zeros(3, np.float32), "sampling_rate": 8000},
        "photo": PILImage.new("RGB", (1, 1)),
    }
    assert infer_features([sample]) == {
        "jpg": Image(),
        "flac": Audio(),
        "bin": Value("binary"),
        "n": Value("int64"),
        "small": Value("int16"),
        "x": Value("float64"),
        "yes": Value("bool"),
        "t": Value("string"),
        "day": Value("date32"),
        "at": Value("timestamp[us]"),
        "vector": Sequence(Value("float32")),
        "matrix": Tensor((2, 3), "uint8"),
        "numbers": Sequence(Value("float64")),
        "inside": Struct((("a", Value("int64")),)),
        "sound": Audio(8000),
        "photo": Image(),
    }


def test_later_samples_complete_what_the_first_leaves_open() -> None:
    assert infer_features([{"a": None, "b": []}, {"a": 1, "b": ["x"]}]) == {
        "a": Value("int64"),
        "b": Sequence(Value("string")),
    }
    assert infer_features([{"a": None}]) == {"a": Value("null")}


def test_known_features_are_kept_if_the_values_match_them() -> None:
    known = {"label": ClassLabel(("a", "b")), "n": Value("int8"), "image": Image()}
    assert infer_features([{"label": 1, "n": 3, "image": np.zeros((2, 2), np.uint8)}], known) == known
    changed = infer_features([{"label": "b, mostly", "n": "three", "image": 3}], known)
    assert changed == {"label": Value("string"), "n": Value("string"), "image": Value("int64")}


def test_the_error_of_a_value_that_no_table_stores_names_its_field() -> None:
    with pytest.raises(ValueError, match="field 'f': a value of type object cannot be stored"):
        infer_features([{"f": object()}])
    with pytest.raises(ValueError, match="field 'f': the items of a list have different types"):
        infer_features([{"f": [1, "a"]}])


def table() -> Any:
    import pyarrow as pa

    features = {"image": Image(), "label": ClassLabel(("a", "b")), "jpg": Value("binary")}
    rows = [{"image": file(png(n)), "label": n % 2, "jpg": png(n)} for n in range(4)]
    return pa.Table.from_pylist(rows, schema=arrow_schema(features))


def test_decode_without_arguments_follows_the_features_of_the_source() -> None:
    sample = ps.from_arrow(table()).decode().first()
    assert sample["image"].shape == (2, 3, 3)
    assert sample["label"] == 0
    assert sample["jpg"].shape == (2, 3, 3)  # bytes without a decoder by feature are decoded by extension


def test_arguments_of_decode_override_the_features() -> None:
    ds = ps.from_arrow(table())
    assert ds.decode("l8").first()["image"].shape == (2, 3)
    assert ds.decode(image="pil").first()["image"].size == (3, 2)
    assert ds.decode(image=len).first()["image"] == len(png(0))
    assert ds.decode(image="bytes").first()["image"] == png(0)
    assert ds.decode(image=Image("L")).first()["image"].shape == (2, 3)
    assert ds.decode(image=Value("binary")).first()["image"] == file(png(0))
    assert ps.from_items([{"f": json.dumps(1), "shot": png()}]).decode(shot=Image()).first()["shot"].shape == (2, 3, 3)


def test_features_follow_renamed_fields() -> None:
    ds = ps.from_arrow(table()).rename(shot="photo;image", image="jpg").decode().select("shot", "image")
    assert {name: value.shape for name, value in ds.first().items()} == {"shot": (2, 3, 3), "image": (2, 3, 3)}


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_every_worker_decodes_by_features(on: Any) -> None:
    ds = ps.from_arrow(table()).union(ps.from_arrow(table()).rename(label="label")).decode(workers=2, on=on)
    assert [int(sample["image"][0, 0, 0]) for sample in ds] == [0, 1, 2, 3] * 2


def test_each_branch_follows_its_own_features_and_conflicting_features_are_refused() -> None:
    import pyarrow as pa

    clips = pa.Table.from_pylist([{"image": file(wav())}], schema=arrow_schema({"image": Audio()}))
    both = ps.from_arrow(table()).decode().union(ps.from_arrow(clips).decode())
    assert [type(sample["image"]).__name__ for sample in both] == ["ndarray"] * 4 + ["dict"]
    with pytest.raises(PlanError, match=r"'image' is Image\(.*\) in one source and Audio\(.*call decode\(\) on each"):
        ps.from_arrow(table()).union(ps.from_arrow(clips)).decode().take_all()


def test_the_error_of_a_damaged_file_in_a_table_names_field_and_row() -> None:
    import pyarrow as pa

    rows = [{"image": file(png())}, {"image": file(b"no png")}, {"image": file(None, "gone.png")}]
    ds = ps.from_arrow(pa.Table.from_pylist(rows, schema=arrow_schema({"image": Image()}))).decode()
    with pytest.raises(DataError, match=r"field 'image'.*key: 1"):
        ds.take_all()
    assert len(ds.on_error("skip").take_all()) == 1


def test_fields_with_features_get_extensions_in_shards(tmp_path: Path) -> None:
    import pyarrow as pa

    features = {
        "image": Image(),
        "shot": Image(),
        "sound": Audio(),
        "label": ClassLabel(("a", "b")),
        "id": Value("string"),
        "n": Value("int64"),
        "grid": Tensor((1, 2), "int8"),
        "list": Sequence(Value("string")),
        "gone": Value("int64"),
        "jpg": Value("binary"),
    }
    row = {"image": file(png()), "shot": file(png(), "a.PNG"), "sound": file(wav()), "label": 1, "id": "x-1", "n": 7}
    row |= {"grid": [[1, 2]], "list": ["a", "b"], "gone": None, "jpg": png()}
    ds = ps.from_arrow(pa.Table.from_pylist([row], schema=arrow_schema(features)))
    for dataset in (ds, ds.decode()):
        dataset.write_tar(str(tmp_path / "a.tar"), mode="replace")
        sample = ps.read_tar(str(tmp_path / "a.tar")).decode().first()
        assert (sample["image"].shape, sample["shot.png"].shape, sample["jpg"].shape) == ((2, 3, 3),) * 3
        assert sample["sound.wav"]["sampling_rate"] == 8000
        assert (sample["label.cls"], sample["id.txt"], sample["n.cls"]) == (1, "x-1", 7)
        assert (sample["grid.npy"].tolist(), sample["list.json"]) == ([[1, 2]], ["a", "b"])
        assert not [name for name in sample if name.startswith("gone")]


def test_a_column_that_does_not_match_its_metadata_is_left_unchanged() -> None:
    import pyarrow as pa

    mismatched = pa.table({"a": [1, 2]}).replace_schema_metadata(metadata_of({"a": Image()}))
    assert ps.from_arrow(mismatched).decode().take_all() == [{"a": 1}, {"a": 2}]


def test_audio_that_grows_beyond_the_limits_when_it_is_resampled_is_refused() -> None:
    data = io.BytesIO()
    soundfile.write(data, np.zeros(1000, np.float32), 1, format="WAV")
    decode = feature_decoder(Audio(sampling_rate=16_000), limits=Limits())
    assert decode is not None
    with pytest.raises(OverLimit, match="resampled audio"):
        decode({"bytes": data.getvalue(), "path": None})
