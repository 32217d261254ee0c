"""The contracts as test classes, for Penstock and for those who write an engine of their own.

An engine's test file is a few lines::

    class TestMine(EngineTests):
        def on(self, ds):
            return ds.on("mine")
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from penstock.dataset import Dataset, mix
from penstock.errors import DataError, PenstockError, StageError, StateError
from penstock.feed import Loader
from penstock.order import I64
from penstock.plan import Combination, Fields, Plan, Resources, Stage
from penstock.testing.lines import line_plans
from penstock.testing.tables import table_plans


@dataclass(frozen=True, slots=True)
class Numbers:
    """A source of made-up shards: sample i of shard s is ``{"shard": s, "index": i, "x": its number over all}``.

    ``hidden`` keeps the counts from being known before a shard is opened; ``bad`` are numbers that cannot be read.
    """

    counts: tuple[int, ...]
    hidden: bool = False
    bad: frozenset[int] = frozenset()
    name: str = "shard"

    random_access = False

    @property
    def resources(self) -> Resources | None:
        """Reading costs nothing."""
        return None

    def open(self) -> NumbersReader:
        """Nothing to open."""
        return NumbersReader(self)

    def describe(self) -> str:
        """The call that made it."""
        return f"numbers({list(self.counts)})"


class NumbersReader:
    """Makes the samples."""

    def __init__(self, source: Numbers) -> None:
        self._source = source
        self._starts = np.concatenate([[0], np.cumsum(source.counts)]).astype(np.int64)
        self.names = [f"{source.name}-{i:04d}" for i in range(len(source.counts))]

    def counts(self, scan: bool) -> I64 | None:
        """The counts, unless they are hidden."""
        return None if self._source.hidden else np.array(self._source.counts, np.int64)

    def count(self, shard: int) -> int:
        """The count of one shard."""
        return self._source.counts[shard]

    def sizes(self) -> list[int]:
        """A size that tells shards apart."""
        return [1000 + count for count in self._source.counts]

    def locate(self, shard: I64, index: I64, fields: Fields) -> NumberSpots:
        """Remember which."""
        return NumberSpots(self._source, shard, index, self._starts, np.full(len(index), 100, np.int64))

    def key(self, shard: int, index: int) -> str | None:
        """The sample's number."""
        return str(int(self._starts[shard]) + index)

    def url(self, shard: int) -> str:
        """The shard's name."""
        return self.names[shard]


@dataclass(slots=True)
class NumberSpots:
    """Numbers that will be made."""

    source: Numbers
    shard: I64
    index: I64
    starts: I64
    nbytes: I64

    def take(self, sel: slice) -> NumberSpots:
        """Some of them."""
        return NumberSpots(self.source, self.shard[sel], self.index[sel], self.starts, self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        """Make them."""
        numbers = (self.starts[self.shard] + self.index).tolist()
        made = zip(self.shard.tolist(), self.index.tolist(), numbers, strict=True)
        items = [{"shard": s, "index": i, "x": x} for s, i, x in made]
        bad = {
            at: DataError("made to fail", f"{self.source.name}-{int(self.shard[at]):04d}", str(x))
            for at, x in enumerate(numbers)
            if x in self.source.bad
        }
        return items, bad


def numbers(counts: Iterable[int], *, hidden: bool = False, bad: Iterable[int] = (), name: str = "shard") -> Dataset:
    """A dataset of made-up shards with these counts."""
    return Dataset(Plan(Numbers(tuple(counts), hidden, frozenset(bad), name)))


def on_resources(ds: Dataset, needs: Sequence[Resources]) -> Dataset:
    """The dataset with these resources for its stages in turn, branches included; small stages stay as they are."""
    turns = cycle(needs)

    def rewritten(plan: Plan) -> Plan:
        source = plan.source
        if isinstance(source, Combination):
            source = replace(source, branches=tuple(map(rewritten, source.branches)))
        stages = tuple(
            replace(stage, resources=next(turns)) if isinstance(stage, Stage) and stage.resources else stage
            for stage in plan.stages
        )
        return replace(plan, source=source, stages=stages)

    return Dataset(rewritten(ds.plan))


def fingerprint(value: Any) -> Any:
    """A value that is equal exactly where values, types, dtypes and shapes are."""
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return ("dict", tuple((name, fingerprint(inner)) for name, inner in value.items()))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(map(fingerprint, value)))
    if hasattr(value, "numpy") and hasattr(value, "shape"):
        return ("tensor", fingerprint(value.numpy()))
    return (type(value).__name__, value)


def _noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "noise": int(rng.integers(1 << 40))}


