"""The laws on Ray, and what is asked of a cluster besides."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.dataset import Dataset, from_items
from penstock.engines.ray import session
from penstock.errors import DataError, EngineError, PlanError, StageError
from penstock.order import I64
from penstock.plan import Fields, Plan
from penstock.testing import (
    BASE,
    CORPUS,
    EngineTests,
    LocatedNumbers,
    Numbers,
    NumbersReader,
    fingerprint,
    numbers,
    outputs,
)

FULL = os.environ.get("PENSTOCK_FULL") == "1"
LAWS = 8  # cases that are tried where not all are

pytestmark = [pytest.mark.usefixtures("one_ray"), pytest.mark.xdist_group("ray")]


class _OnRay(EngineTests):
    worlds = (2,)

    def on(self, ds: Dataset) -> Dataset:
        return ds.on("ray")

    def points(self, many: int) -> Iterable[int]:
        return {0, many // 3, 2 * many // 3 + 1, many}


def cases() -> Iterator[Any]:
    """Every law on every plan, or a fixed choice of them."""
    found = []
    for law in (name for name in dir(_OnRay) if name.startswith("test_")):
        marks = [mark.args for mark in getattr(getattr(_OnRay, law), "pytestmark", ())]
        for values in product(*(mark[1] for mark in marks)):
            arguments = dict(zip((mark[0] for mark in marks), values, strict=True))
            found.append(pytest.param(law, arguments, id="-".join([law.removeprefix("test_"), *map(str, values)])))
    few = [case for case in found if "two pools" not in str(case.id)]  # that many workers take long to start
    yield from found if FULL else random.Random("ray").sample(few, LAWS)


@pytest.mark.parametrize(("law", "arguments"), list(cases()))
def test_the_laws_hold_on_a_cluster(law: str, arguments: dict[str, Any]) -> None:
    getattr(_OnRay(), law)(**arguments)


@pytest.mark.parametrize("name", ["zip of three", "late shuffle and more", "batches mapped"])
def test_it_yields_what_serial_yields(name: str) -> None:
    ds = CORPUS[name]().epoch(2)
    assert outputs(ds.on("ray")) == outputs(ds.on("serial"))


def crop(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    top = int(rng.integers(0, 16))
    image = sample["jpg"][top : top + 16]
    image[0, 0] = top  # what a stage is given it may change
    return {**sample, "jpg": image, "pair": (top, np.float32(top)), "mixed": top if top % 2 else float(top)}


def digest(ds: Dataset) -> str:
    """The bytes, dtypes and order of all items."""
    seen = hashlib.blake2b()
    for item in ds:
        seen.update(repr(fingerprint(item)).encode())
    return seen.hexdigest()


def test_decoded_and_augmented_samples_are_those_of_the_local_engine(tiny_shards: list[Path]) -> None:
    ds = ps.read_tar(list(map(str, tiny_shards))).shuffle().decode("rgb8").map(crop).epoch(1)
    assert digest(ds.on("ray")) == digest(ds.on("local"))
    for sample in ds.on("ray").take(3):
        sample["jpg"][:] = 0


def test_tensors_objects_and_missing_fields_arrive_as_they_are() -> None:
    made = [{"x": i, "t": torch.arange(i), "s": {i}, **({"odd": None} if i % 2 else {})} for i in range(9)]
    got = list(from_items(made).map(lambda s: {**s, "half": s["t"].to(torch.bfloat16)}, workers=1).on("ray"))
    assert [list(one) for one in got] == [[*one, "half"] for one in made]
    assert [one["s"] for one in got] == [one["s"] for one in made]
    assert all(a["t"].equal(b["t"]) and a["half"].dtype == torch.bfloat16 for a, b in zip(got, made, strict=True))


class Signed(NumbersReader):
    """Numbers that know which process read them."""

    def locate(self, shard: I64, index: I64, fields: Fields) -> Any:
        found = super().locate(shard, index, fields)
        return SignedSpots(found.source, found.shard, found.index, found.starts, found.nbytes)


class SignedSpots(LocatedNumbers):
    def take(self, sel: slice) -> Any:
        return SignedSpots(self.source, self.shard[sel], self.index[sel], self.starts, self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        items, bad = super().read()
        return [{**item, "reader": os.getpid()} for item in items], bad


class SignedNumbers(Numbers):
    def open(self) -> Signed:
        return Signed(self)


def signed(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "worker": os.getpid()}


def test_samples_are_read_by_the_workers_of_the_cluster() -> None:
    rows = list(Dataset(Plan(SignedNumbers((300, 500)))).shuffle().map(signed).on("ray"))
    assert len(rows) == 800
    assert all(row["reader"] == row["worker"] != os.getpid() for row in rows)


def fails_at_20(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "inverse": 1 // (sample["x"] - 20)}


def test_an_error_at_a_worker_is_the_one_it_is_here() -> None:
    ds = numbers(BASE).map(fails_at_20)
    caught = []
    for engine in ("ray", "serial"):
        with pytest.raises(StageError) as found:
            list(ds.on(engine))
        caught.append(found.value)
    there, here = caught
    assert (str(there), there.key, there.shard) == (str(here), here.key, here.shard)
    assert isinstance(there.__cause__, ZeroDivisionError)
    assert any("in fails_at_20" in note for note in there.__cause__.__notes__)


def test_a_damaged_sample_is_named_as_it_is_here() -> None:
    with pytest.raises(DataError, match=r"made to fail \(shard: shard-0002, key: 9\)"):
        list(numbers(BASE, bad=(9,)).map(dict).on("ray"))


if FULL:  # three pools of actors take long to start

    def test_samples_that_fail_behind_a_group_are_listed_as_they_are_here(tmp_path: Path) -> None:
        listed = []
        for engine in ("ray", "serial"):
            ds = numbers(BASE).flat_map(lambda s: [s, s]).shuffle(10).map(fails_at_20)
            ds = ds.on_error("skip", quarantine=tmp_path / engine).on(engine)
            assert len(list(ds)) == 2 * sum(BASE) - 2
            listed.append((tmp_path / engine).read_text())
        assert listed[0] == listed[1]
        assert "ZeroDivisionError" in listed[0]


def dies_at_20(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["x"] == 20:
        os._exit(3)
    return sample


if FULL:  # many actors are started, one after the other

    def test_a_sample_that_ends_its_worker_every_time_fails_alone() -> None:
        loader = numbers(BASE).map(dies_at_20, workers=1).on_error("skip").on("ray").loader()
        assert [one["x"] for one in loader] == [x for x in range(sum(BASE)) if x != 20]
        [skipped] = loader.skipped
        assert (skipped.place.shard, skipped.place.key) == ("shard-0003", "20")
        assert "its worker process ended" in skipped.problem


def dies_once(sample: dict[str, Any], flag: str) -> dict[str, Any]:
    if sample["x"] == 33 and not os.path.exists(flag):
        Path(flag).touch()
        os._exit(3)
    return sample


def test_a_worker_that_dies_once_changes_nothing(tmp_path: Path) -> None:
    ds = numbers(BASE).map(partial(dies_once, flag=str(tmp_path / "died")), workers=1).on("ray")
    assert [one["x"] for one in ds] == list(range(sum(BASE)))
    assert (tmp_path / "died").exists()
    assert ds.stats().segments[0].deaths == 1


def sleeps_at_20(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(60 if sample["x"] == 20 else 0)
    return sample


def test_a_sample_that_takes_too_long_fails_alone() -> None:
    ds = numbers(BASE).map(sleeps_at_20, timeout_s=0.5, workers=1).on_error("skip").on("ray")
    assert [one["x"] for one in ds] == [x for x in range(sum(BASE)) if x != 20]
    assert ds.stats().segments[0].timeouts


class Predictor:
    """Counts how often it is made, and on which devices."""

    def __init__(self, log: str, device: Any = None) -> None:
        import ray

        self.devices = tuple(ray.get_gpu_ids())
        self.log = Path(log)
        with self.log.open("a") as file:
            file.write(f"{os.getpid()} {self.devices}\n")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        until = time.monotonic() + 30
        while len(self.log.read_text().splitlines()) < 2 and time.monotonic() < until:  # the other one is on its way
            time.sleep(0.05)
        return {**batch, "by": [os.getpid()] * len(batch["x"])}


def test_each_segment_has_a_pool_of_its_own_and_classes_are_made_once_a_worker(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ds = numbers((3000,)).map(signed, workers=1, cpus=1)
    ds = ds.map_batches(Predictor, 100, workers=2, gpus=1, fn_args=(str(log),)).on("ray")
    rows = list(ds)
    assert [row["x"] for row in rows] == list(range(3000))
    made = [line.split(" ", 1) for line in log.read_text().splitlines()]
    assert sorted(devices for _, devices in made) == ["(0,)", "(1,)"]
    predictors = {row["by"] for row in rows}
    assert predictors <= {int(pid) for pid, _ in made}
    assert not predictors & {row["worker"] for row in rows}
    assert [segment.on for segment in ds.stats().segments] == ["actors", "actors"]


class Labeler:
    """Notes what it is asked for; fails at a sample, until it is mended."""

    def __init__(self, log: str) -> None:
        self.log = Path(log)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if 15_500 in batch["x"] and not self.log.with_suffix(".mended").exists():
            raise RuntimeError("out of memory")
        with self.log.open("a") as file:
            file.write("".join(f"{x}\n" for x in batch["x"]))
        return {"x": batch["x"], "label": batch["x"] * 2}


def test_a_rerun_of_an_inference_that_failed_does_not_predict_again_what_is_written(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "out"
    ds = numbers((8000, 8000)).map_batches(Labeler, 100, fn_args=(str(log),), workers=1).on("ray").epoch(0)
    with pytest.raises(StageError, match="out of memory"):
        ds.write_parquet(folder, max_samples=250)
    assert set(range(15_500)) <= set(map(int, log.read_text().split()))
    log.write_text("")
    log.with_suffix(".mended").touch()
    ds.write_parquet(folder, max_samples=250)
    again = sorted(map(int, log.read_text().split()))
    assert again == list(range(again[0], 16_000)), "each of the rest once"
    assert again[0] >= 5000, "up to five blocks of at most 2048 were on their way to a file"
    assert [row["label"] for row in ps.read_parquet(folder)] == [2 * x for x in range(16_000)]


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"cpus": 3}, "cpus=3 for each worker"),
        ({"gpus": 3}, "gpus=3 for each worker"),
        ({"gpus": 1, "workers": 3}, "3 workers of .* with gpus=1 each"),
        ({"memory": "900TB"}, r"memory=9e\+14 for each worker"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused_before_the_first_sample(needs: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=rf"{said}.*the cluster has 2 cores, 2 GPUs"):
        iter(numbers(BASE).map(dict, **needs).on("ray"))


def test_functions_have_pools_with_bounds() -> None:
    ds = numbers((4000,)).map(dict, workers=(1, 2)).on("ray")
    assert sum(1 for _ in ds) == 4000
    assert ds.stats().segments[0].workers in (1, 2)


def test_two_runs_side_by_side_do_not_wait_for_each_other() -> None:
    ds = numbers(BASE).map(dict, workers=1).on("ray").epoch(0)
    pairs = list(zip(ds, ds, strict=True))
    assert [a["x"] for a, _ in pairs] == [b["x"] for _, b in pairs] == list(range(sum(BASE)))


def slow(sample: dict[str, Any], log: str) -> dict[str, Any]:
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(0.05 if sample["x"] < 16 else 60)
    return sample


def test_closing_ends_what_runs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = iter(numbers((1000,)).map(partial(slow, log=str(log)), workers=1).on("ray"))
    assert next(run)["x"] == 0
    begun = time.monotonic()
    run.close()  # type: ignore[attr-defined]
    assert time.monotonic() - begun < 5
    assert _gone({int(pid) for pid in log.read_text().split()})


def _gone(pids: set[int], within: float = 20) -> bool:
    until = time.monotonic() + within
    while alive := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        if time.monotonic() > until:
            return not alive
        time.sleep(0.1)
    return True


def _press_when(log: Path) -> None:
    """Press Ctrl-C once something is being done."""
    while not log.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_what_runs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ds = numbers((1000,)).map(partial(slow, log=str(log)), workers=1).on("ray")
    pressed = threading.Thread(target=_press_when, args=(log,))
    pressed.start()
    with pytest.raises(KeyboardInterrupt):
        list(ds)
    pressed.join()
    assert _gone({int(pid) for pid in log.read_text().split()})


def test_an_endless_plan_is_read_as_far_as_it_is_asked_for() -> None:
    ds = numbers(BASE).shuffle().repeat().map(dict)
    assert ds.on("ray").epoch(0).take(150) == ds.on("serial").epoch(0).take(150)


def test_whatever_is_finished_may_come_first() -> None:
    got = [one["x"] for one in numbers(BASE).map(dict).on("ray", ordered=False)]
    assert sorted(got) == list(range(sum(BASE)))


def test_the_verbs_work_on_it(tmp_path: Path) -> None:
    ds = numbers(BASE).map(dict, workers=1).on("ray").epoch(0)
    assert ds.count() == sum(BASE)
    assert [row["x"] for row in ds.take(3)] == [0, 1, 2]
    assert len(ds.groupby("shard").count().take_all()) == 7
    for engine in ("ray", "local"):
        ds.on(engine).write_parquet(tmp_path / engine / "parquet")
        ds.map(lambda s: {"__key__": f"{s['x']:05}", "x.json": s["x"]}).on(engine).write_tar(
            str(tmp_path / engine / "out-%04d.tar"), max_samples=30
        )
    assert _files(tmp_path / "ray") == _files(tmp_path / "local")


def _files(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(found) >= 4
    return {name: data for name, data in found.items() if not name.endswith((".json", ".index"))}


def where(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x.json"], "folder": os.getcwd()}


def test_relative_paths_begin_where_the_script_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Ray was started elsewhere
    from_items([{"__key__": f"{i}", "x.json": i} for i in range(9)]).write_tar("part-%02d.tar", max_samples=5)
    ds = ps.read_tar("part-{00..01}.tar").decode().map(where, workers=1)
    wanted = [{"x": i, "folder": str(tmp_path)} for i in range(9)]
    assert ds.on("ray").take_all() == wanted
    assert ds.to_ray().take_all() == wanted


def test_packing_can_be_done_by_it(photo_shards: Path, tmp_path: Path) -> None:
    for engine in ("ray", None):
        ps.pack(str(photo_shards / "photos"), str(tmp_path / str(engine)), max_samples=10, engine=engine)
    shards = [sorted((tmp_path / name).glob("*.tar")) for name in ("ray", "None")]
    assert [one.read_bytes() for one in shards[0]] == [one.read_bytes() for one in shards[1]]
    assert len(shards[0]) > 1


def test_a_plan_that_only_reads_needs_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "imported", lambda: pytest.fail("Ray was asked for"))
    assert numbers(BASE).shuffle().batched(4).on("ray").first() is not None


if FULL:  # actors take long to start

    def test_it_runs_inside_an_actor_that_has_reserved_every_core() -> None:
        import ray

        class Trainer:
            def run(self) -> list[int]:
                return [one["x"] for one in numbers(BASE).map(dict, workers=1).on("ray")]

        trainer: Any = ray.remote(Trainer).options(num_cpus=2).remote()
        assert ray.get(trainer.run.remote(), timeout=60) == list(range(sum(BASE)))
        ray.kill(trainer)


def test_a_dataloaders_worker_is_told_that_it_cannot() -> None:
    loader = torch.utils.data.DataLoader(numbers(BASE).map(dict).on("ray").to_torch(), num_workers=1, batch_size=None)
    with pytest.raises(EngineError, match="forked process cannot use"):
        list(loader)


def test_options_are_checked_where_they_are_written() -> None:
    with pytest.raises(PlanError, match="address=7"):
        numbers(BASE).on("ray", address=7)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="has no option devices"):
        numbers(BASE).on("ray", devices=["cuda:0"])
