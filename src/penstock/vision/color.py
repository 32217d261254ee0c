"""Colour, blur and erasing, and the conversion of pixels to the input of a model."""

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
    Layout,
    MeanStd,
    OutputFormat,
    RandomTransform,
    Range,
    check_normalize,
    check_probability,
    check_range,
    to_pixels,
)

_GRAY_WEIGHTS = np.array([0.299, 0.587, 0.114], np.float32)


def adjust_brightness(image: Pixels, factor: float) -> Pixels:
    """Multiply an image by ``factor``; 0 is black, 1 changes nothing."""
    return _scaled_and_shifted(image, factor, 0.0)


def adjust_contrast(image: Pixels, factor: float) -> Pixels:
    """Scale the distance of pixels from the mean gray of the image; 0 is that gray, 1 changes nothing."""
    mean = float(grayscale(image).mean(dtype=np.float64))
    return _scaled_and_shifted(image, factor, (1 - factor) * mean)


def adjust_saturation(image: Pixels, factor: float) -> Pixels:
    """Scale the distance of pixels from their own gray; 0 is gray, 1 changes nothing."""
    if image.shape[2] == 1:
        return image
    matrix = factor * np.eye(3, dtype=np.float32) + np.float32(1 - factor) * np.tile(_GRAY_WEIGHTS, (3, 1))
    out: Pixels = opencv().transform(np.ascontiguousarray(image), matrix)
    return out if out.dtype == np.uint8 else np.clip(out, 0, 1, out=out)


def adjust_hue(image: Pixels, shift: float) -> Pixels:
    """Rotate the hue of every pixel by ``shift`` of the colour circle, from -0.5 to 0.5."""
    if image.shape[2] == 1 or shift == 0:
        return image
    cv2 = opencv()
    floats = image.astype(np.float32)
    if image.dtype == np.uint8:
        floats *= np.float32(1 / 255)
    hsv = cv2.cvtColor(floats, cv2.COLOR_RGB2HSV)
    hue = hsv[:, :, 0]
    hue += np.float32(shift * 360)
    hue[hue < 0] += np.float32(360)
    hue[hue >= 360] -= np.float32(360)
    out: Pixels = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
    if image.dtype == np.uint8:
        out *= np.float32(255)
        return np.rint(out, out=out).astype(np.uint8)
    return out


def grayscale(image: Pixels, channels: int = 1) -> Pixels:
    """Return an image in gray (0.299 R + 0.587 G + 0.114 B), in one channel or in three equal ones."""
    gray = image
    if image.shape[2] != 1:
        cv2 = opencv()
        gray = cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2GRAY)[:, :, None]
    return gray if channels == 1 else np.repeat(gray, channels, axis=2)


def gaussian_blur(image: Pixels, size: int, sigma: float) -> Pixels:
    """Blur by a Gaussian kernel of ``size`` x ``size`` pixels; the image is mirrored at its edges."""
    cv2 = opencv()
    out: Pixels = cv2.GaussianBlur(np.ascontiguousarray(image), (size, size), sigma, borderType=cv2.BORDER_REFLECT_101)
    return out.reshape(image.shape)


def normalize(image: Pixels, mean: Any, std: Any) -> Pixels:
    """Subtract the means and divide by the standard deviations of the channels; uint8 is divided by 255 first.

    Raises:
        PlanError: ``mean`` and ``std`` differ in length, or a deviation is not above 0.
        ValueError: The image has another number of channels.
    """
    out: Pixels = OutputFormat(normalize=check_normalize((mean, std))).convert(image)
    return out


def _scaled_and_shifted(image: Pixels, factor: float, shift: float) -> Pixels:
    """Return the image times ``factor`` plus ``shift``, clipped to 0..255 or 0..1."""
    if image.dtype == np.uint8:
        table = np.clip(np.rint(np.arange(256) * factor + shift), 0, 255).astype(np.uint8)
        out: Pixels = opencv().LUT(np.ascontiguousarray(image), table)
        return out.reshape(image.shape)
    floats: Pixels = np.clip(image * np.float32(factor) + np.float32(shift), 0, 1)
    return floats


_ADJUST = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)


