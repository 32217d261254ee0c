from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import penstock as ps
from penstock.errors import PlanError, StateError
from penstock.feed.torch import TorchDataset
from penstock.testing import numbers


def _ds() -> ps.Dataset:
    return numbers((30, 12, 20)).shuffle(10)


def _rows(batches: Any) -> list[list[int]]:
    """Return the numbers of each batch."""
    return [np.atleast_1d(np.asarray(batch["x"])).tolist() for batch in batches]


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


# Tensors


def test_numbers_and_arrays_become_tensors() -> None:
    samples = [{"__key__": str(i), "x": i, "image": np.full((2, 3), i, np.uint8), "name": f"n{i}"} for i in range(5)]
    first, last = ps.from_items(samples).iter_torch_batches(batch_size=3)
    assert first["x"].tolist() == [0, 1, 2]
    assert first["x"].dtype == torch.int64
    assert first["image"].dtype == torch.uint8
    assert first["image"].shape == (3, 2, 3)
    assert first["name"] == ["n0", "n1", "n2"]
    assert last["__key__"] == ["3", "4"]


def test_tensors_have_the_requested_dtype() -> None:
    ds = ps.from_items([{"x": 1, "y": 2.5, "t": "a"}] * 2)
    (batch,) = ds.iter_torch_batches(dtypes=torch.float16)
    assert (batch["x"].dtype, batch["y"].dtype, batch["t"]) == (torch.float16, torch.float16, ["a", "a"])
    (batch,) = ds.iter_torch_batches(dtypes={"x": torch.int8})
    assert (batch["x"].dtype, batch["y"].dtype) == (torch.int8, torch.float64)


def test_wrong_dtypes_are_refused() -> None:
    ds = ps.from_items([{"x": 1}])
    with pytest.raises(PlanError, match=r"dtypes='float': give a torch\.dtype"):
        ds.iter_torch_batches(dtypes="float")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"dtypes names \['y'\].*\['x'\]"):
        list(ds.iter_torch_batches(dtypes={"y": torch.int8}))
    with pytest.raises(PlanError, match="prefetch=-1"):
        ds.iter_torch_batches(prefetch=-1)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_are_moved_to_the_device_in_order(prefetch: int) -> None:
    batches = list(numbers((20,)).iter_torch_batches(6, device="meta", prefetch=prefetch))
    assert [tuple(batch["x"].shape) for batch in batches] == [(6,), (6,), (6,), (2,)]
    assert {batch["x"].device.type for batch in batches} == {"meta"}
    on_cpu = numbers((20,)).shuffle().iter_torch_batches(6, device="cpu", prefetch=prefetch)
    assert _rows(on_cpu) == _rows(numbers((20,)).shuffle().batched(6).epoch(0))


def test_the_prefetching_thread_ends_with_the_loop() -> None:
    batches = numbers((2000,)).map(dict).iter_torch_batches(6, device="cpu", prefetch=2)
    next(batches)
    assert any(thread.name.startswith("penstock prefetch") for thread in threading.enumerate())
    batches.close()  # type: ignore[attr-defined]
    del batches
    assert not any(thread.name.startswith("penstock") for thread in threading.enumerate())


def test_an_error_passes_through_the_prefetching_thread() -> None:
    batches = numbers((20,), bad=[13]).iter_torch_batches(6, device="cpu")
    assert _rows([next(batches), next(batches)]) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    with pytest.raises(ps.errors.DataError, match="made to fail"):
        next(batches)


def test_samples_are_collated_by_the_given_function() -> None:
    got = list(numbers((5,)).iter_torch_batches(2, collate_fn=lambda samples: sum(s["x"] for s in samples)))
    assert got == [1, 5, 4]
    pairs = list(numbers((4,)).to_tuple("x", "index").iter_torch_batches(2))
    assert [tuple(column.tolist() for column in pair) for pair in pairs] == [([0, 1], [0, 1]), ([2, 3], [2, 3])]


def test_read_only_arrays_are_copied() -> None:
    frozen = np.arange(3)
    frozen.flags.writeable = False
    (batch,) = ps.from_items([{"x": 1}]).iter_torch_batches(collate_fn=lambda _: {"x": frozen})
    batch["x"][0] = 9
    assert frozen[0] == 0


def test_iter_batches_yields_tensors_and_counts_epochs() -> None:
    ds = _ds()
    assert isinstance(next(ds.iter_batches(4, format="torch"))["x"], torch.Tensor)
    assert _rows(ds.iter_batches(4, format="torch", drop_last=True)) == _rows(_ds().batched(4, True).epoch(1))
    assert _rows(ds.iter_torch_batches(4)) == _rows(_ds().batched(4).epoch(2))


# Datasets of torch's class


def test_a_torch_dataset_is_an_iterable_dataset_that_counts_epochs() -> None:
    ds = _ds().batched(8)
    dataset = ds.to_torch()
    assert isinstance(dataset, TorchDataset)
    assert isinstance(dataset, IterableDataset)
    assert len(dataset) == 8
    assert [_rows(dataset), _rows(dataset)] == [_rows(ds.epoch(0)), _rows(ds.epoch(1))]
    assert _rows(DataLoader(dataset, batch_size=None, num_workers=2)) == _rows(ds.epoch(2))
    with pytest.raises(TypeError, match="not known"):
        len(_ds().filter(_odd).to_torch())


@pytest.mark.parametrize("count", [0, 3, 8])
def test_a_torch_dataset_resumes_from_its_state(count: int) -> None:
    ds = _ds().batched(8)
    dataset = ds.to_torch()
    list(dataset)
    items = iter(dataset)
    before = _rows(next(items) for _ in range(count))
    other = ds.to_torch()
    other.load_state_dict(dataset.state_dict())
    assert other.state_dict() == dataset.state_dict()
    assert before + _rows(other) == _rows(ds.epoch(1))
    assert _rows(other) == _rows(ds.epoch(2))


def test_setting_the_epoch_of_a_loaded_state_keeps_the_state() -> None:
    ds = _ds().batched(8)
    dataset = ds.to_torch()
    dataset.set_epoch(4)
    items = iter(dataset)
    before = _rows(next(items) for _ in range(3))
    state = dataset.state_dict()
    other = ds.to_torch()
    other.load_state_dict(state)
    other.set_epoch(4)
    assert before + _rows(other) == _rows(ds.epoch(4))
    other.load_state_dict(state)
    other.set_epoch(5)
    assert _rows(other) == _rows(ds.epoch(5))
    with pytest.raises(PlanError, match=r"fixed by ds\.epoch\(3\)"):
        ds.epoch(3).to_torch().set_epoch(1)
    with pytest.raises(PlanError, match="epoch=-1"):
        other.set_epoch(-1)


def test_states_that_do_not_fit_are_refused() -> None:
    state = _ds().to_torch().state_dict()
    for damaged in ({}, {**state, "epoch": "2"}, {**state, "state": {}}):
        dataset = _ds().to_torch()
        dataset.load_state_dict(damaged)
        with pytest.raises(StateError):
            iter(dataset)
    dataset = _ds().to_torch()
    dataset.load_state_dict({**state, "worker": 1, "workers": 2})
    with pytest.raises(StateError, match=r"worker 1 of 2.*keep num_workers"):
        iter(dataset)
    dataset = _ds().to_torch()
    next(iter(dataset))
    other = numbers((5,)).to_torch()
    other.load_state_dict(dataset.state_dict())
    with pytest.raises(StateError, match="another dataset"):
        iter(other)
