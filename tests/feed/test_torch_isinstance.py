from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

import penstock as ps
from penstock.feed import Epochs, torch_class, torch_isinstance
from penstock.testing import numbers


def _ds() -> ps.Dataset:
    return numbers((30, 12, 20)).shuffle(10)


def _rows(batches: Any) -> list[list[int]]:
    """Return the numbers of each batch."""
    return [np.atleast_1d(np.asarray(batch["x"])).tolist() for batch in batches]


def test_a_dataset_created_before_torch_is_imported_is_an_iterable_dataset() -> None:
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


def test_a_dataset_is_an_iterable_dataset_and_not_a_pipe() -> None:
    for each in (_ds(), _ds().loader(0, 1), _ds().to_torch()):
        assert isinstance(each, IterableDataset)
        assert not isinstance(each, IterDataPipe)
        assert _rows(DataLoader(each, batch_size=4)) == _rows(_ds().batched(4).epoch(0))


def test_isinstance_does_not_change_a_dataset() -> None:
    ds = _ds()
    other = ps.Dataset(ds.plan)
    assert isinstance(ds, IterableDataset)
    assert not isinstance(ds, dict)
    assert ds == other
    assert hash(ds) == hash(other)
    assert type(pickle.loads(pickle.dumps(ds))) is type(copy.copy(ds)) is type(ds.map(dict)) is ps.Dataset
    assert repr(ds) == repr(other)


class _Own:
    """Stands for a class of datasets."""


def test_the_derived_class_is_both_and_is_created_once() -> None:
    derived = torch_class(_Own, Epochs())
    assert issubclass(derived, _Own)
    assert issubclass(derived, IterableDataset)
    assert derived.__name__ == "_Own"
    assert torch_class(_Own, Epochs()) is derived


def test_the_epoch_count_is_shared_with_forks_once_torch_has_seen_the_class() -> None:
    epochs = Epochs()
    assert not epochs.shared
    torch_class(_Own, epochs)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert epochs.shared
        pool.apply(int)
        pool.close()
        pool.join()


def test_isinstance_opens_no_files() -> None:
    datasets = [ps.from_items([1]) for _ in range(20)]
    gc.collect()  # what earlier tests left open
    before = len(os.listdir("/dev/fd"))
    assert not any(isinstance(ds, dict) for ds in datasets)
    assert all(isinstance(ds, IterableDataset) for ds in datasets)
    assert len(os.listdir("/dev/fd")) <= before


def test_without_torch_a_dataset_has_its_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.data")
    epochs = Epochs()
    assert torch_class(_Own, epochs) is _Own
    assert not epochs.shared


# The warning about an uncut dataset


@pytest.fixture
def _group_of_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_isinstance, "_warned", False)
    for name, answer in (("is_available", True), ("is_initialized", True), ("get_rank", 1), ("get_world_size", 4)):
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)


@pytest.mark.usefixtures("_group_of_4")
def test_an_uncut_dataset_in_a_process_group_is_warned_about_once() -> None:
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
def test_a_dataset_with_a_cut_causes_no_warning(ways: Any) -> None:
    list(ways(_ds()))


@pytest.mark.usefixtures("_group_of_4")
def test_taking_and_counting_cause_no_warning() -> None:
    _ds().take(3)
    _ds().count()
    DataLoader(_ds(), batch_size=None)  # type: ignore[arg-type]
