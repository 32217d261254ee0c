"""A journal is read as it was written, survives a kill at any byte, and refuses what it cannot read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StateError, StorageError
from penstock.landing.journal import JOURNAL, Journal
from penstock.storage import Memory


def lines(journal: Journal) -> list[dict[str, Any]]:
    return [line for line, _, _ in journal.load()]


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), None)
    journal.start({"run": 1})
    place = journal.append(json.dumps({"n": "\u00fc\n"}), sync=True)
    assert journal.read(*place) == {"n": "\u00fc\n"}
    journal.close()
    again = Journal(str(tmp_path), None)
    assert lines(again) == [{"v": 2, "run": 1}, {"n": "\u00fc\n"}]
    again.start({"run": 2})
    assert lines(again) == [{"v": 2, "run": 2}]
    again.remove()
    again.close()
    assert os.listdir(tmp_path) == []


def test_an_incomplete_line_is_dropped_and_the_next_is_intact(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path), None)
    journal.start({})
    journal.append('{"n": 1}')
    whole = (tmp_path / JOURNAL).stat().st_size
    journal.append('{"n": 2}')
    journal.close()
    data = (tmp_path / JOURNAL).read_bytes()
    for end in range(whole, len(data)):
        (tmp_path / JOURNAL).write_bytes(data[:end])
        journal = Journal(str(tmp_path), None)
        assert lines(journal) == [{"v": 2}, {"n": 1}]
        journal.append('{"n": 3}')
        assert lines(journal) == [{"v": 2}, {"n": 1}, {"n": 3}]
        journal.close()


@pytest.mark.parametrize("text", ["{\n", "[]\n", "{}\n", '{"v": 1}\n', '{"v": 2}\nx\n', "\0\n", "[" * 100_000 + "\n"])
def test_a_damaged_journal_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text(text)
    journal = Journal(str(tmp_path), None)
    with pytest.raises(StateError, match=r"the journal cannot be read at byte \d+"):
        lines(journal)
    assert [line for line, _, _ in journal.load(lenient=True)] in ([], [{"v": 2}])
    journal.close()


def test_a_journal_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / JOURNAL).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        Journal(str(tmp_path / "work"), None)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_failed_write_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(str(tmp_path), None)
    journal.start({})
    pwrite = os.pwrite

    def disk_full(fd: int, data: memoryview, at: int) -> int:
        if len(data) > 10:
            return pwrite(fd, data[:10], at)
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "pwrite", disk_full)
    with pytest.raises(OSError, match="no space"):
        journal.append('{"a long": "line"}')
    monkeypatch.undo()
    journal.append('{"n": 1}')
    assert lines(journal) == [{"v": 2}, {"n": 1}]
    journal.close()


class Dying(Memory):
    """Memory that fails after a number of calls that write."""

    left = [1 << 60]  # noqa: RUF012 - shared with the test

    def put(self, url: str, **more: Any) -> Any:
        self._count(url)
        return super().put(url, **more)

    def delete(self, url: str) -> None:
        self._count(url)
        super().delete(url)

    def _count(self, url: str) -> None:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise StorageError("gone", url)


@pytest.mark.parametrize("calls", range(12))
def test_a_remote_journal_survives_a_kill_at_any_request(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.landing.journal._MAX_OBJECTS", 4)
    work, storage = f"memory://journal/{calls}/work", Dying()
    Dying.left[0] = calls
    written: list[dict[str, Any]] = []
    journal = Journal(work, storage)
    try:
        journal.start({})
        for number in range(7):
            journal.append(json.dumps({"n": number}), sync=True)
            written.append({"n": number})
        journal.remove()
    except StorageError:
        Dying.left[0] = 1 << 60
        found = [line for line in lines(Journal(work, storage)) if "v" not in line]
        assert found[-len(written) :] == written or found[-len(written) - 1 : -1] == written
    else:
        assert list(storage.list(work)) == []
