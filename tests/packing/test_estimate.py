"""A dry run returns what packing will write."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps

ITEMS = [{"txt": "x" * (number * 37 % 2000)} for number in range(50)]


@pytest.mark.parametrize("options", [{"max_bytes": 5_000}, {"max_samples": 7}], ids=str)
def test_the_estimate_is_exact_if_all_samples_are_measured(options: dict[str, Any]) -> None:
    url = f"memory://estimate/few-{next(iter(options))}"
    estimate = ps.pack(ps.from_items(ITEMS), url, dry_run=True, **options)
    assert not estimate.estimated
    assert estimate == ps.pack(ps.from_items(ITEMS), url, **options)
    again = ps.pack(ps.from_items(ITEMS), url, mode="replace", dry_run=True, **options)
    assert again == ps.pack(ps.from_items(ITEMS), url, mode="replace", **options)


def test_the_size_of_compressed_shards_is_an_estimate() -> None:
    estimate = ps.pack(ps.from_items(ITEMS), "memory://estimate/gz", dry_run=True, compress="gz")
    assert estimate.estimated
    assert estimate.shards == ("shard-000000.tar.gz",)


def test_a_dataset_of_unknown_length_is_measured_whole() -> None:
    source = ps.from_items(ITEMS).filter(lambda sample: len(sample["txt"]) % 2)
    estimate = ps.pack(source, "memory://estimate/filter", dry_run=True)
    assert estimate.samples == source.count()


def test_appended_shards_continue_the_numbering() -> None:
    ps.pack(ps.from_items(ITEMS), "memory://estimate/append", max_samples=20)
    estimate = ps.pack(ps.from_items(ITEMS), "memory://estimate/append", max_samples=20, mode="append", dry_run=True)
    assert estimate.shards == ("shard-000003.tar", "shard-000004.tar", "shard-000005.tar")
