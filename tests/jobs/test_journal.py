from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import StateError
from penstock.jobs.inputs import Input
from penstock.jobs.journal import DiskJournal, FarJournal
from penstock.jobs.output import HIDDEN
from penstock.jobs.task import Done
from penstock.storage import Memory


def _done(key: str, *names: str, rows: str = "[]", error: str | None = None) -> Done:
    return Done(Input(0, key, key), (1, 2), 1, tuple((name, 3) for name in names), None, rows, error)


def _file(folder: Path) -> Path:
    return folder / HIDDEN / "journal.jsonl"


def test_the_last_line_of_an_input_holds(tmp_path: Path) -> None:
    journal = DiskJournal(str(tmp_path), "f")
    journal.add(_done("a", "x", "y", rows='[{"n":1}]'))
    journal.add(_done("b", "z", error="ValueError"))
    journal.add(_done("a", "y", rows='[{"n":2}]'))
    journal.close()
    again = DiskJournal(str(tmp_path), "f")
    assert again.owners == journal.owners == {"y": "a", "z": "b"}
    assert again.records == journal.records
    assert again.rows("a") == [{"n": 2}]
    assert (again.records["a"].done, again.records["b"].done) == (True, False)
    again.close()


def test_a_trial_owns_its_outputs_and_is_not_done(tmp_path: Path) -> None:
    journal = DiskJournal(str(tmp_path), "f")
    journal.add(_done("a", "x"), trial=True)
    assert not journal.records["a"].done
    assert journal.owners == {"x": "a"}
    journal.close()


def test_a_line_cut_off_at_any_byte_is_dropped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    journal = DiskJournal(str(tmp_path), "f")
    journal.add(_done("a", "x"))
    whole = _file(tmp_path).stat().st_size
    journal.add(_done("b\n", "ü"))
    journal.close()
    data = _file(tmp_path).read_bytes()
    for end in range(whole, len(data), 7):
        _file(tmp_path).write_bytes(data[:end])
        journal = DiskJournal(str(tmp_path), "f")
        assert set(journal.records) == {"a"}
        journal.add(_done("c"))
        journal.close()
        journal = DiskJournal(str(tmp_path), "f")
        assert set(journal.records) == {"a", "c"}
        journal.close()


def test_damage_in_the_middle_is_an_error_and_fresh_begins_anew(tmp_path: Path) -> None:
    journal = DiskJournal(str(tmp_path), "f")
    journal.add(_done("a", "x"))
    journal.close()
    _file(tmp_path).write_bytes(_file(tmp_path).read_bytes() + b"\x00junk\n")
    with pytest.raises(StateError, match=r"cannot be understood \(byte \d+: .*fresh=True"):
        DiskJournal(str(tmp_path), "f")
    journal = DiskJournal(str(tmp_path), "f", fresh=True)
    assert journal.owners == {"x": "a"}
    journal.reset()
    journal.close()
    journal = DiskJournal(str(tmp_path), "f")
    assert journal.records == {}
    journal.close()


def test_another_function_is_refused(tmp_path: Path) -> None:
    DiskJournal(str(tmp_path), "f").close()
    with pytest.raises(StateError, match="holds the outputs of f, and this is g; choose another folder"):
        DiskJournal(str(tmp_path), "g")


def test_what_cannot_be_written_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = DiskJournal(str(tmp_path), "f")
    real = os.pwrite

    def full(fd: int, data: memoryview, at: int) -> int:
        if len(data) > 10:
            return real(fd, data[:10], at)
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no space"):
        journal.add(_done("a"))
    monkeypatch.undo()
    journal.add(_done("b"))
    journal.close()
    journal = DiskJournal(str(tmp_path), "f")
    assert set(journal.records) == {"b"}
    journal.close()


def test_elsewhere_the_journal_is_in_pieces_that_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    url, storage = "memory://journal/out", Memory()
    monkeypatch.setattr("penstock.jobs.journal._EVERY_S", 0.0)
    journal = FarJournal(url, storage, "f")
    for number in range(12):
        journal.add(_done(f"a{number}", f"x{number}", rows=f'[{{"n":{number}}}]'))
    assert len(list(storage.list(url))) > 8
    half = FarJournal(url, storage, "f")  # what is there if the other one is killed now
    assert set(half.records) == set(journal.records)
    assert half.rows("a7") == [{"n": 7}]
    os.close(half._fd)
    journal.close()
    assert len(list(storage.list(url))) == 1
    again = FarJournal(url, storage, "f")
    assert again.records == journal.records
    again.reset()
    again.close()
    assert FarJournal(url, storage, "f").records == {}


def test_a_journal_that_was_being_joined_when_it_was_killed_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    url, storage = "memory://journal/joined", Memory()
    monkeypatch.setattr("penstock.jobs.journal._EVERY_S", 0.0)
    journal = FarJournal(url, storage, "f")
    for number in range(10):
        journal.add(_done(f"a{number}", f"x{number}"))
    monkeypatch.setattr(FarJournal, "_forget", lambda *_: None)
    journal.close()
    again = FarJournal(url, storage, "f")
    assert again.owners == journal.owners
    again.close()
