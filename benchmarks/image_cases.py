"""What is measured of images: photos in shards into augmented batches, their memory, their first batch, their growth.

``python image_cases.py CASE ROW`` measures one row once, as ``cases.py`` does for the others; ``image_peers.py`` has
what each library is asked. Batches are counted in the middle of a pass, when whatever a library keeps ahead is full at
both ends: what it has made before is no part of its pace.
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
from cases import Case, Result, Row, Task, main
from data import QUICK, Made, Sizes
from image_peers import BATCH, WORKERS, Batches
from watching import cpu_seconds, watched_memory

SETTLED, LEFT = 1 / 6, 1 / 3  # of a pass: before it is counted, and after
LIMIT = "limit: libjpeg-turbo alone, full decode, 2 threads"
PLAIN, SMOOTH = "cv2 bilinear", "PIL antialias"
OURS = {False: "penstock, antialias=False", True: "penstock, antialias=True"}


def _paced(batches: Batches) -> Callable[[Task], Result]:
    """Measure the pace of batches in the middle of a pass; CPU is of all processes."""

    def measure(task: Task) -> Result:
        if task.check:
            if task.sizes != QUICK:
                deque(islice(batches(task.sizes.images), 1), maxlen=0)  # what it needs on disk is there from now on
            return looked_at(batches(QUICK.images), QUICK.images)
        many = task.sizes.images // BATCH
        stream = iter(batches(task.sizes.images))
        deque(islice(stream, int(many * SETTLED)), maxlen=0)
        counted = many - int(many * SETTLED) - int(many * LEFT)
        begun, cpu = time.perf_counter(), cpu_seconds()
        seen = sum(len(images) for images, _ in islice(stream, counted))
        seconds, spent = time.perf_counter() - begun, cpu_seconds() - cpu
        assert seen == counted * BATCH, f"{seen} photos instead of {counted * BATCH}"
        return {"seconds": seconds, "samples": seen, "CPU ms a sample": 1000 * spent / seen}

    return measure


def looked_at(batches: Iterable[Any], count: int) -> Result:
    """Each photo once, of the right shape, none black: the crops are random, the classes are not."""
    import numpy as np

    total = seen = 0
    for images, labels in batches:
        array = np.asarray(images)
        assert array.dtype == np.uint8, f"batches of {array.dtype}"
        assert sorted(array.shape[1:]) == [3, crops.SIDE, crops.SIDE], f"images of {array.shape[1:]}"
        assert (array.reshape(len(array), -1).std(1) > 1).all(), "an image without a picture"
        total += sum((int(label) + 1) ** 3 for label in np.asarray(labels).ravel())
        seen += len(array)
    assert seen == count, f"{seen} photos instead of {count}"
    return {"samples": seen, "digest": total}


# The limit: nothing but the decoder, on bytes in memory


def _decoded(**options: bool) -> Callable[[Task], Result]:
    def measure(task: Task) -> Result:
        from simplejpeg import decode_jpeg

        made = photos.photos(task.sizes.images)
        jpgs = [sample["jpg"] for sample in data.samples_of(made)]
        chunks = [jpgs[first : first + 16] for first in range(0, len(jpgs) // 2, 16)]

        def work(chunk: list[bytes]) -> None:
            for jpg in chunk:
                decode_jpeg(jpg, **options)

        with ThreadPoolExecutor(WORKERS) as pool:
            deque(pool.map(work, chunks[:4]), maxlen=0)
            begun, cpu = time.perf_counter(), cpu_seconds()
            deque(pool.map(work, chunks), maxlen=0)
            seconds, spent = time.perf_counter() - begun, cpu_seconds() - cpu
        many = sum(map(len, chunks))
        return {"seconds": seconds, "samples": many, "CPU ms a sample": 1000 * spent / many}

    return measure


# Memory and the first batch


def _peak(batches: Batches) -> Callable[[Task], Result]:
    """Measure the memory of all processes together during a pass of a consumer that keeps two batches."""

    def measure(task: Task) -> Result:
        if task.check:
            deque(batches(QUICK.images), maxlen=0)
        with watched_memory() as peaks:
            deque(batches(task.sizes.images), maxlen=2)
        return peaks

    return measure


FIRST = """
import sys
sys.path.insert(0, {here!r})
import image_peers
next(iter(image_peers.{call}))
sys.stdout.write("\\n")
sys.stdout.flush()
"""


def _first(call: str) -> Callable[[Task], Result]:
    """Measure from the start of an interpreter to its first batch."""

    def measure(task: Task) -> Result:
        code = FIRST.format(here=str(data.HERE), call=call.format(count=task.sizes.images))
        begun = time.perf_counter()
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            told = process.stdout.readline()
            seconds = time.perf_counter() - begun
            _, problems = process.communicate()
        assert told == b"\n", problems.decode()
        return {"seconds": seconds}

    return measure


# Growth, and smaller photos

GROWTH = (1, 4, 16)


def _whole(made: Callable[[Task], Made]) -> Callable[[Task], Result]:
    """Measure a whole pass, its start and its end included, by photo."""

    def measure(task: Task) -> Result:
        import penstock as ps
        from penstock import vision

        assert vision is not None
        found = made(task)
        assert ps.Dataset is not None
        cpu, begun = cpu_seconds(), time.perf_counter()
        many = sum(len(images) for images, _ in peers.penstock_over(ps.read_tar(found.shards), antialias=True))
        seconds, spent = time.perf_counter() - begun, cpu_seconds() - cpu
        each = {"us a sample": 1e6 * seconds / many, "CPU ms a sample": 1000 * spent / many}
        return {"seconds": seconds, "samples": many, **each}

    return measure


def _copies(copies: int) -> Callable[[Task], Made]:
    return lambda task: photos.times(task.sizes.images, 3, copies)


def _stored(antialias: bool, side: int | None, by: str = "long") -> Batches:
    def batches(count: int) -> Iterable[Any]:
        import penstock as ps

        made = photos.photos(count) if side is None else photos.smaller(count, side, by)
        return peers.penstock_over(ps.read_tar(made.shards), antialias)

    return batches


def _rows(name: str, batches: Callable[..., Iterable[Any]], peer: str) -> tuple[Row, ...]:
    """Two rows of a library that is given the function: with Pillow and with OpenCV."""
    return tuple(
        Row(f"{name} ({told})", _paced(partial(batches, crop)), peer=peer) for crop, told in crops.TOLD.items()
    )


def _own(name: str, batches: Callable[..., Iterable[Any]], peer: str) -> tuple[Row, ...]:
    """Two rows of a library that scales by itself."""
    told = {False: "its own, bilinear", True: "its own, antialias"}
    return tuple(Row(f"{name} ({how})", _paced(partial(batches, on)), peer=peer) for on, how in told.items())


IMAGES = (
    Row(LIMIT, _decoded()),
    Row("limit: the same with its fast DCT and upsampling", _decoded(fastdct=True, fastupsample=True)),
    *(Row(name, _paced(partial(peers.penstock, antialias))) for antialias, name in OURS.items()),
    Row("penstock, antialias=True, shuffled", _paced(partial(peers.penstock, True, shuffled=True))),
    *_own("tf.data", peers.tensorflow, "tensorflow"),
    *_rows("grain, threads", peers.grain_threads, "grain"),
    *_rows("grain, processes", peers.grain_processes, "grain"),
    Row("FFCV (its own, by areas)", _paced(peers.ffcv), peer="ffcv"),
    *_own("DALI, CPU", peers.dali, "dali"),
    *_rows("webdataset + DataLoader", peers.webdataset, "webdataset"),
    *_rows("litdata", peers.litdata, "litdata"),
    *_rows("torch DataLoader", peers.torch, "torch"),
    Row("torch DataLoader (torchvision, antialias)", _paced(peers.torchvision), peer="torch"),
    *_rows("SPDL", peers.spdl, "spdl"),
    Row("SPDL (its own, bilinear)", _paced(peers.spdl_own), peer="spdl"),
    *_rows("Mosaic streaming", peers.mosaic, "mosaic"),
    *_rows("Hugging Face, streaming", peers.huggingface_streaming, "huggingface"),
    *_rows("Hugging Face, map-style", peers.huggingface_map, "huggingface"),
    *_rows("Ray Data", peers.ray, "ray"),
)


def _all_photos(sizes: Sizes) -> Made:
    """Whatever shards and files the rows read, but for the copies that libraries make themselves."""
    for many in {sizes.images, QUICK.images}:
        photos.files(many)
    for by in ("long", "short"):
        photos.smaller(sizes.images, 256, by)
    for copies in GROWTH:
        photos.times(sizes.images, 3, copies)
    return photos.photos(sizes.images)


DATA = (_all_photos,)

CASES: dict[str, Case] = {
    "images": Case(
        "JPEG (500 x 375, about 110 KB) to batches of 64: a random part scaled to 224 x 224, flip, uint8; 2 workers, "
        "in order",
        IMAGES,
        baseline=LIMIT,
        most_rounds=10,
    ),
    "images-256": Case(
        "The same photos stored smaller (JPEG quality 90), penstock, 2 workers",
        tuple(
            Row(f"{how}, antialias={on}", _paced(_stored(on, side, by)))
            for on in OURS
            for how, side, by in (
                ("as they are", None, "long"),
                ("256 px on the short side", 256, "short"),
                ("256 px on the long side", 256, "long"),
            )
        ),
        baseline="as they are, antialias=True",
        most_rounds=10,
    ),
    "images-memory": Case(
        "The same: memory of all processes together (private: what is in one process alone, the sum of USS)",
        (
            *(Row(name, _peak(partial(peers.penstock, antialias))) for antialias, name in OURS.items()),
            *(
                Row(f"torch DataLoader ({told})", _peak(partial(peers.torch, crop)), peer="torch")
                for crop, told in crops.TOLD.items()
            ),
            Row("webdataset + DataLoader (cv2 bilinear)", _peak(partial(peers.webdataset, "cv")), peer="webdataset"),
            Row("grain, threads (cv2 bilinear)", _peak(partial(peers.grain_threads, "cv")), peer="grain"),
        ),
        baseline=None,
        most_rounds=5,
        peak=True,
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
        most_rounds=5,
    ),
    "images-linear": Case(
        "The same, a whole pass with its start and its end: 1x, 4x and 16x the photos",
        tuple(Row(f"penstock, {copies}x", _whole(_copies(copies))) for copies in GROWTH),
        baseline=None,
        most_rounds=10,
    ),
}


if __name__ == "__main__":
    main(CASES)
