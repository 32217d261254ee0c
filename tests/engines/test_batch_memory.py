from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import penstock as ps
from penstock import vision
from penstock.engines.batch_memory import BatchMemory, BlockRows

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


def _rows(memory: BatchMemory, first: int = 0, count: int = 256, batch_size: int = 128) -> BlockRows:
    return BlockRows(memory, batch_size, first, count)


def _computed(rows: BlockRows, number: int, count: int) -> list[Any]:
    """Compute arrays in the rows that are offered for them."""
    out = []
    for array in _arrays(number, count):
        row = rows.take("x", BIG, np.dtype(np.uint8))
        assert row is not None
        np.copyto(row, array)
        out.append(row)
    return out


def test_arrays_that_were_computed_in_their_rows_are_not_copied() -> None:
    memory = BatchMemory()
    values = _computed(_rows(memory), 3, 200)
    whole, short = memory.stacked(values[:128]), memory.stacked(values[128:])
    assert (_address(whole), _address(short)) == (_address(values[0]), _address(values[128]))
    assert np.array_equal(np.concatenate([whole, short]), np.stack(_arrays(3, 200)))
    address = _address(whole)
    del values, whole
    assert _address(memory.stacked(_arrays(5))) == address


def test_arrays_in_other_rows_are_copied_and_then_none_are_offered() -> None:
    memory = BatchMemory()
    for number in range(4):
        values = _computed(_rows(memory, 1000 * number), number, 256)
        shifted = memory.stacked(values[1:129])
        assert np.array_equal(shifted, np.stack(_arrays(number + 1)))
        assert _address(shifted) != _address(values[1])
    assert _rows(memory, 9000).take("x", BIG, np.dtype(np.uint8)) is None


def test_rows_that_a_stage_replaces_take_no_memory() -> None:
    memory = BatchMemory()
    addresses = set()
    for number in range(20):
        values = _computed(_rows(memory, 128 * number, 128), number, 128)
        addresses.add(_address(values[0]))
        floats = [value.astype(np.float32) for value in values]
        del values
        assert memory.stacked(floats).dtype == np.float32
    assert len(addresses) == 1
    assert _rows(memory).take("x", BIG, np.dtype(np.uint8)) is not None


def test_a_row_is_given_out_once_and_fits_its_batch() -> None:
    memory = BatchMemory()
    rows = _rows(memory, first=126, count=3)
    taken = [rows.take("x", BIG, np.dtype(np.uint8)) for _ in range(4)]
    assert taken[3] is None
    assert len({_address(row) for row in taken[:3]}) == 3
    assert _rows(memory, first=0).take("x", (65, 64, 3), np.dtype(np.uint8)) is None  # rows of the batch differ
    assert _rows(memory, first=0).take("y", (65, 64, 3), np.dtype(np.uint8)) is not None
    assert _rows(memory, first=0, batch_size=2).take("z", BIG, np.dtype(np.uint8)) is None  # a small batch


def _photo(number: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (9, 12, 3), np.uint8)
    Image.fromarray(pixels).resize((120, 90)).save(stream, "JPEG")
    return stream.getvalue()


CROP = vision.RandomResizedCrop(64, flip=True)
SAMPLES: list[dict[str, Any]] = [{"__key__": f"{n:03}", "jpg": _photo(n), "x": n} for n in range(300)]


def _drop_some(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 50)


def _darker(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "jpg": sample["jpg"] // 2}


PLANS: dict[str, Any] = {
    "decode": lambda ds: ds.decode(jpg=CROP, workers=3),
    "two fields": lambda ds: ds.map(lambda s: {**s, "png": s["jpg"]}).decode(jpg=CROP, png=CROP, workers=2),
    "tuples": lambda ds: ds.decode(jpg=CROP).to_tuple("x", "jpg"),
    "a branch of a mixture": lambda ds: ps.mix(
        [ds.decode(jpg=CROP), ds.decode(jpg=vision.CenterCrop(64))], weights=[1, 1]
    ),
    "another array": lambda ds: ds.decode(jpg=CROP).map(_darker),
    "a filter": lambda ds: ds.decode(jpg=CROP).filter(_drop_some),
    "a limit": lambda ds: ds.decode(jpg=CROP).limit(280).skip(3),
    "retries": lambda ds: ds.decode(jpg=CROP, retries=2),
    "processes": lambda ds: ds.decode(jpg=CROP, workers=2, on="processes"),
    "skipped samples": lambda ds: (
        ps.from_items([{**s, "jpg": b"none"} if s["x"] in (7, 130) else s for s in SAMPLES])
        .shuffle()
        .decode(jpg=CROP, workers=2)
        .on_error("skip")
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_batches_have_the_arrays_of_their_samples_wherever_these_were_computed(name: str) -> None:
    ds = PLANS[name](ps.from_items(SAMPLES).shuffle())
    samples = ds.epoch(0).take_all()
    loader = ds.batched(100).loader(epoch=0)
    wanted = [samples[first : first + 100] for first in range(0, len(samples), 100)]
    for batch, group in zip(loader, wanted, strict=True):
        for key in group[0] if isinstance(group[0], dict) else range(2):
            assert np.array_equal(batch[key], np.stack([np.asarray(sample[key]) for sample in group])), key


def test_a_batch_that_is_kept_is_not_overwritten_by_workers() -> None:
    ds = ps.from_items(SAMPLES).repeat(3).decode(jpg=CROP, workers=2).batched(100).epoch(0)
    kept = ds.take_all()
    assert all(np.array_equal(batch["jpg"], again["jpg"]) for batch, again in zip(kept, ds, strict=True))
