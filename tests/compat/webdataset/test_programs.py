"""Programs give the same samples with Penstock's names as with webdataset, run beside each other in one process."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader

from penstock.compat import webdataset as ours

FULL = os.environ.get("PENSTOCK_FULL") == "1"


def _load_programs() -> Any:
    spec = importlib.util.spec_from_file_location("wds_programs", Path(__file__).with_name("programs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROGRAMS = _load_programs()
SPLIT = ["clip_training", "own_shard_source", "raw_pipeline", "rows_by_shard_name", "shuffled_by_chance"]
WORKERS = (0, 1, 2, 4) if FULL else (2,)


def comparable(value: Any) -> Any:
    """Return a sample as a value that can be compared and hashed."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Image.Image):
        return "image", value.mode, value.size, value.tobytes()
    if isinstance(value, dict):
        return "dict", frozenset((name, comparable(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(comparable(item) for item in value)
    return value


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(wds: Any, name: str, shards: Path) -> list[Any]:
    program = {**PROGRAMS.SAME_ORDER, **PROGRAMS.SAME_SAMPLES}[name]
    with quietly():
        return [comparable(sample) for sample in program(wds, str(shards))]


@pytest.mark.parametrize("name", PROGRAMS.SAME_ORDER)
def test_a_program_yields_the_samples_of_webdataset_in_the_same_order(name: str, shards: Path) -> None:
    expected = run(webdataset, name, shards)
    assert expected
    assert run(ours, name, shards) == expected


@pytest.mark.parametrize("name", PROGRAMS.SAME_SAMPLES)
def test_a_program_that_shuffles_yields_the_samples_of_webdataset(name: str, shards: Path) -> None:
    expected = run(webdataset, name, shards)
    assert Counter(run(ours, name, shards)) == Counter(expected)


def loaded(wds: Any, name: str, shards: Path, workers: int, context: str | None) -> Counter[Any]:
    program = {**PROGRAMS.SAME_ORDER, **PROGRAMS.SAME_SAMPLES}[name]
    with quietly():
        loader: Any = DataLoader(
            program(wds, str(shards)), batch_size=None, num_workers=workers, multiprocessing_context=context
        )
        return Counter(comparable(sample) for sample in loader)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", SPLIT if FULL else SPLIT[-2:])
def test_the_workers_of_a_loader_share_the_samples_as_with_webdataset(name: str, workers: int, shards: Path) -> None:
    context = "fork" if workers else None
    expected = loaded(webdataset, name, shards, workers, context)
    assert loaded(ours, name, shards, workers, context) == expected


if FULL:

    def test_spawned_workers_share_the_samples_as_with_webdataset(shards: Path) -> None:
        expected = loaded(webdataset, "raw_pipeline", shards, 2, "spawn")
        assert loaded(ours, "raw_pipeline", shards, 2, "spawn") == expected


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["clip_training", "own_shard_source", "shuffled_by_chance"])
def test_two_nodes_share_the_samples_as_with_webdataset(
    name: str, rank: int, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = Counter(run(webdataset, name, shards))
    assert Counter(run(ours, name, shards)) == expected


def test_a_pipeline_goes_to_spawned_workers_with_its_length_and_its_trust(
    shards: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_TRUST_WDS", "")
    ours.trust(pickle=True)
    with ours.TarWriter(str(tmp_path / "a.tar")) as sink:
        sink.write({"__key__": "a", "pyd": {"x": 1}})
    ds = ours.WebDataset(str(tmp_path / "a.tar"), empty_check=False).decode("rgb8").with_length(1, silent=True)
    loader: Any = DataLoader(ds, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert len(loader) == 1
    assert [sample["pyd"] for sample in loader] == [{"x": 1}]


def test_with_epoch_counts_in_each_worker(shards: Path) -> None:
    ds = ours.WebDataset(str(shards / "shard-{000000..000003}.tar")).to_tuple("cls").with_epoch(10)
    with quietly():
        assert [sum(1 for _ in DataLoader(ds, None, num_workers=n)) for n in (0, 2)] == [10, 20]


def test_a_worker_without_shards_is_an_error_as_with_webdataset(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKER", "1")
    monkeypatch.setenv("NUM_WORKERS", "2")
    with pytest.raises(ValueError, match="fewer shards than workers"):
        list(ours.WebDataset(str(shards / "shard-000000.tar")))
    assert list(ours.WebDataset(str(shards / "shard-000000.tar"), empty_check=False)) == []


def test_every_public_name_of_webdataset_is_there() -> None:
    missing = [name for name in dir(webdataset) if not name.startswith("_") and not hasattr(ours, name)]
    assert missing == ["extradatasets"]
