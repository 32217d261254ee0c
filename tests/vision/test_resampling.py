"""Resampling, compared with a plain, slow triangle filter and with Pillow."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from PIL import Image

from penstock.vision.resampling import Pixels, Rect, resize, shrink


def photo(height: int, width: int, channels: int = 3, seed: int = 0) -> Pixels:
    """Make smooth shapes with hard edges and grain, which are difficult to resample."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    smooth = 120 + 60 * np.sin(rows / 7 + seed)[..., None] * np.cos(columns / 11)[..., None]
    edges = 70 * ((rows // 13 + columns // 9) % 2)[..., None]
    image = smooth + edges + rng.normal(0, 12, (height, width, channels))
    out: Pixels = np.clip(image, 0, 255).astype(np.uint8)
    return out


def triangle_filter(image: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize by the definition of the triangle filter, row by row, in floats."""

    def resize_rows(values: Pixels, count: int) -> Pixels:
        scale = len(values) / count
        radius = max(1.0, scale)
        out = []
        for number in range(count):
            center = (number + 0.5) * scale
            weights = np.array([max(0.0, 1 - abs(row + 0.5 - center) / radius) for row in range(len(values))])
            out.append(np.tensordot(weights / weights.sum(), values, 1))
        return np.array(out)

    resized = resize_rows(image.astype(np.float64), size[0])
    return resize_rows(resized.swapaxes(0, 1), size[1]).swapaxes(0, 1)


SIZES = [((90, 120), (41, 37)), ((50, 64), (49, 20)), ((40, 90), (64, 33)), ((100, 30), (64, 48)), ((7, 300), (9, 16))]


@pytest.mark.parametrize(("before", "after"), SIZES)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_antialiasing_equals_the_triangle_filter_within_two_levels(
    before: tuple[int, int], after: tuple[int, int], channels: int
) -> None:
    image = photo(*before, channels)
    got = resize(image, after).astype(float)
    assert got.shape == (*after, channels)
    difference = np.abs(got - triangle_filter(image, after))
    assert difference.max() <= 2
    assert difference.mean() < 0.5


@pytest.mark.parametrize(("before", "after"), [*SIZES, ((500, 375), (224, 224)), ((900, 700), (100, 64))])
def test_antialiasing_equals_pillows_bilinear_within_two_levels(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    image = photo(*before)
    pillow = np.asarray(Image.fromarray(image).resize(after[::-1], Image.Resampling.BILINEAR))
    difference = np.abs(resize(image, after).astype(int) - pillow)
    assert difference.max() <= 2
    assert (difference > 1).mean() < 0.001


def test_floats_are_resampled_as_floats() -> None:
    image = (photo(90, 70) / 255).astype(np.float32)
    assert np.allclose(resize(image, (33, 41)), triangle_filter(image, (33, 41)), atol=1e-5)


def test_sixteen_bits_keep_their_precision() -> None:
    image = photo(60, 60).astype(np.uint16) * 257
    assert np.abs(resize(image, (20, 31)).astype(float) - triangle_filter(image, (20, 31))).max() <= 2


def test_plain_bilinear_reads_four_pixels_only() -> None:
    image = np.zeros((100, 100, 3), np.uint8)
    image[::2] = 255
    image[:, 50:] = image[:, 50:] // 5
    got = resize(image, (10, 10), antialias=False)
    rows = np.clip((np.arange(10) + 0.5) * 10 - 0.5, 0, 99)
    low, part = np.floor(rows).astype(int), (rows % 1)[:, None, None]
    want = image[low] * (1 - part) + image[np.minimum(low + 1, 99)] * part
    assert np.abs(got[:, :4].astype(float) - want[:, 5:45:10]).max() <= 1


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize(("before", "after"), [*SIZES, ((20, 20), (20, 20))])
def test_flipped_is_the_mirror_image(before: tuple[int, int], after: tuple[int, int], antialias: bool) -> None:
    image = photo(*before)
    flipped = resize(image, after, antialias, flip=True)
    assert flipped.flags.c_contiguous
    assert np.array_equal(flipped, resize(image, after, antialias)[:, ::-1])


def test_a_view_is_resized_like_its_copy() -> None:
    image = photo(120, 150)
    part = image[11:95, 20:131]
    assert np.array_equal(resize(part, (40, 50)), resize(part.copy(), (40, 50)))
    rotated = image.swapaxes(0, 1)[::-1]
    assert np.array_equal(resize(rotated, (40, 50)), resize(rotated.copy(), (40, 50)))


def test_a_part_may_begin_within_a_pixel() -> None:
    image = photo(96, 96)
    halves = np.repeat(np.repeat(image, 2, axis=0), 2, axis=1)
    got = shrink(image, Rect(0.5, 1.5, 90, 80), (24, 20), False)
    want = resize(halves[1:181, 3:163], (24, 20))
    assert np.abs(got.astype(int) - want).mean() < 2


def test_threads_do_not_share_scratch_memory() -> None:
    images = [photo(200 + 10 * number, 260, seed=number) for number in range(4)]
    want = [resize(image, (64, 64)) for image in images]
    wrong: list[int] = []

    def work(number: int) -> None:
        wrong.extend(number for _ in range(30) if not np.array_equal(resize(images[number], (64, 64)), want[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_result_is_a_new_array() -> None:
    image = photo(20, 20)
    for antialias in (True, False):
        for size in ((20, 20), (10, 10), (30, 30)):
            out = resize(image, size, antialias)
            second = resize(image, size, antialias)
            out[:] = 0
            assert second.any()
    assert image.any()
