"""Restarts of many plans under any number of ranks: the ledger proves that every sample came exactly once."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest

import penstock as ps
from penstock.dataset import Dataset
from penstock.feed import Loader
from penstock.testing import CORPUS, RECUT, numbers

FULL = bool(os.environ.get("PENSTOCK_FULL"))
COUNTED = [name for name in CORPUS if "no counts" not in name]
RECUT_COUNTED = [name for name in RECUT if "no counts" not in name]
if not FULL:
    COUNTED, RECUT_COUNTED = COUNTED[::2], RECUT_COUNTED[1::2]

How = Literal["range", "step"]


def saved_after(loader: Loader, count: int) -> Any:
    """Return the state after the next ``count`` items, or after all that are left of the epoch."""
    before = loader.state_dict()
    take(loader, count)
    further = loader.epoch > 1 or (loader.epoch == 1 and (loader._live is not None or loader._rest is not None))
    return json.loads(json.dumps(before if further else loader.state_dict()))


def take(loader: Loader, count: int) -> list[Any]:
    """Return the next ``count`` items, or all that are left."""
    items: list[Any] = []
    if count:
        for item in loader:
            items.append(item)
            if len(items) == count:
                break
    return items


def crash(loaders: list[Loader]) -> None:
    """End the runs as if their processes were killed: what is not yet written to the ledger is lost."""
    for loader in loaders:
        assert loader._ledger is not None
        loader._ledger._pending.clear()
        if loader._live is not None:
            loader._live.close()


def run_and_crash(
    ds: Dataset,
    world: int,
    how: Literal["range", "step"],
    folder: Path,
    states: list[Any] | None,
    chance: random.Random,
) -> list[Any]:
    """Run a world from its states to a checkpoint and on to a crash, and return the states of the checkpoint."""
    loaders = [ds.loader(rank, world, cut=how, uneven="keep", ledger=folder) for rank in range(world)]
    for loader in loaders:
        if states is not None:
            loader.load_state_dict(states=states)
    saved = [saved_after(loader, chance.randrange(12)) for loader in loaders]
    running = [islice(loader, chance.randrange(9)) for loader in loaders]
    done = [list(run) if chance.random() < 0.5 else [*zip(run, range(5), strict=False)] for run in running]
    crash(loaders)
    del running, done
    return saved


def finish(ds: Dataset, world: int, how: How, folder: Path, states: list[Any]) -> None:
    """Run a world from its states to the end of the last epoch that a rank has begun, before or after the restart."""
    loaders = [ds.loader(rank, world, cut=how, uneven="keep", ledger=folder) for rank in range(world)]
    for loader in loaders:
        loader.load_state_dict(states=states)
    behind = loaders
    while behind:
        for loader in behind:
            list(loader)
        last = max(epoch.epoch for epoch in ps.ledger(folder).verify().epochs)
        behind = [loader for loader in loaders if loader.epoch <= last]


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_repeated_after_a_crash_counts_once(name: str, tmp_path: Path) -> None:
    ds = CORPUS[name]()
    for seed in range(6 if FULL else 1):
        chance = random.Random(f"{name} {seed}")
        folder = tmp_path / str(seed)
        states = None
        for _ in range(chance.randrange(1, 4)):
            states = run_and_crash(ds, 1, "range", folder, states, chance)
        assert states is not None
        finish(ds, 1, "range", folder, states)
        proof = ps.ledger(folder).verify()
        assert proof.ok, proof
        assert proof.finished


@pytest.mark.parametrize("name", RECUT_COUNTED)
def test_the_number_of_ranks_may_change_at_every_restart(name: str, tmp_path: Path) -> None:
    ds = CORPUS[name]()
    for seed in range(8 if FULL else 1):
        chance = random.Random(f"{name} {seed}")
        folder = tmp_path / str(seed)
        states, endless = None, name == "mix repeated"
        hows: list[How] = ["step"] if endless else ["range", "step"]
        for _ in range(chance.randrange(1, 4)):
            states = run_and_crash(ds, chance.randrange(1, 5), chance.choice(hows), folder, states, chance)
        assert states is not None
        finish(ds, chance.randrange(1, 5), chance.choice(hows), folder, states)
        proof = ps.ledger(folder).verify()
        assert proof.ok, proof
        assert proof.finished


@pytest.mark.parametrize(
    "delivered",
    [(6, 2), (6, 0), (2, 0)],
    ids=["both sides of an end", "one at its end", "one untouched"],
)
def test_the_cut_may_change_at_a_restart(delivered: tuple[int, int], tmp_path: Path) -> None:
    ds = numbers((12,)).shuffle()
    before = [ds.loader(rank, 2, cut="range", uneven="keep", ledger=tmp_path) for rank in range(2)]
    for loader, count in zip(before, delivered, strict=True):
        take(loader, count)
    states = [loader.state_dict() for loader in before]
    crash(before)
    after = [ds.loader(rank, 2, cut="step", uneven="keep", ledger=tmp_path) for rank in range(2)]
    for loader in after:
        loader.load_state_dict(states=states)
    first, second = ([len(list(loader)) for loader in after] for _ in range(2))
    assert sum(first) == 12 - sum(delivered)  # all ranks are in the epoch that is not at its end
    assert second == [6, 6]
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert [epoch.delivered for epoch in proof.epochs] == [12, 12]


@pytest.mark.parametrize("begun", [True, False], ids=["within the epoch", "at its start"])
def test_a_rank_that_had_delivered_nothing_since_a_restart_belongs_to_the_others(begun: bool, tmp_path: Path) -> None:
    ds = numbers((3,)).filter(_any)
    before = ds.loader(ledger=tmp_path)
    states = [saved_after(before, int(begun))]
    crash([before])
    loaders = [ds.loader(rank, 4, cut="step", uneven="keep", ledger=tmp_path) for rank in range(4)]
    for loader in loaders:
        loader.load_state_dict(states=states)
    states = [saved_after(loader, 1 - rank % 2) for rank, loader in enumerate(loaders)]
    crash(loaders)
    finish(ds, 4, "step", tmp_path, states)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert proof.finished


def test_a_rank_that_delivered_its_share_is_not_at_the_start_of_another_cut(tmp_path: Path) -> None:
    ds = numbers((2,)).filter(_any)
    states = [ds.loader(rank, 3, uneven="keep", ledger=tmp_path).state_dict() for rank in range(3)]
    loaders = [ds.loader(rank, 3, cut="step", uneven="keep", ledger=tmp_path) for rank in range(3)]
    for loader in loaders:
        loader.load_state_dict(states=states)  # the shares are still those of the ranges: rank 2 has a sample
    states = [saved_after(loader, rank // 2) for rank, loader in enumerate(loaders)]
    crash(loaders)
    finish(ds, 2, "step", tmp_path, states)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert [epoch.delivered for epoch in proof.epochs][:1] == [2]


def _any(sample: dict[str, Any]) -> bool:
    return True


@pytest.mark.parametrize("name", ["shuffle", "filter", "late shuffle"])
def test_what_counts_is_what_an_uninterrupted_run_delivers(name: str, tmp_path: Path) -> None:
    ds = CORPUS[name]().batched(4)
    list(ds.loader(ledger=tmp_path / "whole"))
    chance = random.Random(name)
    states = run_and_crash(ds, 3, "step", tmp_path / "parts", None, chance)
    states = run_and_crash(ds, 2, "range", tmp_path / "parts", states, chance)
    finish(ds, 4, "step", tmp_path / "parts", states)

    def samples(folder: Path) -> Counter[Any]:
        steps = (step for step in ps.ledger(folder) if step.epoch == 0)
        return Counter(sample for step in steps for got in step.ranks.values() for sample in got)

    assert samples(tmp_path / "parts") == samples(tmp_path / "whole")


def _unchanged(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


@pytest.mark.parametrize("make", [lambda ds: ds, lambda ds: ds.batched(4)], ids=["samples", "batches"])
def test_runs_out_of_order_are_proved(make: Callable[[Dataset], Dataset], tmp_path: Path) -> None:
    ds = make(numbers((40, 7, 60)).map(_unchanged, workers=3).filter(_odd)).on("local", ordered=False)
    chance = random.Random(3)
    states = run_and_crash(ds, 3, "range", tmp_path, None, chance)
    states = run_and_crash(ds, 2, "range", tmp_path, states, chance)
    finish(ds, 1, "range", tmp_path, states)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert (proof.epochs[0].delivered, proof.epochs[0].passed) == (53, 54)


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def _ds() -> Dataset:
    return numbers((30, 12, 20)).shuffle(10).batched(4)


@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_dropped_and_padded_samples_are_neither_missing_nor_repeated(
    uneven: Literal["drop", "pad"], tmp_path: Path
) -> None:
    ds = numbers((30, 12, 20)).shuffle(10)
    old = [ds.loader(rank, 4, uneven=uneven, ledger=tmp_path) for rank in range(4)]
    for loader in old:
        take(loader, 7)
    states = [loader.state_dict() for loader in old]
    crash(old)
    named = []
    for rank in range(3):
        loader = ds.loader(rank, 3, uneven=uneven, ledger=tmp_path)
        loader.load_state_dict(states=states)
        list(loader)
        named += [(identity.shard, identity.index) for identity in loader.dropped_samples]
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    (epoch,) = proof.epochs
    assert (epoch.dropped, epoch.padded) == ((1, 0) if uneven == "drop" else (0, 2))
    assert [(sample.shard, sample.index) for _, sample in proof.dropped] == named


def test_a_new_iterator_continues_the_session(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path)
    for _ in range(5):
        take(loader, 2)
    list(loader)
    loader.set_epoch(0)
    list(loader)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert proof.epochs[0].sessions == 2
    assert proof.epochs[0].again == 62


def test_a_copy_of_a_loader_continues_the_ledger(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path)
    take(loader, 4)
    copy = pickle.loads(pickle.dumps(loader))
    crash([loader])
    list(copy)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert proof.delivered == 62
