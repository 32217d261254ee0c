"""Scaling images down once, when they are packed, so that every epoch has less to decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Literal

import numpy as np

from penstock.codecs.images import encode_image, load_image, open_image
from penstock.codecs.limits import Limits
from penstock.codecs.registry import is_image
from penstock.errors import MissingExtra, PlanError
from penstock.plan import Context, Map, Place, check_choice, check_count, sample_error
from penstock.vision.decoding import EncodedImage, open_encoded, upright
from penstock.vision.planes import PLANES_MAGIC, encode_planes
from penstock.vision.resampling import Pixels, Rect, resize, shrink
from penstock.vision.segments import exif_orientation, with_lengths
from penstock.vision.tiles import tile_interval

_LIMITS = Limits()
_SCALABLE_MODES = ("L", "RGB", "RGBA")


@dataclass(frozen=True, slots=True)
class Store:
    """How images are stored for training: ``ps.pack(source, folder, images=vision.Store(max_side=512, quality=90))``.

    An image that is larger than ``max_side`` or ``short`` allows is scaled down (antialiased), made upright, and
    encoded again in its own format: JPEG and WebP with ``quality``, PNG without loss. All others keep their bytes:
    small images, other formats, and PNG with a palette, one bit or 16 bits. With ``kind="yuv"`` every image becomes
    planes that need no decoding, and its field is named ``yuv``.

    Attributes:
        max_side: The most pixels of the longer side.
        quality: The quality of JPEG and WebP, from 1 to 100.
        short: The most pixels of the shorter side; give this or ``max_side``.
        tiles: Store JPEGs in tiles, of which crops decode only those that they need.
        kind: ``"yuv"`` for planes; ``None``: the format of each image.

    Raises:
        PlanError: An argument is not valid.
    """

    max_side: int | None = None
    quality: int = 90
    short: int | None = field(default=None, kw_only=True)
    tiles: bool = field(default=True, kw_only=True)
    kind: Literal["yuv"] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if (self.max_side is None) == (self.short is None):
            raise PlanError(f"max_side={self.max_side}, short={self.short}: give one of them")
        for name in ("max_side", "short"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least=1)
        check_count("quality", self.quality, least=1)
        if self.quality > 100:
            raise PlanError(f"quality={self.quality}: it must be from 1 to 100")
        if not isinstance(self.tiles, bool):
            raise PlanError(f"tiles={self.tiles!r}: give True or False")
        if self.kind is not None:
            check_choice("kind", self.kind, ("yuv",))

    def __call__(self, data: bytes) -> bytes:
        """Return the bytes to store for an image.

        Raises:
            ValueError: ``data`` is not an image, or is damaged.
            MissingExtra: simplejpeg, OpenCV or Pillow is not installed.
        """
        image = open_encoded(data, _LIMITS, "error")
        size = self._new_size(*image.size)
        if self.kind == "yuv":
            return (
                data
                if data.startswith(PLANES_MAGIC) and size == image.size
                else encode_planes(_scaled_down(image, size))
            )
        if size == image.size:
            return data
        if data[:2] == b"\xff\xd8":
            return self._encode_jpeg(_scaled_down(image, size))
        return self._reencode_png_or_webp(data)

    def _new_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to store."""
        bound, side = (self.max_side, max(height, width)) if self.max_side else (self.short, min(height, width))
        if bound is None or side <= bound:
            return height, width
        return max(1, round(height * bound / side)), max(1, round(width * bound / side))

    def _encode_jpeg(self, pixels: Pixels) -> bytes:
        gray = bool((pixels[:, :, 0] == pixels[:, :, 1]).all() and (pixels[:, :, 0] == pixels[:, :, 2]).all())
        options: dict[str, Any] = {} if gray else {"subsampling": "4:2:0"}
        if self.tiles:
            mcu_size = 8 if gray else 16
            options["restart_marker_blocks"] = tile_interval(pixels.shape[1], mcu_size, mcu_size)
        image = pixels[:, :, 0] if gray else pixels
        data = _saved(image, "JPEG", quality=self.quality, optimize=True, **options)
        return with_lengths(data) if self.tiles else data

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
        return _saved(small, "WEBP", quality=self.quality)


def _saved(pixels: Pixels, kind: str, **options: Any) -> bytes:
    from PIL import Image

    stream = BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


def _scaled_down(image: EncodedImage, size: tuple[int, int]) -> Pixels:
    """Decode an image to this size."""
    height, width = image.size
    pixels, factor, *_ = image.decode(min(height / size[0], width / size[1]))
    if factor == 1:
        return resize(pixels, size)
    return shrink(pixels, Rect(0, 0, height / factor, width / factor), size, False)


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
        return dict(self._store_field(name, value) for name, value in sample.items())

    def _store_field(self, name: str, value: Any) -> tuple[str, Any]:
        if "." in name or not (is_image(name) or name == "yuv") or not isinstance(value, bytes):
            return name, value
        try:
            return self.how.kind or name, self.how(value)
        except MissingExtra:
            raise
        except Exception as exc:
            raise ValueError(f"field {name!r}: {exc}") from exc

    def failure(self, exc: Exception, place: Place) -> Exception:
        return sample_error(f"store: {exc}", place, exc.__cause__ or exc)
