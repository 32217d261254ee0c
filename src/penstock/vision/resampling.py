"""Resizing of images: plain bilinear, or antialiased bilinear, which uses every input pixel.

Antialiased bilinear is the triangle filter of Pillow, and so of torchvision: an output pixel is the mean of the pixels
around it, weighted by a triangle whose width is the factor by which the image shrinks. OpenCV has no such filter. Here
it takes two passes, each of which gathers rows and sums them with integer weights: the result is the same on every
machine, and most of the time is spent in two numpy calls that release the GIL.
"""

from __future__ import annotations

import math
import threading
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import import_extra

Pixels = npt.NDArray[Any]

_CHUNK_BYTES = 1 << 20  # gathered rows that are summed at a time, so that they stay in the CPU cache


@cache
def opencv() -> Any:
    """Import OpenCV, and turn off its own threads for the whole process.

    Raises:
        MissingExtra: OpenCV is not installed.
    """
    cv2 = import_extra("cv2", "vision", "vision")
    # Workers are threads already, and OpenCV's thread pool does not survive a fork.
    cv2.setNumThreads(0)
    return cv2


class Rect(NamedTuple):
    """A rectangle in units of pixels, whose edges may lie within a pixel."""

    top: float
    left: float
    height: float
    width: float


class Decoded(NamedTuple):
    """The pixels of an upright image, or of a part of it.

    Attributes:
        pixels: Height x width x 3, uint8.
        factor: By which factor they are reduced.
        top: The row of the reduced image that comes first in ``pixels``.
        left: The column of the reduced image that comes first in ``pixels``.
    """

    pixels: Pixels
    factor: int = 1
    top: int = 0
    left: int = 0


def resize(
    image: Pixels, size: tuple[int, int], antialias: bool = True, *, flip: bool = False, out: Pixels | None = None
) -> Pixels:
    """Return an image at another size, as a new, contiguous array.

    Args:
        image: The pixels, height x width or height x width x channels, uint8, uint16 or float32. May be a view of a
            larger image.
        size: The new height and width.
        antialias: Use every pixel where the image shrinks, instead of the nearest four.
        flip: Also mirror the image horizontally.
        out: A contiguous array of the new shape and the same type for the result.

    Raises:
        MissingExtra: OpenCV is not installed.
    """
    height, width = size
    if image.shape[:2] == (height, width):
        return _copied(image[:, ::-1] if flip else image, out)
    if antialias and (image.shape[0] > height or image.shape[1] > width):
        return shrink(image, Rect(0, 0, *image.shape[:2]), size, flip, out)
    return _bilinear(_for_opencv(image), size, flip, out).reshape(height, width, *image.shape[2:])


def _copied(image: Pixels, out: Pixels | None) -> Pixels:
    if out is None:
        return np.array(image, order="C")
    np.copyto(out, image)
    return out


def _bilinear(image: Pixels, size: tuple[int, int], flip: bool, out: Pixels | None) -> Pixels:
    cv2 = opencv()
    resized: Pixels = cv2.resize(image, size[::-1], out, interpolation=cv2.INTER_LINEAR)
    if flip:
        cv2.flip(resized, 1, resized)
    return resized


def _for_opencv(image: Pixels) -> Pixels:
    """Return the same pixels in a memory layout that OpenCV can read: a copy, unless pixels of a row are contiguous."""
    row, *inner = image.strides
    pixel = image.itemsize * (image.shape[2] if image.ndim == 3 else 1)
    return image if row > 0 and inner == [pixel, image.itemsize][: len(inner)] else np.ascontiguousarray(image)


class _Taps(NamedTuple):
    """A filter: each output row is a weighted sum of input rows.

    Attributes:
        rows: The input rows of each output row, outputs x taps.
        weights: Their weights, which add up to ``1 << bits`` (floats: to 1) in each output row.
        bits: The binary digits of integer weights; 0 for floats.
        low: The first input row of each output row.
        high: The input row after the last one of each output row.
    """

    rows: npt.NDArray[np.intp]
    weights: Pixels
    bits: int
    low: list[int]
    high: list[int]


