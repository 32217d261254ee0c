"""Images stored as planes: what is stored, and what crops make of it."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock import vision
from penstock.codecs import OverLimit
from penstock.vision.planes import PlanesImage, encode_planes
from penstock.vision.resampling import Pixels, resize
from penstock.vision.segments import Box


def smooth(height: int, width: int) -> Pixels:
    rows, columns = np.mgrid[:height, :width] / 9
    planes = [np.sin(rows) + np.cos(columns), np.cos(rows + columns / 2), np.sin(columns / 3)]
    out: Pixels = np.rint(127 + 60 * np.stack(planes, axis=2)).astype(np.uint8)
    return out


def difference(first: Pixels, second: Pixels) -> Pixels:
    out: Pixels = np.abs(first.astype(int) - second)
    return out


@pytest.mark.parametrize(("height", "width"), [(64, 90), (63, 91), (1, 1), (1, 8), (3, 2)])
def test_planes_are_the_colours_of_jpeg(height: int, width: int) -> None:
    image = smooth(height, width)
    planes = PlanesImage.of(encode_planes(image))
    assert planes.size == (height, width)
    red, green, blue = np.moveaxis(image.astype(float), 2, 0)
    y = 0.299 * red + 0.587 * green + 0.114 * blue
    assert difference(planes.y, np.rint(y)).max() <= 1
    padded = ((0, height % 2), (0, width % 2))
    for plane, chroma in ((planes.u, 128 + (blue - y) / 1.772), (planes.v, 128 + (red - y) / 1.402)):
        even = np.pad(chroma, padded, "edge")
        quarters = even.reshape(even.shape[0] // 2, 2, even.shape[1] // 2, 2).mean(axis=(1, 3))
        assert np.abs(plane - quarters).max() <= 1.6
    assert difference(vision.read_image(encode_planes(image)), image).mean() < 3


@pytest.mark.parametrize("antialias", [True, False])
def test_a_crop_is_that_of_the_image_up_to_its_chroma(antialias: bool) -> None:
    image = smooth(181, 255)
    data = encode_planes(image)
    crop = vision.RandomResizedCrop(64, flip=True, antialias=antialias)
    for seed in range(8):
        got, want = crop(data, np.random.default_rng(seed)), crop(image, np.random.default_rng(seed))
        assert got.shape == want.shape
        assert difference(got, want).mean() < (2 if antialias else 4)


def test_a_part_has_the_pixels_of_the_whole() -> None:
    data = encode_planes(smooth(61, 83))
    image, whole = PlanesImage.of(data), vision.read_image(data)
    for box in (Box(21, 30, 44, 59), Box(0, 0, 5, 83), Box(50, 70, 61, 83)):
        top, left, bottom, right = box
        part = image.decode(1, box)
        got = part.pixels[top - part.top : bottom - part.top, left - part.left : right - part.left]
        assert part.pixels.size < whole.size
        assert np.array_equal(got, whole[top:bottom, left:right])


def test_crops_beyond_the_edge_are_padded() -> None:
    data = encode_planes(smooth(20, 20))
    assert not vision.CenterCrop(30)(data)[:5].any()
    assert np.array_equal(vision.CenterCrop(30)(data)[5:25, 5:25], vision.read_image(data))
    assert np.array_equal(vision.Resize(10)(data), vision.Resize(10)(data))
    assert resize(vision.read_image(data), (10, 10)).shape == vision.Resize(10)(data).shape


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:-1], "damaged or truncated planes"),
        (lambda data: data[:12], "the header is not complete"),
        (lambda data: data + b"x", "damaged or truncated planes"),
        (lambda data: data[:8] + b"\x02" + data[9:], "color matrix"),
    ],
)
def test_damaged_planes_are_an_error(change: object, problem: str) -> None:
    data = change(encode_planes(smooth(10, 12)))  # type: ignore[operator]
    with pytest.raises(ValueError, match=problem):
        vision.read_image(data)


def test_limits_apply_to_planes() -> None:
    with pytest.raises(OverLimit):
        vision.read_image(encode_planes(smooth(10, 12)), limits=ps.Limits(pixels=119))
