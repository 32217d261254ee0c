"""Failing samples are listed in a quarantine, and excluded samples are left out on every rank and engine."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import pytest

import penstock as ps
from penstock.engines import EngineName
from penstock.errors import DataError, PlanError, StateError, StorageError
from penstock.testing import numbers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

COUNTS = (10, 20, 5)
BAD = {3, 10, 17, 24, 31}


def picky(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["x"] % 7 == 3:
        raise ValueError("not this one")
    return sample


def xs(items: Any) -> list[int]:
    return [int(sample["x"]) for sample in items]


def base() -> ps.Dataset:
    return numbers(COUNTS).shuffle(8).map(picky)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    """Return the quarantine file of a run over ``base``."""
    path = tmp_path / "bad.jsonl"
    list(base().on_error("skip", quarantine=path))
    return str(path)


def listed(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_excluded_samples_are_missing_and_all_others_are_delivered(bad: str) -> None:
    assert {int(line["key"]) for line in listed(bad)} == BAD
    clean = base().exclude(bad)
    assert len(clean) == 30
    for epoch in range(3):
        assert sorted(xs(clean.epoch(epoch))) == sorted(set(range(35)) - BAD)
    assert xs(clean.epoch(0)) != xs(clean.epoch(1))


@pytest.mark.parametrize("engine", ["serial", "local"])
@pytest.mark.parametrize("how", ["range", "step"])
def test_all_ranks_and_engines_have_the_same_order(bad: str, engine: EngineName, how: Literal["range", "step"]) -> None:
    want = xs(base().exclude(bad).epoch(2).on("serial"))
    for world in (1, 2, 3):
        parts = [xs(base().exclude(bad).epoch(2).shard(rank, world, how).on(engine)) for rank in range(world)]
        assert sorted(x for part in parts for x in part) == sorted(want)
        if how == "range":
            assert [x for part in parts for x in part] == want


def test_every_rank_and_engine_lists_the_samples_that_it_skips(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    engines: tuple[EngineName, ...] = ("serial", "local", "local")
    for rank, engine in enumerate(engines):
        ds = base().on(engine).on_error("skip", quarantine=path)
        list(ds.loader(rank, 3, uneven="keep"))
    assert sorted(int(line["key"]) for line in listed(path)) == sorted(BAD)


def test_failures_in_a_worker_process_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    ds = numbers(COUNTS).map(picky, on="processes", workers=2)
    list(ds.on_error("skip", quarantine=path))
    assert sorted(int(line["key"]) for line in listed(path)) == sorted(BAD)
    assert sorted(xs(numbers(COUNTS).exclude(path))) == sorted(set(range(35)) - BAD)


def test_a_sample_is_listed_when_the_cursor_passes_it_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    loader = numbers((35,)).map(picky).on_error("skip", quarantine=path).loader()
    run = iter(loader)
    with contextlib.closing(loader):
        for _ in range(29):
            next(run)
            start, *_ = loader.state_dict()["left"][0]
            assert {line["index"] for line in listed(path)} == {x for x in BAD if x < start}


def test_a_restored_run_lists_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    ds = base().on_error("skip", quarantine=path)
    loader = ds.loader()
    run = iter(loader)
    for _ in range(13):
        next(run)
    state = loader.state_dict()
    before = len(listed(path))
    loader.close()
    again = ds.loader()
    again.load_state_dict(state)
    list(again)
    assert 0 < before < 5
    assert sorted(int(line["key"]) for line in listed(path)) == sorted(BAD)


def test_a_loader_lists_a_sample_once_however_often_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    loader = base().on_error("skip", quarantine=path).loader()
    for _ in range(3):
        list(loader)
    assert len(listed(path)) == 5
    assert len(loader.skipped) == 15


def test_skipped_samples_of_a_loader_can_be_excluded_directly() -> None:
    loader = base().on_error("skip").loader()
    list(loader)
    assert sorted(xs(base().exclude(loader.skipped))) == sorted(set(range(35)) - BAD)


def test_exclusions_accumulate() -> None:
    ds = numbers((4, 4)).exclude((0, "shard-0001", 0)).exclude([(0, "shard-0000", 3), (0, "shard-0000", 3)])
    assert xs(ds) == [0, 1, 2, 5, 6, 7]
    assert ds[3]["x"] == 5


def test_exclusion_is_done_before_a_shuffle_and_after_a_limit() -> None:
    three = (0, "shard-0000", 3)
    assert numbers((8,)).shuffle().exclude(three) == numbers((8,)).exclude(three).shuffle()
    assert xs(numbers((8,)).limit(5).exclude(three)) == [0, 1, 2, 4]
    assert xs(numbers((8,)).exclude(three).limit(5)) == [0, 1, 2, 4, 5]
    assert len(numbers((8,)).exclude(three).repeat(2)) == len(numbers((8,)).repeat(2).exclude(three)) == 14


def test_exclusion_after_a_sort_finds_samples_where_they_are_now() -> None:
    ds = numbers((8,)).sort("x", descending=True)
    assert xs(ds.exclude((0, "shard-0000", 3), (0, "shard-0001", 0))) == [7, 6, 5, 4, 2, 1, 0]
    assert xs(numbers(()).sort("x").exclude((0, "shard-0000", 3))) == []


def test_exclusions_move_no_sample_to_the_other_side_of_a_split() -> None:
    gone = [(0, "shard-0001", index) for index in range(0, 20, 2)]
    train, test = numbers(COUNTS).train_test_split(0.4)
    kept = {x for x in range(35) if not (10 <= x < 30 and x % 2 == 0)}
    for side, whole in zip(numbers(COUNTS).exclude(gone).train_test_split(0.4), (train, test), strict=True):
        assert xs(side) == [x for x in xs(whole) if x in kept]
        assert xs(whole.exclude(gone)) == xs(side)


def test_identities_number_the_sources_of_the_excluding_dataset() -> None:
    a, b, c = (numbers((5,), name=name) for name in "abc")
    gone = [(0, "a-0000", 1), (1, "b-0000", 2), (2, "c-0000", 3)]
    mixed = ps.mix([a, b.union(c)], stop="all").exclude(gone)
    assert Counter(xs(mixed)) == Counter({0: 3, 1: 2, 2: 2, 3: 2, 4: 3})
    assert xs(a.union(b, c).exclude(gone)) == [0, 2, 3, 4, 0, 1, 3, 4, 0, 1, 2, 4]
    inner = ps.mix([c.exclude((0, "c-0000", 0)), a], stop="all")
    assert Counter(xs(inner))[0] == 1


def test_excluding_one_side_of_a_zip_excludes_the_pair() -> None:
    zipped = numbers((6,)).zip(numbers((6,), name="b").rename(y="x").select("y"))
    ds = zipped.exclude([(0, "shard-0000", 1), (1, "b-0000", 4)]).shuffle()
    assert sorted((sample["x"], sample["y"]) for sample in ds) == [(x, x) for x in (0, 2, 3, 5)]


def test_failures_in_a_zip_can_be_excluded(tmp_path: Path) -> None:
    def pairs() -> ps.Dataset:
        return numbers((12,)).map(picky).zip(numbers((12,), name="b", bad=(5,)), suffix="_b")

    path = tmp_path / "bad.jsonl"
    want = xs(pairs().on_error("skip", quarantine=path))
    assert xs(pairs().exclude(path)) == want == [x for x in range(12) if x not in (3, 5, 10)]


def test_a_failing_batch_is_listed_and_excludes_no_sample(tmp_path: Path) -> None:
    def total(batch: dict[str, Any]) -> dict[str, Any]:
        if 5 in batch["x"]:
            raise ValueError("five")
        return batch

    path = tmp_path / "bad.jsonl"
    ds = numbers((8,)).batched(4).map(total)
    assert len(list(ds.on_error("skip", quarantine=path))) == 1
    assert [(line["index"], line["samples"]) for line in listed(path)] == [(4, 4)]
    assert len(numbers((8,)).exclude(path)) == 8


def test_exclusions_are_compared_by_content_and_not_by_file(bad: str, tmp_path: Path) -> None:
    other = tmp_path / "copy.jsonl"
    other.write_text("\n".join(reversed(Path(bad).read_text().splitlines())) + "\n")
    loader = base().exclude(bad).loader()
    run = iter(loader)
    got = [next(run)["x"] for _ in range(11)]
    state = loader.state_dict()
    loader.close()
    again = base().exclude(other).loader()
    again.load_state_dict(state)
    assert got + xs(again) == xs(base().exclude(bad).epoch(0))
    for wrong in (base(), base().exclude(bad).exclude((0, "shard-0000", 0))):
        with pytest.raises(StateError, match="another dataset or plan"):
            wrong.loader().load_state_dict(state)


def test_a_loader_keeps_its_order_while_the_file_grows(bad: str) -> None:
    loader = base().exclude(bad).loader()
    first = xs(loader)
    with Path(bad).open("a") as file:
        file.write(json.dumps({"source": 0, "shard": "shard-0000", "index": 0}) + "\n")
    assert len(first) == len(xs(loader)) == 30
    assert len(base().exclude(bad)) == 29


def test_a_missing_file_is_an_error_only_when_the_dataset_is_used(tmp_path: Path) -> None:
    ds = base().exclude(tmp_path / "none.jsonl")
    assert "exclude('" in repr(ds)
    with pytest.raises(StorageError, match=r"none\.jsonl"):
        list(ds)


def test_a_damaged_line_is_an_error_when_the_dataset_is_used(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("garbage\n")
    with pytest.raises(DataError, match=r"bad\.jsonl, line 1"):
        list(base().exclude(path))


def test_unknown_identities_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    ds = numbers((4,)).exclude([(0, "gone-0007", 1), (0, "shard-0000", 99), (5, "shard-0000", 1)])
    with caplog.at_level(logging.WARNING, "penstock"):
        assert xs(ds.epoch(0)) == xs(ds.epoch(1)) == [0, 1, 2, 3]
        assert len(ds) == 4
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ["exclude: 3 samples are not in this dataset and are ignored, such as (0, 'gone-0007', 1)"]


def test_a_file_cannot_be_read_and_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    for ds in (base().exclude(path), ps.mix([base().exclude(path), numbers((3,), name="b")])):
        with pytest.raises(PlanError, match="would grow while it is read"):
            ds.on_error("skip", quarantine=f"{tmp_path}/./bad.jsonl")


def test_a_quarantine_needs_the_skip_action() -> None:
    with pytest.raises(PlanError, match="lists what is skipped"):
        base().on_error("raise", quarantine="bad.jsonl")


def test_exclude_cannot_come_after_a_limit_of_a_shuffled_order() -> None:
    with pytest.raises(PlanError, match=r"put exclude\(\) before"):
        list(numbers((9,)).shuffle().limit(5).exclude((0, "shard-0000", 1)))


def test_shards_are_named_relative_to_their_folder(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place / "sub").mkdir(parents=True)
        for shard in ("0.tar", "sub/1.tar"):
            with tarfile.open(tmp_path / place / shard, "w") as tar:
                for number in range(4):
                    member = tarfile.TarInfo(f"{number}.cls")
                    data = b"x" if (shard, number) == ("sub/1.tar", 2) else b"1"
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))

    def read(place: str) -> ps.Dataset:
        return ps.read_tar([str(tmp_path / place / shard) for shard in ("0.tar", "sub/1.tar")]).decode()

    path = tmp_path / "bad.jsonl"
    assert len(list(read("here").on_error("skip", quarantine=path))) == 7
    assert [(line["shard"], line["index"], line["key"]) for line in listed(path)] == [("sub/1.tar", 2, "2")]
    assert len(list(read("there").exclude(path))) == 7
