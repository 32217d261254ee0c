from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.dataset import Dataset
from penstock.engines import COLUMNS, EngineName
from penstock.errors import PlanError, StorageError
from penstock.feed.ledger import Sample
from penstock.feed.ledger.records import encode_steps, frame_record
from penstock.testing import numbers


def _ds() -> Dataset:
    return numbers((30, 12, 20)).shuffle(10).batched(4)


def _twice(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**sample, "copy": n} for n in range(2)]


def _in_batch(batch: dict[str, Any]) -> list[tuple[str, int]]:
    return [(f"shard-{shard:04d}", int(index)) for shard, index in zip(batch["shard"], batch["index"], strict=True)]


def _named(samples: list[Sample]) -> list[tuple[str, int]]:
    return [(sample.shard, sample.index) for sample in samples]


@pytest.mark.parametrize("engine", ["serial", "local"])
@pytest.mark.parametrize("shuffled", [False, True], ids=["as stored", "in late windows"])
def test_a_step_has_the_samples_of_each_ranks_batch(engine: EngineName, shuffled: bool, tmp_path: Path) -> None:
    ds = numbers((30, 12, 20)).shuffle(10)
    ds = (ds.flat_map(lambda sample: [sample] * (sample["x"] % 3 > 0)).shuffle(9) if shuffled else ds).batched(4)
    got = [[*ds.on(engine).loader(rank, 2, epoch=e, uneven="keep", ledger=tmp_path)] for e in (0, 1) for rank in (0, 1)]
    ledger = ps.ledger(tmp_path)
    for number, (first, second) in enumerate(zip(got[2], got[3], strict=False)):
        step = ledger.step(number)
        assert (step.epoch, step.step) == (1, number)
        assert {rank: _named(samples) for rank, samples in step.ranks.items()} == {
            0: _in_batch(first),
            1: _in_batch(second),
        }
    assert _named(ledger.step(2, epoch=0, rank=1).ranks[1]) == _in_batch(got[1][2])


def test_iterating_yields_every_step_in_order(tmp_path: Path) -> None:
    loader = numbers((7, 5)).loader(ledger=tmp_path)
    got = [[(f"shard-{s['shard']:04d}", s["index"])] for _ in range(2) for s in loader]
    steps = list(ps.ledger(tmp_path))
    assert [(step.epoch, step.step) for step in steps] == [(e, n) for e in range(2) for n in range(12)]
    assert [_named(step.ranks[0]) for step in steps] == got


def test_outputs_are_numbered(tmp_path: Path) -> None:
    list(numbers((3,)).flat_map(_twice).batched(4).loader(ledger=tmp_path))
    first, second = ps.ledger(tmp_path).steps()
    assert [(s.index, s.output) for s in first.ranks[0]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(s.index, s.output) for s in second.ranks[0]] == [(2, 0), (2, 1)]
    assert str(second) == "step 1 of epoch 0\n  rank 0: shard-0000[2], shard-0000[2] output 1"


def test_sources_and_padding_are_distinguished(tmp_path: Path) -> None:
    ds = ps.mix([numbers((2,)), numbers((3,), name="other")], stop="all")
    for rank in range(2):
        list(ds.loader(rank, 2, uneven="pad", ledger=tmp_path))
    samples = [sample for step in ps.ledger(tmp_path) for got in step.ranks.values() for sample in got]
    assert sum(sample.padding for sample in samples) == 1
    assert {(s.source, s.shard, s.index) for s in samples if not s.padding} == {
        *((0, "shard-0000", n) for n in range(2)),
        *((1, "other-0000", n) for n in range(3)),
    }
    assert any(str(sample).startswith("source 1: other-0000[") for sample in samples)


def test_a_missing_ledger_epoch_or_step_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read: No such file"):
        ps.ledger(tmp_path / "missing")
    with pytest.raises(StorageError, match="no ledger in this folder"):
        ps.ledger(tmp_path)
    list(_ds().loader(ledger=tmp_path))
    with pytest.raises(PlanError, match="epoch 0 has no such step"):
        ps.ledger(tmp_path).step(16)
    with pytest.raises(PlanError, match="no such step of rank 1"):
        ps.ledger(tmp_path).step(3, rank=1)
    with pytest.raises(PlanError, match="has epochs 0"):
        ps.ledger(tmp_path).step(3, epoch=7)
    next(tmp_path.glob("dataset-*.json")).unlink()
    with pytest.raises(StorageError, match="list of shards cannot be read"):
        ps.ledger(tmp_path).verify()


@pytest.mark.parametrize("record", [b"B{}", b'B{"session":7}', b"B[]", b"B{", b'E{"step":"x"}'], ids=repr)
def test_a_record_that_is_whole_but_not_valid_is_an_error_that_names_the_file(record: bytes, tmp_path: Path) -> None:
    list(_ds().loader(ledger=tmp_path))
    file = next(tmp_path.glob("*.ledger"))
    file.write_bytes(file.read_bytes() + frame_record(record))
    with pytest.raises(StorageError, match=rf"damaged, or of another version: .*{file.name}"):
        ps.ledger(tmp_path)


def test_steps_that_are_whole_but_not_valid_are_an_error(tmp_path: Path) -> None:
    list(_ds().loader(ledger=tmp_path))
    file = next(tmp_path.glob("*.ledger"))
    damaged = bytearray(encode_steps(99, 1, np.arange(COLUMNS * 3, dtype=np.int64).reshape(COLUMNS, 3)))
    damaged[17] = 200  # an encoding that does not exist
    file.write_bytes(file.read_bytes() + frame_record(bytes(damaged)))
    with pytest.raises(StorageError, match="steps 99 to 99 are damaged"):
        ps.ledger(tmp_path).verify()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"sources": [{}]}', '{"sources": 3}', '{"sources": [{"names": [], "counts": ["x"]}]}']
)
def test_a_damaged_list_of_shards_is_an_error_that_names_the_file(text: str, tmp_path: Path) -> None:
    list(_ds().loader(ledger=tmp_path))
    file = next(tmp_path.glob("dataset-*.json"))
    file.write_text(text)
    with pytest.raises(StorageError, match=rf"list of shards cannot be read: .*{file.name}"):
        ps.ledger(tmp_path).verify()
    file.write_text('{"sources": [{"names": ["shard-0000"], "counts": [62]}]}')
    with pytest.raises(StorageError, match="list of shards is too short"):
        list(ps.ledger(tmp_path))


def test_a_ledger_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path)
    batches = iter(loader)
    next(batches)
    loader.state_dict()
    proof = ps.ledger(tmp_path).verify()
    assert (proof.ok, proof.finished) == (True, False)
    assert (proof.delivered, proof.epochs[0].to_come) == (4, 58)
    loader.close()
