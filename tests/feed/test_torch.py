from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

import penstock as ps
from penstock.errors import PlanError, StateError
from penstock.feed import torch_isinstance as offer
from penstock.feed.torch import TorchDataset
from penstock.testing import numbers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

FULL = os.environ.get("PENSTOCK_FULL") == "1"
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores


def _ds() -> ps.Dataset:
    return numbers((30, 12, 20)).shuffle(10)


def _rows(batches: Any) -> list[list[int]]:
    """The numbers of each batch."""
    return [np.atleast_1d(np.asarray(batch["x"])).tolist() for batch in batches]


def _all(batches: Any) -> list[int]:
    return [x for row in _rows(batches) for x in row]


def _some(batches: Any, many: int) -> list[list[int]]:
    items = iter(batches)
    return _rows(next(items) for _ in range(many))


def _loader(ds: Any, workers: int, batch_size: int | None = None, **more: Any) -> Any:
    return DataLoader(ds, batch_size=batch_size, num_workers=workers, **more)


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def _twice(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [sample, {**sample, "x": sample["x"] + 1000}]


# What torch takes it for


def test_a_dataset_made_before_torch_is_imported_is_iterable_to_torch() -> None:
    script = """
        import sys
        import penstock as ps
        ds = ps.from_items([{"x": i} for i in range(10)])
        assert "torch" not in sys.modules and ds.__class__ is ps.Dataset
        import torch
        for each in (ds, ds.batched(2).unbatched(), ds.loader(0, 1)):
            assert isinstance(each, torch.utils.data.IterableDataset)
            got = list(torch.utils.data.DataLoader(each, batch_size=4))
            assert [batch["x"].tolist() for batch in got] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], got
        assert isinstance(ds, ps.Dataset) and type(ds) is ps.Dataset
    """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(script)], check=True)


def test_a_dataset_is_iterable_to_torch_and_nothing_else() -> None:
    for each in (_ds(), _ds().loader(0, 1), _ds().to_torch()):
        assert isinstance(each, IterableDataset)
        assert not isinstance(each, IterDataPipe)
        assert _rows(_loader(each, 0, 4)) == _rows(_ds().batched(4).epoch(0))


def test_a_dataset_that_torch_has_seen_is_the_same_value() -> None:
    ds = _ds()
    other = ps.Dataset(ds.plan)
    assert isinstance(ds, IterableDataset)
    assert not isinstance(ds, dict)
    assert ds == other
    assert hash(ds) == hash(other)
    assert type(pickle.loads(pickle.dumps(ds))) is type(copy.copy(ds)) is type(ds.map(dict)) is ps.Dataset
    assert repr(ds) == repr(other)


# Workers


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("batch_size", [None, 16])
def test_batches_and_length_are_those_of_no_workers(workers: int, batch_size: int | None) -> None:
    ds = _ds().map(dict) if batch_size else _ds().map(dict).batched(16)
    alone, shared = _loader(ds.epoch(2), 0, batch_size), _loader(ds.epoch(2), workers, batch_size)
    assert _rows(shared) == _rows(alone)
    assert len(shared) == len(alone) == 4
    assert Counter(_all(shared)) == Counter(range(62))


def test_a_last_batch_that_is_dropped_is_dropped_once() -> None:
    own, torchs = _loader(_ds().batched(16, drop_last=True).epoch(0), 3), _loader(_ds().epoch(0), 3, 16, drop_last=True)
    assert _rows(own) == _rows(torchs) == _rows(_ds().batched(16, drop_last=True).epoch(0))
    assert len(own) == len(torchs) == 3


def test_more_workers_than_shards_all_have_work(tmp_path: Path) -> None:
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
def test_whatever_changes_the_count_every_sample_comes_once(ds: ps.Dataset, expected: Any) -> None:
    assert Counter(_all(_loader(ds, 3))) == Counter(expected)


def test_what_counts_the_stream_counts_it_once() -> None:
    ds = _ds().filter(_odd).limit(10).epoch(0)
    assert _all(_loader(ds, 3)) == _all(ds)


