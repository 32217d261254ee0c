"""Which codec decodes and encodes a field."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from webdataset import autodecode, writer

from penstock import codecs
from penstock.codecs import Limits, OverLimit, check_spec, registry
from penstock.errors import PlanError

LIMITS = Limits()
PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def decode(
    field: str, data: bytes, spec: str | None = None, *, limits: Limits = LIMITS, trust_pickle: bool = False
) -> Any:
    decoder = codecs.decoder(field, spec, limits=limits, trust_pickle=trust_pickle)
    assert decoder is not None
    return decoder(data)


def decode_as(field: str, spec: str | None, data: bytes, *, trust_pickle: bool = False) -> Any:
    return codecs.decoder_by_spec(field, spec, limits=LIMITS, trust_pickle=trust_pickle)(data)


def by_extension(extensions: list[str], value: Any) -> dict[str, Any]:
    return {extension: value for extension in extensions}  # noqa: C420 (the value is only compared)


def png() -> bytes:
    return codecs.encode("png", PIXELS)


VALUES: dict[str, Any] = {
    **by_extension(["txt", "text", "transcript"], "größer"),
    **by_extension(["cls", "cls2", "class", "count", "index", "inx", "id"], 42),
    **by_extension(["json", "jsn", "mp", "msg", "msgpack", "cbor"], {"a": [1, 2.5, None, "x"]}),
    **by_extension(["npy"], np.arange(6.0).reshape(2, 3)),
    **by_extension(["npz"], {"a": np.arange(3), "b": np.eye(2)}),
    **by_extension(["ten", "tb", "tenbin"], [np.arange(3), np.eye(2)]),
    **by_extension(["pth"], {"w": torch.arange(3)}),
    **by_extension(["png", "ppm", "bmp", "tif", "tiff", "webp", "pnm", "jp2"], PIXELS),
    **by_extension(["pgm"], PIXELS[:, :, 0]),
    **by_extension(["pbm"], PIXELS[:, :, 0] // 128 * np.uint8(255)),
    **by_extension(["wav", "aiff", "aif"], {"array": np.zeros(5, np.float32), "sampling_rate": 8000}),
    **by_extension(["flac"], {"array": np.zeros(5, np.float32), "sampling_rate": 8000}),
}
LOSSY = {"jpg", "jpeg", "img", "image", "ogg", "oga", "opus", "mp3"}
READ_ONLY = {"gif", "avif"}
TRUSTED = {"pkl", "pickle", "pyd"}


def assert_same(left: Any, right: Any) -> None:
    if isinstance(right, dict):
        assert left.keys() == right.keys()
        for name in right:
            assert_same(left[name], right[name])
    elif isinstance(right, list):
        assert len(left) == len(right)
        for left_item, right_item in zip(left, right, strict=True):
            assert_same(left_item, right_item)
    else:
        assert np.array_equal(left, right)
        assert type(left) is type(right)


@pytest.mark.parametrize("field", VALUES)
@pytest.mark.parametrize("pattern", ["{}", "seg.{}", "{}.gz", "a.b.{}.gz"])
def test_every_codec_round_trips_its_value(field: str, pattern: str) -> None:
    value, name = VALUES[field], pattern.format(field)
    assert_same(decode(name, codecs.encode(name, value)), value)


def test_every_extension_is_covered_by_these_tests() -> None:
    known = {extension for codec in registry.CODECS.values() for extension in codec.extensions}
    assert known == set(VALUES) | LOSSY | READ_ONLY | TRUSTED


WEBDATASET_VALUES = {
    **{name: VALUES[name] for name in ("txt", "text", "transcript", "cls", "cls2", "index", "inx", "id")},
    **{name: VALUES[name] for name in ("json", "jsn", "mp", "msg", "npy", "npz", "ten", "tb", "pth")},
}


@pytest.mark.parametrize("field", WEBDATASET_VALUES)
def test_fields_are_exchanged_with_webdataset(field: str) -> None:
    value = WEBDATASET_VALUES[field]
    read_back = autodecode.decoders[field](codecs.encode(field, value))
    assert_same(list(read_back) if isinstance(value, list) else read_back, value)
    data = bytes(writer.default_handlers[field](value))
    assert_same(decode(field, data), value)
    gzipped = decode(f"{field}.gz", gzip.compress(data))
    assert_same(gzipped, value)


def test_the_last_part_of_the_name_in_any_case_is_the_extension() -> None:
    assert codecs.extension("seg.PNG") == "png"
    assert codecs.extension("cls") == "cls"
    assert decode("a.JSON", b"[1]") == [1]
    assert decode("IMAGE.Png", png()).shape == (4, 5, 3)
    assert decode("JSON.GZ", gzip.compress(b"[1]")) == [1]


@pytest.mark.parametrize("field", ["bin", "mp4", "tar", "dat", "", "__key__", "jpgx"])
@pytest.mark.parametrize("spec", [None, "rgb8"])
def test_unknown_extensions_have_no_decoder(field: str, spec: str | None) -> None:
    assert codecs.decoder(field, spec, limits=LIMITS, trust_pickle=False) is None


def test_an_image_spec_leaves_other_extensions_alone() -> None:
    assert decode("png", png(), "l8").shape == (4, 5)
    assert decode("cls", b"3", "l8") == 3
    assert codecs.is_image("seg.png")
    assert not codecs.is_image("png.txt")


def test_gzip_data_of_an_unknown_extension_is_decompressed_to_bytes() -> None:
    assert decode("bin.gz", gzip.compress(b"raw")) == b"raw"
    assert decode("gz", gzip.compress(b"raw")) == b"raw"
    assert decode("txt.gz.gz", gzip.compress(gzip.compress(b"raw"))) == "raw"


def test_limits_are_applied_by_every_codec() -> None:
    tight = Limits(pixels=10, bytes=20)
    wav = codecs.encode("wav", (np.zeros(100, np.float32), 8000))
    for field, data in [
        ("png", png()),
        ("npy", codecs.encode("npy", np.zeros(10))),
        ("npz", codecs.encode("npz", {"a": np.zeros(10)})),
        ("wav", wav),
        ("txt.gz", gzip.compress(bytes(100))),
        ("pth", codecs.encode("pth", torch.zeros(10))),
    ]:
        with pytest.raises(OverLimit):
            decode(field, data, limits=tight)
        decode(field, data)


@pytest.mark.parametrize("field", sorted(TRUSTED))
def test_pickle_is_refused_unless_trusted(field: str) -> None:
    data = pickle.dumps({"a": 1})
    refusal = r"pickle can run code and is refused; pass decode\(trust_pickle=True\) if you trust this data"
    with pytest.raises(ValueError, match=refusal):
        decode(field, data)
    with pytest.raises(ValueError, match=refusal):
        decode_as("x", field, data)
    with pytest.raises(ValueError, match="refused"):
        codecs.encode(field, {"a": 1})
    assert decode(field, data, trust_pickle=True) == {"a": 1}
    assert decode_as("x", field, data, trust_pickle=True) == {"a": 1}
    assert decode(field, codecs.encode(field, {"a": 1}, trust_pickle=True), trust_pickle=True) == {"a": 1}
    with pytest.raises(ValueError, match="refused"):
        decode(f"{field}.gz", gzip.compress(data))


def test_the_error_of_an_invalid_integer_names_its_extension() -> None:
    with pytest.raises(ValueError, match="cls2 is not an integer: b'x'"):
        decode("a.cls2", b"x")


def test_a_spec_for_a_field_overrides_its_extension() -> None:
    assert decode_as("dat", "rgb8", png()).shape == (4, 5, 3)
    assert decode_as("txt", "pil", png()).size == (5, 4)
    assert decode_as("dat", "image", png()).shape == (4, 5, 3)
    assert decode_as("dat", "json", b"[1]") == [1]
    assert decode_as("dat", "int", b"7") == 7
    assert decode_as("dat", "cls", b"7") == 7
    assert decode_as("dat", "jpg", png()).shape == (4, 5, 3)
    assert decode_as("dat", "npy", codecs.encode("npy", PIXELS)).shape == (4, 5, 3)
    assert decode_as("dat", "wav", codecs.encode("wav", (np.zeros(3, np.int16), 8000)))["sampling_rate"] == 8000
    assert decode_as("json", "bytes", b"[1]") == b"[1]"
    assert decode_as("json", "txt", b"[1]") == "[1]"
    assert decode_as("json", None, b"[1]") == [1]
    assert decode_as("bin", None, b"[1]") == b"[1]"


def test_a_gz_field_with_a_spec_is_decompressed_first_unless_the_spec_is_bytes() -> None:
    packed = gzip.compress(b"[1]")
    assert decode_as("txt.gz", "json", packed) == [1]
    assert decode_as("gz", "json", packed) == [1]
    assert decode_as("json.gz", "bytes", packed) == packed


@pytest.mark.parametrize("spec", [*autodecode.imagespecs, "pil8"])
def test_every_image_spec_is_accepted_for_all_fields_and_for_one(spec: str) -> None:
    check_spec(spec)
    check_spec(spec, by_field=True)


def test_an_unknown_spec_is_refused_and_the_supported_ones_are_listed() -> None:
    with pytest.raises(PlanError, match=r"unknown decode spec 'rgb9': did you mean 'rgb\w?'\? supported specs: pil, "):
        check_spec("rgb9")
    with pytest.raises(PlanError, match="did you mean 'json'"):
        check_spec("jsn8", by_field=True)
    with pytest.raises(PlanError, match=r"'json': it applies to a single field: decode\(fields="):
        check_spec("json")
    with pytest.raises(PlanError, match="unknown decode spec"):
        codecs.decoder("jpg", "RGB8", limits=LIMITS, trust_pickle=False)
    with pytest.raises(PlanError, match="unknown decode spec"):
        codecs.decoder_by_spec("jpg", "nonsense", limits=LIMITS, trust_pickle=False)


@pytest.mark.parametrize("field", VALUES)
def test_decoders_can_be_pickled(field: str) -> None:
    name, value = f"{field}.gz", VALUES[field]
    decoder = codecs.decoder(name, limits=LIMITS, trust_pickle=False)
    assert_same(pickle.loads(pickle.dumps(decoder))(codecs.encode(name, value)), value)


@pytest.mark.parametrize("data", [b"\0raw", bytearray(b"\0raw"), memoryview(b"\0raw")])
@pytest.mark.parametrize("field", ["jpg", "bin", "json", "cls", "pkl", "npy"])
def test_bytes_are_stored_unchanged(field: str, data: Any) -> None:
    assert codecs.encode(field, data) == b"\0raw"


def test_bytes_under_gz_are_compressed_once() -> None:
    packed = codecs.encode("json.gz", b"[1]")
    assert gzip.decompress(packed) == b"[1]"
    assert codecs.encode("json.gz", packed) == packed
    assert codecs.encode("json.gz", [1]) == codecs.encode("json.gz", [1])


def test_text_is_written_as_utf8_under_extensions_without_a_codec() -> None:
    assert codecs.encode("html", "<é>") == "<é>".encode()
    assert codecs.encode("txt", "é") == "é".encode()
    assert codecs.encode("json", "é") == '"é"'.encode()
    assert codecs.encode("cls", "3") == b"3"


@pytest.mark.parametrize(
    ("value", "suggestion"),
    [
        (3, "cls"),
        (np.int64(3), "cls"),
        (np.zeros(2), "npy"),
        ([1], "json"),
        (2.5, "json"),
        (Image.new("L", (1, 1)), "png"),
        (torch.zeros(1), "pth"),
    ],
)
def test_the_error_of_a_value_without_encoder_suggests_an_extension(value: Any, suggestion: str) -> None:
    kind = type(value).__name__
    problem = rf"field 'label' \({kind}\) cannot be encoded: its extension has no encoder; "
    problem += rf"rename it, e.g. .rename\({suggestion}='label'\)"
    with pytest.raises(TypeError, match=problem):
        codecs.encode("label", value)
    codecs.encode(suggestion, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("cls", 1.5), ("txt", 3), ("json", object()), ("npy", [1]), ("seg.png", "x"), ("wav", 3)],
)
def test_the_error_of_a_value_that_cannot_be_encoded_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"field '{field}' \({type(value).__name__}\) cannot be encoded: \w"):
        codecs.encode(field, value)


def test_json_with_indentation_is_read() -> None:
    assert decode("json", json.dumps({"ä": [1]}, indent=2).encode()) == {"ä": [1]}


def test_images_are_read_under_any_image_extension() -> None:
    stream = io.BytesIO()
    Image.fromarray(PIXELS).save(stream, "BMP")
    assert np.array_equal(decode("jpg", stream.getvalue()), PIXELS)
