"""Audio resampling by a windowed sinc filter, evaluated at the positions of the new frames."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, gcd

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

_ZERO_CROSSINGS = 24  # of the sinc on either side: 24 keep the error of a tone below 1e-4
_KAISER_BETA = 9.0  # attenuates by 90 dB in the stop band
_ROLLOFF = 0.94  # cut-off as a share of the lower Nyquist frequency: leaves room for the transition band
_MAX_MATRIX_WEIGHTS = 1 << 22  # a larger matrix of one period is not built
_MAX_DECIMATION = 1000
_CHUNK_FRAMES = 4096  # output frames computed at a time without the matrix


def resampled(array: F32, rate: int, new_rate: int) -> F32:
    """Return ``(frames,)`` or ``(frames, channels)`` at another rate, with the same duration rounded up to a frame.

    Raises:
        ValueError: The new rate is less than a thousandth of the old one: the filter would span too many frames.
    """
    if rate == new_rate or not len(array):
        return array
    if rate > new_rate * _MAX_DECIMATION:
        raise ValueError(f"audio of {rate} Hz cannot be resampled to {new_rate} Hz")
    if array.ndim == 2:
        return np.stack([resampled(channel, rate, new_rate) for channel in array.T], axis=1)
    divisor = gcd(rate, new_rate)
    up, down = new_rate // divisor, rate // divisor
    frames = ceil(len(array) * up / down)
    reach = _reach(up, down)
    periods = ceil(frames / up)
    padded = np.zeros(reach + max(len(array), periods * down) + reach + 1, np.float32)
    padded[reach : reach + len(array)] = array
    if up * (down + 2 * reach) <= _MAX_MATRIX_WEIGHTS:
        inputs = np.lib.stride_tricks.sliding_window_view(padded, down + 2 * reach)[::down][:periods]
        return np.ascontiguousarray((inputs @ _period_matrix(up, down)).reshape(-1)[:frames], np.float32)
    chunks = [
        _filtered(padded, first, min(first + _CHUNK_FRAMES, frames), up, down)
        for first in range(0, frames, _CHUNK_FRAMES)
    ]
    return np.concatenate(chunks)


def _reach(up: int, down: int) -> int:
    """Return how many input frames on either side one output frame depends on."""
    return ceil(_ZERO_CROSSINGS * max(1, down / up) / _ROLLOFF)


def _weights(distance: npt.NDArray[np.float64], up: int, down: int) -> npt.NDArray[np.float64]:
    """Return the filter's weight of input frames at a ``distance`` (in input frames) from an output frame."""
    scale = min(1.0, up / down) * _ROLLOFF
    inside = np.clip(1 - (distance * scale / _ZERO_CROSSINGS) ** 2, 0, None)
    kaiser = np.i0(_KAISER_BETA * np.sqrt(inside))
    weights: npt.NDArray[np.float64] = scale * np.sinc(distance * scale) * kaiser / np.i0(_KAISER_BETA)
    return np.where(inside > 0, weights, 0.0)


@lru_cache(maxsize=8)
def _period_matrix(up: int, down: int) -> F32:
    """Return the matrix from the input of one period, extended by the reach on either side, to its ``up`` outputs."""
    positions = np.arange(down + 2 * _reach(up, down)) - _reach(up, down)
    return _weights(positions[:, None] - np.arange(up) * (down / up), up, down).astype(np.float32)


def _filtered(padded: F32, first: int, last: int, up: int, down: int) -> F32:
    """Return the output frames ``first`` to ``last``, computed one by one."""
    reach = _reach(up, down)
    frames = np.arange(first, last, dtype=np.int64)
    nearest, fraction = frames * down // up, (frames * down % up) / up
    offsets = np.arange(-reach, reach + 1)
    inputs = padded[nearest[:, None] + offsets + reach]
    out: F32 = (inputs * _weights(offsets - fraction[:, None], up, down)).sum(axis=1).astype(np.float32)
    return out
