"""Boxes, masks and keypoints that follow the crops, flips and resizes of their image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.codecs.images import image_decoder
from penstock.codecs.limits import Limits
from penstock.errors import PlanError
from penstock.vision.resampling import Pixels
from penstock.vision.transform import Transform, image_field

Names = str | tuple[str, ...]

_LIMITS = Limits()


class Region(NamedTuple):
    """The part of an image to keep, the size to give it, and whether to mirror it or turn it upside down."""

    top: int
    left: int
    height: int
    width: int
    size: tuple[int, int]
    flip: bool = False
    upside_down: bool = False

    def moved(self, points: Any) -> Pixels:
        """Return where points (x, y), of shape (..., 2), are in the result."""
        height, width = self.size
        scale = np.array([width / self.width, height / self.height])
        moved: Pixels = (np.asarray(points, np.float64) - (self.left, self.top)) * scale
        if self.flip:
            moved[..., 0] = width - moved[..., 0]
        if self.upside_down:
            moved[..., 1] = height - moved[..., 1]
        return moved

    def cut(self, mask: Pixels, pad: Callable[[Pixels, int], Pixels]) -> Pixels:
        """Return a mask of the result, by its nearest pixels; ``pad`` says which pixels are shown beyond the edges."""
        parts = ((self.top, self.height, self.size[0]), (self.left, self.width, self.size[1]))
        rows, columns = (
            first + ((np.arange(count) + 0.5) * (length / count)).astype(np.intp) for first, length, count in parts
        )
        rows, columns = rows[:: -1 if self.upside_down else 1], columns[:: -1 if self.flip else 1]
        inside = (rows >= 0) & (rows < mask.shape[0]), (columns >= 0) & (columns < mask.shape[1])
        out = mask[pad(rows, mask.shape[0])[:, None], pad(columns, mask.shape[1])]
        if pad is clip:
            out[~inside[0]], out[:, ~inside[1]] = 0, 0
        return np.ascontiguousarray(out)


def clip(positions: Pixels, length: int) -> Pixels:
    """Return positions within an image; with constant padding, what they show is then set to 0."""
    return np.clip(positions, 0, length - 1)


@dataclass(frozen=True, kw_only=True, repr=False)
class AnnotatedTransform(Transform):
    """A transform that moves pixels, and with them what other fields of a sample say about them.

    Such a transform is called on samples: ``ds.decode(jpg=None).map(vision.RandomResizedCrop(224, boxes="boxes"))``.

    Attributes:
        image: The field of the image; by default found by common names.
        boxes: Fields of boxes: arrays of shape (n, 4) with left, top, right, bottom in pixels. They become float32,
            clipped to the result; a box that lies outside of it keeps its place in the array, without an area.
        masks: Fields of masks: arrays of the height and width of the image, or their files. The nearest pixel is kept.
        keypoints: Fields of points: arrays of shape (..., 2) with x and y, or (..., 3) with a third number that is set
            to 0 where the point is outside of the result. They become float32.
    """

    image: str | None = None
    boxes: Names = ()
    masks: Names = ()
    keypoints: Names = ()

    def __post_init__(self) -> None:
        for name in ("boxes", "masks", "keypoints"):
            names = getattr(self, name)
            names = (names,) if isinstance(names, str) else tuple(names)
            if not all(isinstance(field, str) and field for field in names):
                raise PlanError(f"{name}={getattr(self, name)!r}: give the name of a field, or several")
            object.__setattr__(self, name, names)

    def within(self, limits: Limits) -> Callable[..., Any]:
        if self.boxes or self.masks or self.keypoints:
            raise PlanError(f"{self!r} needs the whole sample: use it in map() after decode(jpg=None)")
        return super().within(limits)

    def _run(self, image: Any, rng: np.random.Generator | None = None, limits: Limits = _LIMITS) -> Any:
        if not isinstance(image, dict):
            return super()._run(image, rng, limits)
        name = self.image or image_field(image)
        pixels, region = self._with_region(image[name], self._generator(rng), limits)
        moved = {field: self._mask(image, field, region, limits) for field in self.masks}
        moved |= {field: _moved_boxes(_array(image, field, (4,)), region) for field in self.boxes}
        moved |= {field: _moved_points(_array(image, field, (2, 3)), region) for field in self.keypoints}
        return {**image, **moved, name: pixels}

    def _with_region(self, image: Any, rng: np.random.Generator, limits: Limits) -> tuple[Any, Region]:
        """Return the transformed image, which is given as bytes or pixels, and the region that was kept of it."""
        raise NotImplementedError

    def _pad(self) -> Callable[[Pixels, int], Pixels]:
        """Return which positions of an image are shown beyond its edges."""
        return clip

    def _mask(self, sample: dict[str, Any], field: str, region: Region, limits: Limits) -> Pixels:
        value = _field(sample, field)
        mask = np.asarray(image_decoder(None, limits)(value) if isinstance(value, bytes) else value)
        if mask.ndim < 2:
            raise ValueError(f"field {field!r}: a mask must have the shape of the image, not {mask.shape}")
        return region.cut(mask, self._pad())


def _field(sample: dict[str, Any], field: str) -> Any:
    if field not in sample:
        raise ValueError(f"the sample has no field {field!r}; it has {', '.join(map(str, sample))}")
    return sample[field]


def _array(sample: dict[str, Any], field: str, last: tuple[int, ...]) -> Pixels:
    array = np.asarray(_field(sample, field), np.float64)
    if not array.size:
        array = array.reshape(0, last[0])
    if array.ndim < 2 or array.shape[-1] not in last:
        wanted = " or ".join(map(str, last))
        raise ValueError(f"field {field!r}: pass an array of rows of {wanted} numbers, not of shape {array.shape}")
    return array


def _moved_boxes(boxes: Pixels, region: Region) -> Pixels:
    corners = region.moved(boxes.reshape(-1, 2, 2))
    height, width = region.size
    clipped: Pixels = np.clip(np.sort(corners, axis=1), 0, (width, height)).astype(np.float32)
    return clipped.reshape(boxes.shape)


def _moved_points(points: Pixels, region: Region) -> Pixels:
    out = points.copy()
    out[..., :2] = region.moved(points[..., :2])
    if out.shape[-1] == 3:
        height, width = region.size
        x, y = out[..., 0], out[..., 1]
        out[..., 2] *= (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return out.astype(np.float32)
