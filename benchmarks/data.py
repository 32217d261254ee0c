"""The datasets that are measured: generated once, from fixed seeds, and written as other tools would write them.

A dataset is a folder that appears when it is complete. Its name holds all parameters that it was generated with, so
a new size creates a new folder.
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
    """The number of samples or shards in each dataset."""

    photos: int = 6_000
    tiny: int = 40_000
    jpegs: int = 400
    shards: int = 10_000  # of ``many_shards``
    images: int = 3_840  # the photos of ``photos.py``: 60 batches


FULL = Sizes()
QUICK = Sizes(photos=600, tiny=4_000, jpegs=40, shards=1_000, images=384)


@dataclass(frozen=True, slots=True)
class StoredData:
    """A dataset on disk: its folder, and the number of samples in its shards."""

    folder: Path
    samples: int

    @property
    def shards(self) -> list[str]:
        """The paths of the shards, in order."""
        return sorted(str(path) for path in self.folder.glob("*.tar"))

    @property
    def nbytes(self) -> int:
        """The size of all shards on disk."""
        return sum(os.path.getsize(path) for path in self.shards)


def ignored_folder(folder: Path) -> Path:
    """Create a folder that git ignores, unless it exists, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    return folder


def photos(sizes: Sizes) -> StoredData:
    """Return samples of about 30 KB of noise as jpg, a class and some JSON, in six shards."""
    count = sizes.photos
    return create_once(f"photos-{count}", count, lambda folder: write_with_tarfile(folder, _photos(count), 6))


def photos10(sizes: Sizes) -> StoredData:
    """Return ten hard links to each shard of photos: each link is mapped and indexed separately, but stored once."""
    count = sizes.photos
    return create_once(f"photos-{count}-x10", 10 * count, lambda folder: _link_copies(folder, photos(sizes)))


def tiny(sizes: Sizes) -> StoredData:
    """Return samples of 200 bytes of text and a class, in four shards."""
    count = sizes.tiny
    return create_once(f"tiny-{count}", count, lambda folder: write_with_tarfile(folder, _tiny(count), 4))


def tiny10(sizes: Sizes) -> StoredData:
    """Return ten hard links to each shard of tiny samples."""
    count = sizes.tiny
    return create_once(f"tiny-{count}-x10", 10 * count, lambda folder: _link_copies(folder, tiny(sizes)))


def jpegs(sizes: Sizes) -> StoredData:
    """Return images of 500 x 375 that take about 110 KB as JPEG, and a class, in four shards."""
    count = sizes.jpegs
    return create_once(f"jpegs-{count}", count, lambda folder: write_with_tarfile(folder, _jpegs(count), 4))


def thumbnails(sizes: Sizes) -> StoredData:
    """Return images of 64 x 64 that take about 2 KB as JPEG, and a class, in four shards."""
    count = 50 * sizes.jpegs
    return create_once(f"thumbnails-{count}", count, lambda folder: write_with_tarfile(folder, _thumbnails(count), 4))


def many_shards(sizes: Sizes) -> StoredData:
    """Return as many shards as a large dataset has, of two samples each, with Penstock's manifest and indexes."""
    count = sizes.shards
    return create_once(f"many-{count}", 2 * count, lambda folder: _write_many_shards(folder, count))


def create_once(name: str, samples: int, write: Callable[[Path], None]) -> StoredData:
    """Return the dataset of this name; if it does not exist, ``write`` is called with a folder to fill."""
    folder = ignored_folder(HOME) / name
    if not folder.is_dir():
        unfinished = HOME / f".{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        write(unfinished)
        unfinished.rename(folder)
    return StoredData(folder, samples)


def write_with_tarfile(folder: Path, samples: Iterable[tuple[str, Fields]], shards: int) -> None:
    """Write samples to USTAR shards with Python's tarfile."""
    keyed = list(samples)
    per_shard = -(-len(keyed) // shards)
    for number in range(shards):
        with tarfile.open(folder / f"part-{number:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for key, fields in keyed[number * per_shard : (number + 1) * per_shard]:
                for name, value in fields.items():
                    member = tarfile.TarInfo(f"{key}.{name}")
                    member.size = len(value)
                    tar.addfile(member, io.BytesIO(value))


def _link_copies(folder: Path, stored: StoredData) -> None:
    for copy in range(10):
        for number, shard in enumerate(stored.shards):
            os.link(shard, folder / f"copy{copy}-{number:06d}.tar")


def _write_many_shards(folder: Path, shards: int) -> None:
    import penstock as ps

    items = [{"__key__": f"{i:08d}", "txt": b"%d" % i, "cls": b"%d" % (i % 10)} for i in range(2 * shards)]
    ps.from_items(items).write_tar(str(folder), max_samples=2)


def read_samples(stored: StoredData) -> list[dict[str, bytes | str]]:
    """Read a dataset into memory with Python's tarfile."""
    samples: dict[str, dict[str, bytes | str]] = {}
    for shard in stored.shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, name = member.name.partition(".")
                content = tar.extractfile(member)
                assert content is not None
                samples.setdefault(key, {"__key__": key})[name] = content.read()
    return list(samples.values())


def _photos(count: int) -> Iterator[tuple[str, Fields]]:
    rng = random.Random(1)
    for i in range(count):
        metadata = {"id": i, "width": 500, "height": 375, "caption": f"picture {i} of {count}"}
        jpg = rng.randbytes(rng.randint(24_000, 36_000))
        yield f"{i:08d}", {"jpg": jpg, "cls": b"%d" % (i % 1000), "json": json.dumps(metadata).encode()}


def _tiny(count: int) -> Iterator[tuple[str, Fields]]:
    rng = random.Random(2)
    for i in range(count):
        yield f"{i:08d}", {"txt": rng.randbytes(100).hex().encode(), "cls": b"%d" % (i % 1000)}


def _jpegs(count: int) -> Iterator[tuple[str, Fields]]:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(3)
    for i in range(count):
        # Coarse shapes with fine grain compress like a photograph, unlike pure noise.
        shapes = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8)).resize((500, 375), 3)
        grain = Image.fromarray(rng.integers(0, 256, (188, 250, 3), np.uint8)).resize((500, 375), 2)
        out = io.BytesIO()
        Image.blend(shapes, grain, 0.35).save(out, "JPEG", quality=94)
        yield f"{i:08d}", {"jpg": out.getvalue(), "cls": b"%d" % (i % 1000)}


def _thumbnails(count: int) -> Iterator[tuple[str, Fields]]:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(4)
    for i in range(count):
        out = io.BytesIO()
        shapes = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
        shapes.resize((64, 64), 3).save(out, "JPEG", quality=90)
        yield f"{i:08d}", {"jpg": out.getvalue(), "cls": b"%d" % (i % 1000)}
