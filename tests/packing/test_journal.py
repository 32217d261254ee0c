"""The journal comes back as it was, and speaks up when it cannot be meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engines import Start, StartPart
from penstock.errors import PlanError
from penstock.formats.manifest import ShardEntry
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


def test_what_is_written_is_read() -> None:
    start = Start([[3, 9, 1, 0]], (StartPart([[0, 3, 1, 0]], 3, 1, 0),), {1: (2, 0)}, {2: 5}, 7, [0, 1, 1, 0])
    assert start_from_json(json.loads(json.dumps(start_to_json(start)))) == start
    journal = Journal("s", {"seed": 1}, 2, 30, ("old.tar",)).after(ENTRY, JournalPosition(start_to_json(start), 4, 1))
    write_journal(Memory(), URL, journal)
    assert read_journal(Memory(), URL) == journal
    remove_journal(Memory(), URL)
    assert read_journal(Memory(), URL) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"v": 2}', '{"v": 1, "entries": 3}', '{"v": 1, "x": 1}'])
def test_a_journal_that_makes_no_sense_says_what_to_do(text: str) -> None:
    with Memory().put(f"{URL}/{JOURNAL}") as upload:
        upload.write(text.encode())
        upload.commit()
    with pytest.raises(PlanError, match="resume=False"):
        read_journal(Memory(), URL)


@pytest.mark.parametrize("obj", [{}, {"left": 3}, {"left": [["x"]]}], ids=str)
def test_a_damaged_place_says_what_to_do(obj: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="resume=False"):
        start_from_json(obj)


def test_the_shards_a_packing_may_have_left_are_known() -> None:
    journal = Journal("s", {"compress": "gz"}, 3, old=("x.tar",), entries=(ENTRY,))
    assert journal.names() == {"x.tar", "shard-000000.tar", "shard-000004.tar.gz"}


def test_only_the_same_work_goes_on() -> None:
    journal = Journal("s", {"seed": 1, "image": "png"})
    journal.check(Journal("s", {"seed": 1, "image": "png"}))
    with pytest.raises(PlanError, match="another source"):
        journal.check(Journal("t", {"seed": 1, "image": "png"}))
    with pytest.raises(PlanError, match=r"other options \(seed\)"):
        journal.check(Journal("s", {"seed": 2, "image": "png"}))
