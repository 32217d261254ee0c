from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.engines.batch_memory import BatchMemory

BIG = (64, 64, 3)  # 128 of them exceed the size from which memory is reused


def _arrays(number: int, count: int = 128, shape: tuple[int, ...] = BIG) -> list[Any]:
    return [np.full(shape, (number + place) % 251, np.uint8) for place in range(count)]


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_the_memory_of_a_released_batch_is_reused() -> None:
    memory = BatchMemory()
    first = memory.stacked(_arrays(1))
    address = _address(first)
    del first
    again = memory.stacked(_arrays(2))
    assert _address(again) == address
    assert np.array_equal(again, np.stack(_arrays(2)))


@pytest.mark.parametrize(
    "hold",
    [
        lambda batch: batch,
        lambda batch: batch[3:5, ::2],
        lambda batch: batch.reshape(-1)[7:9].view(np.int8),
        lambda batch: torch.from_numpy(batch)[1],
        lambda batch: memoryview(batch)[2:3],
        lambda batch: np.frombuffer(batch, np.uint8)[5:],
    ],
    ids=["batch", "part", "flat", "tensor", "memory", "buffer"],
)
def test_memory_that_is_in_use_in_any_way_is_not_overwritten(hold: Any) -> None:
    memory = BatchMemory()
    held = hold(memory.stacked(_arrays(1)))
    before = bytes(np.asarray(held))
    for number in range(2, 12):
        memory.stacked(_arrays(number))
    assert bytes(np.asarray(held)) == before


def test_batches_of_an_epoch_share_few_buffers_unless_they_are_kept() -> None:
    ds = ps.from_items([{"x": value} for value in _arrays(0, 1024)]).batched(128)
    passing = {_address(batch["x"]) for batch in ds}
    held = ds.take_all()
    assert len(passing) <= 3 < len({_address(batch["x"]) for batch in held}) == 8
    assert all(np.array_equal(batch["x"], np.stack(_arrays(128 * n))) for n, batch in enumerate(held))


def test_small_batches_and_mixed_dtypes_use_new_memory() -> None:
    memory = BatchMemory()
    small = memory.stacked([np.ones(3), np.zeros(3)])
    assert small.base is None
    assert small.dtype == np.float64
    mixed = memory.stacked([*_arrays(1), np.ones(BIG, np.float32)])
    assert mixed.dtype == np.float32
    assert mixed.base is None


def test_memory_is_pinned_if_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    allocations = []

    def empty(shape: Any, dtype: Any, pin_memory: bool) -> torch.Tensor:
        allocations.append((shape, dtype, pin_memory))
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    memory = BatchMemory()
    first = memory.stacked(_arrays(1))
    second = memory.stacked(_arrays(2))
    assert allocations == [((128, *BIG), torch.uint8, True)] * 2
    assert np.array_equal(first, np.stack(_arrays(1)))
    assert np.array_equal(second, np.stack(_arrays(2)))


def test_the_last_view_of_a_batch_returns_its_memory_whichever_it_is() -> None:
    memory = BatchMemory()
    batch = memory.stacked(_arrays(1))
    address = _address(batch)
    views = [batch, batch[3], torch.from_numpy(batch)]
    del batch
    others = []
    while views:
        others.append(memory.stacked(_arrays(2)))
        assert _address(others[-1]) != address
        del views[0]
    assert _address(memory.stacked(_arrays(3))) == address


def test_memory_is_reused_although_other_references_to_the_buffer_are_counted_differently() -> None:
    memory = BatchMemory()
    seen = set()
    for number in range(20):
        batch = memory.stacked(_arrays(number))
        seen.add(_address(batch))
        extra = [batch] * 5  # a count of references to the buffer would not notice these
        del batch, extra
    assert len(seen) == 1
