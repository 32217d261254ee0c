"""Augmentation on a device: random draws and crops of samples on the CPU, the work on pixels for whole batches there.

A worker decodes the part of an image that a crop keeps, and draws what is random from the sample's own generator. The
loader moves the parts of a batch to the device, padded to one size, and runs the transforms there, by torch's
operations alone. Resizing is two products of matrices with the weights that the CPU uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.codecs.limits import Limits
from penstock.errors import PlanError, import_extra
from penstock.plan import is_tensor
from penstock.vision.batches import CutMix, MixUp
from penstock.vision.color import ColorJitter, Grayscale, Normalize, ToTensor
from penstock.vision.decoding import open_encoded, read_image
from penstock.vision.geometry import Geometry, HorizontalFlip, VerticalFlip
from penstock.vision.planes import PlanesImage
from penstock.vision.resampling import AxisWeights, Decoded, Pixels, Rect, axis_weights
from penstock.vision.transform import OutputFormat, RandomTransform

TorchTensor = Any  # torch is imported only where it is used
_SUPPORTED = (HorizontalFlip, VerticalFlip, ColorJitter, Grayscale, Normalize, ToTensor, MixUp, CutMix)
_MIXING = (MixUp, CutMix)
_Axes = tuple[AxisWeights, AxisWeights]  # of rows and of columns
_LIMITS = Limits()
_GRAY_BITS = (9798.0, 19235.0, 3735.0)  # of 32768: the weights of OpenCV's gray for uint8
_GRAY = (0.299, 0.587, 0.114)


def on_device(*transforms: Any) -> OnDevice:
    """Return a transform whose work on pixels is done by ``loader(format="torch", device=...)``, on whole batches.

    It replaces ``Compose`` in ``decode`` and ``map``, with the same random draws: ``decode(jpg=vision.on_device(
    vision.RandomResizedCrop(224, flip=True), vision.ColorJitter(0.4), vision.Normalize(layout="CHW")))``. Called on a
    batch of images of one size, it draws from one generator and returns the batch.

    Args:
        transforms: A crop or resize first, if there is one; then flips, ``ColorJitter``, ``Grayscale``; then
            ``Normalize`` or ``ToTensor``; then ``MixUp`` or ``CutMix``.

    Raises:
        PlanError: A transform has no implementation for devices, or they are in another order.
    """
    return OnDevice(transforms)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceImage:
    """An image whose augmentation has been drawn, and is still to be computed; a batch of them is a list.

    Attributes:
        pixels: The part that is kept, height x width x channels.
        axes: The weights that resize its rows and columns; ``None``: it keeps its size.
        draws: What was drawn for each of the other transforms.
        transform: The transform.
    """

    pixels: Pixels
    axes: tuple[AxisWeights, AxisWeights] | None
    draws: tuple[Any, ...]
    transform: OnDevice

    def __repr__(self) -> str:
        size = "x".join(map(str, self.pixels.shape[:2]))
        return f"<an image of {size} to augment on a device: use batched() and loader(format='torch')>"

    @property
    def nbytes(self) -> int:
        """The bytes of its pixels."""
        return int(self.pixels.nbytes)


@dataclass(frozen=True, repr=False)
class OnDevice(RandomTransform):
    """Transforms that draw in workers and whose pixels are computed on a device; ``on_device`` creates them."""

    transforms: tuple[Any, ...]

    def __post_init__(self) -> None:
        is_converted = is_mixed = False
        for number, transform in enumerate(self.transforms):
            is_mixing = isinstance(transform, _MIXING)
            if isinstance(transform, Geometry):
                if number or transform.boxes or transform.masks or transform.keypoints:
                    raise PlanError(f"on_device: {transform!r} must be the first transform, and without annotations")
                is_converted = not transform.output_format.is_default
                continue
            if not isinstance(transform, _SUPPORTED):
                names = ", ".join(cls.__name__ for cls in _SUPPORTED)
                raise PlanError(f"on_device: {transform!r} is not supported; use crops, Resize, {names}")
            if (is_converted or is_mixed) and not is_mixing:
                raise PlanError(f"on_device: {transform!r} must come before pixels are converted or mixed")
            is_converted = is_converted or isinstance(transform, Normalize | ToTensor)
            is_mixed = is_mixed or is_mixing

    def __repr__(self) -> str:
        return f"on_device({', '.join(map(repr, self.transforms))})"

    def apply(self, pixels: Pixels, rng: np.random.Generator) -> DeviceImage:
        if (first := self._geometry) is None:
            return DeviceImage(pixels, None, self._draw(rng), self)
        region = first.region(pixels.shape[0], pixels.shape[1], rng)
        return self._part(*first.part(Decoded(pixels), region), region.size, region.flip, rng)

    def decode(self, data: bytes, rng: np.random.Generator, limits: Limits) -> DeviceImage:
        if (first := self._geometry) is None:
            return self.apply(read_image(data, limits=limits), rng)
        encoded = open_encoded(data, limits, first.truncated)
        region = first.region(*encoded.size, rng)
        if isinstance(encoded, PlanesImage):  # little work, and the CPU resizes the planes before it converts them
            return DeviceImage(first.decode_region(encoded, region), None, self._draw(rng), self)
        return self._part(*first.decode_part(encoded, region), region.size, region.flip, rng)

    def _part(
        self, part: Pixels, inside: Rect, size: tuple[int, int], flip: bool, rng: np.random.Generator
    ) -> DeviceImage:
        assert self._geometry is not None
        is_whole = inside == (0, 0, *part.shape[:2])
        if is_whole and part.shape[:2] == size:
            return DeviceImage(part[:, ::-1] if flip else part, None, self._draw(rng), self)
        axes = _axes(part.shape, inside, size, self._geometry.antialias, flip, part.dtype)
        return DeviceImage(part, axes, self._draw(rng), self)

    @property
    def _geometry(self) -> Geometry | None:
        first = self.transforms[0] if self.transforms else None
        return first if isinstance(first, Geometry) else None

    @property
    def _others(self) -> tuple[Any, ...]:
        return self.transforms[1:] if self._geometry is not None else self.transforms

    def _draw(self, rng: np.random.Generator) -> tuple[Any, ...]:
        """Draw what the other transforms need, as they do on the CPU; a batch is mixed as its first sample drew."""
        return tuple(
            int(rng.integers(1 << 63)) if isinstance(transform, _MIXING) else _drawn(transform, rng)
            for transform in self._others
        )

    def _run(self, image: Any, rng: np.random.Generator | None = None, limits: Limits = _LIMITS) -> Any:
        key = _batch_key(image)
        if key is _NOT_A_BATCH:
            return super()._run(image, rng, limits)
        rng = self._generator(rng)
        images = image if key is None else image[key]
        tensor = images if is_tensor(images) else _torch().from_numpy(np.ascontiguousarray(images))
        drawn = [
            self._drawn_for(tensor.shape[1:], _pixel_type(tensor), np.random.default_rng(int(seed)))
            for seed in rng.integers(1 << 63, size=len(tensor))
        ]
        return self._finish(tensor, [axes for axes, _ in drawn], [draws for _, draws in drawn], image, key)

    def _drawn_for(self, shape: Any, dtype: Any, rng: np.random.Generator) -> tuple[Any, tuple[Any, ...]]:
        """Draw for an image of a batch, which stays where it is: the weights begin where the crop does."""
        if (first := self._geometry) is None:
            return None, self._draw(rng)
        height, width = int(shape[0]), int(shape[1])
        region = first.region(height, width, rng)
        top, left = region.top, region.left
        if min(top, left, height - top - region.height, width - left - region.width) < 0:
            raise ValueError(f"{first!r} pads images, which on_device does only before batched()")
        part = (region.height, region.width)
        rows, columns = _axes(part, Rect(0, 0, *part), region.size, first.antialias, region.flip, dtype)
        return (rows.moved(top), columns.moved(left)), self._draw(rng)

    def finish(self, images: list[DeviceImage], place: Callable[[Pixels], TorchTensor], batch: Any, key: Any) -> Any:
        """Compute a batch on a device, and return it with the result in place of the images.

        Args:
            images: The images.
            place: Moves an array to the device.
            batch: The batch, whose other values are tensors already.
            key: The field or position of the images in the batch; ``None``: the batch is the images alone.

        Raises:
            ValueError: The images differ in size, and the first transform does not change that.
        """
        shapes = {image.pixels.shape for image in images}
        if len(shapes) > 1 and self._geometry is None:
            raise ValueError("on_device: the images of a batch differ in size; begin with a crop or Resize((h, w))")
        tensor = place(_padded([image.pixels for image in images]))
        return self._finish(tensor, [image.axes for image in images], [image.draws for image in images], batch, key)

    def _finish(self, images: TorchTensor, axes: list[Any], draws: list[Any], batch: Any, key: Any) -> Any:
        is_levels = not images.is_floating_point()
        images = _resampled(images.to(_torch().float32), axes, is_levels)
        output = self._geometry.output_format if self._geometry is not None else OutputFormat()
        for number, transform in enumerate(self._others):
            if isinstance(transform, _MIXING):
                break
            if isinstance(transform, Normalize | ToTensor):
                output = transform.output_format
            else:
                images = _RUN[type(transform)](images, [draw[number] for draw in draws], is_levels, transform)
        batch = _replaced(batch, key, _converted(images, is_levels, output))
        for number, transform in enumerate(self._others):
            if isinstance(transform, _MIXING):
                batch = transform(batch, np.random.default_rng(draws[0][number]))
        return batch


_NOT_A_BATCH = object()


def _batch_key(value: Any) -> Any:
    """Return where a batch has its images: a field, a position, or ``None`` if it is images alone."""
    if isinstance(value, dict | tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return next((key for key, inner in entries if getattr(inner, "ndim", 0) == 4), _NOT_A_BATCH)
    return None if getattr(value, "ndim", 0) == 4 else _NOT_A_BATCH


def pending_key(batch: Any) -> Any:
    """Return the field or position at which a batch has images to augment; ``None`` if it has none.

    Raises:
        ValueError: It is a sample, not a batch.
    """
    entries = batch.items() if isinstance(batch, dict) else enumerate(batch) if isinstance(batch, tuple) else ()
    for key, value in entries:
        if isinstance(value, DeviceImage):
            raise ValueError("on_device works on batches: add batched(n) before the loader")
        if type(value) is list and value and isinstance(value[0], DeviceImage):
            return key
    return None


def finish_batch(batch: Any, key: Any, place: Callable[[Pixels], TorchTensor]) -> Any:
    """Compute the images of a batch, at ``key``, where ``place`` puts them."""
    images = batch[key]
    return images[0].transform.finish(images, place, batch, key)


def _replaced(batch: Any, key: Any, value: Any) -> Any:
    if key is None:
        return value
    if isinstance(batch, dict):
        return {**batch, key: value}
    return (*batch[:key], value, *batch[key + 1 :])


def _drawn(transform: Any, rng: np.random.Generator) -> Any:
    """Draw what a transform of one image needs, in the order in which it draws on the CPU."""
    return transform.draw(rng) if transform.random else None


def _pixel_type(images: TorchTensor) -> np.dtype[Any]:
    return np.dtype(np.float32 if images.is_floating_point() else np.uint8)


def _axes(
    shape: tuple[int, ...], inside: Rect, size: tuple[int, int], antialias: bool, flip: bool, dtype: np.dtype[Any]
) -> tuple[AxisWeights, AxisWeights]:
    return (
        axis_weights(shape[0], size[0], inside.top, inside.height, antialias, False, dtype),
        axis_weights(shape[1], size[1], inside.left, inside.width, antialias, flip, dtype),
    )


def _padded(images: list[Pixels]) -> Pixels:
    """Stack images, with zeros below and to the right of the smaller ones."""
    if len({image.shape for image in images}) == 1:
        return np.stack(images)
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    out = np.zeros((len(images), height, width, images[0].shape[2]), images[0].dtype)
    for row, image in zip(out, images, strict=True):
        row[: image.shape[0], : image.shape[1]] = image
    return out


def _resampled(images: TorchTensor, axes: list[_Axes | None], is_levels: bool) -> Any:
    """Resize each image by its own weights; the images, as floats, are padded to one size."""
    if all(pair is None for pair in axes):
        return images
    torch = _torch()
    sizes = {images.shape[1:3] if pair is None else (len(pair[0].rows), len(pair[1].rows)) for pair in axes}
    if len(sizes) > 1:
        raise ValueError("on_device: the images of a batch differ in size after resizing; resize to (height, width)")
    height, width = sizes.pop()
    pairs = [(_identity(height), _identity(width)) if pair is None else pair for pair in axes]
    if not is_levels:
        return _by_matrices(_by_matrices(images, pairs, 0), pairs, 1)
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for number, (rows, columns) in enumerate(pairs):
        kinds.setdefault((rows.plain, columns.plain), []).append(number)
    out = images.new_empty(len(pairs), height, width, images.shape[3])
    for kind, chosen in kinds.items():
        where = torch.tensor(chosen, device=images.device)
        out[where] = _resampled_levels(images[where], [pairs[number] for number in chosen], kind)
    return out


def _resampled_levels(images: TorchTensor, pairs: list[_Axes], plain: tuple[bool, bool]) -> TorchTensor:
    """Resize rows, then columns, and round after each, as the CPU does unless both are plain bilinear."""
    if all(plain):
        return _plain_bilinear(images, pairs)
    for axis in (0, 1):
        if plain[axis]:
            other = _identity(images.shape[2 - axis])
            alone = [(pair[0], other) if axis == 0 else (other, pair[1]) for pair in pairs]
            images = _plain_bilinear(images, alone)
        else:
            images = (_by_matrices(images, pairs, axis) + 0.5).floor_().clamp_(0, 255)
    return images


def _by_matrices(images: TorchTensor, pairs: list[_Axes], axis: int) -> TorchTensor:
    """Resize one axis: 0 for rows, 1 for columns."""
    count, rows, columns, channels = images.shape
    matrices = _matrices([pair[axis] for pair in pairs], images.shape[axis + 1], images.device)
    if axis == 0:
        return (matrices @ images.reshape(count, rows, -1)).reshape(count, -1, columns, channels)
    return matrices[:, None] @ images


def _plain_bilinear(images: TorchTensor, pairs: list[_Axes]) -> TorchTensor:
    """Resize levels by the integers of OpenCV's bilinear filter, which drops the lowest bits of its products."""
    torch = _torch()
    out = images.to(torch.int32)
    for axis, bits in ((2, 0), (1, 16)):
        filters = [pair[axis - 1] for pair in pairs]
        shape = (len(pairs), *(-1 if at == axis else 1 for at in (1, 2, 3)))
        size = [len(filters[0].rows) if at == axis else side for at, side in enumerate(out.shape)]
        terms = []
        for tap in (0, 1):
            at = torch.from_numpy(np.stack([filter.rows[:, tap] for filter in filters])).to(images.device)
            weights = np.stack([filter.weights[:, tap] * 2048 for filter in filters]).astype(np.int32)
            term = out.gather(axis, at.reshape(shape).expand(size))
            terms.append((term * torch.from_numpy(weights).to(images.device).reshape(shape)) >> bits)
        out = (terms[0] + terms[1]) >> (4 if axis == 2 else 0)
    return ((out + 2) >> 2).to(torch.float32)


