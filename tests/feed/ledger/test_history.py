from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.dataset import Dataset
from penstock.engines import COLUMNS, ITEM, KIND, PASSED, POSITION
from penstock.errors import StorageError
from penstock.feed import Loader
from penstock.feed.ledger.history import (
    NO_LIMIT,
    CountedSteps,
    History,
    Session,
    TornFile,
    group_by_epoch,
    load_sessions,
    trace_history,
)
from penstock.feed.ledger.records import encode_steps
from penstock.testing import numbers

Parent = tuple[str, int] | None


def _session(
    name: str,
    clock: int,
    *,
    rank: int = 0,
    world: int = 1,
    epoch: int = 0,
    how: str = "fresh",
    parents: Sequence[Parent] = (),
    records: Sequence[tuple[int, int]] = (),
    end_step: int | None = None,
    retracted: bool = False,
) -> Session:
    """Return a session with records of (first step, number of steps); a step has one sample, at its own position."""
    fields = {
        "session": name,
        "dataset": "d",
        "epoch": epoch,
        "rank": rank,
        "world": world,
        "cut": "range",
        "how": how,
        "parents": [parent and list(parent) for parent in parents],
        "step": max((parent[1] for parent in parents if parent), default=0),
        "clock": clock,
    }
    contents = []
    for first, count in records:
        rows = np.zeros((COLUMNS, count), np.int64)
        rows[ITEM], rows[POSITION] = np.arange(count), np.arange(first, first + count)
        contents.append(encode_steps(first, count, rows))
    session = Session(fields, memoryview(b"".join(contents)), end_step=end_step, retracted=retracted)
    for number, content in enumerate(contents):
        session.offsets.append(sum(map(len, contents[:number])))
        session.lengths.append(len(content))
    return session


def _counted(history: History) -> dict[str, int]:
    return {steps.session.name: steps.until for steps in history.counted}


def _positions(steps: CountedSteps) -> list[int]:
    return [int(position) for _, rows in steps.tables() for position in rows[POSITION]]


# Which steps count


def test_all_steps_of_an_only_session_count() -> None:
    session = _session("a", 1, records=[(0, 3)], end_step=3)
    history = trace_history([session])
    assert _counted(history) == {"a": NO_LIMIT}
    assert (history.heads, history.void, history.world, history.ended) == ({0: session}, [], 1, True)


def test_steps_of_a_parent_count_up_to_the_step_from_which_its_child_resumed() -> None:
    first = _session("a", 1)
    second = _session("b", 2, how="own", parents=[("a", 5)])
    third = _session("c", 3, how="own", parents=[("b", 9)])
    assert _counted(trace_history([third, first, second])) == {"a": 5, "b": 9, "c": NO_LIMIT}


def test_a_session_that_is_not_an_ancestor_of_a_head_is_void() -> None:
    sessions = [_session("a", 1), _session("b", 2, how="own", parents=[("a", 5)]), _session("c", 3)]
    history = trace_history(sessions)
    assert _counted(history) == {"c": NO_LIMIT}
    assert [session.name for session in history.void] == ["a", "b"]


def test_a_parent_of_several_children_counts_up_to_the_latest_step() -> None:
    old = [_session("a", 1, world=2), _session("b", 2, rank=1, world=2)]
    parents = [("a", 4), ("b", 6)]
    new = [
        _session(name, 3 + rank, rank=rank, world=3, how="recut", parents=parents) for rank, name in enumerate("cde")
    ]
    history = trace_history([*old, *new])
    assert _counted(history) == {"a": 4, "b": 6, "c": NO_LIMIT, "d": NO_LIMIT, "e": NO_LIMIT}
    assert (sorted(history.heads), history.world, history.ended) == ([0, 1, 2], 3, False)


def test_ranks_that_were_cut_from_other_states_are_void() -> None:
    old = _session("a", 1)
    odd = _session("b", 2, world=2, how="recut", parents=[("a", 3)])
    new = [_session(name, 3, rank=rank, world=2, how="recut", parents=[("a", 4)]) for rank, name in enumerate("cd")]
    history = trace_history([old, odd, *new])
    assert _counted(history) == {"a": 4, "c": NO_LIMIT, "d": NO_LIMIT}
    assert history.void == [odd]


