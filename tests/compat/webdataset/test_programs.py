"""Programs give the same samples with Penstock's names as with webdataset, run beside each other in one process."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import webdataset
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
PEER, OURS = "webdataset", "penstock.compat.webdataset"


@pytest.mark.parametrize("name", [*PROGRAMS.SAME_ORDER, *PROGRAMS.SAME_SAMPLES])
def test_a_program_yields_the_samples_of_webdataset(name: str, shards: Path) -> None:
    expected = PROGRAMS.outcome(webdataset, name, str(shards))
    assert expected
    assert not isinstance(expected, str)
    assert PROGRAMS.outcome(ours, name, str(shards)) == expected


def differing(found: list[tuple[str, Any]], expected: list[tuple[str, Any]]) -> list[str]:
    """Return the names of the programs that differ."""
    return [one[0] for one, other in zip(found, expected, strict=True) if one != other]


if FULL:

    @pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2)])
    def test_every_program_runs_in_every_worker_as_with_webdataset(
        rank: int, world: int, shards: Path, tmp_path: Path
    ) -> None:
        for library in (PEER, OURS):
            args = (library, str(shards), str(tmp_path / library), str(rank), str(world))
            subprocess.run([sys.executable, str(Path(__file__).with_name("programs.py")), *args], check=True)
        found, expected = (pickle.loads((tmp_path / library).read_bytes()) for library in (OURS, PEER))
        assert list(expected) == PROGRAMS.LOADERS
        assert [name for loader in expected for name in differing(found[loader], expected[loader])] == []

else:

    @pytest.mark.parametrize("place", [(0, 1, 2, "fork"), (1, 2, 0, None)])
    def test_workers_and_nodes_share_the_samples_as_with_webdataset(place: Any, shards: Path) -> None:
        found, expected = (PROGRAMS.outcomes(library, str(shards), place) for library in (OURS, PEER))
        assert differing(found, expected) == []


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
    assert missing == ["LMDBCached", "MultiShardSample", "extradatasets", "info"]
