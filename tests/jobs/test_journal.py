from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import StateError
from penstock.jobs.inputs import Input
from penstock.jobs.journal import LocalJournal, RemoteJournal
from penstock.jobs.output import JOB_FOLDER
from penstock.jobs.task import Outcome
from penstock.storage import Memory


def _outcome(key: str, *names: str, rows: str = "[]", error: str | None = None) -> Outcome:
    return Outcome(Input(0, key, key), (1, 2), 1, tuple((name, 3) for name in names), None, rows, error)


def _journal_file(folder: Path) -> Path:
    return folder / JOB_FOLDER / "journal.jsonl"


def test_the_last_line_of_an_input_is_valid(tmp_path: Path) -> None:
    journal = LocalJournal(str(tmp_path), "f")
    journal.add(_outcome("a", "x", "y", rows='[{"n":1}]'))
    journal.add(_outcome("b", "z", error="ValueError"))
    journal.add(_outcome("a", "y", rows='[{"n":2}]'))
    journal.close()
    reopened = LocalJournal(str(tmp_path), "f")
    assert reopened.owners == journal.owners == {"y": "a", "z": "b"}
    assert reopened.records == journal.records
    assert reopened.rows("a") == [{"n": 2}]
    assert (reopened.records["a"].done, reopened.records["b"].done) == (True, False)
    reopened.close()


def test_an_input_of_a_trial_owns_its_outputs_but_is_not_done(tmp_path: Path) -> None:
    journal = LocalJournal(str(tmp_path), "f")
    journal.add(_outcome("a", "x"), trial=True)
    assert not journal.records["a"].done
    assert journal.owners == {"x": "a"}
    journal.close()


def test_an_incomplete_line_is_dropped_and_the_next_is_intact(tmp_path: Path) -> None:
    journal = LocalJournal(str(tmp_path), "f")
    journal.add(_outcome("a", "x"))
    first_lines = _journal_file(tmp_path).stat().st_size
    journal.add(_outcome("b\n", "ü"))
    journal.close()
    data = _journal_file(tmp_path).read_bytes()
    for end in range(first_lines, len(data), 7):
        _journal_file(tmp_path).write_bytes(data[:end])
        journal = LocalJournal(str(tmp_path), "f")
        assert set(journal.records) == {"a"}
        journal.add(_outcome("c"))
        journal.close()
        journal = LocalJournal(str(tmp_path), "f")
        assert set(journal.records) == {"a", "c"}
        journal.close()


def test_damage_in_the_middle_is_an_error_and_fresh_starts_over(tmp_path: Path) -> None:
    journal = LocalJournal(str(tmp_path), "f")
    journal.add(_outcome("a", "x"))
    journal.close()
    _journal_file(tmp_path).write_bytes(_journal_file(tmp_path).read_bytes() + b"\x00junk\n")
    with pytest.raises(StateError, match=r"the journal is damaged at byte \d+ \(.*fresh=True"):
        LocalJournal(str(tmp_path), "f")
    journal = LocalJournal(str(tmp_path), "f", fresh=True)
    assert journal.owners == {"x": "a"}
    journal.reset()
    journal.close()
    journal = LocalJournal(str(tmp_path), "f")
    assert journal.records == {}
    journal.close()


def test_the_journal_of_another_function_is_refused(tmp_path: Path) -> None:
    LocalJournal(str(tmp_path), "f").close()
    with pytest.raises(StateError, match="holds the outputs of f, not of g; choose another folder"):
        LocalJournal(str(tmp_path), "g")


def test_a_failed_write_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = LocalJournal(str(tmp_path), "f")
    pwrite = os.pwrite

    def disk_full(fd: int, data: memoryview, at: int) -> int:
        if len(data) > 10:
            return pwrite(fd, data[:10], at)
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "pwrite", disk_full)
    with pytest.raises(OSError, match="no space"):
        journal.add(_outcome("a"))
    monkeypatch.undo()
    journal.add(_outcome("b"))
    journal.close()
    journal = LocalJournal(str(tmp_path), "f")
    assert set(journal.records) == {"b"}
    journal.close()


def test_a_remote_journal_is_uploaded_in_objects_that_are_joined_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    url, storage = "memory://job-journal/out", Memory()
    monkeypatch.setattr("penstock.jobs.journal._SYNC_INTERVAL_S", 0.0)
    journal = RemoteJournal(url, storage, "f")
    for number in range(12):
        journal.add(_outcome(f"a{number}", f"x{number}", rows=f'[{{"n":{number}}}]'))
    assert len(list(storage.list(url))) > 8
    after_kill = RemoteJournal(url, storage, "f")  # what the next run finds if this one is killed now
    assert set(after_kill.records) == set(journal.records)
    assert after_kill.rows("a7") == [{"n": 7}]
    os.close(after_kill._fd)
    journal.close()
    assert len(list(storage.list(url))) == 1
    reopened = RemoteJournal(url, storage, "f")
    assert reopened.records == journal.records
    reopened.reset()
    reopened.close()
    assert RemoteJournal(url, storage, "f").records == {}


def test_a_remote_journal_survives_a_kill_while_its_objects_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    url, storage = "memory://job-journal/joined", Memory()
    monkeypatch.setattr("penstock.jobs.journal._SYNC_INTERVAL_S", 0.0)
    journal = RemoteJournal(url, storage, "f")
    for number in range(10):
        journal.add(_outcome(f"a{number}", f"x{number}"))
    monkeypatch.setattr(RemoteJournal, "_delete", lambda *_: None)
    journal.close()
    reopened = RemoteJournal(url, storage, "f")
    assert reopened.owners == journal.owners
    reopened.close()
