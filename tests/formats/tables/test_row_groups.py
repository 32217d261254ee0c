from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.errors import DataError
from penstock.formats.tables.row_groups import GroupKey, RowGroupCache, default_cache_bytes


def key(group: int, shard: int = 0) -> GroupKey:
    return GroupKey(shard, group, ("x",))


class CacheUnderTest:
    """A cache whose decoder records its calls, takes 10 bytes a group, and waits while ``gate`` is closed."""

    def __init__(self, max_bytes: int = 30, workers: int = 2) -> None:
        self.decoded: list[GroupKey] = []
        self.gate = threading.Event()
        self.gate.set()
        self.cache = RowGroupCache(self.decode, lambda _: 10, workers, max_bytes)

    def decode(self, wanted: GroupKey) -> Any:
        self.gate.wait(60)
        self.decoded.append(wanted)
        if wanted.group == 13:
            raise DataError("made to fail")
        return [wanted]

    def get(self, *groups: int, **options: Any) -> list[Any]:
        return [pending.batches() for pending in self.cache.request([key(group) for group in groups], **options)]


@pytest.fixture
def tested() -> Any:
    tested = CacheUnderTest()
    yield tested
    tested.cache.release()


def test_a_row_group_is_decoded_once_while_it_fits(tested: CacheUnderTest) -> None:
    assert tested.get(1, 2) == [[key(1)], [key(2)]]
    tested.get(2, 1, 3)
    assert sorted(tested.decoded) == [key(1), key(2), key(3)]


def test_the_least_recently_used_row_group_is_evicted_first(tested: CacheUnderTest) -> None:
    for group in (1, 2, 3, 1, 4):
        tested.get(group)
    tested.decoded.clear()
    tested.get(1)
    assert tested.decoded == []
    tested.get(2)
    assert tested.decoded == [key(2)]


def test_requested_row_groups_may_exceed_the_limit(tested: CacheUnderTest) -> None:
    assert len(tested.get(*range(10))) == 10


def test_upcoming_row_groups_are_started_as_far_as_the_limit_allows(tested: CacheUnderTest) -> None:
    tested.get(1, upcoming=[key(2), key(3), key(4)])
    tested.get(2, 3)
    assert sorted(tested.decoded) == [key(1), key(2), key(3)]


def test_row_groups_that_are_not_needed_again_are_evicted(tested: CacheUnderTest) -> None:
    tested.get(1)
    tested.get(2, evict_others=True)
    tested.get(1)
    assert tested.decoded.count(key(1)) == 2
    tested.get(3, first_needed={0: 3})
    tested.get(1)
    assert tested.decoded.count(key(1)) == 3


def test_a_failure_is_raised_to_every_caller(tested: CacheUnderTest) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match="made to fail"):
            tested.get(13)


def test_a_cancelled_row_group_is_decoded_by_the_caller_that_still_needs_it(tested: CacheUnderTest) -> None:
    tested.gate.clear()
    requested = tested.cache.request([key(group) for group in range(5)])
    threading.Timer(0.05, tested.gate.set).start()
    tested.cache.release()
    assert [pending.batches() for pending in requested] == [[key(group)] for group in range(5)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock parquet")]


def test_the_default_limit_is_never_tiny() -> None:
    assert default_cache_bytes() >= 256 << 20