def _some(sample: dict[str, Any], rng: np.random.Generator) -> bool:
    return bool(rng.random() < 0.7)


def _copies(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**sample, "copy": j} for j in range(sample["x"] % 4)]


def _random_copies(sample: dict[str, Any], rng: np.random.Generator) -> Iterable[dict[str, Any]]:
    for j in range(int(rng.integers(0, 4))):
        yield {**sample, "copy": j, "draw": float(rng.random())}


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def _fails(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "inverse": 1 // (sample["x"] % 5)}


def _doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "double": batch["x"] * 2}


def _batch_sum(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "sum": int(batch["x"].sum())}


def _size(sample: dict[str, Any]) -> int:
    return int(sample["x"] % 7)


BASE = (7, 0, 12, 5, 1, 9, 30, 3)
OTHER = (4, 11, 6)

CORPUS: dict[str, Callable[[], Dataset]] = {
    "read": lambda: numbers(BASE),
    "shuffle": lambda: numbers(BASE).shuffle(),
    "small windows": lambda: numbers(BASE).shuffle(5, shards=3),
    "shuffle all": lambda: numbers(BASE).shuffle(all=True),
    "no counts": lambda: numbers(BASE, hidden=True),
    "no counts, shuffled": lambda: numbers(BASE, hidden=True).shuffle(6, shards=2),
    "map": lambda: numbers(BASE).shuffle().map(_noise),
    "two pools": lambda: numbers(BASE).map(_noise, workers=2).map(_noise, workers=3),
    "filter": lambda: numbers(BASE).shuffle().filter(_odd),
    "random filter": lambda: numbers(BASE).shuffle().map(_noise).filter(_some),
    "flat_map": lambda: numbers(BASE).shuffle().flat_map(_copies),
    "random flat_map": lambda: numbers(BASE).shuffle().flat_map(_random_copies).map(_noise),
    "flat_map twice": lambda: numbers(BASE).flat_map(_copies).filter(_some).flat_map(_random_copies),
    "skips": lambda: numbers(BASE, bad=(3, 20)).shuffle().map(_fails).on_error("skip"),
    "skips and copies": lambda: numbers(BASE).shuffle().map(_fails).flat_map(_copies).on_error("skip"),
    "limit": lambda: numbers(BASE).shuffle().limit(23),
    "skip": lambda: numbers(BASE).skip(9).shuffle(4, shards=2).limit(31),
    "repeat": lambda: numbers(BASE).shuffle(8).repeat(3).map(_noise),
    "union": lambda: numbers(BASE).map(_noise).union(numbers(OTHER, name="other").filter(_odd)).shuffle(6),
    "mix": lambda: mix([numbers(BASE).shuffle(), numbers(OTHER, name="other").map(_noise)], [0.7, 0.3]),
    "mix all": lambda: mix([numbers(BASE), numbers(OTHER, name="o").flat_map(_copies)], [1, 2], stop="all").map(_noise),
    "mix repeated": lambda: mix([numbers(OTHER).shuffle().repeat(), numbers(BASE, name="b")], [0.5, 0.5]),
    "changing mix": lambda: mix(
        [numbers(BASE).shuffle(6), numbers(OTHER, name="o").map(_noise)], [(0, [3, 0]), (21, [1, 2]), (45, [1, 1])]
    ),
    "exclude": lambda: numbers(BASE).shuffle(5, shards=3).exclude([(0, "shard-0002", i) for i in (0, 4, 11)]),
    "zip": lambda: numbers(BASE).zip(numbers((67,), name="b").map(_noise).select("noise")).shuffle(9),
    "zip with skips": lambda: (
        numbers(BASE).map(_fails).zip(numbers((67,), name="b", bad=(2,)), suffix="_b").map(_noise).on_error("skip")
    ),
    "zip of three": lambda: (
        numbers(BASE)
        .zip(numbers((67,), name="b").rename(y="x").select("y"))
        .map(_noise)
        .zip(numbers((60, 7), name="c").map(_noise).rename(z="noise").select("z"))
    ),
    "train side": lambda: numbers(BASE).shuffle(7).train_test_split(0.3)[0],
    "test side": lambda: numbers(BASE).shuffle(7).train_test_split(0.3)[1].map(_noise),
    "map_batches": lambda: numbers(BASE).shuffle().map_batches(_doubled, 4),
    "late shuffle": lambda: numbers(BASE).flat_map(_copies).shuffle(10),
    "late shuffle and more": lambda: (
        numbers(BASE).shuffle().flat_map(_random_copies).shuffle(13).map(_noise).flat_map(_copies)
    ),
    "late shuffle with skips": lambda: (
        numbers(BASE).flat_map(_copies).shuffle(6).map(_fails).filter(_some).on_error("skip")
    ),
    "batches shuffled": lambda: numbers(BASE).shuffle().batched(4).shuffle(3),
    "batches mapped": lambda: numbers(BASE).shuffle().batched(4).map(_batch_sum, workers=2),
    "unbatched": lambda: numbers(BASE).shuffle().batched(4).unbatched().map(_noise),
    "rebatched": lambda: numbers(BASE).shuffle().batched(4).unbatched().filter(_odd).batched(3),
    "batched by size": lambda: numbers(BASE).shuffle().batched_by(_size, 9),
    "stream limit": lambda: numbers(BASE).shuffle().filter(_odd).skip(3).limit(17),
    "stream limit and batches": lambda: numbers(BASE).flat_map(_copies).limit(29).batched(4).shuffle(2),
    "empty": lambda: numbers((0, 0)).shuffle().map(_noise),
    **table_plans(BASE, _noise, _doubled),
    **line_plans(BASE, _noise),
}
RECUT = tuple(
    name
    for name in CORPUS
    if name
    not in {
        "batches shuffled",
        "batches mapped",
        "unbatched",
        "rebatched",
        "batched by size",
        "tables in batches",
        "columns in batches",
        "json lines in batches",
        "stream limit",
        "stream limit and batches",
        "no counts, shuffled",  # more ranks than windows
    }
)


