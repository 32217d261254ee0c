"""Several datasets in turn, or at random."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.compat.webdataset.pytorch import IterableDataset


class RandomMix(IterableDataset[Any]):
    """Datasets taken at random by ``probs``, until one ends, or with ``longest`` all have ended."""

    def __init__(self, datasets: Sequence[Any], probs: Any = None, longest: bool = False) -> None:
        self.datasets, self.probs, self.longest = datasets, probs, longest

    def _chosen(self, at: int, weights: list[float]) -> int:
        return random.choices(range(len(weights)), weights)[0]

    def __iter__(self) -> Iterator[Any]:
        left, at, end = [iter(dataset) for dataset in self.datasets], 0, object()
        weights = [1.0] * len(left) if self.probs is None else list(self.probs)
        while left:
            at = self._chosen(at, weights)
            if (sample := next(left[at], end)) is not end:
                at += 1
                yield sample
            elif self.longest:
                del left[at], weights[at]
            else:
                return


class RoundRobin(RandomMix):
    def __init__(self, datasets: Sequence[Any], longest: bool = False) -> None:
        super().__init__(datasets, None, longest)

    def _chosen(self, at: int, weights: list[float]) -> int:
        return at % len(weights)