def _identity(length: int) -> AxisWeights:
    return AxisWeights(np.arange(length)[:, None].repeat(2, 1), np.array([[1, 0]], np.float32).repeat(length, 0), True)


def _matrices(axes: list[AxisWeights], length: int, device: Any) -> TorchTensor:
    """Return matrices, images x outputs x inputs, made on the device of the few weights of each output."""
    torch = _torch()
    taps = max(axis.rows.shape[1] for axis in axes)
    positions = np.zeros((len(axes), len(axes[0].rows), taps), np.int64)
    weights = np.zeros(positions.shape, np.float32)
    for number, axis in enumerate(axes):
        positions[number, :, : axis.rows.shape[1]] = axis.rows
        weights[number, :, : axis.rows.shape[1]] = axis.weights
    out = torch.zeros(*positions.shape[:2], length, device=device)
    return out.scatter_add_(2, torch.from_numpy(positions).to(device), torch.from_numpy(weights).to(device))


def _flipped(images: TorchTensor, draws: list[bool], is_levels: bool, transform: Any) -> TorchTensor:
    flips = _torch().tensor(draws, device=images.device)[:, None, None, None]
    return _torch().where(flips, images.flip(1 if transform.upside_down else 2), images)


def _grayed(images: TorchTensor, draws: list[bool], is_levels: bool, transform: Any) -> TorchTensor:
    gray = _gray(images, is_levels)
    if transform.channels == 1:
        return gray
    chosen = _torch().tensor(draws, device=images.device)[:, None, None, None]
    return _torch().where(chosen, gray, images)


