"""Images at another size: plain bilinear, or bilinear that looks at every pixel it leaves out (antialiased).

The antialiased one is the triangle filter of Pillow, and so of torchvision: an output pixel is the mean of the pixels
around it, weighted by a triangle as wide as the image shrinks. OpenCV has no such filter. Here it is two passes of
rows gathered and summed with whole-number weights: the same bytes on every machine, most of the time spent in two calls
of numpy that let other threads run.
"""

from __future__ import annotations

import math
import threading
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import MissingExtra

Pixels = npt.NDArray[Any]

_CHUNK_BYTES = 1 << 20  # gathered rows that are summed at a time: they should stay near the processor


@cache
def opencv() -> Any:
    """OpenCV, told to leave threads to us.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import cv2
    except ImportError as exc:
        raise MissingExtra("vision", "vision") from exc
    # Workers are threads already, and a pool of OpenCV's own does not survive a fork.
    cv2.setNumThreads(0)
    return cv2


class Rect(NamedTuple):
    """A part of an image, in its pixels; edges may lie within a pixel."""

    top: float
    left: float
    height: float
    width: float


def resize(image: Pixels, size: tuple[int, int], antialias: bool = True, *, flip: bool = False) -> Pixels:
    """Give an image (H x W or H x W x C; uint8, uint16 or float32) the size (height, width), fresh and contiguous.

    Args:
        image: The pixels; they may be a part of a larger image.
        size: Height and width.
        antialias: Look at every pixel where the image shrinks.
        flip: Turn left and right around as well.

    Raises:
        MissingExtra: OpenCV is not installed.
    """
    height, width = size
    if image.shape[:2] == (height, width):
        return np.ascontiguousarray(image[:, ::-1]) if flip else image.copy()
    if antialias and (image.shape[0] > height or image.shape[1] > width):
        return shrink(image, Rect(0, 0, *image.shape[:2]), size, flip)
    cv2 = opencv()
    out: Pixels = cv2.resize(_for_opencv(image), (width, height), interpolation=cv2.INTER_LINEAR)
    if flip:
        cv2.flip(out, 1, out)
    return out.reshape(height, width, *image.shape[2:])


def _for_opencv(image: Pixels) -> Pixels:
    """The same pixels in a layout that OpenCV can read; a part of an image that is stored upright is one."""
    row, *inner = image.strides
    pixel = image.itemsize * (image.shape[2] if image.ndim == 3 else 1)
    return image if row > 0 and inner == [pixel, image.itemsize][: len(inner)] else np.ascontiguousarray(image)


class _Taps(NamedTuple):
    """Which rows (outputs x taps) each row is made of, and their weights, which add up to ``1 << bits``."""

    rows: npt.NDArray[np.intp]
    weights: Pixels
    bits: int
    low: list[int]
    high: list[int]


@lru_cache(1024)
def _taps(before: int, after: int, kind: str, start: float, extent: float, reverse: bool) -> _Taps:
    """The triangle filter of ``extent`` pixels of ``before`` to ``after``, the last one first where ``reverse``."""
    scale = extent / after
    reach = max(scale, 1.0)
    centre = start + (np.arange(after) + 0.5) * scale
    low = np.maximum(0, np.floor(centre - reach + 0.5)).astype(np.intp)
    high = np.minimum(before, np.floor(centre + reach + 0.5)).astype(np.intp)
    rows = low[:, None] + np.arange((high - low).max())
    weights = np.maximum(0.0, 1 - np.abs((rows + 0.5 - centre[:, None]) / reach))
    weights[rows >= high[:, None]] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    used = weights.max(axis=0) > 0
    rows, weights = np.minimum(rows, before - 1)[:, used], weights[:, used]
    if reverse:
        rows, weights = rows[::-1].copy(), weights[::-1].copy()
    bounds = rows[:, 0].tolist(), (rows[:, -1] + 1).tolist()
    if kind == "f":
        return _Taps(rows, weights.astype(np.float32), 0, *bounds)
    # Eight bits of weight and eight of pixel fill 16: enough for few taps. Many small weights need more.
    bits = 8 if rows.shape[1] <= 5 and kind == "u1" else 16
    levels = np.rint(weights * (1 << bits)).astype(np.int64)
    levels[np.arange(after), weights.argmax(axis=1)] += (1 << bits) - levels.sum(axis=1)
    return _Taps(rows, levels.astype(np.uint16 if bits == 8 else np.uint32), bits, *bounds)


class _Scratch(threading.local):
    """Memory that a thread uses again and again: fresh pages cost more than the sums made in them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Any], Pixels] = {}

    def flat(self, name: str, many: int, dtype: Any) -> Pixels:
        """So many numbers of any value, valid until the next of this name."""
        kept = self._kept.get((name, dtype))
        if kept is None or kept.size < many:
            kept = np.empty(many + many // 4, dtype)
            if kept.nbytes <= 4 * _CHUNK_BYTES:  # one huge image should not be paid for until the thread ends
                self._kept[name, dtype] = kept
        return kept

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Pixels:
        """An array of any content, valid until the next of this name."""
        many = math.prod(shape)
        return self.flat(name, many, dtype)[:many].reshape(shape)


_scratch = _Scratch()


def shrink(image: Pixels, part: Rect, size: tuple[int, int], flip: bool) -> Pixels:
    """Give a part of an image another size by the triangle filter, fresh and contiguous."""
    cv2 = opencv()
    height, width = size
    shape = image.shape[2:]
    rows = _for_opencv(image)
    if part.height > height or part.height != image.shape[0]:
        rows = _pass(rows, height, part.top, part.height, _scratch.array("tall", (height, *rows.shape[1:]), rows.dtype))
    elif part.width > width:
        rows = cv2.resize(rows, (rows.shape[1], height), interpolation=cv2.INTER_LINEAR)
    if part.width > width or part.width != image.shape[1]:
        columns = _scratch.array("wide", (width, height, *shape), rows.dtype)
        _pass(_turned(rows, shape), width, part.left, part.width, columns, reverse=flip)
        return _turned(columns, shape)
    # Where nothing shrinks the triangle is plain bilinear, which OpenCV does faster.
    out: Pixels = cv2.resize(rows, (width, height), interpolation=cv2.INTER_LINEAR)
    if flip:
        cv2.flip(out, 1, out)
    return out.reshape(height, width, *shape)


def _turned(image: Pixels, shape: tuple[int, ...]) -> Pixels:
    """Rows as columns."""
    turned: Pixels = opencv().transpose(image)
    return turned.reshape(*turned.shape[:2], *shape)


def _pass(rows: Pixels, after: int, start: float, extent: float, out: Pixels, reverse: bool = False) -> Pixels:
    """Put the rows, resampled to ``after`` of them, into ``out``.

    Some at a time, so that what is gathered and summed stays near the processor.
    """
    kind = "f" if rows.dtype.kind == "f" else f"u{rows.itemsize}"
    taps = _taps(len(rows), after, kind, start, extent, reverse)
    which, weights, wide = taps.rows, taps.weights, taps.weights.dtype
    rows, results = rows.reshape(len(rows), -1), out.reshape(after, -1)
    length = rows.shape[1]
    step = -(-after // -(-which.size * length * wide.itemsize // _CHUNK_BYTES))
    half, bits = wide.type(1 << taps.bits >> 1), wide.type(taps.bits)
    gathered = _scratch.array("gathered", (step, which.shape[1], length), wide)
    sums = _scratch.array("sums", (step, length), wide)
    for first in range(0, after, step):
        last = min(after, first + step)
        low, high = min(taps.low[first], taps.low[last - 1]), max(taps.high[first], taps.high[last - 1])
        near = _scratch.array("near", (high - low, length), wide)
        np.copyto(near, rows[low:high])
        chosen = which[first:last]
        near.take(chosen - low if low else chosen, 0, gathered[: last - first], "clip")
        summed = sums[: last - first]
        np.einsum("mkl,mk->ml", gathered[: last - first], weights[first:last], out=summed)
        if taps.bits:
            summed += half
            np.right_shift(summed, bits, out=results[first:last], casting="unsafe")
        else:
            np.copyto(results[first:last], summed)
    return out
