"""Cases of the Ray engine: photos in shards, decoded on Ray, compared with programs written for Ray Data.

``python ray_cases.py CASE ROW`` measures one row once, see ``cases.py``. Ray is started, and has run a smaller pass,
before anything is measured. All rows run in the project's own environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import crops
import photos
import ray_programs as programs
from cases import Case, Measure, Result, Row, Task, main
from data import QUICK, Sizes, StoredData
from image_cases import ANTIALIASED as PIL
from image_cases import BILINEAR as CV
from image_cases import check_batches
from image_peers import BATCH, WORKERS, penstock_over
from watching import cpu_seconds

BEST = f"Ray Data, hand-written ({CV})"
OBVIOUS = f"Ray Data, the obvious one ({PIL})"
OURS = f"penstock, the same function ({CV})"
OURS_PIL = f"penstock, the same function ({PIL})"

Batch = tuple[Any, Any]
Program = Callable[[Any, list[str]], Iterable[Batch]]  # takes ray.data and shards


def _pairs(batches: Iterable[dict[str, Any]]) -> Iterator[Batch]:
    for batch in batches:
        yield batch["image"], batch["label"]


def _fastest(crop: str) -> Program:
    return lambda ray_data, shards: _pairs(programs.fastest(ray_data, shards, crop))


def _obvious(ray_data: Any, shards: list[str]) -> Iterable[Batch]:
    return _pairs(programs.obvious(ray_data, shards))


def _same_function(crop: str) -> Program:
    """Use Penstock with the function that the other programs use."""

    def batches(_: Any, shards: list[str]) -> Iterator[Batch]:
        import penstock as ps

        decode = crops.CROPS[crop]
        ds = ps.read_tar(shards).map(lambda s: {"image": decode(s["jpg"]), "label": int(s["cls"])}, workers=WORKERS)
        yield from _pairs(ds.batched(BATCH).on("ray"))

    return batches


def _vision(antialias: bool) -> Program:
    """Use Penstock as its users would."""

    def batches(_: Any, shards: list[str]) -> Iterator[Batch]:
        import penstock as ps

        yield from penstock_over(ps.read_tar(shards).on("ray"), antialias)

    return batches


def _measure_program(program: Program) -> Measure:
    """Measure a whole pass and its first batch, on a Ray that has run the same program before."""

    def measure(task: Task) -> Result:
        small, stored = photos.photos(QUICK.images), photos.photos(task.sizes.images)
        with programs.running_ray() as ray_data:
            digest = check_batches(program(ray_data, small.shards), QUICK.images)
            if task.check:
                return digest
            cpu_at_start, started_at = cpu_seconds(), time.perf_counter()
            first_s, seen = 0.0, 0
            for images, _ in program(ray_data, stored.shards):
                first_s = first_s or time.perf_counter() - started_at
                seen += len(images)
            seconds, cpu_s = time.perf_counter() - started_at, cpu_seconds() - cpu_at_start
        assert seen == stored.samples, f"{seen} photos instead of {stored.samples}"
        return {"seconds": seconds, "samples": seen, "first s": first_s, "CPU ms a sample": 1000 * cpu_s / seen}

    return measure


def _photos(sizes: Sizes) -> StoredData:
    photos.photos(QUICK.images)
    return photos.photos(sizes.images)


DATA = (_photos,)

CASES: dict[str, Case] = {
    "ray": Case(
        "Photos in shards to augmented batches of 64 on Ray with 2 CPUs: a whole pass on a running Ray",
        (
            Row(OBVIOUS, _measure_program(_obvious)),
            Row(f"Ray Data, hand-written ({PIL})", _measure_program(_fastest("pil"))),
            Row(BEST, _measure_program(_fastest("cv"))),
            Row(OURS_PIL, _measure_program(_same_function("pil"))),
            Row(OURS, _measure_program(_same_function("cv"))),
            Row("penstock, antialias=True", _measure_program(_vision(True))),
            Row("penstock, antialias=False", _measure_program(_vision(False))),
        ),
        baseline=BEST,
        max_rounds=6,
    ),
}


if __name__ == "__main__":
    main(CASES)
