"""The laws of resuming hold for LMDB, for single objects, and behind caches: the rest is exact, under every world."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

import penstock as ps
from penstock.dataset import Dataset
from penstock.storage import Memory
from penstock.testing import fingerprint, one_epoch_loader, outputs

COUNT = 30
OBJECTS, PACKED = (
    f"memory://{name}-{os.getpid()}" for name in ("sources", "sources-packed")
)  # runs lock their targets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two LMDB environments on disk, and the same records as objects in memory."""
    path = tmp_path_factory.mktemp("sources")
    storage = Memory()
    for part in range(2):
        with lmdb.open(str(path / f"{part}.lmdb"), map_size=1 << 22) as env, env.begin(write=True) as transaction:
            for n in range(COUNT):
                transaction.put(b"%03d" % n, b"%d-%d" % (part, n))
                with storage.put(f"{OBJECTS}/{part}/{n:03}.bin") as upload:
                    upload.write(b"%d-%d" % (part, n))
                    upload.commit()
    (path / "list.csv").write_text("".join(["path\n", *(f"{OBJECTS}/0/{n:03}.bin\n" for n in range(COUNT))]))
    ps.read_lmdb([str(path / "0.lmdb"), str(path / "1.lmdb")]).write_tar(PACKED, max_samples=7)
    yield path
    for bucket in (f"{OBJECTS}/", f"{PACKED}/"):
        for entry in list(storage.list(bucket)):
            storage.delete(entry.url)


def _twice(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**sample, "copy": copy} for copy in range(2)]


SOURCES: dict[str, Callable[[Path, Path], Dataset]] = {
    "lmdb": lambda path, out: ps.read_lmdb([str(path / "0.lmdb"), str(path / "1.lmdb")]).shuffle(9),
    "objects": lambda path, out: ps.read_files(f"{OBJECTS}/**/*.bin").shuffle(),
    "objects behind ds.cache": lambda path, out: (
        ps.read_files(f"{OBJECTS}/**/*.bin").shuffle().flat_map(_twice).cache(out / "results")
    ),
    "lmdb behind ds.cache": lambda path, out: (
        ps.read_lmdb(str(path / "0.lmdb")).shuffle().map(dict).cache(out / "results")
    ),
    "shards behind ps.Cache": lambda path, out: ps.read_tar(
        PACKED, cache=ps.Cache(out / "shards", max_bytes="50KB")
    ).shuffle(5, shards=2),
}


def _first(loader: Any, count: int) -> list[Any]:
    return [fingerprint(item) for _, item in zip(range(count), loader, strict=False)] if count else []


@pytest.mark.parametrize("name", SOURCES)
def test_a_state_restores_exactly_the_rest(name: str, folder: Path, tmp_path: Path) -> None:
    ds = SOURCES[name](folder, tmp_path)
    want = outputs(ds.epoch(0).on("serial"))
    for done in (0, 1, len(want) // 2, len(want) - 1):
        loader = one_epoch_loader(ds)
        assert _first(loader, done) == want[:done]
        restored = one_epoch_loader(ds)
        restored.load_state_dict(loader.state_dict())
        loader.close()
        assert outputs(restored) == want[done:]


@pytest.mark.parametrize("name", SOURCES)
def test_other_worlds_take_over(name: str, folder: Path, tmp_path: Path) -> None:
    ds = SOURCES[name](folder, tmp_path)
    rng, got, states = random.Random(name), Counter[Any](), None
    for world in (3, 2, 5, 1):
        following = []
        for rank in range(world):
            loader = one_epoch_loader(ds, rank, world)
            if states is not None:
                loader.load_state_dict(states=states)
            got.update(_first(loader, 10_000 if world == 1 else rng.randrange(6)))
            following.append(loader.state_dict())
            loader.close()
        states = following
    assert got == Counter(outputs(ds.epoch(0).on("serial")))
