"""Programs that users of Ray Data would write for photos in shards, and a context in which Ray runs."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import crops

BATCH = 64
CORES = 2
STORE_BYTES = 2_000_000_000  # of shared memory; the default is 30% of the machine's memory

Columns = dict[str, Any]


@contextmanager
def running_ray() -> Iterator[Any]:
    """Run Ray on two cores, without its dashboard, within the context; yields ``ray.data``."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(num_cpus=CORES, object_store_memory=STORE_BYTES, **quiet)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    try:
        yield ray.data
    finally:
        ray.shutdown()


def fastest(ray_data: Any, shards: list[str], crop: str) -> Iterable[Columns]:
    """Run the fastest program we found: one task per shard reads, decodes and stacks, so only batches are sent."""
    tasks = ray_data.from_items([{"shard": shard} for shard in shards], override_num_blocks=len(shards))
    stacked = tasks.map_batches(partial(_shard_batches, crop), batch_size=1, batch_format="numpy")
    batches: Iterable[Columns] = stacked.iter_batches(batch_size=BATCH, batch_format="numpy")
    return batches


def obvious(ray_data: Any, shards: list[str]) -> Iterable[Columns]:
    """Run the program that the documentation suggests: ``read_webdataset``, a function per row, ``iter_batches``."""
    rows = ray_data.read_webdataset(shards).map(_crop_row)
    batches: Iterable[Columns] = rows.iter_batches(batch_size=BATCH, batch_format="numpy")
    return batches


def _crop_row(row: Columns) -> Columns:
    return {"image": crops.pil_decoded(row["jpg"]), "label": int(row["cls"])}


def _shard_batches(crop: str, task: Columns) -> Iterator[Columns]:
    import numpy as np

    decode: Callable[[bytes], Any] = crops.CROPS[crop]
    images: list[Any] = []
    labels: list[int] = []
    for jpg, label in _samples(str(task["shard"][0])):
        images.append(decode(jpg))
        labels.append(label)
        if len(images) == BATCH:
            yield {"image": np.stack(images), "label": np.array(labels)}
            images, labels = [], []
    if images:
        yield {"image": np.stack(images), "label": np.array(labels)}


def _samples(shard: str) -> Iterator[tuple[bytes, int]]:
    with open(shard, "rb") as file, tarfile.open(fileobj=io.BufferedReader(file), mode="r|") as tar:  # type: ignore[arg-type]
        jpg = b""
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            if member.name.endswith(".jpg"):
                jpg = content.read()
            else:
                yield jpg, int(content.read())
