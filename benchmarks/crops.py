"""The augmentation of a photo: decode it, scale a random crop to 224 x 224, flip it with a probability of one half.

Every library that leaves this work to its user is given the same two functions, so the rows differ only in the
library: ``pil`` scales with antialiasing, ``cv`` without, which is faster.
"""

from __future__ import annotations

import io
import math
import random
from functools import cache
from typing import Any

SIDE = 224
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)

Image = Any  # an array of 224 x 224 x 3 uint8


def random_box(width: int, height: int, rng: random.Random) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a random crop, drawn as torchvision's RandomResizedCrop draws it."""
    for _ in range(10):
        area = width * height * rng.uniform(*SCALE)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            return rng.randint(0, width - wide), rng.randint(0, height - high), wide, high
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def pil(jpg: bytes) -> Image:
    """Decode, crop and flip with Pillow, which scales with antialiasing."""
    from PIL import Image

    with Image.open(io.BytesIO(jpg)) as image:
        return _crop(image.convert("RGB"))


def pil_decoded(image: Image) -> Image:
    """Crop and flip an image that is already decoded with Pillow."""
    from PIL import Image

    return _crop(Image.fromarray(image).convert("RGB"))


def _crop(image: Any) -> Image:
    import numpy as np
    from PIL import Image

    left, top, wide, high = random_box(*image.size, _rng)
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + wide, top + high))
    if _rng.random() < 0.5:
        small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(small)


def cv(jpg: bytes) -> Image:
    """Decode with libjpeg-turbo, crop and flip with OpenCV: bilinear, without antialiasing."""
    cv2, simplejpeg = _libraries()
    image = simplejpeg.decode_jpeg(jpg)
    left, top, wide, high = random_box(image.shape[1], image.shape[0], _rng)
    small = cv2.resize(image[top : top + high, left : left + wide], (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
    return cv2.flip(small, 1) if _rng.random() < 0.5 else small


def shrunk(jpg: bytes) -> bytes:
    """Scale a whole photo to 224 pixels on its short side, and encode it again."""
    cv2, simplejpeg = _libraries()
    image = simplejpeg.decode_jpeg(jpg)
    ratio = SIDE / min(image.shape[:2])
    size = (round(image.shape[1] * ratio), round(image.shape[0] * ratio))
    encoded: bytes = simplejpeg.encode_jpeg(cv2.resize(image, size, interpolation=cv2.INTER_AREA), quality=90)
    return encoded


@cache
def _libraries() -> tuple[Any, Any]:
    import cv2
    import simplejpeg

    cv2.setNumThreads(1)  # the calling library has its own workers
    return cv2, simplejpeg


CROPS = {"pil": pil, "cv": cv}
LABELS = {"pil": "PIL antialias", "cv": "cv2 bilinear"}  # as the names of rows have them

_rng = random.Random()  # forked workers draw the same numbers, which does not matter here
