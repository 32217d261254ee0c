"""Images made smaller once, when they are packed, so that every epoch has less to decode."""

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
from penstock.vision.decoding import open_picture, orientation, simplejpeg, upright
from penstock.vision.resampling import Pixels, Rect, resize, shrink

_LIMITS = Limits()
_MODES = ("L", "RGB", "RGBA")


@dataclass(frozen=True, slots=True)
class Store:
    """How images are stored for training: ``ps.pack(source, folder, images=vision.Store(max_side=512, quality=90))``.

    An image whose longer side is longer than ``max_side`` is scaled down to that (antialiased), turned upright and
    encoded again as what it was: JPEG and WebP with ``quality``, PNG without loss. All others keep their
    bytes: small images, other kinds of file, PNG with a palette, one bit or 16 bits.

    Raises:
        PlanError: an argument makes no sense.
    """

    max_side: int
    quality: int = 90

    def __post_init__(self) -> None:
        check_count("max_side", self.max_side, least=1)
        check_count("quality", self.quality, least=1)
        if self.quality > 100:
            raise PlanError(f"quality={self.quality}: give 1 to 100")

    def __call__(self, data: bytes) -> bytes:
        """The bytes to store for an image.

        Raises:
            ValueError: it is no image, or is damaged.
            MissingExtra: simplejpeg, OpenCV or Pillow is not installed.
        """
        picture = open_picture(data, _LIMITS, "error")
        if max(picture.size) <= self.max_side:
            return data
        if data[:2] == b"\xff\xd8":
            size = self._size(*picture.size)
            pixels, factor = picture.pixels(max(picture.size) / self.max_side)
            return self._jpeg(_scaled(pixels, picture.size, size, factor))
        return self._other(data)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        long = max(height, width)
        return max(1, round(height * self.max_side / long)), max(1, round(width * self.max_side / long))

    def _jpeg(self, pixels: Pixels) -> bytes:
        gray = bool((pixels[:, :, 0] == pixels[:, :, 1]).all() and (pixels[:, :, 0] == pixels[:, :, 2]).all())
        given = {"colorspace": "GRAY", "colorsubsampling": "Gray"} if gray else {"colorsubsampling": "420"}
        image = np.ascontiguousarray(pixels[:, :, :1]) if gray else pixels
        encoded: bytes = simplejpeg().encode_jpeg(image, quality=self.quality, **given)
        return encoded

    def _other(self, data: bytes) -> bytes:
        image = open_image(data, _LIMITS)
        kind, noted = image.format, image.info.get("exif")
        if kind not in ("PNG", "WEBP") or image.mode not in _MODES or "transparency" in image.info:
            return data
        load_image(image)
        turned = orientation(noted) if isinstance(noted, bytes) else 1
        pixels = upright(np.asarray(image), turned)
        small = resize(pixels, self._size(*pixels.shape[:2]))
        if kind == "PNG":
            return encode_image(small, "png")
        from PIL import Image

        stream = BytesIO()
        Image.fromarray(small).save(stream, "WEBP", quality=self.quality)
        return stream.getvalue()


def _scaled(pixels: Pixels, before: tuple[int, int], size: tuple[int, int], factor: int) -> Pixels:
    """The whole image, which is a ``factor`` smaller than it was ``before``, at another size."""
    if factor == 1:
        return resize(pixels, size)
    return shrink(pixels, Rect(0, 0, before[0] / factor, before[1] / factor), size, False)


@dataclass(frozen=True)
class StoreImages(Map):
    """Stores the images of samples as ``how`` says: fields named by an image's extension alone, not ``seg.png``."""

    how: Store

    @property
    def name(self) -> str:
        return "store"

    def function(self, ctx: Context) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Encode again what is too large."""
        return self._stored

    def _stored(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {name: self._value(name, value) for name, value in sample.items()}

    def _value(self, name: str, value: Any) -> Any:
        if "." in name or not is_image(name) or not isinstance(value, bytes):
            return value
        try:
            return self.how(value)
        except MissingExtra:
            raise
        except Exception as exc:
            raise ValueError(f"field {name!r}: {exc}") from exc

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key."""
        error = DataError(f"store: {exc}", place.shard, place.key)
        error.__cause__ = exc.__cause__ or exc
        return error
