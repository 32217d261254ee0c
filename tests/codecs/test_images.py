"""Images: specs, stored modes, limits, damage, encoding."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image, ImageChops
from webdataset import autodecode

from penstock.codecs import images
from penstock.codecs.limits import Limits, OverLimit
from penstock.errors import MissingExtra

Array = npt.NDArray[Any]
LIMITS = Limits()


def picture(mode: str, size: tuple[int, int] = (13, 9)) -> Image.Image:
    """Return an image with colour, gradients, and transparency where the mode has it."""
    width, height = size
    down, across = np.mgrid[0:height, 0:width]
    rgba = np.stack([across * 19, down * 27, across * down * 2, 255 - across * 7], axis=2).astype(np.uint8)
    colour = Image.fromarray(rgba)
    if mode == "I;16":
        return Image.fromarray((across * 5000).astype(np.uint16))
    if mode == "P":
        return colour.convert("RGB").quantize(16)
    return colour.convert(mode)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def decode(data: bytes, spec: str | None = None, limits: Limits = LIMITS) -> Any:
    return images.image_decoder(spec, limits)(data)


def palette_with_alphas() -> bytes:
    return saved(picture("P"), "PNG", transparency=bytes(range(0, 256, 16)))


def palette_with_one_transparent_color() -> bytes:
    return saved(picture("P"), "PNG", transparency=3)


FILES: dict[str, bytes] = {
    "jpeg": saved(picture("RGB"), "JPEG"),
    "gray jpeg": saved(picture("L"), "JPEG"),
    "cmyk jpeg": saved(picture("CMYK"), "JPEG"),
    "png": saved(picture("RGB"), "PNG"),
    "rgba png": saved(picture("RGBA"), "PNG"),
    "gray png": saved(picture("L"), "PNG"),
    "gray alpha png": saved(picture("LA"), "PNG"),
    "bit png": saved(picture("1"), "PNG"),
    "palette png": saved(picture("P"), "PNG"),
    "palette png with alphas": palette_with_alphas(),
    "palette png with a transparent color": palette_with_one_transparent_color(),
    "rgb png with a transparent color": saved(picture("RGB"), "PNG", transparency=(0, 0, 0)),
    "gif": saved(picture("P"), "GIF"),
    "ppm": saved(picture("RGB"), "PPM"),
    "pgm": saved(picture("L"), "PPM"),
    "pbm": saved(picture("1"), "PPM"),
    "bmp": saved(picture("RGB"), "BMP"),
    "tiff": saved(picture("RGB"), "TIFF"),
    "webp": saved(picture("RGBA"), "WEBP", lossless=True),
    "lossy webp": saved(picture("RGB"), "WEBP"),
    "jp2": saved(picture("RGB"), "JPEG2000"),
    "avif": saved(picture("RGB", (32, 32)), "AVIF"),
}


def test_every_spec_of_webdataset_is_known() -> None:
    assert set(autodecode.imagespecs) <= set(images.IMAGE_SPECS)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")  # WebDataset's, not ours
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("spec", autodecode.imagespecs)
def test_every_spec_decodes_to_what_webdataset_decodes(spec: str, name: str) -> None:
    expected = autodecode.ImageHandler(spec)(".png", FILES[name])
    actual = decode(FILES[name], spec)
    if isinstance(expected, Image.Image):
        assert actual.mode == expected.mode
        assert ImageChops.difference(actual, expected).getbbox() is None
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    else:
        assert actual.dtype == expected.dtype
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("jpeg", (9, 13, 3)),
        ("gray jpeg", (9, 13)),
        ("cmyk jpeg", (9, 13, 3)),
        ("png", (9, 13, 3)),
        ("rgba png", (9, 13, 4)),
        ("gray png", (9, 13)),
        ("gray alpha png", (9, 13, 2)),
        ("bit png", (9, 13)),
        ("palette png", (9, 13, 3)),
        ("palette png with alphas", (9, 13, 4)),
        ("palette png with a transparent color", (9, 13, 4)),
        ("gif", (9, 13, 3)),
        ("pbm", (9, 13)),
        ("tiff", (9, 13, 3)),
        ("webp", (9, 13, 4)),
    ],
)
def test_without_a_spec_an_image_is_decoded_as_stored(name: str, shape: tuple[int, ...]) -> None:
    array = decode(FILES[name])
    assert array.dtype == np.uint8
    assert array.shape == shape
    assert array.flags.writeable
    assert array.flags.c_contiguous


def test_stored_pixels_are_exact() -> None:
    assert np.array_equal(decode(FILES["png"]), np.asarray(picture("RGB")))
    assert np.array_equal(decode(FILES["rgba png"]), np.asarray(picture("RGBA")))
    assert set(np.unique(decode(FILES["bit png"]))) == {0, 255}
    assert np.array_equal(decode(FILES["palette png"]), np.asarray(picture("P").convert("RGB")))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_gray_stays_uint16(kind: str) -> None:
    array = decode(saved(picture("I;16"), kind))
    assert array.dtype == np.uint16
    assert array.dtype.isnative
    assert np.array_equal(array, np.asarray(picture("I;16")))


def test_big_endian_tiff_is_decoded_to_native_byte_order() -> None:
    pixels = np.array([[1, 300, 65535]], np.uint16)
    tags = [(256, 3), (257, 1), (258, 16), (259, 1), (262, 1), (273, 8), (277, 1), (278, 1), (279, 6)]
    entries = b"".join(struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    data = b"MM\0*" + struct.pack(">I", 14) + pixels.astype(">u2").tobytes()
    data += struct.pack(">H", len(tags)) + entries + bytes(4)
    array = decode(data)
    assert array.dtype == np.uint16
    assert array.dtype.isnative
    assert np.array_equal(array, pixels)


def test_float_pixels_of_tiff_stay_floats() -> None:
    pixels = np.linspace(-1, 2, 12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(decode(saved(Image.fromarray(pixels), "TIFF")), pixels)


def test_wide_pixels_are_not_silently_clipped_to_white() -> None:
    with pytest.raises(ValueError, match=r"I;16 has pixel values in 0\.\.60000, which do not fit into 8 bits"):
        decode(saved(picture("I;16"), "PNG"), "rgb8")
    labels = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert np.array_equal(decode(saved(Image.fromarray(labels), "PNG"), "l8"), labels)


@pytest.mark.parametrize("spec", images.IMAGE_SPECS)
def test_results_share_no_memory(spec: str) -> None:
    decoder = images.image_decoder(spec, LIMITS)
    first, second = decoder(FILES["png"]), decoder(FILES["png"])
    if isinstance(first, Image.Image):
        first.putpixel((0, 0), 7 if first.mode == "L" else (7,) * len(first.getbands()))
        assert first.getpixel((0, 0)) != second.getpixel((0, 0))
    else:
        first[...] = 7
        assert not (second == 7).all()


@pytest.mark.parametrize(("spec", "mode"), [("pil8", "RGB"), ("pilrgb8", "RGB"), ("pill8", "L")])
def test_a_pil_spec_may_end_in_8(spec: str, mode: str) -> None:
    assert decode(FILES["jpeg"], spec).mode == mode


@pytest.mark.parametrize("name", ["jpeg", "png", "gray png"])
def test_pil_images_can_be_pickled(name: str) -> None:
    image = decode(FILES[name], "pil")
    assert ImageChops.difference(pickle.loads(pickle.dumps(image)), image).getbbox() is None


def test_only_the_first_of_several_frames_is_decoded() -> None:
    frames = [picture("L").point(lambda v, n=n: v // (1 + n)) for n in range(3)]
    for kind in ("GIF", "TIFF", "PNG", "WEBP"):
        data = saved(frames[0].convert("RGB"), kind, save_all=True, append_images=frames[1:], lossless=True)
        assert decode(data, "l8").shape == (9, 13)
        assert np.abs(decode(data, "l8").astype(int) - np.asarray(frames[0])).max() <= 1


def test_the_exif_orientation_is_not_applied_and_bad_exif_does_not_warn() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(saved(picture("RGB"), "JPEG", exif=exif)).shape == (9, 13, 3)
    # One entry whose value is far beyond the end.
    bad = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x011A, 5, 40, 60_000) + bytes(4)
    jpeg = FILES["jpeg"]
    assert jpeg[2:4] == b"\xff\xe0"
    skip = 4 + struct.unpack(">H", jpeg[4:6])[0]  # without the segment that holds the resolution
    data = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(bad) + 2) + bad + jpeg[skip:]
    assert decode(data).shape == (9, 13, 3)


def png_declaring(width: int, height: int) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def webp_declaring(width: int, height: int) -> bytes:
    canvas = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + canvas
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("make", [png_declaring, webp_declaring])
@pytest.mark.parametrize("spec", [None, "rgb8", "pil", "torch"])
def test_an_image_bomb_is_refused(make: Any, spec: str | None) -> None:
    with pytest.raises(OverLimit, match=r"image of 30000x30000 pixels exceeds the limit of 179000000 pixels; .*"):
        decode(make(30_000, 30_000), spec)


@pytest.mark.parametrize("size", [(10_000, 10_000), (13_000, 13_000)])
def test_pillows_warning_about_large_images_does_not_appear(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="damaged or truncated PNG"):
        decode(png_declaring(*size))


def test_the_limit_may_exceed_pillows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert decode(FILES["png"]).shape == (9, 13, 3)
    assert decode(FILES["jpeg"], "pil").size == (13, 9)


@pytest.mark.parametrize("name", FILES)
def test_the_limit_applies_to_every_format(name: str) -> None:
    with pytest.raises(OverLimit, match="exceeds the limit of 116 pixels"):
        decode(FILES[name], limits=Limits(pixels=13 * 9 - 1))


def test_the_size_of_every_kind_of_webp_is_read_before_it_is_opened() -> None:
    for data in (FILES["webp"], FILES["lossy webp"], saved(picture("RGBA"), "WEBP")):
        assert images._webp_size(data) == (13, 9)


@pytest.mark.parametrize("name", ["jpeg", "png", "gif", "bmp", "ppm", "webp", "tiff", "jp2", "avif"])
@pytest.mark.parametrize("spec", [None, "rgb8", "pil", "torchrgb"])
def test_a_truncated_image_is_an_error(name: str, spec: str | None) -> None:
    big = saved(picture("RGB", (200, 150)), {"jp2": "JPEG2000"}.get(name, name.upper()))
    for cut in (len(big) // 2, 20, len(big) * 9 // 10):
        with pytest.raises(ValueError, match=r"damaged or truncated \w+ image: "):
            decode(big[:cut], spec)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"hello", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"RIFF\0\0\0\0WAVE", FILES["png"][1:], b"<svg/>"],
)
def test_data_that_is_not_an_image_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not an image \(JPEG, PNG, .*it starts with"):
        decode(data)


@given(st.sampled_from(sorted(FILES)), st.data())
def test_corrupted_data_decodes_to_an_image_or_raises_value_error(name: str, data: st.DataObject) -> None:
    corrupted = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        corrupted[data.draw(st.integers(0, len(corrupted) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert isinstance(decode(bytes(corrupted), limits=Limits(pixels=10_000)), np.ndarray)
    except ValueError:
        pass
    except UserWarning as warning:  # damaged TIFF tags: Pillow's own, an exception only because tests make it one
        pytest.fail(f"unexpected warning: {warning}")


def test_decoders_can_be_shared_by_threads_and_pickled() -> None:
    decoder = pickle.loads(pickle.dumps(images.image_decoder("rgb8", LIMITS)))
    expected = {name: decoder(data).tobytes() for name, data in FILES.items()}
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            results = dict(zip(FILES, pool.map(decoder, FILES.values()), strict=True))
            assert {name: array.tobytes() for name, array in results.items()} == expected


def test_opening_an_image_does_not_decode_its_pixels() -> None:
    pixels = FILES["jpeg"].index(b"\xff\xda") + 14
    image = images.open_image(FILES["jpeg"][:pixels], LIMITS)
    assert image.size == (13, 9)
    with pytest.raises(ValueError, match="truncated JPEG"):
        images.load_image(image)


pixels = hnp.arrays(
    np.uint8,
    st.tuples(st.integers(1, 9), st.integers(1, 9)) | st.tuples(*[st.integers(1, 9)] * 2, st.just(3)),
)


@given(pixels, st.sampled_from(["png", "bmp", "ppm", "pnm", "tif", "tiff", "webp", "jp2"]))
def test_lossless_formats_round_trip_pixels(array: Array, extension: str) -> None:
    back = decode(images.encode_image(array, extension), "l8" if array.ndim == 2 else "rgb8")
    assert np.array_equal(back, array)


@pytest.mark.parametrize("extension", ["png", "tif", "webp"])
def test_transparency_round_trips(extension: str) -> None:
    array = np.array(picture("RGBA"))
    array[0, :, 3] = 0  # the colour of fully transparent pixels is kept too
    assert np.array_equal(decode(images.encode_image(array, extension)), array)


def test_two_channels_are_gray_with_alpha() -> None:
    array = np.asarray(picture("LA"))
    assert np.array_equal(decode(images.encode_image(array, "png")), array)


@pytest.mark.parametrize("extension", ["png", "tif", "pgm", "pnm"])
def test_sixteen_bit_gray_round_trips(extension: str) -> None:
    array = np.asarray(picture("I;16"))
    back = decode(images.encode_image(array, extension))
    assert back.dtype == np.uint16
    assert np.array_equal(back, array)


@pytest.mark.parametrize("extension", ["png", "pbm", "pgm", "jpg"])
def test_bools_become_black_and_white(extension: str) -> None:
    array = np.zeros((16, 16), bool)
    array[:8] = True
    assert np.array_equal(decode(images.encode_image(array, extension)) > 127, array)


def test_float_pixels_round_trip_to_the_same_bytes() -> None:
    array = np.arange(256, dtype=np.uint8).reshape(16, 16)
    floats = decode(images.encode_image(array, "png"), "l")
    assert np.array_equal(decode(images.encode_image(floats, "png")), array)
    assert np.array_equal(decode(images.encode_image(floats.astype(np.float64), "png")), array)
    assert decode(images.encode_image(np.full((1, 1), 0.999), "png")) == 255


@pytest.mark.parametrize("spec", ["torchrgb8", "torchrgb", "torchl8", "torchrgba8"])
def test_tensors_round_trip(spec: str) -> None:
    tensor = decode(FILES["rgba png"], spec)
    assert torch.equal(decode(images.encode_image(tensor, "png"), spec), tensor)


def test_an_axis_of_one_channel_is_gray() -> None:
    gray = np.asarray(picture("L"))
    assert np.array_equal(decode(images.encode_image(gray[:, :, None], "png")), gray)
    assert np.array_equal(decode(images.encode_image(torch.from_numpy(gray.copy())[None], "png")), gray)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
def test_pil_images_are_encoded_in_every_mode_that_jpeg_supports(mode: str) -> None:
    image = picture(mode, (64, 48))
    back = decode(images.encode_image(image, "jpg"), "l8")
    assert np.abs(back.astype(int) - np.asarray(image.convert("L"))).mean() < 6


def test_jpeg_keeps_colour_at_full_resolution() -> None:
    data = images.encode_image(np.asarray(picture("RGB", (64, 48))), "jpg")
    image = Image.open(io.BytesIO(data))
    assert image.format == "JPEG"
    assert [layer[1:3] for layer in image.layer] == [(1, 1)] * 3  # type: ignore[attr-defined]
    assert np.abs(decode(data).astype(int) - np.asarray(picture("RGB", (64, 48)))).mean() < 3


def test_an_array_in_any_memory_order_is_encoded() -> None:
    array = np.asarray(picture("RGB"))
    assert np.array_equal(decode(images.encode_image(array[::-1, ::-1], "png")), array[::-1, ::-1])
    assert np.array_equal(decode(images.encode_image(np.asfortranarray(array), "png")), array)


RGB = np.zeros((4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    ("value", "extension", "problem"),
    [
        ("a.png", "png", "PIL image, an array or a tensor"),
        ([[1]], "png", "PIL image, an array or a tensor"),
        (np.zeros((4, 4), np.int64), "png", "int64"),
        (np.zeros((4, 4), np.uint16), "jpg", "uint16"),
        (np.zeros((4, 4, 3), np.uint16), "png", "uint16"),
        (np.zeros((4, 4, 5), np.uint8), "png", r"HW or HWC .*not \(4, 4, 5\)"),
        (np.zeros((4,), np.uint8), "png", "shape"),
        (np.zeros((0, 4), np.uint8), "png", "shape"),
        (torch.zeros((5, 4, 3), dtype=torch.uint8), "png", "CHW"),
        (np.full((4, 4), 2.0), "png", r"0\.\.1"),
        (np.full((4, 4), np.nan), "png", r"0\.\.1"),
        (picture("RGBA"), "jpg", "jpg cannot store transparency"),
        (Image.open(io.BytesIO(palette_with_alphas())), "jpg", "jpg cannot store transparency"),
        (np.zeros((4, 4, 4), np.uint8), "ppm", "ppm cannot store transparency"),
        (RGB, "pgm", "pgm stores only gray"),
        (RGB, "pbm", "pbm stores only black and white"),
        (np.full((4, 4), 3, np.uint8), "pbm", "pbm stores only black and white"),
        (RGB, "gif", "cannot be written as gif"),
        (Image.fromarray(np.zeros((4, 4), np.float32)), "png", "mode F cannot be written as png"),
    ],
)
def test_a_value_that_cannot_be_written_is_refused(value: Any, extension: str, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        images.encode_image(value, extension)


@pytest.mark.parametrize(("package", "spec", "extra"), [("PIL", None, "images"), ("torch", "torch", "torch")])
def test_a_missing_package_is_named_when_the_decoder_is_built(
    monkeypatch: pytest.MonkeyPatch, package: str, spec: str | None, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"penstock\[{extra}\]"):
        images.image_decoder(spec, LIMITS)
