"""The laws of engines, for workers of every kind and number."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest

import penstock as ps
from penstock.dataset import Dataset
from penstock.plan import Resources
from penstock.testing import CORPUS, EngineTests, UnorderedEngineTests, numbers, on_resources, outputs

FULL = os.environ.get("PENSTOCK_FULL") == "1"
WORKERS: tuple[Any, ...] = (1, 2, 5, (1, 4))
KINDS = ("threads", "processes", "mixed")


class _Sampled(UnorderedEngineTests):
    """The laws at a few worlds and a few points; the serial engine is tested at all of them."""

    worlds = UnorderedEngineTests.worlds if FULL else (2,)

    def points(self, count: int) -> Iterable[int]:
        return (
            super().points(count) if FULL else {0, count, *random.Random(count).sample(range(count + 1), min(count, 3))}
        )


class TestLocal(_Sampled, EngineTests):
    def on(self, ds: Dataset) -> Dataset:
        return ds.on("local")


if FULL:  # the matrix below covers some of these cases

    class TestUnordered(_Sampled):
        def on(self, ds: Dataset) -> Dataset:
            return ds.on("local", ordered=False)


class _WithWorkers(UnorderedEngineTests):
    """An engine whose stages all get one kind of workers, or alternate between two kinds."""

    ordered = True
    worlds = (2,)

    def __init__(self, kind: str, workers: Any) -> None:
        places = ("processes", "threads") if kind == "mixed" else (kind,)
        self.resources = [Resources(workers=workers, on=on) for on in places]  # type: ignore[arg-type]

    def on(self, ds: Dataset) -> Dataset:
        return on_resources(ds, self.resources).on("local", ordered=self.ordered)

    def points(self, count: int) -> Iterable[int]:
        # Of two neighbouring points, the law resumes from one on this engine and from the other on the serial engine.
        return {0, count // 3, 2 * count // 3 + 1, count} if FULL else {count // 3, count // 3 + 1}


class _Ordered(_WithWorkers, EngineTests):
    pass


class _Unordered(_WithWorkers):
    ordered = False


LAWS = {True: _Ordered, False: _Unordered}


def cases_of(laws: type) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each test of a class with each combination of its arguments."""
    for law in (name for name in dir(laws) if name.startswith("test_")):
        marks = [mark.args for mark in getattr(getattr(laws, law), "pytestmark", ())]
        for values in product(*(mark[1] for mark in marks)):
            yield law, dict(zip((mark[0] for mark in marks), values, strict=True))


def cases() -> Iterator[Any]:
    """Yield every law on every plan for every kind of workers.

    Where processes take part, which cost more, the number of workers is drawn at random. Unless ``FULL``, there are
    only a few cases of every kind, with few workers.
    """
    for kind, ordered in product(KINDS, LAWS):
        rng = random.Random(f"{kind} {ordered}")
        every = list(cases_of(LAWS[ordered]))
        for law, arguments in every if FULL else rng.sample(every, 4 if kind == "threads" else 1):
            for workers in WORKERS if FULL and kind == "threads" else [rng.choice(WORKERS if FULL else (1, 2))]:
                prefix = f"{kind}-{'ordered' if ordered else 'unordered'}-{workers}"
                name = "-".join([prefix, law.removeprefix("test_"), *map(str, arguments.values())])
                yield pytest.param(kind, ordered, workers, law, arguments, id=name)


@pytest.mark.parametrize(("kind", "ordered", "workers", "law", "arguments"), list(cases()))
def test_the_laws_hold_for_workers_of_every_kind(
    kind: str, ordered: bool, workers: Any, law: str, arguments: dict[str, Any]
) -> None:
    getattr(LAWS[ordered](kind, workers), law)(**arguments)


@pytest.mark.parametrize(
    ("kind", "workers"),
    list(product(["processes", "mixed"], WORKERS)) if FULL else [("processes", 2), ("mixed", (1, 4))],
    ids=str,
)
def test_every_kind_and_number_of_workers_yields_what_serial_yields(kind: str, workers: Any) -> None:
    names = ("random flat_map", "zip with skips", "batches mapped", "late shuffle")
    ds = CORPUS[random.Random(f"{kind} {workers}").choice(names)]().epoch(1)
    assert outputs(_Ordered(kind, workers).on(ds)) == outputs(ds.on("serial"))


def test_the_matrix_covers_all_laws() -> None:
    found = {law for law, _ in cases_of(_Ordered)}
    assert {"test_it_yields_what_serial_yields", "test_other_worlds_take_over"} <= found
    assert sum(law == "test_it_yields_what_serial_yields" for law, _ in cases_of(_Unordered)) == len(CORPUS)


def test_resources_reach_the_stages_of_branches() -> None:
    one, two = Resources(workers=3), Resources(on="processes")
    ds = numbers((3,)).map(abs).union(numbers((2,), name="b").map(abs).select("x")).map(abs)
    plan = on_resources(ds, [one, two]).plan
    assert [[s.resources for s in branch.body] for branch in plan.branches()] == [[one], [two, None]]
    assert [stage.resources for stage in plan.body] == [one]


def test_a_value_that_holds_itself_arrives() -> None:
    got = list(ps.from_items([{"n": 1}, {"n": 2}]).map(_hold_itself, workers=2))
    assert [(sample["n"], sample["x"][0] is sample["x"]) for sample in got] == [(1, True), (2, True)]


def _hold_itself(sample: dict[str, Any]) -> dict[str, Any]:
    endless: list[Any] = []
    endless.append(endless)
    return {**sample, "x": endless}
