from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.dataset import Dataset
from penstock.errors import PlanError, StateError, StorageError
from penstock.testing import numbers


def _ds() -> Dataset:
    return numbers((30, 12, 20)).shuffle(10).batched(4)


@pytest.mark.parametrize("folder", ["s3://bucket/ledger", "", 3, b"x"])
def test_a_ledger_is_a_local_folder(folder: Any) -> None:
    with pytest.raises(PlanError, match="give a local folder"):
        _ds().loader(ledger=folder)


def test_nothing_is_written_before_the_first_step(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path / "runs" / "ledger")
    iter(loader)
    assert not list(tmp_path.iterdir())
    next(iter(loader))
    loader.close()
    assert len(list((tmp_path / "runs" / "ledger").glob("*.ledger"))) == 1


def test_shards_that_are_not_counted_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="run `penstock index`"):
        next(iter(numbers((3, 4), hidden=True).loader(ledger=tmp_path)))


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="the ledger cannot be written: Not a directory"):
        next(iter(_ds().loader(ledger=tmp_path / "file" / "ledger")))


def test_a_full_disk_ends_the_run_and_leaves_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = _ds().loader(ledger=tmp_path)
    batches = iter(loader)
    next(batches)
    loader.state_dict()
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:9]))
    with pytest.raises(StorageError, match="the ledger cannot be written: no space left"):
        [next(batches), loader.state_dict()]
    monkeypatch.undo()
    proof = ps.ledger(tmp_path).verify()
    assert (proof.delivered, proof.torn) == (4, [])


def test_a_state_has_its_position_in_the_ledger_only_if_there_is_one(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    session, step = loader.state_dict()["counted"]["ledger"]
    assert re.fullmatch(r"[0-9a-f]{12}\.0", session)
    assert step == 3
    plain = _ds().loader()
    assert "counted" not in plain.state_dict()
    plain.load_state_dict(loader.state_dict())  # a ledger is not needed to resume
    assert len(list(plain)) == 13
    loader.close()


@pytest.mark.parametrize("entry", ["x", ["x"], [3, 4], ["x", -1], ["x", True], ["x", 1, 2]])
def test_a_damaged_position_in_the_ledger_is_refused(entry: Any, tmp_path: Path) -> None:
    state = _ds().loader().state_dict()
    with pytest.raises(StateError, match="the state's 'ledger' holds"):
        _ds().loader(ledger=tmp_path).load_state_dict({**state, "counted": {"ledger": entry}})


def test_how_often_a_plan_has_each_sample() -> None:
    base, other = numbers((3, 4)), numbers((7,), name="b").rename(y="x").select("y")
    assert base.shuffle().map(dict).plan.occurrences() == [1]
    assert base.repeat(2).shuffle().repeat(3).plan.occurrences() == [6]
    assert base.zip(other).plan.occurrences() == [1, 0]
    assert base.repeat(2).union(other).plan.occurrences() == [2, 1]
    assert ps.mix([base, other], stop="all").plan.occurrences() == [1, 1]
    assert ps.mix([base, other]).plan.occurrences() is None
    assert base.limit(3).plan.occurrences() is None
    assert base.repeat().plan.occurrences() is None


_KILLED = """
import os, signal, sys, time
from penstock.testing import numbers
loader = numbers((30, 12, 20)).shuffle(10).batched(4).loader(ledger=sys.argv[1])
for number, batch in enumerate(loader):
    time.sleep(0.02)
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_has_written_every_step(tmp_path: Path, warm_python: str) -> None:
    ended = subprocess.run([warm_python, "-c", _KILLED, str(tmp_path)], timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [step.step for step in ps.ledger(tmp_path)] == list(range(8))
    proof = ps.ledger(tmp_path).verify()
    assert (proof.ok, proof.finished, proof.delivered) == (True, False, 32)


def test_files_are_in_order_even_if_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = _ds().loader(ledger=tmp_path)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    monkeypatch.setattr("time.time_ns", lambda: 5)
    again = _ds().loader(ledger=tmp_path)
    again.load_state_dict(state)
    list(again)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert proof.finished


def test_a_sample_takes_a_few_bytes(tmp_path: Path) -> None:
    list(numbers([500] * 20).shuffle().batched(64, collate=len).loader(ledger=tmp_path))
    (path,) = tmp_path.glob("*.ledger")
    assert path.stat().st_size / 10_000 < 4.5
