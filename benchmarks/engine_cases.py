"""Cases of the local engine: the overhead of a pool, processes and a DataLoader, pool sizes, the first sample.

``python engine_cases.py CASE ROW`` measures one row once, see ``cases.py``.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import data
import work
from cases import Case, Measure, Result, Row, Task, main
from data import FULL, QUICK, Sizes
from watching import peak_memory

Dataset = Any  # the library is imported by the rows that measure it
Items = Callable[[Sizes], list[Any]]


def _from_items(items: list[Any]) -> Dataset:
    import penstock as ps

    return ps.from_items(items)


def _seconds(items: Iterable[Any]) -> float:
    """Return how long it takes to iterate over the items."""
    started_at = time.perf_counter()
    deque(items, maxlen=0)
    return time.perf_counter() - started_at


# A hop: the overhead per sample of a pool whose function does nothing


def _ints(sizes: Sizes) -> list[Any]:
    return list(range(5 * sizes.tiny))


def _photos(sizes: Sizes) -> list[Any]:
    """Return references to the same 600 photos, repeated, so that the number of items costs no memory."""
    photos = data.read_samples(data.photos(sizes))[:600]
    return [photos[i % len(photos)] for i in range(sizes.tiny)]


def _hop(items_of: Items, run: Callable[[list[Any]], Iterable[Any]]) -> Measure:
    """Measure a pass through a pool, and its overhead over a plain loop in one thread."""

    def measure(task: Task) -> Result:
        items = items_of(QUICK if task.check else task.sizes)
        # Alternate, and take the best of each: this removes most of the machine's noise.
        rounds = [(_seconds(map(work.identity, items)), _seconds(run(items))) for _ in range(3)]
        plain, seconds = (min(column) for column in zip(*rounds, strict=True))
        count = len(items)
        return {"seconds": seconds, "samples": count, "us over a loop": 1e6 * (seconds - plain) / count}

    return measure


def _serial(items: list[Any]) -> Iterable[Any]:
    """Run on the serial engine, which takes one sample at a time: it defines what a plan means, not its speed."""
    ds: Iterable[Any] = _from_items(items).map(work.identity).on("serial")
    return ds


def _threads(items: list[Any]) -> Iterable[Any]:
    ds: Iterable[Any] = _from_items(items).map(work.identity, workers=2)
    return ds


def _processes(items: list[Any]) -> Iterable[Any]:
    ds: Iterable[Any] = _from_items(items).map(work.identity, workers=2, on="processes")
    return ds


def _submitted(items: list[Any]) -> Iterator[Any]:
    """Submit each item separately to a thread pool, in order and bounded: what a pipeline of single items costs."""
    with ThreadPoolExecutor(2) as pool:
        pending: deque[Future[Any]] = deque()
        for item in items:
            pending.append(pool.submit(work.identity, item))
            if len(pending) >= 64:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# Processes: images of 224 x 224 in batches of 64 from two workers, compared with a DataLoader

BATCH = 64
WARMUP_BATCHES = 10  # after which the throughput of both sides is steady

Batches = Callable[[int], Iterable[Any]]


def _count(sizes: Sizes) -> int:
    return BATCH * (200 if sizes == FULL else 20)


def _streams(count: int) -> Iterable[Any]:
    """Let workers create the samples from their numbers."""
    ds: Iterable[Any] = _from_items(range(count)).map(work.create_sample, workers=2, on="processes").batched(BATCH)  # type: ignore[arg-type]
    return ds


def _sends(count: int) -> Iterable[Any]:
    """Send the images to the workers, and the samples back."""
    images = list(work.images())
    items = [images[number % len(images)] for number in range(count)]
    ds: Iterable[Any] = _from_items(items).map(work.augment, workers=2, on="processes").batched(BATCH)
    return ds


def _loads(collate: Callable[[list[Any]], Any] | None = None) -> Batches:
    """Use a DataLoader whose forked workers have the images in memory: no image is sent to them."""

    def batches(count: int) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        dataset: Any = work.ImageDataset(count)
        return DataLoader(dataset, batch_size=BATCH, num_workers=2, collate_fn=collate)

    return batches


def _batched(batches: Batches) -> Measure:
    """Measure the steady throughput of batches, and the overall throughput with the start of the workers."""

    def measure(task: Task) -> Result:
        import torch

        assert torch is not None  # a training has it loaded, whichever library reads the data
        count = _count(task.sizes)
        stream = batches(count)
        if task.check:
            return _digest(stream)
        started_at = steady_at = time.perf_counter()
        for number, _ in enumerate(stream, 1):
            if number == WARMUP_BATCHES:
                steady_at = time.perf_counter()
        ended_at = time.perf_counter()
        return {
            "seconds": ended_at - steady_at,
            "samples": count - WARMUP_BATCHES * BATCH,
            "with start, samples/s": count / (ended_at - started_at),
        }

    return measure


def _digest(batches: Iterable[Any]) -> Result:
    """Return the number of samples and a checksum of the batches in their order."""
    checksum = count = 0
    for batch in batches:
        checksum = zlib.crc32(memoryview(getattr(batch, "numpy", lambda batch=batch: batch)()).cast("B"), checksum)
        count += len(batch)
    return {"samples": count, "digest": checksum}


def _peak(batches: Batches) -> Measure:
    """Measure the total memory of all processes during a pass of a consumer that keeps two batches."""

    def measure(task: Task) -> Result:
        import torch

        assert torch is not None
        with peak_memory() as peaks:
            deque(batches(_count(QUICK if task.check else task.sizes)), maxlen=2)
        return peaks

    return measure


# A pipeline: waiting, computing without the interpreter lock, and computing with it, each in its own pool

Workers = tuple[Any, Any, Any]


def _pipeline(workers: Workers) -> Measure:
    """Measure a pass, the final sizes of its pools, and the share of the time that the slowest pool was busy."""

    def measure(task: Task) -> Result:
        fetch_workers, squeeze_workers, think_workers = workers
        ds = _from_items(list(range(_pipeline_count(task))))
        ds = ds.map(work.fetch, workers=fetch_workers).map(work.squeeze, workers=squeeze_workers)
        return _run_with_stats(ds.map(work.think, workers=think_workers, on="processes"))

    return measure


def _alone(name: str, workers: int) -> Measure:
    """Measure one pool of the pipeline without the others: the most that it can deliver."""

    def measure(task: Task) -> Result:
        count = _pipeline_count(task)
        if name == "fetch":
            return _run_with_stats(_from_items(list(range(count))).map(work.fetch, workers=workers))
        if name == "squeeze":
            texts = [work.fetch(number) for number in range(20)]
            ds = _from_items([texts[i % 20] for i in range(count)])
            return _run_with_stats(ds.map(work.squeeze, workers=workers))
        return _run_with_stats(_from_items(list(range(count))).map(work.think, workers=workers, on="processes"))

    return measure


def _pipeline_count(task: Task) -> int:
    """Return the number of samples: enough for pools to find their sizes, or few for a trial run."""
    return 3_000 if task.sizes == FULL and not task.check else 300


def _run_with_stats(ds: Dataset) -> Result:
    seconds, count = _seconds(ds), 0
    stats: Result = {}
    for segment in ds.stats().segments:
        name = "processes" if segment.on == "processes" else "threads"
        stats[f"{name}, at the end"] = stats.get(f"{name}, at the end", 0) + segment.workers
        stats["slowest pool busy"] = max(stats.get("slowest pool busy", 0), segment.busy)
        count = segment.items
    return {"seconds": seconds, "samples": count, **stats}


# The first sample: how long an engine takes to start


def _first(**options: Any) -> Measure:
    def measure(task: Task) -> Result:
        ds = _from_items(list(range(100))).map(work.identity, workers=2, **options)
        next(iter(ds.on("serial")))  # imports everything that is loaded on first use
        started_at = time.perf_counter()
        samples = iter(ds)
        next(samples)
        seconds = time.perf_counter() - started_at
        samples.close()
        return {"seconds": seconds}

    return measure


def _first_of_data_loader(task: Task) -> Result:
    from torch.utils.data import DataLoader

    dataset: Any = range(100)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    started_at = time.perf_counter()
    next(iter(loader))
    return {"seconds": time.perf_counter() - started_at}


# A stage that works on batches, as one on a device does: a matrix product, which costs less a row the more rows it has

ROWS, WIDTH = 128, 1024
BATCH_LOOP = f"a loop over batches of {ROWS}"
BATCH_STAGE = f"penstock, map_batches of {ROWS}"


class Product:
    """Multiplies rows by a matrix, on one core."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self._tensor, self._matrix = torch.from_numpy, torch.ones(WIDTH, WIDTH)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": (self._tensor(batch["x"]) @ self._matrix).numpy()}


