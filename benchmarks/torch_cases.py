"""Cases of training loops: a DataLoader over Penstock compared with one over webdataset, and the overhead of a loader.

``python torch_cases.py CASE ROW`` measures one row once, see ``cases.py``.
"""

from __future__ import annotations

import io
import random
import resource
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import islice
from typing import Any

import data
from cases import COMPAT, Case, Measure, Result, Row, Task, main
from data import Sizes, StoredData

Batches = Callable[[StoredData], Iterable[Any]]
Source = Callable[[Sizes], StoredData]

BATCH = 32
WORKERS = 2
WARMUP_BATCHES = 4  # after which the throughput of both sides is steady


def crop(side: int) -> Callable[[bytes], Any]:
    """Return a function that decodes, crops, resizes and flips with Pillow; an image always gives the same result."""

    def transform(jpg: bytes) -> Any:
        import numpy as np
        from PIL import Image

        rng = random.Random(zlib.crc32(jpg))
        with Image.open(io.BytesIO(jpg)) as image:
            width, height = image.size
            share = rng.uniform(0.5, 1.0)
            box = (rng.uniform(0, 1 - share) * width, rng.uniform(0, 1 - share) * height)
            corner = (box[0] + share * width, box[1] + share * height)
            out = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR, (*box, *corner))
            if rng.random() < 0.5:
                out = out.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return np.asarray(out)

    return transform


def _penstock(side: int) -> Batches:
    def batches(stored: StoredData) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        import penstock as ps

        transform = crop(side)
        samples = ps.read_tar(stored.shards).select("jpg", "cls").map(lambda s: (transform(s["jpg"]), int(s["cls"])))
        ds: Any = samples.batched(BATCH)
        return DataLoader(ds, batch_size=None, num_workers=WORKERS)

    return batches


def _penstock_unbatched(side: int) -> Batches:
    """Let the DataLoader collate samples into batches."""

    def batches(stored: StoredData) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        import penstock as ps

        transform = crop(side)
        ds: Any = ps.read_tar(stored.shards).select("jpg", "cls").map(lambda s: (transform(s["jpg"]), int(s["cls"])))
        return DataLoader(ds, batch_size=BATCH, num_workers=WORKERS)

    return batches


def _no_data_loader(side: int) -> Batches:
    """Use no DataLoader, but the engine's threads and a prefetching iterator of tensors."""

    def batches(stored: StoredData) -> Iterable[Any]:
        import penstock as ps

        transform = crop(side)
        ds = ps.read_tar(stored.shards).select("jpg", "cls").map(lambda s: (transform(s["jpg"]), int(s["cls"])))
        return ds.iter_torch_batches(BATCH)

    return batches


def _webdataset(side: int, library: str = "webdataset") -> Batches:
    def batches(stored: StoredData) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        wds: Any = import_module(library)
        dataset: Any = wds.WebDataset(stored.shards, shardshuffle=False)
        samples = dataset.to_tuple("jpg", "cls").map_tuple(crop(side), int).batched(BATCH)
        return DataLoader(samples, batch_size=None, num_workers=WORKERS)

    return batches


def _throughput(source: Source, batches: Batches) -> Measure:
    """Measure the steady throughput of batches, and the CPU time of all processes."""

    def measure(task: Task) -> Result:
        import torch

        assert torch is not None  # a training has it loaded, whichever library reads the data
        stored = source(task.sizes)
        if task.check:
            return _digest(batches(stored))
        started_at = steady_at = time.perf_counter()
        seen = warmup_samples = 0
        for number, (images, _) in enumerate(batches(stored), 1):
            seen += len(images)
            if number == WARMUP_BATCHES:
                steady_at, warmup_samples = time.perf_counter(), seen
        ended_at = time.perf_counter()
        return {
            "seconds": ended_at - steady_at,
            "samples": seen - warmup_samples,
            "with start, samples/s": seen / (ended_at - started_at),
            "CPU s": sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)),
        }

    return measure


