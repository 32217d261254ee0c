"""Audio files: round trips, limits, damage."""

from __future__ import annotations

import io
import struct
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.codecs import audio
from penstock.codecs.limits import Limits, OverLimit
from penstock.errors import MissingExtra

LIMITS = Limits()
RATE = 16_000


def tone(frames: int = RATE, channels: int = 1) -> npt.NDArray[np.float32]:
    time = np.arange(frames) / RATE
    waves = np.stack([0.5 * np.sin(2 * np.pi * 440 * (1 + n) * time) for n in range(channels)], axis=1)
    return (waves[:, 0] if channels == 1 else waves).astype(np.float32)


def decode(data: bytes, limits: Limits = LIMITS) -> dict[str, Any]:
    return audio.audio_decoder(limits)(data)


shapes = st.tuples(st.integers(0, 40)) | st.tuples(st.integers(0, 40), st.integers(2, 4))


@given(hnp.arrays(np.float32, shapes, elements=st.floats(-4, 4, width=32)), st.integers(1, 192_000))
def test_wav_keeps_floats_exactly(array: npt.NDArray[np.float32], rate: int) -> None:
    back = decode(audio.encode_audio({"array": array, "sampling_rate": rate}, "wav"))
    assert back["sampling_rate"] == rate
    assert back["array"].dtype == np.float32
    assert back["array"].flags.writeable
    assert np.array_equal(back["array"], array)


@pytest.mark.parametrize("extension", ["wav", "flac", "aiff"])
@pytest.mark.parametrize("channels", [1, 2])
def test_int16_round_trips_exactly(extension: str, channels: int) -> None:
    array = (tone(channels=channels) * 32767).astype(np.int16)
    back = decode(audio.encode_audio((array, RATE), extension))
    assert np.array_equal(back["array"], array.astype(np.float32) / 32768)


def test_int32_wav_round_trips() -> None:
    array = (tone() * 2**30).astype(np.int32)
    back = decode(audio.encode_audio((array, RATE), "wav"))
    np.testing.assert_allclose(back["array"], array / 2**31, atol=1e-7)


def test_flac_keeps_floats_to_24_bits() -> None:
    back = decode(audio.encode_audio((tone(channels=2), RATE), "flac"))
    assert back["array"].shape == (RATE, 2)
    np.testing.assert_allclose(back["array"], tone(channels=2), atol=1.2e-7)


@pytest.mark.parametrize(("extension", "rate"), [("ogg", RATE), ("opus", 48_000), ("mp3", RATE)])
@pytest.mark.parametrize("dtype", ["f4", "i2"])
def test_lossy_formats_stay_close_to_the_original(extension: str, rate: int, dtype: str) -> None:
    array = tone() if dtype == "f4" else (tone() * 32767).astype(np.int16)
    back = decode(audio.encode_audio((array, rate), extension))
    assert back["sampling_rate"] == rate
    assert len(back["array"]) == RATE
    assert np.abs(back["array"] - tone()).mean() < 0.05


def test_a_minute_of_ogg_is_written() -> None:
    array = tone(RATE * 60)
    assert len(decode(audio.encode_audio((array, RATE), "ogg"))["array"]) == len(array)


@pytest.mark.parametrize("extension", ["wav", "flac", "ogg"])
def test_decoded_frames_equal_those_of_soundfile(extension: str) -> None:
    data = audio.encode_audio((tone(channels=2), RATE), extension)
    array, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate == RATE
    assert np.array_equal(decode(data)["array"], array)


def test_half_floats_doubles_tensors_and_mappings_are_encoded() -> None:
    for array in (tone().astype(np.float16), tone().astype(np.float64), torch.from_numpy(tone())):
        back = decode(audio.encode_audio({"array": array, "sampling_rate": RATE, "path": "x"}, "wav"))
        np.testing.assert_allclose(back["array"], tone(), atol=1e-3)


def test_the_format_is_recognised_by_content() -> None:
    assert len(audio.decode_audio(audio.encode_audio((tone(), RATE), "flac"), LIMITS)["array"]) == RATE


