"""Decode and geometry in one step: which part of an image is kept, and at which size."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.codecs.limits import Limits
from penstock.errors import PlanError
from penstock.plan import check_choice
from penstock.vision.decoding import Box, Truncated, open_picture
from penstock.vision.resampling import Pixels, Rect, resize, shrink
from penstock.vision.transform import (
    DType,
    FixedTransform,
    Form,
    Layout,
    Moments,
    RandomTransform,
    Range,
    Transform,
    check_chance,
    check_range,
    check_size,
    moments,
)

PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]
Size = int | tuple[int, int]

_TRIES = 10  # as many as torchvision's before it settles for the middle of the image


class Region(NamedTuple):
    """What is kept of an image, which size it gets, and whether left and right change places."""

    top: int
    left: int
    height: int
    width: int
    size: tuple[int, int]
    flip: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class Geometry(Transform):
    """Keeps a region of an image.

    Attributes:
        antialias: Look at every pixel where the image shrinks, as Pillow and torchvision do; ``False`` is plain
            bilinear, and faster.
        layout: ``"HWC"`` or ``"CHW"``.
        normalize: (means, deviations) of the channels for pixels in 0..1, or ``"imagenet"``.
        dtype: ``"uint8"`` (default), or ``"float32"`` (default where normalised) or ``"float16"`` in 0..1.
        to: ``"numpy"`` or ``"torch"``.
        truncated: ``"error"``, or ``"partial"`` to take what there is of a JPEG that was cut short.
    """

    antialias: bool = True
    layout: Layout = "HWC"
    normalize: Moments | Literal["imagenet"] | None = None
    dtype: DType | None = None
    to: Literal["numpy", "torch"] = "numpy"
    truncated: Truncated = "error"
    _form: Form = field(init=False, repr=False, compare=False, default=Form())

    def __post_init__(self) -> None:
        given = moments(self.normalize)
        object.__setattr__(self, "normalize", given)
        object.__setattr__(self, "_form", Form(self.layout, given, self.dtype, self.to))
        check_choice("truncated", self.truncated, ("error", "partial"))

    @abstractmethod
    def region(self, height: int, width: int, rng: np.random.Generator) -> Region:
        """What is kept of an image of this size."""

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        height, width = pixels.shape[:2]
        return self._form.of(self._cut(pixels, self.region(height, width, rng), 1))

    def decode(self, data: bytes, rng: np.random.Generator, limits: Limits) -> Any:
        picture = open_picture(data, limits, self.truncated)
        height, width = picture.size
        region = self.region(height, width, rng)
        top, left, bottom, right = region.top, region.left, region.top + region.height, region.left + region.width
        # What reaches beyond the image may need any of it.
        wanted = Box(top, left, bottom, right) if min(top, left, height - bottom, width - right) >= 0 else None
        shrinks = min(region.height / region.size[0], region.width / region.size[1]) if self.antialias else 1
        pixels, factor = picture.pixels(shrinks, wanted)
        return self._form.of(self._cut(pixels, region, factor))

    def _cut(self, pixels: Pixels, region: Region, factor: int) -> Pixels:
        """The region of an image that is a ``factor`` smaller than the region thinks."""
        top, left, height, width, size, flip = region
        if factor == 1:
            return resize(self._part(pixels, region), size, self.antialias, flip=flip)
        above, before = top // factor, left // factor
        part = pixels[above : -(-(top + height) // factor), before : -(-(left + width) // factor)]
        inside = Rect(top / factor - above, left / factor - before, height / factor, width / factor)
        return shrink(part, inside, size, flip)

    def _part(self, pixels: Pixels, region: Region) -> Pixels:
        return pixels[region.top : region.top + region.height, region.left : region.left + region.width]


@dataclass(frozen=True, repr=False)
class RandomResizedCrop(Geometry, RandomTransform):
    """A random part of the image, of random area and shape, at one size: torchvision's ``RandomResizedCrop``.

    Raises:
        PlanError: an argument makes no sense.
    """

    size: Size
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    flip: bool | float = False
    _shape: tuple[int, int] = field(init=False, repr=False, compare=False, default=(1, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_shape", check_size("size", self.size))
        object.__setattr__(self, "scale", check_range("scale", self.scale, 0, 1))
        object.__setattr__(self, "ratio", check_range("ratio", self.ratio))
        if self.scale[1] == 0 or self.ratio[0] == 0:
            raise PlanError(f"scale={self.scale}, ratio={self.ratio}: they must be above 0")
        if not isinstance(self.flip, bool):
            check_chance("flip", self.flip)

    def region(self, height: int, width: int, rng: np.random.Generator) -> Region:
        """A random part; flipped with the probability ``flip``, where ``True`` is one half."""
        top, left, kept_height, kept_width = _random_part(height, width, self.scale, self.ratio, rng)
        flip = bool(self.flip) and rng.random() < (0.5 if self.flip is True else self.flip)
        return Region(top, left, kept_height, kept_width, self._shape, flip)


def _random_part(
    height: int, width: int, scale: Range, ratio: Range, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Top, left, height and width by torchvision's rule."""
    area = height * width
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_TRIES):
        target = area * (scale[0] + (scale[1] - scale[0]) * rng.random())
        shape = math.exp(low + (high - low) * rng.random())
        kept_width, kept_height = round(math.sqrt(target * shape)), round(math.sqrt(target / shape))
        if 0 < kept_width <= width and 0 < kept_height <= height:
            top = int(rng.random() * (height - kept_height + 1))
            left = int(rng.random() * (width - kept_width + 1))
            return top, left, kept_height, kept_width
    kept_width, kept_height = width, height
    if width / height < ratio[0]:
        kept_height = max(1, min(height, round(width / ratio[0])))
    elif width / height > ratio[1]:
        kept_width = max(1, min(width, round(height * ratio[1])))
    return (height - kept_height) // 2, (width - kept_width) // 2, kept_height, kept_width


