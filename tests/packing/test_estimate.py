"""A dry run says beforehand what a packing will write."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps

ITEMS = [{"txt": "x" * (number * 37 % 2000)} for number in range(50)]


@pytest.mark.parametrize("more", [{"max_bytes": 5_000}, {"max_samples": 7}], ids=str)
def test_few_samples_are_all_looked_at(more: dict[str, Any]) -> None:
    told = ps.pack(ps.from_items(ITEMS), "memory://estimate/few", dry_run=True, **more)
    assert not told.estimated
    assert told == ps.pack(ps.from_items(ITEMS), "memory://estimate/few", resume=False, **more)


def test_what_compression_saves_is_not_known_beforehand() -> None:
    told = ps.pack(ps.from_items(ITEMS), "memory://estimate/gz", dry_run=True, compress="gz")
    assert told.estimated
    assert told.shards == ("shard-000000.tar.gz",)


def test_an_unknown_length_is_run_through() -> None:
    source = ps.from_items(ITEMS).filter(lambda sample: len(sample["txt"]) % 2)
    told = ps.pack(source, "memory://estimate/filter", dry_run=True)
    assert told.samples == source.count()


def test_appended_shards_have_the_numbers_that_follow() -> None:
    ps.pack(ps.from_items(ITEMS), "memory://estimate/append", max_samples=20)
    told = ps.pack(ps.from_items(ITEMS), "memory://estimate/append", max_samples=20, append=True, dry_run=True)
    assert told.shards == ("shard-000003.tar", "shard-000004.tar", "shard-000005.tar")
