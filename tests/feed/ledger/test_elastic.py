"""Restarts of every kind: after each, the ledger proves every sample exactly once from the checkpoint on."""

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
CUT_AGAIN = [name for name in RECUT if "no counts" not in name]

How = Literal["range", "step"]


def take(loader: Loader, many: int) -> list[Any]:
    """So many items, or all that are left."""
    items: list[Any] = []
    if many:
        for item in loader:
            items.append(item)
            if len(items) == many:
                break
    return items


def crash(loaders: list[Loader]) -> None:
    """End the runs without a word to the ledger, like a process that is killed; what it had not written is gone."""
    for loader in loaders:
        assert loader._book is not None
        loader._book._notes.clear()
        if loader._run is not None:
            loader._run.close()


def chapter(
    ds: Dataset,
    world: int,
    how: Literal["range", "step"],
    folder: Path,
    states: list[Any] | None,
    chance: random.Random,
) -> list[Any]:
    """Run a world from its states to a checkpoint and on to a crash; the states of the checkpoint."""
    loaders = [ds.loader(rank, world, cut=how, uneven="keep", ledger=folder) for rank in range(world)]
    for loader in loaders:
        if states is not None:
            loader.load_state_dict(states=states)
        take(loader, chance.randrange(12))
    saved = json.loads(json.dumps([loader.state_dict() for loader in loaders]))
    running = [islice(loader, chance.randrange(9)) for loader in loaders]
    done = [list(run) if chance.random() < 0.5 else [*zip(run, range(5), strict=False)] for run in running]
    crash(loaders)
    del running, done
    return list(saved)


def finish(ds: Dataset, world: int, how: How, folder: Path, states: list[Any]) -> None:
    for rank in range(world):
        loader = ds.loader(rank, world, cut=how, uneven="keep", ledger=folder)
        loader.load_state_dict(states=states)
        list(loader)


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_done_again_after_a_crash_does_not_count_twice(name: str, tmp_path: Path) -> None:
    ds = CORPUS[name]()
    for seed in range(6 if FULL else 1):
        chance = random.Random(f"{name} {seed}")
        folder = tmp_path / str(seed)
        states = None
        for _ in range(chance.randrange(1, 4)):
            states = chapter(ds, 1, "range", folder, states, chance)
        assert states is not None
        finish(ds, 1, "range", folder, states)
        proof = ps.ledger(folder).verify()
        assert proof.ok, proof
        assert proof.finished


@pytest.mark.parametrize("name", CUT_AGAIN)
def test_worlds_may_change_at_every_restart(name: str, tmp_path: Path) -> None:
    ds = CORPUS[name]()
    for seed in range(8 if FULL else 1):
        chance = random.Random(f"{name} {seed}")
        folder = tmp_path / str(seed)
        states, endless = None, name == "mix repeated"
        hows: list[How] = ["step"] if endless else ["range", "step"]
        for _ in range(chance.randrange(1, 4)):
            states = chapter(ds, chance.randrange(1, 5), chance.choice(hows), folder, states, chance)
        assert states is not None
        finish(ds, chance.randrange(1, 5), chance.choice(hows), folder, states)
        proof = ps.ledger(folder).verify()
        assert proof.ok, proof
        assert proof.finished


@pytest.mark.parametrize("name", ["shuffle", "filter", "late shuffle"])
def test_what_counts_is_what_an_uninterrupted_run_delivers(name: str, tmp_path: Path) -> None:
    ds = CORPUS[name]().batched(4)
    list(ds.loader(ledger=tmp_path / "whole"))
    chance = random.Random(name)
    states = chapter(ds, 3, "step", tmp_path / "parts", None, chance)
    states = chapter(ds, 2, "range", tmp_path / "parts", states, chance)
    finish(ds, 4, "step", tmp_path / "parts", states)

    def samples(folder: Path) -> Counter[Any]:
        return Counter(sample for step in ps.ledger(folder) for got in step.ranks.values() for sample in got)

    assert samples(tmp_path / "parts") == samples(tmp_path / "whole")