@lru_cache(2048)  # as many as random crops of photos of one size need
def _taps(rows_in: int, rows_out: int, kind: str, start: float, extent: float, reverse: bool) -> _Taps:
    """Return the triangle filter that makes ``rows_out`` rows of ``extent`` rows from ``start`` on.

    Args:
        rows_in: The number of input rows.
        rows_out: The number of output rows.
        kind: ``"f"`` for floats, else ``"u"`` and the bytes of an integer.
        start: Where the first output row begins, in input rows.
        extent: How many input rows all output rows cover.
        reverse: Whether the last output row comes first.
    """
    scale = extent / rows_out
    radius = max(scale, 1.0)
    centers = start + (np.arange(rows_out) + 0.5) * scale
    low = np.maximum(0, np.floor(centers - radius + 0.5)).astype(np.intp)
    high = np.minimum(rows_in, np.floor(centers + radius + 0.5)).astype(np.intp)
    rows = low[:, None] + np.arange((high - low).max())
    weights = np.maximum(0.0, 1 - np.abs((rows + 0.5 - centers[:, None]) / radius))
    weights[rows >= high[:, None]] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    used = weights.max(axis=0) > 0
    rows, weights = np.minimum(rows, rows_in - 1)[:, used], weights[:, used]
    if reverse:
        rows, weights = rows[::-1].copy(), weights[::-1].copy()
    bounds = rows[:, 0].tolist(), (rows[:, -1] + 1).tolist()
    if kind == "f":
        return _Taps(rows, weights.astype(np.float32), 0, *bounds)
    # 8 bits of weight and 8 of pixel fit in 16 bits: precise enough for few taps. Many small weights need more.
    bits = 8 if rows.shape[1] <= 5 and kind == "u1" else 16
    integers = np.rint(weights * (1 << bits)).astype(np.int64)
    integers[np.arange(rows_out), weights.argmax(axis=1)] += (1 << bits) - integers.sum(axis=1)
    return _Taps(rows, integers.astype(np.uint16 if bits == 8 else np.uint32), bits, *bounds)


class AxisWeights(NamedTuple):
    """How one axis of an image is resized, for implementations elsewhere than on the CPU.

    Attributes:
        rows: The input positions of each output, outputs x taps.
        weights: Their weights, which add up to 1; exact in float32.
        plain: Whether they are plain bilinear.
    """

    rows: npt.NDArray[Any]
    weights: Pixels
    plain: bool

    def moved(self, offset: int) -> AxisWeights:
        """Return the weights for inputs that begin at another position."""
        return self._replace(rows=self.rows + offset)


def axis_weights(
    length: int, outputs: int, start: float, extent: float, antialias: bool, reverse: bool, dtype: np.dtype[Any]
) -> AxisWeights:
    """Return the weights by which ``resize`` and ``shrink`` resize an axis of ``length`` pixels.

    Args:
        length: The number of pixels.
        outputs: The number of pixels after resizing.
        start: Where the first output begins.
        extent: How many pixels the outputs cover.
        antialias: Whether every pixel counts where the image shrinks.
        reverse: Whether the last output comes first.
        dtype: The type of the pixels.
    """
    if antialias and (extent > outputs or extent != length):
        taps = _taps(length, outputs, "f" if dtype.kind == "f" else f"u{dtype.itemsize}", start, extent, reverse)
        return AxisWeights(taps.rows, taps.weights.astype(np.float32) / np.float32(1 << taps.bits), False)
    centers = ((np.arange(outputs) + 0.5) * (1 / (outputs / extent)) - 0.5).astype(np.float32)
    low = np.floor(centers).astype(np.intp)
    share = centers - low.astype(np.float32)
    rows, weights = np.clip(np.stack([low, low + 1], 1), 0, length - 1), np.stack([1 - share, share], 1)
    if dtype.kind != "f":
        weights = np.rint(weights * np.float32(2048)) / np.float32(2048)  # 11 bits, as in OpenCV
    return AxisWeights(rows[::-1].copy(), weights[::-1].copy(), True) if reverse else AxisWeights(rows, weights, True)


