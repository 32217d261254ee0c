"""Images of every kind, also unusual and damaged ones, behave as described in docs/guide/vision.md."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

import penstock as ps
from penstock import vision
from penstock.codecs import Limits, OverLimit
from penstock.vision.decoding import Truncated, open_encoded
from penstock.vision.resampling import Decoded, Pixels
from penstock.vision.segments import Box, exif_orientation


def pixels(height: int = 40, width: int = 60) -> Pixels:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 5 % 256, columns * 4 % 256, (rows + columns) * 2 % 256], axis=2).astype(np.uint8)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


PHOTO = Image.fromarray(pixels())
JPEG = saved(PHOTO, "JPEG", quality=95)


def rgb(image: Image.Image) -> Pixels:
    return np.asarray(image.convert("RGB"))


def exif(orientation: int, byte_order: str = "<") -> bytes:
    head = b"II*\0" if byte_order == "<" else b"MM\0*"
    entry = struct.pack(f"{byte_order}HHIHH", 0x0112, 3, 1, orientation, 0)
    return b"Exif\0\0" + head + struct.pack(f"{byte_order}IH", 8, 1) + entry + b"\0" * 4


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def jpeg_header(width: int, height: int) -> bytes:
    at = JPEG.index(b"\xff\xc0")
    return JPEG[: at + 5] + struct.pack(">HH", height, width) + JPEG[at + 9 :]


def test_a_jpeg_has_pillows_pixels() -> None:
    assert np.array_equal(vision.read_image(JPEG), rgb(Image.open(io.BytesIO(JPEG))))


GRAY = PHOTO.convert("L")
DEEP = Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60) * 27)
ALPHA = PHOTO.convert("RGBA")
ALPHA.putalpha(GRAY)
FRAMES = [PHOTO, PHOTO.transpose(Image.Transpose.ROTATE_180)]

FINE: dict[str, tuple[bytes, Callable[[], Pixels]]] = {
    "png": (saved(PHOTO, "PNG"), lambda: pixels()),
    "webp": (saved(PHOTO, "WEBP", lossless=True), lambda: pixels()),
    "gray jpeg": (saved(GRAY, "JPEG"), lambda: rgb(Image.open(io.BytesIO(saved(GRAY, "JPEG"))))),
    "progressive jpeg": (
        saved(PHOTO, "JPEG", progressive=True),
        lambda: rgb(Image.open(io.BytesIO(saved(PHOTO, "JPEG", progressive=True)))),
    ),
    "cmyk jpeg": (
        saved(PHOTO.convert("CMYK"), "JPEG", quality=95),
        lambda: rgb(Image.open(io.BytesIO(saved(PHOTO.convert("CMYK"), "JPEG", quality=95)))),
    ),
    "16-bit png": (
        saved(DEEP, "PNG"),
        lambda: np.repeat(np.rint(np.asarray(DEEP) / 257).astype(np.uint8)[..., None], 3, axis=2),
    ),
    "png with alpha": (saved(ALPHA, "PNG"), lambda: pixels()),
    "png with a palette": (
        saved(PHOTO.quantize(16), "PNG"),
        lambda: rgb(PHOTO.quantize(16)),
    ),
    "png of one bit": (saved(PHOTO.convert("1"), "PNG"), lambda: rgb(PHOTO.convert("1"))),
    "animated webp": (
        saved(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:], lossless=True),
        lambda: pixels(),
    ),
    "one pixel": (saved(PHOTO.crop((0, 0, 1, 1)), "PNG"), lambda: pixels()[:1, :1]),
    "jpeg with bytes after it": (JPEG + b"\0" * 100, lambda: rgb(Image.open(io.BytesIO(JPEG)))),
}

REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not an image: the field is empty"),
    "text": (b"<html>not found</html>", "not an image"),
    "a jpeg cut short": (JPEG[: len(JPEG) - 200], "damaged or truncated JPEG.*[Pp]remature end"),
    "a jpeg cut in its header": (JPEG[:60], "damaged or truncated JPEG"),
    "a png cut in half": (saved(PHOTO, "PNG")[:-40], "damaged or truncated PNG"),
    "a webp cut in half": (saved(PHOTO, "WEBP", quality=90)[:-40], "damaged or truncated WEBP"),
    "a png of 30,000 x 30,000": (png_header(30_000, 30_000), "30000x30000 pixels exceeds the limit"),
    "a jpeg of 30,000 x 30,000": (jpeg_header(30_000, 30_000), "30000x30000 pixels exceeds the limit"),
    "zeros": (bytes(1000), "not an image"),
}


@pytest.mark.parametrize("kind", FINE)
def test_an_unusual_image_is_read(kind: str) -> None:
    data, want = FINE[kind]
    got = vision.read_image(data)
    assert got.dtype == np.uint8
    assert got.flags.c_contiguous
    assert np.array_equal(got, want())


@pytest.mark.parametrize("kind", FINE)
def test_an_image_with_a_wrong_extension_is_cropped(kind: str) -> None:
    ds = ps.from_items([{"__key__": "a", "jpg": FINE[kind][0]}]).decode(jpg=vision.RandomResizedCrop(24, flip=True))
    assert ds.first()["jpg"].shape == (24, 24, 3)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_damaged_image_is_an_error_with_shard_and_key(kind: str) -> None:
    data, problem = REFUSED[kind]
    ds = ps.from_items([{"__key__": "bad-one", "jpg": data}]).decode(jpg=vision.Resize(16))
    with pytest.raises(ps.errors.DataError, match=problem) as caught:
        ds.first()
    assert caught.value.key == "bad-one"
    assert caught.value.shard is not None
    assert "field 'jpg'" in str(caught.value)
    assert list(ds.on_error("skip")) == []


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_is_made_upright(kind: str, orientation: int) -> None:
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    data = saved(PHOTO, kind, exif=exif(orientation)[6 if kind == "PNG" else 0 :], **options)
    want = rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(vision.read_image(data), want)
    height, width = want.shape[:2]
    assert np.array_equal(vision.CenterCrop((height, width))(data), want)


@pytest.mark.parametrize(
    ("data", "orientation"),
    [(exif(6), 6), (exif(6, ">"), 6), (exif(9), 1), (b"Exif\0\0", 1), (exif(6)[:20], 1), (b"garbage", 1), (None, 1)],
)
def test_an_invalid_orientation_is_upright(data: bytes | None, orientation: int) -> None:
    assert exif_orientation(data) == orientation


def test_a_truncated_jpeg_is_decoded_in_part_on_request() -> None:
    whole, partial = vision.read_image(JPEG), vision.read_image(JPEG[: len(JPEG) - 200], truncated="partial")
    assert partial.shape == whole.shape
    assert np.array_equal(partial[:8], whole[:8])
    assert not np.array_equal(partial[-8:], whole[-8:])
    assert vision.Resize(16, truncated="partial")(JPEG[: len(JPEG) - 200]).shape == (16, 24, 3)


def test_extraneous_bytes_are_ignored() -> None:
    at = JPEG.rindex(b"\xff\xd9")
    assert np.array_equal(vision.read_image(JPEG[:at] + b"\x12\x34" + JPEG[at:]), vision.read_image(JPEG))


def test_limits_of_decode_reach_the_transform() -> None:
    ds = ps.from_items([{"jpg": JPEG}])
    with pytest.raises(ps.errors.DataError, match="60x40 pixels exceeds the limit of 2399"):
        ds.decode(jpg=vision.CenterCrop(8), limits=ps.Limits(pixels=2399)).first()
    assert ds.decode(jpg=vision.CenterCrop(8), limits=ps.Limits(pixels=2400)).first()["jpg"].shape == (8, 8, 3)
    with pytest.raises(OverLimit):
        vision.read_image(JPEG, limits=ps.Limits(pixels=10))


@pytest.mark.parametrize("truncated", ["error", "partial"])
def test_a_large_jpeg_is_reduced_while_it_is_decoded(truncated: Truncated, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    decode = simplejpeg.decode_jpeg

    def recorded_decode(*args: Any, **options: Any) -> Any:
        shapes.append((out := decode(*args, **options)).shape)
        return out

    monkeypatch.setattr(simplejpeg, "decode_jpeg", recorded_decode)
    smooth = Image.fromarray(pixels(75, 101)).resize((801, 603), Image.Resampling.BICUBIC)
    data = saved(smooth, "JPEG", quality=95)
    rng = np.random.default_rng
    crop = vision.RandomResizedCrop(48, scale=(0.7, 0.9), flip=True, truncated=truncated)
    reduced = crop(data, rng(3))
    exact = crop(vision.read_image(data), rng(3))
    assert shapes == [(151, 201, 3), (603, 801, 3)]
    difference = np.abs(reduced.astype(int) - exact)
    assert np.percentile(difference, 99.9) <= 3
    assert difference.mean() < 0.5


NOISE = np.random.default_rng(5).integers(0, 256, (150, 130, 3), np.uint8)


def noise(subsampling: str, **restart: int) -> bytes:
    gray = subsampling == "Gray"
    options = {"colorspace": "GRAY"} if gray else {}
    if restart:
        picture = Image.fromarray(NOISE[:, :, 0] if gray else NOISE)
        sampling = {} if gray else {"subsampling": f"4:{subsampling[1]}:{subsampling[2]}"}
        return saved(picture, "JPEG", quality=85, **sampling, **restart)
    image = np.ascontiguousarray(NOISE[:, :, :1]) if gray else NOISE
    encoded: bytes = simplejpeg.encode_jpeg(image, quality=85, colorsubsampling=subsampling, **options)
    return encoded


def with_orientation(data: bytes, orientation: int) -> bytes:
    segment = exif(orientation)
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]


PLAIN: list[tuple[str, dict[str, int]]] = [
    (subsampling, {}) for subsampling in ("444", "422", "420", "440", "411", "Gray")
]
# 17 or 9 MCUs a row: columns of three, bands of three rows without columns, single rows, bands of two rows.
TILED = [(subsampling, {"restart_marker_blocks": n}) for subsampling in ("444", "422", "420", "Gray") for n in (1, 3)]
TILED += [(subsampling, {"restart_marker_rows": n}) for subsampling in ("420", "Gray") for n in (1, 2)]


@pytest.mark.parametrize(("subsampling", "restart"), PLAIN + TILED)
@pytest.mark.parametrize("shrink_factor", [1, 5, 10, 20])
def test_a_part_has_the_same_pixels_as_in_the_whole(
    subsampling: str, shrink_factor: float, restart: dict[str, int]
) -> None:
    rng = np.random.default_rng(int(shrink_factor))
    decoded_in_part = 0
    for orientation in range(1, 9):
        data = with_orientation(noise(subsampling, **restart), orientation)
        image = open_encoded(data, Limits(), "error")
        height, width = image.size
        whole, factor, *_ = image.decode(shrink_factor)
        for _ in range(6):
            top, left = int(rng.integers(height)), int(rng.integers(width))
            bottom, right = int(rng.integers(top, height)) + 1, int(rng.integers(left, width)) + 1
            decoded = image.decode(shrink_factor, Box(top, left, bottom, right))
            rows = slice(top // factor, -(-bottom // factor))
            columns = slice(left // factor, -(-right // factor))
            assert decoded.factor == factor
            assert np.array_equal(_inside(decoded, rows, columns), whole[rows, columns])
            decoded_in_part += decoded.pixels.size < whole.size
    assert decoded_in_part > 16  # of 48


def _inside(decoded: Decoded, rows: slice, columns: slice) -> Pixels:
    """Return rows and columns of an image of which a part was decoded."""
    top, left = decoded.top, decoded.left
    return decoded.pixels[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]


def top_of(data: bytes, truncated: Truncated = "error") -> Pixels:
    """Decode the first 40 rows of an image only."""
    image = open_encoded(data, Limits(), truncated)
    return image.decode(1, Box(0, 0, 40, 130)).pixels[:40]


def test_a_jpeg_truncated_below_the_part_is_an_error() -> None:
    data = noise("420")
    with pytest.raises(ValueError, match=r"damaged or truncated JPEG.*[Pp]remature end"):
        top_of(data[:-2000])
    assert np.array_equal(top_of(data[:-2000], "partial"), top_of(data))


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_stray_marker_within_the_part_or_below_it_is_an_error(share: float) -> None:
    data = noise("420")
    at = int(share * len(data))
    with pytest.raises(ValueError, match="damaged or truncated JPEG"):
        top_of(data[:at] + b"\xff\xd3" + data[at + 2 :])


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_rows": 1}, {"restart_marker_blocks": 3}])
def test_progressive_and_tiled_jpegs_that_are_truncated_are_errors(options: dict[str, Any]) -> None:
    data = saved(Image.fromarray(NOISE), "JPEG", **options)
    assert np.array_equal(top_of(data), vision.read_image(data)[:40])
    with pytest.raises(ValueError, match="damaged or truncated JPEG"):
        top_of(data[:-2000])
    assert top_of(data[:-2000], "partial").shape == (40, 130, 3)


def test_damage_in_a_tile_is_an_error_where_the_tile_is_needed() -> None:
    data = saved(Image.fromarray(NOISE), "JPEG", restart_marker_blocks=3)
    whole = open_encoded(data, Limits(), "error").decode(1, Box(0, 0, 150, 130)).pixels
    marker = data.index(b"\xff\xd2")  # after the third segment, which is at the top right
    damaged = data[: marker - 60] + data[marker:]
    with pytest.raises(ValueError, match="damaged or truncated JPEG"):
        open_encoded(damaged, Limits(), "error").decode(1, Box(0, 100, 10, 130))
    decoded = open_encoded(damaged, Limits(), "error").decode(1, Box(60, 0, 90, 40))
    assert np.array_equal(_inside(decoded, slice(60, 90), slice(0, 40)), whole[60:90, :40])
