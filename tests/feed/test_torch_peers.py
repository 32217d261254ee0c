"""The loader of torchdata: it saves and loads the state of its workers."""

from __future__ import annotations

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import penstock as ps
from penstock.testing import numbers

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

FULL = os.environ.get("PENSTOCK_FULL") == "1"

Wrap = Callable[[ps.Dataset], Any]


def _ds() -> ps.Dataset:
    return numbers((30, 12, 20)).shuffle(10)


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def _twice(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [sample, {**sample, "x": sample["x"] + 1000}]


PLANS: dict[str, tuple[Callable[[], ps.Dataset], int | None]] = {
    "batched": (lambda: _ds().batched(8), None),
    "torch batches": (lambda: _ds().map(dict), 16),
    "filter": (lambda: _ds().filter(_odd).batched(4), None),
    "flat_map, late shuffle": (lambda: _ds().flat_map(_twice).shuffle(7).batched(8), None),
    "skips": (lambda: numbers((30, 12, 20), bad=[3, 44]).shuffle(10).on_error("skip").batched(8), None),
}
WRAPS: dict[str, Wrap] = {
    "ds": lambda ds: ds,
    "to_torch": lambda ds: ds.to_torch(),
    "loader": lambda ds: ds.loader(0, 1),
}
CASES = [
    (plan, wrap, workers, persistent)
    for plan in PLANS
    for wrap in WRAPS
    for workers, persistent in ((0, False), (2, False), (2, True))
]


def _row(batch: Any) -> list[int]:
    return [int(x) for x in np.atleast_1d(np.asarray(batch["x"]))]


def _rows(batches: Any) -> list[list[int]]:
    return [_row(batch) for batch in batches]


@pytest.mark.parametrize(
    ("plan", "wrap", "workers", "persistent"), CASES if FULL else random.Random(5).sample(CASES, 3)
)
def test_a_stateful_dataloader_resumes_exactly_where_it_stopped(
    plan: str, wrap: str, workers: int, persistent: bool
) -> None:
    make, batch_size = PLANS[plan]

    def loader() -> StatefulDataLoader[Any]:
        dataset = WRAPS[wrap](make())
        return StatefulDataLoader(dataset, batch_size=batch_size, num_workers=workers, persistent_workers=persistent)

    straight = loader()
    first, second, third = (_rows(straight) for _ in range(3))
    assert len({str(first), str(second), str(third)}) == 3
    assert Counter(chain(*first)) == Counter(chain(*second)) == Counter(chain(*third))
    counts = [0, len(second) // 2, len(second)]
    if FULL:
        counts = [*range(len(second) + 1)]
    elif workers:  # every pass starts them
        counts = [counts[1 + list(PLANS).index(plan) % 2]]
    for count in counts:
        before = loader()
        _rows(before)
        items = iter(before)
        assert [_row(next(items)) for _ in range(count)] == second[:count]
        state = copy.deepcopy(before.state_dict())
        after = loader()
        after.load_state_dict(state)
        # An epoch of a loader ends with its last batch; one that torch batches, when torch finds a short batch.
        ended = wrap == "loader" and workers == 0 and count == len(second) and batch_size is None
        if not ended:
            assert _rows(after) == second[count:]
        assert _rows(after) == third
        assert _is_small_json(state)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True), *([(1, True), (2, False)] if FULL else [])])
def test_a_loader_is_checkpointed_after_every_step_of_two_epochs(workers: int, persistent: bool) -> None:
    """A consumer that takes exactly ``len`` batches, and saves its state with a model after each of them."""

    def loader() -> StatefulDataLoader[Any]:
        dataset = _ds().batched(8).loader(0, 1)
        return StatefulDataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=persistent)

    straight = loader()
    epochs = [_rows(straight) for _ in range(2)]
    steps = len(epochs[0])
    for stop in range(2 * steps + 1) if FULL else (3, steps) if workers else (0, 3, steps, steps + 2):
        before, got = loader(), []
        for epoch in range(2):
            take = min(steps, stop - epoch * steps)
            got += [_row(batch) for _, batch in zip(range(take), before, strict=False)] if take > 0 else []
        state = copy.deepcopy(before.state_dict())
        after = loader()
        after.load_state_dict(state)
        while len(got) < 2 * steps:
            got += _rows(after)
        assert got[: 2 * steps] == epochs[0] + epochs[1], stop


@pytest.mark.parametrize("workers", [0, 2 if FULL else 1])
def test_a_pass_of_a_dataloader_that_is_left_early_is_an_epoch_with_and_without_workers(workers: int) -> None:
    for wrap in ("loader", "to_torch"):
        dataset = WRAPS[wrap](_ds().batched(8))
        batches = DataLoader(dataset, batch_size=None, num_workers=workers)
        got = []
        for _ in range(3):
            for batch in batches:
                got.append(_row(batch))
                break
        assert got == [_row(next(iter(_ds().batched(8).epoch(epoch)))) for epoch in range(3)]
        assert _rows(batches) == _rows(_ds().batched(8).epoch(3))


def _is_small_json(state: Any) -> bool:
    """Return whether Penstock's part of a state is small JSON."""
    found = []
    if isinstance(state, dict):
        found = [part for key, part in state.items() if key in ("dataset_iter_state", "dataset_state") and part]
        return all(_is_small_json(part) for part in state.values() if isinstance(part, dict)) and all(
            len(json.dumps(part)) < 2000 for part in found
        )
    return True


def test_a_state_is_refused_by_another_number_of_workers() -> None:
    before = StatefulDataLoader(_ds().batched(8), batch_size=None, num_workers=2)
    next(iter(before))
    state = copy.deepcopy(before.state_dict())
    after = StatefulDataLoader(_ds().batched(8), batch_size=None, num_workers=0)
    after.load_state_dict(state)
    with pytest.raises(AssertionError, match="single process"):
        iter(after)