# What a stage makes of its neighbours depends on who they are.
UNORDERED_DIFFERS = frozenset(name for name in CORPUS if "batch" in name or "late" in name or "stream" in name)


def outputs(ds: Iterable[Any]) -> list[Any]:
    """The fingerprints of all items."""
    return [fingerprint(item) for item in ds]


def _load(ds: Dataset, state: Any, **where: Any) -> Loader:
    loader = ds.loader(uneven="keep", **where)
    if isinstance(state, list):
        loader.load_state_dict(states=json.loads(json.dumps(state)))
    elif state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


class UnorderedEngineTests(ABC):
    """What every engine promises for every plan, in whatever order it delivers."""

    worlds: ClassVar[tuple[int, ...]] = (2, 3, 5)  # numbers of ranks that are tried; fewer where a run costs much

    @abstractmethod
    def on(self, ds: Dataset) -> Dataset:
        """The dataset on the engine that is tested."""

    def points(self, many: int) -> Iterable[int]:
        """After which of ``many`` items a state is tried: all of them, unless a run costs too much for that."""
        return range(many + 1)

    def same(self, got: list[Any], want: list[Any]) -> bool:
        """Whether the engine delivered what it should."""
        return Counter(got) == Counter(want)

    @pytest.mark.parametrize("name", CORPUS)
    def test_it_yields_what_serial_yields(self, name: str) -> None:
        """Law 1."""
        ds = CORPUS[name]()
        for epoch in (0, 3):
            want = outputs(ds.epoch(epoch).on("serial"))
            if name in UNORDERED_DIFFERS and type(self).same is UnorderedEngineTests.same:
                assert len(outputs(self.on(ds.epoch(epoch)))) == len(want)
            else:
                assert self.same(outputs(self.on(ds.epoch(epoch))), want)

    @pytest.mark.parametrize("how", ["range", "step"])
    @pytest.mark.parametrize("name", [name for name in RECUT if "late shuffle" not in name])
    def test_ranks_share_the_epoch(self, name: str, how: Literal["range", "step"]) -> None:
        """The ranks of a world together have every sample once; each has what serial says it has."""
        ds = CORPUS[name]()
        whole = Counter(outputs(ds.epoch(1).on("serial")))
        for world in self.worlds:
            parts: Counter[Any] = Counter()
            for rank in range(world):
                part = ds.epoch(1).shard(rank, world, how)
                got = outputs(self.on(part))
                assert self.same(got, outputs(part.on("serial")))
                parts.update(got)
            assert parts == whole

    def test_a_failing_function_stops_the_run(self) -> None:
        """Its error names stage, shard and key, and carries the exception."""
        ds = self.on(numbers(BASE).shuffle().map(_fails).map(_noise))
        with pytest.raises(StageError, match=r"ZeroDivisionError.*map\(_fails\).*shard-00.*key") as caught:
            list(ds)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert caught.value.key is not None
        assert int(caught.value.key) % 5 == 0