@pytest.mark.parametrize("extension", ["wav", "flac"])
def test_audio_beyond_the_limit_is_refused(extension: str) -> None:
    data = audio.encode_audio((tone(), RATE), extension)
    assert decode(data, Limits(bytes=4 * RATE))
    with pytest.raises(OverLimit, match=f"audio of {4 * RATE} bytes exceeds"):
        decode(data, Limits(bytes=4 * RATE - 1))


def flac_declaring(frames: int) -> bytes:
    data = bytearray(audio.encode_audio((tone(), RATE), "flac"))
    data[21] = data[21] & 0xF0 | frames >> 32
    data[22:26] = struct.pack(">I", frames & 0xFFFFFFFF)
    return bytes(data)


def test_a_header_that_declares_hours_is_refused_before_memory_is_allocated() -> None:
    with pytest.raises(OverLimit, match="audio of 274877906940 bytes exceeds"):
        decode(flac_declaring(2**36 - 1))


def test_a_wav_header_that_declares_gigabytes_yields_the_frames_present() -> None:
    data = bytearray(audio.encode_audio((tone(1000), RATE), "wav"))
    size = data.index(b"data") + 4
    data[size : size + 4] = struct.pack("<I", 2**32 - 1)
    assert np.array_equal(decode(bytes(data))["array"][:1000], tone(1000))


def test_flac_without_a_declared_length_is_read_to_its_end() -> None:
    assert len(decode(flac_declaring(0))["array"]) == RATE
    with pytest.raises(OverLimit, match="audio of"):
        decode(flac_declaring(0), Limits(bytes=4 * RATE - 1))


def test_truncated_flac_is_an_error() -> None:
    data = audio.encode_audio((tone(), RATE), "flac")
    for cut in (6, 60, len(data) // 2):
        with pytest.raises(ValueError, match=r"damaged audio|truncated FLAC"):
            decode(data[:cut])
    with pytest.raises(ValueError, match=r"damaged audio|truncated FLAC"):
        decode(flac_declaring(RATE + 5000))


@pytest.mark.parametrize("data", [b"", b"rubbish", b"\x89PNG\r\n\x1a\n", b"%!PS"])
def test_other_content_is_not_audio(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an audio file"):
        decode(data)


@pytest.mark.parametrize("data", [b"RIFF\0\0\0\0WAVE", b"RIFFxxxxWEBPVP8 ", b"OggS" + bytes(60), b"fLaC"])
def test_a_damaged_file_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="damaged audio"):
        decode(data)


def test_a_damaged_file_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    data = bytearray(audio.encode_audio((tone(), RATE), "aiff"))
    for offset in range(60):
        corrupted = data.copy()
        corrupted[offset] = 255
        try:
            decode(bytes(corrupted))
        except ValueError:
            continue
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("value", "extension", "problem"),
    [
        (tone(), "wav", "audio must be {"),
        ({"array": tone()}, "wav", "audio must be {"),
        (([0.0, 1.0], RATE), "wav", "needs an array"),
        ((np.zeros(3, np.uint8), RATE), "wav", "float, int16 or int32"),
        ((np.zeros((2, 2, 2), np.float32), RATE), "wav", "shape"),
        ((tone() * 3, RATE), "flac", "-1..1"),
        ((tone() * np.float32("nan"), RATE), "ogg", "-1..1"),
        ((tone(), 12345), "opus", "cannot hold"),
        ((np.zeros((9, 9), np.float32), RATE), "flac", "cannot hold"),
    ],
)
def test_a_value_that_cannot_be_encoded_is_refused(value: Any, extension: str, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        audio.encode_audio(value, extension)


def test_every_extension_can_be_written() -> None:
    for extension in audio.AUDIO_EXTENSIONS:
        assert decode(audio.encode_audio((tone(), 48_000), extension))["sampling_rate"] == 48_000


def test_without_soundfile_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingExtra, match=r"penstock\[audio\]"):
        audio.audio_decoder(LIMITS)
