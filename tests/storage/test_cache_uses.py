"""Processes see each other's plans while they live, and remove those of processes that have ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

from penstock.storage.cache_policy import Uses
from penstock.storage.cache_uses import USES_SUFFIX, PlannedUses, PublishedUses


def _uses(*first: float) -> Uses:
    positions = np.array(first)
    return Uses(np.arange(1, len(first) + 1, dtype=np.uint64), positions, positions + 5, positions + 100)


def _plans(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*{USES_SUFFIX}"))


def test_a_plan_is_seen_until_it_is_dropped(tmp_path: Path) -> None:
    seen = PlannedUses(str(tmp_path))
    assert seen.next_uses() == {}
    assert seen.use_after(1) is None
    published = PublishedUses(str(tmp_path), _uses(0, 20))
    assert seen.next_uses() == {1: 0.0, 2: 20.0}
    assert (seen.use_after(1), seen.use_after(2), seen.use_after(3)) == (100.0, 120.0, None)
    del published
    assert seen.next_uses() == {}
    assert _plans(tmp_path) == []


def test_progress_moves_the_next_uses(tmp_path: Path) -> None:
    published = PublishedUses(str(tmp_path), _uses(0, 20))
    published.advance(10)
    assert published.progress == 10
    found = PlannedUses(str(tmp_path)).next_uses()
    assert 0 < found[2] < found[1]  # in seconds: the pace is measured


def test_two_plans_share_by_the_next_use_of_either(tmp_path: Path) -> None:
    both = [PublishedUses(str(tmp_path), _uses(0, 50)), PublishedUses(str(tmp_path), _uses(30, 10))]
    seen = PlannedUses(str(tmp_path))
    assert seen.next_uses() == {1: 0.0, 2: 10.0}
    assert seen.use_after(1) == 30.0
    del both


def test_the_plan_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        published = PublishedUses(str(tmp_path), _uses(0))
        assert published is not None
        signal.pause()
    seen = PlannedUses(str(tmp_path))
    while not seen.next_uses():
        os.sched_yield()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert seen.next_uses() == {}
    assert _plans(tmp_path) == []


def test_the_plan_of_a_process_that_ends_is_gone(tmp_path: Path) -> None:
    published = PublishedUses(str(tmp_path), _uses(0))
    assert len(_plans(tmp_path)) == 1
    del published
    assert _plans(tmp_path) == []


def test_a_file_that_is_not_a_plan_is_ignored(tmp_path: Path) -> None:
    published = PublishedUses(str(tmp_path), _uses(0))
    (tmp_path / f"link{USES_SUFFIX}").symlink_to(published.path)
    assert PlannedUses(str(tmp_path)).next_uses() == {1: 0.0}