def test_a_loop_over_a_dataset_without_end_can_be_left() -> None:
    ds = numbers((9,)).repeat()
    assert _some(_loader(ds.batched(4), 2), 6) == _some(ds.batched(4), 6)


@pytest.mark.parametrize("cut", ["range", "step"])
@pytest.mark.parametrize("uneven", ["keep", "drop", "pad"])
def test_workers_share_what_their_rank_has(
    cut: Literal["range", "step"], uneven: Literal["keep", "drop", "pad"]
) -> None:
    for rank in range(3):
        part = _ds().shard(rank, 3, cut, uneven).batched(4).epoch(1)
        shared = list(_loader(part, 2))
        assert _rows(shared) == _rows(part)
        pads = [np.asarray(batch["__pad__"]).tolist() for batch in shared if "__pad__" in batch]
        assert pads == [batch["__pad__"].tolist() for batch in part if "__pad__" in batch]
        assert len(_loader(part, 2)) == len(shared)


def test_a_dataset_inside_a_dataset_of_the_users_own_is_shared_too() -> None:
    assert _rows(_loader(_Squares(_ds().epoch(0)), 2, 8)) == _rows(_loader(_Squares(_ds().epoch(0)), 0, 8))


class _Squares(IterableDataset[Any]):
    def __init__(self, ds: ps.Dataset) -> None:
        self.ds = ds

    def __iter__(self) -> Iterator[Any]:
        for sample in self.ds:
            yield {"x": sample["x"] ** 2}


def test_workers_share_the_threads_that_a_stage_asks_for() -> None:
    many = [sample["threads"] for sample in _loader(numbers((40,)).map(_threads, workers=8), 2)]
    assert max(many) == 4
    assert max(sample["threads"] for sample in numbers((40,)).map(_threads, workers=8)) == 8


def test_a_stage_that_asks_for_nothing_starts_no_threads_in_a_worker() -> None:
    assert {sample["threads"] for sample in _loader(numbers((40,)).map(_threads).map(dict), 2)} == {0}


def _threads(sample: dict[str, Any]) -> dict[str, Any]:
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("penstock map")]
    return {**sample, "threads": len(workers)}


def test_an_error_in_a_worker_names_the_sample() -> None:
    items = iter(_loader(numbers((9,), bad=[3]), 2))
    with pytest.raises(Exception, match=r"made to fail.*shard-0000.*3"):
        list(items)
    list(items)  # to its end, or torch waits for its workers in vain


# Epochs


@pytest.mark.parametrize(
    ("start", "kept"), [("fork", False), ("fork", True), ("spawn", True), *([("spawn", False)] if FULL else [])]
)
def test_every_pass_of_a_dataloader_is_the_next_epoch(start: str, kept: bool) -> None:
    ds = _ds().filter(bool).batched(8)
    exact = _ds().batched(8)
    for each in (exact, ds) if start == "fork" else (exact,):
        loader = _loader(each, 2, multiprocessing_context=start, persistent_workers=kept)
        passes = [_all(loader) for _ in range(2)]
        assert passes[0] != passes[1]
        assert Counter(passes[0]) == Counter(passes[1]) == Counter(_all(each.epoch(0)))
    assert passes == [_all(exact.epoch(epoch)) for epoch in range(2)] or start == "fork"
    assert _all(exact) == _all(exact.epoch(2)), "the dataset counts with its workers"


def test_without_workers_too() -> None:
    loader = _loader(_ds(), 0, 8)
    assert [_all(loader), _all(loader)] == [_all(_ds().epoch(0)), _all(_ds().epoch(1))]


def test_a_pass_that_is_left_is_over() -> None:
    loader = _loader(_ds().batched(8), 2)
    assert _some(loader, 2) == _rows(_ds().batched(8).epoch(0))[:2]
    assert _rows(loader) == _rows(_ds().batched(8).epoch(1))


