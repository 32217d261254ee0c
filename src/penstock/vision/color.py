"""What changes colours and sharpness, erases, and turns pixels into what a model takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Real
from typing import Any, Literal

import numpy as np

from penstock.codecs.arrays import as_array
from penstock.errors import PlanError
from penstock.plan import check_choice
from penstock.vision.resampling import Pixels, opencv
from penstock.vision.transform import (
    DType,
    FixedTransform,
    Form,
    Layout,
    Moments,
    RandomTransform,
    Range,
    check_chance,
    check_range,
    moments,
    pixels_of,
)

_GRAY = np.array([0.299, 0.587, 0.114], np.float32)


def adjust_brightness(image: Pixels, factor: float) -> Pixels:
    """Multiply an image by ``factor``; 0 is black, 1 changes nothing."""
    return _mapped(image, factor, 0.0)


def adjust_contrast(image: Pixels, factor: float) -> Pixels:
    """Move pixels from the mean gray of the image, ``factor`` times as far; 0 is that gray, 1 changes nothing."""
    mean = float(grayscale(image).mean(dtype=np.float64))
    return _mapped(image, factor, (1 - factor) * mean)


def adjust_saturation(image: Pixels, factor: float) -> Pixels:
    """Move pixels from their own gray, ``factor`` times as far; 0 is gray, 1 changes nothing."""
    if image.shape[2] == 1:
        return image
    mix = factor * np.eye(3, dtype=np.float32) + np.float32(1 - factor) * np.tile(_GRAY, (3, 1))
    out: Pixels = opencv().transform(np.ascontiguousarray(image), mix)
    return out if out.dtype == np.uint8 else np.clip(out, 0, 1, out=out)


def adjust_hue(image: Pixels, turn: float) -> Pixels:
    """Turn the hue of every pixel by ``turn`` of the colour circle, -0.5 to 0.5."""
    if image.shape[2] == 1 or turn == 0:
        return image
    cv2 = opencv()
    floats = image.astype(np.float32)
    if image.dtype == np.uint8:
        floats *= np.float32(1 / 255)
    hsv = cv2.cvtColor(floats, cv2.COLOR_RGB2HSV)
    hue = hsv[:, :, 0]
    hue += np.float32(turn * 360)
    hue[hue < 0] += np.float32(360)
    hue[hue >= 360] -= np.float32(360)
    out: Pixels = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
    if image.dtype == np.uint8:
        out *= np.float32(255)
        return np.rint(out, out=out).astype(np.uint8)
    return out


def grayscale(image: Pixels, channels: int = 1) -> Pixels:
    """The gray of an image (0.299 R + 0.587 G + 0.114 B), in one channel or in three that are the same."""
    gray = image
    if image.shape[2] != 1:
        cv2 = opencv()
        gray = cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2GRAY)[:, :, None]
    return gray if channels == 1 else np.repeat(gray, channels, axis=2)


def gaussian_blur(image: Pixels, size: int, sigma: float) -> Pixels:
    """Blur by a Gaussian of ``size`` x ``size`` pixels; the image is mirrored at its edges."""
    cv2 = opencv()
    out: Pixels = cv2.GaussianBlur(np.ascontiguousarray(image), (size, size), sigma, borderType=cv2.BORDER_REFLECT_101)
    return out.reshape(image.shape)


def normalize(image: Pixels, mean: Any, std: Any) -> Pixels:
    """Subtract means and divide by deviations, channel by channel; uint8 is divided by 255 before.

    Raises:
        ValueError: their number is not that of the channels.
    """
    out: Pixels = Form(normalize=moments((mean, std))).of(image)
    return out


def _mapped(image: Pixels, factor: float, shift: float) -> Pixels:
    """The image times ``factor`` plus ``shift``, within its bounds."""
    if image.dtype == np.uint8:
        table = np.clip(np.rint(np.arange(256) * factor + shift), 0, 255).astype(np.uint8)
        out: Pixels = opencv().LUT(np.ascontiguousarray(image), table)
        return out.reshape(image.shape)
    mapped: Pixels = np.clip(image * np.float32(factor) + np.float32(shift), 0, 1)
    return mapped


_ADJUST = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


@dataclass(frozen=True, repr=False)
class ColorJitter(RandomTransform):
    """Changes brightness, contrast, saturation and hue at random, in random order: torchvision's ``ColorJitter``.

    Each is a number ``x``, for factors from ``max(0, 1 - x)`` to ``1 + x`` (hue: turns from ``-x`` to ``x``, 0.5 at
    most), or (least, most).

    Raises:
        PlanError: an argument makes no sense.
    """

    brightness: float | Range = 0.0
    contrast: float | Range = 0.0
    saturation: float | Range = 0.0
    hue: float | Range = 0.0
    _ranges: tuple[Range | None, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        names = ("brightness", "contrast", "saturation")
        ranges = [_range(name, getattr(self, name), 1.0, 0.0, math.inf) for name in names]
        object.__setattr__(self, "_ranges", (*ranges, _range("hue", self.hue, 0.0, -0.5, 0.5)))

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        order = rng.permutation(4)
        drawn = [None if range is None else float(rng.uniform(*range)) for range in self._ranges]
        for number in order:
            if (factor := drawn[number]) is not None:
                pixels = _ADJUST[number](pixels, factor)
        return pixels


def _range(name: str, given: Any, centre: float, least: float, most: float) -> Range | None:
    if isinstance(given, Real) and not isinstance(given, bool):
        if not 0 <= float(given) <= most:
            raise PlanError(f"{name}={given!r}: give a number from 0{f' to {most}' if most != math.inf else ''}")
        given = (max(least, centre - float(given)), centre + float(given))
    low, high = check_range(name, given, least, most)
    return None if low == high == centre else (low, high)


@dataclass(frozen=True, repr=False)
class Grayscale(RandomTransform):
    """Gray, with the probability ``p``; the image keeps its channels unless ``channels`` is 1.

    Raises:
        PlanError: an argument makes no sense.
    """

    channels: Literal[1, 3] = 3
    p: float = 1.0

    def __post_init__(self) -> None:
        check_chance("p", self.p)
        if self.channels not in (1, 3) or (self.channels == 1 and self.p != 1):
            raise PlanError(f"channels={self.channels!r}, p={self.p!r}: give 3 channels, or 1 and p=1")

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        return grayscale(pixels, self.channels) if self.p == 1 or rng.random() < self.p else pixels


@dataclass(frozen=True, repr=False)
class GaussianBlur(RandomTransform):
    """Blurs by a Gaussian of random width, with the probability ``p``: torchvision's ``GaussianBlur``.

    Raises:
        PlanError: an argument makes no sense.
    """

    size: int
    sigma: float | Range = (0.1, 2.0)
    p: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1 or self.size % 2 == 0:
            raise PlanError(f"size={self.size!r}: give an odd number of pixels")
        given = (self.sigma, self.sigma) if isinstance(self.sigma, Real) else self.sigma
        object.__setattr__(self, "sigma", check_range("sigma", given))
        if self._widths()[0] == 0:
            raise PlanError("sigma=0: give a width above 0")
        check_chance("p", self.p)

    def _widths(self) -> Range:
        assert isinstance(self.sigma, tuple)
        return self.sigma

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        if self.p < 1 and rng.random() >= self.p:
            return pixels
        return gaussian_blur(pixels, self.size, float(rng.uniform(*self._widths())))


@dataclass(frozen=True, repr=False)
class RandomErasing(RandomTransform):
    """Erases a random rectangle, with the probability ``p``: torchvision's ``RandomErasing``.

    Attributes:
        p: How often.
        scale: Of which part of the area.
        ratio: Height over width.
        value: What is put there: a number, one for each channel, or ``"random"`` (noise: uniform for uint8, normal for
            floats).
        layout: Where the channels are.

    Raises:
        PlanError: an argument makes no sense.
    """

    p: float = 0.5
    scale: Range = (0.02, 0.33)
    ratio: Range = (0.3, 3.3)
    value: float | tuple[float, ...] | Literal["random"] = 0
    layout: Layout = "HWC"

    def __post_init__(self) -> None:
        check_chance("p", self.p)
        object.__setattr__(self, "scale", check_range("scale", self.scale, 0, 1))
        object.__setattr__(self, "ratio", check_range("ratio", self.ratio))
        check_choice("layout", self.layout, ("HWC", "CHW"))
        if self.ratio[0] == 0:
            raise PlanError(f"ratio={self.ratio}: it must be above 0")
        if isinstance(self.value, str):
            check_choice("value", self.value, ("random",))

    def _taken(self, image: Any) -> Pixels:
        array = as_array(image) if self.layout == "CHW" else None
        return pixels_of(image) if array is None else pixels_of(array.transpose(1, 2, 0)).transpose(2, 0, 1)

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        image = pixels if self.layout == "HWC" else pixels.transpose(1, 2, 0)
        height, width = image.shape[:2]
        part = self._part(height, width, rng) if rng.random() < self.p else None
        if part is None:
            return pixels
        out = pixels.copy()
        inside = (out if self.layout == "HWC" else out.transpose(1, 2, 0))[part]
        if self.value != "random":
            inside[...] = np.asarray(self.value)
        elif out.dtype == np.uint8:
            inside[...] = rng.integers(0, 256, inside.shape, np.uint8)
        else:
            inside[...] = rng.standard_normal(inside.shape, np.float32)
        return out

    def _part(self, height: int, width: int, rng: np.random.Generator) -> tuple[slice, slice] | None:
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(low, high))
            tall, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if tall < height and wide < width:
                top, left = int(rng.integers(height - tall + 1)), int(rng.integers(width - wide + 1))
                return slice(top, top + tall), slice(left, left + wide)
        return None


@dataclass(frozen=True, repr=False)
class Normalize(FixedTransform):
    """Subtracts means and divides by deviations, after uint8 was divided by 255; the last step, as a rule.

    Attributes:
        mean: Of each channel, in 0..1.
        std: Of each channel.
        dtype: ``"float32"`` or ``"float16"``.
        layout: ``"HWC"`` or ``"CHW"``.
        to: ``"numpy"`` or ``"torch"``.

    Raises:
        PlanError: an argument makes no sense.
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    dtype: DType = "float32"
    layout: Layout = "HWC"
    to: Literal["numpy", "torch"] = "numpy"

    def __post_init__(self) -> None:
        given = moments((self.mean, self.std))
        assert given is not None
        object.__setattr__(self, "mean", given[0])
        object.__setattr__(self, "std", given[1])
        self._form()

    def _form(self) -> Form:
        return _form(self.layout, (self.mean, self.std), self.dtype, self.to)

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        return self._form().of(pixels)


@dataclass(frozen=True, repr=False)
class ToTensor(FixedTransform):
    """The image as a model takes it, not normalised: torchvision's ``ToTensor`` unless told otherwise.

    Raises:
        PlanError: an argument makes no sense.
    """

    layout: Layout = "CHW"
    dtype: DType = "float32"
    to: Literal["numpy", "torch"] = "torch"

    def __post_init__(self) -> None:
        _form(self.layout, None, self.dtype, self.to)

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        return _form(self.layout, None, self.dtype, self.to).of(pixels)


@lru_cache(64)
def _form(layout: Layout, given: Moments | None, dtype: DType, to: Literal["numpy", "torch"]) -> Form:
    return Form(layout, given, dtype, to)
