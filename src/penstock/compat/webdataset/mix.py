"""Several datasets in turn, or at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from penstock.compat.webdataset.pytorch import IterableDataset


def _round_robin(*sources: Iterator[Any], longest: bool) -> Iterator[Any]:
    """Take one sample of each source in turn, until one ends, or with ``longest`` all have ended."""
    left, at = list(sources), 0
    while left:
        at %= len(left)
        try:
            sample = next(left[at])
        except StopIteration:
            if not longest:
                return
            del left[at]
            continue
        at += 1
        yield sample


round_robin_shortest = partial(_round_robin, longest=False)
round_robin_longest = partial(_round_robin, longest=True)


def random_samples(sources: list[Iterator[Any]], probs: Any = None, longest: bool = False) -> Iterator[Any]:
    """Take samples of sources chosen by their weights, until one ends, or with ``longest`` all have ended."""
    weights = [1.0] * len(sources) if probs is None else list(probs)
    while sources:
        shares = list(accumulate(weights))
        chosen = random.random() * shares[-1]
        at = next((place for place, share in enumerate(shares) if chosen <= share), len(sources) - 1)
        try:
            sample = next(sources[at])
        except StopIteration:
            if not longest:
                return
            del sources[at], weights[at]
            continue
        yield sample


class RoundRobin(IterableDataset[Any]):
    """Datasets taken in turn, until the shortest ends, or with ``longest`` the last."""

    def __init__(self, datasets: Sequence[Any], longest: bool = False) -> None:
        self.datasets, self.longest = datasets, longest

    def __iter__(self) -> Iterator[Any]:
        return _round_robin(*[iter(dataset) for dataset in self.datasets], longest=self.longest)


class RandomMix(IterableDataset[Any]):
    """Datasets taken at random by ``probs``, until one ends, or with ``longest`` the last."""

    def __init__(self, datasets: Sequence[Any], probs: Any = None, longest: bool = False) -> None:
        self.datasets, self.probs, self.longest = datasets, probs, longest

    def __iter__(self) -> Iterator[Any]:
        return random_samples([iter(dataset) for dataset in self.datasets], self.probs, self.longest)
