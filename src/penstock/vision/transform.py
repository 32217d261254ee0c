"""What a transform is: a value that can be called on the bytes of an image, or on its pixels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, partial
from numbers import Real
from typing import Any, ClassVar, Literal

import numpy as np

from penstock.codecs.arrays import as_array
from penstock.codecs.limits import Limits
from penstock.errors import MissingExtra, PlanError
from penstock.plan import check_choice
from penstock.vision.decoding import read_image
from penstock.vision.resampling import Pixels, opencv

Layout = Literal["HWC", "CHW"]
DType = Literal["uint8", "float32", "float16"]
Range = tuple[float, float]
Moments = tuple[tuple[float, ...], tuple[float, ...]]

IMAGENET: Moments = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_LIMITS = Limits()


class Transform(ABC):
    """Changes an image. Called on bytes it decodes them first; arrays are H x W x C."""

    random: ClassVar[bool] = False

    def __repr__(self) -> str:
        said = sorted((part for part in fields(self) if part.init), key=lambda part: bool(part.kw_only))  # type: ignore[arg-type]
        first, more = said[:1], said[1:]
        shown = [repr(getattr(self, part.name)) for part in first]
        shown += [f"{part.name}={value!r}" for part in more if (value := getattr(self, part.name)) != part.default]
        return f"{type(self).__name__}({', '.join(shown)})"

    @abstractmethod
    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        """Change an image, without writing into it; ``rng`` is for those that are random."""

    def decode(self, data: bytes, rng: np.random.Generator, limits: Limits) -> Any:
        """Decode an image and change it.

        Raises:
            ValueError: it is no image, is damaged or too large.
        """
        return self.apply(read_image(data, limits=limits), rng)

    def within(self, limits: Limits) -> Callable[..., Any]:
        """The decoder of a field: a function of its bytes, and of ``rng`` where the transform is random."""
        return partial(self._run, limits=limits)

    def _run(self, image: Any, rng: np.random.Generator | None = None, limits: Limits = _LIMITS) -> Any:
        if rng is None:
            rng = np.random.default_rng() if self.random else _NOBODY
        if isinstance(image, bytes | bytearray | memoryview):
            return self.decode(bytes(image), rng, limits)
        return self.apply(self._taken(image), rng)

    def _taken(self, image: Any) -> Pixels:
        return pixels_of(image)


class FixedTransform(Transform):
    """One that does the same every time."""

    def __call__(self, image: Any) -> Any:
        """Change an image: bytes, an H x W x C array, or a PIL image."""
        return self._run(image)


class RandomTransform(Transform):
    """One that draws: from the sample's own generator in a plan, from fresh randomness where none is given."""

    random = True

    def __call__(self, image: Any, rng: np.random.Generator | None = None) -> Any:
        """Change an image: bytes, an H x W x C array, or a PIL image."""
        return self._run(image, rng)


_NOBODY = np.random.Generator(np.random.PCG64(0))  # what transforms get that do not draw


@dataclass(frozen=True, init=False, repr=False)
class Compose(RandomTransform):
    """Several transforms, one after the other; the first one decodes.

    Raises:
        PlanError: something is no transform and no function.
    """

    transforms: tuple[Callable[..., Any], ...]

    def __init__(self, *transforms: Callable[..., Any]) -> None:
        if len(transforms) == 1 and isinstance(transforms[0], list | tuple):
            transforms = tuple(transforms[0])
        for each in transforms:
            if not callable(each):
                raise PlanError(f"Compose: {each!r} is neither a transform nor a function")
        object.__setattr__(self, "transforms", transforms)

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        return self._after(0, pixels, rng)

    def decode(self, data: bytes, rng: np.random.Generator, limits: Limits) -> Any:
        if self.transforms and isinstance(first := self.transforms[0], Transform):
            return self._after(1, first.decode(data, rng, limits), rng)
        return self._after(0, read_image(data, limits=limits), rng)

    def _after(self, done: int, value: Any, rng: np.random.Generator) -> Any:
        for each in self.transforms[done:]:
            value = each.apply(value, rng) if isinstance(each, Transform) else each(value)
        return value


