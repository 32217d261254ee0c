"""Simulates a cache of remote shards: the share of bytes it serves, compared with the optimal policy and with LRU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.dataset.conversion import format_to_inspect, open_files
from penstock.dataset.dataset import Dataset
from penstock.engines import Program, shard_uses
from penstock.errors import PlanError
from penstock.storage.cache_policy import Epoch, belady_hits, planned_hits, recency_hits

SHARES = (0.25, 0.5, 0.75)
_EPOCHS = 8  # of which the first fills the cache, and the last has none after it


@dataclass(frozen=True, slots=True)
class CacheResult:
    """What a cache of one size serves of an epoch once it is filled; part of ``penstock bench --cache --json``.

    Attributes:
        shuffled: Whether each epoch has an order of its own.
        share: The size of the cache, as a share of the dataset.
        best: The share of the bytes that the best possible cache serves, which knows all epochs.
        planned: The same for ``ps.Cache``, which knows this epoch and the next one.
        recent: The same for a cache that evicts what was used least recently.
    """

    shuffled: bool
    share: float
    best: float
    planned: float
    recent: float


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The simulation of a dataset's cache; ``penstock bench --cache --json`` prints these fields."""

    shards: int
    nbytes: int
    results: tuple[CacheResult, ...]


def simulate_cache(urls: str | Sequence[str], *, shares: Sequence[float] = SHARES) -> CacheReport:
    """Simulate caches of several sizes for the shards of a dataset, read in one order and reshuffled every epoch.

    Args:
        urls: The shards.
        shares: The sizes of the caches, as shares of the dataset.

    Raises:
        PlanError: There are no shards, or a share is not above 0.
        StorageError: The shards cannot be read.
    """
    if not all(share > 0 for share in shares):
        raise PlanError(f"shares={list(shares)}: each must be above 0")
    given = [urls] if isinstance(urls, str) else list(urls)
    datasets = [open_files(url, format_to_inspect(url)) for url in given]
    ds: Dataset = datasets[0].union(*datasets[1:]) if len(datasets) > 1 else datasets[0]
    results: list[CacheResult] = []
    for shuffled in (False, True):
        program = Program((ds.shuffle() if shuffled else ds).plan)
        sizes = [size for reader in program.readers for size in reader.sizes()]
        epochs = [_sequence(program, epoch) for epoch in range(_EPOCHS)]
        results += (_result(epochs, sizes, share, shuffled) for share in shares)
    return CacheReport(len(sizes), sum(sizes), tuple(results))


def _sequence(program: Program, epoch: int) -> Epoch:
    """Return the shards of all sources in the order of their first use in an epoch."""
    order = program.order(epoch)
    start = program.start(order, None)
    first = np.concatenate([shard_uses(program, leaf, order, start.left)[1] for leaf in range(len(program.readers))])
    used: list[int] = np.argsort(first, kind="stable")[: int(np.isfinite(first).sum())].tolist()
    return used


def _result(epochs: Sequence[Epoch], sizes: Sequence[int], share: float, shuffled: bool) -> CacheResult:
    capacity, whole = int(sum(sizes) * share), max(1, sum(sizes))

    def served(policy: Callable[[Sequence[Epoch], Sequence[int], int], list[int]]) -> float:
        hits = policy(epochs, sizes, capacity)[1:-1]
        return sum(hits) / len(hits) / whole

    return CacheResult(shuffled, share, served(belady_hits), served(planned_hits), served(recency_hits))
