"""The functions that stages run in the cases of the engine, in a separate module that worker processes can import."""

from __future__ import annotations

import time
import zlib
from functools import cache
from typing import Any

import numpy as np

Image = np.ndarray[Any, np.dtype[np.uint8]]

IMAGES = 64  # different images; sample i is made of image i % 64
_OFFSETS = (1, 2, 3)  # one per channel
_LETTERS = 50_000
_STEPS = 36_000  # takes longer than squeeze, so that the slowest pool is always the same


@cache
def images() -> Image:
    """Return the images that samples are made of: 9.6 MB."""
    return np.random.default_rng(0).integers(0, 256, (IMAGES, 224, 224, 3), np.uint8)


def identity(item: Any) -> Any:
    """Return the item."""
    return item


def augment(image: Image) -> Image:
    """Mirror an image and shift its channels: about 160 us on an idle core."""
    out = np.empty_like(image)
    for channel, offset in enumerate(_OFFSETS):
        np.add(image[:, ::-1, channel], offset, out=out[..., channel])
    return out


def create_sample(number: int) -> Image:
    """Return the sample of this number, created in the calling process."""
    return augment(images()[number % IMAGES])


class ImageDataset:
    """The same samples as a map-style dataset."""

    def __init__(self, count: int) -> None:
        """Create the images before workers are forked."""
        self.count = count
        images()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Image:
        return create_sample(number)


def stack(samples: list[Image]) -> Image:
    """Return a batch as one array, without tensors in between."""
    return np.stack(samples)


def fetch(number: int) -> bytes:
    """Return some text after 5 ms, like a server."""
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
