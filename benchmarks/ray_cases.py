"""What is measured of the Ray engine: photos in shards, decoded on Ray, beside programs written for Ray Data.

``python ray_cases.py CASE ROW`` measures one row once, as ``cases.py`` does for the others. Ray runs and has done such
work before anything is measured. All rows run in the project's own environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import crops
import photos
import ray_programs as programs
from cases import Case, Result, Row, Task, main
from data import QUICK, Made, Sizes
from image_cases import PLAIN as CV
from image_cases import SMOOTH as PIL
from image_cases import looked_at
from image_peers import BATCH, WORKERS, penstock_over
from watching import cpu_seconds

BEST = f"Ray Data, hand-written ({CV})"
OBVIOUS = f"Ray Data, the obvious one ({PIL})"
OURS = f"penstock, the same function ({CV})"
SMOOTH = f"penstock, the same function ({PIL})"

Batch = tuple[Any, Any]
Program = Callable[[Any, list[str]], Iterable[Batch]]  # ray.data and shards to batches


def _pairs(batches: Iterable[dict[str, Any]]) -> Iterator[Batch]:
    for batch in batches:
        yield batch["image"], batch["label"]


def _hand_written(crop: str) -> Program:
    return lambda ray_data, shards: _pairs(programs.hand_written(ray_data, shards, crop))


def _obvious(ray_data: Any, shards: list[str]) -> Iterable[Batch]:
    return _pairs(programs.obvious(ray_data, shards))


def _same_function(crop: str) -> Program:
    """Ours with the function that the others are given."""

    def batches(_: Any, shards: list[str]) -> Iterator[Batch]:
        import penstock as ps

        work = crops.CROPS[crop]
        ds = ps.read_tar(shards).map(lambda s: {"image": work(s["jpg"]), "label": int(s["cls"])}, workers=WORKERS)
        yield from _pairs(ds.batched(BATCH).on("ray"))

    return batches


def _vision(antialias: bool) -> Program:
    """Ours as its users would write it."""

    def batches(_: Any, shards: list[str]) -> Iterator[Batch]:
        import penstock as ps

        yield from penstock_over(ps.read_tar(shards).on("ray"), antialias)

    return batches


def _passed(program: Program) -> Callable[[Task], Result]:
    """Measure a whole pass on a Ray that has run the same program before; and its first batch."""

    def measure(task: Task) -> Result:
        small, made = photos.photos(QUICK.images), photos.photos(task.sizes.images)
        with programs.started() as ray_data:
            told = looked_at(program(ray_data, small.shards), QUICK.images)
            if task.check:
                return told
            cpu, begun = cpu_seconds(), time.perf_counter()
            first, seen = 0.0, 0
            for images, _ in program(ray_data, made.shards):
                first = first or time.perf_counter() - begun
                seen += len(images)
            seconds, spent = time.perf_counter() - begun, cpu_seconds() - cpu
        assert seen == made.samples, f"{seen} photos instead of {made.samples}"
        return {"seconds": seconds, "samples": seen, "first s": first, "CPU ms a sample": 1000 * spent / seen}

    return measure


def _photos(sizes: Sizes) -> Made:
    photos.photos(QUICK.images)
    return photos.photos(sizes.images)


DATA = (_photos,)

CASES: dict[str, Case] = {
    "ray": Case(
        "Photos in shards to augmented batches of 64 on Ray with 2 CPUs: a whole pass on a running Ray",
        (
            Row(OBVIOUS, _passed(_obvious)),
            Row(f"Ray Data, hand-written ({PIL})", _passed(_hand_written("pil"))),
            Row(BEST, _passed(_hand_written("cv"))),
            Row(SMOOTH, _passed(_same_function("pil"))),
            Row(OURS, _passed(_same_function("cv"))),
            Row("penstock, antialias=True", _passed(_vision(True))),
            Row("penstock, antialias=False", _passed(_vision(False))),
        ),
        baseline=BEST,
        most_rounds=6,
    ),
}


if __name__ == "__main__":
    main(CASES)
