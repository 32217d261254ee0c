"""Programs for Ray Data: what its users would write for photos in shards, and Ray itself started for them."""

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
STORE = 2_000_000_000  # bytes of shared memory; the default is 30% of the machine's

Columns = dict[str, Any]


@contextmanager
def started() -> Iterator[Any]:
    """Ray on two cores, without its dashboard, as long as the block lasts; gives ``ray.data``."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(num_cpus=CORES, object_store_memory=STORE, **quiet)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    try:
        yield ray.data
    finally:
        ray.shutdown()


def hand_written(data_of_ray: Any, shards: list[str], crop: str) -> Iterable[Columns]:
    """The fastest that was found: a task a shard, which reads, decodes and stacks; only batches cross over."""
    tasks = data_of_ray.from_items([{"shard": shard} for shard in shards], override_num_blocks=len(shards))
    batches = tasks.map_batches(partial(_shard, crop), batch_size=1, batch_format="numpy")
    found: Iterable[Columns] = batches.iter_batches(batch_size=BATCH, batch_format="numpy")
    return found


def obvious(data_of_ray: Any, shards: list[str]) -> Iterable[Columns]:
    """What its documentation leads to: ``read_webdataset``, a function a row, ``iter_batches``."""
    rows = data_of_ray.read_webdataset(shards).map(_row)
    found: Iterable[Columns] = rows.iter_batches(batch_size=BATCH, batch_format="numpy")
    return found


def _row(row: Columns) -> Columns:
    return {"image": crops.pil_decoded(row["jpg"]), "label": int(row["cls"])}


def _shard(crop: str, task: Columns) -> Iterator[Columns]:
    """Batches of a shard."""
    import numpy as np

    work: Callable[[bytes], Any] = crops.CROPS[crop]
    images: list[Any] = []
    labels: list[int] = []
    for jpg, label in _samples(str(task["shard"][0])):
        images.append(work(jpg))
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
