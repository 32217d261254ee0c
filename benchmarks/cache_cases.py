"""Cases of caches: results of stages that are kept on disk, and shards that are kept by their next use.

``python cache_cases.py CASE ROW`` measures one row once, see ``cases.py``.
"""

from __future__ import annotations

import time
from typing import Any

import data
import numpy as np
from cases import Case, Measure, Result, Row, Task, main

EPOCHS = 8
SHARDS = 2000

Dataset = Any  # the library is imported by the rows that measure it


# Results: photos decoded and scaled to 224 x 224, with and without a cache


def _decoded(task: Task) -> Dataset:
    import penstock as ps
    from penstock import vision

    stored = data.jpegs(task.sizes)
    return ps.read_tar(stored.shards).shuffle().decode(jpg=vision.Resize((224, 224)), workers=2)


def _epoch(cached: bool, warm: bool) -> Measure:
    """Measure one epoch of batches; ``warm``: after another one has filled the cache."""

    def measure(task: Task) -> Result:
        ds = _decoded(task)
        if cached:
            ds = ds.cache(task.scratch / "results")
        ds = ds.batched(64)
        if warm:
            for _ in ds.epoch(1):
                pass
        begun, cpu_at_start, samples = time.perf_counter(), time.process_time(), 0
        checksum = 0
        for batch in ds.epoch(0):
            samples += len(batch["jpg"])
            if task.check:
                checksum += int(np.asarray(batch["jpg"], np.int64).sum())
        if task.check:
            return {"samples": samples, "checksum": checksum}
        cpu_s = time.process_time() - cpu_at_start
        return {"seconds": time.perf_counter() - begun, "samples": samples, "CPU s": cpu_s}

    return measure


# Policy: the share of an epoch that a cache serves, simulated


def _served(policy: str, share: float) -> Measure:
    """Measure the bytes of reshuffled epochs that a cache does not serve, as seconds at 1 GB/s."""

    def measure(task: Task) -> Result:
        from penstock.inspection import cache_bench

        rng = np.random.default_rng(0)
        epochs = [rng.permutation(SHARDS).tolist() for _ in range(EPOCHS)]
        sizes = [100_000_000] * SHARDS
        hits = getattr(cache_bench, policy)(epochs, sizes, int(sum(sizes) * share))[1:-1]
        fetched = sum(sizes) * len(hits) - sum(hits)
        if task.check:
            return {"samples": SHARDS}
        return {"seconds": fetched / len(hits) / 1e9, "samples": SHARDS, "nbytes": fetched / len(hits)}

    return measure


_POLICIES = {
    "limit: the best possible": "belady_hits",
    "penstock": "planned_hits",
    "least recently used": "recency_hits",
}

CASES: dict[str, Case] = {
    "results": Case(
        "Photos decoded and scaled to 224 x 224 in batches of 64, 2 workers: without a cache, filling one, from one",
        (
            Row("penstock", _epoch(cached=False, warm=False)),
            Row("penstock, the epoch that fills ds.cache", _epoch(cached=True, warm=False)),
            Row("penstock, a later epoch", _epoch(cached=True, warm=True)),
        ),
        baseline="penstock",
        max_rounds=10,
    ),
    "cache-policy": Case(
        "What a cache for half of 2,000 shards of 100 MB does not serve of a reshuffled epoch, simulated: seconds at "
        "1 GB/s",
        tuple(Row(name, _served(policy, 0.5)) for name, policy in _POLICIES.items()),
        baseline="limit: the best possible",
        max_rounds=1,
    ),
}


if __name__ == "__main__":
    main(CASES)
