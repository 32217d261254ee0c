"""MixUp and CutMix: the images and labels of a batch, mixed with those of their neighbours."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from penstock.codecs.arrays import as_array
from penstock.errors import PlanError
from penstock.plan import check_choice, check_count, is_tensor
from penstock.vision.resampling import Pixels
from penstock.vision.transform import Layout, image_field


def mixup(images: Any, share: float) -> Any:
    """Return ``share`` times each image of a batch, arrays or tensors, plus ``1 - share`` times the one before it."""
    if is_tensor(images):
        mixed_tensor = images * share + images.roll(1, 0) * (1 - share)
        return mixed_tensor if images.is_floating_point() else mixed_tensor.round().to(images.dtype)
    if images.dtype != np.uint8:
        own_share, other_share = images.dtype.type(share), images.dtype.type(1 - share)
        mixed: Pixels = images * own_share + np.roll(images, 1, axis=0) * other_share
        return mixed
    floats = images.astype(np.float32)
    floats *= np.float32(share)
    floats += np.roll(images, 1, axis=0) * np.float32(1 - share)
    return np.rint(floats, out=floats).astype(np.uint8)


def cutmix(images: Any, box: tuple[int, int, int, int], layout: Layout = "HWC") -> Any:
    """Return a batch, an array or a tensor, with the box (top, left, bottom, right) of the image before in each."""
    top, left, bottom, right = box
    out = images.clone() if is_tensor(images) else images.copy()
    inside = (slice(None), slice(top, bottom), slice(left, right))
    if layout == "CHW":
        inside = (slice(None), slice(None), *inside[1:])  # type: ignore[assignment]
    out[inside] = images[inside].roll(1, 0) if is_tensor(images) else np.roll(images[inside], 1, axis=0)
    return out


@dataclass(frozen=True)
class _BatchMixing(ABC):
    """Mixes the images and labels of a batch, by draws from the batch's own generator.

    Attributes:
        alpha: The share that each image keeps follows Beta(alpha, alpha).
        classes: The number of classes; needed for labels that are integers.
        image: The field, or the position in a tuple, of the images; by default found by common names.
        label: The field, or the position in a tuple, of the labels; by default found by common names.
        layout: The layout of the images, ``"HWC"`` or ``"CHW"``.
    """

    alpha: float = 1.0
    classes: int | None = None
    image: str | int | None = None
    label: str | int | None = None
    layout: Layout = "HWC"

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, Real) or not self.alpha > 0:
            raise PlanError(f"alpha={self.alpha!r}: it must be a number above 0")
        if self.classes is not None:
            check_count("classes", self.classes, least=1)
        check_choice("layout", self.layout, ("HWC", "CHW"))

    @abstractmethod
    def _mix(self, images: Any, rng: np.random.Generator) -> tuple[Any, float]:
        """Return the mixed images, and the share of its own label that each keeps."""

    def __call__(self, batch: Any, rng: np.random.Generator | None = None) -> Any:
        """Return a mixed batch, of the same kind: a dict of columns, or a tuple that begins with images and labels.

        Raises:
            ValueError: The images differ in size, or the labels do not fit ``classes``.
            TypeError: ``batch`` is not a batch.
        """
        rng = np.random.default_rng() if rng is None else rng
        if not isinstance(batch, dict | tuple | list):
            raise TypeError(
                f"{type(self).__name__} works on batches, not on {type(batch).__name__}; use it after batched()"
            )
        image, label = self._image_and_label(batch)
        values: Any = dict(batch) if isinstance(batch, dict) else list(batch)
        images = values[image] if is_tensor(values[image]) else as_array(values[image])
        if images is None or images.ndim != 4:
            raise ValueError(f"{image!r} does not hold images of one size; crop or resize them before batched()")
        labels = _one_hot(values[label], self.classes)
        mixed, share = self._mix(images, rng)
        soft_labels = labels * np.float32(share) + np.roll(labels, 1, axis=0) * np.float32(1 - share)
        values[label] = _as_input_type(soft_labels, values[image])
        values[image] = mixed
        return values if isinstance(batch, dict) else type(batch)(values)

    def _image_and_label(self, batch: Any) -> tuple[Any, Any]:
        """Return the keys of images and labels in the batch."""
        if not isinstance(batch, dict):
            return self.image if self.image is not None else 0, self.label if self.label is not None else 1
        image = self.image or image_field(batch)
        label = self.label or next((name for name in ("cls", "label", "class", "target") if name in batch), "")
        for argument, name in (("image", image), ("label", label)):
            if name not in batch:
                problem = f"the batch has no field {name!r}" if name else f"it is unclear which field is the {argument}"
                raise ValueError(
                    f"{type(self).__name__}: {problem}; set {argument}= to one of {', '.join(map(str, batch))}"
                )
        return image, label


class MixUp(_BatchMixing):
    """Blends every image with the one before it, and their labels: ``ds.batched(64).map(vision.MixUp(0.2, 1000))``.

    One share, which follows Beta(alpha, alpha), is drawn for each batch. Labels become float32 of shape
    (batch, classes); ``classes`` is needed unless they have that shape already.

    Raises:
        PlanError: An argument is not valid.
    """

    def _mix(self, images: Any, rng: np.random.Generator) -> tuple[Any, float]:
        share = float(rng.beta(self.alpha, self.alpha))
        return mixup(images, share), share


class CutMix(_BatchMixing):
    """Replaces a random rectangle of every image by the same rectangle of the image before it; mixes labels by area.

    The arguments and the labels are those of ``MixUp``.

    Raises:
        PlanError: An argument is not valid.
    """

    def _mix(self, images: Any, rng: np.random.Generator) -> tuple[Any, float]:
        height, width = images.shape[1:3] if self.layout == "HWC" else images.shape[2:4]
        half_side = 0.5 * math.sqrt(1 - float(rng.beta(self.alpha, self.alpha)))
        x, y = int(rng.integers(width)), int(rng.integers(height))
        half_height, half_width = int(half_side * height), int(half_side * width)
        top, left = max(0, y - half_height), max(0, x - half_width)
        bottom, right = min(height, y + half_height), min(width, x + half_width)
        own_share = 1 - (bottom - top) * (right - left) / (height * width)
        return cutmix(images, (top, left, bottom, right), self.layout), own_share


def _one_hot(labels: Any, classes: int | None) -> Pixels:
    array = as_array(labels)
    if array is None:
        array = np.asarray(labels)
    if array.ndim == 2 and array.dtype.kind == "f":
        return array.astype(np.float32)
    if classes is None:
        raise ValueError("set classes=, the number of classes, or pass labels of shape (batch, classes)")
    if (
        array.ndim != 1
        or array.dtype.kind not in "iu"
        or (array.size and not 0 <= array.min() <= array.max() < classes)
    ):
        raise ValueError(f"labels must be integers from 0 to {classes - 1}, one for each image")
    return np.eye(classes, dtype=np.float32)[array]


def _as_input_type(array: Pixels, original: Any) -> Any:
    """Return an array as a tensor, on the same device, if ``original`` is one."""
    if not is_tensor(original):
        return array
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(original.device)
