"""Images by Pillow: bytes to arrays, tensors or PIL images, and back.

The file format is recognised by content. Only the first of several frames is decoded. The EXIF orientation is not
applied. Colour with 16 bits per channel is decoded to 8 bits: Pillow has no wider colour.
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
from penstock.errors import MissingExtra, import_extra

if TYPE_CHECKING:
    from PIL import Image, ImageFile

Array = npt.NDArray[Any]

IMAGE_EXTENSIONS = (
    *("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "bmp", "gif"),
    *("webp", "tif", "tiff", "img", "image", "jp2", "avif"),
)


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """What a spec such as ``"rgb8"`` means: the container, the mode of the pixels, and whether they are floats."""

    container: Literal["numpy", "torch", "pil"]
    mode: Literal["L", "RGB", "RGBA"]
    floating: bool = False


def _image_specs() -> dict[str, ImageSpec]:
    modes: tuple[Literal["L", "RGB", "RGBA"], ...] = ("L", "RGB", "RGBA")
    specs = {"pil": ImageSpec("pil", "RGB"), "pil8": ImageSpec("pil", "RGB"), "torch": ImageSpec("torch", "RGB", True)}
    for mode in modes:
        name = mode.lower()
        specs |= {f"{name}8": ImageSpec("numpy", mode), name: ImageSpec("numpy", mode, True)}
        specs |= {f"torch{name}8": ImageSpec("torch", mode), f"torch{name}": ImageSpec("torch", mode, True)}
        specs |= {f"pil{name}8": ImageSpec("pil", mode), f"pil{name}": ImageSpec("pil", mode)}
    return specs


IMAGE_SPECS: Mapping[str, ImageSpec] = MappingProxyType(_image_specs())

# The supported formats and Pillow's class for each. No others: some of those that Pillow would try start programs
# (EPS) or open further files.
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

# Modes that arrays cannot represent (palettes, single bits, colour spaces other than RGB) and what they are decoded to.
_ARRAY_MODES: Mapping[str, str] = MappingProxyType(
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
_FORMATS_WITHOUT_ALPHA = ("JPEG", "PPM")
_WIDE_MODES = ("I", "F")
_WIDE_EXTENSIONS = ("png", "tif", "tiff", "pgm", "pnm")


def image_decoder(spec: str | None, limits: Limits) -> Callable[[bytes], Any]:
    """Return a function that decodes images; it is thread-safe and picklable.

    Args:
        spec: A name in ``IMAGE_SPECS``; ``None`` for the image as stored: a uint8 array, ``(height, width)`` for
            gray, else ``(height, width, channels)``. Palettes become RGB or RGBA, single bits become 0 and 255,
            CMYK becomes RGB; 16-bit gray stays uint16.
        limits: How many pixels an image may have.

    Raises:
        MissingExtra: Pillow, or torch for a torch spec, is not installed.
    """
    _pillow()
    image_spec = None if spec is None else IMAGE_SPECS[spec]
    if image_spec is not None and image_spec.container == "torch":
        _torch()
    return ImageDecoder(image_spec, limits)


@dataclass(frozen=True, slots=True)
class ImageDecoder:
    """Decodes images by one spec (``None``: as stored)."""

    spec: ImageSpec | None
    limits: Limits

    def __call__(self, data: bytes) -> Any:
        """Return the decoded image, which shares no memory with anything else.

        Raises:
            OverLimit: The image has more than ``limits.pixels`` pixels.
            ValueError: The format is not supported, or the image is damaged or truncated.
        """
        image = open_image(data, self.limits)
        load_image(image)
        if self.spec is None:
            return _as_stored(image)
        if self.spec.container == "pil":
            return converted(image, self.spec.mode) if image.mode != self.spec.mode else image.copy()
        return in_container(converted(image, self.spec.mode), self.spec)


def open_image(data: bytes, limits: Limits) -> ImageFile.ImageFile:
    """Read the header of an image and check its size; the pixels are not decoded yet.

    Raises:
        OverLimit: The image has more than ``limits.pixels`` pixels.
        ValueError: The format is not supported, or the header is damaged.
    """
    kind = _recognised_format(data)
    if kind is None:
        supported = ", ".join(_READERS)
        raise ValueError(f"not an image ({supported}): it starts with {bytes(data[:8])!r}")
    if kind == "WEBP":
        # Pillow's class allocates the whole canvas when it is constructed.
        limits.check_pixels(*_webp_size(data))
    try:
        image = _reader(kind)(BytesIO(data))
    except Exception as exc:  # Pillow raises almost any exception for damaged data
        raise _image_error(kind, exc) from exc
    limits.check_pixels(*image.size)
    return image


def load_image(image: ImageFile.ImageFile) -> None:
    """Decode the pixels of an image from ``open_image``.

    Raises:
        ValueError: The pixels are damaged or truncated.
    """
    try:
        image.load()
    except Exception as exc:  # as in open_image
        raise _image_error(str(image.format), exc) from exc


def encode_image(value: Any, extension: str) -> bytes:
    """Return a PIL image, an array (HW or HWC) or a tensor (HW or CHW) in the format of the extension.

    Arrays are uint8, bool, float in 0..1 (rounded to 8 bits), or uint16 for gray PNG, TIFF and PGM. All
    formats are lossless except JPEG, which has quality 95 and colour at full resolution (4:4:4). For other
    settings, encode the image yourself and pass the bytes.

    Raises:
        TypeError: The value is not an image, or its dtype is none of these.
        ValueError: The shape is not that of an image, values are out of range, or the format cannot hold the image.
        MissingExtra: Pillow is not installed.
    """
    pillow = _pillow()
    if extension not in _WRITERS:
        raise ValueError(f"images cannot be written as {extension}; pass the encoded bytes, or use png, jpg or webp")
    kind, options = _WRITERS[extension]
    image = value if isinstance(value, pillow.Image) else _to_pil(value, extension)
    image = _in_writable_mode(image, kind, extension)
    stream = BytesIO()
    try:
        image.save(stream, kind, **options)
    except (OSError, KeyError) as exc:
        raise ValueError(f"an image of mode {image.mode} cannot be written as {extension}: {exc}") from exc
    return stream.getvalue()


def _recognised_format(data: bytes) -> str | None:
    for magic, kind in _MAGICS:
        if data.startswith(magic):
            return kind
    if data[8:12] == b"WEBP" and data[:4] == b"RIFF":
        return "WEBP"
    return "AVIF" if data[4:12] in (b"ftypavif", b"ftypavis") else None


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return the size of the canvas, from whichever of the three header chunks the file begins with."""
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
        raise ValueError(f"the installed Pillow cannot read {kind}") from exc
    if kind != "JPEG":
        typed_reader: Callable[[BytesIO], ImageFile.ImageFile] = reader
        return typed_reader

    class JpegWithoutDpi(reader):  # type: ignore[misc]
        # Pillow looks for the resolution in EXIF, which costs time and warns about malformed EXIF data.
        def _read_dpi_from_exif(self) -> None:
            pass

    return JpegWithoutDpi


