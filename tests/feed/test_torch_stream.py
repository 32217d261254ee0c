"""Datasets and loaders in a DataLoader of torch, with and without workers."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import penstock as ps
from penstock.errors import StateError
from penstock.feed import Epochs, TorchStream, TorchWorker, WorkerShare
from penstock.testing import numbers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

FULL = os.environ.get("PENSTOCK_FULL") == "1"
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores


def _ds() -> ps.Dataset:
    return numbers((30, 12, 20)).shuffle(10)


def _rows(batches: Any) -> list[list[int]]:
    """Return the numbers of each batch."""
    return [np.atleast_1d(np.asarray(batch["x"])).tolist() for batch in batches]


def _all(batches: Any) -> list[int]:
    return [x for row in _rows(batches) for x in row]


def _some(batches: Any, count: int) -> list[list[int]]:
    items = iter(batches)
    return _rows(next(items) for _ in range(count))


def _loader(ds: Any, workers: int, batch_size: int | None = None, **options: Any) -> Any:
    return DataLoader(ds, batch_size=batch_size, num_workers=workers, **options)


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def _twice(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [sample, {**sample, "x": sample["x"] + 1000}]


# A stream by itself


class _FakeLoader:
    """Yields 0 to 9; its state is the number of items that were yielded."""

    def __init__(self) -> None:
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        while self.done < 10:
            self.done += 1
            yield {"x": self.done - 1}

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.done = state["done"]


def _stream(
    worker: TorchWorker | None = None, epochs: Epochs | None = None
) -> tuple[TorchStream, list[tuple[int, WorkerShare | None]]]:
    """Return a stream, and the arguments with which it creates loaders."""
    calls: list[tuple[int, WorkerShare | None]] = []

    def make_loader(epoch: int, share: WorkerShare | None) -> _FakeLoader:
        calls.append((epoch, share))
        return _FakeLoader()

    return TorchStream(numbers((10,)).batched(3).plan, epochs or Epochs(), worker, make_loader), calls


def test_a_stream_starts_with_its_first_item() -> None:
    stream, calls = _stream()
    assert stream.state_dict() == {"epoch": 0, "worker": 0, "workers": 0}
    assert calls == []
    assert [sample["x"] for sample in stream] == list(range(10))
    assert calls == [(0, None)]


def test_a_worker_gets_its_share() -> None:
    stream, calls = _stream(TorchWorker(1, 2, 77))
    next(stream)
    assert calls == [(0, WorkerShare(1, 2, 3))]
    assert stream.state_dict() == {"epoch": 0, "worker": 1, "workers": 2, "run": 3, "state": {"done": 1}}


def test_a_stream_resumes_from_a_state_and_its_epoch_counts() -> None:
    epochs = Epochs()
    stream, calls = _stream(TorchWorker(1, 2, 77), epochs)
    state = {"epoch": 4, "worker": 1, "workers": 2, "run": 5, "state": {"done": 7}}
    stream.load_state_dict(state)
    assert stream.state_dict() == state
    assert [sample["x"] for sample in stream] == [7, 8, 9]
    assert calls == [(4, WorkerShare(1, 2, 5))]
    assert epochs.peek() == 5


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ([], "not the state of a pass"),
        ({"epoch": 0}, "not the state of a pass"),
        ({"epoch": -1, "worker": 0, "workers": 0}, "damaged"),
        ({"epoch": 0, "worker": 0, "workers": 0, "state": {}}, "damaged"),
        ({"epoch": 0, "worker": 1, "workers": 2}, r"worker 1 of 2, but this is worker 0 of 0: keep num_workers"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: Any, problem: str) -> None:
    with pytest.raises(StateError, match=problem):
        _stream()[0].load_state_dict(state)


# Workers


@pytest.mark.parametrize(
    ("workers", "batch_size"), [(1, None), (2, 16), (5, None), *([(1, 16), (2, None), (5, 16)] if FULL else [])]
)
def test_batches_and_length_do_not_depend_on_workers(workers: int, batch_size: int | None) -> None:
    ds = _ds().map(dict) if batch_size else _ds().map(dict).batched(16)
    alone, shared = _loader(ds.epoch(2), 0, batch_size), _loader(ds.epoch(2), workers, batch_size)
    rows = _rows(shared)
    assert rows == _rows(alone)
    assert len(shared) == len(alone) == 4
    assert Counter(chain(*rows)) == Counter(range(62))


def test_a_short_last_batch_is_dropped_once() -> None:
    own = _loader(_ds().batched(16, drop_last=True).epoch(0), 3)
    collated = _loader(_ds().epoch(0), 3, 16, drop_last=True)
    assert _rows(own) == _rows(collated) == _rows(_ds().batched(16, drop_last=True).epoch(0))
    assert len(own) == len(collated) == 3


def test_workers_share_one_shard(tmp_path: Path) -> None:
    items = [{"__key__": f"{i:03d}", "cls": i} for i in range(40)]
    ps.from_items(items).write_tar(str(tmp_path / "one.tar"))
    ds = ps.read_tar(str(tmp_path / "one.tar")).decode().map(_with_worker).select("cls", "worker")
    got = list(_loader(ds, 4))
    assert Counter(sample["cls"] for sample in got) == Counter(range(40))
    assert Counter(sample["worker"] for sample in got) == dict.fromkeys(range(4), 10)


def _with_worker(sample: dict[str, Any]) -> dict[str, Any]:
    info = get_worker_info()
    assert info is not None
    return {**sample, "worker": info.id}


@pytest.mark.parametrize(
    ("ds", "expected"),
    [
        (_ds().filter(_odd).batched(4), range(1, 62, 2)),
        (_ds().flat_map(_twice).shuffle(7).batched(4), [*range(62), *range(1000, 1062)]),
        (_ds().batched_by(lambda sample: sample["x"], 100), range(62)),
        (_ds().batched(5).shuffle(3).unbatched(), range(62)),
        (numbers((30, 12, 20), bad=[3, 40]).shuffle(10).on_error("skip").batched(4), set(range(62)) - {3, 40}),
        (numbers((30, 12, 20), hidden=True).shuffle(10, shards=1).batched(4), range(62)),
        (numbers((30, 12), hidden=True).shuffle(10).batched(4), range(42)),
        (ps.mix([_ds(), numbers((9,), name="b")], [0.8, 0.2], stop="all").batched(4), [*range(62), *range(9)]),
        (numbers((9,)).repeat(3).batched(4), [*range(9)] * 3),
    ],
)
def test_every_sample_comes_once_after_stages_that_change_the_count(ds: ps.Dataset, expected: Any) -> None:
    assert Counter(_all(_loader(ds, 3 if FULL else 2))) == Counter(expected)


def test_a_limit_of_a_stream_counts_all_workers_together() -> None:
    ds = _ds().filter(_odd).limit(10).epoch(0)
    assert _all(_loader(ds, 3)) == _all(ds)


def test_a_loop_over_an_endless_dataset_can_be_left() -> None:
    ds = numbers((9,)).repeat()
    assert _some(_loader(ds.batched(4), 2), 6) == _some(ds.batched(4), 6)


@pytest.mark.parametrize(
    ("cut", "uneven"),
    [("range", "keep"), ("step", "drop"), ("range", "pad")]
    + ([("step", "keep"), ("range", "drop"), ("step", "pad")] if FULL else []),
)
def test_workers_share_the_share_of_their_rank(
    cut: Literal["range", "step"], uneven: Literal["keep", "drop", "pad"]
) -> None:
    for rank in range(3):
        part = _ds().shard(rank, 3, cut, uneven).batched(4).epoch(1)
        shared = list(_loader(part, 2))
        assert _rows(shared) == _rows(part)
        pads = [np.asarray(batch["__pad__"]).tolist() for batch in shared if "__pad__" in batch]
        assert pads == [batch["__pad__"].tolist() for batch in part if "__pad__" in batch]
        assert len(_loader(part, 2)) == len(shared)


def test_workers_share_a_dataset_inside_a_user_defined_dataset() -> None:
    assert _rows(_loader(_Squares(_ds().epoch(0)), 2, 8)) == _rows(_loader(_Squares(_ds().epoch(0)), 0, 8))


class _Squares(IterableDataset[Any]):
    def __init__(self, ds: ps.Dataset) -> None:
        self.ds = ds

    def __iter__(self) -> Iterator[Any]:
        for sample in self.ds:
            yield {"x": sample["x"] ** 2}


def test_workers_share_the_threads_of_a_stage() -> None:
    counts = [sample["threads"] for sample in _loader(numbers((40,)).map(_threads, workers=8), 2)]
    assert max(counts) == 4
    assert max(sample["threads"] for sample in numbers((40,)).map(_threads, workers=8)) == 8


def test_a_stage_without_resources_starts_no_threads_in_a_worker() -> None:
    assert {sample["threads"] for sample in _loader(numbers((40,)).map(_threads).map(dict), 2)} == {0}


def _threads(sample: dict[str, Any]) -> dict[str, Any]:
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("penstock map")]
    return {**sample, "threads": len(workers)}


def test_an_error_in_a_worker_names_the_sample() -> None:
    items = iter(_loader(numbers((9,), bad=[3]), 2))
    with pytest.raises(Exception, match=r"made to fail.*shard-0000.*3"):
        list(items)
    list(items)  # to its end, or torch waits for its workers until it times out


# Epochs


@pytest.mark.parametrize(
    ("start", "persistent"), [("fork", False), ("spawn", True), *([("fork", True), ("spawn", False)] if FULL else [])]
)
def test_every_pass_of_a_dataloader_is_the_next_epoch(start: str, persistent: bool) -> None:
    ds = _ds().filter(bool).batched(8)
    exact = _ds().batched(8)
    for each in (exact, ds) if start == "fork" else (exact,):
        workers = 2 if FULL or start == "fork" else 1  # a spawned one imports torch
        loader = _loader(each, workers, multiprocessing_context=start, persistent_workers=persistent)
        passes = [_all(loader) for _ in range(2)]
        assert passes[0] != passes[1]
        assert Counter(passes[0]) == Counter(passes[1]) == Counter(_all(each.epoch(0)))
    assert passes == [_all(exact.epoch(epoch)) for epoch in range(2)] or start == "fork"
    assert _all(exact) == _all(exact.epoch(2)), "the dataset counts with its workers"


def test_every_pass_without_workers_is_the_next_epoch() -> None:
    loader = _loader(_ds(), 0, 8)
    assert [_all(loader), _all(loader)] == [_all(_ds().epoch(0)), _all(_ds().epoch(1))]


def test_a_pass_that_is_left_early_counts() -> None:
    loader = _loader(_ds().batched(8), 2)
    assert _some(loader, 2) == _rows(_ds().batched(8).epoch(0))[:2]
    assert _rows(loader) == _rows(_ds().batched(8).epoch(1))


def test_setting_the_seed_of_torch_again_does_not_repeat_an_epoch() -> None:
    loader = _loader(_ds().batched(8), 2)
    passes = []
    for _ in range(2):
        torch.manual_seed(0)
        passes.append(_rows(loader))
    assert passes == [_rows(_ds().batched(8).epoch(epoch)) for epoch in range(2)]


def test_two_passes_at_the_same_time_are_two_epochs() -> None:
    loader = _loader(_ds().batched(8), 2)
    first = iter(loader)
    pairs = list(zip(chain([next(first)], first), loader, strict=True))
    assert _rows(first for first, _ in pairs) == _rows(_ds().batched(8).epoch(0))
    assert _rows(second for _, second in pairs) == _rows(_ds().batched(8).epoch(1))


def test_a_run_through_a_dataloader_has_stats() -> None:
    ds = _ds().map(dict)
    assert len(_all(_loader(ds, 0))) == 62
    assert ds.stats().segments[-1].items == 62


# Loaders and tables


def test_workers_share_a_loader_and_the_rest_of_its_epoch() -> None:
    ds = _ds().batched(8)
    loader = ds.loader(1, 2)
    first = _some(loader, 1)
    dataloader = _loader(pickle.loads(pickle.dumps(loader)), 2)
    assert first + _rows(dataloader) == _rows(ds.loader(1, 2))
    assert _rows(dataloader) == _rows(ds.loader(1, 2, epoch=1))
    assert first + _rows(loader) == _rows(ds.loader(1, 2)), "pickling does not change a loader"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_begins_where_the_loader_is(workers: int) -> None:
    ds = _ds().batched(8)
    loader = ds.loader()
    items = iter(loader)
    first = next(items)["x"].tolist()
    assert [first, *_rows(_loader(loader, workers))] == _rows(ds.epoch(0))
    ended = ds.loader()
    list(ended)
    assert _rows(_loader(ended, workers)) == _rows(ds.epoch(1))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_a_fixed_epoch_comes_once(workers: int) -> None:
    ds = _ds().batched(8).epoch(3)
    loader = ds.loader()
    first = _some(loader, 1)
    dataloader = _loader(loader, workers)
    assert first + _rows(dataloader) == _rows(ds)
    loader.set_epoch(1)  # trainers do so at every epoch
    assert _rows(dataloader) == _rows(ds)


@pytest.mark.parametrize("workers", [0, 1])
def test_writing_to_tensors_does_not_change_the_table(workers: int) -> None:
    table = pa.table({"id": list(range(20))})
    loader = _loader(ps.from_arrow(table).batched(5), workers, None)
    for _ in range(2):  # what the first epoch did to its batches is not in the second's
        seen = []
        for batch in loader:
            seen += batch["id"].tolist()
            batch["id"].add_(100)
        assert seen == list(range(20)) == table["id"].to_pylist()
