from __future__ import annotations

from importlib import import_module

import pytest

from penstock.errors import PlanError
from penstock.feed import find_rank


@pytest.fixture(autouse=True)
def _no_ranks_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


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