def _image_error(kind: str, exc: Exception) -> ValueError:
    pillow = _pillow()
    if isinstance(exc, pillow.DecompressionBombError | pillow.DecompressionBombWarning):
        return OverLimit(f"{exc} (Pillow's own limit, PIL.Image.MAX_IMAGE_PIXELS)")
    return ValueError(f"damaged or truncated {kind} image: {exc}")


def _as_stored(image: ImageFile.ImageFile) -> Array:
    mode = _ARRAY_MODES.get(image.mode, image.mode)
    if image.mode == "P" and "transparency" in image.info:
        mode = "RGBA"
    array = np.array(converted(image, mode))
    # Pillow widens 16 bits to 32 for some file formats, and keeps the byte order of others.
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM")):
        return array.astype(np.uint16, copy=False)
    return array


def converted(image: Image.Image, mode: str) -> Image.Image:
    """Return the image in another mode; ``image`` itself if it already has that mode.

    Raises:
        ValueError: The pixel values do not fit into 8 bits.
    """
    if image.mode == mode:
        return image
    if image.mode == "P" and mode in ("L", "RGB"):
        # These modes have no alpha, and Pillow would warn that the transparency is lost.
        image.info.pop("transparency", None)
    if image.mode.startswith(_WIDE_MODES):
        _check_eight_bits(image)
    return image.convert(mode)


