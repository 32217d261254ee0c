"""States that are loaded by another plan: they are refused, or continue exactly."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from itertools import islice
from random import Random
from typing import Any, Literal

import numpy as np
import pytest

import penstock as ps
from penstock.errors import StateError
from penstock.feed import Loader
from penstock.testing import numbers, one_epoch_loader

FULL = os.environ.get("PENSTOCK_FULL") == "1"
How = Literal["range", "step"]
Change = Callable[[ps.Dataset], ps.Dataset]


def _two(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**sample, "copy": (*sample.get("copy", ()), copy)} for copy in range(2)]


def _some_copies(sample: dict[str, Any], rng: Any) -> list[dict[str, Any]]:
    return [{**sample, "copy": (*sample.get("copy", ()), copy)} for copy in range(rng.integers(3))]


def _third(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 3 == 0)


def _often(sample: dict[str, Any], rng: Any) -> bool:
    return bool(rng.random() < 0.7)


def _noise(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    return {**sample, "noise": float(rng.random())}


def _negated(batch: Any) -> Any:
    return {**batch, "x": -batch["x"]}


def _samples(item: Any) -> list[Any]:
    """Return what identifies the samples of an item, which may be a batch, or a batch of batches."""
    if isinstance(item, list):
        return [sample for inner in item for sample in _samples(inner)]
    return [(item["x"], item.get("copy"))]


STAGES: dict[str, Change] = {
    "map": lambda ds: ds.map(dict),
    "map, rng": lambda ds: ds.map(_noise),
    "filter": lambda ds: ds.filter(_third),
    "filter, rng": lambda ds: ds.filter(_often),
    "flat_map": lambda ds: ds.flat_map(_two),
    "flat_map, rng": lambda ds: ds.flat_map(_some_copies),
    "shuffle 4": lambda ds: ds.shuffle(4),
    "shuffle 10": lambda ds: ds.shuffle(10),
    "limit": lambda ds: ds.limit(17),
    "skip": lambda ds: ds.skip(3),
    "repeat": lambda ds: ds.repeat(2),
}
BATCHES: dict[str, Change] = {
    "items": lambda ds: ds,
    "batched 3": lambda ds: ds.batched(3, collate=list),
    "batched 4": lambda ds: ds.batched(4, collate=list),
    "batched 3, mapped": lambda ds: ds.batched(3, collate=list).map(list),
    "batched 3, split": lambda ds: ds.batched(3, collate=list).flat_map(lambda batch: batch),
    "batched 4, split": lambda ds: ds.batched(4, collate=list).flat_map(lambda batch: batch),
    "batched 4, shuffled": lambda ds: ds.batched(4, collate=list).shuffle(2),
}


def _plan(names: list[str], batches: str) -> ps.Dataset:
    ds = numbers((9, 0, 14)).on("serial")
    for name in names:
        ds = STAGES[name](ds)
    return BATCHES[batches](ds)


def _changed(names: list[str], batches: str, rng: Random) -> tuple[list[str], str]:
    """Return the plan with one stage added, removed or replaced."""
    if rng.random() < 0.3:
        return names, rng.choice(list(BATCHES))
    at, kind = rng.randrange(len(names) + 1), rng.choice(["add", "remove", "replace"])
    new = [] if kind == "remove" else [rng.choice(list(STAGES))]
    return [*names[:at], *new, *names[at + (kind != "add") :]], batches


@pytest.mark.parametrize("part", range(4))
def test_a_state_is_refused_by_a_plan_that_differs_in_a_stage_or_continues_exactly(part: int) -> None:
    rng = Random(part)
    continued = refused = 0
    for _ in range(1500 if FULL else 60):
        names, batches = rng.choices(list(STAGES), k=rng.randrange(4)), rng.choice(list(BATCHES))
        try:
            before, after = _plan(names, batches), _plan(*_changed(names, batches, rng))
            whole = [_samples(item) for item in one_epoch_loader(before)]
        except ps.errors.PlanError:
            continue  # such as a limit that needs the whole stream
        count = rng.randrange(len(whole) + 1)
        loader = one_epoch_loader(before)
        done = [sample for item in islice(loader, count) for sample in _samples(item)] if count else []
        again = one_epoch_loader(after)
        try:
            again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        except StateError:
            refused += 1
            continue
        rest = [sample for item in again for sample in _samples(item)]
        assert done + rest == [sample for item in whole for sample in item], (before, after, count)
        continued += 1
    assert continued > 10
    assert refused > 10


def test_a_late_shuffle_does_not_depend_on_the_stages_before_it() -> None:
    ds = numbers((30,)).flat_map(_two).shuffle(10)
    other = numbers((30,)).map(dict).flat_map(_two).shuffle(10)
    want = [_samples(item) for item in ds.epoch(0)]
    assert [_samples(item) for item in other.epoch(0)] == want
    loader = ds.loader()
    got = [_samples(item) for item in islice(loader, 13)]
    again = other.loader()
    again.load_state_dict(loader.state_dict())
    assert got + [_samples(item) for item in again] == want


def test_a_stage_that_draws_random_numbers_before_a_changed_count_keeps_its_place() -> None:
    state = numbers((30,)).flat_map(_some_copies).loader().state_dict()
    with pytest.raises(StateError, match="another dataset or plan"):
        numbers((30,)).map(dict).flat_map(_some_copies).loader().load_state_dict(state)
    state = numbers((30,)).filter(_third).map(_noise).loader().state_dict()
    numbers((30,)).filter(_third).map(dict).map(_noise).loader().load_state_dict(state)


# Stages behind batched

BEHIND: dict[str, Change] = {
    "map": lambda ds: ds.batched(4).map(_negated).map(_negated),
    "filter": lambda ds: ds.batched(4).filter(lambda batch: True),
    "mixup": lambda ds: ds.batched(4).map(_mixed),
    "split": lambda ds: ds.batched(4).unbatched(),
    "after a late shuffle": lambda ds: ds.flat_map(lambda sample: [sample]).shuffle(5).batched(4).map(dict),
}


def _mixed(batch: Any, rng: Any) -> Any:
    return {**batch, "mixed": batch["x"] * rng.random()}


def _xs(items: Any) -> list[int]:
    out: list[int] = []
    for item in items:
        out += np.atleast_1d(item["x"]).tolist()
    return out


@pytest.mark.parametrize("how", ["range", "step"])
@pytest.mark.parametrize("name", BEHIND)
def test_a_plan_with_stages_behind_batched_can_be_cut_again(name: str, how: How) -> None:
    for seed in range(10 if FULL else 3):
        rng = Random(f"{name} {how} {seed}")
        ds = BEHIND[name](numbers((30, 12, 20)).shuffle(10)).on("serial")
        got: Counter[int] = Counter()
        states: list[Any] | None = None
        for world in (3, 2, 5, 1):
            loaders = [one_epoch_loader(ds, rank, world, how) for rank in range(world)]
            following = []
            for loader in loaders:
                if states is not None:
                    loader.load_state_dict(states=states)
                count = rng.randrange(6) if world > 1 else 99
                got.update(_xs(islice(loader, count)))
                following.append(json.loads(json.dumps(loader.state_dict())))
                loader.close()
            states = following
        assert got == Counter(range(62))


def test_the_batch_size_may_change_unless_a_later_stage_delivers_batches_in_part() -> None:
    def state(ds: ps.Dataset) -> Any:
        loader = ds.loader()
        next(iter(loader))
        return loader.state_dict()

    ds = numbers((30,))
    ds.batched(7).map(dict).loader().load_state_dict(state(ds.batched(4).map(dict)))
    with pytest.raises(StateError, match="another dataset or plan"):
        ds.batched(7).unbatched().loader().load_state_dict(state(ds.batched(4).unbatched()))


# States on both sides of the end of an epoch


def _ended_and_not(ds: ps.Dataset, folder: Any, done: int) -> tuple[list[Loader], list[Any]]:
    loaders = [ds.loader(rank, 2, uneven="keep", ledger=folder) for rank in range(2)]
    list(islice(loaders[0], len(loaders[0])))
    list(islice(loaders[1], done))
    return loaders, [json.loads(json.dumps(loader.state_dict())) for loader in loaders]


@pytest.mark.parametrize("done", [1, 3])
def test_the_ledger_proves_a_merge_of_states_on_both_sides_of_an_epochs_end(done: int, tmp_path: Any) -> None:
    ds = numbers((20, 12)).shuffle().batched(4)
    loaders, states = _ended_and_not(ds, tmp_path, done)
    assert [state["epoch"] for state in states] == [1, 0]
    assert "ended" in states[0]["counted"]
    assert ps.ledger(tmp_path).verify().ok, "a state at the start of an epoch does not begin it"
    for loader in loaders:
        loader.close()
    for rank in range(3):
        loader = ds.loader(rank, 3, uneven="keep", ledger=tmp_path)
        loader.load_state_dict(states=states)
        list(loader)
        list(loader)
        assert loader.epoch == 2
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert proof.finished
    assert [(epoch.epoch, epoch.delivered, epoch.again) for epoch in proof.epochs] == [(0, 32, 0), (1, 32, 0)]
