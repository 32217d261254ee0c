from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.errors import DataError
from penstock.formats.tables.row_groups import Groups, Key, memory_for_groups


def key(group: int, shard: int = 0) -> Key:
    return Key(shard, group, ("x",))


class Desk:
    """Decodes by noting what it was asked for; waits while ``gate`` is closed."""

    def __init__(self, budget: int = 30, workers: int = 2) -> None:
        self.asked: list[Key] = []
        self.gate = threading.Event()
        self.gate.set()
        self.groups = Groups(self.decode, lambda _: 10, workers, budget)

    def decode(self, wanted: Key) -> Any:
        self.gate.wait(10)
        self.asked.append(wanted)
        if wanted.group == 13:
            raise DataError("made to fail")
        return [wanted]

    def get(self, *numbers: int, **how: Any) -> list[Any]:
        return [one.batches() for one in self.groups.want([key(number) for number in numbers], **how)]


@pytest.fixture
def desk() -> Any:
    made = Desk()
    yield made
    made.groups.rest()


def test_a_row_group_is_decoded_once_while_it_fits(desk: Desk) -> None:
    assert desk.get(1, 2) == [[key(1)], [key(2)]]
    desk.get(2, 1, 3)
    assert sorted(desk.asked) == [key(1), key(2), key(3)]


def test_what_was_used_longest_ago_goes_first(desk: Desk) -> None:
    for number in (1, 2, 3, 1, 4):
        desk.get(number)
    desk.asked.clear()
    desk.get(1)
    assert desk.asked == []
    desk.get(2)
    assert desk.asked == [key(2)]


def test_more_than_fits_is_given_all_the_same(desk: Desk) -> None:
    assert len(desk.get(*range(10))) == 10


def test_the_next_ones_are_begun_as_far_as_memory_allows(desk: Desk) -> None:
    desk.get(1, ahead=[key(2), key(3), key(4)])
    desk.get(2, 3)
    assert sorted(desk.asked) == [key(1), key(2), key(3)]


def test_what_is_passed_is_let_go_of(desk: Desk) -> None:
    desk.get(1)
    desk.get(2, passing=True)
    desk.get(1)
    assert desk.asked.count(key(1)) == 2
    desk.get(3, behind={0: 3})
    desk.get(1)
    assert desk.asked.count(key(1)) == 3


def test_a_failure_is_everybodys_who_wants_it(desk: Desk) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match="made to fail"):
            desk.get(13)


def test_whoever_still_wants_what_was_given_up_decodes_it(desk: Desk) -> None:
    desk.gate.clear()
    wanted = desk.groups.want([key(number) for number in range(5)])
    threading.Timer(0.05, desk.gate.set).start()
    desk.groups.rest()
    assert [one.batches() for one in wanted] == [[key(number)] for number in range(5)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock parquet")]


def test_some_memory_is_always_there() -> None:
    assert memory_for_groups() >= 256 << 20
