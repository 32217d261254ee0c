"""Sound at another rate: a windowed sinc, evaluated where the new samples fall."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

_ZEROS = 24  # zero crossings of the sinc on either side: 24 keep errors of a tone below 1e-4
_BETA = 9.0  # of the Kaiser window: 90 dB down where it stops
_ROLLOFF = 0.94  # of the lower Nyquist frequency: room for the filter to fall
_LARGEST = 1 << 22  # weights of one period that are kept as a matrix
_ROWS = 4096  # outputs at a time where they are not


def resampled(sound: F32, rate: int, wanted: int) -> F32:
    """Give ``(frames,)`` or ``(frames, channels)`` at another rate; its length is the same time, rounded up."""
    if rate == wanted or not len(sound):
        return sound
    if sound.ndim == 2:
        return np.stack([resampled(channel, rate, wanted) for channel in sound.T], axis=1)
    shared = gcd(rate, wanted)
    up, down = wanted // shared, rate // shared
    many = ceil(len(sound) * up / down)
    reach = _reach(up, down)
    periods = ceil(many / up)
    padded = np.zeros(reach + max(len(sound), periods * down) + reach + 1, np.float32)
    padded[reach : reach + len(sound)] = sound
    if up * (down + 2 * reach) <= _LARGEST:
        windows = np.lib.stride_tricks.sliding_window_view(padded, down + 2 * reach)[::down][:periods]
        return np.ascontiguousarray((windows @ _period(up, down)).reshape(-1)[:many], np.float32)
    parts = [_gathered(padded, first, min(first + _ROWS, many), up, down) for first in range(0, many, _ROWS)]
    return np.concatenate(parts)


def _reach(up: int, down: int) -> int:
    """Input samples on either side that one output depends on."""
    return ceil(_ZEROS * max(1, down / up) / _ROLLOFF)


def _weights(distance: npt.NDArray[np.float64], up: int, down: int) -> npt.NDArray[np.float64]:
    """What an input sample so far from an output (in input samples) adds to it."""
    scale = min(1.0, up / down) * _ROLLOFF
    inside = np.clip(1 - (distance * scale / _ZEROS) ** 2, 0, None)
    weights: npt.NDArray[np.float64] = scale * np.sinc(distance * scale) * np.i0(_BETA * np.sqrt(inside)) / np.i0(_BETA)
    return np.where(inside > 0, weights, 0.0)


@lru_cache(maxsize=8)
def _period(up: int, down: int) -> F32:
    """The matrix from the input of one period, with what it reaches on either side, to its ``up`` outputs."""
    places = np.arange(down + 2 * _reach(up, down)) - _reach(up, down)
    return _weights(places[:, None] - np.arange(up) * (down / up), up, down).astype(np.float32)


def _gathered(padded: F32, first: int, last: int, up: int, down: int) -> F32:
    reach = _reach(up, down)
    numbers = np.arange(first, last, dtype=np.int64)
    whole, rest = numbers * down // up, (numbers * down % up) / up
    offsets = np.arange(-reach, reach + 1)
    rows = padded[whole[:, None] + offsets + reach]
    out: F32 = (rows * _weights(offsets - rest[:, None], up, down)).sum(axis=1).astype(np.float32)
    return out