def _gray(images: TorchTensor, is_levels: bool) -> TorchTensor:
    """Return images in gray, in one channel; levels are rounded as OpenCV rounds them."""
    if images.shape[3] == 1:
        return images
    torch = _torch()
    weights = torch.tensor(_GRAY_BITS if is_levels else _GRAY, device=images.device)
    gray = (images * weights).sum(3, keepdim=True)
    return torch.floor((gray + 16384) / 32768) if is_levels else gray


def _jittered(images: TorchTensor, draws: list[Any], is_levels: bool, transform: Any) -> TorchTensor:
    """Adjust each image in its own order: those whose next adjustment is the same are adjusted together."""
    torch = _torch()
    for place in range(4):
        for number, adjust in enumerate(_ADJUST):
            chosen = [at for at, draw in enumerate(draws) if draw[0][place] == number and draw[1][number] is not None]
            if not chosen or (images.shape[3] == 1 and number > 1):
                continue
            factors = torch.tensor([draws[at][1][number] for at in chosen], device=images.device)[:, None, None, None]
            where = torch.tensor(chosen, device=images.device)
            images = images.index_copy(0, where, adjust(images[where], factors, is_levels))
    return images


def _clipped(images: TorchTensor, is_levels: bool) -> TorchTensor:
    return images.round().clamp_(0, 255) if is_levels else images.clamp_(0, 1)


