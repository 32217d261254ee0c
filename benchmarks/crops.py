"""What is done to a photo: decoded, a random part of it scaled to 224 x 224, flipped half of the time.

The same two functions are given to every library that leaves this work to its user, so that such rows differ by the
library alone: ``pil`` scales with antialiasing, ``cv`` plainly and faster.
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


def part(width: int, height: int, dice: random.Random) -> tuple[int, int, int, int]:
    """Left, top, width and height of the part that is kept, drawn as torchvision's RandomResizedCrop does."""
    for _ in range(10):
        area = width * height * dice.uniform(*SCALE)
        ratio = math.exp(dice.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            return dice.randint(0, width - wide), dice.randint(0, height - high), wide, high
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def pil(jpg: bytes) -> Image:
    """By Pillow, which scales with antialiasing."""
    from PIL import Image

    with Image.open(io.BytesIO(jpg)) as image:
        return _scaled(image.convert("RGB"))


def pil_decoded(image: Image) -> Image:
    """The same for an image that is decoded already."""
    from PIL import Image

    return _scaled(Image.fromarray(image).convert("RGB"))


def _scaled(image: Any) -> Image:
    import numpy as np
    from PIL import Image

    left, top, wide, high = part(*image.size, _dice)
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + wide, top + high))
    if _dice.random() < 0.5:
        small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(small)


def cv(jpg: bytes) -> Image:
    """By libjpeg-turbo and OpenCV: bilinear, without antialiasing."""
    cv2, simplejpeg = _libraries()
    image = simplejpeg.decode_jpeg(jpg)
    left, top, wide, high = part(image.shape[1], image.shape[0], _dice)
    small = cv2.resize(image[top : top + high, left : left + wide], (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
    return cv2.flip(small, 1) if _dice.random() < 0.5 else small


@cache
def _libraries() -> tuple[Any, Any]:
    import cv2
    import simplejpeg

    cv2.setNumThreads(1)  # whoever calls has workers of its own
    return cv2, simplejpeg


CROPS = {"pil": pil, "cv": cv}
TOLD = {"pil": "PIL antialias", "cv": "cv2 bilinear"}

_dice = random.Random()  # forked workers draw alike: no matter here
