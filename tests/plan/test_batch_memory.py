"""A batch's memory is taken again when nobody holds the batch, and never before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.plan.collation import BatchMemory

BIG = (64, 64, 3)


def _values(number: int, many: int = 128, shape: tuple[int, ...] = BIG) -> list[Any]:
    return [np.full(shape, (number + place) % 251, np.uint8) for place in range(many)]


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_what_was_let_go_of_is_taken_again() -> None:
    buffers = BatchMemory()
    first = buffers.stacked(_values(1))
    where = _address(first)
    del first
    again = buffers.stacked(_values(2))
    assert _address(again) == where
    assert np.array_equal(again, np.stack(_values(2)))


@pytest.mark.parametrize(
    "kept",
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
def test_what_is_held_in_any_way_is_not_overwritten(kept: Any) -> None:
    buffers = BatchMemory()
    held = kept(buffers.stacked(_values(1)))
    before = bytes(np.asarray(held))
    for number in range(2, 12):
        buffers.stacked(_values(number))
    assert bytes(np.asarray(held)) == before


def test_batches_of_an_epoch_share_few_buffers_and_can_all_be_kept() -> None:
    ds = ps.from_items([{"x": value} for value in _values(0, 1024)]).batched(128)
    passing = {_address(batch["x"]) for batch in ds}
    kept = ds.take_all()
    assert len(passing) <= 3 < len({_address(batch["x"]) for batch in kept}) == 8
    assert all(np.array_equal(batch["x"], np.stack(_values(128 * n))) for n, batch in enumerate(kept))


def test_small_batches_and_mixed_types_are_numpys_own() -> None:
    buffers = BatchMemory()
    small = buffers.stacked([np.ones(3), np.zeros(3)])
    assert small.base is None
    assert small.dtype == np.float64
    mixed = buffers.stacked([*_values(1), np.ones(BIG, np.float32)])
    assert mixed.dtype == np.float32
    assert mixed.base is None


def test_memory_is_pinned_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def empty(shape: Any, dtype: Any, pin_memory: bool) -> torch.Tensor:
        asked.append((shape, dtype, pin_memory))
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    buffers = BatchMemory()
    first = buffers.stacked(_values(1))
    second = buffers.stacked(_values(2))
    assert asked == [((128, *BIG), torch.uint8, True)] * 2
    assert np.array_equal(first, np.stack(_values(1)))
    assert np.array_equal(second, np.stack(_values(2)))