def _batch_loop(rows: list[Any], size: int) -> Iterator[Any]:
    import numpy as np

    product = Product()
    for start in range(0, len(rows), size):
        yield product({"x": np.stack([row["x"] for row in rows[start : start + size]])})["y"]


def _batch_stage(rows: list[Any], size: int) -> Iterable[Any]:
    ds = _from_items(rows).map_batches(Product, size, workers=1, gpus=1).batched(size)
    batches: Iterable[Any] = ds.on("local", devices=["cpu"])
    return batches


def _batches_of(run: Callable[[list[Any], int], Iterable[Any]], size: int) -> Measure:
    """Measure the best of three passes, which removes most of the machine's noise."""

    def measure(task: Task) -> Result:
        import numpy as np

        count = ROWS * (200 if task.sizes == FULL else 20)
        rows = [{"x": row} for row in np.random.default_rng(0).random((count, WIDTH), np.float32)]
        if task.check:
            return {"samples": sum(len(batch["y"] if isinstance(batch, dict) else batch) for batch in run(rows, size))}
        return {"seconds": min(_seconds(run(rows, size)) for _ in range(3)), "samples": count}

    return measure


DATA = (data.photos,)

CASES = {
    "batch-stage": Case(
        f"Rows of {WIDTH} numbers times a square matrix, on one core: what a stage on a device is like",
        (
            Row("a loop over single rows", _batches_of(_batch_loop, 1)),
            Row(BATCH_LOOP, _batches_of(_batch_loop, ROWS)),
            Row(BATCH_STAGE, _batches_of(_batch_stage, ROWS)),
        ),
        baseline=BATCH_LOOP,
    ),
    "hop": Case(
        "A hop: a map that does nothing, through a pool of two workers",
        (
            Row("ints, serial", _hop(_ints, _serial)),
            Row("ints, threads", _hop(_ints, _threads)),
            Row("ints, one submit a sample", _hop(_ints, _submitted)),
            Row("ints, processes", _hop(_ints, _processes)),
            Row("photos in memory, serial", _hop(_photos, _serial)),
            Row("photos in memory, threads", _hop(_photos, _threads)),
            Row("photos in memory, one submit a sample", _hop(_photos, _submitted)),
            Row("photos in memory, processes", _hop(_photos, _processes)),
        ),
        baseline=None,
    ),
    "process": Case(
        "Images of 224 x 224 x 3 from two worker processes, in batches of 64 (a DataLoader's forked workers have their "
        "source in memory, so nothing travels to them; 'images sent' does send it)",
        (
            Row("DataLoader", _batched(_loads())),
            Row("DataLoader, batches of numpy", _batched(_loads(work.stack))),
            Row("penstock, made in the worker", _batched(_streams)),
            Row("penstock, images sent to the worker", _batched(_sends)),
        ),
        baseline="DataLoader",
    ),
    "process-memory": Case(
        "The same: memory of all processes together (peak: every page once, with shared memory; private: without)",
        (
            Row("DataLoader", _peak(_loads())),
            Row("DataLoader, batches of numpy", _peak(_loads(work.stack))),
            Row("penstock, made in the worker", _peak(_streams)),
            Row("penstock, images sent to the worker", _peak(_sends)),
        ),
        baseline=None,
        max_rounds=5,
        measures_memory=True,
    ),
    "pipeline": Case(
        "5 ms of waiting, 2 ms of zlib in threads, 2.3 ms of Python in processes, a sample",
        (
            Row("limit: fetch alone, 16 threads", _alone("fetch", 16)),
            Row("limit: squeeze alone, 1 thread", _alone("squeeze", 1)),
            Row("limit: think alone, 1 process", _alone("think", 1)),
            Row("hand-set: 4, 1, 1", _pipeline((4, 1, 1))),
            Row("hand-set: 8, 1, 1", _pipeline((8, 1, 1))),
            Row("hand-set: 16, 1, 1", _pipeline((16, 1, 1))),
            Row("hand-set: 16, 2, 2", _pipeline((16, 2, 2))),
            Row("sizes its pools itself", _pipeline((None, None, None))),
        ),
        baseline=None,
        max_rounds=5,
    ),
    "first": Case(
        "From the start of the engine to its first sample, two workers, everything imported",
        (
            Row("DataLoader", _first_of_data_loader),
            Row("penstock, threads", _first()),
            Row("penstock, processes", _first(on="processes")),
        ),
        baseline=None,
    ),
}


if __name__ == "__main__":
    main(CASES)
