"""A plan with cached results obeys the laws of all engines: what it yields is what it yields without the cache."""

from __future__ import annotations

import io
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.dataset import Dataset
from penstock.engines import CacheResults
from penstock.engines.cached import record_store
from penstock.errors import PlanError, StageError
from penstock.formats.tar.source import TarSource
from penstock.landing.fingerprint import result_digest
from penstock.plan import Combination, Plan, Resources, Scope, Stage, Zip
from penstock.storage import Info, Memory
from penstock.testing import CORPUS, EngineTests, numbers, on_resources, outputs
from penstock.testing.servers import http_server

FULL = os.environ.get("PENSTOCK_FULL") == "1"
BASE = (7, 0, 12, 5, 1, 9)


def with_caches(plan: Plan, folder: str, *, random_stages: bool) -> Plan:
    """Return the plan with a cache as late as one may stand, in the branches of a zip and else behind them."""
    source, stages = plan.source, list(plan.stages)
    if isinstance(source, Combination) and any(isinstance(inner, Zip) for inner in plan.sources()):
        branches = (with_caches(branch, folder, random_stages=random_stages) for branch in source.branches)
        return replace(plan, source=replace(source, branches=tuple(branches)))
    if isinstance(source, Combination) and not random_stages and any(map(_draws, source.branches)):
        return plan
    at = 0
    for number, stage in enumerate(stages):
        if isinstance(stage, Stage) and (stage.scope is not Scope.EACH or (stage.wants_rng and not random_stages)):
            break
        at = number + 1
    stages.insert(at, CacheResults(folder, result_digest, None, True if random_stages else None))
    return replace(plan, stages=tuple(stages))


def _draws(plan: Plan) -> bool:
    return any(stage.wants_rng for stage in plan.body) or any(map(_draws, plan.branches()))


class _BehindACache(EngineTests):
    """The laws of engines on plans with a cache; the law's other side, the serial engine, runs without one."""

    worlds = EngineTests.worlds if FULL else (2,)
    random_stages = False
    folder: str

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _folder(cls) -> Iterator[None]:
        cls.folder = tempfile.mkdtemp(prefix="penstock-test-")
        yield
        shutil.rmtree(cls.folder)

    def cached(self, ds: Dataset) -> Dataset:
        return Dataset(with_caches(ds.plan, self.folder, random_stages=self.random_stages))

    def on(self, ds: Dataset) -> Dataset:
        return self.cached(ds).on("serial")

    def points(self, count: int) -> Iterable[int]:
        return super().points(count) if FULL else random.Random(count).sample(range(count + 1), min(count, 2))


class TestVariants(_BehindACache):
    """Results of all stages on single samples, with a variant for each epoch, on the local engine."""

    random_stages = True

    def on(self, ds: Dataset) -> Dataset:
        return self.cached(ds).on("local")


if FULL:

    class TestResults(_BehindACache):
        """Results without randomness."""

    class TestProcesses(_BehindACache):
        def on(self, ds: Dataset) -> Dataset:
            return on_resources(self.cached(ds), [Resources(2, "processes"), Resources(2)]).on("local")

        def points(self, count: int) -> Iterable[int]:  # every restart starts processes
            return random.Random(count).sample(range(count + 1), min(count, 2))


@pytest.mark.parametrize("name", ["map", "flat_map twice", "mix all", "union", "zip", "skips and copies", "repeat"])
def test_results_without_randomness_are_those_of_the_plan(name: str, tmp_path: Path) -> None:
    ds = CORPUS[name]()
    cached = Dataset(with_caches(ds.plan, str(tmp_path), random_stages=False))
    for epoch in (0, 1):
        assert outputs(cached.epoch(epoch)) == outputs(ds.epoch(epoch))


def _counting(log: Path, number: int = 2) -> Any:
    def times(sample: dict[str, Any]) -> dict[str, Any]:
        with log.open("a") as file:
            file.write("x")
        return {**sample, "times": sample["x"] * number}

    return times


def _calls(log: Path) -> int:
    found = log.stat().st_size if log.exists() else 0
    log.unlink(missing_ok=True)
    return found


def test_a_function_is_called_once_for_each_sample_in_all_epochs_and_runs(tmp_path: Path) -> None:
    log, folder = tmp_path / "calls", tmp_path / "results"
    ds = numbers(BASE).shuffle().map(_counting(log))
    want = sorted(ps.from_items([sample["times"] for sample in ds]).take_all())
    _calls(log)
    cached = ds.cache(folder)
    for calls in (sum(BASE), 0):
        assert sorted(sample["times"] for sample in cached) == want
        assert _calls(log) == calls
    again = numbers(BASE).map(_counting(log)).cache(folder).batched(4)
    assert sum(len(batch["x"]) for batch in again) == sum(BASE)
    assert _calls(log) == 0