def test_a_retracted_step_does_not_count() -> None:
    session = _session("a", 1, records=[(0, 4)], end_step=3, retracted=True)
    history = trace_history([session])
    assert _counted(history) == {"a": 3}
    assert _positions(history.counted[0]) == [0, 1, 2]


def test_parents_that_are_not_in_the_ledger_are_unknown() -> None:
    without_ledger = _session("b", 2, how="own", parents=[None])
    history = trace_history([without_ledger])
    assert history.with_unknown_parents() == [without_ledger]
    known = [_session("a", 1), _session("b", 2, how="own", parents=[("a", 3)])]
    assert trace_history(known).with_unknown_parents() == []
    assert trace_history(known[1:]).with_unknown_parents() == known[1:]


def test_a_return_to_an_earlier_epoch_discards_later_ones() -> None:
    sessions = [_session("a", 1), _session("b", 2, epoch=1), _session("c", 3), _session("d", 4, epoch=1)]
    found = group_by_epoch(sessions)
    assert {epoch: [session.name for session in group] for (_, epoch), group in found.items()} == {
        0: ["a", "c"],
        1: ["d"],
    }


def test_ranks_may_be_in_different_epochs() -> None:
    sessions = [
        _session("a", 1, world=2),
        _session("b", 2, world=2, epoch=1),
        _session("c", 3, rank=1, world=2),
    ]
    assert {name: len(group) for name, group in group_by_epoch(sessions).items()} == {("d", 0): 2, ("d", 1): 1}


# The steps of a session


def test_records_are_split_at_the_first_step_that_does_not_count() -> None:
    steps = CountedSteps(_session("a", 1, records=[(0, 3), (3, 4)]), 5)
    assert _positions(steps) == [0, 1, 2, 3, 4]
    assert [rows[POSITION].tolist() for rows in steps.void_tables()] == [[5, 6]]


def test_samples_without_output_count_in_every_step() -> None:
    rows = np.zeros((COLUMNS, 2), np.int64)
    rows[ITEM], rows[KIND], rows[POSITION] = [0, 1], [0, PASSED], [7, 8]
    content = encode_steps(0, 2, rows)
    session = _session("a", 1)
    session.data = memoryview(content)
    session.offsets.append(0)
    session.lengths.append(len(content))
    assert _positions(CountedSteps(session, 1)) == [7, 8]
    assert _positions(CountedSteps(session, 0)) == [8]


@pytest.mark.parametrize(
    ("records", "until", "end_step", "lost"),
    [
        ([(0, 3), (3, 2)], NO_LIMIT, 5, []),
        ([(0, 3), (5, 2)], NO_LIMIT, 8, [3, 4, 7]),
        ([(1, 2)], 2, None, [0]),
        ([], 3, None, [0, 1, 2]),
        ([(0, 2)], NO_LIMIT, None, []),
    ],
)
def test_lost_steps_are_found(
    records: list[tuple[int, int]], until: int, end_step: int | None, lost: list[int]
) -> None:
    session = _session("a", 1, records=records, end_step=end_step)
    assert list(CountedSteps(session, until).lost_steps()) == lost


# Files


def _ds() -> Dataset:
    return numbers((30, 12, 20)).shuffle(10).batched(4)


def test_sessions_are_read_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    loaders = [_ds().loader(rank, 2, uneven="keep", ledger=tmp_path) for rank in (1, 0)]
    for loader in loaders:
        list(loader)
        next(iter(loader))
        loader.close()
    sessions, torn = load_sessions(tmp_path)
    assert [(session.rank, session.epoch[1]) for session in sessions] == [(1, 0), (1, 1), (0, 0), (0, 1)]
    assert [session.end_step for session in sessions] == [8, None, 8, None]
    assert torn == []


def test_a_torn_record_is_ignored_and_reported(tmp_path: Path) -> None:
    list(_ds().loader(ledger=tmp_path))
    (path,) = tmp_path.glob("*.ledger")
    path.write_bytes(path.read_bytes()[:-1])
    (session,), torn = load_sessions(tmp_path)
    assert session.end_step is None
    assert [(one.file, one.nbytes > 0) for one in torn] == [(path.name, True)]
    path.write_bytes(b"something else")
    assert load_sessions(tmp_path) == ([], [TornFile(path.name, 14)])


def test_a_folder_without_a_ledger_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no ledger in this folder"):
        load_sessions(tmp_path)