class EngineTests(UnorderedEngineTests):
    """The laws: what every engine that keeps the order promises for every plan."""

    def same(self, got: list[Any], want: list[Any]) -> bool:
        """Equal, in order."""
        return got == want

    @pytest.mark.parametrize("name", CORPUS)
    def test_a_state_restores_exactly_the_rest(self, name: str) -> None:
        """Law 2a, at every point, on another engine too, and again from the restored run."""
        ds = CORPUS[name]()
        want = outputs(ds.epoch(0).on("serial"))
        loader = self.on(ds).loader()
        run = iter(loader)
        points = set(self.points(len(want)))
        for done in range(len(want) + 1):
            if done in points:
                self._check_rest(ds, loader, done, want)
            if done < len(want):
                assert fingerprint(next(run)) == want[done]
        loader.close()

    def _check_rest(self, ds: Dataset, loader: Loader, done: int, want: list[Any]) -> None:
        again = _load(ds.on("serial") if done % 2 else self.on(ds), loader.state_dict())
        if done % 7 == 3:  # a state of a restored run that has not begun is the same state
            again = _load(self.on(ds), again.state_dict())
        assert outputs(again) == want[done:], f"after {done} of {len(want)}"

    @pytest.mark.parametrize("name", [name for name in CORPUS if "flat_map" in name or "late" in name])
    def test_a_restored_run_can_be_restored_after_every_item(self, name: str) -> None:
        """Law 2a again and again: a new loader at each point, also in the middle of what one sample gave."""
        ds = CORPUS[name]()
        want = outputs(ds.epoch(0).on("serial"))
        state: Any = None
        done = 0
        for point in sorted({*self.points(len(want)), len(want)} - {0}):
            loader = _load(self.on(ds), state)
            assert _some_of(loader, point - done) == want[done:point], f"items {done} to {point} of {len(want)}"
            state, done = loader.state_dict(), point
            loader.close()
        assert outputs(_load(self.on(ds), state)) == []

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("name", RECUT)
    def test_other_worlds_take_over(self, name: str, seed: int) -> None:
        """Law 2b: re-cut a few times, ranks drifted apart, both cuts: each output exactly once."""
        ds = CORPUS[name]()
        dice = random.Random(f"{name} {seed}")
        want = Counter(outputs(ds.epoch(0).on("serial")))
        got: Counter[Any] = Counter()
        states: list[Any] | None = None
        most = max(self.worlds)
        for _ in range(dice.randrange(1, most + 1)):
            world, how = dice.randrange(1, most + 1), dice.choice(["range", "step"])
            following = []
            for rank in range(world):
                loader = _load(self.on(ds), states, rank=rank, world=world, cut=how)
                got.update(_some_of(loader, dice.randrange(8)))
                following.append(loader.state_dict())
                loader.close()
            states = following
        got.update(outputs(_load(self.on(ds), states)))
        assert got == want

    def test_what_came_before_an_error_is_delivered(self) -> None:
        """A failing sample stops the run, after all before it and before all after it."""
        ds = numbers(BASE).shuffle().map(_fails).map(_noise).epoch(0)
        want = [fingerprint(item) for item in ds.on_error("skip").on("serial")]
        got, error = _until_error(self.on(ds))
        assert (got, error) == _until_error(ds.on("serial"))
        assert got == want[: len(got)]
        assert "ZeroDivisionError" in error

    def test_a_run_goes_on_at_the_sample_that_failed(self) -> None:
        """A state taken after an error begins with the failing sample."""
        ds = numbers(BASE).shuffle().map(_fails)
        loader = self.on(ds).loader()
        got: list[Any] = []
        with pytest.raises(StageError):
            got.extend(fingerprint(item) for item in loader)
        rest = _load(self.on(ds.on_error("skip")), loader.state_dict())
        assert got + outputs(rest) == outputs(ds.on_error("skip").epoch(0).on("serial"))
        assert len(rest.skipped) == sum(x % 5 == 0 for x in range(sum(BASE)))

    def test_a_plan_that_joins_items_is_not_cut_again(self) -> None:
        """Plans that cannot be re-cut say so and name the stage."""
        ds = self.on(numbers(BASE).batched(4).unbatched())
        states = [ds.loader(rank, 2, uneven="keep").state_dict() for rank in range(2)]
        with pytest.raises(StateError, match=r"batched\(4\)"):
            ds.loader(uneven="keep").load_state_dict(states=states)


def _some_of(loader: Loader, many: int) -> Sequence[Any]:
    out: list[Any] = []
    if many:
        for item in loader:
            out.append(fingerprint(item))
            if len(out) == many:
                break
    return out


def _until_error(ds: Dataset) -> tuple[list[Any], str]:
    out: list[Any] = []
    try:
        out.extend(fingerprint(item) for item in ds)
    except PenstockError as exc:
        return out, str(exc)
    return out, "no error"