def test_a_seed_that_is_set_again_does_not_repeat_an_epoch() -> None:
    loader = _loader(_ds().batched(8), 2)
    passes = []
    for _ in range(2):
        torch.manual_seed(0)
        passes.append(_rows(loader))
    assert passes == [_rows(_ds().batched(8).epoch(epoch)) for epoch in range(2)]


def test_two_passes_at_the_same_time_are_two_epochs() -> None:
    loader = _loader(_ds().batched(8), 2)
    pairs = list(zip(loader, loader, strict=True))
    assert _rows(first for first, _ in pairs) == _rows(_ds().batched(8).epoch(0))
    assert _rows(second for _, second in pairs) == _rows(_ds().batched(8).epoch(1))


def test_a_run_through_a_dataloader_has_stats() -> None:
    ds = _ds().map(dict)
    assert len(_all(_loader(ds, 0))) == 62
    assert ds.stats().segments[-1].items == 62


# Ranks


@pytest.fixture
def _group_of_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer, "_warned", False)
    for name, answer in (("is_available", True), ("is_initialized", True), ("get_rank", 1), ("get_world_size", 4)):
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)


@pytest.mark.usefixtures("_group_of_4")
def test_a_process_group_without_a_cut_is_warned_of_once() -> None:
    with pytest.warns(UserWarning, match=r"process group of 4.*ds\.loader\(\).*ds\.shard\(0, 1\)"):
        list(_ds())
    list(_ds())
    list(_ds().iter_batches(8))


@pytest.mark.usefixtures("_group_of_4")
@pytest.mark.parametrize(
    "ways",
    [
        lambda ds: ds.shard(0, 1),
        lambda ds: ds.shard(1, 4),
        lambda ds: ds.loader(),
        lambda ds: ds.shard(0, 1).to_torch(),
    ],
)
def test_who_has_chosen_is_not_warned(ways: Any) -> None:
    list(ways(_ds()))


@pytest.mark.usefixtures("_group_of_4")
def test_looking_is_not_warned_of() -> None:
    _ds().take(3)
    _ds().count()
    DataLoader(_ds(), batch_size=None)  # type: ignore[arg-type]


# Tensors


def test_numbers_and_arrays_become_tensors_and_the_rest_stays() -> None:
    samples = [{"__key__": str(i), "x": i, "image": np.full((2, 3), i, np.uint8), "name": f"n{i}"} for i in range(5)]
    first, last = ps.from_items(samples).iter_torch_batches(batch_size=3)
    assert first["x"].tolist() == [0, 1, 2]
    assert first["x"].dtype == torch.int64
    assert first["image"].dtype == torch.uint8
    assert first["image"].shape == (3, 2, 3)
    assert first["name"] == ["n0", "n1", "n2"]
    assert last["__key__"] == ["3", "4"]


def test_tensors_have_the_dtype_that_is_asked_for() -> None:
    ds = ps.from_items([{"x": 1, "y": 2.5, "t": "a"}] * 2)
    (batch,) = ds.iter_torch_batches(dtypes=torch.float16)
    assert (batch["x"].dtype, batch["y"].dtype, batch["t"]) == (torch.float16, torch.float16, ["a", "a"])
    (batch,) = ds.iter_torch_batches(dtypes={"x": torch.int8})
    assert (batch["x"].dtype, batch["y"].dtype) == (torch.int8, torch.float64)


def test_wrong_dtypes_are_refused_where_they_are_written_or_found() -> None:
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


def test_moving_ahead_is_over_when_the_loop_is() -> None:
    batches = numbers((2000,)).map(dict).iter_torch_batches(6, device="cpu", prefetch=2)
    next(batches)
    assert any(thread.name.startswith("penstock ahead") for thread in threading.enumerate())
    batches.close()  # type: ignore[attr-defined]
    del batches
    assert not any(thread.name.startswith("penstock") for thread in threading.enumerate())


def test_an_error_comes_through_the_thread_that_moves() -> None:
    batches = numbers((20,), bad=[13]).iter_torch_batches(6, device="cpu")
    assert _rows([next(batches), next(batches)]) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    with pytest.raises(ps.errors.DataError, match="made to fail"):
        next(batches)