# Restarts


def _take(loader: Loader, items: int) -> None:
    list(islice(loader, items))


def _crash(loaders: list[Loader]) -> None:
    """End the runs as if their processes were killed: what is not yet written to the ledger is lost."""
    for loader in loaders:
        assert loader._ledger is not None
        loader._ledger._pending.clear()
        if loader._live is not None:
            loader._live.close()


def _resumed(state: Any, folder: Path) -> Loader:
    loader = _ds().loader(ledger=folder)
    loader.load_state_dict(state)
    return loader


def test_steps_are_numbered_through_an_epoch_across_restarts(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path)
    _take(loader, 3)
    state = loader.state_dict()
    _take(loader, 2)
    _crash([loader])
    list(_resumed(state, tmp_path))
    assert [step.step for step in ps.ledger(tmp_path)] == list(range(16))
    (epoch,) = ps.ledger(tmp_path).verify().epochs
    assert (epoch.delivered, epoch.again, epoch.sessions) == (62, 8, 2)


def test_starting_over_voids_earlier_sessions(tmp_path: Path) -> None:
    _take(_ds().loader(ledger=tmp_path), 5)
    for rank in range(2):
        list(_ds().loader(rank, 2, uneven="keep", ledger=tmp_path))
    (epoch,) = ps.ledger(tmp_path).verify().epochs
    assert (epoch.delivered, epoch.again, epoch.missing, epoch.repeated) == (62, 20, 0, 0)


def test_a_run_can_resume_from_a_state_before_the_last_one(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path)
    _take(loader, 2)
    early = loader.state_dict()
    _take(loader, 2)
    late = loader.state_dict()
    _crash([loader])
    for state, items in ((late, 3), (early, 100)):
        _take(_resumed(state, tmp_path), items)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert (proof.delivered, proof.epochs[0].again) == (62, 8 + 12)


def test_resuming_from_an_earlier_epoch_voids_the_later_one(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path)
    _take(loader, len(loader) - 1)
    state = loader.state_dict()
    list(loader)
    _take(loader, 5)
    _crash([loader])
    again = _resumed(state, tmp_path)
    assert len(list(again)) == 1
    assert [epoch.epoch for epoch in ps.ledger(tmp_path).verify().epochs] == [0]
    list(again)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert proof.finished
    assert [(epoch.epoch, epoch.delivered, epoch.again) for epoch in proof.epochs] == [(0, 62, 2), (1, 62, 0)]


def test_a_ledger_that_begins_within_an_epoch_proves_what_came_since(tmp_path: Path) -> None:
    before = [_ds().loader(rank, 2, uneven="keep") for rank in range(2)]
    for loader in before:
        _take(loader, 3)
    states = [loader.state_dict() for loader in before]
    for rank in range(2):
        loader = _ds().loader(rank, 2, uneven="keep", ledger=tmp_path)
        loader.load_state_dict(states[rank])
        list(loader)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert (proof.epochs[0].before, proof.delivered) == (24, 38)


def test_the_samples_of_a_rank_that_did_not_resume_are_missing(tmp_path: Path) -> None:
    old = [_ds().loader(rank, 2, uneven="keep", ledger=tmp_path) for rank in range(2)]
    for loader in old:
        _take(loader, 3)
    states = [loader.state_dict() for loader in old]
    _crash(old)
    for rank in (0, 2):
        loader = _ds().loader(rank, 3, uneven="keep", ledger=tmp_path)
        loader.load_state_dict(states=states)
        list(loader)
    proof = ps.ledger(tmp_path).verify()
    assert not proof.ok
    assert proof.epochs[0].missing == 13
    assert len(proof.missing) == 13


def test_ranks_that_resume_from_states_of_different_times_are_detected(tmp_path: Path) -> None:
    old = [_ds().loader(rank, 2, uneven="keep", ledger=tmp_path) for rank in range(2)]
    early = [loader.state_dict() for loader in old]
    for loader in old:
        _take(loader, 3)
    late = [loader.state_dict() for loader in old]
    _crash(old)
    for rank, states in enumerate([late, [early[0], late[1]], late]):
        loader = _ds().loader(rank, 3, uneven="keep", ledger=tmp_path)
        loader.load_state_dict(states=states)
        list(loader)
    assert not ps.ledger(tmp_path).verify().ok