@dataclass(frozen=True)
class Form:
    """What comes out: layout, numbers and container.

    Raises:
        PlanError: an argument makes no sense.
    """

    layout: Layout = "HWC"
    normalize: Moments | None = None
    dtype: DType | None = None
    to: Literal["numpy", "torch"] = "numpy"

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, ("HWC", "CHW"))
        check_choice("to", self.to, ("numpy", "torch"))
        if self.dtype is not None:
            check_choice("dtype", self.dtype, ("uint8", "float32", "float16"))
        if self.normalize is not None and self.dtype == "uint8":
            raise PlanError("dtype='uint8' cannot hold normalised pixels; use float32 or float16")

    @cached_property  # asked for every image, right after a decode, when nothing is in the processor's cache
    def plain(self) -> bool:
        """Whether pixels are given as they are."""
        return self == _PLAIN

    def of(self, pixels: Pixels) -> Any:
        """The image (H x W x C, uint8 or floats in 0..1) in this form."""
        if self.plain:
            return pixels
        dtype = self.dtype or ("float32" if self.normalize is not None else str(pixels.dtype))
        out = _levels(pixels) if dtype == "uint8" else self._floats(pixels).astype(dtype, copy=False)
        if self.layout == "CHW" and out.ndim == 3 and not (dtype != "uint8" and pixels.dtype == np.uint8):
            out = np.ascontiguousarray(out.transpose(2, 0, 1))
        return _torch().from_numpy(np.ascontiguousarray(out)) if self.to == "torch" else out

    def _floats(self, pixels: Pixels) -> Pixels:
        """Floats; those of uint8 pixels are looked up, in the layout that is wanted."""
        channels = pixels.shape[2]
        if self.normalize is not None and channels != len(self.normalize[0]):
            raise ValueError(f"normalize has {len(self.normalize[0])} means and the image {channels} channels")
        if pixels.dtype == np.uint8:
            table = _table(self.normalize, channels)
            cv2 = opencv()
            if self.layout == "HWC":
                out: Pixels = cv2.LUT(pixels, table)
                return out.reshape(pixels.shape)
            planes = np.empty((channels, *pixels.shape[:2]), np.float32)
            for number in range(channels):
                cv2.LUT(np.ascontiguousarray(pixels[:, :, number]), table[:, :, number].copy(), planes[number])
            return planes
        floats = pixels.astype(np.float32)
        if self.normalize is not None:
            mean, std = (np.array(values, np.float32) for values in self.normalize)
            floats = (floats - mean) / std
        return floats


_PLAIN = Form()


def _levels(pixels: Pixels) -> Pixels:
    if pixels.dtype == np.uint8:
        return pixels
    levels: Pixels = np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    return levels


@lru_cache(64)
def _table(normalize: Moments | None, channels: int) -> Pixels:
    """What each of 256 levels becomes, a channel after the other."""
    mean, std = normalize or ((0.0,) * channels, (1.0,) * channels)
    levels = np.arange(256)[:, None] / 255
    table: Pixels = ((levels - np.array(mean)) / np.array(std)).astype(np.float32)[:, None, :]
    return table


def moments(given: Any) -> Moments | None:
    """Check ``normalize=``: ``None``, ``"imagenet"``, or mean and standard deviation of each channel.

    Raises:
        PlanError: it is none of these.
    """
    if given is None or (isinstance(given, str) and given == "imagenet"):
        return IMAGENET if given else None
    try:
        mean, std = (tuple(float(value) for value in values) for values in given)
    except (TypeError, ValueError):
        mean, std = (), ()
    if not mean or len(mean) != len(std) or not all(value > 0 for value in std):
        raise PlanError(
            f"normalize={given!r}: give (means, deviations), a number above 0 for each channel, or 'imagenet'"
        )
    return mean, std


def pixels_of(image: Any) -> Pixels:
    """An array of H x W x C of an array or a PIL image.

    Raises:
        TypeError: it is neither, or has another shape or type.
    """
    array = as_array(image)
    if array is None and type(image).__module__.partition(".")[0] == "PIL":
        array = np.asarray(image.convert("RGB"))
    if array is None:
        raise TypeError(f"an image is bytes, an array or a PIL image, not {type(image).__name__}")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or not 1 <= array.shape[2] <= 4 or not array.size:
        raise TypeError(f"an image is an array of height x width x 1 to 4 channels, not of shape {array.shape}")
    if array.dtype not in (np.uint8, np.float32):
        raise TypeError(f"pixels are uint8, or float32 in 0..1, not {array.dtype}")
    return array


def check_range(name: str, given: Any, least: float = 0.0, most: float = float("inf")) -> Range:
    """Require two numbers in order, within bounds.

    Raises:
        PlanError: they are not.
    """
    pair = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    numbers = all(isinstance(value, Real) and not isinstance(value, bool) for value in pair)
    if len(pair) != 2 or not numbers or not least <= pair[0] <= pair[1] <= most:
        bounds = f"{least} to {most}" if most != float("inf") else f"{least} on"
        raise PlanError(f"{name}={given!r}: give two numbers, the smaller first, from {bounds}")
    return float(pair[0]), float(pair[1])


def check_chance(name: str, given: Any) -> None:
    """Require a probability.

    Raises:
        PlanError: it is not one.
    """
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 <= float(given) <= 1:
        raise PlanError(f"{name}={given!r}: give a probability, 0 to 1")


def check_size(name: str, given: Any) -> tuple[int, int]:
    """Require a size: one number for a square, or (height, width).

    Raises:
        PlanError: it is neither.
    """
    pair = (given, given) if isinstance(given, int) else tuple(given) if isinstance(given, Sequence) else ()
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in pair):
        raise PlanError(f"{name}={given!r}: give a number of pixels, or (height, width)")
    return pair[0], pair[1]


def _torch() -> Any:
    try:
        import torch
    except ImportError as exc:
        raise MissingExtra("to='torch'", "torch") from exc
    return torch
