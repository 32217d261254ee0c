"""Workers get the devices they request, and tensors are copied to them."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import cloudpickle
import pytest
import torch

from penstock.dataset import from_items
from penstock.engines.devices import assign_devices, with_device_copies
from penstock.engines.read_stage import Read
from penstock.engines.segments import Segment
from penstock.errors import EngineError
from penstock.plan import MapFn, PlacedStage, Resources
from penstock.plan.values import WorkerKind
from penstock.testing import numbers

FULL = os.environ.get("PENSTOCK_FULL") == "1"
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module


def segment(gpus: float = 1, workers: Any = None) -> Segment:
    resources = Resources(workers=workers, gpus=gpus)
    return Segment([PlacedStage(Read(), -1), PlacedStage(MapFn(abs, resources=resources), 0)], resources)


def test_stages_that_request_no_device_get_none() -> None:
    assert assign_devices([segment(0), segment(0, 4)], None) == {}


@pytest.mark.parametrize(
    ("gpus", "workers", "want"),
    [
        (1, None, ["a", "b", "c", "d"]),
        (1, 2, ["a", "b"]),
        (1, (1, 3), ["a", "b", "c"]),
        (1, (2, 9), ["a", "b", "c", "d"]),
        (2, None, ["a", "c"]),
        (0.5, 3, ["a", "a", "b"]),
        (0.25, 8, ["a"] * 4 + ["b"] * 4),
        (1 / 3, None, ["a"] * 3 + ["b"] * 3 + ["c"] * 3 + ["d"] * 3),
    ],
)
def test_every_worker_gets_its_share_of_the_devices(gpus: float, workers: Any, want: list[str]) -> None:
    assert assign_devices([segment(0), segment(gpus, workers)], "abcd") == {1: want}


def test_segments_that_request_whole_devices_do_not_share_them() -> None:
    assert assign_devices([segment(1, 1), segment(1, 2)], "abc") == {0: ["a"], 1: ["b", "c"]}


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([segment(1, 3)], r"gpus=1 for each of 3 workers, but .*a.*b.* declared"),
        ([segment(0.5, 5)], r"gpus=0.5 for each of 5 workers"),
        ([segment(1, (3, 4))], r"each of 3 workers"),
        ([segment(3)], r"gpus=3 for each of 1 workers"),
        ([segment(1, 2), segment(1, 1)], r"each of 1 workers.*of which 2 are assigned"),
    ],
)
def test_too_few_devices_are_an_error_that_states_both_numbers(segments: list[Segment], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        assign_devices(segments, "ab")


def test_a_segment_with_devices_copies_what_it_has_read() -> None:
    names = [placed.stage.name for placed in with_device_copies(segment(1)).stages]
    assert names == ["read", "todevice", "map"]
    plain = segment(0)
    assert with_device_copies(plain) is plain


def never_called(*_: Any) -> Any:
    raise AssertionError("a sample reached the function")


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_a_missing_gpu_is_an_error_before_the_first_sample(on: WorkerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engines.devices.available_devices", tuple)
    with pytest.raises(EngineError, match=r"map\(never_called\) asks for gpus=1 .*no GPU.*devices="):
        next(iter(from_items([1, 2]).map(never_called, gpus=1, on=on)))


@pytest.mark.parametrize("on", ["threads", "processes"] if FULL else ["threads"])
def test_functions_and_constructors_get_their_device(on: WorkerKind) -> None:
    class Model:
        def __init__(self, device: Any) -> None:
            self.device = device

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {**batch, "model": [str(self.device)] * len(batch["x"])}

    ds = numbers((20,)).map(lambda sample, device: {**sample, "device": str(device)}, gpus=1, workers=1, on=on)
    ds = ds.map_batches(Model, gpus=0.5, workers=2, on=on).on("local", devices=["cpu:7", "cpu:1"])
    got = list(ds)
    assert [sample["x"] for sample in got] == list(range(20))
    assert {sample["device"] for sample in got} == {"cpu:7"}
    assert {sample["model"] for sample in got} == {"cpu:1"}


def test_a_device_declared_twice_serves_two_workers() -> None:
    ds = numbers((40,)).map(lambda sample, device: device, gpus=1, workers=2).on("local", devices=["cpu", "cpu"])
    assert list(ds) == ["cpu"] * 40
    assert ds.stats().segments[-1].workers == 2
    with pytest.raises(EngineError, match="each of 2 workers"):
        list(ds.on("local", devices=["cpu"]))


def test_a_pool_has_no_more_workers_than_devices() -> None:
    ds = numbers((40,)).map(lambda sample, device: device, gpus=1).on("local", devices=["cpu:0", "cpu:1"])
    assert set(ds) <= {"cpu:0", "cpu:1"}
    assert (ds.stats().segments[-1].most, ds.stats().segments[-1].workers) == (2, 2)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_tensors_inside_items_are_copied_and_other_values_stay() -> None:
    t = torch.ones(3)
    item = {"t": t, "list": [t, 1], "tuple": (t, "a"), "named": Pair(t, None), "deep": {"er": [(t,)]}, "text": "b"}
    ds = from_items([item]).map(lambda item: item, gpus=1).on("local", devices=["meta"])
    (got,) = list(ds)
    copied = (got["t"], got["list"][0], got["tuple"][0], got["named"].left, got["deep"]["er"][0][0])
    assert [tensor.device.type for tensor in copied] == ["meta"] * 5
    assert all(tensor.shape == (3,) for tensor in copied)
    assert (got["list"][1], got["tuple"][1], got["named"].right, got["text"]) == (1, "a", None, "b")
    assert type(got["named"]) is Pair
    assert t.device.type == "cpu", "the caller's own tensor stays where it is"


def test_tensors_are_copied_in_processes_too() -> None:
    ds = from_items([torch.ones(5000)] * 3).map(lambda t, device: (t.device.type, str(device)), gpus=1, on="processes")
    assert list(ds.on("local", devices=["meta"])) == [("meta", "meta")] * 3
