"""JPEGs that jpegtran stores in tiles: nothing is lost, and every part decodes to the pixels of the whole."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
import webdataset
from PIL import Image

import penstock as ps
from penstock import vision
from penstock.cli import main
from penstock.codecs import Limits
from penstock.errors import PlanError
from penstock.vision.decoding import open_encoded
from penstock.vision.resampling import Pixels
from penstock.vision.segments import Box, find_tiles, jpeg_header
from penstock.vision.tiles import TileImages, tile_interval

FULL = os.environ.get("PENSTOCK_FULL") == "1"
PHOTOS = 500 if FULL else 4
BOXES = 2000 if FULL else 60  # of all photos and odd images together
SAMPLINGS = ("444", "422", "420", "440", "411", "Gray")


def photo(seed: int, height: int = 0, width: int = 0) -> Pixels:
    """Draw what photos have: smooth shades, edges, texture and grain."""
    rng = np.random.default_rng(seed)
    height, width = height or int(rng.integers(180, 420)), width or int(rng.integers(180, 520))
    shades = cv2.resize(rng.integers(0, 256, (6, 8, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
    texture = cv2.resize(rng.normal(0, 25, (height // 3 + 1, width // 3 + 1)), (width, height))
    rows, columns = np.mgrid[:height, :width]
    edges = 60 * ((rows * rng.uniform(0.2, 1) + columns) // rng.integers(20, 60) % 2)
    image = shades + (texture + edges)[:, :, None] + rng.normal(0, 4, (height, width, 3))
    out: Pixels = np.clip(image, 0, 255).astype(np.uint8)
    return out


@cache
def found_photos() -> list[bytes]:
    """Return JPEGs as many programs wrote them: the pictures in Debian's package of OpenCV's manual."""
    folder = Path(tempfile.gettempdir()) / "penstock-opencv-doc"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
            subprocess.run(["apt-get", "download", "opencv-doc"], cwd=draft, check=True, capture_output=True)
            (package,) = Path(draft).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", package, f"{draft}/files"], check=True)
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(f"{draft}/files", folder)
    files = (path.read_bytes() for path in sorted(folder.rglob("*.jpg")) if path.is_file())
    found = [data for data in dict.fromkeys(files) if (header := jpeg_header(data)) and min(header[4:6]) > 128]
    return found[:: len(found) // PHOTOS][:PHOTOS]


def encoded(pixels: Pixels, sampling: str = "420", quality: int = 90) -> bytes:
    gray = sampling == "Gray"
    options = {"colorspace": "GRAY"} if gray else {}
    image = np.ascontiguousarray(pixels[:, :, :1]) if gray else pixels
    jpeg: bytes = simplejpeg.encode_jpeg(image, quality=quality, colorsubsampling=sampling, **options)
    return jpeg


def saved(image: Image.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", **{"quality": 90, **options})
    return stream.getvalue()


def with_orientation(data: bytes, orientation: int) -> bytes:
    exif = b"Exif\0\0II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + data[2:]


def by_opencv(interval: int) -> bytes:
    return cv2.imencode(".jpg", photo(3, 170, 240), [cv2.IMWRITE_JPEG_RST_INTERVAL, interval])[1].tobytes()


def by_cjpeg(rows: str) -> bytes:
    ppm = b"P6 240 170 255\n" + photo(4, 170, 240).tobytes()
    command = ["cjpeg", "-restart", rows, "-sample", "2x1", "-optimize"]
    return subprocess.run(command, input=ppm, capture_output=True, check=True).stdout


def odd_images() -> dict[str, bytes]:
    image = Image.fromarray(photo(1, 150, 210))
    odd = {f"sampling {sampling}": encoded(photo(2, 150, 330), sampling) for sampling in SAMPLINGS}
    odd |= {f"{129 + n} x {200 - n}": encoded(photo(n, 129 + n, 200 - n), SAMPLINGS[n % 6]) for n in range(16)}
    odd |= {f"orientation {n}": with_orientation(encoded(photo(n, 150, 210)), n) for n in range(1, 9)}
    odd |= {f"progressive {n}": saved(image, progressive=True, subsampling=n) for n in (0, 1, 2)}
    odd |= {f"restart every {n} rows": saved(image, restart_marker_rows=n) for n in (1, 3)}
    odd |= {f"restart every {n} blocks": saved(image, restart_marker_blocks=n) for n in (1, 5, 7, 14)}
    odd |= {"restart markers by OpenCV": by_opencv(5), "restart markers by cjpeg": by_cjpeg("2"), "CMYK": CMYK}
    odd |= {"tiles, trailing bytes": saved(image, restart_marker_blocks=2) + b"\xff\xd0\xff\xd9" * 9}
    odd |= {"CMYK, restart markers": saved(image.convert("CMYK"), restart_marker_blocks=3)}
    odd |= {"one pixel": encoded(photo(1, 1, 1)), "one row": encoded(photo(1, 2, 900)[:1])}
    odd |= {"gray, progressive": saved(image.convert("L"), progressive=True)}
    odd |= {"a prime number of MCUs": encoded(photo(3, 100, 16 * 31)), "trailing bytes": encoded(photo(4)) + b"\0" * 99}
    return odd


CMYK = saved(Image.fromarray(photo(5)).convert("CMYK"))
ODD = odd_images()
TRUNCATED = encoded(photo(6))[:-900]


def coefficients(data: bytes) -> bytes:
    """Return what jpegtran makes of the coefficients and quantization tables alone."""
    command = ["jpegtran", "-copy", "none", "-optimize"]
    return subprocess.run(command, input=data, capture_output=True, check=True).stdout


def is_tiled(data: bytes) -> bool:
    header = jpeg_header(data)
    return header is not None and find_tiles(data, header) is not None


def check_boxes(data: bytes, tiled: bytes, boxes: int, rng: np.random.Generator) -> None:
    """Compare parts of the tiled image with the same parts of the original, decoded whole, at every reduction."""
    original, image = open_encoded(data, Limits(), "error"), open_encoded(tiled, Limits(), "error")
    height, width = original.size
    assert image.size == (height, width)
    for shrink_factor in (1, 5, 10, 20):
        whole, factor, *_ = original.decode(shrink_factor)
        for _ in range(boxes if shrink_factor == 1 else -(-boxes // 4)):
            top, left = int(rng.integers(height)), int(rng.integers(width))
            box = Box(top, left, int(rng.integers(top, height)) + 1, int(rng.integers(left, width)) + 1)
            part = image.decode(shrink_factor, box)
            first_row, first_column = top // factor, left // factor
            want = whole[first_row : -(-box.bottom // factor), first_column : -(-box.right // factor)]
            rows, columns = first_row - part.top, first_column - part.left
            got = part.pixels[rows : rows + want.shape[0], columns : columns + want.shape[1]]
            assert np.array_equal(got, want), (box, shrink_factor)


@pytest.mark.parametrize("seed", range(PHOTOS))
def test_parts_of_a_tiled_photo_have_the_pixels_of_the_whole(seed: int) -> None:
    data = found_photos()[seed] if FULL else encoded(photo(seed), SAMPLINGS[seed % 6], 75 + seed % 24)
    tiled = vision.tile_jpeg(data, verify=True)
    assert is_tiled(tiled) or (FULL and tiled == data)
    assert coefficients(tiled) == coefficients(data)
    assert len(tiled) < (1.2 if FULL else 1.03) * len(data)
    check_boxes(data, tiled, BOXES // PHOTOS + 1, np.random.default_rng(seed))


@pytest.mark.parametrize("kind", ODD)
def test_parts_of_an_odd_image_have_the_pixels_of_the_whole(kind: str) -> None:
    data = ODD[kind]
    tiled = vision.tile_jpeg(data, verify=True)
    assert np.array_equal(vision.read_image(tiled), vision.read_image(data))
    assert coefficients(tiled) == coefficients(data)
    check_boxes(data, tiled, BOXES // len(ODD) + 2, np.random.default_rng(len(kind)))
    assert vision.tile_jpeg(tiled) == tiled


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_parts_of_a_truncated_image_are_those_of_the_whole_or_an_error(share: float) -> None:
    tiled = vision.tile_jpeg(encoded(photo(6)))
    cut = tiled[: int(share * len(tiled))]
    whole = vision.read_image(cut, truncated="partial")
    for box in (Box(0, 0, 40, 40), Box(50, 60, 90, 100), Box(0, 0, *whole.shape[:2])):
        with pytest.raises(ValueError, match="truncated"):
            open_encoded(cut, Limits(), "error").decode(1, box)
        pixels, _, top, left = open_encoded(cut, Limits(), "partial").decode(1, box)
        got = pixels[box.top - top : box.bottom - top, box.left - left : box.right - left]
        assert np.array_equal(got, whole[box.top : box.bottom, box.left : box.right])


def test_metadata_are_kept_and_progressive_becomes_baseline() -> None:
    exif = Image.Exif()
    exif[0x010E], exif[0x0112] = "a fox", 6
    image = Image.fromarray(photo(7))
    data = saved(image, exif=exif, icc_profile=b"profile" * 9, comment=b"seen", progressive=True, dpi=(300, 300))
    before, after = (Image.open(io.BytesIO(file)) for file in (data, vision.tile_jpeg(data)))
    assert not after.info.get("progression", 0)
    assert not after.info.get("progressive", 0)
    kept = {name: value for name, value in before.info.items() if "progress" not in str(name)}
    assert after.info == kept
    assert {"exif", "icc_profile", "comment", "dpi"} <= set(kept)


def test_a_file_that_gains_nothing_keeps_its_bytes() -> None:
    small = encoded(photo(8, 128, 100))
    png = io.BytesIO()
    Image.fromarray(photo(8)).save(png, "PNG")
    for data in (small, png.getvalue(), CMYK, TRUNCATED, b"", b"text", b"\xff\xd8\xff"):
        assert vision.tile_jpeg(data) == data


@pytest.mark.parametrize("mcu_width", [8, 16, 32])
def test_a_tile_is_a_divisor_of_the_row(mcu_width: int) -> None:
    for width in (*range(1, 40), *range(200, 1100, 17)):
        per_row = -(-width // mcu_width)
        interval = tile_interval(width, mcu_width)
        assert per_row % interval == 0
        assert interval == per_row or 32 <= interval * mcu_width <= 160


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its files open
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_other_programs_open_tiled_files(tmp_path: Path) -> None:
    data = encoded(photo(9))
    want, tiled = vision.read_image(data), vision.tile_jpeg(data)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(tiled))), want)
    by_opencv = cv2.imdecode(np.frombuffer(tiled, np.uint8), cv2.IMREAD_COLOR)
    assert by_opencv is not None
    assert np.array_equal(by_opencv[:, :, ::-1], want)
    ps.pack(ps.from_items([{"__key__": "a", "jpg": tiled}]), tmp_path / "out")
    url = str(tmp_path / "out" / "shard-000000.tar")
    (sample,) = webdataset.WebDataset(url, shardshuffle=False).decode("rgb8")
    assert np.array_equal(sample["jpg"], want)
    gc.collect()


if FULL:  # it is downloaded, into a folder of its own
    TORCHVISION = """
