"""Images by Pillow: bytes to arrays, tensors or PIL images, and back.

The kind of file is told by its content. Of several frames the first is taken. The orientation that a camera
notes in EXIF is not applied. Colour with 16 bits a channel comes as 8 bits: Pillow has no wider colour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from io import BytesIO
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.codecs.arrays import as_array
from penstock.codecs.limits import Limits, OverLimit
from penstock.errors import MissingExtra

if TYPE_CHECKING:
    from PIL import Image, ImageFile

Array = npt.NDArray[Any]

EXTENSIONS = (
    *("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "bmp", "gif"),
    *("webp", "tif", "tiff", "img", "image", "jp2", "avif"),
)


@dataclass(frozen=True, slots=True)
class Form:
    """What an image spec asks for: the container, its numbers, and the mode of the pixels."""

    container: Literal["numpy", "torch", "pil"]
    mode: Literal["L", "RGB", "RGBA"]
    floating: bool = False


def _forms() -> dict[str, Form]:
    modes: tuple[Literal["L", "RGB", "RGBA"], ...] = ("L", "RGB", "RGBA")
    forms = {"pil": Form("pil", "RGB"), "pil8": Form("pil", "RGB"), "torch": Form("torch", "RGB", True)}
    for mode in modes:
        name = mode.lower()
        forms |= {f"{name}8": Form("numpy", mode), name: Form("numpy", mode, True)}
        forms |= {f"torch{name}8": Form("torch", mode), f"torch{name}": Form("torch", mode, True)}
        forms |= {f"pil{name}8": Form("pil", mode), f"pil{name}": Form("pil", mode)}
    return forms


FORMS: Mapping[str, Form] = MappingProxyType(_forms())

# Each kind of file, by how it begins, and Pillow's reader of it. These and no others: among those that Pillow
# would try are some that start programs (EPS) or read further files.
_READERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "JPEG": ("JpegImagePlugin", "JpegImageFile"),
        "PNG": ("PngImagePlugin", "PngImageFile"),
        "WEBP": ("WebPImagePlugin", "WebPImageFile"),
        "GIF": ("GifImagePlugin", "GifImageFile"),
        "TIFF": ("TiffImagePlugin", "TiffImageFile"),
        "PPM": ("PpmImagePlugin", "PpmImageFile"),
        "BMP": ("BmpImagePlugin", "BmpImageFile"),
        "JPEG2000": ("Jpeg2KImagePlugin", "Jpeg2KImageFile"),
        "AVIF": ("AvifImagePlugin", "AvifImageFile"),
    }
)
_MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    *((start, "TIFF") for start in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    *((b"P%d" % number, "PPM") for number in range(1, 7)),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG2000"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
    (b"BM", "BMP"),
)

# Modes that no array can show as they are: palettes, single bits, colours that are not red, green and blue.
_SHOWN_AS: Mapping[str, str] = MappingProxyType(
    {
        **{"1": "L", "P": "RGB", "PA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB", "LAB": "RGB", "HSV": "RGB"},
        **{"RGBX": "RGB", "RGBa": "RGBA", "La": "LA"},
    }
)

_JPEG: Mapping[str, Any] = MappingProxyType({"quality": 95, "subsampling": 0})
_WRITERS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        **dict.fromkeys(("jpg", "jpeg", "img", "image"), ("JPEG", _JPEG)),
        **{name: ("PPM", {}) for name in ("ppm", "pgm", "pbm", "pnm")},
        **{name: ("TIFF", {}) for name in ("tif", "tiff")},
        **{"png": ("PNG", {}), "bmp": ("BMP", {}), "webp": ("WEBP", {"lossless": True, "exact": True})},
        "jp2": ("JPEG2000", {"irreversible": False}),
    }
)
_WITHOUT_ALPHA = ("JPEG", "PPM")
_WIDE_MODES = ("I", "F")
_WIDE_EXTENSIONS = ("png", "tif", "tiff", "pgm", "pnm")


def decoder(spec: str | None, limits: Limits) -> Callable[[bytes], Any]:
    """Return the decoder of images, thread-safe and picklable.

    Args:
        spec: A name in ``FORMS``; ``None`` for the image as stored: a uint8 array, ``(height, width)`` for
            gray, else ``(height, width, channels)``. Palettes become RGB or RGBA, single bits 0 and 255,
            CMYK becomes RGB; gray of 16 bits stays uint16.
        limits: How many pixels an image may have.

    Raises:
        MissingExtra: Pillow, or torch for a torch spec, is not installed.
    """
    _pillow()
    form = None if spec is None else FORMS[spec]
    if form is not None and form.container == "torch":
        _torch()
    return ImageDecoder(form, limits)


@dataclass(frozen=True, slots=True)
class ImageDecoder:
    """Decodes one image after the other to one form (``None``: as stored)."""

    form: Form | None
    limits: Limits

    def __call__(self, data: bytes) -> Any:
        """Return the image in this form, sharing memory with nothing.

        Raises:
            OverLimit: It has more than ``limits.pixels`` pixels.
            ValueError: It is not an image of a known kind, is damaged or is cut short.
        """
        image = open_image(data, self.limits)
        load_image(image)
        if self.form is None:
            return _as_stored(image)
        if self.form.container == "pil":
            return converted(image, self.form.mode) if image.mode != self.form.mode else image.copy()
        pixels = converted(image, self.form.mode)
        return _numpy(pixels, self.form) if self.form.container == "numpy" else _tensor(pixels, self.form)


def open_image(data: bytes, limits: Limits) -> ImageFile.ImageFile:
    """Return the image with its header read and its size checked, but no pixel decoded yet.

    Raises:
        OverLimit: It has more than ``limits.pixels`` pixels.
        ValueError: It is not an image of a known kind, or its header is damaged.
    """
    kind = _kind(data)
    if kind is None:
        known = ", ".join(_READERS)
        raise ValueError(f"not an image ({known}): it starts with {bytes(data[:8])!r}")
    if kind == "WEBP":
        # Pillow's reader takes memory for the whole canvas as soon as it is made.
        limits.check_pixels(*_webp_size(data))
    try:
        image = _reader(kind)(BytesIO(data))
    except Exception as exc:  # Pillow's readers let almost any exception out of damaged data
        raise _unreadable(kind, exc) from exc
    limits.check_pixels(*image.size)
    return image


def load_image(image: ImageFile.ImageFile) -> None:
    """Decode the pixels of an image from ``open_image``.

    Raises:
        ValueError: They are damaged or cut short.
    """
    try:
        image.load()
    except Exception as exc:  # as in open_image
        raise _unreadable(str(image.format), exc) from exc


def encode_image(value: Any, extension: str) -> bytes:
    """Return a PIL image, an array (HW or HWC) or a tensor (HW or CHW) in the format of the extension.

    Arrays are uint8, bool, float in 0..1 (rounded to 8 bits), or uint16 for gray PNG, TIFF and PGM. All
    formats are lossless but JPEG: quality 95 with colour at full resolution (4:4:4). For other settings
    encode the image yourself and give the bytes.

    Raises:
        TypeError: It is no image, or its dtype is none of these.
        ValueError: Its shape is not an image's, values are out of range, or the format cannot hold it.
        MissingExtra: Pillow is not installed.
    """
    pillow = _pillow()
    if extension not in _WRITERS:
        raise ValueError(f"images are not written as {extension}; give the bytes, or use png, jpg or webp")
    kind, options = _WRITERS[extension]
    image = value if isinstance(value, pillow.Image) else _image_of(value, extension)
    image = _fitting(image, kind, extension)
    stream = BytesIO()
    try:
        image.save(stream, kind, **options)
    except (OSError, KeyError) as exc:
        raise ValueError(f"an image of mode {image.mode} cannot be written as {extension}: {exc}") from exc
    return stream.getvalue()


def _kind(data: bytes) -> str | None:
    for start, kind in _MAGICS:
        if data.startswith(start):
            return kind
    if data[8:12] == b"WEBP" and data[:4] == b"RIFF":
        return "WEBP"
    return "AVIF" if data[4:12] in (b"ftypavif", b"ftypavis") else None


def _webp_size(data: bytes) -> tuple[int, int]:
    """The size of the canvas, from whichever of the three kinds of header the file begins with."""
    chunk, head = data[12:16], data[20:30].ljust(10, b"\0")
    if chunk == b"VP8X":
        return int.from_bytes(head[4:7], "little") + 1, int.from_bytes(head[7:10], "little") + 1
    if chunk == b"VP8L":
        bits = int.from_bytes(head[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return int.from_bytes(head[6:8], "little") & 0x3FFF, int.from_bytes(head[8:10], "little") & 0x3FFF


@cache
def _reader(kind: str) -> Callable[[BytesIO], ImageFile.ImageFile]:
    module, name = _READERS[kind]
    try:
        reader: Any = getattr(import_module(f"PIL.{module}"), name)
    except ImportError as exc:
        raise ValueError(f"this Pillow cannot read {kind}") from exc
    if kind != "JPEG":
        found: Callable[[BytesIO], ImageFile.ImageFile] = reader
        return found

    class PlainJpeg(reader):  # type: ignore[misc]
        # Pillow looks for the resolution in EXIF, which costs time and warns of every sloppy camera.
        def _read_dpi_from_exif(self) -> None:
            pass

    return PlainJpeg


def _unreadable(kind: str, exc: Exception) -> ValueError:
    pillow = _pillow()
    if isinstance(exc, pillow.DecompressionBombError | pillow.DecompressionBombWarning):
        return OverLimit(f"{exc} (Pillow's own limit, PIL.Image.MAX_IMAGE_PIXELS)")
    return ValueError(f"damaged or truncated {kind} image: {exc}")


def _as_stored(image: ImageFile.ImageFile) -> Array:
    mode = _SHOWN_AS.get(image.mode, image.mode)
    if image.mode == "P" and "transparency" in image.info:
        mode = "RGBA"
    array = np.array(converted(image, mode))
    # Pillow widens 16 bits to 32 for some kinds of file, and keeps the byte order of others.
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM")):
        return array.astype(np.uint16, copy=False)
    return array


def converted(image: Image.Image, mode: str) -> Image.Image:
    """Return the image in another mode.

    Raises:
        ValueError: It holds more than 8 bits can.
    """
    if image.mode == mode:
        return image
    if image.mode == "P" and mode in ("L", "RGB"):
        # Transparency says nothing about these, and Pillow would warn that it is lost.
        image.info.pop("transparency", None)
    if image.mode.startswith(_WIDE_MODES):
        _check_eight_bits(image)
    return image.convert(mode)


def _check_eight_bits(image: Image.Image) -> None:
    """Refuse what Pillow would do: turn everything above 255 white."""
    pixels = np.asarray(image)
    if not (pixels.min() >= 0 and pixels.max() <= 255):
        raise ValueError(
            f"image of mode {image.mode} has pixels of {pixels.min()}..{pixels.max()}, "
            "which 8 bits cannot hold; decode this field as 'image' and scale it"
        )


def _numpy(image: Image.Image, form: Form) -> Array:
    if not form.floating:
        return np.array(image)
    array = np.asarray(image).astype(np.float32)
    array /= 255.0
    return array


def _tensor(image: Image.Image, form: Form) -> Any:
    array = np.asarray(image)
    array = (array if array.ndim == 2 else array.transpose(2, 0, 1)).copy()
    if form.floating:
        array = array.astype(np.float32)
        array /= 255.0
    return _torch().from_numpy(array)


def _image_of(value: Any, extension: str) -> Image.Image:
    """Make a PIL image of an array or tensor."""
    array = as_array(value)
    if array is None:
        raise TypeError("an image is a PIL image, an array or a tensor")
    if array.ndim == 3 and not isinstance(value, np.ndarray):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (2, 3, 4)) or not array.size:
        wanted = "HW or HWC" if isinstance(value, np.ndarray) else "HW or CHW"
        raise ValueError(f"an image has the shape {wanted} with 1 to 4 channels, not {tuple(value.shape)}")
    image: Image.Image = _pillow().fromarray(np.ascontiguousarray(_levels(array, extension)))
    return image


def _levels(array: Array, extension: str) -> Array:
    """The pixels as integers that Pillow takes."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind == "f":
        # Written so that NaN fails too; the slack is for what interpolation overshoots.
        if not (array.min() >= -0.001 and array.max() <= 1.001):
            raise ValueError(f"float pixels lie in 0..1, not {array.min()}..{array.max()}")
        levels: Array = np.rint(np.clip(array, 0, 1) * 255).astype(np.uint8)
        return levels
    if array.dtype == np.uint16 and array.ndim == 2 and extension in _WIDE_EXTENSIONS:
        return array.astype(np.uint16, copy=False)
    raise TypeError(
        f"pixels are uint8, bool or float, or uint16 for gray {', '.join(_WIDE_EXTENSIONS)}; "
        f"not {array.dtype} of shape {array.shape} as {extension}"
    )


def _fitting(image: Image.Image, kind: str, extension: str) -> Image.Image:
    """The image in a mode that the format has, where nothing is lost by it."""
    if kind in _WITHOUT_ALPHA:
        if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
            raise ValueError(f"{extension} has no transparency; convert the image to RGB, or use png")
        if image.mode == "P":
            image = image.convert("RGB")
    if extension == "pgm" and image.mode not in ("1", "L", "I", "I;16"):
        raise ValueError(f"pgm holds gray images, not {image.mode}")
    if extension == "pbm" and image.mode != "1":
        if image.mode != "L" or not set(np.unique(np.asarray(image))) <= {0, 255}:
            raise ValueError("pbm holds black and white only: bool, or 0 and 255")
        image = image.convert("1", dither=_pillow().Dither.NONE)
    return image


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as exc:
        raise MissingExtra("images", "images") from exc
    return Image


def _torch() -> Any:
    try:
        import torch
    except ImportError as exc:
        raise MissingExtra("decoding to torch tensors", "torch") from exc
    return torch
