"""The laws over random plans: what a fixed corpus does not think of."""

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
from penstock.testing import fingerprint, numbers, outputs

SEEDS = range(1000 if os.environ.get("PENSTOCK_FULL") == "1" else 12)
Dice = random.Random
Sample = dict[str, Any]


def mark(sample: Sample) -> int:
    """A number that tells apart what became of one sample."""
    return hash(tuple(value for value in sample.values() if isinstance(value, int)))


def same(sample: Sample) -> Sample:
    return {**sample, "seen": sample.get("seen", 0) + 1}


def noisy(sample: Sample, rng: np.random.Generator) -> Sample:
    return {**sample, "noise": int(rng.integers(1 << 30))}


def most(sample: Sample, q: int) -> bool:
    return mark(sample) % q != 0


def lucky(sample: Sample, rng: np.random.Generator) -> bool:
    return bool(rng.random() < 0.7)


def copies(sample: Sample, q: int) -> list[Sample]:
    return [{**sample, "copy": number} for number in range(mark(sample) % q)]


def random_copies(sample: Sample, rng: np.random.Generator) -> Iterator[Sample]:
    for number in range(int(rng.integers(0, 4))):
        yield {**sample, "copy": number, "draw": int(rng.integers(99))}


def fails(sample: Sample, q: int) -> Sample:
    return {**sample, "inverse": 1 // (mark(sample) % q)}


def fails_midway(sample: Sample, q: int) -> Iterator[Sample]:
    yield {**sample, "copy": 0}
    if mark(sample) % q == 0:
        raise KeyError("midway")
    yield {**sample, "copy": 1}


def plain(sample: Sample) -> Sample:
    return {"x": sample["x"], "mark": mark(sample)}


def total(batch: Sample) -> Sample:
    return {**batch, "total": int(batch["x"].sum())}


def size(sample: Sample) -> int:
    return int(sample["x"] % 7)


def fragile_size(sample: Sample) -> float:
    return float(9 / (sample["x"] % 11))


def fragile_join(samples: list[Sample]) -> list[Sample]:
    if samples[0]["x"] % 5 == 0:
        raise ValueError("these do not go together")
    return samples


def each(ds: Dataset, dice: Dice, *, keeps: bool = False, failing: bool = False) -> Dataset:
    """Add one stage on single samples."""
    q = dice.randrange(3, 8)
    needs = dice.choice([{}, {}, {"workers": dice.randrange(1, 4)}])
    choices: list[Callable[[], Dataset]] = [
        lambda: ds.map(same, **needs),
        lambda: ds.map(noisy, **needs),
    ]
    if not keeps:
        choices += [
            lambda: ds.filter(partial(most, q=q), **needs),
            lambda: ds.filter(lucky, **needs),
            lambda: ds.flat_map(partial(copies, q=q), **needs),
            lambda: ds.flat_map(random_copies, **needs),
        ]
    if failing:
        choices.append(lambda: ds.map(partial(fails, q=q), **needs))
        if not keeps:
            choices.append(lambda: ds.flat_map(partial(fails_midway, q=q), **needs))
    return dice.choice(choices)()


def eaches(ds: Dataset, dice: Dice, many: int, **kinds: bool) -> Dataset:
    for _ in range(dice.randrange(many)):
        ds = each(ds, dice, **kinds)
    return ds


def shards(dice: Dice, name: str, *, failing: bool = False, hidden: bool = False) -> Dataset:
    counts = [dice.choice([0, 1, dice.randrange(12), dice.randrange(12)]) for _ in range(dice.randrange(1, 14))]
    bad = [x for x in range(sum(counts)) if dice.random() < 0.05] if failing else []
    return numbers(counts, hidden=hidden, bad=bad, name=name)


def ordered(ds: Dataset, dice: Dice) -> Dataset:
    """Add one stage on positions."""
    choices: list[Callable[[], Dataset]] = [lambda: ds, lambda: ds.repeat(dice.randrange(1, 4))]
    if not any(stage.name == "flat_map" for stage in ds.plan.body):
        choices += [
            lambda: ds.shuffle(),
            lambda: ds.shuffle(dice.randrange(1, 9), shards=dice.randrange(1, 5)),
            lambda: ds.shuffle(all=True),
        ]
    if ds.plan.counted:
        choices += [lambda: ds.limit(dice.randrange(30)), lambda: ds.skip(dice.randrange(10))]
    if not ds.plan.stages and not ds.plan.branches():
        choices += [
            lambda: ds.train_test_split(0.3)[dice.randrange(2)],
            lambda: ds.train_test_split(0.3, shuffle=False)[dice.randrange(2)],
        ]
    return dice.choice(choices)()


def source(dice: Dice, *, failing: bool) -> Dataset:
    """One dataset, or several combined, with stages on samples and positions inside."""

    def branch(name: str, keeps: bool) -> Dataset:
        ds = ordered(shards(dice, name, failing=failing), dice)
        return ordered(eaches(ds, dice, 3, keeps=keeps, failing=failing), dice)

    kind = dice.choice(["one", "one", "union", "mix", "zip"])
    if kind == "one":
        return ordered(ordered(shards(dice, "a", failing=failing), dice), dice)
    a, b = branch("a", kind == "zip"), branch("b", kind == "zip")
    if kind == "union":
        return a.union(b)
    if kind == "mix":
        return mix([a, b], [0.7, 0.3], dice.choice(["first", "all"]))
    return a.zip(b, strict=False, suffix="_b")


def tail(ds: Dataset, dice: Dice, *, failing: bool) -> Dataset:
    """Add a stage that joins samples, and perhaps more behind it."""
    ds = ds.map(plain)
    n = dice.randrange(1, 6)
    choices: list[Callable[[], Dataset]] = [
        lambda: ds.batched(n, drop_last=dice.random() < 0.5),
        lambda: ds.batched(n).unbatched(),
        lambda: ds.batched(n).unbatched().shuffle(dice.randrange(1, 12)).map(noisy),
        lambda: ds.batched(n).map(total, workers=2),
        lambda: ds.batched(n).shuffle(dice.randrange(1, 5)),
        lambda: ds.batched_by(size, dice.randrange(1, 12)),
        lambda: ds.batched_by(size, 9).unbatched().filter(lucky).batched(n),
        lambda: ds.filter(lucky).skip(dice.randrange(4)).limit(dice.randrange(1, 30)).flat_map(random_copies),
        lambda: ds.flat_map(partial(copies, q=4)).limit(dice.randrange(1, 40)).batched(n).unbatched(),
    ]
    if failing:
        choices += [lambda: ds.batched_by(fragile_size, 9), lambda: ds.batched(n, collate=fragile_join)]
    return dice.choice(choices)()


def draw(dice: Dice, *, joins: bool = True, failing: bool | None = None) -> Dataset:
    """A random plan; ``joins``: it may end in stages that see more than one sample."""
    skipping = dice.random() < 0.5 if failing is None else failing
    ds = eaches(source(dice, failing=skipping), dice, 4, failing=skipping)
    ds = ordered(ds, dice) if dice.random() < 0.3 else ds
    if dice.random() < 0.4:
        ds = ds.flat_map(partial(copies, q=dice.randrange(2, 5))).shuffle(dice.choice([1, 3, 7, 50]))
        ds = eaches(ds, dice, 3, failing=skipping)
    if joins and dice.random() < 0.5:
        ds = tail(ds, dice, failing=skipping)
    ds = ds.seed(dice.randrange(5))
    return ds.on_error("skip") if skipping and failing is None else ds


def anywhere(ds: Dataset, dice: Dice) -> Dataset:
    """The dataset on some engine."""
    return dice.choice([ds.on("serial"), ds.on("local"), ds.on("local", cpus=dice.randrange(1, 5))])


def small_parts(dice: Dice, monkeypatch: pytest.MonkeyPatch, *, any_cut: bool = True) -> None:
    """Let a flat_map cut its outputs into blocks of a few; not ``any_cut``: in the same places on every engine."""
    monkeypatch.setattr("penstock.plan.stage.PART_ITEMS", dice.choice([1, 2, 5, 4096] if any_cut else [1, 4096]))


def whole_stream(ds: Dataset) -> bool:
    return any(stage.scope.value == "all" for stage in ds.plan.body)


def joined(ds: Dataset) -> bool:
    return any(stage.scope.value != "each" for stage in ds.plan.body)


def load(ds: Dataset, state: Any, **where: Any) -> Loader:
    loader = ds.loader(uneven="keep", **where)
    if isinstance(state, list):
        loader.load_state_dict(states=json.loads(json.dumps(state)))
    elif state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def some_of(loader: Loader, many: int) -> tuple[list[Any], bool]:
    """The next ``many`` items, and whether the loader came to its end."""
    out: list[Any] = []
    if not many:
        return out, False
    for item in loader:
        out.append(item)
        if len(out) == many:
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
    dice = Dice(f"law 1 {seed}")
    ds = draw(dice).epoch(dice.randrange(3))
    want = outputs(ds.on("serial"))
    small_parts(dice, monkeypatch)
    assert outputs(ds.on("local", cpus=dice.randrange(1, 5))) == want
    if not joined(ds):
        assert Counter(outputs(ds.on("local", ordered=False))) == Counter(want)
    if not whole_stream(ds):
        world = dice.randrange(1, 6)
        how: Literal["range", "step"] = dice.choice(["range", "step"])
        for rank in range(world):
            part = ds.shard(rank, world, how)
            assert outputs(part.on("local", cpus=2)) == outputs(part.on("serial"))


@pytest.mark.parametrize("seed", SEEDS)
def test_restored_again_and_again_it_yields_exactly_the_rest(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Dice(f"law 2a {seed}")
    ds = draw(dice)
    world = 1 if whole_stream(ds) else dice.randrange(1, 4)
    where = {"rank": dice.randrange(world), "world": world, "cut": dice.choice(["range", "step"])}
    want = outputs(load(ds.on("serial"), None, **where))
    small_parts(dice, monkeypatch)
    rebatch = not joined(ds)
    got: list[Any] = []
    state, ended = None, False
    while not ended:
        now = ds.batched(dice.randrange(1, 9), collate=list) if rebatch else ds
        loader = load(anywhere(now, dice), state, **where)
        items, ended = some_of(loader, dice.randrange(0, 6))
        got += [item for batch in items for item in batch] if rebatch else items
        state = loader.state_dict()
        loader.close()
    assert [fingerprint(item) for item in got] == want
    assert outputs(load(ds, state, **where)) == [], "a state at the end restores to nothing"


@pytest.mark.parametrize("seed", SEEDS)
def test_skipped_samples_are_counted_once_across_restores(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Dice(f"skips {seed}")
    ds = draw(dice, failing=True).on_error("skip")
    whole = load(ds.on("serial"), None)
    outputs(whole)
    want = Counter(str(skip[1:]) for skip in whole.skipped)
    small_parts(dice, monkeypatch, any_cut=False)
    got: Counter[str] = Counter()
    state, ended = None, False
    while not ended:
        loader = load(anywhere(ds, dice), state)
        _, ended = some_of(loader, dice.randrange(1, 8))
        state = loader.state_dict()
        loader.close()
        got.update(str(skip[1:]) for skip in loader.skipped)
    assert got == want


def recuttable(dice: Dice, **kinds: Any) -> Dataset:
    while Program((ds := draw(dice, **kinds)).plan).recut_problem is not None:
        pass
    return ds


@pytest.mark.parametrize("seed", SEEDS)
def test_other_worlds_together_yield_the_rest(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Dice(f"law 2b {seed}")
    ds = recuttable(dice, joins=False)
    want = Counter(outputs(ds.epoch(0).on("serial")))
    small_parts(dice, monkeypatch)
    assert shared_out(ds, dice, 5) == want


def shared_out(ds: Dataset, dice: Dice, most_ranks: int, last: Dataset | None = None) -> Counter[Any]:
    """What all ranks of several worlds yield, one world after the other, in batches of any size."""
    got: Counter[Any] = Counter()
    states: list[Any] | None = None
    for _ in range(dice.randrange(1, 6)):
        world, how = dice.randrange(1, most_ranks + 1), dice.choice(["range", "step"])
        in_step, many, batch = dice.random() < 0.4, dice.randrange(6), dice.randrange(1, 4)
        following = []
        for rank in range(world):
            now = ds.batched(batch if in_step else dice.randrange(1, 4), collate=list)
            loader = load(anywhere(now, dice), states, rank=rank, world=world, cut=how)
            items, _ = some_of(loader, many if in_step else dice.randrange(8))
            got.update(fingerprint(item) for items_ in items for item in items_)
            following.append(loader.state_dict())
            loader.close()
        states = following
    got.update(outputs(load(anywhere(last or ds, dice), states)))
    return got


def uncounted(dice: Dice, *, late: bool) -> tuple[Dataset, Dataset, int]:
    """The same random plan on shards without and with counts, and how many ranks it has windows for."""
    names, pattern = dice.getrandbits(32), dice.getrandbits(32)

    def build(hidden: bool) -> Dataset:
        own = Dice(names)
        ds = shards(own, "a", hidden=hidden)
        if own.random() < 0.8:
            ds = ds.shuffle(own.randrange(1, 9), shards=own.randrange(1, 4))
        ds = eaches(ds, Dice(pattern), 4)
        if late:
            ds = ds.flat_map(partial(copies, q=4)).shuffle(7).map(noisy)
        return ds

    order = Program(build(True).plan).order(0)
    assert isinstance(order, UncountedOrder)
    return build(True), build(False), order.group_count


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_shards_without_counts_are_cut_again(seed: int, late: bool) -> None:
    dice = Dice(f"lazy {seed}")
    ds, known, windows = uncounted(dice, late=late)
    want = Counter(outputs(known.epoch(0).on("serial")))
    assert shared_out(ds, dice, min(windows, 5)) == want


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_state_without_counts_is_taken_up_when_they_are_known(seed: int, late: bool) -> None:
    dice = Dice(f"lazy to known {seed}")
    ds, known, windows = uncounted(dice, late=late)
    want = outputs(known.epoch(0).on("serial"))
    loader = load(anywhere(ds, dice), None)
    items, _ = some_of(loader, dice.randrange(1, 30))
    rest = load(anywhere(known, dice), loader.state_dict())
    if loader.epoch == 0:
        assert [fingerprint(item) for item in items] + outputs(rest) == want
    loader.close()
    assert shared_out(ds, dice, min(windows, 5), last=known) == Counter(want)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_error_comes_after_the_same_items(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Dice(f"errors {seed}")
    ds = draw(dice, failing=True).epoch(0)
    want, error = until_error(ds.on("serial"))
    small_parts(dice, monkeypatch)
    assert until_error(ds.on("local", cpus=dice.randrange(1, 5))) == (want, error)


@pytest.mark.parametrize("seed", SEEDS)
def test_after_an_error_the_rest_follows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Dice(f"error then resume {seed}")
    ds = draw(dice, failing=True)
    want = outputs(ds.on_error("skip").epoch(0).on("serial"))
    small_parts(dice, monkeypatch)
    loader = load(anywhere(ds, dice), None)
    got, error = until_error(loader)
    if error == "no error":
        assert got == want
        return
    rest = load(anywhere(ds.on_error("skip"), dice), loader.state_dict())
    assert got + outputs(rest) == want