@dataclass(frozen=True, repr=False)
class ColorJitter(RandomTransform):
    """Changes brightness, contrast, saturation and hue at random, in random order: torchvision's ``ColorJitter``.

    Each argument is a number ``x``, for factors from ``max(0, 1 - x)`` to ``1 + x`` (hue: for rotations from ``-x`` to
    ``x``, at most 0.5), or the pair (lowest, highest).

    Raises:
        PlanError: An argument is not valid.
    """

    brightness: float | Range = 0.0
    contrast: float | Range = 0.0
    saturation: float | Range = 0.0
    hue: float | Range = 0.0
    _ranges: tuple[Range | None, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        names = ("brightness", "contrast", "saturation")
        ranges = [_factor_range(name, getattr(self, name), 1.0, 0.0, math.inf) for name in names]
        object.__setattr__(self, "_ranges", (*ranges, _factor_range("hue", self.hue, 0.0, -0.5, 0.5)))

    def draw(self, rng: np.random.Generator) -> tuple[list[int], list[float | None]]:
        """Draw the order of brightness, contrast, saturation and hue, and the factor of each that changes."""
        order: list[int] = rng.permutation(4).tolist()
        return order, [None if limits is None else float(rng.uniform(*limits)) for limits in self._ranges]

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        order, factors = self.draw(rng)
        for number in order:
            if (factor := factors[number]) is not None:
                pixels = _ADJUST[number](pixels, factor)
        return pixels


def _factor_range(name: str, value: Any, neutral: float, low: float, high: float) -> Range | None:
    """Return the range that a factor is drawn from; ``None`` if it always changes nothing."""
    if isinstance(value, Real) and not isinstance(value, bool):
        if not 0 <= float(value) <= high:
            bounds = f"from 0 to {high}" if high != math.inf else "of 0 or more"
            raise PlanError(f"{name}={value!r}: pass a number {bounds}")
        value = (max(low, neutral - float(value)), neutral + float(value))
    lowest, highest = check_range(name, value, low, high)
    return None if lowest == highest == neutral else (lowest, highest)


@dataclass(frozen=True, repr=False)
class Grayscale(RandomTransform):
    """Converts the image to gray with probability ``p``, in three equal channels, or in one.

    Raises:
        PlanError: An argument is not valid.
    """

    channels: Literal[1, 3] = 3
    p: float = 1.0

    def __post_init__(self) -> None:
        check_probability("p", self.p)
        if self.channels not in (1, 3) or (self.channels == 1 and self.p != 1):
            raise PlanError(f"channels={self.channels!r}, p={self.p!r}: channels must be 3, or 1 with p=1")

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        return grayscale(pixels, self.channels) if self.draw(rng) else pixels

    def draw(self, rng: np.random.Generator) -> bool:
        """Draw whether an image becomes gray."""
        return self.p == 1 or rng.random() < self.p


@dataclass(frozen=True, repr=False)
class GaussianBlur(RandomTransform):
    """Blurs by a Gaussian of random width with probability ``p``: torchvision's ``GaussianBlur``.

    Attributes:
        size: The side of the kernel, an odd number of pixels.
        sigma: The standard deviation, or the smallest and the largest one.
        p: The probability.

    Raises:
        PlanError: An argument is not valid.
    """

    size: int
    sigma: float | Range = (0.1, 2.0)
    p: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1 or self.size % 2 == 0:
            raise PlanError(f"size={self.size!r}: pass an odd number of pixels")
        sigmas = (self.sigma, self.sigma) if isinstance(self.sigma, Real) else self.sigma
        object.__setattr__(self, "sigma", check_range("sigma", sigmas))
        if self._sigma_range()[0] == 0:
            raise PlanError("sigma=0: it must be above 0")
        check_probability("p", self.p)

    def _sigma_range(self) -> Range:
        assert isinstance(self.sigma, tuple)
        return self.sigma

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        if self.p < 1 and rng.random() >= self.p:
            return pixels
        return gaussian_blur(pixels, self.size, float(rng.uniform(*self._sigma_range())))


@dataclass(frozen=True, repr=False)
class RandomErasing(RandomTransform):
    """Erases a random rectangle with probability ``p``: torchvision's ``RandomErasing``.

    Attributes:
        p: The probability.
        scale: The smallest and the largest area, as fractions of the image.
        ratio: The smallest and the largest height over width.
        value: What the rectangle is filled with: a number, one for each channel, or ``"random"`` for noise, which is
            uniform for uint8 and normal for floats.
        layout: The layout of the image, ``"HWC"`` or ``"CHW"``.

    Raises:
        PlanError: An argument is not valid.
    """

    p: float = 0.5
    scale: Range = (0.02, 0.33)
    ratio: Range = (0.3, 3.3)
    value: float | tuple[float, ...] | Literal["random"] = 0
    layout: Layout = "HWC"

    def __post_init__(self) -> None:
        check_probability("p", self.p)
        object.__setattr__(self, "scale", check_range("scale", self.scale, 0, 1))
        object.__setattr__(self, "ratio", check_range("ratio", self.ratio))
        check_choice("layout", self.layout, ("HWC", "CHW"))
        if self.ratio[0] == 0:
            raise PlanError(f"ratio={self.ratio}: it must be above 0")
        if isinstance(self.value, str):
            check_choice("value", self.value, ("random",))

    def _input_pixels(self, image: Any) -> Pixels:
        array = as_array(image) if self.layout == "CHW" else None
        return to_pixels(image) if array is None else to_pixels(array.transpose(1, 2, 0)).transpose(2, 0, 1)

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        image = pixels if self.layout == "HWC" else pixels.transpose(1, 2, 0)
        height, width = image.shape[:2]
        rectangle = self._rectangle(height, width, rng) if rng.random() < self.p else None
        if rectangle is None:
            return pixels
        out = pixels.copy()
        erased = (out if self.layout == "HWC" else out.transpose(1, 2, 0))[rectangle]
        if self.value != "random":
            erased[...] = np.asarray(self.value)
        elif out.dtype == np.uint8:
            erased[...] = rng.integers(0, 256, erased.shape, np.uint8)
        else:
            erased[...] = rng.standard_normal(erased.shape, np.float32)
        return out

    def _rectangle(self, height: int, width: int, rng: np.random.Generator) -> tuple[slice, slice] | None:
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):  # as many tries as torchvision's
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(low, high))
            rows, columns = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if rows < height and columns < width:
                top, left = int(rng.integers(height - rows + 1)), int(rng.integers(width - columns + 1))
                return slice(top, top + rows), slice(left, left + columns)
        return None


