"""Scaling images down once, when they are packed, so that every epoch has less to decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from penstock.codecs.images import encode_image, load_image, open_image
from penstock.codecs.limits import Limits
from penstock.codecs.registry import is_image
from penstock.errors import DataError, MissingExtra, PlanError
from penstock.plan import Context, Map, Place, check_count
from penstock.vision.decoding import open_encoded, simplejpeg, upright
from penstock.vision.resampling import Pixels, Rect, resize, shrink
from penstock.vision.segments import exif_orientation

_LIMITS = Limits()
_SCALABLE_MODES = ("L", "RGB", "RGBA")


@dataclass(frozen=True, slots=True)
class Store:
    """How images are stored for training: ``ps.pack(source, folder, images=vision.Store(max_side=512, quality=90))``.

    An image whose longer side exceeds ``max_side`` is scaled down to that (antialiased), made upright, and encoded
    again in its own format: JPEG and WebP with ``quality``, PNG without loss. All others keep their bytes: small
    images, other formats, and PNG with a palette, one bit or 16 bits.

    Raises:
        PlanError: An argument is not valid.
    """

    max_side: int
    quality: int = 90

    def __post_init__(self) -> None:
        check_count("max_side", self.max_side, least=1)
        check_count("quality", self.quality, least=1)
        if self.quality > 100:
            raise PlanError(f"quality={self.quality}: it must be from 1 to 100")

    def __call__(self, data: bytes) -> bytes:
        """Return the bytes to store for an image.

        Raises:
            ValueError: ``data`` is not an image, or is damaged.
            MissingExtra: simplejpeg, OpenCV or Pillow is not installed.
        """
        image = open_encoded(data, _LIMITS, "error")
        if max(image.size) <= self.max_side:
            return data
        if data[:2] == b"\xff\xd8":
            pixels, factor, *_ = image.decode(max(image.size) / self.max_side)
            return self._encode_jpeg(_scaled_down(pixels, image.size, self._new_size(*image.size), factor))
        return self._reencode_png_or_webp(data)

    def _new_size(self, height: int, width: int) -> tuple[int, int]:
        long = max(height, width)
        return max(1, round(height * self.max_side / long)), max(1, round(width * self.max_side / long))

    def _encode_jpeg(self, pixels: Pixels) -> bytes:
        gray = bool((pixels[:, :, 0] == pixels[:, :, 1]).all() and (pixels[:, :, 0] == pixels[:, :, 2]).all())
        options = {"colorspace": "GRAY", "colorsubsampling": "Gray"} if gray else {"colorsubsampling": "420"}
        image = np.ascontiguousarray(pixels[:, :, :1]) if gray else pixels
        encoded: bytes = simplejpeg().encode_jpeg(image, quality=self.quality, **options)
        return encoded

    def _reencode_png_or_webp(self, data: bytes) -> bytes:
        image = open_image(data, _LIMITS)
        kind, exif = image.format, image.info.get("exif")
        if kind not in ("PNG", "WEBP") or image.mode not in _SCALABLE_MODES or "transparency" in image.info:
            return data
        load_image(image)
        pixels = upright(np.asarray(image), exif_orientation(exif) if isinstance(exif, bytes) else 1)
        small = resize(pixels, self._new_size(*pixels.shape[:2]))
        if kind == "PNG":
            return encode_image(small, "png")
        from PIL import Image

        stream = BytesIO()
        Image.fromarray(small).save(stream, "WEBP", quality=self.quality)
        return stream.getvalue()


def _scaled_down(pixels: Pixels, full_size: tuple[int, int], size: tuple[int, int], factor: int) -> Pixels:
    """Return an image of ``full_size``, whose pixels are already reduced by ``factor``, at another size."""
    if factor == 1:
        return resize(pixels, size)
    return shrink(pixels, Rect(0, 0, full_size[0] / factor, full_size[1] / factor), size, False)


@dataclass(frozen=True)
class StoreImages(Map):
    """Stores the images of samples as ``how`` says: those in fields named by an extension alone, not in ``seg.png``."""

    how: Store

    @property
    def name(self) -> str:
        return "store"

    def function(self, ctx: Context) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return self._store_sample

    def _store_sample(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {name: self._store_field(name, value) for name, value in sample.items()}

    def _store_field(self, name: str, value: Any) -> Any:
        if "." in name or not is_image(name) or not isinstance(value, bytes):
            return value
        try:
            return self.how(value)
        except MissingExtra:
            raise
        except Exception as exc:
            raise ValueError(f"field {name!r}: {exc}") from exc

    def failure(self, exc: Exception, place: Place) -> Exception:
        """Return a ``DataError`` with the shard and key."""
        error = DataError(f"store: {exc}", place.shard, place.key)
        error.__cause__ = exc.__cause__ or exc
        return error
