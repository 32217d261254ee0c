"""Simulates a cache of remote shards: the share of bytes it serves, compared with the optimal policy and with LRU."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.dataset.conversion import format_to_inspect, open_files
from penstock.dataset.dataset import Dataset
from penstock.engines import Program, shard_uses
from penstock.errors import PlanError
from penstock.storage.cache_policy import NEVER, spare_bytes, working_bytes

SHARES = (0.25, 0.5, 0.75)
Epoch = Sequence[int]  # the objects of an epoch, in the order of their use
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


def belady_hits(epochs: Sequence[Epoch], sizes: Sequence[int], capacity: int) -> list[int]:
    """Return how many bytes of each epoch the best possible cache serves: one that knows all epochs.

    It evicts what is used last, and does not add what is used after everything that it has.
    """
    uses = [one for epoch in epochs for one in epoch]
    following: list[float] = [NEVER] * len(uses)
    seen: dict[int, int] = {}
    for at in range(len(uses) - 1, -1, -1):
        following[at] = seen.get(uses[at], NEVER)
        seen[uses[at]] = at
    return _replay(epochs, sizes, capacity, lambda at, _: following[at], exact=True)


def planned_hits(epochs: Sequence[Epoch], sizes: Sequence[int], capacity: int) -> list[int]:
    """Return how many bytes of each epoch a cache serves that knows the orders of two epochs, by this policy."""
    starts = np.cumsum([0, *map(len, epochs)]).tolist()
    ranks: list[Mapping[int, int]] = [{one: at for at, one in enumerate(epoch)} for epoch in epochs]

    def following(at: int, one: int) -> float:
        epoch = int(np.searchsorted(starts, at, "right"))  # the next one
        return starts[epoch] + ranks[epoch][one] if epoch < len(ranks) and one in ranks[epoch] else NEVER

    return _replay(epochs, sizes, capacity, following, exact=False)


def recency_hits(epochs: Sequence[Epoch], sizes: Sequence[int], capacity: int) -> list[int]:
    """Return how many bytes of each epoch a cache serves that evicts what was used least recently."""
    held: dict[int, None] = {}
    used, hits = 0, []
    for epoch in epochs:
        hit = 0
        for one in epoch:
            if one in held:
                hit += sizes[one]
                del held[one]
            else:
                used += sizes[one]
            held[one] = None
            while used > capacity:
                oldest = next(iter(held))
                del held[oldest]
                used -= sizes[oldest]
        hits.append(hit)
    return hits


def _replay(
    epochs: Sequence[Epoch], sizes: Sequence[int], capacity: int, following: Callable[[int, int], float], *, exact: bool
) -> list[int]:
    held: dict[int, float] = {}  # next use of each
    farthest: list[tuple[float, int]] = []  # (-next use, object), with entries that are out of date
    used, hits, at = 0, [], 0
    spare = 0 if exact else spare_bytes(capacity)
    for epoch in epochs:
        hit = 0
        for one in epoch:
            hit += sizes[one] if one in held else 0
            used -= sizes[one] if held.pop(one, None) is not None else 0
            until = following(at, one)
            at += 1
            short = used + sizes[one] - capacity
            forced = not exact and sizes[one] <= working_bytes(capacity)
            while short + (spare if short > 0 else 0) > 0 and farthest:
                distance, other = farthest[0]
                if held.get(other) != -distance:
                    heapq.heappop(farthest)
                elif -distance > until or (forced and short > 0):
                    heapq.heappop(farthest)
                    del held[other]
                    used -= sizes[other]
                    short -= sizes[other]
                else:
                    break
            if used + sizes[one] <= capacity and until < NEVER:
                held[one] = until
                used += sizes[one]
                heapq.heappush(farthest, (-until, one))
        hits.append(hit)
    return hits
