"""Sound at another rate is the same sound."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from penstock.codecs.resample import resampled


def tone(hertz: float, rate: int, seconds: float = 0.2) -> npt.NDArray[np.float32]:
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


@pytest.mark.parametrize(
    ("rate", "wanted"), [(44100, 16000), (16000, 22050), (48000, 44100), (8000, 16000), (22050, 16001), (16000, 8000)]
)
def test_a_tone_stays_the_tone(rate: int, wanted: int) -> None:
    got = resampled(tone(440, rate), rate, wanted)
    want = tone(440, wanted)
    assert got.dtype == np.float32
    assert abs(len(got) - len(want)) <= 1
    inner = slice(200, min(len(got), len(want)) - 200)
    assert float(np.abs(got[inner] - want[inner]).max()) < 1e-4


def test_what_the_new_rate_cannot_hold_is_gone() -> None:
    assert float(np.abs(resampled(tone(15000, 44100), 44100, 16000)[200:-200]).max()) < 1e-4


def test_channels_are_resampled_each_for_itself() -> None:
    left, right = tone(300, 16000), tone(500, 16000)
    got = resampled(np.stack([left, right], axis=1), 16000, 8000)
    np.testing.assert_array_equal(got[:, 0], resampled(left, 16000, 8000))
    np.testing.assert_array_equal(got[:, 1], resampled(right, 16000, 8000))


def test_the_same_rate_and_silence_of_no_length_are_left_alone() -> None:
    sound = tone(300, 8000)
    assert resampled(sound, 8000, 8000) is sound
    assert len(resampled(sound[:0], 8000, 16000)) == 0
    assert len(resampled(sound[:1], 8000, 16000)) == 2