def test_a_changed_closure_argument_version_or_source_never_hits(tmp_path: Path) -> None:
    log, folder, table = tmp_path / "calls", tmp_path / "results", tmp_path / "table.csv"
    table.write_text("x\n1\n2\n")
    plans: dict[str, Callable[[], Dataset]] = {
        "first": lambda: ps.read_csv(str(table)).map(_counting(log)).cache(folder),
        "closure": lambda: ps.read_csv(str(table)).map(_counting(log, 3)).cache(folder),
        "version": lambda: ps.read_csv(str(table)).map(_counting(log)).cache(folder, version="b"),
        "stage": lambda: ps.read_csv(str(table)).rename(y="x").rename(x="y").map(_counting(log)).cache(folder),
    }
    for make in plans.values():
        assert len(make().take_all()) == 2
        assert _calls(log) == 2
    for make in plans.values():
        assert len(make().take_all()) == 2
        assert _calls(log) == 0
    table.write_text("x\n5\n6\n")
    assert [sample["times"] for sample in plans["first"]()] == [10, 12]


def test_a_changed_file_among_single_files_never_hits(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_text(name)
    ds = ps.read_files(str(folder)).map(lambda sample: {"size": len(sample["bytes"])})
    assert [sample["size"] for sample in ds.cache(tmp_path / "results")] == [1, 1]
    (folder / "b").write_text("longer")
    assert [sample["size"] for sample in ds.cache(tmp_path / "results")] == [1, 6]


def test_epochs_beyond_per_epoch_repeat_the_random_numbers_of_the_first(tmp_path: Path) -> None:
    def draws(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**sample, "draw": int(rng.integers(1 << 40))}

    plain = numbers(BASE).shuffle().map(draws)
    cached = plain.cache(tmp_path, per_epoch=2)

    def drawn(ds: Dataset, epoch: int) -> dict[int, int]:
        return {sample["x"]: sample["draw"] for sample in ds.epoch(epoch)}

    for epoch in range(4):
        assert drawn(cached, epoch) == drawn(plain, epoch % 2)
        assert [sample["x"] for sample in cached.epoch(epoch)] == [sample["x"] for sample in plain.epoch(epoch)]
    assert sorted(path.name for path in next(tmp_path.iterdir()).iterdir()) == ["0000", "0001"]
    assert drawn(plain.seed(5).cache(tmp_path, per_epoch=2), 0) == drawn(plain.seed(5), 0)


def _noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return sample


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: numbers(BASE).map(_noise), "draws random numbers.*per_epoch"),
        (lambda: numbers(BASE).map(_noise).union(numbers(BASE)), "draws random numbers"),
        (lambda: numbers(BASE).batched(2), r"before batched\(2\)"),
        (lambda: numbers(BASE).zip(numbers(BASE, name="b")), "call cache\\(\\) on each"),
        (lambda: numbers(BASE).cache("once"), "already"),
        (lambda: numbers(BASE).groupby("x").count(), "not stored anywhere"),
        (lambda: ps.read_tar("-"), "not stored anywhere"),
    ],
)
def test_plans_whose_results_cannot_be_kept_are_refused(make: Any, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        make().cache("results")


@pytest.mark.parametrize("folder", ["", "s3://bucket/results"])
def test_a_folder_that_is_not_local_is_refused(folder: str) -> None:
    with pytest.raises(PlanError, match="not a local folder"):
        numbers(BASE).cache(folder)


@pytest.mark.parametrize("per_epoch", [0, -1, 1.5])
def test_a_number_of_variants_below_one_is_refused(per_epoch: Any) -> None:
    with pytest.raises(PlanError, match="per_epoch"):
        numbers(BASE).cache("results", per_epoch=per_epoch)


def test_a_value_that_cannot_be_stored_is_an_error_that_names_its_field(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"builtins\.object in field 'thing'"):
        numbers(BASE).map(lambda sample: {"thing": object()}).cache(tmp_path).take(1)


def test_a_failed_sample_is_not_kept_and_fails_again(tmp_path: Path) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["x"] == 3:
            raise ValueError("three")
        return sample

    ds = numbers(BASE).map(fails).cache(tmp_path)
    for _ in range(2):
        with pytest.raises(StageError, match=r"three.*map\(fails\)"):
            ds.take_all()
        assert len(ds.on_error("skip").take_all()) == sum(BASE) - 1


def test_all_fields_are_kept_although_a_later_stage_needs_one(tiny_shards: list[Path], tmp_path: Path) -> None:
    ds = ps.read_tar(str(tiny_shards[0])).decode("rgb8").cache(tmp_path)
    assert ds.select("cls").count() == 25
    assert outputs(ds) == outputs(ps.read_tar(str(tiny_shards[0])).decode("rgb8"))


def test_ranks_and_later_ranks_of_another_world_share_results(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    ds = numbers(BASE).shuffle().map(_counting(log)).cache(tmp_path / "results")
    for rank in range(4):
        list(ds.epoch(0).shard(rank, 4))
    assert _calls(log) == sum(BASE)
    assert sorted(sample["x"] for rank in range(3) for sample in ds.epoch(1).shard(rank, 3)) == [*range(sum(BASE))]
    assert _calls(log) == 0


def test_a_damaged_record_is_computed_again(tmp_path: Path) -> None:
    ds = numbers(BASE).map(lambda sample: {**sample, "array": np.full(9, sample["x"])}).cache(tmp_path)
    want = outputs(ds)
    (records,) = tmp_path.rglob("*.records")
    data = bytearray(records.read_bytes())
    data[len(data) // 2] ^= 1
    records.write_bytes(data)
    assert outputs(ds) == want
    records.write_bytes(b"")
    assert outputs(ds) == want
    shutil.rmtree(tmp_path)
    assert outputs(ds) == want


def test_a_stage_in_processes_keeps_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_store, "_REFRESH_PAUSE", 1e9)  # a run looks for results of earlier ones nevertheless
    log = tmp_path / "calls"
    ds = numbers(BASE).map(_counting(log), workers=2, on="processes").cache(tmp_path / "results")
    first = outputs(ds)
    assert _calls(log) == sum(BASE)
    assert outputs(ds) == first
    assert _calls(log) == 0


def test_the_plan_names_the_cache_and_its_identity_is_that_without_it(tmp_path: Path) -> None:
    plain = numbers(BASE).shuffle().map(lambda sample: sample)
    cached = plain.cache(tmp_path, version=3)
    assert f"cache({str(tmp_path)!r}, version=3)" in repr(cached)
    assert "cache(" in cached.explain()
    loader = plain.map(_noise).batched(4).loader()
    next(iter(loader))
    other = cached.map(_noise).batched(4).loader()
    other.load_state_dict(loader.state_dict())
    assert outputs(other) == outputs(loader)


def _store_shard(url: str, text: str) -> None:
    with Memory().put(url) as upload, io.BytesIO() as file:
        with ps.TarWriter(file) as shard:
            shard.write({"__key__": "k", "txt": text})
        upload.write(file.getvalue())
        upload.commit()


def test_results_belong_to_the_bytes_that_a_disk_cache_holds(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/cached.tar"
    _store_shard(url, "old")
    opened = [(source, source.open()) for source in (TarSource((url,)), TarSource((url,), cache=ps.Cache(tmp_path)))]
    before = [result_digest(source, reader, [], None, None) for source, reader in opened]
    _store_shard(url, "new")
    after = [result_digest(source, reader, [], None, None) for source, reader in opened]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]  # within fresh_s


@dataclass(frozen=True, slots=True)
class _Untagged(Memory):
    """A storage that cannot detect changes."""

    def info(self, url: str) -> Info:
        return replace(Memory.info(self, url), tag=None)


def test_results_on_a_server_that_does_not_tell_of_changes_need_a_version(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/untagged.tar"
    _store_shard(url, "old")
    ds = ps.read_tar(url, storage=_Untagged())
    with pytest.raises(PlanError, match=r"does not report when memory://.*/untagged.tar changes.*cache\(version=...\)"):
        next(iter(ds.cache(tmp_path)))
    assert [sample["txt"] for sample in ds.decode().cache(tmp_path, version=1)] == ["old"]


def test_results_are_found_by_urls_with_a_password(tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    with ps.TarWriter(str(served / "a.tar")) as shard:
        shard.write({"__key__": "k", "txt": "text"})
    with http_server(served, "--user", "me", "--pass", "word") as port:
        ds = ps.read_tar(f"http://me:word@127.0.0.1:{port}/a.tar").decode().cache(tmp_path)
        assert [sample["txt"] for sample in ds] == ["text"]
