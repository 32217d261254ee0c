"""Resampling keeps tones below the new Nyquist frequency and removes those above it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from penstock.codecs.resample import resampled


def tone(hertz: float, rate: int, seconds: float = 0.2) -> npt.NDArray[np.float32]:
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


@pytest.mark.parametrize(
    ("rate", "new_rate"), [(44100, 16000), (16000, 22050), (48000, 44100), (8000, 16000), (22050, 16001), (16000, 8000)]
)
def test_a_tone_keeps_its_frequency_and_amplitude(rate: int, new_rate: int) -> None:
    got = resampled(tone(440, rate), rate, new_rate)
    want = tone(440, new_rate)
    assert got.dtype == np.float32
    assert abs(len(got) - len(want)) <= 1
    inner = slice(200, min(len(got), len(want)) - 200)
    assert float(np.abs(got[inner] - want[inner]).max()) < 1e-4


def test_a_tone_above_the_new_nyquist_frequency_is_removed() -> None:
    assert float(np.abs(resampled(tone(15000, 44100), 44100, 16000)[200:-200]).max()) < 1e-4


def test_channels_are_resampled_independently() -> None:
    left, right = tone(300, 16000), tone(500, 16000)
    got = resampled(np.stack([left, right], axis=1), 16000, 8000)
    np.testing.assert_array_equal(got[:, 0], resampled(left, 16000, 8000))
    np.testing.assert_array_equal(got[:, 1], resampled(right, 16000, 8000))


def test_the_same_rate_and_an_empty_array_are_returned_unchanged() -> None:
    array = tone(300, 8000)
    assert resampled(array, 8000, 8000) is array
    assert len(resampled(array[:0], 8000, 16000)) == 0
    assert len(resampled(array[:1], 8000, 16000)) == 2


def test_a_rate_that_only_a_damaged_header_declares_is_refused() -> None:
    with pytest.raises(ValueError, match="4294967295 Hz"):
        resampled(np.zeros(100, np.float32), 4_294_967_295, 16_000)
