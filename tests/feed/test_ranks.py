from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import PlanError
from penstock.feed import find_rank
from penstock.feed.ranks import _VARIABLES


@pytest.fixture(autouse=True)
def _no_ranks_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher in _VARIABLES:
        for name in launcher:
            monkeypatch.delenv(name, raising=False)


def test_a_process_alone_is_rank_0_of_1() -> None:
    assert find_rank(None, None) == (0, 1)


def test_given_values_are_used() -> None:
    assert find_rank(2, 5) == (2, 5)


@pytest.mark.parametrize(("rank", "world"), [("0", "1"), (-1, 2), (0, 0), (True, 2), (0.0, 1)])
def test_given_values_that_are_not_whole_numbers_are_refused(rank: Any, world: Any) -> None:
    with pytest.raises(PlanError, match=r"(rank|world)=.*: expected a whole number"):
        find_rank(rank, world)


def test_rank_and_world_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert find_rank(None, None) == (3, 8)
    assert find_rank(0, 1) == (0, 1)


def test_a_rank_without_a_world_in_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert find_rank(None, None) == (0, 1)


def test_values_in_the_environment_that_are_not_numbers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "three")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(PlanError, match="RANK='three', WORLD_SIZE='8', which are not numbers"):
        find_rank(None, None)


@pytest.mark.parametrize(("rank", "world"), [(1, None), (None, 2)])
def test_a_rank_or_world_alone_is_refused(rank: int | None, world: int | None) -> None:
    with pytest.raises(PlanError, match="give both"):
        find_rank(rank, world)


def test_a_process_group_takes_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = import_module("torch.distributed")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    for name, answer in (("is_available", True), ("is_initialized", True), ("get_rank", 1), ("get_world_size", 4)):
        monkeypatch.setattr(distributed, name, lambda answer=answer: answer)
    assert find_rank(None, None) == (1, 4)


@pytest.mark.parametrize("names", _VARIABLES)
def test_every_launcher_is_supported(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(names[0], "2")
    monkeypatch.setenv(names[1], "6")
    assert find_rank(None, None) == (2, 6)


def test_torchrun_takes_precedence_over_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip([*_VARIABLES[1], *_VARIABLES[0]], "0513", strict=True):
        monkeypatch.setenv(name, value)
    assert find_rank(None, None) == (1, 3)


def _fake_ray_train(monkeypatch: pytest.MonkeyPatch, rank: object, world: object) -> None:
    def answer(value: object) -> object:
        if isinstance(value, Exception):
            raise value
        if value is None:
            warnings.warn("not in a worker", stacklevel=1)
        return value

    context = SimpleNamespace(get_world_rank=lambda: answer(rank), get_world_size=lambda: answer(world))
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))


def test_ray_train_takes_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    _fake_ray_train(monkeypatch, 1, 2)
    assert find_rank(None, None) == (1, 2)


@pytest.mark.parametrize("answer", [None, RuntimeError("not in a training function")])
def test_ray_train_outside_of_its_workers_is_ignored(answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_ray_train(monkeypatch, answer, answer)
    assert find_rank(None, None) == (0, 1)
