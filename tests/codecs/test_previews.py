"""What a field holds, for people: of every kind of value, within limits, and without an exception."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from typing import Any

import numpy as np
import PIL.Image
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs.previews import MAX_TEXT, hex_dump, picture, preview, sound


def _image(mode: str = "RGB", size: tuple[int, int] = (60, 40), format: str = "PNG") -> bytes:
    out = io.BytesIO()
    PIL.Image.new(mode, size).save(out, format)
    return out.getvalue()


def _wav(seconds: float = 0.5) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, np.sin(np.arange(int(8000 * seconds)) / 5), 8000, format="WAV")
    return out.getvalue()


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "value", "kind", "summary"),
    [
        ("jpg", _image(format="JPEG"), "image", "60 x 40 JPEG"),
        ("image", {"bytes": _image(), "path": None}, "image", "60 x 40 PNG"),
        ("value", _image(), "image", "60 x 40 PNG"),
        ("x", np.zeros((20, 30, 3), np.uint8), "image", "20 x 30 x 3 uint8"),
        ("x", torch.zeros(3, 20, 30), "image", "3 x 20 x 30 float32"),
        ("x", PIL.Image.new("L", (5, 6)), "image", "5 x 6 L"),
        ("wav", _wav(), "audio", "0.50 s, 8 kHz, mono"),
        (
            "a",
            {"array": np.zeros((2, 16000), np.float32), "sampling_rate": 16000},
            "audio",
            "1.00 s, 16 kHz, 2 channels",
        ),
        ("npy", _npy(np.arange(6.0).reshape(2, 3)), "array", "array 2 x 3 float64, 0 to 5, mean 2.5"),
        ("x", np.array(["a"]), "text", "array 1"),
        ("x", np.array([np.nan, np.inf]), "array", "array 2 float64"),
        ("txt", b"hello", "text", "text, 5 B"),
        ("txt.gz", gzip.compress(b"hello", mtime=0), "text", "text, 5 B"),
        ("x", "hello", "text", "text, 5 characters"),
        ("cls", b"3", "number", "int"),
        ("x", 2.5, "number", "float"),
        ("json", b'{"a": [1, 2]}', "json", "json, 13 B"),
        ("x", {"a": np.zeros(3), "b": b"xy"}, "json", "dict"),
        ("x", None, "nothing", "null"),
        ("x", b"\x00\x01\x02\xff", "bytes", "bytes, 4 B"),
    ],
)
def test_every_kind_of_value_has_a_summary(name: str, value: Any, kind: str, summary: str) -> None:
    shown = preview(name, value)
    assert (shown.kind, shown.problem) == (kind, None)
    assert shown.summary.startswith(summary)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jpg", b"not an image"),
        ("png", _image("1", (9000, 9000))),
        ("pkl", pickle.dumps([1])),
        (
            "npy",
            b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999,), }".ljust(128),
        ),
        ("npz", b"PK\x03\x04 damaged"),
        ("json", b"{"),
        ("wav", b"RIFF0000WAVEdamaged"),
        ("cls", b"not a number"),
        ("json.gz", gzip.compress(bytes(50_000_000))),
    ],
)
def test_what_cannot_be_decoded_has_a_reason_and_its_bytes(name: str, value: bytes) -> None:
    shown = preview(name, value)
    assert shown.problem
    assert shown.kind == "bytes"
    assert shown.text == hex_dump(value)


@given(
    st.sampled_from(["jpg", "png", "json", "npy", "npz", "wav", "cls", "txt", "x", "ten", "pth", "cbor"]), st.binary()
)
def test_no_bytes_make_a_preview_fail(name: str, data: bytes) -> None:
    preview(name, data)


def test_a_value_whose_text_fails_has_a_preview() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("broken")

    assert preview("x", {"a": Broken()}).problem == "RuntimeError: broken"


def test_long_values_are_cut() -> None:
    assert len(preview("txt", b"x" * 100_000_000).text) == MAX_TEXT
    assert preview("txt", b"x" * 100_000_000).cut
    assert preview("json", json.dumps(["x" * 100] * 100_000).encode()).cut
    nested: Any = []
    for _ in range(500):
        nested = [nested]
    assert "..." in preview("x", nested).text


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16"])
def test_every_mode_becomes_a_picture(mode: str) -> None:
    kind, data = picture("x", PIL.Image.new(mode, (300, 200)), 100)
    assert kind in ("image/png", "image/jpeg")
    assert max(PIL.Image.open(io.BytesIO(data)).size) == 100


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 5)), np.arange(10_000.0), np.zeros((2, 3, 4, 5)), np.full((3, 3), np.nan), np.ones((9, 9, 1), "u1")],
)
def test_every_array_becomes_a_picture(array: np.ndarray[Any, Any]) -> None:
    kind, data = picture("x", array, 100)
    assert kind in ("image/png", "image/jpeg")
    assert PIL.Image.open(io.BytesIO(data)).size[0] <= 100


def test_a_picture_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="neither an image nor an array"):
        picture("txt", b"text", 100)
    with pytest.raises(ValueError, match="not a sound"):
        sound("txt", b"text")


def test_a_sound_becomes_a_short_wav() -> None:
    data, rate = soundfile.read(io.BytesIO(sound("wav", _wav(70.0))))
    assert (len(data), rate) == (60 * 8000, 8000)
    stereo = {"array": np.ones((2, 100), np.float32), "sampling_rate": 100}
    assert soundfile.read(io.BytesIO(sound("x", stereo)))[0].shape == (100, 2)
