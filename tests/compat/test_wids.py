"""The names of wids: samples by number, and samplers that read shard by shard."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from penstock.compat.webdataset import ShardWriter
from penstock.compat.wids import ChunkedSampler, DistributedChunkedSampler, ShardListDataset, ShardListSampler
from penstock.errors import DataError, PlanError


@pytest.fixture
def index(tmp_path: Path) -> str:
    with ShardWriter(str(tmp_path / "a-%d.tar"), 4, verbose=0) as sink:
        for number in range(10):
            image = np.full((2, 3), number, np.uint8)
            sink.write({"__key__": f"k{number}", "png": image, "cls": number, "seg.txt": f"t{number}"})
    shards = [{"url": f"a-{shard}.tar", "nsamples": count} for shard, count in enumerate((4, 4, 2))]
    kind = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "name": "ten"}
    (tmp_path / "index.json").write_text(json.dumps({**kind, "shardlist": shards}))
    return str(tmp_path / "index.json")


def test_samples_have_their_fields_with_dots_and_their_place(index: str, tmp_path: Path) -> None:
    ds = ShardListDataset(index)
    assert len(ds) == 10
    sample = ds[5]
    assert isinstance(sample[".png"], Image.Image)
    assert np.asarray(sample[".png"])[0, 0] == 5
    place = {"__key__": "k5", "__index__": 5, "__shardindex__": 1, "__shard__": str(tmp_path / "a-1.tar")}
    assert {name: sample[name] for name in place} == place
    assert (sample[".cls"], sample[".seg.txt"], ds.dataset_name) == (5, "t5", "ten")


def test_fields_that_wids_does_not_decode_are_files_in_memory(tmp_path: Path) -> None:
    pixels = np.full((2, 3), 9, np.uint8)
    with ShardWriter(str(tmp_path / "a-%d.tar"), verbose=0) as sink:
        sink.write({"__key__": "k", "jpeg": pixels, "bin": b"\0\1", "txt.gz": "text", "cls": 4})
    shards = [{"url": str(tmp_path / "a-0.tar"), "nsamples": 1}]
    sample = ShardListDataset(shards)[0]
    assert (sample[".bin"].read(), sample[".txt.gz"], sample[".cls"]) == (b"\0\1", "text", 4)
    assert Image.open(sample[".jpeg"]).size == (3, 2)
    assert ShardListDataset(shards, transformations=[])[0][".cls"].read() == b"4"


def test_a_list_of_shards_is_read_with_transformations(index: str, tmp_path: Path) -> None:
    shards = [{"url": str(tmp_path / "a-2.tar"), "nsamples": 2}]
    ds = ShardListDataset(shards, transformations="numpy").add_transform(lambda sample: sample[".png"].sum())
    assert [ds[0], ds[1]] == [6 * 8, 6 * 9]
    with pytest.raises(IndexError, match="sample 2 of 2"):
        ds[2]


def test_a_loader_reads_every_sample_once_shard_by_shard(index: str) -> None:
    ds = ShardListDataset(index, transformations=lambda sample: int(sample[".cls"].read()))
    sampler = ShardListSampler(ds)
    loader: Any = DataLoader(ds, batch_size=None, sampler=sampler)
    first, second = list(loader), list(loader)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    places = [(0, 0, 0, 0, 1, 1, 1, 1, 2, 2)[number] for number in first]
    assert sum(a != b for a, b in pairwise(places)) == 2


def test_a_seed_sets_the_order_of_wids(index: str) -> None:
    epochs = [[2, 0, 1, 3, 4, 5, 7, 6, 8, 9], [3, 0, 2, 1, 9, 8, 4, 7, 6, 5]]  # of wids in webdataset 0.2.100
    for sampler in (ShardListSampler(ShardListDataset(index)), ChunkedSampler(range(10), chunksize=4, shuffle=True)):
        next(iter(sampler))  # an epoch that is not finished does not count
        assert [list(sampler), list(sampler)] == epochs


def test_chunks_and_ranks_cover_the_dataset() -> None:
    numbers = range(103)
    assert list(ChunkedSampler(numbers, chunksize=10, shuffle=False)) == list(numbers)
    parts = [list(DistributedChunkedSampler(numbers, num_replicas=4, rank=rank, chunksize=7)) for rank in range(4)]
    assert sorted(number for part in parts for number in part) == list(numbers)
    assert max(parts[0]) < min(parts[1])


def test_samplers_take_the_arguments_of_wids() -> None:
    numbers = range(60)
    assert list(ChunkedSampler(numbers, chunksize=10)) == list(numbers), "wids shuffles where it is asked to"
    late, early = (ChunkedSampler(numbers, chunksize=1e1, shuffle=True, shufflefirst=first) for first in (False, True))
    chunks = [[number // 10 for number in sampler] for sampler in (late, late, early)]
    in_order = sorted(chunks[0])
    assert [chunk == in_order for chunk in chunks] == [True, False, False]
    part = DistributedChunkedSampler(numbers, num_replicas=2, rank=0, dslength_per_replica=7, drop_last=True)
    assert (len(part), len(list(part))) == (7, 30)


def test_an_index_that_is_wrong_is_an_error(index: str, tmp_path: Path) -> None:
    shards = [{"url": str(tmp_path / "a-2.tar"), "nsamples": 3}]
    with pytest.raises(DataError, match="says 3 samples, the shard holds 2"):
        ShardListDataset(shards)[0]
    with pytest.raises(PlanError, match="lists no shards"):
        ShardListDataset([])
    with pytest.raises(PlanError, match="give 'PIL'"):
        ShardListDataset(shards, transformations="pil")