def test_samples_are_joined_as_asked() -> None:
    got = list(numbers((5,)).iter_torch_batches(2, collate_fn=lambda samples: sum(s["x"] for s in samples)))
    assert got == [1, 5, 4]
    pairs = list(numbers((4,)).to_tuple("x", "index").iter_torch_batches(2))
    assert [tuple(column.tolist() for column in pair) for pair in pairs] == [([0, 1], [0, 1]), ([2, 3], [2, 3])]


def test_arrays_that_may_not_be_written_to_are_copied() -> None:
    frozen = np.arange(3)
    frozen.flags.writeable = False
    (batch,) = ps.from_items([{"x": 1}]).iter_torch_batches(collate_fn=lambda _: {"x": frozen})
    batch["x"][0] = 9
    assert frozen[0] == 0


def test_iter_batches_gives_tensors_too_and_counts_epochs() -> None:
    ds = _ds()
    assert isinstance(next(ds.iter_batches(4, format="torch"))["x"], torch.Tensor)
    assert _rows(ds.iter_batches(4, format="torch", drop_last=True)) == _rows(_ds().batched(4, True).epoch(1))
    assert _rows(ds.iter_torch_batches(4)) == _rows(_ds().batched(4).epoch(2))


# A dataset of torch's kind, with a state


def test_a_torch_dataset_is_one_and_goes_through_epochs() -> None:
    ds = _ds().batched(8)
    dataset = ds.to_torch()
    assert isinstance(dataset, TorchDataset)
    assert isinstance(dataset, IterableDataset)
    assert len(dataset) == 8
    assert [_rows(dataset), _rows(dataset)] == [_rows(ds.epoch(0)), _rows(ds.epoch(1))]
    assert _rows(_loader(dataset, 2)) == _rows(ds.epoch(2))
    with pytest.raises(TypeError, match="not known"):
        len(_ds().filter(_odd).to_torch())


@pytest.mark.parametrize("many", [0, 3, 8])
def test_a_torch_dataset_goes_on_where_its_state_stood(many: int) -> None:
    ds = _ds().batched(8)
    dataset = ds.to_torch()
    list(dataset)
    items = iter(dataset)
    before = _rows(next(items) for _ in range(many))
    other = ds.to_torch()
    other.load_state_dict(dataset.state_dict())
    assert other.state_dict() == dataset.state_dict()
    assert before + _rows(other) == _rows(ds.epoch(1))
    assert _rows(other) == _rows(ds.epoch(2))


def test_the_epoch_can_be_set_and_a_state_of_it_is_kept() -> None:
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


def test_a_loader_can_be_told_the_epoch_and_keeps_what_is_left_of_it() -> None:
    loader = _ds().batched(8).loader(0, 1)
    before = _some(loader, 3)
    loader.set_epoch(0)
    assert before + _rows(loader) == _rows(_ds().batched(8).epoch(0))
    loader.set_epoch(6)
    assert _rows(loader) == _rows(_ds().batched(8).epoch(6))


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


def test_a_loader_is_shared_by_workers_and_its_rest_too() -> None:
    ds = _ds().batched(8)
    loader = ds.loader(1, 2)
    first = _some(loader, 1)
    kept = pickle.loads(pickle.dumps(loader))
    dataloader = _loader(kept, 2)
    assert first + _rows(dataloader) == _rows(ds.loader(1, 2))
    assert _rows(dataloader) == _rows(ds.loader(1, 2, epoch=1))
    assert first + _rows(loader) == _rows(ds.loader(1, 2)), "pickling leaves a loader where it stands"


@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_of_a_table_may_be_written_to_and_the_table_stays(workers: int) -> None:
    table = pa.table({"id": list(range(20))})
    loader = _loader(ps.from_arrow(table).batched(5), workers, None)
    for _ in range(2):  # what the first epoch did to its batches is not in the second's
        seen = []
        for batch in loader:
            seen += batch["id"].tolist()
            batch["id"].add_(100)
        assert seen == list(range(20)) == table["id"].to_pylist()
