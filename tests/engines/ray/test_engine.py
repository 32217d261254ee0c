"""The laws of engines on Ray, and properties that only a cluster has."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import penstock as ps
from penstock.cli import main
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
SAMPLED_CASES = 4  # of the laws, unless FULL

pytestmark = [pytest.mark.usefixtures("shared_ray"), pytest.mark.xdist_group("ray")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker need not import this module


class _OnRay(EngineTests):
    worlds = (2,)

    def on(self, ds: Dataset) -> Dataset:
        return ds.on("ray")

    def points(self, count: int) -> Iterable[int]:
        return {0, count // 3, 2 * count // 3 + 1, count}


def cases() -> Iterator[Any]:
    """Yield every law on every plan, or a fixed sample of them."""
    found = []
    for law in (name for name in dir(_OnRay) if name.startswith("test_")):
        marks = [mark.args for mark in getattr(getattr(_OnRay, law), "pytestmark", ())]
        for values in product(*(mark[1] for mark in marks)):
            arguments = dict(zip((mark[0] for mark in marks), values, strict=True))
            found.append(pytest.param(law, arguments, id="-".join([law.removeprefix("test_"), *map(str, values)])))
    quick = [case for case in found if "two pools" not in str(case.id)]  # this many workers take long to start
    yield from found if FULL else random.Random("ray").sample(quick, SAMPLED_CASES)


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
    image[0, 0] = top  # a stage may change its input
    return {**sample, "jpg": image, "pair": (top, np.float32(top)), "mixed": top if top % 2 else float(top)}


def digest(ds: Dataset) -> str:
    """Return a hash of the bytes, dtypes and order of all items."""
    state = hashlib.blake2b()
    for item in ds:
        state.update(repr(fingerprint(item)).encode())
    return state.hexdigest()


def test_decoded_and_augmented_samples_equal_those_of_the_local_engine(tiny_shards: list[Path]) -> None:
    ds = ps.read_tar(list(map(str, tiny_shards))).shuffle().decode("rgb8").map(crop).epoch(1)
    assert digest(ds.on("ray")) == digest(ds.on("local"))
    for sample in ds.on("ray").take(3):
        sample["jpg"][:] = 0


def test_tensors_objects_and_missing_fields_arrive_unchanged() -> None:
    import torch  # here, since the workers of all tests import this module

    sent = [{"x": i, "t": torch.arange(i), "s": {i}, **({"odd": None} if i % 2 else {})} for i in range(9)]
    got = list(from_items(sent).map(lambda s: {**s, "half": s["t"].to(torch.bfloat16)}, workers=1).on("ray"))
    assert [list(sample) for sample in got] == [[*sample, "half"] for sample in sent]
    assert [sample["s"] for sample in got] == [sample["s"] for sample in sent]
    assert all(a["t"].equal(b["t"]) and a["half"].dtype == torch.bfloat16 for a, b in zip(got, sent, strict=True))


class SigningReader(NumbersReader):
    """Adds to every sample the process that read it."""

    def locate(self, shard: I64, index: I64, fields: Fields) -> Any:
        located = super().locate(shard, index, fields)
        return SigningLocated(located.source, located.shard, located.index, located.starts, located.nbytes)


class SigningLocated(LocatedNumbers):
    def take(self, sel: slice) -> Any:
        return SigningLocated(self.source, self.shard[sel], self.index[sel], self.starts, self.nbytes[sel])

    def read(self) -> tuple[list[Any], dict[int, DataError]]:
        items, bad = super().read()
        return [{**item, "reader": os.getpid()} for item in items], bad


class SignedNumbers(Numbers):
    def open(self) -> SigningReader:
        return SigningReader(self)


def add_worker(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "worker": os.getpid()}


def test_the_actors_read_their_samples_themselves() -> None:
    rows = list(Dataset(Plan(SignedNumbers((300, 500)))).shuffle().map(add_worker).on("ray"))
    assert len(rows) == 800
    assert all(row["reader"] == row["worker"] != os.getpid() for row in rows)


def fails_at_20(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "inverse": 1 // (sample["x"] - 20)}


def test_an_error_in_an_actor_equals_that_of_the_serial_engine() -> None:
    ds = numbers(BASE).map(fails_at_20)
    caught = []
    for engine in ("ray", "serial"):
        with pytest.raises(StageError) as found:
            list(ds.on(engine))
        caught.append(found.value)
    on_ray, serial = caught
    assert (str(on_ray), on_ray.key, on_ray.shard) == (str(serial), serial.key, serial.shard)
    assert isinstance(on_ray.__cause__, ZeroDivisionError)
    assert any("in fails_at_20" in note for note in on_ray.__cause__.__notes__)


def test_an_error_names_the_damaged_sample() -> None:
    with pytest.raises(DataError, match=r"made to fail \(shard: shard-0002, key: 9\)"):
        list(numbers(BASE, bad=(9,)).map(dict).on("ray"))


if FULL:  # three pools of actors take long to start

    def test_samples_that_fail_behind_a_group_are_quarantined_as_by_the_serial_engine(tmp_path: Path) -> None:
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


if FULL:  # it starts many actors, one after the other

    def test_a_sample_that_ends_its_worker_every_time_fails_alone() -> None:
        loader = numbers(BASE).map(dies_at_20, workers=1).on_error("skip").on("ray").loader()
        assert [sample["x"] for sample in loader] == [x for x in range(sum(BASE)) if x != 20]
        [skipped] = loader.skipped
        assert (skipped.place.shard, skipped.place.key) == ("shard-0003", "20")
        assert "its worker process ended" in skipped.problem


def dies_once(sample: dict[str, Any], flag: str) -> dict[str, Any]:
    if sample["x"] == 33 and not os.path.exists(flag):
        Path(flag).touch()
        os._exit(3)
    return sample


def test_an_actor_that_dies_once_does_not_change_the_stream(tmp_path: Path) -> None:
    ds = numbers(BASE).map(partial(dies_once, flag=str(tmp_path / "died")), workers=1).on("ray")
    assert [sample["x"] for sample in ds] == list(range(sum(BASE)))
    assert (tmp_path / "died").exists()
    assert ds.stats().segments[0].deaths == 1


def sleeps_at_20(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(60 if sample["x"] == 20 else 0)
    return sample


def test_a_sample_that_takes_too_long_fails_alone() -> None:
    ds = numbers(BASE).map(sleeps_at_20, timeout_s=0.5, workers=1).on_error("skip").on("ray")
    assert [sample["x"] for sample in ds] == [x for x in range(sum(BASE)) if x != 20]
    assert ds.stats().segments[0].timeouts


class Predictor:
    """Logs each construction, with its process and devices."""

    def __init__(self, log: str, device: Any = None) -> None:
        import ray

        self.devices = tuple(ray.get_gpu_ids())
        self.log = Path(log)
        with self.log.open("a") as file:
            file.write(f"{os.getpid()} {self.devices}\n")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        until = time.monotonic() + 120
        while len(self.log.read_text().splitlines()) < 2 and time.monotonic() < until:  # the other one is starting
            time.sleep(0.05)
        return {**batch, "by": [os.getpid()] * len(batch["x"])}


def test_each_segment_has_its_own_pool_and_classes_are_constructed_once_per_worker(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ds = numbers((3000,)).map(add_worker, workers=1, cpus=1)
    ds = ds.map_batches(Predictor, 100, workers=2, gpus=1, fn_args=(str(log),)).on("ray")
    rows = list(ds)
    assert [row["x"] for row in rows] == list(range(3000))
    constructed = [line.split(" ", 1) for line in log.read_text().splitlines()]
    assert sorted(devices for _, devices in constructed) == ["(0,)", "(1,)"]
    predictors = {row["by"] for row in rows}
    assert predictors <= {int(pid) for pid, _ in constructed}
    assert not predictors & {row["worker"] for row in rows}
    assert [segment.on for segment in ds.stats().segments] == ["actors", "actors"]


class Labeler:
    """Logs its samples; fails at one of them until a file marks the failure as fixed."""

    def __init__(self, log: str) -> None:
        self.log = Path(log)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if 15_500 in batch["x"] and not self.log.with_suffix(".fixed").exists():
            raise RuntimeError("out of memory")
        with self.log.open("a") as file:
            file.write("".join(f"{x}\n" for x in batch["x"]))
        return {"x": batch["x"], "label": batch["x"] * 2}


def test_a_rerun_of_a_failed_inference_does_not_repeat_what_is_written(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "out"
    ds = numbers((8000, 8000)).map_batches(Labeler, 100, fn_args=(str(log),), workers=1).on("ray").epoch(0)
    with pytest.raises(StageError, match="out of memory"):
        ds.write_parquet(folder, max_samples=250)
    assert set(range(15_500)) <= set(map(int, log.read_text().split()))
    log.write_text("")
    log.with_suffix(".fixed").touch()
    ds.write_parquet(folder, max_samples=250)
    again = sorted(map(int, log.read_text().split()))
    assert again == list(range(again[0], 16_000)), "each of the remaining samples once"
    assert again[0] >= 5000, "up to five blocks of at most 2048 samples were not written yet"
    assert [row["label"] for row in ps.read_parquet(folder)] == [2 * x for x in range(16_000)]


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"cpus": 3}, "cpus=3 for each worker"),
        ({"gpus": 3}, "gpus=3 for each worker"),
        ({"gpus": 1, "workers": 3}, "3 workers of .* with gpus=1 each"),
        ({"memory": "900TB"}, r"memory=9e\+14 for each worker"),
    ],
)
def test_a_request_that_the_cluster_cannot_meet_is_refused_before_the_first_sample(
    resources: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=rf"{message}.*the cluster has 2 cores, 2 GPUs"):
        iter(numbers(BASE).map(dict, **resources).on("ray"))


def test_a_pool_of_actors_stays_within_its_bounds() -> None:
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


def test_closing_ends_the_actors(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = iter(numbers((1000,)).map(partial(slow, log=str(log)), workers=1).on("ray"))
    assert next(run)["x"] == 0
    started_at = time.monotonic()
    run.close()  # type: ignore[attr-defined]
    assert time.monotonic() - started_at < 30  # the function sleeps for 60 s
    assert _all_ended({int(pid) for pid in log.read_text().split()})


def _all_ended(pids: set[int], within_s: float = 120) -> bool:
    until = time.monotonic() + within_s
    while alive := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        if time.monotonic() > until:
            return not alive
        time.sleep(0.1)
    return True


def _interrupt_when_exists(log: Path) -> None:
    """Send this process a Ctrl-C once a worker has written to the log."""
    while not log.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_the_actors(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ds = numbers((1000,)).map(partial(slow, log=str(log)), workers=1).on("ray")
    interrupter = threading.Thread(target=_interrupt_when_exists, args=(log,))
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        list(ds)
    interrupter.join()
    assert _all_ended({int(pid) for pid in log.read_text().split()})


def test_an_endless_plan_is_read_only_as_far_as_needed() -> None:
    ds = numbers(BASE).shuffle().repeat().map(dict, workers=1)
    assert ds.on("ray").epoch(0).take(150) == ds.on("serial").epoch(0).take(150)


def test_an_unordered_run_yields_every_sample_once() -> None:
    got = [sample["x"] for sample in numbers(BASE).map(dict).on("ray", ordered=False)]
    assert sorted(got) == list(range(sum(BASE)))


def test_counting_taking_grouping_and_writing_work_on_ray(tmp_path: Path) -> None:
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


def add_folder(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x.json"], "folder": os.getcwd()}


def test_relative_paths_begin_at_the_working_directory_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Ray was started in another folder
    from_items([{"__key__": f"{i}", "x.json": i} for i in range(9)]).write_tar("part-%02d.tar", max_samples=5)
    ds = ps.read_tar("part-{00..01}.tar").decode().map(add_folder, workers=1)
    assert ds.on("ray").take_all() == [{"x": i, "folder": str(tmp_path)} for i in range(9)]


@pytest.mark.parametrize(
    "options", [["--shards", "3"], *([["--max-samples", "10"]] if FULL else [])], ids=lambda options: options[0]
)
def test_pack_and_convert_write_the_same_files_on_ray(options: list[str], photo_shards: Path, tmp_path: Path) -> None:
    workers = [] if FULL else ["--workers", "1"]
    for engine in ("ray", "local"):
        packed, converted = (str(tmp_path / engine / name) for name in ("packed", "converted"))
        on = ["--engine", engine, *workers]
        assert main(["pack", str(photo_shards / "photos"), packed, *options, *on]) == 0
        more = options if "--shards" in options else ["--max-bytes", "6KB"]
        assert main(["convert", packed, converted, *more, "--format", "json", "-x", "jpg", *on]) == 0
    found = [
        {path.name: path.read_bytes() for path in (tmp_path / engine).rglob("*") if path.suffix in (".tar", ".jsonl")}
        for engine in ("ray", "local")
    ]
    assert found[0] == found[1]
    assert len(found[0]) >= 4


def test_a_plan_that_only_reads_needs_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "import_ray", lambda: pytest.fail("Ray was imported"))
    assert numbers(BASE).shuffle().batched(4).on("ray").first() is not None


if FULL:  # actors take long to start

    def test_a_plan_runs_inside_an_actor_that_holds_every_core() -> None:
        import ray

        class Trainer:
            def run(self) -> list[int]:
                return [sample["x"] for sample in numbers(BASE).map(dict, workers=1).on("ray")]

        trainer: Any = ray.remote(Trainer).options(num_cpus=2).remote()
        assert ray.get(trainer.run.remote(), timeout=300) == list(range(sum(BASE)))
        ray.kill(trainer)


def test_a_worker_of_a_data_loader_cannot_run_a_plan_on_ray() -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader(numbers(BASE).map(dict).on("ray").to_torch(), num_workers=1, batch_size=None)
    with pytest.raises(EngineError, match="forked process cannot use"):
        list(loader)


def test_options_are_checked_when_they_are_set() -> None:
    with pytest.raises(PlanError, match="address=7"):
        numbers(BASE).on("ray", address=7)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="has no option devices"):
        numbers(BASE).on("ray", devices=["cuda:0"])


class Identity:
    """A class that is constructed once per worker."""

    def __call__(self, batch: Any) -> Any:
        return batch


def _ask(**request: Any) -> Dataset:
    return numbers((20,)).map(dict, **request).on("ray")


def _proc(tmp_path: Path) -> int:
    ps.from_items([{"txt": "a"}]).write_tar(tmp_path / "in-0.tar")
    call = ["proc", "--python", "builtins:dict", "-p", "16", "--engine", "ray", f"{tmp_path}/in-{{0,1}}.tar"]
    return main([*call, "-o", f"{tmp_path}/out-{{}}.tar"])


WAYS: dict[str, tuple[Any, str]] = {  # the cluster has two cores and two devices
    "cpus of a worker": (lambda tmp: list(_ask(cpus=16)), "cpus=16"),
    "gpus of a worker": (lambda tmp: list(_ask(gpus=3)), "gpus=3"),
    "memory of a worker": (lambda tmp: list(_ask(memory="900TB")), "memory=9e[+]14"),
    "workers of one stage": (lambda tmp: list(_ask(gpus=1, workers=3)), "3 workers of"),
    "the least number of workers": (lambda tmp: list(_ask(gpus=1, workers=(3, 9))), "3 workers of"),
    "stages together": (lambda tmp: list(_ask(gpus=2).map(dict, gpus=0.5)), "the stages together ask for"),
    "Ray's words": (lambda tmp: _ask(num_gpus=1, concurrency=4).take(1), "4 workers of"),
    "a class": (lambda tmp: numbers((9,)).map_batches(Identity, 2, gpus=5).on("ray").first(), "gpus=5"),
    "a loader": (lambda tmp: list(_ask(cpus=3).batched(2).loader()), "cpus=3"),
    "a part": (lambda tmp: list(_ask(gpus=1, workers=3).split(2)[0]), "3 workers of"),
    "writing ranges": (lambda tmp: _ask(gpus=3).write_parquet(tmp / "out", shards=4), "gpus=3"),
    "writing": (lambda tmp: _ask(memory="900TB").write_csv(tmp / "out"), "memory="),
    "packing": (lambda tmp: ps.pack(_ask(cpus=9), tmp / "out", engine="ray"), "cpus=9"),
    "processing files": (lambda tmp: ps.process([__file__], print, tmp, engine="ray", cpus=9), "cpus=9"),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_no_node_can_give_is_named_before_the_first_sample(way: str, tmp_path: Path) -> None:
    ask, named = WAYS[way]
    with pytest.raises(EngineError, match=rf"{named}.*the cluster has"):
        ask(tmp_path)


def test_cores_of_a_command_that_no_node_has_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _proc(tmp_path) != 0
    assert "proc -p 16 asks for cpus=16" in capsys.readouterr().err


def test_batches_have_the_rows_that_were_asked_for(tmp_path: Path) -> None:
    def call(batch: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "calls" / f"{time.time_ns()}-{os.getpid()}-{len(batch['cls'])}").touch()
        return {"cls": batch["cls"]}

    count, photo = 4000 if FULL else 800, np.zeros((192, 192, 3), np.uint8)  # 110 KB
    ps.from_items([{"cls": number, "jpg": photo} for number in range(count)]).write_tar(tmp_path / "in", shards=4)
    for engine in ("local", "ray"):
        (tmp_path / "calls").mkdir()
        photos = ps.read_tar(str(tmp_path / "in")).decode("rgb8", workers=2)
        ds = photos.map_batches(call, batch_size=100, workers=1).on(engine)
        assert [row["cls"] for row in ds] == list(range(count))
        assert len(list((tmp_path / "calls").iterdir())) <= count // 100 + 2
        (tmp_path / "calls").rename(tmp_path / engine)
