"""The data that is measured: made once, from fixed seeds, as other tools would write it.

A data set is a folder that appears when it is complete. Its name holds everything that shaped it, so a changed size
makes a new one.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOME = HERE / ".data"

Fields = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much there is of each kind."""

    photos: int = 6_000
    tiny: int = 40_000
    jpegs: int = 400
    shards: int = 10_000  # of the folder that is only opened
    images: int = 3_840  # photos: 60 batches


FULL = Sizes()
QUICK = Sizes(photos=600, tiny=4_000, jpegs=40, shards=1_000, images=384)


@dataclass(frozen=True, slots=True)
class Made:
    """A data set on disk: its shards, in order, and what they hold."""

    folder: Path
    samples: int

    @property
    def shards(self) -> list[str]:
        """The paths of the shards."""
        return sorted(str(path) for path in self.folder.glob("*.tar"))

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(os.path.getsize(path) for path in self.shards)


def private(folder: Path) -> Path:
    """Make a folder that git does not see."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    return folder


def photos(sizes: Sizes) -> Made:
    """About 30 KB of noise as jpg, a class and some JSON a sample, in six shards."""
    return made(f"photos-{sizes.photos}", sizes.photos, lambda at: write_foreign(at, _photos(sizes.photos), 6))


def photos10(sizes: Sizes) -> Made:
    """Ten times the photos, under ten names: each name is mapped and indexed on its own, the disk holds one."""
    return made(f"photos-{sizes.photos}-x10", 10 * sizes.photos, lambda at: _linked(at, photos(sizes)))


def tiny(sizes: Sizes) -> Made:
    """200 bytes of text and a class a sample, in four shards."""
    return made(f"tiny-{sizes.tiny}", sizes.tiny, lambda at: write_foreign(at, _tiny(sizes.tiny), 4))


def tiny10(sizes: Sizes) -> Made:
    """Ten times the tiny samples, as with the photos."""
    return made(f"tiny-{sizes.tiny}-x10", 10 * sizes.tiny, lambda at: _linked(at, tiny(sizes)))


def jpegs(sizes: Sizes) -> Made:
    """Images of 500 x 375 that take about 110 KB as JPEG, and a class, in four shards."""
    return made(f"jpegs-{sizes.jpegs}", sizes.jpegs, lambda at: write_foreign(at, _jpegs(sizes.jpegs), 4))


def thumbnails(sizes: Sizes) -> Made:
    """Images of 64 x 64 that take about 2 KB as JPEG, and a class, in four shards."""
    count = 50 * sizes.jpegs
    return made(f"thumbnails-{count}", count, lambda at: write_foreign(at, _thumbnails(count), 4))


def many(sizes: Sizes) -> Made:
    """As many shards as a large dataset has, of two samples each, with a manifest and indexes of our own."""
    return made(f"many-{sizes.shards}", 2 * sizes.shards, lambda at: _own(at, sizes.shards))


def made(name: str, samples: int, make: Callable[[Path], None]) -> Made:
    """A data set of that name, made by ``make`` in the folder it is given if it is not there."""
    folder = private(HOME) / name
    if not folder.is_dir():
        unfinished = HOME / f".{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        make(unfinished)
        unfinished.rename(folder)
    return Made(folder, samples)


def write_foreign(folder: Path, samples: Iterable[tuple[str, Fields]], shards: int) -> None:
    """Write USTAR shards as Python's tarfile does."""
    listed = list(samples)
    per_shard = -(-len(listed) // shards)
    for number in range(shards):
        with tarfile.open(folder / f"part-{number:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for key, fields in listed[number * per_shard : (number + 1) * per_shard]:
                for name, value in fields.items():
                    member = tarfile.TarInfo(f"{key}.{name}")
                    member.size = len(value)
                    tar.addfile(member, io.BytesIO(value))


def _linked(folder: Path, made: Made) -> None:
    for copy in range(10):
        for number, shard in enumerate(made.shards):
            os.link(shard, folder / f"copy{copy}-{number:06d}.tar")


def _own(folder: Path, shards: int) -> None:
    import penstock as ps

    items = [{"__key__": f"{i:08d}", "txt": b"%d" % i, "cls": b"%d" % (i % 10)} for i in range(2 * shards)]
    ps.from_items(items).write_tar(str(folder), max_samples=2)


def samples_of(made: Made) -> list[dict[str, bytes | str]]:
    """Read a data set into memory with Python's tarfile, for cases that write."""
    found: dict[str, dict[str, bytes | str]] = {}
    for shard in made.shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, name = member.name.partition(".")
                content = tar.extractfile(member)
                assert content is not None
                found.setdefault(key, {"__key__": key})[name] = content.read()
    return list(found.values())


def _photos(count: int) -> Iterator[tuple[str, Fields]]:
    dice = random.Random(1)
    for i in range(count):
        about = {"id": i, "width": 500, "height": 375, "caption": f"picture {i} of {count}"}
        jpg = dice.randbytes(dice.randint(24_000, 36_000))
        yield f"{i:08d}", {"jpg": jpg, "cls": b"%d" % (i % 1000), "json": json.dumps(about).encode()}


def _tiny(count: int) -> Iterator[tuple[str, Fields]]:
    dice = random.Random(2)
    for i in range(count):
        yield f"{i:08d}", {"txt": dice.randbytes(100).hex().encode(), "cls": b"%d" % (i % 1000)}


def _jpegs(count: int) -> Iterator[tuple[str, Fields]]:
    import numpy as np
    from PIL import Image

    dice = np.random.default_rng(3)
    for i in range(count):
        # Coarse shapes under fine grain: compresses like a photograph, unlike pure noise.
        shapes = Image.fromarray(dice.integers(0, 256, (24, 32, 3), np.uint8)).resize((500, 375), 3)
        grain = Image.fromarray(dice.integers(0, 256, (188, 250, 3), np.uint8)).resize((500, 375), 2)
        out = io.BytesIO()
        Image.blend(shapes, grain, 0.35).save(out, "JPEG", quality=94)
        yield f"{i:08d}", {"jpg": out.getvalue(), "cls": b"%d" % (i % 1000)}


def _thumbnails(count: int) -> Iterator[tuple[str, Fields]]:
    import numpy as np
    from PIL import Image

    dice = np.random.default_rng(4)
    for i in range(count):
        out = io.BytesIO()
        shapes = Image.fromarray(dice.integers(0, 256, (8, 8, 3), np.uint8))
        shapes.resize((64, 64), 3).save(out, "JPEG", quality=90)
        yield f"{i:08d}", {"jpg": out.getvalue(), "cls": b"%d" % (i % 1000)}
