"""``shards=n``: range k is one file, with the same bytes from any writer, and a rerun writes what is missing."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import penstock as ps
from penstock.errors import DataError, PlanError, StageError, StorageError
from penstock.formats.tar.index import Index
from penstock.landing import ranges
from penstock.plan.values import WorkerKind
from penstock.storage import S3
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, s3_server

FULL = os.environ.get("PENSTOCK_FULL") == "1"
COUNT, SHARDS = 300, 16
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test


def row(sample: dict[str, Any]) -> dict[str, Any]:
    return {"__key__": f"{sample['n']:04d}", "txt": f"{sample['n']} " * 30, "n.cls": sample["n"]}


def keep(sample: dict[str, Any]) -> bool:
    return bool(sample["n"] % 7 != 3)


def copies(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**sample, "__key__": f"{sample['__key__']}-{copy}"} for copy in range(sample["n.cls"] % 3)]


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "n.cls": [2 * n for n in batch["n.cls"]]}


def samples(workers: int | None = None, on: WorkerKind = "threads", count: int = COUNT) -> ps.Dataset:
    ds = ps.from_items([{"n": n} for n in range(count)]).shuffle()
    ds = ds.filter(keep, workers=workers, on=on).map(row, workers=workers, on=on)
    return ds.map_batches(double, 10).flat_map(copies)


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files; of an index, the number of samples: it has the time of its shard."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            found[path.name] = b"%d" % Index.from_bytes(data).samples if path.suffix == ".index" else data
    return found


def write(ds: ps.Dataset, kind: str, folder: Path, **options: Any) -> dict[str, bytes]:
    getattr(ds, f"write_{kind}")(folder, shards=SHARDS, **options)
    return files(folder)


ENGINES: dict[str, Any] = {
    "local": lambda: samples(),
    "4 threads": lambda: samples(4),
    "1 process": lambda: samples(1, "processes"),
    "3 processes": lambda: samples(3, "processes"),
}


@pytest.mark.parametrize("kind", ["tar", "parquet", "csv", "json", "tfrecords"] if FULL else ["tar", "parquet"])
def test_every_engine_writes_the_same_bytes(kind: str, tmp_path: Path) -> None:
    want = write(samples().on("serial"), kind, tmp_path / "want")
    assert len(want) == SHARDS * (2 if kind == "tar" else 1) + 1  # the index of each shard; the manifest
    for name, make in ENGINES.items():
        assert write(make(), kind, tmp_path / name) == want


def test_shard_k_holds_what_rank_k_reads(tmp_path: Path) -> None:
    ds = samples().epoch(2)
    ds.write_tar(tmp_path, shards=5)
    for k in range(5):
        got = [(s["__key__"], s["txt"]) for s in ps.read_tar(str(tmp_path / f"shard-{k:06d}.tar")).decode()]
        assert got == [(s["__key__"], s["txt"]) for s in ds.shard(k, 5, cut="range", uneven="keep")]
    assert [s["__key__"] for s in ps.read_tar(str(tmp_path))] == [s["__key__"] for s in ds]


@pytest.mark.parametrize("kind", ["tar", "parquet", "json"])
def test_limits_split_ranges_and_an_empty_range_leaves_a_gap(kind: str, tmp_path: Path) -> None:
    ds = ps.from_items([{"__key__": f"{n}", "txt": "x" * 500} for n in range(9)])
    ds = ds.filter(lambda sample: not 3 <= int(sample["__key__"]) < 6)
    write: Any = getattr(ds, f"write_{kind}")
    names = write(tmp_path / "whole", shards=3).shards
    template = "shard-00000{}.tar" if kind == "tar" else f"0000{{}}-of-00003.{'jsonl' if kind == 'json' else kind}"
    assert list(names) == [template.format(0), template.format(2)]
    limit = {"max_bytes": 1200} if kind == "json" else {"max_samples": 2}
    names = write(tmp_path / "split", shards=3, **limit).shards
    stem, dot, suffix = template.rpartition(".")
    assert list(names) == [f"{stem.format(k)}-{j}{dot}{suffix}" for k in (0, 2) for j in (0, 1)]
    read: Any = {"tar": ps.read_tar, "parquet": ps.read_parquet, "json": ps.read_json}[kind]
    for folder in ("whole", "split"):
        assert [int(sample["__key__"]) for sample in read(str(tmp_path / folder))] == [0, 1, 2, 6, 7, 8]


@pytest.mark.parametrize("kind", ["tar", "parquet", "json"])
def test_more_than_ten_files_of_a_range_are_read_in_the_order_of_writing(kind: str, tmp_path: Path) -> None:
    ds = ps.from_items([{"__key__": f"{n:02d}", "txt": "x" * 500} for n in range(24)])
    limit = {"max_bytes": 600} if kind == "json" else {"max_samples": 1}
    names = getattr(ds, f"write_{kind}")(tmp_path / "split", shards=2, **limit).shards
    assert len(names) == 24
    read: Any = {"tar": ps.read_tar, "parquet": ps.read_parquet, "json": ps.read_json}[kind]
    for place in (tmp_path / "split", f"{tmp_path}/split/*.{names[0].rpartition('.')[2]}"):
        assert [sample["__key__"][-2:] for sample in read(str(place))] == [f"{n:02d}" for n in range(24)]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_part_of_a_set_of_split_ranges_is_never_read(
    kind: str, remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = ps.from_items([{"n": n, "txt": "x" * 500} for n in range(18)])
    limit = {"max_bytes": 1200} if kind == "json" else {"max_samples": 2}
    place = f"memory://split-{kind}/" if remote else f"{tmp_path}/"
    module: Any
    module, name = (ranges, "put_file") if remote else (os, "replace")
    publish, left = getattr(module, name), 0

    def interrupted_publish(*args: Any) -> None:
        nonlocal left
        if remote or (os.path.exists(args[0]) and os.path.dirname(args[1]).endswith("/out")):
            left -= 1
            if left < 0:
                raise OSError("interrupted")
        publish(*args)

    monkeypatch.setattr(module, name, interrupted_publish)
    for calls in range(9):  # three ranges of three files
        left, url = calls, f"{place}{calls}/out"
        with pytest.raises(StorageError, match="interrupted"):
            getattr(ds, f"write_{kind}")(url, shards=3, **limit)
        left = 100
        with pytest.raises(StorageError, match="incomplete" if calls else "no files|no such"):
            getattr(ps, f"read_{kind}")(url).take_all()
        assert getattr(ds, f"write_{kind}")(url, shards=3, **limit).samples == 18
        assert [row["n"] for row in getattr(ps, f"read_{kind}")(url)] == [*range(18)]


def test_names_follow_a_pattern_and_the_compression(tmp_path: Path) -> None:
    ds = ps.from_items([{"txt": str(n)} for n in range(6)])
    packed = ds.write_tar(tmp_path / "train-%04d.tar", shards=2, compress="gz")
    assert packed.shards == ("train-0000.tar.gz", "train-0001.tar.gz")
    packed = ds.write_tar(tmp_path / "all-%d.tar", max_samples=2, shards=2)
    assert packed.shards == ("all-0-0.tar", "all-0-1.tar", "all-1-0.tar", "all-1-1.tar")
    keys = [sample["__key__"] for sample in ps.read_tar(str(tmp_path / "all-*.tar"))]
    assert keys == [f"{k:06d}-{n:09d}" for k in range(2) for n in range(3)]
    with pytest.raises(PlanError, match="give a folder"):
        ds.write_tar(tmp_path / "one.tar", shards=2)
    with pytest.raises(PlanError, match="shards=0"):
        ds.write_tar(tmp_path / "none", shards=0)


def test_the_rules_of_ranks_are_the_rules_of_writing(tmp_path: Path) -> None:
    ds = samples()
    with pytest.raises(PlanError, match="already cut"):
        ds.shard(0, 2).write_tar(tmp_path, shards=4)
    with pytest.raises(PlanError, match="needs the whole stream"):
        ds.limit(5).write_parquet(tmp_path, shards=4)


def test_append_and_replace_use_names_that_were_not_in_use(tmp_path: Path) -> None:
    ds = ps.from_items([{"txt": str(n)} for n in range(8)])
    for kind, first, second in (
        ("tar", "shard-000000.tar", "shard-000002.tar"),
        ("parquet", "00000-of-00002.parquet", "set-001-00000-of-00002.parquet"),
    ):
        writer: Any = getattr(ds, f"write_{kind}")
        assert writer(tmp_path / kind, shards=2).shards[0] == first
        assert writer(tmp_path / kind, shards=2).shards[0] == first  # complete: returned as it is
        with pytest.raises(PlanError, match="with other options"):
            writer(tmp_path / kind, shards=3)
        assert writer(tmp_path / kind, shards=2, mode="append").shards[0] == second
        rows: Any = ps.read_tar if kind == "tar" else ps.read_parquet
        texts = [sample["txt"] for sample in rows(str(tmp_path / kind))]
        assert [text.decode() if isinstance(text, bytes) else text for text in texts] == [str(n) for n in range(8)] * 2
        writer(tmp_path / kind, shards=3, mode="replace")
        assert len(list(rows(str(tmp_path / kind)))) == 8


def test_an_interrupted_run_writes_the_missing_ranges_only(tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def fail_once(sample: dict[str, Any]) -> dict[str, Any]:
        with calls.open("a") as file:
            file.write(f"{sample['n']}\n")
        if sample["n"] == 57 and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise ValueError("the disk of this node is full")
        return row(sample)

    ds = ps.from_items([{"n": n} for n in range(80)]).map(fail_once).on("serial")
    with pytest.raises(StageError, match="full"):
        ds.write_tar(tmp_path / "out", shards=8)
    assert sorted(p.name for p in (tmp_path / "out").glob("*.tar")) == [f"shard-{k:06d}.tar" for k in range(5)]
    ds.write_tar(tmp_path / "out", shards=8)
    counts = Counter(map(int, calls.read_text().split()))
    assert {n for n, times in counts.items() if times > 1} == set(range(50, 58))
    assert [sample["__key__"] for sample in ps.read_tar(str(tmp_path / "out"))] == [f"{n:04d}" for n in range(80)]
    assert not (tmp_path / "out" / ".penstock-tar").exists()


def test_a_range_whose_file_is_gone_is_written_again(tmp_path: Path) -> None:
    first = tmp_path / "first"

    def wait(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["n"] == 79 and not first.exists():
            raise ValueError("not yet")
        return row(sample)

    ds = ps.from_items([{"n": n} for n in range(80)]).map(wait).on("serial")
    with pytest.raises(StageError):
        ds.write_parquet(tmp_path / "out", shards=8)
    first.touch()
    (tmp_path / "out" / ".penstock-parquet" / "00003-of-00008.parquet").unlink()
    assert ds.write_parquet(tmp_path / "out", shards=8).samples == 80
    assert ps.read_parquet(str(tmp_path / "out")).count() == 80


def test_skipped_samples_are_counted_per_range(tmp_path: Path) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["n"] % 10 == 0:
            raise ValueError("odd")
        return row(sample)

    ds = ps.from_items([{"n": n} for n in range(40)]).map(fails)
    packed = ds.on_error("skip", limit=1).write_tar(tmp_path / "a", shards=4)  # one in each range
    assert (packed.samples, packed.skipped) == (36, 4)
    with pytest.raises(DataError, match="limit"):
        ds.on_error("skip", limit=1).write_tar(tmp_path / "b", shards=2)


def test_the_error_of_the_first_failing_range_is_raised_and_no_thread_stays(tmp_path: Path) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(f"sample {sample['n']}")

    with pytest.raises(StageError, match="sample "):
        ps.from_items([{"n": n} for n in range(400)]).map(fails, workers=2).write_tar(tmp_path, shards=8)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock writer")]


class _Model:
    """Counts how many times it is constructed."""

    def __init__(self, log: str) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_one_model_serves_all_ranges(on: WorkerKind, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ds = samples(2).map_batches(_Model, 20, fn_args=(str(log),), workers=1, on=on)
    ds.write_tar(tmp_path / "out", shards=12)
    assert len(log.read_text().split()) == 1


def test_workers_that_are_killed_do_not_change_the_files(tmp_path: Path) -> None:
    def slow(sample: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.002)
        (tmp_path / "pids" / str(os.getpid())).touch()
        return sample

    (tmp_path / "pids").mkdir()
    rng, killed, done = random.Random(5), list[int](), threading.Event()

    def kill() -> None:
        while not done.wait(0.15 + 0.1 * rng.random()) and len(killed) < (10 if FULL else 3):
            alive = [int(name) for name in os.listdir(tmp_path / "pids") if int(name) not in (os.getpid(), *killed)]
            for pid in rng.sample(alive, min(1, len(alive))):
                killed.append(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        got = write(samples().map(slow, workers=2, on="processes"), "tar", tmp_path / "out")
    finally:
        done.set()
        killer.join()
    want = write(samples().map(slow).on("serial"), "tar", tmp_path / "want")
    del got["manifest.json"], want["manifest.json"]  # they name the functions' code, and one has a pool
    assert got == want
    assert killed


@pytest.mark.parametrize("format", ["tar", "parquet"])
def test_packing_into_ranges_gives_the_same_files_on_every_engine(format: Any, tmp_path: Path) -> None:
    source = tmp_path / "photos"
    for number in range(20):
        path = source / f"class{number % 2}" / f"{number:02d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * 1000)
    planned = ps.pack(source, tmp_path / "out", format=format, shards=3, dry_run=True)
    packed = ps.pack(source, tmp_path / "out", format=format, shards=3)
    assert (packed.samples, packed.shards) == (20, planned.shards)
    assert ps.pack(source, tmp_path / "again", format=format, shards=3, engine="serial").samples == 20
    assert files(tmp_path / "out") == files(tmp_path / "again")
    read: Any = ps.read_tar if format == "tar" else ps.read_parquet
    seen = list(read(str(tmp_path / "out")))
    assert len({sample["__key__"] for sample in seen}) == 20
    assert {bytes(sample["bin"]) for sample in seen} == {bytes([number]) * 1000 for number in range(20)}
    assert "sha256" in (tmp_path / "out" / _manifest(format)).read_text()


def _manifest(format: str) -> str:
    return "manifest.json" if format == "tar" else ".penstock-manifest-parquet.json"


def test_ranges_on_s3_have_the_bytes_of_local_ones(tmp_path: Path) -> None:
    (tmp_path / "server" / "bucket").mkdir(parents=True)
    with s3_server(tmp_path / "server") as port:
        storage = S3(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY)
        for kind in ("tar", "parquet"):
            writer: Any = getattr(samples(), f"write_{kind}")
            packed = writer(f"s3://bucket/{kind}", shards=5, storage=storage)
            folder = tmp_path / "server" / "bucket" / kind
            want = write_n(kind, tmp_path / kind)
            assert {name: data for name, data in files(folder).items() if "manifest" not in name} == {
                name: data for name, data in want.items() if "manifest" not in name
            }
            manifest = json.loads((folder / _manifest(kind)).read_text())
            assert [entry["name"] for entry in manifest["shards"]] == list(packed.shards)


def write_n(kind: str, folder: Path) -> dict[str, bytes]:
    getattr(samples().on("serial"), f"write_{kind}")(folder, shards=5)
    return files(folder)
