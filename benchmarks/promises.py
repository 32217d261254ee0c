"""The targets of each case, which a report compares with the measured figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import engine_cases
import image_cases
import ray_cases
import remote_cases
import table_cases
import writing_cases
from cases import COMPAT
from image_cases import ANTIALIASED, BILINEAR, FFCV_RAW, OURS, TILED


@dataclass(frozen=True, slots=True)
class Target:
    """A promised figure: a ``value`` of ``row``, or the ratio of that of ``over`` to that of ``row``."""

    text: str
    row: str
    limit: float
    over: str | None = None
    value: str = "seconds"
    at_least: bool = False

    def met(self, figure: float) -> bool:
        """Return whether a measured figure keeps the promise."""
        return figure >= self.limit if self.at_least else figure <= self.limit


def _raw_targets(at_least: float, first: float) -> tuple[Target, ...]:
    ours = "penstock"
    return (
        Target(f"{ours}, to webdataset", ours, at_least, over="webdataset", at_least=True),
        Target("first contact, to webdataset", f"{ours}, first contact", first, over="webdataset", at_least=True),
        Target(f"{COMPAT}, to webdataset", COMPAT, 10, over="webdataset", at_least=True),
        Target(f"{ours}, to SPDL", ours, 1.0, over="SPDL iter_tarfile", at_least=True),
        Target("shuffled epoch, times unshuffled", ours, 1.2, over=f"{ours}, shuffled"),
    )


def _image_targets() -> Iterator[Target]:
    """Yield a share of the limit, and a ratio of at least 1 to every peer that scales in the same way."""
    limit = image_cases.LIMIT
    for antialias, share in ((False, 0.85), (True, 0.7)):
        yield Target(f"{OURS[antialias]}, to libjpeg-turbo alone", OURS[antialias], share, limit, at_least=True)
    slow = f"webdataset + DataLoader ({ANTIALIASED})"
    yield Target(f"{OURS[True]}, to {slow}", OURS[True], 2.0, slow, at_least=True)
    for row in image_cases.IMAGES:
        if row.peer is not None:
            antialias = not row.name.endswith((f"({BILINEAR})", "bilinear)"))
            ours, tiled = OURS[antialias], TILED[antialias]
            yield Target(f"{ours}, to {row.name}", ours, 1.0, row.name, at_least=True)
            yield Target(f"{tiled}, to {row.name}", tiled, 1.5 if antialias else 1.3, row.name, at_least=True)


# The best fixed sizes of the pipeline's pools. Which of the two is better depends on the load of the two cores.
BEST = ("hand-set: 16, 1, 1", "hand-set: 16, 2, 2")
SELF = "sizes its pools itself"
UNINDEXED = "penstock, without an index"
FOUR_WORKERS = "webdataset, its curl, 4 loader workers"

PROMISES: dict[str, tuple[Target, ...]] = {
    "raw-photos": _raw_targets(12, 12),
    "raw-tiny": _raw_targets(40, 20),
    "open": (
        Target("seconds to the first sample, pattern", "penstock, pattern", 1.0),
        Target("seconds to the first sample, folder", "penstock, folder", 1.0),
        Target("shards touched, pattern", "penstock, pattern", 1, value="shards touched"),
        Target("shards touched, folder", "penstock, folder", 1, value="shards touched"),
    ),
    "start": (
        Target("seconds to import penstock", "import penstock", 0.150),
        Target("numpy imported by it", "import penstock", 0, value="numpy imported"),
    ),
    "memory": tuple(
        Target(f"{value} for 10x the {name}, times", f"penstock, {name}", 1.1, f"penstock, 10x {name}", value)
        for name in ("photos", "tiny")
        for value in ("own MB", "peak MB")
    ),
    "hop": tuple(
        Target(f"us a sample over a plain loop, {items}", f"{items}, threads", 2.0, value="us over a loop")
        for items in ("ints", "photos in memory")
    ),
    "process": (
        Target("made in the worker, to DataLoader", "penstock, made in the worker", 1.5, "DataLoader", at_least=True),
        Target(
            "images sent to the worker, to DataLoader",
            "penstock, images sent to the worker",
            1.0,
            "DataLoader",
            at_least=True,
        ),
    ),
    "process-memory": tuple(
        Target(f"{value} of DataLoader, times", "DataLoader", 1.0, "penstock, made in the worker", value)
        for value in ("peak MB", "private MB")
    ),
    "pipeline": (
        Target("share of its time that the slowest pool works", BEST[0], 0.9, value="slowest pool busy", at_least=True),
        *(Target(f"sizes its pools itself, to {best}", SELF, 0.8, best, at_least=True) for best in BEST),
    ),
    "first": (
        Target("seconds to the first sample, threads", "penstock, threads", 0.020),
        Target("seconds to the first sample, processes", "penstock, processes", 1.0),
    ),
    "remote": (
        Target("penstock, to bare ranges", "penstock", 0.85, remote_cases.LIMIT, at_least=True),
        Target("penstock, shuffled, to bare ranges", "penstock, shuffled", 0.85, remote_cases.LIMIT, at_least=True),
        Target("without an index, to bare ranges", UNINDEXED, 0.7, remote_cases.LIMIT, at_least=True),
        Target(f"without an index, to {FOUR_WORKERS}", UNINDEXED, 3, FOUR_WORKERS, at_least=True),
        Target("CPU s of bare ranges, times", remote_cases.LIMIT, 1.3, "penstock", "CPU s"),
        *(Target(f"penstock, to {row}", "penstock", 3, row, at_least=True) for row in remote_cases.WEBDATASET),
        *(
            Target(f"{row}, to webdataset", row, 3, "webdataset, its curl", at_least=True)
            for row in (COMPAT, f"{COMPAT}, without an index")
        ),
    ),
    "objects": (Target("penstock, to bare requests", "penstock", 0.8, remote_cases.OBJECT_LIMIT, at_least=True),),
    "remote-first": (Target("seconds to the first sample", "penstock", 0.5),),
    "decode": tuple(
        Target(f"{COMPAT}{spec}, to webdataset", f"{COMPAT}{spec}", 1.3, f"webdataset{spec}", at_least=True)
        for spec in ("", ", torchrgb")
    ),
    **{
        case: (
            Target("a DataLoader over penstock, to webdataset", "penstock", 2.0, "webdataset", at_least=True),
            Target(f"{COMPAT}, to webdataset", COMPAT, compat, "webdataset", at_least=True),
        )
        for case, compat in (("torch-photos", 1.0), ("torch-thumbnails", 1.3))
    },
    "loader": (
        Target("us a sample over the dataset itself", "a sample", 1.0, value="us over a loop"),
        Target("us a sample of a ledger, batches of 64", "a sample, with a ledger", 1.0, value="us over a loop"),
        Target("seconds a state takes", "a state", 0.001),
    ),
    "csv-batches": (
        Target("penstock, to open_csv", "penstock, batches of 8192", 0.8, table_cases.CSV_LIMIT, at_least=True),
        Target("penstock, to read_csv", "penstock, batches of 8192", 0.8, table_cases.CSV_TABLE, at_least=True),
    ),
    "table-batches": (
        Target("penstock, to read_table", "penstock", 1.0, table_cases.LIMIT, at_least=True),
        *(Target(f"penstock, to {row}", "penstock", 3, row, at_least=True) for row in table_cases.HUGGINGFACE),
        Target("penstock, to Ray Data", "penstock", 8, "Ray Data", at_least=True),
    ),
    "huggingface-parquet": (
        Target("penstock, to the recipe", "penstock, workers=2", 2, table_cases.RECIPE, at_least=True),
    ),
    "images": tuple(_image_targets()),
    "images-256": tuple(
        Target(
            f"256 px on the long side, to as they are, antialias={on}",
            f"256 px on the long side, antialias={on}",
            2.3,
            f"as they are, antialias={on}",
            at_least=True,
        )
        for on in OURS
    ),
    "images-stored": (
        Target(
            "in tiles, bilinear, to the decoder", "in tiles, antialias=False", 1.3, image_cases.LIMIT, at_least=True
        ),
        Target(
            "in tiles, antialiased, to the decoder", "in tiles, antialias=True", 1.0, image_cases.LIMIT, at_least=True
        ),
        Target("as they are, to the decoder", "as they are, antialias=False", 0.95, image_cases.LIMIT, at_least=True),
        Target(
            "256 px in tiles, to 256 px",
            "256 px in tiles, antialias=False",
            1.3,
            "256 px, antialias=False",
            at_least=True,
        ),
        Target(
            "256 px planes, to 256 px",
            "256 px planes, antialias=False",
            3.0,
            "256 px, antialias=False",
            at_least=True,
        ),
        Target("256 px planes, to FFCV", "256 px planes, antialias=False", 1.0, FFCV_RAW, at_least=True),
    ),
    "images-large": (
        Target(
            "crops of 512, to the decoder",
            "penstock, in tiles",
            3.0,
            "libjpeg-turbo decodes the whole photo",
            at_least=True,
        ),
    ),
    "images-memory": tuple(
        Target(f"private MB of a DataLoader ({crop}), times", f"torch DataLoader ({crop})", 1.0, ours, "private MB")
        for crop, ours in ((BILINEAR, OURS[False]), (ANTIALIASED, OURS[True]))
    ),
    "images-first": tuple(Target(f"seconds to the first batch, {ours}", ours, 1.0) for ours in OURS.values()),
    "images-linear": tuple(
        Target(f"time a sample, {factor}x data to 1x", "penstock, 1x", 1.1, f"penstock, {factor}x", "us a sample")
        for factor in image_cases.GROWTH[1:]
    ),
    "tools-cat": (
        Target("penstock cat, to GNU cat", "penstock cat", 0.8, "GNU cat", at_least=True),
        Target("penstock cat, to tarproc's", "penstock cat", 10, "tarproc's tarcats", at_least=True),
    ),
    "tools-split": (
        Target("penstock split, to GNU tar", "penstock split", 0.8, "GNU tar, from files", at_least=True),
        Target("penstock split, to tarproc's", "penstock split", 10, "tarproc's tarsplit", at_least=True),
    ),
    "tools-start": (Target("seconds of penstock cat --help", "penstock cat --help", 0.2),),
    "ray": (
        Target("time of the hand-written program, times", ray_cases.BEST, 1.25, ray_cases.OURS),
        Target("penstock, to the obvious program", ray_cases.OURS_PIL, 1.0, ray_cases.OBVIOUS, at_least=True),
        Target("seconds to the first batch on a running Ray", ray_cases.OURS, 2.0, value="first s"),
    ),
    "ray-write": (
        *(
            Target(f"penstock, to Ray Data, {kind}", ours, 1.2, writing_cases.RAY_DATA[kind], at_least=True)
            for kind, ours in writing_cases.OURS.items()
        ),
        *(
            Target(f"MB to the driver, {ours}", ours, 1.0, value="MB to the driver")
            for ours in writing_cases.OURS.values()
        ),
    ),
    "write-processes": (
        Target("two processes, to one", writing_cases.PROCESSES[2], 1.5, writing_cases.PROCESSES[1], at_least=True),
    ),
    "batch-stage": (
        Target(
            "penstock, to a loop over batches", engine_cases.BATCH_STAGE, 0.9, engine_cases.BATCH_LOOP, at_least=True
        ),
    ),
    "cached": (
        Target("through a cache, times local files", "penstock, local files", 1.1, "penstock, through a cache"),
    ),
    "pack": tuple(
        Target(f"{ours}, to {peer}", ours, limit, peer, at_least=True)
        for ours in ("penstock", "penstock, shuffled")
        for peer, limit in (("webdataset", 2), ("GNU tar", 0.7))
    )
    + tuple(Target(f"{row}, to GNU tar", row, 1.0, "GNU tar", at_least=True) for row in remote_cases.IN_RANGES),
}
