"""Colour, blur and erasing, compared with their definitions in plain numpy."""

from __future__ import annotations

import colorsys
import math

import numpy as np
import pytest

from penstock import vision
from penstock.vision.resampling import Pixels

IMAGE = np.random.default_rng(1).integers(0, 256, (24, 32, 3), np.uint8)
FLOATS = (IMAGE / 255).astype(np.float32)
GRAY = IMAGE @ np.array([0.299, 0.587, 0.114])


def is_near(got: Pixels, want: Pixels, levels: float = 1.0) -> bool:
    """Return whether uint8 pixels are those of a formula in floats, up to rounding."""
    return got.dtype == np.uint8 and bool(np.abs(got - np.clip(want, 0, 255)).max() <= levels)


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7])
def test_brightness_contrast_and_saturation_are_blends(factor: float) -> None:
    assert is_near(vision.adjust_brightness(IMAGE, factor), IMAGE * factor)
    assert is_near(vision.adjust_contrast(IMAGE, factor), IMAGE * factor + (1 - factor) * GRAY.mean())
    assert is_near(vision.adjust_saturation(IMAGE, factor), IMAGE * factor + (1 - factor) * GRAY[..., None])
    for adjust in (vision.adjust_brightness, vision.adjust_contrast, vision.adjust_saturation):
        assert np.abs(adjust(FLOATS, factor) * 255 - adjust(IMAGE, factor)).max() < 1.2


@pytest.mark.parametrize("shift", [-0.5, -0.2, 0.1, 0.37])
def test_hue_is_rotated_on_the_colour_circle(shift: float) -> None:
    flat = [colorsys.rgb_to_hsv(*pixel) for pixel in (IMAGE.reshape(-1, 3) / 255).tolist()]
    want = [colorsys.hsv_to_rgb((h + shift) % 1, s, v) for h, s, v in flat]
    assert is_near(vision.adjust_hue(IMAGE, shift), np.array(want).reshape(IMAGE.shape) * 255)
    assert np.allclose(vision.adjust_hue(FLOATS, shift), np.array(want).reshape(IMAGE.shape), atol=1e-3)


def test_gray_is_one_channel_or_three() -> None:
    assert is_near(vision.grayscale(IMAGE)[..., 0], GRAY)
    three = vision.Grayscale()(IMAGE)
    assert three.shape == IMAGE.shape
    assert (three == three[..., :1]).all()
    assert vision.Grayscale(1)(IMAGE).shape == (24, 32, 1)
    rng = np.random.default_rng(0)
    gray = [np.array_equal(vision.Grayscale(p=0.2)(IMAGE, rng), three) for _ in range(500)]
    assert abs(np.mean(gray) - 0.2) < 0.05


@pytest.mark.parametrize(("size", "sigma"), [(3, 0.5), (5, 1.3), (9, 2.0)])
def test_a_blur_is_a_gaussian_of_the_mirrored_image(size: int, sigma: float) -> None:
    radius = size // 2
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    padded = np.pad(IMAGE.astype(float), ((radius, radius), (radius, radius), (0, 0)), "reflect")
    rows = sum(weight * padded[number : number + 24] for number, weight in enumerate(kernel))
    want = sum(weight * rows[:, number : number + 32] for number, weight in enumerate(kernel))
    assert is_near(vision.gaussian_blur(IMAGE, size, sigma), np.asarray(want), 1.5)


def test_jitter_draws_an_order_and_a_factor_for_each() -> None:
    jitter = vision.ColorJitter(0.4, (0.5, 0.8), 0.9, 0.2)
    for seed in range(5):
        draws = np.random.default_rng(seed)
        order = draws.permutation(4)
        ranges = ((0.6, 1.4), (0.5, 0.8), (0.1, 1.9), (-0.2, 0.2))
        factors = [draws.uniform(*limits) for limits in ranges]
        want = IMAGE
        for number in order:
            name = ("brightness", "contrast", "saturation", "hue")[number]
            want = getattr(vision, f"adjust_{name}")(want, factors[number])
        assert np.array_equal(jitter(IMAGE, np.random.default_rng(seed)), want)
    assert np.array_equal(vision.ColorJitter()(IMAGE), IMAGE)


def test_erased_rectangles_have_torchvisions_distribution() -> None:
    erase = vision.RandomErasing(0.5, value=7)
    image = np.full((100, 100, 3), 200, np.uint8)
    rng = np.random.default_rng(0)
    masks = [(erase(image, rng) == 7).all(axis=2) for _ in range(1500)]
    erased = [mask for mask in masks if mask.any()]
    assert abs(len(erased) / 1500 - 0.5) < 0.05
    assert (image == 200).all()
    areas = np.array([mask.mean() for mask in erased])
    assert areas.min() > 0.015
    assert areas.max() < 0.34
    shapes = [math.log(mask.any(axis=1).sum() / mask.any(axis=0).sum()) for mask in erased]
    assert abs(np.mean(shapes)) < 0.1
    assert all(mask.sum() == mask.any(axis=1).sum() * mask.any(axis=0).sum() for mask in erased[:50])


def test_erased_pixels_become_colours_or_noise() -> None:
    rng = np.random.default_rng(3)
    coloured = vision.RandomErasing(1, value=(1, 2, 3))(IMAGE, rng)
    changed = (coloured != IMAGE).any(axis=2)
    assert (coloured[changed] == (1, 2, 3)).all()
    noise = vision.RandomErasing(1, (0.3, 0.3), (1, 1), "random")(np.zeros((40, 40, 3), np.float32), rng)
    assert 0.8 < noise[noise != 0].std() < 1.2
    planes = vision.RandomErasing(1, value=9, layout="CHW")(np.zeros((3, 40, 60), np.uint8), rng)
    assert (planes[0] == planes[1]).all()
    assert 0 < (planes == 9).mean() < 0.4


def test_normalize_is_the_formula() -> None:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    want = (IMAGE / 255 - np.array(mean)) / np.array(std)
    assert np.allclose(vision.normalize(IMAGE, mean, std), want, atol=1e-6)
    assert np.allclose(vision.Normalize(mean, std)(FLOATS), want, atol=1e-5)
    assert np.array_equal(
        vision.Normalize(mean, std, layout="CHW")(IMAGE), vision.normalize(IMAGE, mean, std).transpose(2, 0, 1)
    )
    with pytest.raises(ValueError, match="3 means, but the image has 1 channels"):
        vision.Normalize(mean, std)(IMAGE[:, :, :1])
