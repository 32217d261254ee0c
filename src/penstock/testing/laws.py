"""The laws of engines as test classes, for Penstock's engines and for yours.

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
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.errors import PenstockError, StageError, StateError
from penstock.feed import Loader
from penstock.plan import Combination, Cut, Plan, Resources, Stage
from penstock.testing.number_source import numbers
from penstock.testing.plans import BASE, CORPUS, ORDER_DEPENDENT, RECUT, fails, noise


def on_resources(ds: Dataset, resources: Sequence[Resources]) -> Dataset:
    """Return the dataset with its stages assigned these resources in rotation; stages without resources keep none."""
    following = cycle(resources)

    def rewritten(plan: Plan) -> Plan:
        source = plan.source
        if isinstance(source, Combination):
            source = replace(source, branches=tuple(map(rewritten, source.branches)))
        stages = tuple(
            replace(stage, resources=next(following)) if isinstance(stage, Stage) and stage.resources else stage
            for stage in plan.stages
        )
        return replace(plan, source=source, stages=stages)

    return Dataset(rewritten(ds.plan))


def fingerprint(value: Any) -> Any:
    """Return a hashable value, equal for two items exactly if their values, types, dtypes and shapes are equal."""
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return ("dict", tuple((name, fingerprint(inner)) for name, inner in value.items()))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(map(fingerprint, value)))
    if hasattr(value, "numpy") and hasattr(value, "shape"):
        return ("tensor", fingerprint(value.numpy()))
    return (type(value).__name__, value)


def outputs(ds: Iterable[Any]) -> list[Any]:
    """Return the fingerprints of all items."""
    return [fingerprint(item) for item in ds]


def one_epoch_loader(ds: Dataset, rank: int = 0, world: int = 1, cut: Literal["range", "step"] = "range") -> Loader:
    """Return a loader of epoch 0 that stays at the end of it, so that "the rest" can be tested to be empty."""
    return Loader(ds.plan, Cut(rank, world, cut), one_epoch=True)


def _load(ds: Dataset, state: Any, **options: Any) -> Loader:
    """Return a loader restored from one state, or from the states of all ranks, after a round trip through JSON."""
    loader = one_epoch_loader(ds, **options)
    if isinstance(state, list):
        loader.load_state_dict(states=json.loads(json.dumps(state)))
    elif state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


class UnorderedEngineTests(ABC):
    """What every engine promises for every plan, in whatever order it delivers.

    Attributes:
        worlds: The numbers of ranks to test; override with fewer if a run is expensive.
    """

    worlds: ClassVar[tuple[int, ...]] = (2, 3, 5)

    @abstractmethod
    def on(self, ds: Dataset) -> Dataset:
        """Return the dataset on the engine under test."""

    def points(self, count: int) -> Iterable[int]:
        """Return the numbers of items, up to ``count``, after which to save a state; override if a run is expensive."""
        return range(count + 1)

    def same(self, got: list[Any], want: list[Any]) -> bool:
        """Return whether the engine delivered the expected items."""
        return Counter(got) == Counter(want)

    @pytest.mark.parametrize("name", CORPUS)
    def test_it_yields_what_serial_yields(self, name: str) -> None:
        """Law 1."""
        ds = CORPUS[name]()
        for epoch in (0, 3):
            want = outputs(ds.epoch(epoch).on("serial"))
            if name in ORDER_DEPENDENT and type(self).same is UnorderedEngineTests.same:
                assert len(outputs(self.on(ds.epoch(epoch)))) == len(want)
            else:
                assert self.same(outputs(self.on(ds.epoch(epoch))), want)

    @pytest.mark.parametrize("cut", ["range", "step"])
    @pytest.mark.parametrize("name", [name for name in RECUT if "late shuffle" not in name])
    def test_ranks_share_the_epoch(self, name: str, cut: Literal["range", "step"]) -> None:
        """The ranks of a world together yield every sample once, and each yields what serial yields for it."""
        ds = CORPUS[name]()
        whole = Counter(outputs(ds.epoch(1).on("serial")))
        for world in self.worlds:
            parts: Counter[Any] = Counter()
            for rank in range(world):
                part = ds.epoch(1).shard(rank, world, cut)
                got = outputs(self.on(part))
                assert self.same(got, outputs(part.on("serial")))
                parts.update(got)
            assert parts == whole

    def test_a_failing_function_stops_the_run(self) -> None:
        """The error names stage, shard and key, and its cause is the function's exception."""
        ds = self.on(numbers(BASE).shuffle().map(fails).map(noise))
        with pytest.raises(StageError, match=r"ZeroDivisionError.*map\(fails\).*shard-00.*key") as caught:
            list(ds)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert caught.value.key is not None
        assert int(caught.value.key) % 5 == 0


