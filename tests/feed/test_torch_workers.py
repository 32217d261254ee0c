from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from penstock.feed import this_worker
from penstock.feed.torch_workers import items_per_fetch
from penstock.plan import Cut


class _Workers(IterableDataset[Any]):
    """Yields, in each worker, what the worker knows about itself."""

    def __iter__(self) -> Iterator[Any]:
        worker = this_worker()
        assert worker is not None
        yield worker.id, worker.workers, worker.group


class _Fetches(IterableDataset[Any]):
    """Yields the number of items per fetch."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(6):
            yield items_per_fetch()


class _CutInWorker(IterableDataset[Any]):
    """Yields whether a cut leaves the worker something to share."""

    def __iter__(self) -> Iterator[Any]:
        yield this_worker(Cut(0, 2)) is not None, this_worker(Cut(0, 2, in_loader_worker=True)) is not None


def test_a_process_outside_of_a_dataloader_is_not_a_worker() -> None:
    assert this_worker() is None


def test_workers_that_are_started_together_have_their_group_in_common() -> None:
    loader = DataLoader(_Workers(), batch_size=None, num_workers=2)
    first, second = list(loader), list(loader)
    assert [(id, workers) for id, workers, _ in first] == [(0, 2), (1, 2)]
    assert len({group for _, _, group in first}) == 1
    assert {group for _, _, group in first} != {group for _, _, group in second}


def test_a_cut_made_in_a_worker_is_not_shared_again() -> None:
    assert list(DataLoader(_CutInWorker(), batch_size=None, num_workers=1)) == [[True, False]]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_size_of_a_batch_is_found_while_it_is_fetched(workers: int) -> None:
    batches = list(DataLoader(_Fetches(), batch_size=3, num_workers=workers))
    assert [batch.tolist() for batch in batches] == [[3, 3, 3], [3, 3, 3]]
    assert list(DataLoader(_Fetches(), batch_size=None, num_workers=workers)) == [1] * 6


def test_outside_of_a_fetch_there_is_one_item() -> None:
    assert items_per_fetch() == 1
