"""A journal is read as it was written, and a damaged one is refused with advice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engines import Start, StartPart
from penstock.errors import PlanError
from penstock.formats.manifest import ShardEntry
from penstock.packing.folder_lock import Owner
from penstock.packing.journal import (
    JOURNAL,
    Journal,
    JournalPosition,
    read_journal,
    remove_journal,
    start_from_json,
    start_to_json,
    write_journal,
)
from penstock.storage import Memory

URL = "memory://journal/out"
ENTRY = ShardEntry("shard-000000.tar", 3, 100, "ab")
OWNER = Owner("host", 7, "123", "ab12")


def test_a_journal_is_read_as_it_was_written() -> None:
    start = Start([[3, 9, 1, 0]], (StartPart([[0, 3, 1, 0]], 3, 1, 0),), {1: (2, 0)}, {2: 5}, 7, [0, 1, 1, 0])
    assert start_from_json(json.loads(json.dumps(start_to_json(start)))) == start
    position = JournalPosition(start_to_json(start), 4, 1)
    journal = Journal("s", {"seed": 1}, 2, 30, ("old.tar",), by=OWNER).with_shard(ENTRY, position)
    write_journal(Memory(), URL, journal)
    assert read_journal(Memory(), URL) == journal
    remove_journal(Memory(), URL)
    assert read_journal(Memory(), URL) is None


def test_the_stored_keys_do_not_change() -> None:
    write_journal(Memory(), URL, Journal("s", {}, by=OWNER, place=JournalPosition({})))
    stored = json.loads(b"".join(Memory().stream(f"{URL}/{JOURNAL}")))
    assert [*stored] == ["v", "source", "options", "first", "samples", "old", "entries", "place", "by"]
    assert [*stored["place"]] == ["start", "beyond", "skipped"]
    assert stored["by"] == {"host": "host", "pid": 7, "born": "123", "mark": "ab12"}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"v": 2}', '{"v": 1, "entries": 3}', '{"v": 1, "x": 1}'])
def test_a_damaged_journal_is_refused_with_advice(text: str) -> None:
    with Memory().put(f"{URL}/{JOURNAL}") as upload:
        upload.write(text.encode())
        upload.commit()
    with pytest.raises(PlanError, match="resume=False"):
        read_journal(Memory(), URL)


@pytest.mark.parametrize("obj", [{}, {"left": 3}, {"left": [["x"]]}], ids=str)
def test_a_damaged_start_is_refused_with_advice(obj: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="resume=False"):
        start_from_json(obj)


def test_the_shards_that_a_run_may_have_left_behind_are_known() -> None:
    journal = Journal("s", {"compress": "gz"}, 3, old=("x.tar",), entries=(ENTRY,))
    assert journal.shard_names() == {"x.tar", "shard-000000.tar", "shard-000004.tar.gz"}


def test_only_the_same_run_can_be_resumed() -> None:
    journal = Journal("s", {"seed": 1, "image": "png"})
    journal.check_same_run(Journal("s", {"seed": 1, "image": "png"}))
    with pytest.raises(PlanError, match="unfinished packing run of another source"):
        journal.check_same_run(Journal("t", {"seed": 1, "image": "png"}))
    with pytest.raises(PlanError, match=r"unfinished packing run with other options \(seed\)"):
        journal.check_same_run(Journal("s", {"seed": 2, "image": "png"}))