@dataclass(frozen=True, repr=False)
class Normalize(FixedTransform):
    """Subtracts means and divides by standard deviations, after dividing uint8 by 255. Usually the last transform.

    Attributes:
        mean: The means of the channels, for pixels in 0..1.
        std: The standard deviations of the channels.
        dtype: ``"float32"`` or ``"float16"``.
        layout: The layout of the result, ``"HWC"`` or ``"CHW"``.
        to: ``"numpy"`` or ``"torch"``.

    Raises:
        PlanError: An argument is not valid.
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    dtype: DType = "float32"
    layout: Layout = "HWC"
    to: Literal["numpy", "torch"] = "numpy"

    def __post_init__(self) -> None:
        mean_std = check_normalize((self.mean, self.std))
        assert mean_std is not None
        object.__setattr__(self, "mean", mean_std[0])
        object.__setattr__(self, "std", mean_std[1])
        assert self.output_format

    @property
    def output_format(self) -> OutputFormat:
        """The layout and number type of the result."""
        return _output_format(self.layout, (self.mean, self.std), self.dtype, self.to)

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        return self.output_format.convert(pixels)


@dataclass(frozen=True, repr=False)
class ToTensor(FixedTransform):
    """Converts the image for a model, without normalizing it; by default like torchvision's ``ToTensor``.

    Raises:
        PlanError: An argument is not valid.
    """

    layout: Layout = "CHW"
    dtype: DType = "float32"
    to: Literal["numpy", "torch"] = "torch"

    def __post_init__(self) -> None:
        assert self.output_format

    @property
    def output_format(self) -> OutputFormat:
        """The layout and number type of the result."""
        return _output_format(self.layout, None, self.dtype, self.to)

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        return self.output_format.convert(pixels)


@lru_cache(64)
def _output_format(
    layout: Layout, normalize: MeanStd | None, dtype: DType, to: Literal["numpy", "torch"]
) -> OutputFormat:
    return OutputFormat(layout, normalize, dtype, to)
