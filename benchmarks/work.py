"""What stages are given to do in the engine's cases: a module of its own, since worker processes import it."""

from __future__ import annotations

import time
import zlib
from functools import cache
from typing import Any

import numpy as np

Image = np.ndarray[Any, np.dtype[np.uint8]]

IMAGES = 64  # different ones; a position takes them in turn
_OFFSETS = (1, 2, 3)  # of the channels
_LETTERS = 50_000
_STEPS = 36_000  # more than squeeze takes: which pool is the slowest is no matter of luck


@cache
def images() -> Image:
    """The images that samples are made of: 9.6 MB."""
    return np.random.default_rng(0).integers(0, 256, (IMAGES, 224, 224, 3), np.uint8)


def same(item: Any) -> Any:
    """Nothing."""
    return item


def augment(image: Image) -> Image:
    """Mirror an image and shift its channels: about 160 us on a core of its own."""
    out = np.empty_like(image)
    for channel, offset in enumerate(_OFFSETS):
        np.add(image[:, ::-1, channel], offset, out=out[..., channel])
    return out


def made(number: int) -> Image:
    """The sample at a position, made where this is called."""
    return augment(images()[number % IMAGES])


class Made:
    """The same samples as a map-style dataset."""

    def __init__(self, count: int) -> None:
        """Have the images at hand before workers are forked."""
        self.count = count
        images()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Image:
        return made(number)


def stacked(samples: list[Image]) -> Image:
    """A batch, without a detour by tensors."""
    return np.stack(samples)


def fetch(number: int) -> bytes:
    """Wait 5 ms for some text, as for a server."""
    time.sleep(0.005)
    return b"%06d" % number * (_LETTERS // 6)


def squeeze(text: bytes) -> int:
    """Keep a core busy for about 2 ms without the interpreter lock."""
    return len(zlib.compress(text * 8, 6))


def think(size: int) -> int:
    """Keep the interpreter busy for about 2 ms."""
    for step in range(_STEPS):
        size = (size * 31 + step) & 0xFFFF
    return size
