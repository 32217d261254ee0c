"""Crops, resizes and flips follow torchvision's rules, which are written out plainly here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from penstock import vision
from penstock.vision.resampling import Pixels, resize

IMAGE = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)


class ScriptedGenerator:
    """A generator that returns given numbers."""

    def __init__(self, *draws: float) -> None:
        self.draws = list(draws)

    def random(self) -> float:
        return self.draws.pop(0)


@pytest.mark.parametrize("seed", range(20))
def test_a_random_resized_crop_follows_its_formula(seed: int) -> None:
    scale, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
    height, width = (60, 80) if seed % 2 else (300, 35)
    draws = np.random.default_rng(seed).random(50).tolist()
    numbers = iter(draws)
    want = None
    for _ in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * next(numbers))
        shape = math.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * next(numbers))
        crop_width, crop_height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if crop_width <= width and crop_height <= height:
            top = int(next(numbers) * (height - crop_height + 1))
            left = int(next(numbers) * (width - crop_width + 1))
            want = (top, left, crop_height, crop_width)
            break
    if want is None:  # the center, as wide as the image and as high as the ratio allows
        want = ((300 - 47) // 2, 0, 47, 35)
    region = vision.RandomResizedCrop(24, flip=True).region(height, width, ScriptedGenerator(*draws))  # type: ignore[arg-type]
    assert tuple(region[:4]) == want
    assert region.flip == (next(numbers) < 0.5)


def test_random_resized_crops_have_torchvisions_distribution() -> None:
    crop = vision.RandomResizedCrop(8, scale=(0.1, 0.5), ratio=(0.5, 2.0), flip=0.25)
    rng = np.random.default_rng(0)
    regions = [crop.region(1000, 1000, rng) for _ in range(4000)]
    areas = np.array([region.height * region.width / 1e6 for region in regions])
    shapes = np.log([region.width / region.height for region in regions])
    assert areas.min() > 0.099
    assert areas.max() < 0.501
    assert abs(np.mean(areas) - 0.3) < 0.01
    assert abs(np.std(areas) - 0.4 / math.sqrt(12)) < 0.005
    assert abs(np.mean(shapes)) < 0.03
    assert abs(np.std(shapes) - 2 * math.log(2) / math.sqrt(12)) < 0.02
    offsets = [region.top / (1000 - region.height) for region in regions]
    assert abs(np.mean(offsets) - 0.5) < 0.02
    assert abs(np.mean([region.flip for region in regions]) - 0.25) < 0.03


@pytest.mark.parametrize("antialias", [True, False])
def test_a_random_resized_crop_is_its_region_at_its_size(antialias: bool) -> None:
    crop = vision.RandomResizedCrop((20, 24), antialias=antialias, flip=True)
    for seed in range(6):
        region = crop.region(60, 80, np.random.default_rng(seed))
        part = IMAGE[region.top : region.top + region.height, region.left : region.left + region.width]
        want = resize(part, (20, 24), antialias)
        got = crop(IMAGE, np.random.default_rng(seed))
        assert np.array_equal(got, want[:, ::-1] if region.flip else want)


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ((30,), (30, 40)),
        ((45,), (45, 60)),
        ((77,), (77, 102)),
        (((10, 90),), (10, 90)),
        ((50, 60), (45, 60)),
        ((60,), (60, 80)),
    ],
)
def test_resize_sets_the_shorter_side(arguments: Any, size: tuple[int, int]) -> None:
    assert vision.Resize(*arguments)(IMAGE).shape[:2] == size
    if isinstance(arguments[0], int):
        assert vision.Resize(*arguments)(IMAGE.swapaxes(0, 1)).shape[:2] == size[::-1]


def test_a_center_crop_keeps_the_center_and_pads_with_black() -> None:
    assert np.array_equal(vision.CenterCrop(21)(IMAGE), IMAGE[20:41, 30:51])  # 19.5 and 29.5, rounded to even
    got = vision.CenterCrop((65, 10))(IMAGE)
    assert np.array_equal(got[2:62], IMAGE[:, 35:45])
    assert not got[:2].any()
    assert not got[62:].any()


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_a_random_crop_is_a_part_of_the_padded_image(mode: Any) -> None:
    crop = vision.RandomCrop(50, padding=(3, 5, 7, 11), padding_mode=mode, fill=(1, 2, 3))
    widths = ((5, 11), (3, 7), (0, 0))
    padded: Pixels
    if mode == "constant":
        padded = np.full((76, 90, 3), (1, 2, 3), np.uint8)
        padded[5:65, 3:83] = IMAGE
    else:
        padded = np.pad(IMAGE, widths, mode)
    offsets = set()
    for seed in range(25):
        draws = np.random.default_rng(seed)
        top, left = int(draws.random() * 27), int(draws.random() * 41)
        got = crop(IMAGE, np.random.default_rng(seed))
        assert np.array_equal(got, padded[top : top + 50, left : left + 50])
        offsets.add((top, left))
    assert len(offsets) > 20


def test_a_small_image_is_padded_on_request() -> None:
    with pytest.raises(ValueError, match=r"60x80.*smaller than the crop of 64x64.*pad_if_needed"):
        vision.RandomCrop(64)(IMAGE)
    region = vision.RandomCrop(64, pad_if_needed=True).region(60, 80, ScriptedGenerator(0.999, 0.0))  # type: ignore[arg-type]
    assert (region.top, region.left) == (0, 0)
    region = vision.RandomCrop(64, pad_if_needed=True).region(60, 80, ScriptedGenerator(0.0, 0.999))  # type: ignore[arg-type]
    assert (region.top, region.left) == (-4, 16)
    assert vision.RandomCrop(64, pad_if_needed=True)(IMAGE).shape == (64, 64, 3)


def test_flips_have_their_probability() -> None:
    rng = np.random.default_rng(0)
    for flip, axis in ((vision.HorizontalFlip(0.3), 1), (vision.VerticalFlip(0.3), 0)):
        flipped = [np.array_equal(flip(IMAGE, rng), np.flip(IMAGE, axis)) for _ in range(1000)]
        assert abs(np.mean(flipped) - 0.3) < 0.05
        assert np.array_equal(type(flip)(0)(IMAGE), IMAGE)
