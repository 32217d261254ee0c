"""Writers in actors: the same bytes as serial, no payload in the run's process, and a lost writer changes nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import penstock as ps
from penstock.engines.consumer import ConsumerLost
from penstock.engines.ray import actor_proxy, consumer
from penstock.errors import DataError, StageError
from penstock.formats.tar.index import Index
from penstock.testing import numbers

pytestmark = [pytest.mark.usefixtures("shared_ray"), pytest.mark.xdist_group("ray")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

Sample = dict[str, Any]
FULL = os.environ.get("PENSTOCK_FULL") == "1"
# A pool of its own, as a device has; a worker that has a device imports torch.
ON_A_DEVICE: dict[str, Any] = {"workers": 1, **({"gpus": 1} if FULL else {"memory": 1000})}


def row(sample: Sample, rng: np.random.Generator) -> Sample:
    return {"__key__": f"{sample['x']:05d}", "npy": rng.bytes(3000), "cls": sample["x"]}


class Device:
    """Stands for a model on a device; it adds the number of its calls to nothing, but is slow to construct."""

    def __call__(self, batch: Sample) -> Sample:
        return {**batch, "cls": [2 * number for number in batch["cls"]]}


def samples() -> ps.Dataset:
    workers = None if FULL else 1
    ds = numbers((200, 100, 300)).shuffle().filter(lambda sample: sample["x"] % 5 != 2, workers=workers)
    return ds.map(row, workers=workers).map_batches(Device, 20, **ON_A_DEVICE)


def files(folder: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {name: b"%d" % Index.from_bytes(d).samples if name.endswith(".index") else d for name, d in found.items()}


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("want")
    samples().on("serial").write_tar(folder, shards=16)
    return files(folder)


def test_a_cluster_writes_the_bytes_of_serial_and_no_payload_passes_through_the_run(
    want: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(stored: Any) -> Any:
        raise AssertionError("a block was fetched into the process that runs the plan")

    monkeypatch.setattr(actor_proxy.StoredObject, "fetch", fetch)
    packed = samples().on("ray").write_tar(tmp_path, shards=16)
    assert packed.samples == 480
    assert files(tmp_path) == want


def test_a_range_whose_writer_dies_is_written_again(
    want: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    added: list[int] = []
    add = consumer.RemoteConsumer.add

    def add_and_kill(self: consumer.RemoteConsumer, items: Any) -> None:
        added.append(len(items))
        if len(added) in (3, 9):
            ray.kill(self._actor)
        add(self, items)

    monkeypatch.setattr(consumer.RemoteConsumer, "add", add_and_kill)
    samples().on("ray").write_tar(tmp_path, shards=16)
    assert len(added) >= 9
    assert files(tmp_path) == want


def repeat_key(sample: Sample) -> Sample:
    return {**sample, "__key__": "same"}


def fail(sample: Sample) -> Sample:
    raise ValueError(f"sample {sample['x']}")


def test_errors_of_writers_and_stages_are_raised_as_they_are(tmp_path: Path) -> None:
    same = numbers((40,)).map(repeat_key, workers=1).select("__key__", "x").rename(cls="x")
    with pytest.raises(DataError, match="the key was written before"):
        same.on("ray").write_tar(tmp_path, shards=2)
    with pytest.raises(StageError, match="sample"):
        numbers((40,)).map(fail, workers=1).on("ray").write_tar(tmp_path, shards=2)
    assert [path.name for path in tmp_path.iterdir()] == []


class Adds:
    """A consumer that adds up what it takes."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, items: Any) -> None:
        self.total += sum(items)

    def close(self) -> int:
        return self.total

    def drop(self) -> None:
        pass


def _add_until_it_is_lost(lost: Any) -> None:
    while True:
        lost.add([6])


def test_a_consumer_in_an_actor_takes_items_of_this_process_too() -> None:
    make: Callable[[], Any] = Adds
    host = consumer.ActorHost()
    first = host.make(make)
    for start in range(10):
        first.add([start, start + 1])
    assert first.close() == 100
    second = host.make(make)  # in the same actor
    second.add([5])
    host.close()
    with pytest.raises(ConsumerLost):
        _add_until_it_is_lost(second)
