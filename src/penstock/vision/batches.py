"""What is done to whole batches: images mixed with their neighbours, and their labels likewise."""

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
from penstock.vision.transform import Layout


def mixup(images: Pixels, share: float) -> Pixels:
    """Mix every image of a batch with the one before it, of which it gets ``1 - share``."""
    if images.dtype != np.uint8:
        own_share, other_share = images.dtype.type(share), images.dtype.type(1 - share)
        mixed: Pixels = images * own_share + np.roll(images, 1, axis=0) * other_share
        return mixed
    own = images.astype(np.float32)
    own *= np.float32(share)
    own += np.roll(images, 1, axis=0) * np.float32(1 - share)
    return np.rint(own, out=own).astype(np.uint8)


def cutmix(images: Pixels, box: tuple[int, int, int, int], layout: Layout = "HWC") -> Pixels:
    """Put the part (top, left, bottom, right) of the image before it into every image of a batch."""
    top, left, bottom, right = box
    out = images.copy()
    part = (slice(None), slice(top, bottom), slice(left, right))
    if layout == "CHW":
        part = (slice(None), slice(None), *part[1:])  # type: ignore[assignment]
    out[part] = np.roll(images[part], 1, axis=0)
    return out


@dataclass(frozen=True)
class _Mixing(ABC):
    """Mixes the images and labels of a batch; the batch's own generator says how."""

    alpha: float = 1.0
    classes: int | None = None
    image: str | int | None = None
    label: str | int | None = None
    layout: Layout = "HWC"

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, Real) or not self.alpha > 0:
            raise PlanError(f"alpha={self.alpha!r}: give a number above 0")
        if self.classes is not None:
            check_count("classes", self.classes, least=1)
        check_choice("layout", self.layout, ("HWC", "CHW"))

    @abstractmethod
    def _mixed(self, images: Pixels, rng: np.random.Generator) -> tuple[Pixels, float]:
        """The images, and which share of its own label each keeps."""

    def __call__(self, batch: Any, rng: np.random.Generator | None = None) -> Any:
        """Mix a batch: a dict of columns, or a tuple whose first two are images and labels.

        Raises:
            ValueError: the images differ in size, or labels do not fit ``classes``.
            TypeError: it is no batch.
        """
        rng = np.random.default_rng() if rng is None else rng
        if not isinstance(batch, dict | tuple | list):
            raise TypeError(f"{type(self).__name__} works on batches, not on a {type(batch).__name__}")
        image, label = self._places(batch)
        values: Any = dict(batch) if isinstance(batch, dict) else list(batch)
        images = as_array(values[image])
        if images is None or images.ndim != 4:
            raise ValueError(f"the images in {image!r} are no batch of one size; give them one before batched")
        labels = _one_hot(values[label], self.classes)
        mixed, share = self._mixed(images, rng)
        soft = labels * np.float32(share) + np.roll(labels, 1, axis=0) * np.float32(1 - share)
        values[image], values[label] = _like(mixed, values[image]), _like(soft, values[image])
        return values if isinstance(batch, dict) else type(batch)(values)

    def _places(self, batch: Any) -> tuple[Any, Any]:
        """Where images and labels are."""
        if not isinstance(batch, dict):
            return self.image if self.image is not None else 0, self.label if self.label is not None else 1
        image = self.image or next(
            (name for name in ("jpg", "jpeg", "png", "webp", "image", "img") if name in batch), ""
        )
        label = self.label or next((name for name in ("cls", "label", "class", "target") if name in batch), "")
        for what, name in (("image", image), ("label", label)):
            if name not in batch:
                said = f"{what}={name!r} is not in the batch" if name else f"which field is the {what} is not clear"
                raise ValueError(f"{type(self).__name__}: {said}, which has {', '.join(map(str, batch))}; say {what}=")
        return image, label


class MixUp(_Mixing):
    """Mixes every image with the one before it, and their labels: ``ds.batched(64).map(vision.MixUp(0.2, 1000))``.

    The share follows Beta(alpha, alpha), one for each batch. Labels become float32 of shape (batch, classes);
    ``classes`` is needed unless they are that already.

    Raises:
        PlanError: an argument makes no sense.
    """

    def _mixed(self, images: Pixels, rng: np.random.Generator) -> tuple[Pixels, float]:
        share = float(rng.beta(self.alpha, self.alpha))
        return mixup(images, share), share


class CutMix(_Mixing):
    """Puts a random rectangle of the image before it into every image, and mixes labels by area; as ``MixUp``.

    Raises:
        PlanError: an argument makes no sense.
    """

    def _mixed(self, images: Pixels, rng: np.random.Generator) -> tuple[Pixels, float]:
        height, width = images.shape[1:3] if self.layout == "HWC" else images.shape[2:4]
        reach = 0.5 * math.sqrt(1 - float(rng.beta(self.alpha, self.alpha)))
        across, down = int(rng.integers(width)), int(rng.integers(height))
        tall, wide = int(reach * height), int(reach * width)
        box = max(0, down - tall), max(0, across - wide), min(height, down + tall), min(width, across + wide)
        kept = 1 - (box[2] - box[0]) * (box[3] - box[1]) / (height * width)
        return cutmix(images, box, self.layout), kept


def _one_hot(labels: Any, classes: int | None) -> Pixels:
    array = as_array(labels)
    if array is None:
        array = np.asarray(labels)
    if array.ndim == 2 and array.dtype.kind == "f":
        return array.astype(np.float32)
    if classes is None:
        raise ValueError("say classes=, the number of classes, or give labels of shape (batch, classes)")
    if (
        array.ndim != 1
        or array.dtype.kind not in "iu"
        or (array.size and not 0 <= array.min() <= array.max() < classes)
    ):
        raise ValueError(f"labels are whole numbers from 0 to {classes - 1}, one for each image")
    return np.eye(classes, dtype=np.float32)[array]


def _like(value: Pixels, other: Any) -> Any:
    """A tensor where the other is one."""
    if not is_tensor(other):
        return value
    import torch

    return torch.from_numpy(np.ascontiguousarray(value)).to(other.device)