class EngineTests(UnorderedEngineTests):
    """The laws: what every engine that keeps the order promises for every plan."""

    def same(self, got: list[Any], want: list[Any]) -> bool:
        return got == want

    @pytest.mark.parametrize("name", CORPUS)
    def test_a_state_restores_exactly_the_rest(self, name: str) -> None:
        """Law 2a, at every point, on another engine too, and again from the restored loader."""
        ds = CORPUS[name]()
        want = outputs(ds.epoch(0).on("serial"))
        loader = one_epoch_loader(self.on(ds))
        run = iter(loader)
        points = set(self.points(len(want)))
        for done in range(len(want) + 1):
            if done in points:
                self._check_rest(ds, loader, done, want)
            if done < len(want):
                assert fingerprint(next(run)) == want[done]
        loader.close()

    def _check_rest(self, ds: Dataset, loader: Loader, done: int, want: list[Any]) -> None:
        restored = _load(ds.on("serial") if done % 2 else self.on(ds), loader.state_dict())
        if done % 7 == 3:  # the state of a restored loader that has not begun is the same state
            restored = _load(self.on(ds), restored.state_dict())
        assert outputs(restored) == want[done:], f"after {done} of {len(want)}"

    @pytest.mark.parametrize("name", [name for name in CORPUS if "flat_map" in name or "late" in name])
    def test_a_restored_run_can_be_restored_after_every_item(self, name: str) -> None:
        """Law 2a repeatedly: a new loader at each point, also in the middle of the outputs of one sample."""
        ds = CORPUS[name]()
        want = outputs(ds.epoch(0).on("serial"))
        state: Any = None
        done = 0
        for point in sorted({*self.points(len(want)), len(want)} - {0}):
            loader = _load(self.on(ds), state)
            assert _first_items(loader, point - done) == want[done:point], f"items {done} to {point} of {len(want)}"
            state, done = loader.state_dict(), point
            loader.close()
        assert outputs(_load(self.on(ds), state)) == []

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("name", RECUT)
    def test_other_worlds_take_over(self, name: str, seed: int) -> None:
        """Law 2b: re-cut a few times, with ranks at different positions and both cuts: each output exactly once."""
        ds = CORPUS[name]()
        rng = random.Random(f"{name} {seed}")
        want = Counter(outputs(ds.epoch(0).on("serial")))
        got: Counter[Any] = Counter()
        states: list[Any] | None = None
        largest = max(self.worlds)
        for _ in range(rng.randrange(1, largest + 1)):
            world, cut = rng.randrange(1, largest + 1), rng.choice(["range", "step"])
            following = []
            for rank in range(world):
                loader = _load(self.on(ds), states, rank=rank, world=world, cut=cut)
                got.update(_first_items(loader, rng.randrange(8)))
                following.append(loader.state_dict())
                loader.close()
            states = following
        got.update(outputs(_load(self.on(ds), states)))
        assert got == want

    def test_what_came_before_an_error_is_delivered(self) -> None:
        """A failing sample stops the run after all samples before it and before any sample after it."""
        ds = numbers(BASE).shuffle().map(fails).map(noise).epoch(0)
        want = [fingerprint(item) for item in ds.on_error("skip").on("serial")]
        got, error = _until_error(self.on(ds))
        assert (got, error) == _until_error(ds.on("serial"))
        assert got == want[: len(got)]
        assert "ZeroDivisionError" in error

    def test_a_run_resumes_at_the_sample_that_failed(self) -> None:
        """A state saved after an error begins with the failing sample."""
        ds = numbers(BASE).shuffle().map(fails)
        loader = self.on(ds).loader()
        got: list[Any] = []
        with pytest.raises(StageError):
            got.extend(fingerprint(item) for item in loader)
        rest = _load(self.on(ds.on_error("skip")), loader.state_dict())
        assert got + outputs(rest) == outputs(ds.on_error("skip").epoch(0).on("serial"))
        assert len(rest.skipped) == sum(x % 5 == 0 for x in range(sum(BASE)))

    def test_a_plan_that_joins_items_refuses_to_be_recut(self) -> None:
        """The error names the stage that joins items a second time."""
        ds = self.on(numbers(BASE).batched(2).batched(4))
        states = [ds.loader(rank, 2, uneven="keep").state_dict() for rank in range(2)]
        with pytest.raises(StateError, match=r"batched\(4\)"):
            ds.loader(uneven="keep").load_state_dict(states=states)


def _first_items(loader: Loader, count: int) -> Sequence[Any]:
    out: list[Any] = []
    if count:
        for item in loader:
            out.append(fingerprint(item))
            if len(out) == count:
                break
    return out


def _until_error(ds: Dataset) -> tuple[list[Any], str]:
    out: list[Any] = []
    try:
        out.extend(fingerprint(item) for item in ds)
    except PenstockError as exc:
        return out, str(exc)
    return out, "no error"
