"""Cases of images: photos in shards to augmented batches; their memory, first batch, and growth with the data.

``python image_cases.py CASE ROW`` measures one row once, see ``cases.py``; ``image_peers.py`` has the program of each
library. Batches are counted in the middle of a pass, when the prefetch buffers of a library are full at the first and
at the last batch counted: batches that it prefetched before do not count.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import crops
import data
import image_peers as peers
import photos
from cases import Case, Measure, Result, Row, Task, main
from data import QUICK, Sizes, StoredData
from image_peers import BATCH, WORKERS, Batches
from watching import cpu_seconds, peak_memory

WARMUP, TAIL = 1 / 6, 1 / 3  # the shares of a pass before and after the batches that are counted
LIMIT = "limit: libjpeg-turbo alone, full decode, 2 threads"
BILINEAR, ANTIALIASED = "cv2 bilinear", "PIL antialias"
OURS = {False: "penstock, antialias=False", True: "penstock, antialias=True"}


def _throughput(batches: Batches) -> Measure:
    """Measure the throughput in the middle of a pass, and the CPU time of all processes."""

    def measure(task: Task) -> Result:
        if task.check:
            if task.sizes != QUICK:
                deque(islice(batches(task.sizes.images), 1), maxlen=0)  # creates the files that the library reads
            return check_batches(batches(QUICK.images), QUICK.images)
        total = task.sizes.images // BATCH
        stream = iter(batches(task.sizes.images))
        deque(islice(stream, int(total * WARMUP)), maxlen=0)
        counted = total - int(total * WARMUP) - int(total * TAIL)
        started_at, cpu_at_start = time.perf_counter(), cpu_seconds()
        seen = sum(len(images) for images, _ in islice(stream, counted))
        seconds, cpu_s = time.perf_counter() - started_at, cpu_seconds() - cpu_at_start
        assert seen == counted * BATCH, f"{seen} photos instead of {counted * BATCH}"
        return {"seconds": seconds, "samples": seen, "CPU ms a sample": 1000 * cpu_s / seen}

    return measure


def check_batches(batches: Iterable[Any], count: int) -> Result:
    """Check the batches, and return a digest of their classes, since crops are random.

    Raises:
        AssertionError: A photo is missing or extra, has the wrong shape or type, or is of one color.
    """
    import numpy as np

    total = seen = 0
    for images, labels in batches:
        array = np.asarray(images)
        assert array.dtype == np.uint8, f"batches of {array.dtype}"
        assert sorted(array.shape[1:]) == [3, crops.SIDE, crops.SIDE], f"images of {array.shape[1:]}"
        assert (array.reshape(len(array), -1).std(1) > 1).all(), "an image of one color"
        total += sum((int(label) + 1) ** 3 for label in np.asarray(labels).ravel())
        seen += len(array)
    assert seen == count, f"{seen} photos instead of {count}"
    return {"samples": seen, "digest": total}


# The limit: the decoder alone, on bytes in memory


def _decoder_alone(**options: bool) -> Measure:
    def measure(task: Task) -> Result:
        from simplejpeg import decode_jpeg

        stored = photos.photos(task.sizes.images)
        jpgs = [sample["jpg"] for sample in data.read_samples(stored)]
        chunks = [jpgs[first : first + 16] for first in range(0, len(jpgs) // 2, 16)]

        def decode(chunk: list[bytes]) -> None:
            for jpg in chunk:
                decode_jpeg(jpg, **options)

        with ThreadPoolExecutor(WORKERS) as pool:
            deque(pool.map(decode, chunks[:4]), maxlen=0)
            started_at, cpu_at_start = time.perf_counter(), cpu_seconds()
            deque(pool.map(decode, chunks), maxlen=0)
            seconds, cpu_s = time.perf_counter() - started_at, cpu_seconds() - cpu_at_start
        count = sum(map(len, chunks))
        return {"seconds": seconds, "samples": count, "CPU ms a sample": 1000 * cpu_s / count}

    return measure


# Memory and the first batch


def _peak(batches: Batches) -> Measure:
    """Measure the total memory of all processes during a pass of a consumer that keeps two batches."""

    def measure(task: Task) -> Result:
        if task.check:
            deque(batches(QUICK.images), maxlen=0)
        with peak_memory() as peaks:
            deque(batches(task.sizes.images), maxlen=2)
        return peaks

    return measure


FIRST_BATCH = """
import sys
sys.path.insert(0, {here!r})
import image_peers
next(iter(image_peers.{call}))
sys.stdout.write("\\n")
sys.stdout.flush()
"""


def _first(call: str) -> Measure:
    """Measure the time from the start of an interpreter to its first batch."""

    def measure(task: Task) -> Result:
        code = FIRST_BATCH.format(here=str(data.HERE), call=call.format(count=task.sizes.images))
        started_at = time.perf_counter()
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - started_at
            _, errors = process.communicate()
        assert line == b"\n", errors.decode()
        return {"seconds": seconds}

    return measure


# More photos, and smaller photos

GROWTH = (1, 4, 16)


def _whole_pass(source: Callable[[Task], StoredData]) -> Measure:
    """Measure a whole pass with its start and its end, per photo."""

    def measure(task: Task) -> Result:
        import penstock as ps
        from penstock import vision

        assert vision is not None
        stored = source(task)
        assert ps.Dataset is not None
        cpu_at_start, started_at = cpu_seconds(), time.perf_counter()
        count = sum(len(images) for images, _ in peers.penstock_over(ps.read_tar(stored.shards), antialias=True))
        seconds, cpu_s = time.perf_counter() - started_at, cpu_seconds() - cpu_at_start
        per_sample = {"us a sample": 1e6 * seconds / count, "CPU ms a sample": 1000 * cpu_s / count}
        return {"seconds": seconds, "samples": count, **per_sample}

    return measure


def _copies(copies: int) -> Callable[[Task], StoredData]:
    return lambda task: photos.linked(task.sizes.images, 3, copies)


def _penstock_at_size(antialias: bool, side: int | None, by: str = "long") -> Batches:
    def batches(count: int) -> Iterable[Any]:
        import penstock as ps

        stored = photos.photos(count) if side is None else photos.smaller(count, side, by)
        return peers.penstock_over(ps.read_tar(stored.shards), antialias)

    return batches


def _penstock_stored(antialias: bool, way: str | None) -> Batches:
    def batches(count: int) -> Iterable[Any]:
        import penstock as ps

        stored = photos.photos(count) if way is None else photos.stored(count, way)
        field = "yuv" if way == "planes-256" else "jpg"
        return peers.penstock_over(ps.read_tar(stored.shards).rename(jpg=field), antialias)

    return batches


def _large_crops(tiles: bool) -> Measure:
    """Measure random crops of 512 x 512 of photos of 2048 x 1024, one thread; without tiles, decoded whole."""

    def measure(task: Task) -> Result:
        import numpy as np
        from simplejpeg import decode_jpeg

        from penstock import vision

        count = 16 if task.check else max(64, task.sizes.images // 32)
        jpgs = [sample["jpg"] for sample in data.read_samples(photos.large(count, tiles))]
        crop, rng = vision.RandomCrop(512), np.random.default_rng(0)
        run = (lambda jpg: crop(jpg, rng)) if tiles else (lambda jpg: crop(decode_jpeg(jpg), rng))
        for jpg in jpgs[:8]:
            assert run(jpg).shape == (512, 512, 3)
        started_at, cpu_at_start = time.perf_counter(), cpu_seconds()
        for jpg in jpgs:
            run(jpg)
        seconds, cpu_s = time.perf_counter() - started_at, cpu_seconds() - cpu_at_start
        return {"seconds": seconds, "samples": len(jpgs), "CPU ms a sample": 1000 * cpu_s / len(jpgs)}

    return measure


WAYS = {
    "as they are": None,
    "in tiles": "tiles",
    "256 px": "plain-256",
    "256 px in tiles": "tiles-256",
    "256 px planes": "planes-256",
}
TILED = {antialias: f"{name}, in tiles" for antialias, name in OURS.items()}
FFCV_RAW = "FFCV, 256 px, not compressed (its own, by areas)"


def _rows(name: str, batches: Callable[..., Iterable[Any]], peer: str) -> tuple[Row, ...]:
    """Return the two rows of a library that is given the crop function: with Pillow and with OpenCV."""
    return tuple(
        Row(f"{name} ({label})", _throughput(partial(batches, crop)), peer=peer) for crop, label in crops.LABELS.items()
    )


def _own_rows(name: str, batches: Callable[..., Iterable[Any]], peer: str) -> tuple[Row, ...]:
    """Return the two rows of a library that has its own scaling."""
    labels = {False: "its own, bilinear", True: "its own, antialias"}
    return tuple(Row(f"{name} ({label})", _throughput(partial(batches, on)), peer=peer) for on, label in labels.items())


IMAGES = (
    Row(LIMIT, _decoder_alone()),
    Row("limit: the same with its fast DCT and upsampling", _decoder_alone(fastdct=True, fastupsample=True)),
    *(Row(name, _throughput(partial(peers.penstock, antialias))) for antialias, name in OURS.items()),
    *(Row(name, _throughput(_penstock_stored(antialias, "tiles"))) for antialias, name in TILED.items()),
    Row("penstock, antialias=True, shuffled", _throughput(partial(peers.penstock, True, shuffled=True))),
    *_own_rows("tf.data", peers.tensorflow, "tensorflow"),
    *_rows("grain, threads", peers.grain_threads, "grain"),
    *_rows("grain, processes", peers.grain_processes, "grain"),
    Row("FFCV (its own, by areas)", _throughput(peers.ffcv), peer="ffcv"),
    *_own_rows("DALI, CPU", peers.dali, "dali"),
    *_rows("webdataset + DataLoader", peers.webdataset, "webdataset"),
    *_rows("litdata", peers.litdata, "litdata"),
    *_rows("torch DataLoader", peers.torch, "torch"),
    Row("torch DataLoader (torchvision, antialias)", _throughput(peers.torchvision), peer="torch"),
    *_rows("SPDL", peers.spdl, "spdl"),
    Row("SPDL (its own, bilinear)", _throughput(peers.spdl_own), peer="spdl"),
    *_rows("Mosaic streaming", peers.mosaic, "mosaic"),
    *_rows("Hugging Face, streaming", peers.huggingface_streaming, "huggingface"),
    *_rows("Hugging Face, map-style", peers.huggingface_map, "huggingface"),
    *_rows("Ray Data", peers.ray, "ray"),
)


def _all_photos(sizes: Sizes) -> StoredData:
    """Create all shards and files that rows read, except for those that libraries write in their own formats."""
    for count in {sizes.images, QUICK.images}:
        photos.files(count)
    for by in ("long", "short"):
        photos.smaller(sizes.images, 256, by)
    for count in {sizes.images, QUICK.images}:
        for way in photos.WAYS:
            photos.stored(count, way)
    for copies in GROWTH:
        photos.linked(sizes.images, 3, copies)
    return photos.photos(sizes.images)


DATA = (_all_photos,)

CASES: dict[str, Case] = {
    "images": Case(
        "JPEG (500 x 375, about 110 KB) to batches of 64: a random crop scaled to 224 x 224, flip, uint8; 2 workers, "
        "in order",
        IMAGES,
        baseline=LIMIT,
        max_rounds=10,
    ),
    "images-256": Case(
        "The same photos stored smaller (JPEG quality 90), penstock, 2 workers",
        tuple(
            Row(f"{size}, antialias={on}", _throughput(_penstock_at_size(on, side, by)))
            for on in OURS
            for size, side, by in (
                ("as they are", None, "long"),
                ("256 px on the short side", 256, "short"),
                ("256 px on the long side", 256, "long"),
            )
        ),
        baseline="as they are, antialias=True",
        max_rounds=10,
    ),
    "images-stored": Case(
        "The same photos stored in other ways, penstock, 2 workers",
        (
            Row(LIMIT, _decoder_alone()),
            *(
                Row(f"{name}, antialias={on}", _throughput(_penstock_stored(on, way)))
                for on in OURS
                for name, way in WAYS.items()
            ),
            Row(FFCV_RAW, _throughput(partial(peers.ffcv, side=256)), peer="ffcv"),
        ),
        baseline=LIMIT,
        max_rounds=10,
    ),
    "images-large": Case(
        "Random crops of 512 x 512 of photos of 2048 x 1024, one thread",
        (
            Row("libjpeg-turbo decodes the whole photo", _large_crops(False)),
            Row("penstock, in tiles", _large_crops(True)),
        ),
        baseline="libjpeg-turbo decodes the whole photo",
        max_rounds=10,
    ),
    "images-memory": Case(
        "The same: memory of all processes together (private: pages that belong to one process alone, the sum of USS)",
        (
            *(Row(name, _peak(partial(peers.penstock, antialias))) for antialias, name in OURS.items()),
            *(
                Row(f"torch DataLoader ({label})", _peak(partial(peers.torch, crop)), peer="torch")
                for crop, label in crops.LABELS.items()
            ),
            Row("webdataset + DataLoader (cv2 bilinear)", _peak(partial(peers.webdataset, "cv")), peer="webdataset"),
            Row("grain, threads (cv2 bilinear)", _peak(partial(peers.grain_threads, "cv")), peer="grain"),
        ),
        baseline=None,
        max_rounds=5,
        measures_memory=True,
    ),
    "images-first": Case(
        "The same: from the start of the interpreter to the first batch, imports included, 10 shards in the page cache",
        (
            *(Row(name, _first(f"penstock({antialias}, {{count}})")) for antialias, name in OURS.items()),
            Row("grain, threads (cv2 bilinear)", _first("grain_threads('cv', {count})"), peer="grain"),
            Row("webdataset + DataLoader (cv2 bilinear)", _first("webdataset('cv', {count})"), peer="webdataset"),
            Row("torch DataLoader (PIL antialias)", _first("torch('pil', {count})"), peer="torch"),
            Row("SPDL (cv2 bilinear)", _first("spdl('cv', {count})"), peer="spdl"),
            Row("DALI, CPU (its own, bilinear)", _first("dali(False, {count})"), peer="dali"),
            Row("litdata (PIL antialias)", _first("litdata('pil', {count})"), peer="litdata"),
            Row("Mosaic streaming (PIL antialias)", _first("mosaic('pil', {count})"), peer="mosaic"),
            Row("tf.data (its own, bilinear)", _first("tensorflow(False, {count})"), peer="tensorflow"),
            Row("FFCV (its own, by areas)", _first("ffcv({count})"), peer="ffcv"),
            Row("Ray Data (PIL antialias)", _first("ray('pil', {count})"), peer="ray"),
        ),
        baseline=None,
        max_rounds=5,
    ),
    "images-linear": Case(
        "The same, a whole pass with its start and its end: 1x, 4x and 16x the photos",
        tuple(Row(f"penstock, {copies}x", _whole_pass(_copies(copies))) for copies in GROWTH),
        baseline=None,
        max_rounds=10,
    ),
}


if __name__ == "__main__":
    main(CASES)