class _Scratch(threading.local):
    """Memory that each thread reuses: touching new pages costs more than the sums that are stored in them."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, Any], Pixels] = {}

    def flat(self, name: str, size: int, dtype: Any) -> Pixels:
        """Return an uninitialised array of at least ``size`` numbers, valid until the next call with this name."""
        array = self._arrays.get((name, dtype))
        if array is None or array.size < size:
            array = np.empty(size + size // 4, dtype)
            if array.nbytes <= 4 * _CHUNK_BYTES:  # the memory for one huge image is not kept until the thread ends
                self._arrays[name, dtype] = array
        return array

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Pixels:
        """Return an uninitialised array, valid until the next call with this name."""
        size = math.prod(shape)
        return self.flat(name, size, dtype)[:size].reshape(shape)


_scratch = _Scratch()


def shrink(image: Pixels, part: Rect, size: tuple[int, int], flip: bool, out: Pixels | None = None) -> Pixels:
    """Return a part of an image at another size, by the triangle filter, as a new, contiguous array, or in ``out``."""
    cv2 = opencv()
    height, width = size
    shape = image.shape[2:]
    rows = _for_opencv(image)
    resamples_columns = part.width > width or part.width != image.shape[1]
    if part.height > height or part.height != image.shape[0]:
        resampled = _scratch.array("rows", (height, *rows.shape[1:]), rows.dtype)
        rows = _resample_rows(rows, height, part.top, part.height, resampled)
    elif resamples_columns:
        rows = cv2.resize(rows, (rows.shape[1], height), interpolation=cv2.INTER_LINEAR)
    if resamples_columns:
        columns = _scratch.array("columns", (width, height, *shape), rows.dtype)
        _resample_rows(_transposed(rows, shape), width, part.left, part.width, columns, reverse=flip)
        return _transposed(columns, shape, out)
    # Where nothing shrinks, the triangle filter is plain bilinear, at which OpenCV is faster.
    return _bilinear(rows, size, flip, out).reshape(height, width, *shape)


def _transposed(image: Pixels, shape: tuple[int, ...], out: Pixels | None = None) -> Pixels:
    transposed: Pixels = opencv().transpose(image, out)
    return transposed.reshape(*transposed.shape[:2], *shape)


def _resample_rows(
    rows: Pixels, rows_out: int, start: float, extent: float, out: Pixels, reverse: bool = False
) -> Pixels:
    """Resample ``extent`` rows from ``start`` on to ``rows_out`` rows, into ``out``.

    Works on a few output rows at a time, so that what is gathered and summed stays in the CPU cache.
    """
    kind = "f" if rows.dtype.kind == "f" else f"u{rows.itemsize}"
    taps = _taps(len(rows), rows_out, kind, start, extent, reverse)
    sources, weights, dtype = taps.rows, taps.weights, taps.weights.dtype
    rows, results = rows.reshape(len(rows), -1), out.reshape(rows_out, -1)
    length = rows.shape[1]
    step = -(-rows_out // -(-sources.size * length * dtype.itemsize // _CHUNK_BYTES))
    half, bits = dtype.type(1 << taps.bits >> 1), dtype.type(taps.bits)
    gathered = _scratch.array("gathered", (step, sources.shape[1], length), dtype)
    sums = _scratch.array("sums", (step, length), dtype)
    for first in range(0, rows_out, step):
        last = min(rows_out, first + step)
        low, high = min(taps.low[first], taps.low[last - 1]), max(taps.high[first], taps.high[last - 1])
        inputs = _scratch.array("inputs", (high - low, length), dtype)
        np.copyto(inputs, rows[low:high])
        chosen = sources[first:last]
        inputs.take(chosen - low if low else chosen, 0, gathered[: last - first], "clip")
        summed = sums[: last - first]
        np.einsum("mkl,mk->ml", gathered[: last - first], weights[first:last], out=summed)
        if taps.bits:
            summed += half
            np.right_shift(summed, bits, out=results[first:last], casting="unsafe")
        else:
            np.copyto(results[first:last], summed)
    return out
