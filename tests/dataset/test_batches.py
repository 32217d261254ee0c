"""Batches: batched, batched_by and unbatched, and those of map_batches, which exist only for speed."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engines import EngineName
from penstock.errors import DataError, StageError
from penstock.testing import fingerprint, numbers, outputs


def _xs(ds: Any) -> list[int]:
    return [int(sample["x"]) for sample in ds]


def _sizes(ds: ps.Dataset) -> list[int]:
    return [len(batch["x"]) for batch in ds]


def test_batches_are_columns_of_neighbours() -> None:
    ds = ps.from_items([{"__key__": str(i), "x": i, "v": np.full(2, i), "t": "a"} for i in range(3)])
    first, last = ds.batched(2)
    want = {"__key__": ["0", "1"], "x": np.array([0, 1]), "v": np.array([[0, 0], [1, 1]]), "t": ["a", "a"]}
    assert fingerprint(first) == fingerprint(want)
    assert last["x"].tolist() == [2]


def test_drop_last_drops_an_incomplete_batch() -> None:
    assert _sizes(numbers((7,)).batched(3)) == [3, 3, 1]
    assert _sizes(numbers((7,)).batched(3, drop_last=True)) == [3, 3]
    assert (len(numbers((7,)).batched(3)), len(numbers((7,)).batched(3, drop_last=True))) == (3, 2)


def test_batches_are_formed_on_each_rank() -> None:
    ds = numbers((10,)).batched(4, drop_last=True)
    parts = [ds.shard(rank, 2) for rank in range(2)]
    assert [_sizes(part) for part in parts] == [[4], [4]]
    assert [len(part) for part in parts] == [1, 1]


def test_batches_cross_shards() -> None:
    assert _sizes(numbers((3, 0, 4)).batched(5)) == [5, 2]


def test_a_collate_function_replaces_the_default() -> None:
    assert list(ps.from_items([1, 2, 3]).batched(2, collate=tuple)) == [(1, 2), (3,)]
    assert next(iter(ps.from_items([[1], [2, 3]]).batched(2, collate=ps.pad()))).tolist() == [[1, 0], [2, 3]]


def test_the_error_of_samples_with_different_fields_names_one() -> None:
    with pytest.raises(DataError, match="differ in fields: b") as caught:
        list(ps.from_items([{"__key__": "0", "a": 1}, {"__key__": "1", "a": 1, "b": 2}]).batched(2))
    assert (caught.value.shard, caught.value.key) == ("items", "1")


def test_a_failing_collate_function_is_a_stage_error() -> None:
    def fail(samples: list[Any]) -> Any:
        raise LookupError("no")

    with pytest.raises(StageError, match="LookupError: no") as caught:
        list(numbers((3,)).batched(2, collate=fail))
    assert isinstance(caught.value.__cause__, LookupError)
    assert list(numbers((3,)).batched(2, collate=fail).on_error("skip")) == []


def test_batches_by_size_hold_what_fits() -> None:
    ds = ps.from_items([3, 3, 5, 1, 1, 9, 2])
    batches = [batch.tolist() for batch in ds.batched_by(int, 6)]
    assert batches == [[3, 3], [5, 1], [1], [9], [2]]
    assert list(ds.batched_by(int, 6, collate=sum)) == [6, 6, 1, 9, 2]
    with pytest.raises(TypeError, match="count"):
        len(ds.batched_by(int, 6))


def test_a_failing_size_is_a_stage_error() -> None:
    with pytest.raises(StageError, match=r"TypeError.*batched_by\(len, 3\)"):
        list(ps.from_items([1]).batched_by(len, 3))


def test_unbatched_reverses_batched() -> None:
    ds = numbers((7, 4))
    assert [dict(s) for s in ds.batched(3).unbatched()] == list(ds)
    pairs = ps.from_items([(1, "a"), (2, "b")])
    assert list(pairs.batched(2).unbatched()) == [(1, "a"), (2, "b")]


def test_a_real_batch_can_be_mapped() -> None:
    assert [int(total) for total in numbers((6,)).batched(4).map(lambda batch: batch["x"].sum())] == [6, 9]


def test_every_batch_has_its_own_generator() -> None:
    def draw(batch: Any, rng: np.random.Generator) -> int:
        return int(rng.integers(1 << 40))

    ds = numbers((6,)).batched(2).map(draw, workers=2)
    drawn = list(ds.epoch(0))
    assert len(set(drawn)) == 3
    assert list(ds.epoch(0).on("serial")) == drawn


def test_map_batches_gets_columns_and_yields_rows() -> None:
    seen: list[int] = []

    def double(batch: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(batch["x"], np.ndarray)
        seen.append(len(batch["x"]))
        return {"x": batch["x"] * 2, "tag": ["t"] * len(batch["x"])}

    got = list(numbers((10,)).map_batches(double, 4, workers=1))
    assert got == [{"x": 2 * i, "tag": "t"} for i in range(10)]
    assert sum(seen) == 10
    assert max(seen) == 4


@pytest.mark.parametrize(
    "answer",
    [
        lambda b: {"x": b["x"]},
        lambda b: {"x": b["x"].tolist()},
        lambda b: [{"x": x} for x in b["x"]],
        lambda b: ({"x": x} for x in b["x"]),
    ],
)
def test_map_batches_may_return_columns_or_rows(answer: Any) -> None:
    assert _xs(numbers((5,)).map_batches(answer, 2)) == list(range(5))


def test_map_batches_may_return_tensors() -> None:
    torch = import_module("torch")
    assert _xs(numbers((5,)).map_batches(lambda b: {"x": torch.from_numpy(b["x"])}, 2)) == list(range(5))


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("wrong", [lambda b: {"x": [b["x"].sum()]}, lambda b: [{"x": 0}]])
def test_a_different_number_of_rows_is_a_stage_error(wrong: Any, policy: Any) -> None:
    ds = numbers((8,)).map_batches(wrong, 4, workers=1).on_error(policy)
    with pytest.raises(StageError, match=r"[2-4] rows in, 1 rows out.*map_batches"):
        list(ds)


def test_the_error_of_a_lost_row_names_its_key() -> None:
    def lossy(batch: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"x": x} for x in batch["x"] if x != 5]

    with pytest.raises(StageError, match="1 rows in, 0 rows out") as caught:
        list(numbers((8,)).map_batches(lossy, 4))
    assert caught.value.key == "5"
    assert _xs(numbers((8,)).map_batches(lossy, 4).on_error("skip")) == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_one_bad_row_does_not_fail_its_neighbours(engine: EngineName) -> None:
    def picky(batch: dict[str, Any]) -> dict[str, Any]:
        if 3 in batch["x"]:
            raise ValueError("three")
        return batch

    loader = numbers((10,)).map_batches(picky, 5).on_error("skip").on(engine).loader()
    assert _xs(loader) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert [skip.place.key for skip in loader.skipped] == ["3"]
    with pytest.raises(StageError, match="three") as caught:
        list(numbers((10,)).map_batches(picky, 5).on(engine))
    assert caught.value.key == "3"


def test_one_bad_row_does_not_change_its_neighbours_randomness() -> None:
    def draw(batch: dict[str, Any], rng: list[np.random.Generator]) -> dict[str, Any]:
        drawn = [int(r.integers(1 << 40)) for r in rng]
        if 3 in batch["x"]:
            raise ValueError("three")
        return {"x": drawn}

    ds = numbers((10,)).map_batches(draw, 5).on_error("skip").epoch(0)
    assert outputs(ds) == outputs(ds.on("serial"))


class Model:
    constructed = 0
    lock = threading.Lock()

    def __init__(self, factor: int, plus: int = 0) -> None:
        self.factor, self.plus = factor, plus
        with Model.lock:
            Model.constructed += 1

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["x"] * self.factor + self.plus}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_class_is_constructed_once_per_worker(workers: int) -> None:
    Model.constructed = 0
    ds = numbers((200,)).map_batches(Model, 4, fn_args=(2,), fn_kwargs={"plus": 1}, workers=workers)
    assert _xs(ds) == [2 * i + 1 for i in range(200)]
    assert 1 <= Model.constructed <= workers


def test_a_class_that_cannot_be_constructed_stops_the_run() -> None:
    ds = numbers((8,)).map_batches(Model, 4)
    for each in (ds, ds.on_error("skip")):
        with pytest.raises(StageError, match=r"TypeError.*factor.*map_batches\(Model"):
            list(each)


def test_map_batches_needs_samples_with_fields() -> None:
    with pytest.raises(StageError, match="samples with fields, not int"):
        list(ps.from_items([1]).map_batches(len))


@pytest.mark.parametrize("on", ["threads", "processes"])
@pytest.mark.parametrize("engine", ["serial", "local"])
def test_samples_as_large_as_photos_come_in_calls_of_batch_size_rows(on: Any, engine: Any) -> None:
    def photo(sample: dict[str, Any]) -> dict[str, Any]:
        return {"photo": np.zeros((240, 320, 3), np.uint8)}

    def rows_per_call(batch: dict[str, Any]) -> dict[str, Any]:
        return {"rows": [len(batch["photo"])] * len(batch["photo"])}

    ds = numbers((300,)).map(photo, workers=2).map_batches(rows_per_call, batch_size=100, on=on, workers=1).on(engine)
    assert [row["rows"] for row in ds] == [100] * 300
