"""What is measured of training loops: a DataLoader over Penstock beside webdataset's, and what a loader costs.

``python torch_cases.py CASE ROW`` measures one row once, as ``cases.py`` does for the others.
"""

from __future__ import annotations

import io
import random
import resource
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import data
from cases import Case, Result, Row, Task, main
from data import Made, Sizes

Batches = Callable[[Made], Iterable[Any]]
Source = Callable[[Sizes], Made]

BATCH = 32
WORKERS = 2
SETTLED = 4  # batches after which both sides are at their pace


def crop(side: int) -> Callable[[bytes], Any]:
    """Decode, crop at random, resize and flip by Pillow: the same work for everybody, whatever the place."""

    def transform(jpg: bytes) -> Any:
        import numpy as np
        from PIL import Image

        dice = random.Random(zlib.crc32(jpg))
        with Image.open(io.BytesIO(jpg)) as image:
            width, height = image.size
            share = dice.uniform(0.5, 1.0)
            box = (dice.uniform(0, 1 - share) * width, dice.uniform(0, 1 - share) * height)
            corner = (box[0] + share * width, box[1] + share * height)
            out = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR, (*box, *corner))
            if dice.random() < 0.5:
                out = out.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return np.asarray(out)

    return transform


def _penstock(side: int) -> Batches:
    def batches(made: Made) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        import penstock as ps

        work = crop(side)
        samples = ps.read_tar(made.shards).select("jpg", "cls").map(lambda s: (work(s["jpg"]), int(s["cls"])))
        ds: Any = samples.batched(BATCH)
        return DataLoader(ds, batch_size=None, num_workers=WORKERS)

    return batches


def _penstock_unbatched(side: int) -> Batches:
    """The DataLoader makes the batches, of samples."""

    def batches(made: Made) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        import penstock as ps

        work = crop(side)
        ds: Any = ps.read_tar(made.shards).select("jpg", "cls").map(lambda s: (work(s["jpg"]), int(s["cls"])))
        return DataLoader(ds, batch_size=BATCH, num_workers=WORKERS)

    return batches


def _alone(side: int) -> Batches:
    """No DataLoader: the engine's own threads and a prefetching iterator of tensors."""

    def batches(made: Made) -> Iterable[Any]:
        import penstock as ps

        work = crop(side)
        ds = ps.read_tar(made.shards).select("jpg", "cls").map(lambda s: (work(s["jpg"]), int(s["cls"])))
        return ds.iter_torch_batches(BATCH)

    return batches


def _webdataset(side: int) -> Batches:
    def batches(made: Made) -> Iterable[Any]:
        import webdataset as wds
        from torch.utils.data import DataLoader

        found: Any = wds.WebDataset(made.shards, shardshuffle=False)
        samples = found.to_tuple("jpg", "cls").map_tuple(crop(side), int).batched(BATCH)
        return DataLoader(samples, batch_size=None, num_workers=WORKERS)

    return batches


def _fed(source: Source, batches: Batches) -> Callable[[Task], Result]:
    """Measure the pace of batches once it is steady; CPU seconds are of all processes."""

    def measure(task: Task) -> Result:
        import torch

        assert torch is not None  # who trains has it loaded, whoever brings the data
        made = source(task.sizes)
        if task.check:
            return _digest(batches(made))
        begun = settled = time.perf_counter()
        seen = at_pace = 0
        for number, (images, _) in enumerate(batches(made), 1):
            seen += len(images)
            if number == SETTLED:
                settled, at_pace = time.perf_counter(), seen
        ended = time.perf_counter()
        return {
            "seconds": ended - settled,
            "samples": seen - at_pace,
            "with start, samples/s": seen / (ended - begun),
            "CPU s": sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)),
        }

    return measure


def _digest(batches: Iterable[Any]) -> Result:
    """What came, in any order: images and classes."""
    told = count = 0
    for images, classes in batches:
        for image, label in zip(images, classes, strict=True):
            told = (told + zlib.crc32(memoryview(image.numpy()).cast("B"), int(label))) % 2**53
            count += 1
    return {"samples": count, "digest": told}


# What a loader costs: its own share of a sample, and a state


def _loader_cost(task: Task) -> Result:
    """Microseconds of CPU a sample that a loader takes over iterating the dataset itself."""
    import penstock as ps

    many = 10 * task.sizes.tiny
    ds = ps.from_items(list(range(many))).shuffle()
    loader = ds.loader(0, 1)
    rounds = [(_cpu(ds), _cpu(loader)) for _ in range(1 if task.check else 5)]
    alone, through = (min(column) for column in zip(*rounds, strict=True))
    return {"seconds": through, "samples": many, "us over a loop": 1e6 * (through - alone) / many}


def _ledger_cost(task: Task) -> Result:
    """Microseconds of CPU a sample that a ledger takes over a loader without one, in batches of 64."""
    import penstock as ps

    many = 10 * task.sizes.tiny
    ds = ps.from_items(list(range(many))).shuffle().batched(64, collate=list)
    plain, written = ds.loader(0, 1), ds.loader(0, 1, ledger=task.scratch / "ledger")
    rounds = [(_cpu(plain), _cpu(written)) for _ in range(1 if task.check else 5)]
    alone, through = (min(column) for column in zip(*rounds, strict=True))
    written.close()
    kept = sum(path.stat().st_size for path in (task.scratch / "ledger").glob("*.ledger"))
    cost = 1e6 * (through - alone) / many
    return {"seconds": through, "samples": many, "us over a loop": cost, "bytes a sample": kept / len(rounds) / many}


def _cpu(items: Iterable[Any]) -> float:
    begun = time.process_time()
    deque(items, maxlen=0)
    return time.process_time() - begun


def _state(task: Task) -> Result:
    """Seconds that a state takes, in the middle of a shuffled epoch of many shards."""
    import penstock as ps

    loader = ps.read_tar(str(data.many(task.sizes).folder)).shuffle().batched(16).loader(0, 1)
    items = iter(loader)
    deque(islice(items, 20), maxlen=0)
    loader.state_dict()  # the first names the dataset
    spent = 0.0
    for _ in range(100):
        next(items)
        begun = time.perf_counter()
        loader.state_dict()
        spent += time.perf_counter() - begun
    return {"seconds": spent / 100}


def _rows(source: Source, side: int) -> tuple[Row, ...]:
    return (
        Row("webdataset", _fed(source, _webdataset(side))),
        Row("penstock", _fed(source, _penstock(side))),
        Row("penstock, batches by the DataLoader", _fed(source, _penstock_unbatched(side))),
        Row("penstock, no DataLoader", _fed(source, _alone(side))),
    )


DATA = (data.jpegs, data.thumbnails, data.many)

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
        "What a loader takes over the dataset it feeds from, and a state in the middle of an epoch of many shards",
        (Row("a sample", _loader_cost), Row("a sample, with a ledger", _ledger_cost), Row("a state", _state)),
        baseline=None,
    ),
}


if __name__ == "__main__":
    main(CASES)
