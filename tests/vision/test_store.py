"""Images that are scaled down when they are packed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock as ps
from penstock import vision
from penstock.cli import main
from penstock.vision.resampling import Pixels, resize
from penstock.vision.segments import find_tiles, jpeg_header


def pixels(height: int, width: int, channels: int = 3) -> Pixels:
    rows, columns = np.mgrid[:height, :width]
    planes = [rows * 2 % 256, columns % 256, (rows + columns) % 256, 255 - rows % 200]
    return np.stack(planes[:channels], axis=2).astype(np.uint8)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


LARGE = Image.fromarray(pixels(150, 200))


def test_a_large_jpeg_is_scaled_down_once() -> None:
    store = vision.Store(max_side=100, quality=95)
    data = saved(LARGE, "JPEG", quality=95)
    small = store(data)
    image = opened(small)
    assert (image.format, image.size) == ("JPEG", (100, 75))
    assert len(small) < len(data) / 2
    difference = np.abs(np.asarray(image).astype(int) - resize(vision.read_image(data), (75, 100)))
    assert difference.mean() < 4
    assert store(small) == small
    assert store(data) == small


def test_a_small_image_keeps_its_bytes() -> None:
    for kind in ("JPEG", "PNG", "WEBP", "GIF"):
        data = saved(LARGE, kind)
        assert vision.Store(200)(data) == data


def test_other_formats_do_not_change() -> None:
    store = vision.Store(64)
    png = opened(store(saved(LARGE, "PNG")))
    assert (png.format, png.size) == ("PNG", (64, 48))
    assert np.array_equal(np.asarray(png), resize(np.asarray(LARGE), (48, 64)))
    transparent = opened(store(saved(Image.fromarray(pixels(150, 200, 4)), "PNG")))
    assert (transparent.mode, transparent.size) == ("RGBA", (64, 48))
    webp = opened(store(saved(LARGE, "WEBP")))
    assert (webp.format, webp.size) == ("WEBP", (64, 48))
    gray = opened(store(saved(LARGE.convert("L"), "JPEG")))
    assert (gray.mode, gray.size) == ("L", (64, 48))
    for unchanged in (LARGE.quantize(8), LARGE.convert("1"), Image.fromarray(np.zeros((90, 90), np.uint16))):
        assert store(data := saved(unchanged, "PNG")) == data
    assert store(data := saved(LARGE, "BMP")) == data


def test_an_image_with_an_orientation_is_stored_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = opened(vision.Store(100)(saved(LARGE, "JPEG", exif=exif)))
    assert image.size == (75, 100)
    assert not image.getexif()


def test_the_shorter_side_is_bounded_on_request() -> None:
    data = saved(LARGE, "JPEG", quality=95)
    assert opened(vision.Store(short=60)(data)).size == (80, 60)
    assert vision.Store(short=150)(data) == data


def test_jpegs_are_stored_in_tiles_unless_asked_otherwise() -> None:
    data = saved(Image.fromarray(pixels(600, 800)), "JPEG", quality=95)
    tiled, plain = vision.Store(short=300)(data), vision.Store(short=300, tiles=False)(data)
    header = jpeg_header(tiled)
    assert header is not None
    tiles = find_tiles(tiled, header)
    assert tiles is not None
    assert (tiles.columns, tiles.width) == (5, 80)
    assert b"\xff\xdd" not in plain
    assert np.array_equal(vision.read_image(tiled), vision.read_image(plain))
    gray = vision.Store(256)(saved(LARGE.convert("L").resize((400, 300)), "JPEG"))
    assert jpeg_header(gray).restart_interval == 8  # type: ignore[union-attr]


def test_every_image_becomes_planes_on_request(tmp_path: Path) -> None:
    files = {kind: saved(LARGE, kind, quality=95) for kind in ("JPEG", "PNG", "WEBP")}
    store = vision.Store(short=75, kind="yuv")
    for data in files.values():
        small = resize(vision.read_image(data), (75, 100))
        assert np.abs(vision.read_image(store(data)).astype(int) - small).mean() < 6
        assert store(store(data)) == store(data)
    assert vision.read_image(vision.Store(900, kind="yuv")(files["PNG"])).shape == (150, 200, 3)
    items = [{"__key__": str(number), "jpg": data, "cls": 1} for number, data in enumerate(files.values())]
    ps.pack(ps.from_items(items), tmp_path / "out", images=store)
    ds = ps.read_tar(str(tmp_path / "out"))
    assert sorted(ds.first()) == ["__key__", "__url__", "cls", "yuv"]
    batch = ds.decode(yuv=vision.RandomResizedCrop(32)).batched(3).first()
    assert batch["yuv"].shape == (3, 32, 32, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(12):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        side = 60 if number % 3 == 0 else 150
        path.write_bytes(saved(Image.fromarray(pixels(side, side + number)), "JPEG", quality=95))
    return tmp_path


def shard_bytes(packed: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in packed.iterdir() if path.suffix == ".tar"}


def test_packing_scales_images_down(folder: Path) -> None:
    store = vision.Store(max_side=80)
    packed = ps.pack(folder / "photos", folder / "one", images=store, max_samples=5, workers=1)
    assert packed.samples == 12
    sides = {max(sample["jpg"].shape) for sample in ps.read_tar(str(folder / "one")).decode("rgb8")}
    assert max(sides) == 80
    stored = {sample["jpg"] for sample in ps.read_tar(str(folder / "one"))}
    originals = {path.read_bytes() for path in (folder / "photos").rglob("*.jpg")}
    assert len(stored & originals) == 4
    ps.pack(folder / "photos", folder / "two", images=store, max_samples=5, workers=3)
    assert shard_bytes(folder / "one") == shard_bytes(folder / "two")
    assert ps.pack(folder / "photos", folder / "one", images=store, max_samples=5) == packed
    with pytest.raises(ps.errors.PlanError, match="another source or with other options"):
        ps.pack(folder / "photos", folder / "one", images=vision.Store(90), max_samples=5)
    with pytest.raises(ps.errors.PlanError, match=r"vision\.Store"):
        ps.pack(folder / "photos", folder / "three", images=512)  # type: ignore[arg-type]


def test_an_interrupted_run_resumes_with_the_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = vision.Store(max_side=80)
    ps.pack(folder / "photos", folder / "whole", images=store, max_samples=2, workers=1)
    store_image, left = vision.Store.__call__, [7]

    def fail_after_seven(self: vision.Store, data: bytes) -> bytes:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("power failure")
        return store_image(self, data)

    monkeypatch.setattr(vision.Store, "__call__", fail_after_seven)
    with pytest.raises(ps.errors.DataError, match="power failure"):
        ps.pack(folder / "photos", folder / "parts", images=store, max_samples=2, workers=1)
    monkeypatch.undo()
    assert 0 < len(shard_bytes(folder / "parts")) < 6
    ps.pack(folder / "photos", folder / "parts", images=store, max_samples=2)
    assert shard_bytes(folder / "parts") == shard_bytes(folder / "whole")


def test_a_damaged_image_is_an_error_or_is_skipped(folder: Path) -> None:
    (folder / "photos" / "a" / "bad.jpg").write_bytes(saved(LARGE, "JPEG")[:2000])
    with pytest.raises(ps.errors.DataError, match=r"store: field 'jpg': damaged or truncated.*bad"):
        ps.pack(folder / "photos", folder / "out", images=vision.Store(80))
    packed = ps.pack(folder / "photos", folder / "out", images=vision.Store(80), on_error="skip", mode="replace")
    assert (packed.samples, packed.skipped) == (12, 1)


def test_masks_and_other_fields_keep_their_bytes() -> None:
    jpeg, png = saved(LARGE, "JPEG"), saved(LARGE, "PNG")
    ds = ps.from_items([{"__key__": "a", "jpg": jpeg, "seg.png": png, "txt": "x"}])
    ps.pack(ds, "memory://masks/out", images=vision.Store(50))
    sample = ps.read_tar("memory://masks/out").first()
    assert sample["seg.png"] == png
    assert opened(sample["jpg"]).size == (50, 38)


def test_the_command_scales_images_down(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, out = str(folder / "photos"), str(folder / "out")
    assert main(["pack", photos, out, "--max-side", "64", "--quality", "80", "--dry-run", "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert main(["pack", photos, out, "--max-side", "64", "--quality", "80", "--json"]) == 0
    packed = json.loads(capsys.readouterr().out)
    assert packed["samples"] == estimate["samples"] == 12
    assert packed["nbytes"] == estimate["nbytes"]
    assert {max(sample["jpg"].shape) for sample in ps.read_tar(out).decode("rgb8")} <= {60, 63, 64}
    with pytest.raises(SystemExit, match="2"):
        main(["pack", photos, str(folder / "no"), "--quality", "80"])
    assert "--max-side" in capsys.readouterr().err
