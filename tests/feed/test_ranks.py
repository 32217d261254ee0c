from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import SimpleNamespace

import pytest

from penstock.errors import PlanError
from penstock.feed import find_rank
from penstock.feed.ranks import _TOLD


@pytest.fixture(autouse=True)
def _no_ranks_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher in _TOLD:
        for name in launcher:
            monkeypatch.delenv(name, raising=False)


def test_a_process_alone_is_rank_0_of_1() -> None:
    assert find_rank(None, None) == (0, 1)


def test_what_is_given_is_used() -> None:
    assert find_rank(2, 5) == (2, 5)


def test_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert find_rank(None, None) == (3, 8)
    assert find_rank(0, 1) == (0, 1)


def test_a_rank_without_a_world_in_the_environment_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert find_rank(None, None) == (0, 1)


def test_an_environment_that_makes_no_sense_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "three")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(PlanError, match="RANK='three', WORLD_SIZE='8'"):
        find_rank(None, None)


@pytest.mark.parametrize(("rank", "world"), [(1, None), (None, 2)])
def test_half_an_answer_is_refused(rank: int | None, world: int | None) -> None:
    with pytest.raises(PlanError, match="give both"):
        find_rank(rank, world)


def test_a_process_group_is_asked_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = import_module("torch.distributed")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    for name, answer in (("is_available", True), ("is_initialized", True), ("get_rank", 1), ("get_world_size", 4)):
        monkeypatch.setattr(distributed, name, lambda answer=answer: answer)
    assert find_rank(None, None) == (1, 4)


@pytest.mark.parametrize("names", _TOLD)
def test_every_launcher_is_understood(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(names[0], "2")
    monkeypatch.setenv(names[1], "6")
    assert find_rank(None, None) == (2, 6)


def test_what_torchrun_says_counts_before_what_slurm_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip([*_TOLD[1], *_TOLD[0]], "0513", strict=True):
        monkeypatch.setenv(name, value)
    assert find_rank(None, None) == (1, 3)


def _ray(monkeypatch: pytest.MonkeyPatch, rank: object, world: object) -> None:
    def answer(value: object) -> object:
        if isinstance(value, Exception):
            raise value
        if value is None:
            warnings.warn("not in a worker", stacklevel=1)
        return value

    context = SimpleNamespace(get_world_rank=lambda: answer(rank), get_world_size=lambda: answer(world))
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))


def test_ray_train_is_asked_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    _ray(monkeypatch, 1, 2)
    assert find_rank(None, None) == (1, 2)


@pytest.mark.parametrize("answer", [None, RuntimeError("not in a training function")])
def test_ray_train_outside_of_its_workers_says_nothing(answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    _ray(monkeypatch, answer, answer)
    assert find_rank(None, None) == (0, 1)