import sys
import numpy as np, torch

library = torch.library.Library("torchvision", "DEF")  # what its import needs of its compiled part
for name in ("nms", "qnms"):
    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.path.append(sys.argv[1])
from torchvision.datasets import ImageFolder

((image, label),) = ImageFolder(sys.argv[2])
np.save(sys.argv[3], np.asarray(image))
"""

    def test_torchvision_opens_tiled_files(tmp_path: Path) -> None:
        data = encoded(photo(9))
        (tmp_path / "photos" / "fox").mkdir(parents=True)
        (tmp_path / "photos" / "fox" / "0.jpg").write_bytes(vision.tile_jpeg(data))
        target = tmp_path / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, "torchvision==0.28.0"], check=True)
        paths = [target, tmp_path / "photos", tmp_path / "pixels.npy"]
        subprocess.run([sys.executable, "-W", "ignore", "-c", TORCHVISION, *paths], check=True)
        assert np.array_equal(np.load(paths[-1]), vision.read_image(data))


def test_the_stage_tiles_jpegs_in_any_field() -> None:
    jpeg = encoded(photo(10))
    ds = ps.from_items([{"__key__": "a", "jpg": jpeg, "left.image": jpeg, "txt": "x", "bin": b"\xff\xd8"}])
    sample = ps.Dataset(ds.plan.then(TileImages())).first()
    assert sample["jpg"] == sample["left.image"] == vision.tile_jpeg(jpeg)
    assert (sample["txt"], sample["bin"]) == ("x", b"\xff\xd8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(6):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(number, 160, 220)))
    return tmp_path


def jpegs(folder: Path) -> set[bytes]:
    return {sample["jpg"] for sample in ps.read_tar(str(folder))}


def test_packing_stores_tiles_on_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = folder / "photos"
    want = {vision.tile_jpeg(path.read_bytes()) for path in photos.rglob("*.jpg")}
    packed = ps.pack(photos, folder / "one", tiles=True, max_samples=4)
    assert jpegs(folder / "one") == want
    assert all(map(is_tiled, want))
    assert ps.pack(photos, folder / "one", tiles=True, max_samples=4) == packed
    with pytest.raises(PlanError, match="other options"):
        ps.pack(photos, folder / "one", max_samples=4)
    with pytest.raises(PlanError, match="tiles"):
        ps.pack(photos, folder / "two", tiles=3)  # type: ignore[arg-type]
    assert main(["pack", str(photos), str(folder / "two"), "--tiles"]) == 0
    assert jpegs(folder / "two") == want
    ps.pack(photos, folder / "plain")
    assert main(["convert", str(folder / "plain"), str(folder / "three"), "--format", "tar", "--tiles"]) == 0
    assert jpegs(folder / "three") == want
    assert main(["convert", str(folder / "plain"), str(folder / "table"), "--format", "parquet", "--tiles"]) == 0
    assert {row["jpg"] for row in ps.read_parquet(str(folder / "table"))} == want
    capsys.readouterr()


def test_pixels_that_differ_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.jpg"
    other.write_bytes(encoded(photo(12, 200, 300)))
    (tmp_path / "jpegtran").write_text(f"#!/bin/sh\ncat {other}\n")
    (tmp_path / "jpegtran").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    data = encoded(photo(11, 200, 300))
    with pytest.raises(ValueError, match="other pixels"):
        vision.tile_jpeg(data, verify=True)
    ds = ps.from_items([{"__key__": "a", "jpg": data}])
    with pytest.raises(ps.errors.DataError, match=r"tiles: .*other pixels.*key: a"):
        ps.Dataset(ds.plan.then(TileImages(verify=True))).first()


def test_without_jpegtran_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(PlanError, match="apt-get install libjpeg-turbo-progs"):
        vision.tile_jpeg(encoded(photo(13)))
    with pytest.raises(PlanError, match="jpegtran"):
        TileImages()