@dataclass(frozen=True, repr=False)
class Resize(Geometry, FixedTransform):
    """The whole image at another size: ``size`` pixels on its shorter side, or exactly (height, width).

    With ``max_size`` the longer side gets no longer than that.

    Raises:
        PlanError: an argument makes no sense.
    """

    size: Size
    max_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("size", self.size)
        if isinstance(self.size, list):
            object.__setattr__(self, "size", tuple(self.size))
        if self.max_size is not None and not (isinstance(self.size, int) and self.max_size > self.size):
            raise PlanError(f"max_size={self.max_size!r}: it goes with one size={self.size!r}, and is larger than that")

    def region(self, height: int, width: int, rng: np.random.Generator) -> Region:
        """All of it."""
        return Region(0, 0, height, width, self._size(height, width))

    def _size(self, height: int, width: int) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size
        short, long = sorted((height, width))
        new_short, new_long = self.size, int(self.size * long / short)
        if self.max_size is not None and new_long > self.max_size:
            new_short, new_long = int(self.max_size * new_short / new_long), self.max_size
        new_short, new_long = max(1, new_short), max(1, new_long)
        return (new_short, new_long) if height <= width else (new_long, new_short)


@dataclass(frozen=True, repr=False)
class _Window(Geometry):
    """Keeps a window of one size; where it reaches beyond the image there is padding."""

    size: Size
    _shape: tuple[int, int] = field(init=False, repr=False, compare=False, default=(1, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_shape", check_size("size", self.size))

    def _padding(self) -> tuple[PaddingMode, float | tuple[float, ...]]:
        return "constant", 0

    def _part(self, pixels: Pixels, region: Region) -> Pixels:
        height, width = pixels.shape[:2]
        top, left, bottom, right = region.top, region.left, region.top + region.height, region.left + region.width
        if top >= 0 and left >= 0 and bottom <= height and right <= width:
            return pixels[top:bottom, left:right]
        mode, fill = self._padding()
        if mode != "constant":
            rows, columns = _beyond(top, bottom, height, mode), _beyond(left, right, width, mode)
            beyond: Pixels = pixels[rows[:, None], columns]
            return beyond
        out = np.empty((region.height, region.width, pixels.shape[2]), pixels.dtype)
        out[...] = np.asarray(fill)
        inside = pixels[max(0, top) : max(0, bottom), max(0, left) : max(0, right)]
        above, before = max(0, -top), max(0, -left)
        out[above : above + inside.shape[0], before : before + inside.shape[1]] = inside
        return out


def _beyond(low: int, high: int, length: int, mode: str) -> Any:
    """Which of ``length`` pixels stand at ``low`` to ``high``, which may reach beyond them."""
    wanted = np.arange(low, high)
    if mode == "edge" or length == 1:
        return np.clip(wanted, 0, length - 1)
    period = 2 * length - (2 if mode == "reflect" else 0)
    wanted = wanted % period
    return np.where(wanted < length, wanted, (period if mode == "reflect" else period - 1) - wanted)


@dataclass(frozen=True, repr=False)
class CenterCrop(_Window, FixedTransform):
    """The middle of the image; black where the image is smaller.

    Raises:
        PlanError: an argument makes no sense.
    """

    def region(self, height: int, width: int, rng: np.random.Generator) -> Region:
        """The middle."""
        kept_height, kept_width = self._shape
        return Region(_middle(height, kept_height), _middle(width, kept_width), kept_height, kept_width, self._shape)


def _middle(length: int, kept: int) -> int:
    # torchvision pads a smaller image first, with the smaller half before it, and rounds where it crops.
    return round((length - kept) / 2) if length >= kept else -((kept - length) // 2)


@dataclass(frozen=True, repr=False)
class RandomCrop(_Window, RandomTransform):
    """A random window of one size, after padding: torchvision's ``RandomCrop``.

    Attributes:
        padding: Pixels around the image: one number, (horizontal, vertical), or (left, top, right, bottom).
        pad_if_needed: Pad an image that is smaller than the window.
        fill: What constant padding is made of: a number, or one for each channel.
        padding_mode: ``"constant"``, ``"edge"``, ``"reflect"`` or ``"symmetric"``.
        flip: Turn left and right around, with this probability; ``True`` is one half.

    Raises:
        PlanError: an argument makes no sense.
    """

    padding: int | tuple[int, ...] | None = None
    pad_if_needed: bool = False
    fill: float | tuple[float, ...] = 0
    padding_mode: PaddingMode = "constant"
    flip: bool | float = False
    _around: tuple[int, int, int, int] = field(init=False, repr=False, compare=False, default=(0, 0, 0, 0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("padding_mode", self.padding_mode, ("constant", "edge", "reflect", "symmetric"))
        object.__setattr__(self, "_around", _around(self.padding))
        if not isinstance(self.flip, bool):
            check_chance("flip", self.flip)

    def _padding(self) -> tuple[PaddingMode, float | tuple[float, ...]]:
        return self.padding_mode, self.fill

    def region(self, height: int, width: int, rng: np.random.Generator) -> Region:
        """A random window.

        Raises:
            ValueError: the image is smaller than the window.
        """
        kept_height, kept_width = self._shape
        left, top, right, bottom = self._around
        height, width = height + top + bottom, width + left + right
        if self.pad_if_needed and width < kept_width:
            left, width = left + kept_width - width, 2 * kept_width - width
        if self.pad_if_needed and height < kept_height:
            top, height = top + kept_height - height, 2 * kept_height - height
        if height < kept_height or width < kept_width:
            raise ValueError(
                f"an image of {height}x{width} (height x width, with padding) is smaller than the crop of "
                f"{kept_height}x{kept_width}; pass pad_if_needed=True"
            )
        down = int(rng.random() * (height - kept_height + 1)) - top
        across = int(rng.random() * (width - kept_width + 1)) - left
        flip = bool(self.flip) and rng.random() < (0.5 if self.flip is True else self.flip)
        return Region(down, across, kept_height, kept_width, self._shape, flip)


def _around(padding: Any) -> tuple[int, int, int, int]:
    """Left, top, right and bottom."""
    given = (padding or 0,) if padding is None or isinstance(padding, int) else tuple(padding)
    if len(given) not in (1, 2, 4) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in given):
        raise PlanError(
            f"padding={padding!r}: give one number of pixels, (horizontal, vertical), or (left, top, right, bottom)"
        )
    left, top, right, bottom = given * (4 // len(given))
    return left, top, right, bottom


@dataclass(frozen=True, repr=False)
class HorizontalFlip(RandomTransform):
    """Turns left and right around, with the probability ``p``."""

    p: float = 0.5

    def __post_init__(self) -> None:
        check_chance("p", self.p)

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        return np.ascontiguousarray(pixels[:, ::-1]) if rng.random() < self.p else pixels


@dataclass(frozen=True, repr=False)
class VerticalFlip(RandomTransform):
    """Turns the image upside down, with the probability ``p``."""

    p: float = 0.5

    def __post_init__(self) -> None:
        check_chance("p", self.p)

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        return np.ascontiguousarray(pixels[::-1]) if rng.random() < self.p else pixels