def _brighter(images: TorchTensor, factors: TorchTensor, is_levels: bool) -> TorchTensor:
    return _clipped(images * factors, is_levels)


def _contrasted(images: TorchTensor, factors: TorchTensor, is_levels: bool) -> TorchTensor:
    mean = _gray(images, is_levels).mean((1, 2, 3), keepdim=True)
    return _clipped(images * factors + (1 - factors) * mean, is_levels)


def _saturated(images: TorchTensor, factors: TorchTensor, is_levels: bool) -> TorchTensor:
    torch = _torch()
    gray = torch.tensor(_GRAY, device=images.device).expand(3, 3)
    matrices = factors[:, 0] * torch.eye(3, device=images.device) + (1 - factors[:, 0]) * gray
    if not is_levels:
        return torch.einsum("bhwc,bdc->bhwd", images, matrices).clamp_(0, 1)
    # OpenCV's matrices for uint8 have 10 bits.
    out = torch.einsum("bhwc,bdc->bhwd", images, (matrices * 1024).round())
    return torch.floor((out + 512) / 1024).clamp_(0, 255)


def _rotated_hue(images: TorchTensor, shifts: TorchTensor, is_levels: bool) -> TorchTensor:
    torch = _torch()
    red, green, blue = (images / 255 if is_levels else images).unbind(3)
    value = torch.maximum(torch.maximum(red, green), blue)
    spread = value - torch.minimum(torch.minimum(red, green), blue)
    safe = torch.where(spread > 0, spread, torch.ones_like(spread))
    hue = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    hue = hue + 6 * shifts[..., 0]  # in sixths of the circle
    channels = []
    for offset in (5, 3, 1):
        sixth = torch.remainder(hue + offset, 6)
        channels.append(value - spread * torch.minimum(sixth, 4 - sixth).clamp_(0, 1))
    out = torch.stack(channels, 3)
    return (out * 255).round() if is_levels else out


_ADJUST = (_brighter, _contrasted, _saturated, _rotated_hue)
_RUN: dict[type, Callable[..., TorchTensor]] = {
    HorizontalFlip: _flipped,
    VerticalFlip: _flipped,
    Grayscale: _grayed,
    ColorJitter: _jittered,
}


def _converted(images: TorchTensor, is_levels: bool, output: OutputFormat) -> TorchTensor:
    torch = _torch()
    dtype = output.dtype or ("float32" if output.normalize is not None or not is_levels else "uint8")
    if dtype == "uint8":
        images = (images if is_levels else (images.clamp(0, 1) * 255).round()).to(torch.uint8)
    else:
        images = images / 255 if is_levels else images
        if output.normalize is not None:
            mean, std = (torch.tensor(values, device=images.device) for values in output.normalize)
            images = (images - mean) / std
        images = images.to(getattr(torch, dtype))
    return (images.permute(0, 3, 1, 2) if output.layout == "CHW" else images).contiguous()


def _torch() -> Any:
    return import_extra("torch", "on_device", "torch")
