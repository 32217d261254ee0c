from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.dataset import Dataset
from penstock.engines import COLUMNS, INDEX, ITEM, POSITION, SHARD, Program
from penstock.feed.ledger import LedgerWriter, Proof, ResumePoint, session_dataset
from penstock.feed.ledger.records import END, MAGIC, STEPS, frame_record, iter_contents
from penstock.plan import Cut
from penstock.testing import numbers


def _ds() -> Dataset:
    return numbers((30, 12, 20)).shuffle(10).batched(4)


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def _written(ds: Dataset, folder: Path, world: int = 1) -> list[Path]:
    """Write the ledger of a whole epoch, with a record for each step, and return the files by rank."""
    for rank in range(world):
        loader = ds.loader(rank, world, uneven="keep", ledger=folder)
        assert loader._ledger is not None
        for _ in loader:
            loader._ledger.flush()
    return sorted(folder.glob("*.ledger"), key=lambda path: path.name.split("-")[1])


def _rewrite(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Replace the records of steps in a file."""
    found = [bytes(content) for _, content in iter_contents(memoryview(path.read_bytes()))]
    steps = [content for content in found if content[:1] == STEPS]
    rest = [content for content in found if content[:1] == END]
    path.write_bytes(MAGIC + b"".join(map(frame_record, [found[0], *change(steps), *rest])))


def _in_batch(batch: dict[str, Any]) -> set[tuple[str, int]]:
    return {(f"shard-{shard:04d}", int(index)) for shard, index in zip(batch["shard"], batch["index"], strict=True)}


def _named(proof: Proof) -> set[tuple[str, int]]:
    return {(one.sample.shard, one.sample.index) for one in proof.missing if one.sample is not None}


def test_a_step_that_was_removed_is_named_with_its_samples(tmp_path: Path) -> None:
    paths = _written(_ds(), tmp_path, world=2)
    batches = list(_ds().loader(1, 2, uneven="keep"))
    _rewrite(paths[1], lambda steps: steps[:3] + steps[4:])
    proof = ps.ledger(tmp_path).verify()
    assert not proof.ok
    assert _named(proof) == _in_batch(batches[3])
    assert [(epoch, seen.step, seen.rank) for epoch, seen in proof.lost] == [(0, 3, 1)]
    assert "not in the ledger: epoch 0: step 3 of rank 1 of 2" in str(proof)
    assert str(proof).endswith("NOT every sample came exactly once")


def test_a_repeated_step_is_named_with_its_ranks(tmp_path: Path) -> None:
    paths = _written(_ds(), tmp_path, world=2)
    other = bytearray(next(c for _, c in iter_contents(memoryview(paths[1].read_bytes())) if bytes(c[:1]) == STEPS))
    other[1] = 8  # rank 1's first step, as the last of rank 0
    _rewrite(paths[0], lambda steps: [*steps, bytes(other)])
    proof = ps.ledger(tmp_path).verify()
    batch = next(iter(_ds().loader(1, 2, uneven="keep")))
    assert {(one.sample.shard, one.sample.index) for one in proof.repeated} == _in_batch(batch)
    assert [(seen.step, seen.rank) for seen in proof.repeated[0].seen] == [(8, 0), (0, 1)]
    assert not proof.ok


def test_a_repeated_record_is_found(tmp_path: Path) -> None:
    (path,) = _written(_ds(), tmp_path)
    _rewrite(path, lambda steps: [*steps[:5], steps[4], *steps[5:]])
    proof = ps.ledger(tmp_path).verify()
    assert proof.epochs[0].repeated == 4
    assert [(seen.step, seen.rank) for seen in proof.repeated[0].seen] == [(4, 0), (4, 0)]
    assert "in step 4 of rank 0 of 1, step 4 of rank 0 of 1" in str(proof)


@pytest.mark.parametrize("which", [0, 7, 15])
def test_a_step_removed_after_a_filter_is_found(which: int, tmp_path: Path) -> None:
    (path,) = _written(numbers((30, 12, 20)).shuffle(10).filter(_odd).batched(2), tmp_path)
    _rewrite(path, lambda steps: [step for step in steps if step[1] != which])
    proof = ps.ledger(tmp_path).verify()
    assert [seen.step for _, seen in proof.lost] == [which]
    assert proof.epochs[0].missing >= 1


def test_a_repeated_output_is_found(tmp_path: Path) -> None:
    (path,) = _written(numbers((3,)).flat_map(lambda sample: [sample] * 3).batched(2), tmp_path)
    _rewrite(path, lambda steps: [*steps[:2], steps[1], *steps[2:]])
    proof = ps.ledger(tmp_path).verify()
    assert {(one.sample.index, one.sample.output) for one in proof.repeated} == {(0, 2), (1, 0)}


def test_the_samples_of_a_removed_file_are_missing(tmp_path: Path) -> None:
    paths = _written(_ds(), tmp_path, world=3)
    paths[2].unlink()
    proof = ps.ledger(tmp_path).verify()
    assert _named(proof) == {sample for batch in _ds().loader(2, 3, uneven="keep") for sample in _in_batch(batch)}
    assert not proof.finished


def test_whole_records_before_a_torn_one_count(tmp_path: Path) -> None:
    (path,) = _written(numbers((5, 3)).batched(2), tmp_path)
    data = path.read_bytes()
    ends = [end for end, _ in iter_contents(memoryview(data))]
    for cut in range(ends[0], len(data)):
        path.write_bytes(data[:cut])
        proof = ps.ledger(tmp_path).verify()
        whole = sum(end <= cut for end in ends[1:])
        assert proof.ok, proof
        assert proof.delivered == min(2 * whole, 8)
        assert proof.epochs[0].to_come == 8 - proof.delivered
        assert sum(torn.nbytes for torn in proof.torn) == cut - ends[whole]


@pytest.mark.parametrize("name", ["limit", "mix", "split", "exclude"])
def test_missing_samples_of_a_part_are_named_if_the_dataset_is_given(name: str, tmp_path: Path) -> None:
    base = numbers((30, 12, 20)).shuffle(10)
    ds = {
        "limit": base.limit(40),
        "mix": ps.mix([base, numbers((9, 9), name="shard").shuffle()], [0.8, 0.2]),
        "split": base.train_test_split(0.3)[0],
        "exclude": base.exclude([(0, "shard-0000", 3)]),
    }[name].batched(4)
    (path,) = _written(ds, tmp_path)
    _rewrite(path, lambda steps: steps[:3] + steps[4:])
    proof = ps.ledger(tmp_path).verify()
    assert proof.epochs[0].missing == 4
    assert [(one.sample, one.position) for one in proof.missing] == [(None, position) for position in range(12, 16)]
    assert "missing: epoch 0: position 12" in str(proof)
    assert _named(ps.ledger(tmp_path).verify(ds)) == _in_batch(list(ds.loader())[3])


@pytest.mark.parametrize("name", ["repeat", "zip", "union"])
def test_missing_samples_are_named_if_the_plan_has_every_sample(name: str, tmp_path: Path) -> None:
    base = numbers((30, 12, 20)).shuffle(10)
    ds = {
        "repeat": base.repeat(3),
        "zip": base.zip(numbers((62,), name="other").rename(y="x").select("y")),
        "union": base.union(numbers((9,), name="shard")),
    }[name].batched(4)
    (path,) = _written(ds, tmp_path)
    _rewrite(path, lambda steps: steps[:3] + steps[4:])
    assert _named(ps.ledger(tmp_path).verify()) == _in_batch(list(ds.loader())[3])


def test_an_unfinished_epoch_before_a_later_one_has_missing_samples(tmp_path: Path) -> None:
    loader = _ds().loader(ledger=tmp_path)
    next(iter(loader))
    loader.set_epoch(1)
    list(loader)
    proof = ps.ledger(tmp_path).verify()
    assert [epoch.missing for epoch in proof.epochs] == [58, 0]
    assert proof.to_json()["ok"] is False


def test_an_endless_epoch_is_never_finished(tmp_path: Path) -> None:
    loader = numbers((5,)).repeat().batched(2).loader(ledger=tmp_path)
    for _ in zip(range(9), loader, strict=False):
        pass
    loader.close()
    proof = ps.ledger(tmp_path).verify()
    assert (proof.ok, proof.finished, proof.delivered) == (True, False, 18)


def test_lists_have_at_most_the_given_length(tmp_path: Path) -> None:
    paths = _written(_ds(), tmp_path, world=2)
    paths[1].unlink()
    proof = ps.ledger(tmp_path).verify(most=5)
    assert (len(proof.missing), proof.epochs[0].missing) == (5, 31)
    assert "missing: 26 more" in str(proof)


def test_a_million_samples_take_seconds_and_little_memory(tmp_path: Path) -> None:
    ds = numbers([10_000] * 100).shuffle(all=True)
    program = Program(ds.plan)
    order = program.order(0)
    writer = LedgerWriter(tmp_path)
    writer.begin(session_dataset(program, order), 0, Cut(0, 1), ResumePoint())
    for low in range(0, 1_000_000, 1000):
        refs = order.at(np.arange(low, low + 1000))
        rows = np.zeros((COLUMNS, 1000), np.int64)
        rows[ITEM], rows[POSITION] = np.repeat(np.arange(4), 250), np.arange(low, low + 1000)
        rows[SHARD], rows[INDEX] = refs.shard, refs.index
        writer.record(rows, 4)
    writer.end([])
    assert sum(path.stat().st_size for path in tmp_path.glob("*.ledger")) < 4_000_000
    tracemalloc.start()
    begun = time.process_time()
    proof = ps.ledger(tmp_path).verify()
    took = time.process_time() - begun
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert proof.ok
    assert proof.finished
    assert proof.delivered == 1_000_000
    assert took < 8
    assert peak < 32_000_000
