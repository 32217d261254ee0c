"""The laws, for workers of every kind and number."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest

from penstock.dataset import Dataset
from penstock.plan import Resources
from penstock.testing import CORPUS, EngineTests, UnorderedEngineTests, numbers, on_resources, outputs

FULL = os.environ.get("PENSTOCK_FULL") == "1"
WORKERS: tuple[Any, ...] = (1, 2, 5, (1, 4))
WHERE = ("threads", "processes", "mixed")


class _Sampled(UnorderedEngineTests):
    """The short form: a few worlds and a few moments, where the serial engine is tried on all of them."""

    worlds = UnorderedEngineTests.worlds if FULL else (2,)

    def points(self, many: int) -> Iterable[int]:
        return super().points(many) if FULL else {0, many, *random.Random(many).sample(range(many + 1), min(many, 3))}


class TestLocal(_Sampled, EngineTests):
    def on(self, ds: Dataset) -> Dataset:
        return ds.on("local")


if FULL:  # the matrix below has some of them

    class TestUnordered(_Sampled):
        def on(self, ds: Dataset) -> Dataset:
            return ds.on("local", ordered=False)


class _Somewhere(UnorderedEngineTests):
    """An engine whose stages are all given one kind of workers."""

    ordered = True
    worlds = (2,)

    def __init__(self, where: str, workers: Any) -> None:
        kinds = ("processes", "threads") if where == "mixed" else (where,)
        self.needs = [Resources(workers=workers, on=kind) for kind in kinds]  # type: ignore[arg-type]

    def on(self, ds: Dataset) -> Dataset:
        return on_resources(ds, self.needs).on("local", ordered=self.ordered)

    def points(self, many: int) -> Iterable[int]:
        # Of two neighbours, the law goes on from one here and from the other on the serial engine.
        return {0, many // 3, 2 * many // 3 + 1, many} if FULL else {many // 3, many // 3 + 1}


class _Ordered(_Somewhere, EngineTests):
    pass


class _Unordered(_Somewhere):
    ordered = False


LAWS = {True: _Ordered, False: _Unordered}


def cases_of(laws: type) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tests of a class with each of their arguments."""
    for law in (name for name in dir(laws) if name.startswith("test_")):
        marks = [mark.args for mark in getattr(getattr(laws, law), "pytestmark", ())]
        for values in product(*(mark[1] for mark in marks)):
            yield law, dict(zip((mark[0] for mark in marks), values, strict=True))


def cases() -> Iterator[Any]:
    """Every law on every plan for every kind of workers.

    How many workers is drawn for each where runs cost more; the short form takes a few of every kind, of few workers.
    """
    for where, ordered in product(WHERE, LAWS):
        dice = random.Random(f"{where} {ordered}")
        those = list(cases_of(LAWS[ordered]))
        for law, arguments in those if FULL else dice.sample(those, 5 if where == "threads" else 2):
            for workers in WORKERS if FULL and where == "threads" else [dice.choice(WORKERS if FULL else (1, 2))]:
                kind = f"{where}-{'ordered' if ordered else 'unordered'}-{workers}"
                name = "-".join([kind, law.removeprefix("test_"), *map(str, arguments.values())])
                yield pytest.param(where, ordered, workers, law, arguments, id=name)


@pytest.mark.parametrize(("where", "ordered", "workers", "law", "arguments"), list(cases()))
def test_the_laws_hold_for_workers_of_every_kind(
    where: str, ordered: bool, workers: Any, law: str, arguments: dict[str, Any]
) -> None:
    getattr(LAWS[ordered](where, workers), law)(**arguments)


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("where", ["processes", "mixed"])
def test_every_kind_and_number_of_workers_yields_what_serial_yields(where: str, workers: Any) -> None:
    names = ("random flat_map", "zip with skips", "batches mapped", "late shuffle")
    ds = CORPUS[random.Random(f"{where} {workers}").choice(names)]().epoch(1)
    assert outputs(_Ordered(where, workers).on(ds)) == outputs(ds.on("serial"))


def test_all_laws_are_known_to_the_matrix() -> None:
    found = {law for law, _ in cases_of(_Ordered)}
    assert {"test_it_yields_what_serial_yields", "test_other_worlds_take_over"} <= found
    assert sum(law == "test_it_yields_what_serial_yields" for law, _ in cases_of(_Unordered)) == len(CORPUS)


def test_resources_reach_the_stages_of_branches() -> None:
    one, two = Resources(workers=3), Resources(on="processes")
    ds = numbers((3,)).map(abs).union(numbers((2,), name="b").map(abs).select("x")).map(abs)
    plan = on_resources(ds, [one, two]).plan
    assert [[s.resources for s in branch.body] for branch in plan.branches()] == [[one], [two, None]]
    assert [stage.resources for stage in plan.body] == [one]
