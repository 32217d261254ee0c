"""JPEGs with restart markers: where their segments lie, and parts of them as JPEGs of their own."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from penstock import vision
from penstock.vision.resampling import Pixels
from penstock.vision.segments import Box, Tiles, find_tiles, jpeg_header, with_lengths

NOISE = np.random.default_rng(2).integers(0, 256, (100, 200, 3), np.uint8)


def encoded(pixels: Pixels = NOISE, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=90, **options)
    return stream.getvalue()


def tiles_of(data: bytes) -> Tiles | None:
    header = jpeg_header(data)
    assert header is not None
    return find_tiles(data, header)


def test_the_header_says_what_pillow_says() -> None:
    data = encoded(subsampling="4:2:2", restart_marker_blocks=5)
    header = jpeg_header(data)
    assert header is not None
    assert (header.height, header.width, header.bits) == (100, 200, 8)
    assert header.sampling == (0x21, 0x11, 0x11)
    assert header.mcu_size == (8, 16)
    assert header.restart_interval == 5
    assert data[header.scan - 14 : header.scan - 12] == b"\xff\xda"
    gray = jpeg_header(encoded(NOISE[:, :, 0]))
    assert gray is not None
    assert gray.mcu_size == (8, 8)
    assert jpeg_header(data[: header.scan - 20]) is None
    assert jpeg_header(b"\xff\xd8\xff") is None


@pytest.mark.parametrize(
    ("options", "shape"),  # columns of a band, height of a band, width of a column
    [
        ({"subsampling": "4:4:4", "restart_marker_blocks": 5}, (5, 8, 40)),
        ({"subsampling": "4:4:4", "restart_marker_blocks": 25}, (1, 8, 200)),
        ({"subsampling": "4:4:4", "restart_marker_blocks": 10}, (5, 16, 200)),  # two rows are five segments
        ({"subsampling": "4:2:0", "restart_marker_rows": 2}, (1, 32, 200)),
        ({"subsampling": "4:2:0", "restart_marker_blocks": 1}, (13, 16, 16)),
    ],
)
def test_segments_form_bands_and_columns(options: dict[str, Any], shape: tuple[int, int, int]) -> None:
    tiles = tiles_of(encoded(**options))
    assert tiles is not None
    assert (tiles.columns, tiles.height, tiles.width) == shape


def test_any_rectangle_of_segments_is_a_jpeg() -> None:
    data = encoded(subsampling="4:4:4", restart_marker_blocks=5)
    tiles, whole = tiles_of(data), vision.read_image(data)
    assert tiles is not None
    assert tiles.covering(Box(17, 41, 23, 79)) == Box(16, 40, 24, 80)
    assert tiles.covering(Box(0, 39, 100, 41)) == Box(0, 0, 100, 80)
    for box in (Box(16, 40, 24, 80), Box(0, 0, 100, 80), Box(80, 160, 100, 200), Box(0, 0, 100, 200)):
        part = bytes(tiles.joined(data, box))
        want = whole[box.top : box.bottom, box.left : box.right]
        assert np.array_equal(simplejpeg.decode_jpeg(part), want)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(part))), want)
    assert bytes(tiles.joined(data, Box(0, 0, 100, 200))) == data


def test_a_file_without_the_expected_markers_has_no_tiles() -> None:
    data = encoded(restart_marker_blocks=13)
    at = data.index(b"\xff\xd3")
    assert tiles_of(data) is not None
    assert tiles_of(encoded()) is None
    assert tiles_of(encoded(progressive=True, restart_marker_blocks=13)) is None
    assert tiles_of(data[:at] + b"\xff\xd4" + data[at + 2 :]) is None
    assert tiles_of(data[:at] + data[at + 2 :]) is None
    assert tiles_of(data[:-2]) is None
    assert tiles_of(data[: len(data) // 2]) is None


def test_bytes_after_the_end_and_fill_bytes_are_not_markers() -> None:
    data = encoded(restart_marker_blocks=13)
    tiles = tiles_of(data)
    assert tiles is not None
    after = tiles_of(data + b"\0\xff\xd9\xff\xd0\0")
    assert after is not None
    assert np.array_equal(after.offsets, tiles.offsets)
    at = data.index(b"\xff\xd3")
    filled = data[:at] + b"\xff\xff" + data[at:]
    assert tiles_of(filled) is not None
    box = Box(48, 0, 80, 200)
    want = simplejpeg.decode_jpeg(tiles.joined(data, box))
    assert np.array_equal(simplejpeg.decode_jpeg(tiles_of(filled).joined(filled, box)), want)  # type: ignore[union-attr]


def test_listed_lengths_are_used_if_they_fit_the_file() -> None:
    data = encoded(subsampling="4:2:0", restart_marker_blocks=1)
    listed, tiles = with_lengths(data), tiles_of(data)
    found = tiles_of(listed)
    assert tiles is not None
    assert found is not None
    added = len(listed) - len(data)
    assert added == 10 + 2 * (len(tiles.offsets) - 1)
    assert np.array_equal(found.offsets, tiles.offsets + added)
    assert found.header.table_end - found.header.table == added - 10
    assert with_lengths(listed) == listed
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(listed))), np.asarray(Image.open(io.BytesIO(data))))
    for wrong in (b"\x01\x00", b"\xff\xff"):
        at = found.header.table + 6
        spoiled = listed[:at] + wrong + listed[at + 2 :]
        searched = tiles_of(spoiled)
        assert searched is not None
        assert np.array_equal(searched.offsets, found.offsets)
    assert tiles_of(listed[:-2]) is None
    at = listed.index(b"\xff\xd3", found.header.scan)
    assert tiles_of(listed[:at] + b"\xff\xd4" + listed[at + 2 :]) is None


def test_files_without_segments_or_with_too_many_list_no_lengths() -> None:
    assert with_lengths(b"\xff\xd8\xff") == b"\xff\xd8\xff"
    plain = encoded()
    assert with_lengths(plain) == plain
    flat = encoded(np.zeros((2000, 1400, 3), np.uint8), subsampling="4:4:4", restart_marker_blocks=1)
    assert tiles_of(flat) is not None
    assert with_lengths(flat) == flat
