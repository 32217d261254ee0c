"""What is measured of the local engine: the cost of a hop, processes beside a DataLoader, pools, the first sample.

``python engine_cases.py CASE ROW`` measures one row once, as ``cases.py`` does for the others.
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
from cases import Case, Result, Row, Task, main
from data import FULL, QUICK, Sizes
from watching import watched_memory

Dataset = Any  # the library is imported by the rows that measure it
Items = Callable[[Sizes], list[Any]]


def _from_items(items: list[Any]) -> Dataset:
    import penstock as ps

    return ps.from_items(items)


def _seconds(items: Iterable[Any]) -> float:
    """How long it takes to go through them."""
    begun = time.perf_counter()
    deque(items, maxlen=0)
    return time.perf_counter() - begun


# A hop: what it costs a sample to go through a pool that does nothing


def _ints(sizes: Sizes) -> list[Any]:
    return list(range(5 * sizes.tiny))


def _photos(sizes: Sizes) -> list[Any]:
    """The same few photos again and again: they are not copied, so their number costs no memory."""
    some = data.samples_of(data.photos(sizes))[:600]
    return [some[i % len(some)] for i in range(sizes.tiny)]


def _hop(items: Items, through: Callable[[list[Any]], Iterable[Any]]) -> Callable[[Task], Result]:
    """Measure a pass through a pool, and what it takes longer than a plain loop in one thread."""

    def measure(task: Task) -> Result:
        given = items(QUICK if task.check else task.sizes)
        # In turn, the best of each: the machine's mood is no part of it.
        rounds = [(_seconds(map(work.same, given)), _seconds(through(given))) for _ in range(3)]
        alone, seconds = (min(column) for column in zip(*rounds, strict=True))
        many = len(given)
        return {"seconds": seconds, "samples": many, "us over a loop": 1e6 * (seconds - alone) / many}

    return measure


def _serial(items: list[Any]) -> Iterable[Any]:
    """The engine that takes one sample at a time: the meaning of a plan, not its speed."""
    ds: Iterable[Any] = _from_items(items).map(work.same).on("serial")
    return ds


def _threads(items: list[Any]) -> Iterable[Any]:
    ds: Iterable[Any] = _from_items(items).map(work.same, workers=2)
    return ds


def _processes(items: list[Any]) -> Iterable[Any]:
    ds: Iterable[Any] = _from_items(items).map(work.same, workers=2, on="processes")
    return ds


def _submitted(items: list[Any]) -> Iterator[Any]:
    """One submit for each item, in order, bounded: what a pipeline of items pays."""
    with ThreadPoolExecutor(2) as pool:
        pending: deque[Future[Any]] = deque()
        for item in items:
            pending.append(pool.submit(work.same, item))
            if len(pending) >= 64:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# Processes: images of 224 x 224 in batches of 64 from two workers, beside a DataLoader

BATCH = 64
SETTLED = 10  # batches after which both sides are at their pace

Batches = Callable[[int], Iterable[Any]]


def _count(sizes: Sizes) -> int:
    return BATCH * (200 if sizes == FULL else 20)


def _streams(count: int) -> Iterable[Any]:
    """Workers make the samples from their numbers."""
    ds: Iterable[Any] = _from_items(range(count)).map(work.made, workers=2, on="processes").batched(BATCH)  # type: ignore[arg-type]
    return ds


def _sends(count: int) -> Iterable[Any]:
    """The images travel to the workers, and the samples back."""
    images = list(work.images())
    items = [images[number % len(images)] for number in range(count)]
    ds: Iterable[Any] = _from_items(items).map(work.augment, workers=2, on="processes").batched(BATCH)
    return ds


def _loads(collate: Callable[[list[Any]], Any] | None = None) -> Batches:
    """Forked workers have the images in their memory: nothing travels to them."""

    def batches(count: int) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        dataset: Any = work.Made(count)
        return DataLoader(dataset, batch_size=BATCH, num_workers=2, collate_fn=collate)

    return batches


def _batched(batches: Batches) -> Callable[[Task], Result]:
    """Measure the pace of batches once it is steady; and over all, the start of the workers included."""

    def measure(task: Task) -> Result:
        import torch

        assert torch is not None  # who trains has it loaded, whoever brings the data
        count = _count(task.sizes)
        stream = batches(count)
        if task.check:
            return _digest(stream)
        begun = settled = time.perf_counter()
        for number, _ in enumerate(stream, 1):
            if number == SETTLED:
                settled = time.perf_counter()
        ended = time.perf_counter()
        return {
            "seconds": ended - settled,
            "samples": count - SETTLED * BATCH,
            "with start, samples/s": count / (ended - begun),
        }

    return measure


def _digest(batches: Iterable[Any]) -> Result:
    """What came, in its order."""
    told = count = 0
    for batch in batches:
        told = zlib.crc32(memoryview(getattr(batch, "numpy", lambda batch=batch: batch)()).cast("B"), told)
        count += len(batch)
    return {"samples": count, "digest": told}


def _peak(batches: Batches) -> Callable[[Task], Result]:
    """Measure the memory of all processes together during a pass of a consumer that keeps two batches."""

    def measure(task: Task) -> Result:
        import torch

        assert torch is not None
        with watched_memory() as peaks:
            deque(batches(_count(QUICK if task.check else task.sizes)), maxlen=2)
        return peaks

    return measure


# A pipeline: waiting, computing without the interpreter lock, computing with it; a pool for each

Workers = tuple[Any, Any, Any]


def _pipeline(workers: Workers) -> Callable[[Task], Result]:
    """Measure a pass; say where its pools ended, and how much of its time the slowest of them was at work."""

    def measure(task: Task) -> Result:
        waiting, computing, thinking = workers
        ds = _from_items(list(range(_pipeline_count(task))))
        ds = ds.map(work.fetch, workers=waiting).map(work.squeeze, workers=computing)
        return _passed(ds.map(work.think, workers=thinking, on="processes"))

    return measure


def _alone(name: str, workers: int) -> Callable[[Task], Result]:
    """Measure a pool of the pipeline with nothing before or behind it: what it allows at most."""

    def measure(task: Task) -> Result:
        count = _pipeline_count(task)
        if name == "fetch":
            return _passed(_from_items(list(range(count))).map(work.fetch, workers=workers))
        if name == "squeeze":
            texts = [work.fetch(number) for number in range(20)]
            return _passed(_from_items([texts[i % 20] for i in range(count)]).map(work.squeeze, workers=workers))
        return _passed(_from_items(list(range(count))).map(work.think, workers=workers, on="processes"))

    return measure


def _pipeline_count(task: Task) -> int:
    """Enough for pools to find their sizes; few where only the way is tried."""
    return 3_000 if task.sizes == FULL and not task.check else 300


def _passed(ds: Dataset) -> Result:
    seconds, count = _seconds(ds), 0
    told: Result = {}
    for segment in ds.stats().segments:
        name = "processes" if segment.on == "processes" else "threads"
        told[f"{name}, at the end"] = told.get(f"{name}, at the end", 0) + segment.workers
        told["slowest pool busy"] = max(told.get("slowest pool busy", 0), segment.busy)
        count = segment.items
    return {"seconds": seconds, "samples": count, **told}


# The first sample: how long it takes to have an engine at work


def _first(**needs: Any) -> Callable[[Task], Result]:
    def measure(task: Task) -> Result:
        ds = _from_items(list(range(100))).map(work.same, workers=2, **needs)
        next(iter(ds.on("serial")))  # what is imported on the way is imported
        begun = time.perf_counter()
        samples = iter(ds)
        next(samples)
        seconds = time.perf_counter() - begun
        samples.close()
        return {"seconds": seconds}

    return measure


def _first_loaded(task: Task) -> Result:
    from torch.utils.data import DataLoader

    dataset: Any = range(100)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    begun = time.perf_counter()
    next(iter(loader))
    return {"seconds": time.perf_counter() - begun}


DATA = (data.photos,)

CASES = {
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
            Row("DataLoader, batches of numpy", _batched(_loads(work.stacked))),
            Row("penstock, made in the worker", _batched(_streams)),
            Row("penstock, images sent to the worker", _batched(_sends)),
        ),
        baseline="DataLoader",
    ),
    "process-memory": Case(
        "The same: memory of all processes together (peak: every page once, with shared memory; private: without)",
        (
            Row("DataLoader", _peak(_loads())),
            Row("DataLoader, batches of numpy", _peak(_loads(work.stacked))),
            Row("penstock, made in the worker", _peak(_streams)),
            Row("penstock, images sent to the worker", _peak(_sends)),
        ),
        baseline=None,
        most_rounds=5,
        peak=True,
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
        most_rounds=5,
    ),
    "first": Case(
        "From the start of the engine to its first sample, two workers, everything imported",
        (
            Row("DataLoader", _first_loaded),
            Row("penstock, threads", _first()),
            Row("penstock, processes", _first(on="processes")),
        ),
        baseline=None,
    ),
}


if __name__ == "__main__":
    main(CASES)