def _digest(batches: Iterable[Any]) -> Result:
    """Return the number of samples and a checksum of images and classes that ignores their order."""
    total = count = 0
    for images, classes in batches:
        for image, label in zip(images, classes, strict=True):
            total = (total + zlib.crc32(memoryview(image.numpy()).cast("B"), int(label))) % 2**53
            count += 1
    return {"samples": count, "digest": total}


# The overhead of a loader per sample, and of a state


def _loader_cost(task: Task) -> Result:
    """Measure the CPU time per sample of a loader over that of iterating the dataset directly."""
    import penstock as ps

    count = 10 * task.sizes.tiny
    ds = ps.from_items(list(range(count))).shuffle()
    loader = ds.loader(0, 1)
    rounds = [(_cpu_s(ds), _cpu_s(loader)) for _ in range(1 if task.check else 5)]
    dataset_s, loader_s = (min(column) for column in zip(*rounds, strict=True))
    return {"seconds": loader_s, "samples": count, "us over a loop": 1e6 * (loader_s - dataset_s) / count}


def _ledger_cost(task: Task) -> Result:
    """Measure the CPU time and bytes per sample of a ledger over a loader without one, in batches of 64."""
    import penstock as ps

    count = 10 * task.sizes.tiny
    ds = ps.from_items(list(range(count))).shuffle().batched(64, collate=list)
    plain, recorded = ds.loader(0, 1), ds.loader(0, 1, ledger=task.scratch / "ledger")
    rounds = [(_cpu_s(plain), _cpu_s(recorded)) for _ in range(1 if task.check else 5)]
    plain_s, ledger_s = (min(column) for column in zip(*rounds, strict=True))
    recorded.close()
    ledger_bytes = sum(path.stat().st_size for path in (task.scratch / "ledger").glob("*.ledger"))
    return {
        "seconds": ledger_s,
        "samples": count,
        "us over a loop": 1e6 * (ledger_s - plain_s) / count,
        "bytes a sample": ledger_bytes / len(rounds) / count,
    }


def _cpu_s(items: Iterable[Any]) -> float:
    started_at = time.process_time()
    deque(items, maxlen=0)
    return time.process_time() - started_at


def _state(task: Task) -> Result:
    """Measure how long a state takes in the middle of a shuffled epoch of many shards."""
    import penstock as ps

    loader = ps.read_tar(str(data.many_shards(task.sizes).folder)).shuffle().batched(16).loader(0, 1)
    items = iter(loader)
    deque(islice(items, 20), maxlen=0)
    loader.state_dict()  # the first call also computes the dataset's fingerprint
    total_s = 0.0
    for _ in range(100):
        next(items)
        started_at = time.perf_counter()
        loader.state_dict()
        total_s += time.perf_counter() - started_at
    return {"seconds": total_s / 100}


def _rows(source: Source, side: int) -> tuple[Row, ...]:
    return (
        Row("webdataset", _throughput(source, _webdataset(side))),
        Row(COMPAT, _throughput(source, _webdataset(side, COMPAT))),
        Row("penstock", _throughput(source, _penstock(side))),
        Row("penstock, batches by the DataLoader", _throughput(source, _penstock_unbatched(side))),
        Row("penstock, no DataLoader", _throughput(source, _no_data_loader(side))),
    )


DATA = (data.jpegs, data.thumbnails, data.many_shards)

CASES = {
    "torch-photos": Case(
        "A DataLoader with 2 workers: 500 x 375 JPEG, random crop to 224 by Pillow, batches of 32",
        _rows(data.jpegs, 224),
    ),
    "torch-thumbnails": Case(
        "The same with 64 x 64 JPEG and a crop to 56",
        _rows(data.thumbnails, 56),
    ),
    "loader": Case(
        "The overhead of a loader over its dataset, and a state in the middle of an epoch of many shards",
        (Row("a sample", _loader_cost), Row("a sample, with a ledger", _ledger_cost), Row("a state", _state)),
        baseline=None,
    ),
}


if __name__ == "__main__":
    main(CASES)
