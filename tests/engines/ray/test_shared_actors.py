"""Parts of one split on Ray share one set of actors, wherever each part is read."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import penstock as ps
from penstock.engines.ray.actor_proxy import NAMESPACE
from penstock.testing import numbers

FULL = os.environ.get("PENSTOCK_FULL") == "1"
# A pool of its own, as a device has; a worker that has a device imports torch.
ON_A_DEVICE: dict[str, Any] = {"workers": 1, **({"gpus": 2} if FULL else {"memory": 1000})}

pytestmark = [pytest.mark.usefixtures("shared_ray"), pytest.mark.xdist_group("ray")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test


@pytest.fixture(autouse=True)
def _end_shared_actors() -> Iterator[None]:
    """End the actors of a test at once: one whose user was killed would hold its devices for a minute."""
    import ray

    yield
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE:
            with suppress(ValueError):  # it has ended since
                ray.kill(ray.get_actor(actor["name"], NAMESPACE))


class Model:
    """Stands for a model on the only device; it counts how many times it is constructed."""

    def __init__(self, log: str) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "y": batch["x"] + 1}


class SlowModel(Model):
    """Takes long enough for both parts to have work left when it ends."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.02)
        return batch


def dataset(log: Path) -> ps.Dataset:
    return numbers((90, 70)).shuffle().map_batches(Model, 8, fn_args=(str(log),), **ON_A_DEVICE)


class Trainer:
    """A trainer in a process of its own that reads its part, one batch for each step."""

    def __init__(self, part: ps.Dataset, state: dict[str, Any] | None = None) -> None:
        self.loader = part.batched(4).loader()
        if state is not None:
            self.loader.load_state_dict(state)
        self.batches: Iterator[Any] = iter(self.loader)

    def step(self) -> tuple[list[int], dict[str, Any]] | None:
        batch = next(self.batches, None)
        return None if batch is None else (batch["x"].tolist(), self.loader.state_dict())


def start(part: ps.Dataset, state: dict[str, Any] | None = None) -> Any:
    import ray

    return ray.remote(Trainer).options(num_cpus=0).remote(part, state)


@pytest.mark.parametrize("world", [2, 4] if FULL else [2])
def test_lock_step_trainers_behind_one_worker_finish_also_if_one_is_killed(world: int, tmp_path: Path) -> None:
    import ray

    log = tmp_path / "log"
    ds = dataset(log)
    parts = ds.on("ray").streaming_split(world, equal=True)
    trainers = [start(part) for part in parts]
    rows: list[list[int]] = [[] for _ in parts]
    states: list[Any] = [None] * world
    for step in range(1000):
        steps = ray.get([trainer.step.remote() for trainer in trainers], timeout=300)  # a barrier
        if None in steps:
            assert steps == [None] * world
            break
        for rank, found in enumerate(steps):
            rows[rank] += found[0]
            states[rank] = found[1]
        if step == 2:  # a trainer is killed, and comes back with its state
            ray.kill(trainers[1])
            trainers[1] = start(parts[1], states[1])
    for trainer in trainers:
        ray.kill(trainer)
    constructed = log.read_text().split()
    for rank in range(world):
        assert rows[rank] == [row["x"] for row in ds.on("serial").split(world, equal=True)[rank].epoch(0)]
    assert len(constructed) == 1


def test_a_part_that_is_not_read_any_more_does_not_stop_the_others(tmp_path: Path) -> None:
    parts = dataset(tmp_path / "log").on("ray").split(2)
    stopped = iter(parts[0])
    assert next(stopped)["y"] >= 1
    want = [row["x"] for row in dataset(tmp_path / "log").on("serial").split(2)[1].epoch(0)]
    assert [row["x"] for row in parts[1].epoch(0)] == want
    with closing(stopped):  # type: ignore[type-var]
        pass


def test_every_part_says_that_the_shared_worker_ended_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    ds = numbers((400, 400)).shuffle().map_batches(SlowModel, 8, fn_args=(str(log),), **ON_A_DEVICE)
    runs = [iter(part.epoch(0)) for part in ds.on("ray").split(2)]
    rows = [[next(run)["x"]] for run in runs]
    os.kill(int(log.read_text()), signal.SIGKILL)
    said_by = time.monotonic() + 60
    with ThreadPoolExecutor(2) as pool:
        rest = [pool.submit(lambda run=run: [row["x"] for row in run]) for run in runs]  # type: ignore[misc]
        while caplog.text.count("the parts of a split share a worker, and its worker process ended") < 2:
            assert time.monotonic() < said_by, caplog.text
            time.sleep(0.02)
    want = [[row["x"] for row in part.epoch(0)] for part in ds.on("serial").split(2)]
    assert [first + later.result() for first, later in zip(rows, rest, strict=True)] == want
    assert len(log.read_text().split()) == 2 + 2  # on Ray, and by serial


def test_stages_behind_the_split_belong_to_their_part(tmp_path: Path) -> None:
    parts = numbers((40,)).map(dict, workers=1).on("ray").split(2)
    first, second = parts[0].map(lambda row: {"z": row["x"] * 2}), parts[1].map(lambda row: {"z": -row["x"]})
    assert {row["z"] for row in first} == {2 * x for x in range(20)}
    assert {row["z"] for row in second} == {-x for x in range(20, 40)}
