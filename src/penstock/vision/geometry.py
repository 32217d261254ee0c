"""Crops, resizes and flips. Crops and resizes decode only what they keep of an image."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from penstock.codecs.limits import Limits
from penstock.errors import PlanError
from penstock.plan import check_choice
from penstock.vision.annotations import AnnotatedTransform, Region, clip
from penstock.vision.decoding import EncodedImage, Truncated, open_encoded, read_image
from penstock.vision.planes import PlanesImage
from penstock.vision.resampling import Decoded, Pixels, Rect, resize, shrink
from penstock.vision.segments import Box
from penstock.vision.transform import (
    ENCODED,
    Allocate,
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
    check_size,
)

PaddingMode = Literal["constant", "edge", "reflect", "symmetric"]
Size = int | tuple[int, int]

_LIMITS = Limits()

_UINT8 = np.dtype(np.uint8)
_TRIES = 10  # as in torchvision, before it falls back to the center of the image


@dataclass(frozen=True, kw_only=True, repr=False)
class Geometry(AnnotatedTransform):
    """Keeps a region of an image, at a given size.

    Attributes:
        antialias: Use every pixel where the image shrinks, as Pillow and torchvision do; ``False`` is plain bilinear,
            which is faster.
        layout: ``"HWC"`` or ``"CHW"``.
        normalize: (means, standard deviations) of the channels for pixels in 0..1, or ``"imagenet"``.
        dtype: ``"uint8"`` (the default), ``"float32"`` (the default with ``normalize``) or ``"float16"``; floats are
            in 0..1 unless normalized.
        to: ``"numpy"`` or ``"torch"``.
        truncated: ``"error"``, or ``"partial"`` to use what can be decoded of a truncated JPEG.
    """

    antialias: bool = True
    layout: Layout = "HWC"
    normalize: MeanStd | Literal["imagenet"] | None = None
    dtype: DType | None = None
    to: Literal["numpy", "torch"] = "numpy"
    truncated: Truncated = "error"
    _format: OutputFormat = field(init=False, repr=False, compare=False, default=OutputFormat())

    def __post_init__(self) -> None:
        super().__post_init__()
        mean_std = check_normalize(self.normalize)
        object.__setattr__(self, "normalize", mean_std)
        object.__setattr__(self, "_format", OutputFormat(self.layout, mean_std, self.dtype, self.to))
        check_choice("truncated", self.truncated, ("error", "partial"))

    @property
    def output_format(self) -> OutputFormat:
        """The layout and number type of the result."""
        return self._format

    @abstractmethod
    def region(self, height: int, width: int, rng: np.random.Generator) -> Region:
        """Return the region to keep of an image of this size."""

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        return self._with_region(pixels, rng, _LIMITS)[0]

    def decode(self, data: bytes, rng: np.random.Generator, limits: Limits) -> Any:
        return self._with_region(data, rng, limits)[0]

    def within(self, limits: Limits) -> Callable[..., Any]:
        super().within(limits)
        return _Decoder(self, limits)

    def _with_region(
        self, image: Any, rng: np.random.Generator, limits: Limits, allocate: Allocate | None = None
    ) -> tuple[Any, Region]:
        if not isinstance(image, ENCODED):
            pixels = self._input_pixels(image)
            region = self.region(pixels.shape[0], pixels.shape[1], rng)
            return self._format.convert(self._resized(*self.part(Decoded(pixels), region), region)), region
        encoded = open_encoded(bytes(image), limits, self.truncated)
        region = self.region(*encoded.size, rng)
        if self._format.is_default:
            out = None if allocate is None else allocate((*region.size, 3), _UINT8)
            return self.decode_region(encoded, region, out), region
        return self._format.convert(self.decode_region(encoded, region), allocate), region

    def decode_region(self, image: EncodedImage, region: Region, out: Pixels | None = None) -> Pixels:
        """Decode what is needed of an image, and return the region at its size, in ``out`` if it is given."""
        if isinstance(image, PlanesImage) and (needed := _inside(image, region)) is not None:
            return image.resized(needed, region.size, self.antialias, region.flip, out)
        return self._resized(*self.decode_part(image, region), region, out)

    def decode_part(self, image: EncodedImage, region: Region) -> tuple[Pixels, Rect]:
        """Decode what is needed of an image; return pixels that cover the region, and where in them it is."""
        shrink_factor = min(region.height / region.size[0], region.width / region.size[1]) if self.antialias else 1
        return self.part(image.decode(shrink_factor, _inside(image, region)), region)

    def part(self, decoded: Decoded, region: Region) -> tuple[Pixels, Rect]:
        """Return pixels of a decoded image that cover a region, given in pixels of the full size, and where it is."""
        top, left, height, width, *_ = region
        pixels, factor, *offset = decoded
        if factor == 1:
            if offset != [0, 0]:
                region = Region(top - offset[0], left - offset[1], height, width, region.size)
            return self._crop(pixels, region), Rect(0, 0, height, width)
        first_row, first_column = top // factor, left // factor
        rows = slice(first_row - offset[0], -(-(top + height) // factor) - offset[0])
        columns = slice(first_column - offset[1], -(-(left + width) // factor) - offset[1])
        inside = Rect(top / factor - first_row, left / factor - first_column, height / factor, width / factor)
        return pixels[rows, columns], inside

    def _resized(self, part: Pixels, inside: Rect, region: Region, out: Pixels | None = None) -> Pixels:
        if inside == (0, 0, *part.shape[:2]):
            return resize(part, region.size, self.antialias, flip=region.flip, out=out)
        return shrink(part, inside, region.size, region.flip, out)

    def _crop(self, pixels: Pixels, region: Region) -> Pixels:
        return pixels[region.top : region.top + region.height, region.left : region.left + region.width]


@dataclass(frozen=True, slots=True)
class _Decoder:
    """Decodes the images of ``decode(jpg=...)``, into memory that the stage provides."""

    transform: Geometry
    limits: Limits

    allocates: ClassVar[bool] = True

    def __call__(self, image: Any, rng: np.random.Generator | None = None, allocate: Allocate | None = None) -> Any:
        transform = self.transform
        if allocate is None or not isinstance(image, ENCODED):
            return transform._run(image, rng, self.limits)
        return transform._with_region(image, transform._generator(rng), self.limits, allocate)[0]


def _inside(image: EncodedImage, region: Region) -> Box | None:
    """Return the part of an image that a region needs; ``None``: padding beyond its edges may need any pixel."""
    height, width = image.size
    box = Box(region.top, region.left, region.top + region.height, region.left + region.width)
    return box if min(box.top, box.left, height - box.bottom, width - box.right) >= 0 else None


@dataclass(frozen=True, repr=False)
class RandomResizedCrop(Geometry, RandomTransform):
    """Keeps a random part, of random area and aspect ratio, at one size: torchvision's ``RandomResizedCrop``.

    Attributes:
        size: A number of pixels for a square, or (height, width).
        scale: The smallest and the largest area, as fractions of the image.
        ratio: The smallest and the largest width over height.
        flip: The probability of mirroring the image horizontally; ``True`` is one half.

    Raises:
        PlanError: An argument is not valid.
    """

    size: Size
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    flip: bool | float = False
    _output_size: tuple[int, int] = field(init=False, repr=False, compare=False, default=(1, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_output_size", check_size("size", self.size))
        object.__setattr__(self, "scale", check_range("scale", self.scale, 0, 1))
        object.__setattr__(self, "ratio", check_range("ratio", self.ratio))
        if self.scale[1] == 0 or self.ratio[0] == 0:
            raise PlanError(f"scale={self.scale}, ratio={self.ratio}: both must be above 0")
        if not isinstance(self.flip, bool):
            check_probability("flip", self.flip)

    def region(self, height: int, width: int, rng: np.random.Generator) -> Region:
        top, left, crop_height, crop_width = _random_crop_box(height, width, self.scale, self.ratio, rng)
        flip = bool(self.flip) and rng.random() < (0.5 if self.flip is True else self.flip)
        return Region(top, left, crop_height, crop_width, self._output_size, flip)


def _random_crop_box(
    height: int, width: int, scale: Range, ratio: Range, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draw top, left, height and width as torchvision does."""
    area = height * width
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_TRIES):
        crop_area = area * (scale[0] + (scale[1] - scale[0]) * rng.random())
        aspect = math.exp(low + (high - low) * rng.random())
        crop_width, crop_height = round(math.sqrt(crop_area * aspect)), round(math.sqrt(crop_area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(rng.random() * (height - crop_height + 1))
            left = int(rng.random() * (width - crop_width + 1))
            return top, left, crop_height, crop_width
    crop_width, crop_height = width, height
    if width / height < ratio[0]:
        crop_height = max(1, min(height, round(width / ratio[0])))
    elif width / height > ratio[1]:
        crop_width = max(1, min(width, round(height * ratio[1])))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


@dataclass(frozen=True, repr=False)
class Resize(Geometry, FixedTransform):
    """Resizes the whole image.

    Attributes:
        size: The length of the shorter side in pixels, or exactly (height, width).
        max_size: An upper bound for the longer side, where ``size`` is one number.

    Raises:
        PlanError: An argument is not valid.
    """

    size: Size
    max_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("size", self.size)
        if isinstance(self.size, list):
            object.__setattr__(self, "size", tuple(self.size))
        if self.max_size is not None and not (isinstance(self.size, int) and self.max_size > self.size):
            raise PlanError(
                f"max_size={self.max_size!r}: it must be larger than size={self.size!r}, which must be one number"
            )

    def region(self, height: int, width: int, rng: np.random.Generator) -> Region:
        return Region(0, 0, height, width, self._new_size(height, width))

    def _new_size(self, height: int, width: int) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size
        short, long = sorted((height, width))
        new_short, new_long = self.size, int(self.size * long / short)
        if self.max_size is not None and new_long > self.max_size:
            new_short, new_long = int(self.max_size * new_short / new_long), self.max_size
        new_short, new_long = max(1, new_short), max(1, new_long)
        return (new_short, new_long) if height <= width else (new_long, new_short)


@dataclass(frozen=True, repr=False)
class _FixedSizeCrop(Geometry):
    """Keeps a rectangle of one size, without resizing; what lies beyond the image is padding."""

    size: Size
    _output_size: tuple[int, int] = field(init=False, repr=False, compare=False, default=(1, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_output_size", check_size("size", self.size))

    def _padding(self) -> tuple[PaddingMode, float | tuple[float, ...]]:
        return "constant", 0

    def _pad(self) -> Callable[[Pixels, int], Pixels]:
        mode, _ = self._padding()
        return clip if mode == "constant" else partial(_padded_positions, mode=mode)

    def _crop(self, pixels: Pixels, region: Region) -> Pixels:
        height, width = pixels.shape[:2]
        top, left, bottom, right = region.top, region.left, region.top + region.height, region.left + region.width
        if top >= 0 and left >= 0 and bottom <= height and right <= width:
            return pixels[top:bottom, left:right]
        mode, fill = self._padding()
        if mode != "constant":
            rows = _padded_positions(np.arange(top, bottom), height, mode)
            columns = _padded_positions(np.arange(left, right), width, mode)
            padded: Pixels = pixels[rows[:, None], columns]
            return padded
        out = np.empty((region.height, region.width, pixels.shape[2]), pixels.dtype)
        out[...] = np.asarray(fill)
        inside = pixels[max(0, top) : max(0, bottom), max(0, left) : max(0, right)]
        first_row, first_column = max(0, -top), max(0, -left)
        out[first_row : first_row + inside.shape[0], first_column : first_column + inside.shape[1]] = inside
        return out


def _padded_positions(positions: Any, length: int, mode: str) -> Any:
    """Return which of ``length`` pixels to show at each position, which may lie beyond them."""
    if mode == "edge" or length == 1:
        return np.clip(positions, 0, length - 1)
    period = 2 * length - (2 if mode == "reflect" else 0)
    positions = positions % period
    return np.where(positions < length, positions, (period if mode == "reflect" else period - 1) - positions)


@dataclass(frozen=True, repr=False)
class CenterCrop(_FixedSizeCrop, FixedTransform):
    """Keeps the center of the image, with black padding if the image is smaller.

    Raises:
        PlanError: An argument is not valid.
    """

    def region(self, height: int, width: int, rng: np.random.Generator) -> Region:
        crop_height, crop_width = self._output_size
        top, left = _center_offset(height, crop_height), _center_offset(width, crop_width)
        return Region(top, left, crop_height, crop_width, self._output_size)


def _center_offset(length: int, crop_length: int) -> int:
    # torchvision pads a smaller image first, with the smaller half in front, but rounds where it crops.
    return round((length - crop_length) / 2) if length >= crop_length else -((crop_length - length) // 2)


@dataclass(frozen=True, repr=False)
class RandomCrop(_FixedSizeCrop, RandomTransform):
    """Keeps a random part of one size, after padding: torchvision's ``RandomCrop``.

    Attributes:
        padding: Pixels around the image: one number, (horizontal, vertical), or (left, top, right, bottom).
        pad_if_needed: Pad an image that is smaller than the crop.
        fill: The value of constant padding: a number, or one for each channel.
        padding_mode: ``"constant"``, ``"edge"``, ``"reflect"`` or ``"symmetric"``.
        flip: The probability of mirroring the image horizontally; ``True`` is one half.

    Raises:
        PlanError: An argument is not valid.
    """

    padding: int | tuple[int, ...] | None = None
    pad_if_needed: bool = False
    fill: float | tuple[float, ...] = 0
    padding_mode: PaddingMode = "constant"
    flip: bool | float = False
    _sides: tuple[int, int, int, int] = field(init=False, repr=False, compare=False, default=(0, 0, 0, 0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("padding_mode", self.padding_mode, ("constant", "edge", "reflect", "symmetric"))
        object.__setattr__(self, "_sides", _padding_sides(self.padding))
        if not isinstance(self.flip, bool):
            check_probability("flip", self.flip)

    def _padding(self) -> tuple[PaddingMode, float | tuple[float, ...]]:
        return self.padding_mode, self.fill

    def region(self, height: int, width: int, rng: np.random.Generator) -> Region:
        """Return a random region.

        Raises:
            ValueError: The image is smaller than the crop.
        """
        crop_height, crop_width = self._output_size
        left, top, right, bottom = self._sides
        height, width = height + top + bottom, width + left + right
        if self.pad_if_needed and width < crop_width:
            left, width = left + crop_width - width, 2 * crop_width - width
        if self.pad_if_needed and height < crop_height:
            top, height = top + crop_height - height, 2 * crop_height - height
        if height < crop_height or width < crop_width:
            raise ValueError(
                f"an image of {height}x{width} (height x width, with padding) is smaller than the crop of "
                f"{crop_height}x{crop_width}; pass pad_if_needed=True"
            )
        crop_top = int(rng.random() * (height - crop_height + 1)) - top
        crop_left = int(rng.random() * (width - crop_width + 1)) - left
        flip = bool(self.flip) and rng.random() < (0.5 if self.flip is True else self.flip)
        return Region(crop_top, crop_left, crop_height, crop_width, self._output_size, flip)


def _padding_sides(padding: Any) -> tuple[int, int, int, int]:
    """Return the padding on the left, top, right and bottom."""
    sides = (padding or 0,) if padding is None or isinstance(padding, int) else tuple(padding)
    if len(sides) not in (1, 2, 4) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sides):
        raise PlanError(
            f"padding={padding!r}: pass one number of pixels, (horizontal, vertical), or (left, top, right, bottom)"
        )
    left, top, right, bottom = sides * (4 // len(sides))
    return left, top, right, bottom


@dataclass(frozen=True, repr=False)
class _Flip(AnnotatedTransform, RandomTransform):
    p: float = 0.5

    upside_down: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_probability("p", self.p)

    def draw(self, rng: np.random.Generator) -> bool:
        """Draw whether an image is flipped."""
        return rng.random() < self.p

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Pixels:
        return self._flipped(pixels) if self.draw(rng) else pixels

    def _flipped(self, pixels: Pixels) -> Pixels:
        return np.ascontiguousarray(pixels[::-1] if self.upside_down else pixels[:, ::-1])

    def _with_region(self, image: Any, rng: np.random.Generator, limits: Limits) -> tuple[Any, Region]:
        is_encoded = isinstance(image, ENCODED)
        pixels = read_image(bytes(image), limits=limits) if is_encoded else self._input_pixels(image)
        flips = self.draw(rng)
        size = pixels.shape[0], pixels.shape[1]
        region = Region(0, 0, *size, size, flips and not self.upside_down, flips and self.upside_down)
        return self._flipped(pixels) if flips else pixels, region


@dataclass(frozen=True, repr=False)
class HorizontalFlip(_Flip):
    """Mirrors the image horizontally with probability ``p``."""


@dataclass(frozen=True, repr=False)
class VerticalFlip(_Flip):
    """Flips the image upside down with probability ``p``."""

    upside_down = True
