"""Storing JPEGs in tiles without loss, by ``jpegtran``: the same coefficients, with restart markers.

A tile is a segment between two restart markers, some 32 to 64 pixels wide and as high as an MCU. Crops then decode only
the tiles that they need, see ``segments``. The file remains an ordinary JPEG for every other program.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import PlanError
from penstock.plan import Context, Map, Place, sample_error
from penstock.vision.decoding import simplejpeg
from penstock.vision.segments import JpegHeader, find_tiles, jpeg_header, with_lengths

# Narrower tiles leave out more of an image, but each costs some bytes: less, relatively, where they are 16 pixels high.
_TILE_WIDTH, _TILE_WIDTH_OF_HIGH, _MIN_TILE_WIDTH, _MAX_TILE_WIDTH = 64, 48, 32, 160
_WANTED_GROWTH = 1.02  # of a file: beyond it, tiles are wider, and lengths are not listed
_MAX_GROWTH = (
    1.2  # a file that grows more is mostly markers: a picture of few colours. Progressive ones grow by 5 to 10%
)


def tile_interval(width: int, mcu_width: int, mcu_height: int = 8) -> int:
    """Return how many MCUs a tile of an image should have: a divisor of its MCUs a row, or all of them."""
    best = _TILE_WIDTH if mcu_height == 8 else _TILE_WIDTH_OF_HIGH
    per_row = -(-width // mcu_width)
    divisors = [count for count in range(1, per_row + 1) if per_row % count == 0]
    wanted = [count for count in divisors if _MIN_TILE_WIDTH <= count * mcu_width <= _MAX_TILE_WIDTH]
    return min(wanted, key=lambda count: abs(count * mcu_width - best), default=per_row)


def tile_jpeg(data: bytes, *, verify: bool = False) -> bytes:
    """Return a JPEG in tiles: the same pixels, coefficients and metadata.

    A progressive JPEG becomes a baseline one, and Huffman codes are optimized, which both decode faster. Bytes after
    the end of the image are dropped. Data keep their bytes where tiles are of no use: images of one tile or in tiles
    already, other formats, rare kinds of JPEG, and damaged ones.

    Args:
        data: The file.
        verify: Decode both files, and compare their pixels.

    Raises:
        PlanError: jpegtran is not installed.
        ValueError: With ``verify``, the pixels differ.
    """
    header = jpeg_header(data) if data[:3] == b"\xff\xd8\xff" else None
    if header is None or not header.is_common:
        return data
    mcu_height, mcu_width = header.mcu_size
    interval = tile_interval(header.width, mcu_width, mcu_height)
    if not _gains(data, header, interval):
        return data
    tiled = _with_restarts(data, interval)
    wider = tile_interval(header.width, mcu_width)
    if tiled is not None and len(tiled) > _WANTED_GROWTH * len(data) and wider > interval:
        tiled = _with_restarts(data, wider)
    if tiled is None or len(tiled) > _MAX_GROWTH * len(data):
        return data
    if verify and not np.array_equal(*(simplejpeg().decode_jpeg(file, strict=False) for file in (data, tiled))):
        raise ValueError("the image has other pixels after jpegtran stored it in tiles; pack it without tiles")
    listed = with_lengths(tiled)
    return listed if len(listed) <= _WANTED_GROWTH * len(data) else tiled


def _with_restarts(data: bytes, interval: int) -> bytes | None:
    """Return a JPEG with a restart marker after every ``interval`` MCUs; ``None`` if jpegtran reports anything."""
    # "-copy all" keeps EXIF, profiles and comments.
    command = [find_jpegtran(), "-copy", "all", "-optimize", "-restart", f"{interval}B"]
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    return None if done.returncode or done.stderr else done.stdout


def _gains(data: bytes, header: JpegHeader, interval: int) -> bool:
    """Return whether the image is larger than a few tiles, and not in tiles of about this many MCUs already."""
    if max(header.height, header.width) <= 2 * _TILE_WIDTH:
        return False
    tiles = find_tiles(data, header)
    return tiles is None or tiles.width > max(_MAX_TILE_WIDTH, interval * header.mcu_size[1])


def find_jpegtran() -> str:
    """Return the path of jpegtran.

    Raises:
        PlanError: jpegtran is not installed.
    """
    path = shutil.which("jpegtran")
    if path is None:
        raise PlanError(
            "storing JPEGs in tiles needs the program jpegtran, which is not on PATH: "
            "apt-get install libjpeg-turbo-progs, or brew install jpeg-turbo"
        )
    return path


@dataclass(frozen=True)
class TileImages(Map):
    """Stores the JPEGs of samples in tiles, without loss, in whatever fields they are.

    Raises:
        PlanError: jpegtran is not installed.
    """

    verify: bool = False

    def __post_init__(self) -> None:
        find_jpegtran()

    @property
    def name(self) -> str:
        return "tiles"

    def function(self, ctx: Context) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return self._tile_sample

    def _tile_sample(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {
            name: tile_jpeg(value, verify=self.verify) if isinstance(value, bytes) else value
            for name, value in sample.items()
        }

    def failure(self, exc: Exception, place: Place) -> Exception:
        return sample_error(f"tiles: {exc}", place, exc)