def _check_eight_bits(image: Image.Image) -> None:
    """Refuse values above 255, all of which Pillow would turn white."""
    pixels = np.asarray(image)
    if not (pixels.min() >= 0 and pixels.max() <= 255):
        raise ValueError(
            f"image of mode {image.mode} has pixel values in {pixels.min()}..{pixels.max()}, "
            "which do not fit into 8 bits; decode this field as 'image' and scale it"
        )


def in_container(pixels: Image.Image | Array, spec: ImageSpec) -> Any:
    """Return 8-bit pixels in the container and type of a spec, as a new array or tensor; an array may be reused."""
    array = np.asarray(pixels)
    if spec.container == "torch" and array.ndim == 3:
        array = array.transpose(2, 0, 1)
    array = array.astype(np.float32 if spec.floating else np.uint8, order="C", copy=not array.flags.writeable)
    if spec.floating:
        array /= 255.0
    return _torch().from_numpy(array) if spec.container == "torch" else array


def jpeg_pixels(data: bytes, limits: Limits) -> Array | None:
    """Decode a JPEG to the RGB pixels that Pillow decodes, in less time.

    Returns:
        None for other formats, rare kinds of JPEG and damage, which are left to Pillow, and without simplejpeg.

    Raises:
        OverLimit: The image has more than ``limits.pixels`` pixels.
    """
    if data[:3] != b"\xff\xd8\xff":
        return None
    try:
        import simplejpeg

        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        if colorspace not in ("YCbCr", "RGB", "Gray"):
            return None
        limits.check_pixels(width, height)
        pixels: Array = simplejpeg.decode_jpeg(data)
    except OverLimit:
        raise
    except (ImportError, ValueError, KeyError):
        return None
    return pixels


def _to_pil(value: Any, extension: str) -> Image.Image:
    """Convert an array or tensor to a PIL image."""
    array = as_array(value)
    if array is None:
        raise TypeError("an image must be a PIL image, an array or a tensor")
    if array.ndim == 3 and not isinstance(value, np.ndarray):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (2, 3, 4)) or not array.size:
        expected = "HW or HWC" if isinstance(value, np.ndarray) else "HW or CHW"
        raise ValueError(f"an image must have the shape {expected} with 1 to 4 channels, not {tuple(value.shape)}")
    image: Image.Image = _pillow().fromarray(np.ascontiguousarray(_integer_pixels(array, extension)))
    return image


def _integer_pixels(array: Array, extension: str) -> Array:
    """Return the pixels as integers that Pillow accepts."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind == "f":
        # The condition is false for NaN too; the tolerance is for interpolation that overshoots.
        if not (array.min() >= -0.001 and array.max() <= 1.001):
            raise ValueError(f"float pixels must be in 0..1, not {array.min()}..{array.max()}")
        rounded: Array = np.rint(np.clip(array, 0, 1) * 255).astype(np.uint8)
        return rounded
    if array.dtype == np.uint16 and array.ndim == 2 and extension in _WIDE_EXTENSIONS:
        return array.astype(np.uint16, copy=False)
    raise TypeError(
        f"pixels must be uint8, bool or float, or uint16 for gray {', '.join(_WIDE_EXTENSIONS)}; "
        f"not {array.dtype} of shape {array.shape} as {extension}"
    )


def _in_writable_mode(image: Image.Image, kind: str, extension: str) -> Image.Image:
    """Return the image in a mode that the format can store, if the conversion loses nothing.

    Raises:
        ValueError: The format can store the image only with loss.
    """
    if kind in _FORMATS_WITHOUT_ALPHA:
        if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
            raise ValueError(f"{extension} cannot store transparency; convert the image to RGB, or use png")
        if image.mode == "P":
            image = image.convert("RGB")
    if extension == "pgm" and image.mode not in ("1", "L", "I", "I;16"):
        raise ValueError(f"pgm stores only gray images, not mode {image.mode}")
    if extension == "pbm" and image.mode != "1":
        if image.mode != "L" or not set(np.unique(np.asarray(image))) <= {0, 255}:
            raise ValueError("pbm stores only black and white pixels: bool, or 0 and 255")
        image = image.convert("1", dither=_pillow().Dither.NONE)
    return image


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as exc:
        raise MissingExtra("images", "images") from exc
    return Image


def _torch() -> Any:
    return import_extra("torch", "decoding to torch tensors", "torch")
