"""Samples beyond the memory limit: same results, bounded memory, and nothing left on the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from penstock.dataset.relations.spill import PiecesReader, SpillFile
from penstock.errors import StageError, StorageError

ROWS = 80_000
LIMIT = "4MB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """About 32 MB of samples in small row groups."""
    path = tmp_path_factory.mktemp("spilled") / "table"
    dice = np.random.default_rng(0)
    key = dice.permutation(ROWS)
    text = pa.array([f"{k:08d}" * 45 for k in key.tolist()])
    table = pa.table({"k": key, "half": key // 2, "text": text, "x": dice.random(ROWS)})
    ps.from_arrow(table).write_parquet(path, max_samples=4_000)
    return str(path)


MEASURED = """
import json, re, sys
import pyarrow as pa, penstock as ps
folder, verb, limit = sys.argv[1:]
VERBS = {
    "sort": lambda ds: ds.sort("k"),
    "groupby": lambda ds: ds.groupby("text").count(),
    "distinct": lambda ds: ds.distinct("text"),
    "join": lambda ds: ds.join(ds.select("k", "text").rename(other="text"), "k"),
}
def run(ds):
    return sum(map(len, VERBS[verb](ds).iter_batches(500, format="arrow")))
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1000
pool = pa.proxy_memory_pool(pa.system_memory_pool())  # returns freed memory at once: the peak is what was in use
pa.set_memory_pool(pool)
run(ps.read_parquet(folder, workers=1).limit(500))
sum(map(len, ps.read_parquet(folder, workers=1).iter_batches(500, format='arrow')))
before, reading = peak(), pool.max_memory()
seen = run(ps.read_parquet(folder, workers=1).on("local", memory=limit))
print(json.dumps([seen, peak() - before, (pool.max_memory() - reading) / 1e6]))
"""


def measured(folder: str, verb: str, limit: str) -> tuple[int, float, float]:
    """Return the number of rows, and the MB by which the process and Arrow's memory grew beyond what reading takes."""
    command = [sys.executable, "-c", MEASURED, folder, verb, limit]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # else every thread keeps its own freed memory
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    seen, grown, arrow = json.loads(done.stdout)
    return seen, grown, arrow


VERBS = ["sort", "groupby", "distinct", "join"]


@pytest.mark.parametrize("verb", VERBS if os.environ.get("PENSTOCK_FULL") else VERBS[:1])
def test_memory_stays_within_the_limit(folder: str, verb: str) -> None:
    seen, grown, arrow = measured(folder, verb, LIMIT)
    assert seen == ROWS
    assert arrow < 16  # 2 to 12; without a limit: 71 to 139
    assert grown < 40  # 8 to 27; without a limit: 78 to 123


def dataset(n: int) -> ps.Dataset:
    dice = np.random.default_rng(1)
    table = pa.table(
        {"k": dice.integers(0, n // 3, n), "x": dice.random(n), "text": [f"{i % 97:040d}" for i in range(n)]}
    )
    return ps.from_arrow(table)


@pytest.mark.parametrize(
    "verb",
    [
        lambda ds: ds.sort("text", "k", descending=[True, False]),
        lambda ds: ds.groupby("k").mean("x"),
        lambda ds: ds.groupby("k").list("x"),
        lambda ds: ds.groupby("k", "text").count(),
        lambda ds: ds.distinct("k"),
        lambda ds: ds.join(ds.rename(y="x").drop("text").limit(2000).on("local", memory="20KB"), "k"),
        lambda ds: ds.map(dict).sort("x"),
        lambda ds: ds.map(dict).groupby("k").sum("x"),
        lambda ds: ds.map(lambda s: {**s, "t": (s["k"], 1)}).distinct("t"),
    ],
    ids=["sort", "mean", "list", "count", "distinct", "join", "rows sorted", "rows grouped", "rows of tuples"],
)
def test_a_memory_limit_changes_no_result(verb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[SpillFile] = []
    init = SpillFile.__init__
    want = verb(dataset(4000)).take_all()

    def recorded(self: SpillFile) -> None:
        created.append(self)
        init(self)

    monkeypatch.setattr(SpillFile, "__init__", recorded)
    assert verb(dataset(4000).on("local", memory="30KB")).take_all() == want
    assert created


SORTING = """
import sys, time
import penstock as ps
def slow(sample):
    time.sleep(0.001)
    return sample
ds = ps.from_items([{"k": i, "text": "x" * 2000} for i in range(20000)]).map(slow).on("local", memory="100KB")
print("started", flush=True)
ds.sort("k").take_all()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_on_the_disk(signum: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SORTING], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 30
        while not has_unnamed_file(process.pid, tmp_path) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert has_unnamed_file(process.pid, tmp_path)
        process.send_signal(signum)
    assert process.returncode != 0
    assert not os.listdir(tmp_path)


def has_unnamed_file(pid: int, folder: Path) -> bool:
    """Whether a process holds an unnamed file in this folder."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            held = os.readlink(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
        if held.startswith(str(folder)) and "deleted" in held:
            return True
    return False


def test_an_error_leaves_nothing_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def failing(sample: dict[str, Any]) -> dict[str, Any]:
        return {"k": 1 // (1900 - sample["k"]), "text": sample["text"]}

    ds = ps.from_items([{"k": i, "text": "x" * 500} for i in range(2000)]).map(failing)
    with pytest.raises(StageError, match="division"):
        ds.on("local", memory="50KB").sort("k").take_all()
    assert not os.listdir(tmp_path)


def test_a_full_disk_is_an_error_that_names_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.dataset.relations.spill.os.pwrite", disk_full)
    with pytest.raises(
        StorageError, match="cannot spill samples to a temporary file: No space left on device; set TMPDIR"
    ):
        dataset(500).on("local", memory="1KB").sort("k").take_all()


def test_a_spill_file_returns_what_was_added() -> None:
    file = SpillFile()
    file.add([{"a": 1}, 2])
    file.add(list(dataset(10)))
    assert file[0] == [{"a": 1}, 2]
    assert [len(piece) for piece in file] == [2, 10]
    reader = PiecesReader(file)
    assert reader.count(0) == 12
    assert reader.key(0, 1) == "1"
