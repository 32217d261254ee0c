"""The laws of engines hold for random plans, beyond those of a fixed list."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest

from penstock.dataset import Dataset, mix
from penstock.engines import Program
from penstock.errors import PenstockError
from penstock.feed import Loader
from penstock.order import UncountedOrder
from penstock.testing import fingerprint, numbers, one_epoch_loader, outputs

SEEDS = range(1000 if os.environ.get("PENSTOCK_FULL") == "1" else 6)
Random = random.Random
Sample = dict[str, Any]


def checksum(sample: Sample) -> int:
    """Return a number that differs between the outputs of one sample."""
    return hash(tuple(value for value in sample.values() if isinstance(value, int)))


def count_visits(sample: Sample) -> Sample:
    return {**sample, "seen": sample.get("seen", 0) + 1}


def noisy(sample: Sample, rng: np.random.Generator) -> Sample:
    return {**sample, "noise": int(rng.integers(1 << 30))}


def keep_most(sample: Sample, q: int) -> bool:
    return checksum(sample) % q != 0


def keep_at_random(sample: Sample, rng: np.random.Generator) -> bool:
    return bool(rng.random() < 0.7)


def copies(sample: Sample, q: int) -> list[Sample]:
    return [{**sample, "copy": number} for number in range(checksum(sample) % q)]


def random_copies(sample: Sample, rng: np.random.Generator) -> Iterator[Sample]:
    for number in range(int(rng.integers(0, 4))):
        yield {**sample, "copy": number, "draw": int(rng.integers(99))}


def fail_at_times(sample: Sample, q: int) -> Sample:
    return {**sample, "inverse": 1 // (checksum(sample) % q)}


def fail_midway(sample: Sample, q: int) -> Iterator[Sample]:
    yield {**sample, "copy": 0}
    if checksum(sample) % q == 0:
        raise KeyError("failed midway")
    yield {**sample, "copy": 1}


def to_integers(sample: Sample) -> Sample:
    return {"x": sample["x"], "mark": checksum(sample)}


def add_total(batch: Sample) -> Sample:
    return {**batch, "total": int(batch["x"].sum())}


def weight(sample: Sample) -> int:
    return int(sample["x"] % 7)


def failing_weight(sample: Sample) -> float:
    return float(9 / (sample["x"] % 11))


def failing_collate(samples: list[Sample]) -> list[Sample]:
    if samples[0]["x"] % 5 == 0:
        raise ValueError("cannot be collated")
    return samples


def add_each_stage(ds: Dataset, rng: Random, *, keeps: bool = False, failing: bool = False) -> Dataset:
    """Add one random stage that works on single samples."""
    q = rng.randrange(3, 8)
    needs: dict[str, Any] = rng.choice([{}, {}, {"workers": rng.randrange(1, 4)}])
    choices: list[Callable[[], Dataset]] = [
        lambda: ds.map(count_visits, **needs),
        lambda: ds.map(noisy, **needs),
    ]
    if not keeps:
        choices += [
            lambda: ds.filter(partial(keep_most, q=q), **needs),
            lambda: ds.filter(keep_at_random, **needs),
            lambda: ds.flat_map(partial(copies, q=q), **needs),
            lambda: ds.flat_map(random_copies, **needs),
        ]
    if failing:
        choices.append(lambda: ds.map(partial(fail_at_times, q=q), **needs))
        if not keeps:
            choices.append(lambda: ds.flat_map(partial(fail_midway, q=q), **needs))
    return rng.choice(choices)()


def add_each_stages(ds: Dataset, rng: Random, below: int, **kinds: bool) -> Dataset:
    """Add fewer than ``below`` such stages."""
    for _ in range(rng.randrange(below)):
        ds = add_each_stage(ds, rng, **kinds)
    return ds


def random_shards(rng: Random, name: str, *, failing: bool = False, hidden: bool = False) -> Dataset:
    counts = [rng.choice([0, 1, rng.randrange(12), rng.randrange(12)]) for _ in range(rng.randrange(1, 14))]
    bad = [x for x in range(sum(counts)) if rng.random() < 0.05] if failing else []
    return numbers(counts, hidden=hidden, bad=bad, name=name)


def add_order_stage(ds: Dataset, rng: Random) -> Dataset:
    """Add one random stage that works on positions."""
    choices: list[Callable[[], Dataset]] = [lambda: ds, lambda: ds.repeat(rng.randrange(1, 4))]
    if not any(stage.name == "flat_map" for stage in ds.plan.body):
        choices += [
            lambda: ds.shuffle(),
            lambda: ds.shuffle(rng.randrange(1, 9), shards=rng.randrange(1, 5)),
            lambda: ds.shuffle(all=True),
        ]
    if ds.plan.keeps_count:
        choices += [lambda: ds.limit(rng.randrange(30)), lambda: ds.skip(rng.randrange(10))]
    if not ds.plan.stages and not ds.plan.branches():
        choices += [
            lambda: ds.train_test_split(0.3)[rng.randrange(2)],
            lambda: ds.train_test_split(0.3, shuffle=False)[rng.randrange(2)],
        ]
    return rng.choice(choices)()


def random_source(rng: Random, *, failing: bool) -> Dataset:
    """Make one dataset, or a combination of two with stages of their own."""

    def branch(name: str, keeps: bool) -> Dataset:
        ds = add_order_stage(random_shards(rng, name, failing=failing), rng)
        return add_order_stage(add_each_stages(ds, rng, 3, keeps=keeps, failing=failing), rng)

    kind = rng.choice(["one", "one", "union", "mix", "zip"])
    if kind == "one":
        return add_order_stage(add_order_stage(random_shards(rng, "a", failing=failing), rng), rng)
    a, b = branch("a", kind == "zip"), branch("b", kind == "zip")
    if kind == "union":
        return a.union(b)
    if kind == "mix":
        return mix([a, b], [0.7, 0.3], rng.choice(["first", "all"]))
    return a.zip(b, strict=False, suffix="_b")


def add_group_stage(ds: Dataset, rng: Random, *, failing: bool) -> Dataset:
    """Add a stage that sees several samples, and perhaps more stages after it."""
    ds = ds.map(to_integers)
    n = rng.randrange(1, 6)
    choices: list[Callable[[], Dataset]] = [
        lambda: ds.batched(n, drop_last=rng.random() < 0.5),
        lambda: ds.batched(n).unbatched(),
        lambda: ds.batched(n).unbatched().shuffle(rng.randrange(1, 12)).map(noisy),
        lambda: ds.batched(n).map(add_total, workers=2),
        lambda: ds.batched(n).shuffle(rng.randrange(1, 5)),
        lambda: ds.batched_by(weight, rng.randrange(1, 12)),
        lambda: ds.batched_by(weight, 9).unbatched().filter(keep_at_random).batched(n),
        lambda: ds.filter(keep_at_random).skip(rng.randrange(4)).limit(rng.randrange(1, 30)).flat_map(random_copies),
        lambda: ds.flat_map(partial(copies, q=4)).limit(rng.randrange(1, 40)).batched(n).unbatched(),
    ]
    if failing:
        choices += [lambda: ds.batched_by(failing_weight, 9), lambda: ds.batched(n, collate=failing_collate)]
    return rng.choice(choices)()


def random_plan(rng: Random, *, joins: bool = True, failing: bool | None = None) -> Dataset:
    """Make a random plan; with ``joins`` it may end in stages that see several samples."""
    skipping = rng.random() < 0.5 if failing is None else failing
    ds = add_each_stages(random_source(rng, failing=skipping), rng, 4, failing=skipping)
    ds = add_order_stage(ds, rng) if rng.random() < 0.3 else ds
    if rng.random() < 0.4:
        ds = ds.flat_map(partial(copies, q=rng.randrange(2, 5))).shuffle(rng.choice([1, 3, 7, 50]))
        ds = add_each_stages(ds, rng, 3, failing=skipping)
    if joins and rng.random() < 0.5:
        ds = add_group_stage(ds, rng, failing=skipping)
    ds = ds.seed(rng.randrange(5))
    return ds.on_error("skip") if skipping and failing is None else ds


def on_any_engine(ds: Dataset, rng: Random) -> Dataset:
    """Put a dataset on a random engine."""
    return rng.choice([ds.on("serial"), ds.on("local"), ds.on("local", cpus=rng.randrange(1, 5))])


def use_small_parts(rng: Random, monkeypatch: pytest.MonkeyPatch, *, any_cut: bool = True) -> None:
    """Cut the outputs of flat_map into small blocks; without ``any_cut``, in the same places on every engine."""
    monkeypatch.setattr("penstock.plan.stage.MAX_PART_ITEMS", rng.choice([1, 2, 5, 4096] if any_cut else [1, 4096]))


def sees_whole_stream(ds: Dataset) -> bool:
    return any(stage.scope.value == "all" for stage in ds.plan.body)


def has_group_stage(ds: Dataset) -> bool:
    return any(stage.scope.value != "each" for stage in ds.plan.body)


def loader_from(ds: Dataset, state: Any, **cut: Any) -> Loader:
    loader = one_epoch_loader(ds, **cut)
    if isinstance(state, list):
        loader.load_state_dict(states=json.loads(json.dumps(state)))
    elif state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def take(loader: Loader, count: int) -> tuple[list[Any], bool]:
    """Return the next items, and whether the loader is exhausted."""
    out: list[Any] = []
    if not count:
        return out, False
    for item in loader:
        out.append(item)
        if len(out) == count:
            return out, False
    return out, True


def until_error(items: Any) -> tuple[list[Any], str]:
    out: list[Any] = []
    try:
        for item in items:
            out.append(fingerprint(item))
    except PenstockError as exc:
        return out, f"{type(exc).__name__}: {exc}"
    return out, "no error"


@pytest.mark.parametrize("seed", SEEDS)
def test_local_yields_what_serial_yields(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(f"law 1 {seed}")
    ds = random_plan(rng).epoch(rng.randrange(3))
    want = outputs(ds.on("serial"))
    use_small_parts(rng, monkeypatch)
    assert outputs(ds.on("local", cpus=rng.randrange(1, 5))) == want
    if not has_group_stage(ds):
        assert Counter(outputs(ds.on("local", ordered=False))) == Counter(want)
    if not sees_whole_stream(ds):
        world = rng.randrange(1, 6)
        how: Literal["range", "step"] = rng.choice(["range", "step"])
        for rank in range(world):
            part = ds.shard(rank, world, how)
            assert outputs(part.on("local", cpus=2)) == outputs(part.on("serial"))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_that_is_restored_repeatedly_yields_exactly_the_rest(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(f"law 2a {seed}")
    ds = random_plan(rng)
    world = 1 if sees_whole_stream(ds) else rng.randrange(1, 4)
    cut = {"rank": rng.randrange(world), "world": world, "cut": rng.choice(["range", "step"])}
    want = outputs(loader_from(ds.on("serial"), None, **cut))
    use_small_parts(rng, monkeypatch)
    rebatch = not has_group_stage(ds)
    got: list[Any] = []
    state, ended = None, False
    while not ended:
        now = ds.batched(rng.randrange(1, 9), collate=list) if rebatch else ds
        loader = loader_from(on_any_engine(now, rng), state, **cut)
        items, ended = take(loader, rng.randrange(0, 6))
        got += [item for batch in items for item in batch] if rebatch else items
        state = loader.state_dict()
        loader.close()
    assert [fingerprint(item) for item in got] == want
    assert outputs(loader_from(ds, state, **cut)) == [], "a state at the end restores to nothing"


@pytest.mark.parametrize("seed", SEEDS)
def test_skipped_samples_are_counted_once_across_restores(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(f"skips {seed}")
    ds = random_plan(rng, failing=True).on_error("skip")
    whole = loader_from(ds.on("serial"), None)
    outputs(whole)
    want = Counter(str(skip[1:]) for skip in whole.skipped)
    use_small_parts(rng, monkeypatch, any_cut=False)
    got: Counter[str] = Counter()
    state, ended = None, False
    while not ended:
        loader = loader_from(on_any_engine(ds, rng), state)
        _, ended = take(loader, rng.randrange(1, 8))
        state = loader.state_dict()
        loader.close()
        got.update(str(skip[1:]) for skip in loader.skipped)
    assert got == want


def recuttable(rng: Random, **kinds: Any) -> Dataset:
    while Program((ds := random_plan(rng, **kinds)).plan).recut_problem is not None:
        pass
    return ds


@pytest.mark.parametrize("seed", SEEDS)
def test_under_other_worlds_the_ranks_together_yield_the_rest(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(f"law 2b {seed}")
    ds = recuttable(rng, joins=False)
    want = Counter(outputs(ds.epoch(0).on("serial")))
    use_small_parts(rng, monkeypatch)
    assert run_several_worlds(ds, rng, 5) == want


def run_several_worlds(ds: Dataset, rng: Random, most_ranks: int, last: Dataset | None = None) -> Counter[Any]:
    """Return what all ranks of several worlds yield, one world after another, in batches of random sizes."""
    got: Counter[Any] = Counter()
    states: list[Any] | None = None
    for _ in range(rng.randrange(1, 6)):
        world, how = rng.randrange(1, most_ranks + 1), rng.choice(["range", "step"])
        in_step, count, batch = rng.random() < 0.4, rng.randrange(6), rng.randrange(1, 4)
        following = []
        for rank in range(world):
            now = ds.batched(batch if in_step else rng.randrange(1, 4), collate=list)
            loader = loader_from(on_any_engine(now, rng), states, rank=rank, world=world, cut=how)
            items, _ = take(loader, count if in_step else rng.randrange(8))
            got.update(fingerprint(item) for items_ in items for item in items_)
            following.append(loader.state_dict())
            loader.close()
        states = following
    got.update(outputs(loader_from(on_any_engine(last or ds, rng), states)))
    return got


def random_uncounted_plan(rng: Random, *, late: bool) -> tuple[Dataset, Dataset, int]:
    """Return one random plan on shards without and with counts, and the number of its windows."""
    names, pattern = rng.getrandbits(32), rng.getrandbits(32)

    def build(hidden: bool) -> Dataset:
        own = Random(names)
        ds = random_shards(own, "a", hidden=hidden)
        if own.random() < 0.8:
            ds = ds.shuffle(own.randrange(1, 9), shards=own.randrange(1, 4))
        ds = add_each_stages(ds, Random(pattern), 4)
        if late:
            ds = ds.flat_map(partial(copies, q=4)).shuffle(7).map(noisy)
        return ds

    order = Program(build(True).plan).order(0)
    assert isinstance(order, UncountedOrder)
    return build(True), build(False), order.group_count


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_state_without_counts_can_be_recut(seed: int, late: bool) -> None:
    rng = Random(f"lazy {seed}")
    ds, known, windows = random_uncounted_plan(rng, late=late)
    want = Counter(outputs(known.epoch(0).on("serial")))
    assert run_several_worlds(ds, rng, min(windows, 5)) == want


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_state_without_counts_can_be_restored_once_they_are_known(seed: int, late: bool) -> None:
    rng = Random(f"lazy to known {seed}")
    ds, known, windows = random_uncounted_plan(rng, late=late)
    want = outputs(known.epoch(0).on("serial"))
    loader = loader_from(on_any_engine(ds, rng), None)
    items, _ = take(loader, rng.randrange(1, 30))
    rest = loader_from(on_any_engine(known, rng), loader.state_dict())
    if loader.epoch == 0:
        assert [fingerprint(item) for item in items] + outputs(rest) == want
    loader.close()
    assert run_several_worlds(ds, rng, min(windows, 5), last=known) == Counter(want)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_error_is_raised_after_the_same_items_on_every_engine(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(f"errors {seed}")
    ds = random_plan(rng, failing=True).epoch(0)
    want, error = until_error(ds.on("serial"))
    use_small_parts(rng, monkeypatch)
    assert until_error(ds.on("local", cpus=rng.randrange(1, 5))) == (want, error)


@pytest.mark.parametrize("seed", SEEDS)
def test_after_an_error_the_rest_can_be_restored(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(f"error then resume {seed}")
    ds = random_plan(rng, failing=True)
    want = outputs(ds.on_error("skip").epoch(0).on("serial"))
    use_small_parts(rng, monkeypatch)
    loader = loader_from(on_any_engine(ds, rng), None)
    got, error = until_error(loader)
    if error == "no error":
        assert got == want
        return
    rest = loader_from(on_any_engine(ds.on_error("skip"), rng), loader.state_dict())
    assert got + outputs(rest) == want
