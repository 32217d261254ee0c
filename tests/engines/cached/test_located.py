"""Samples are located in the cache as far as they are there, and only the others in their source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.engines.cached.located import Hit, LeafCache, Miss
from penstock.engines.cached.record_codec import encode_outputs
from penstock.engines.cached.record_store import record_store
from penstock.errors import PlanError
from penstock.order import Refs
from penstock.plan import EVERYTHING
from penstock.testing.number_source import Numbers, NumbersReader


def _refs(shard: list[int], index: list[int], epoch: int = 0) -> Refs:
    count = len(shard)
    zero = np.zeros(count, np.int64)
    arrays = np.array(shard, np.int64), np.array(index, np.int64), np.arange(count, dtype=np.uint64)
    return Refs(zero, *arrays, None, zero + epoch)


def _reader() -> NumbersReader:
    return Numbers((5, 5)).open()


def test_cached_samples_are_not_located_in_their_source(tmp_path: Path) -> None:
    cache = LeafCache(str(tmp_path), 0, 0, 0, np.arange(2, dtype=np.uint64))
    record_store(str(tmp_path / "0000")).add([(1 << 40 | 2, encode_outputs([((), {"x": "kept"})]))])
    hits, misses = cache.locate(_refs([0, 1, 1], [1, 2, 3]), _reader(), EVERYTHING)
    assert hits[0].tolist() == [1]
    assert misses[0].tolist() == [0, 2]
    assert len(hits[1].nbytes) == 1
    assert [type(item) for item in hits[1].read()[0]] == [Hit]
    assert [(item.number, item.value["x"]) for item in misses[1].read()[0]] == [(1, 1), (1 << 40 | 3, 8)]


def test_each_variant_has_records_and_keys_of_its_own(tmp_path: Path) -> None:
    cache = LeafCache(str(tmp_path), 0, 7, 2, np.arange(2, dtype=np.uint64))
    found: list[list[Miss]] = []
    for epoch in (0, 1, 2):
        ((_, located),) = cache.locate(_refs([0, 1], [0, 0], epoch), _reader(), EVERYTHING)
        found.append(list(located.read()[0]))
    assert [miss.key for miss in found[0]] == [miss.key for miss in found[2]] != [miss.key for miss in found[1]]
    assert found[0][0].store == found[2][0].store == str(tmp_path / "0000")
    assert found[1][0].store == str(tmp_path / "0001")


def test_samples_that_cannot_be_numbered_are_refused(tmp_path: Path) -> None:
    cache = LeafCache(str(tmp_path), 0, 0, 0, np.arange(2, dtype=np.uint64))
    with pytest.raises(PlanError, match="too many"):
        cache.locate(_refs([0], [1 << 41]), _reader(), EVERYTHING)
    assert cache.locate(_refs([], []), _reader(), EVERYTHING) == []
