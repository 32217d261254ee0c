"""The base of all transforms: values that are called on the bytes of an image, or on its pixels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from numbers import Real
from typing import Any, ClassVar, Literal

import numpy as np

from penstock.codecs.arrays import as_array
from penstock.codecs.limits import Limits
from penstock.errors import PlanError, import_extra
from penstock.lazy import cached_property
from penstock.plan import check_choice
from penstock.vision.decoding import read_image
from penstock.vision.resampling import Pixels, opencv

Layout = Literal["HWC", "CHW"]
DType = Literal["uint8", "float32", "float16"]
Range = tuple[float, float]
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Pixels | None]  # memory for an image; ``None``: no memory
MeanStd = tuple[tuple[float, ...], tuple[float, ...]]

IMAGENET: MeanStd = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
ENCODED = (bytes, bytearray, memoryview)  # a union of types would be built anew for every image
_LIMITS = Limits()


class Transform(ABC):
    """A function of an image. Called on bytes, it decodes them first; arrays are height x width x channels.

    Attributes:
        random: Whether the result depends on a random generator.
    """

    random: ClassVar[bool] = False

    def __repr__(self) -> str:
        arguments = [argument for argument in fields(self) if argument.init]  # type: ignore[arg-type]
        arguments.sort(key=lambda argument: bool(argument.kw_only))
        shown = [repr(getattr(self, argument.name)) for argument in arguments[:1]]
        for argument in arguments[1:]:
            if (value := getattr(self, argument.name)) != argument.default:
                shown.append(f"{argument.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    @abstractmethod
    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        """Return the transformed image; ``pixels`` is not written to. Random transforms draw from ``rng``."""

    def decode(self, data: bytes, rng: np.random.Generator, limits: Limits) -> Any:
        """Decode an image, and return it transformed.

        Raises:
            ValueError: ``data`` is not an image, is damaged, or exceeds the limits.
        """
        return self.apply(read_image(data, limits=limits), rng)

    def within(self, limits: Limits) -> Callable[..., Any]:
        """Return a decoder for ``decode(jpg=...)``: a function of bytes, and of ``rng`` if the transform is random."""
        return partial(self._run, limits=limits)

    def _generator(self, rng: np.random.Generator | None) -> np.random.Generator:
        if rng is None:
            return np.random.default_rng() if self.random else _UNUSED_RNG
        return rng

    def _run(self, image: Any, rng: np.random.Generator | None = None, limits: Limits = _LIMITS) -> Any:
        if isinstance(image, dict):
            name = image_field(image)
            return {**image, name: self._run(image[name], rng, limits)}
        rng = self._generator(rng)
        if isinstance(image, ENCODED):
            return self.decode(bytes(image), rng, limits)
        return self.apply(self._input_pixels(image), rng)

    def _input_pixels(self, image: Any) -> Pixels:
        return to_pixels(image)


class FixedTransform(Transform):
    """A transform that always gives the same result."""

    def __call__(self, image: Any) -> Any:
        """Return the transformed image: bytes, a height x width x channels array, a PIL image, or a sample with one."""
        return self._run(image)


class RandomTransform(Transform):
    """A transform that draws from a generator: that of the sample in a plan, or a new one if none is given."""

    random = True

    def __call__(self, image: Any, rng: np.random.Generator | None = None) -> Any:
        """Return the transformed image: bytes, a height x width x channels array, a PIL image, or a sample with one."""
        return self._run(image, rng)


_UNUSED_RNG = np.random.Generator(np.random.PCG64(0))  # passed to fixed transforms, which do not draw


@dataclass(frozen=True, init=False, repr=False)
class Compose(RandomTransform):
    """Applies several transforms or functions of an array in order; the first one decodes.

    Raises:
        PlanError: An argument is neither a transform nor a function.
    """

    transforms: tuple[Callable[..., Any], ...]

    def __init__(self, *transforms: Callable[..., Any]) -> None:
        if len(transforms) == 1 and isinstance(transforms[0], list | tuple):
            transforms = tuple(transforms[0])
        for transform in transforms:
            if not callable(transform):
                raise PlanError(f"Compose: {transform!r} is neither a transform nor a function")
        object.__setattr__(self, "transforms", transforms)

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> Any:
        return self._apply_from(0, pixels, rng)

    def decode(self, data: bytes, rng: np.random.Generator, limits: Limits) -> Any:
        if self.transforms and isinstance(first := self.transforms[0], Transform):
            return self._apply_from(1, first.decode(data, rng, limits), rng)
        return self._apply_from(0, read_image(data, limits=limits), rng)

    def _run(self, image: Any, rng: np.random.Generator | None = None, limits: Limits = _LIMITS) -> Any:
        if not isinstance(image, dict):
            return super()._run(image, rng, limits)
        rng = self._generator(rng)
        for transform in self.transforms:
            image = transform._run(image, rng, limits) if isinstance(transform, Transform) else transform(image)
        return image

    def _apply_from(self, start: int, value: Any, rng: np.random.Generator) -> Any:
        for transform in self.transforms[start:]:
            value = transform.apply(value, rng) if isinstance(transform, Transform) else transform(value)
        return value


@dataclass(frozen=True)
class OutputFormat:
    """The layout, number type and container of a transform's result.

    Raises:
        PlanError: An argument is not valid.
    """

    layout: Layout = "HWC"
    normalize: MeanStd | None = None
    dtype: DType | None = None
    to: Literal["numpy", "torch"] = "numpy"

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, ("HWC", "CHW"))
        check_choice("to", self.to, ("numpy", "torch"))
        if self.dtype is not None:
            check_choice("dtype", self.dtype, ("uint8", "float32", "float16"))
        if self.normalize is not None and self.dtype == "uint8":
            raise PlanError("dtype='uint8' cannot hold normalized pixels; use float32 or float16")

    @cached_property  # needed for every image, right after a decode has emptied the CPU caches
    def is_default(self) -> bool:
        """Whether pixels are returned as they are."""
        return self == _DEFAULT_FORMAT

    def convert(self, pixels: Pixels, allocate: Allocate | None = None) -> Any:
        """Return an image (height x width x channels, uint8 or floats in 0..1) in this format.

        Args:
            pixels: The image.
            allocate: Returns memory for the result, if it is an array.

        Raises:
            ValueError: The image has another number of channels than ``normalize``.
        """
        if self.is_default:
            return pixels
        channels = pixels.shape[2]
        if self.normalize is not None and channels != len(self.normalize[0]):
            raise ValueError(f"normalize has {len(self.normalize[0])} means, but the image has {channels} channels")
        dtype = np.dtype(self.dtype or ("float32" if self.normalize is not None else pixels.dtype))
        shape = pixels.shape if self.layout == "HWC" else (channels, *pixels.shape[:2])
        out = None if allocate is None or self.to == "torch" else allocate(shape, dtype)
        out = np.empty(shape, dtype) if out is None else out
        if pixels.dtype == np.uint8 and dtype.kind == "f":
            self._look_up(pixels, out)
        else:
            values = _to_uint8(pixels) if dtype == np.uint8 else self._normalized(pixels)
            np.copyto(out, values if self.layout == "HWC" else values.transpose(2, 0, 1), casting="same_kind")
        return _torch().from_numpy(out) if self.to == "torch" else out

    def _look_up(self, pixels: Pixels, out: Pixels) -> None:
        """Convert uint8 pixels to floats by a table, one channel after the other if these are apart in the result."""
        cv2, table = opencv(), _lookup_table(self.normalize, pixels.shape[2])
        floats = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
        if self.layout == "HWC":
            cv2.LUT(pixels, table, floats)
        else:
            for number, plane in enumerate(cv2.split(pixels)):
                cv2.LUT(plane, table[:, :, number].copy(), floats[number])
        if floats is not out:
            np.copyto(out, floats, casting="same_kind")

    def _normalized(self, pixels: Pixels) -> Pixels:
        floats = pixels.astype(np.float32)
        if self.normalize is not None:
            mean, std = (np.array(values, np.float32) for values in self.normalize)
            floats = (floats - mean) / std
        return floats


_DEFAULT_FORMAT = OutputFormat()


def _to_uint8(pixels: Pixels) -> Pixels:
    if pixels.dtype == np.uint8:
        return pixels
    levels: Pixels = np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    return levels


@lru_cache(64)
def _lookup_table(normalize: MeanStd | None, channels: int) -> Pixels:
    """Return what each of the 256 levels becomes, for each channel."""
    mean, std = normalize or ((0.0,) * channels, (1.0,) * channels)
    levels = np.arange(256)[:, None] / 255
    table: Pixels = ((levels - np.array(mean)) / np.array(std)).astype(np.float32)[:, None, :]
    return table


def check_normalize(value: Any) -> MeanStd | None:
    """Check ``normalize=``: ``None``, ``"imagenet"``, or the means and standard deviations of the channels.

    Raises:
        PlanError: The value is none of these.
    """
    if value is None or (isinstance(value, str) and value == "imagenet"):
        return IMAGENET if value else None
    try:
        mean, std = (tuple(float(number) for number in numbers) for numbers in value)
    except (TypeError, ValueError):
        mean, std = (), ()
    if not mean or len(mean) != len(std) or not all(number > 0 for number in std):
        raise PlanError(
            f"normalize={value!r}: pass (means, standard deviations) with one number for each channel, deviations "
            f"above 0, or 'imagenet'"
        )
    return mean, std


def image_field(fields: dict[str, Any]) -> str:
    """Return the field of a sample or batch that holds images, by common names.

    Raises:
        ValueError: There is none.
    """
    name = next((name for name in ("jpg", "jpeg", "png", "webp", "yuv", "image", "img") if name in fields), None)
    if name is None:
        raise ValueError(f"it is unclear which field is the image; set image= to one of {', '.join(map(str, fields))}")
    return name


def to_pixels(image: Any) -> Pixels:
    """Return an array or a PIL image as a height x width x channels array.

    Raises:
        TypeError: ``image`` is neither, or has another shape or type.
    """
    array = as_array(image)
    if array is None and type(image).__module__.partition(".")[0] == "PIL":
        array = np.asarray(image.convert("RGB"))
    if array is None:
        raise TypeError(f"an image must be bytes, an array or a PIL image, not {type(image).__name__}")
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or not 1 <= array.shape[2] <= 4 or not array.size:
        raise TypeError(f"an image must have the shape height x width x 1 to 4 channels, not {array.shape}")
    if array.dtype not in (np.uint8, np.float32):
        raise TypeError(f"pixels must be uint8, or float32 in 0..1, not {array.dtype}")
    return array


def check_range(name: str, value: Any, low: float = 0.0, high: float = float("inf")) -> Range:
    """Require two numbers within bounds, the smaller one first, and return them.

    Raises:
        PlanError: ``value`` is something else.
    """
    pair = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    numeric = all(isinstance(number, Real) and not isinstance(number, bool) for number in pair)
    if len(pair) != 2 or not numeric or not low <= pair[0] <= pair[1] <= high:
        bounds = f"from {low} to {high}" if high != float("inf") else f"of {low} or more"
        raise PlanError(f"{name}={value!r}: pass two numbers {bounds}, the smaller one first")
    return float(pair[0]), float(pair[1])


def check_probability(name: str, value: Any) -> None:
    """Require a probability.

    Raises:
        PlanError: ``value`` is not one.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise PlanError(f"{name}={value!r}: pass a probability from 0 to 1")


def check_size(name: str, value: Any) -> tuple[int, int]:
    """Require one number, for a square, or (height, width), and return (height, width).

    Raises:
        PlanError: ``value`` is neither.
    """
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, Sequence) else ()
    if len(pair) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in pair):
        raise PlanError(f"{name}={value!r}: pass a number of pixels above 0, or (height, width)")
    return pair[0], pair[1]


def _torch() -> Any:
    return import_extra("torch", "to='torch'", "torch")