def _slow(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


@pytest.mark.parametrize("make", [lambda ds: ds, lambda ds: ds.batched(4)], ids=["samples", "batches"])
def test_runs_out_of_order(make: Callable[[Dataset], Dataset], tmp_path: Path) -> None:
    ds = make(numbers((40, 7, 60)).map(_slow, workers=3).filter(_odd)).on("local", ordered=False)
    chance = random.Random(3)
    states = chapter(ds, 3, "range", tmp_path, None, chance)
    states = chapter(ds, 2, "range", tmp_path, states, chance)
    finish(ds, 1, "range", tmp_path, states)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert (proof.delivered, proof.epochs[0].passed) == (53, 54)


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def _ds() -> Dataset:
    return numbers((30, 12, 20)).shuffle(10).batched(4)


def test_a_step_is_counted_through_the_epoch_whoever_delivers_it(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path)
    take(loader, 3)
    state = loader.state_dict()
    take(loader, 2)
    crash([loader])
    again = _ds().loader(ledger=tmp_path)
    again.load_state_dict(state)
    list(again)
    assert [step.step for step in ps.ledger(tmp_path)] == list(range(16))
    (epoch,) = ps.ledger(tmp_path).verify().epochs
    assert (epoch.delivered, epoch.again, epoch.sessions) == (62, 8, 2)


def test_starting_all_over_makes_what_came_before_void(tmp_path: Path) -> None:
    take(_ds().loader(ledger=tmp_path), 5)
    for rank in range(2):
        list(_ds().loader(rank, 2, uneven="keep", ledger=tmp_path))
    (epoch,) = ps.ledger(tmp_path).verify().epochs
    assert (epoch.delivered, epoch.again, epoch.missing, epoch.repeated) == (62, 20, 0, 0)


def test_a_state_older_than_the_last_one_can_be_gone_back_to(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path)
    take(loader, 2)
    early = loader.state_dict()
    take(loader, 2)
    late = loader.state_dict()
    crash([loader])
    for state, many in ((late, 3), (early, 100)):
        again = _ds().loader(ledger=tmp_path)
        again.load_state_dict(state)
        take(again, many)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert (proof.delivered, proof.epochs[0].again) == (62, 8 + 12)


def test_going_back_to_an_earlier_epoch_makes_the_later_one_void(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path)
    list(loader)
    state = loader.state_dict()
    take(loader, 5)
    crash([loader])
    again = _ds().loader(ledger=tmp_path)
    again.load_state_dict(state)
    assert list(again) == []
    assert [epoch.epoch for epoch in ps.ledger(tmp_path).verify().epochs] == [0]
    list(again)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert proof.finished
    assert [(epoch.epoch, epoch.delivered, epoch.again) for epoch in proof.epochs] == [(0, 62, 0), (1, 62, 0)]


def test_a_ledger_that_begins_in_mid_epoch_speaks_of_what_came_since(tmp_path: Path) -> None:
    before = [_ds().loader(rank, 2, uneven="keep") for rank in range(2)]
    for loader in before:
        take(loader, 3)
    states = [loader.state_dict() for loader in before]
    for rank in range(2):
        loader = _ds().loader(rank, 2, uneven="keep", ledger=tmp_path)
        loader.load_state_dict(states[rank])
        list(loader)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert (proof.epochs[0].before, proof.delivered) == (24, 38)


def test_a_rank_that_never_came_back_is_missed(tmp_path: Path) -> None:
    old = [_ds().loader(rank, 2, uneven="keep", ledger=tmp_path) for rank in range(2)]
    for loader in old:
        take(loader, 3)
    states = [loader.state_dict() for loader in old]
    crash(old)
    for rank in (0, 2):
        loader = _ds().loader(rank, 3, uneven="keep", ledger=tmp_path)
        loader.load_state_dict(states=states)
        list(loader)
    proof = ps.ledger(tmp_path).verify()
    assert not proof.ok
    assert proof.epochs[0].missing == 13
    assert len(proof.missing) == 13


def test_states_of_different_times_are_found_out(tmp_path: Path) -> None:
    old = [_ds().loader(rank, 2, uneven="keep", ledger=tmp_path) for rank in range(2)]
    early = [loader.state_dict() for loader in old]
    for loader in old:
        take(loader, 3)
    late = [loader.state_dict() for loader in old]
    crash(old)
    for rank, states in enumerate([late, [early[0], late[1]], late]):
        loader = _ds().loader(rank, 3, uneven="keep", ledger=tmp_path)
        loader.load_state_dict(states=states)
        list(loader)
    assert not ps.ledger(tmp_path).verify().ok


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
        named += [(who.shard, who.index) for who in loader.dropped_samples]
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    (epoch,) = proof.epochs
    assert (epoch.dropped, epoch.padded) == ((1, 0) if uneven == "drop" else (0, 2))
    assert [(sample.shard, sample.index) for _, sample in proof.dropped] == named


def test_iterating_again_goes_on_in_the_same_session(tmp_path: Path) -> None:
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


def test_a_copy_of_a_loader_goes_on_in_the_ledger(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path)
    take(loader, 4)
    copy = pickle.loads(pickle.dumps(loader))
    crash([loader])
    list(copy)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert proof.delivered == 62
