"""``write_parquet`` writes the samples of a dataset, exactly, and resumes an interrupted run."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.tables.arrow_table import table_from
from penstock.testing import fingerprint


def samples(count: int) -> ps.Dataset:
    return ps.from_items([{"id": i, "data": os.urandom(100)} for i in range(count)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in visible(folder)}


def visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def test_files_are_numbered_and_nothing_else_is_left(tmp_path: Path) -> None:
    packed = samples(1000).write_parquet(tmp_path / "out", max_bytes=20_000)
    count = len(packed.shards)
    assert count > 3
    names = [f"{i:05d}-of-{count:05d}.parquet" for i in range(count)]
    assert sorted(os.listdir(tmp_path / "out")) == [".penstock-manifest-parquet.json", *names]
    assert packed.samples == 1000
    assert packed.nbytes == sum(path.stat().st_size for path in visible(tmp_path / "out"))
    assert all(path.stat().st_size <= 20_000 for path in visible(tmp_path / "out"))
    assert [s["id"] for s in ps.read_parquet(tmp_path / "out")] == list(range(1000))


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    ds = samples(700).shuffle()
    for number, variant in enumerate((ds, ds.on("serial"), ds.map(dict, workers=3), ds.map(dict, workers=1))):
        variant.epoch(0).write_parquet(tmp_path / str(number), max_bytes=15_000)
    assert all(contents(tmp_path / str(number)) == contents(tmp_path / "0") for number in range(4))


def test_a_file_has_at_most_max_samples(tmp_path: Path) -> None:
    samples(25).write_parquet(tmp_path, max_samples=10, compression="none")
    assert [pq.read_metadata(path).num_rows for path in visible(tmp_path)] == [10, 10, 5]


@pytest.mark.parametrize("wrong", [{"max_bytes": "much"}, {"max_bytes": 0}, {"max_samples": 0}, {"compression": "zip"}])
def test_arguments_are_checked_first(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PlanError):
        samples(1).write_parquet(tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()
    with pytest.raises(PlanError, match="give a folder"):
        samples(1).write_parquet(tmp_path / "one.parquet")


def test_a_dataset_is_not_written_where_it_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "in.parquet")
    with pytest.raises(PlanError, match="reads from"):
        ps.read_parquet(tmp_path).write_parquet(tmp_path)


def test_a_failing_sample_leaves_no_file(tmp_path: Path) -> None:
    ds = samples(500).map(lambda s: {"id": s["id"], "x": 1 // (s["id"] - 400), "data": s["data"]})
    with pytest.raises(ps.errors.StageError):
        ds.write_parquet(tmp_path, max_bytes=5_000)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".parquet")]
    with pytest.raises(StorageError, match="no file"):
        len(ps.read_parquet(tmp_path))
    with pytest.raises(PlanError, match="unfinished run of other stages"):
        ds.on_error("skip").write_parquet(tmp_path, max_bytes=5_000)
    packed = ds.on_error("skip").write_parquet(tmp_path, max_bytes=5_000, mode="replace")
    assert (packed.samples, packed.skipped) == (499, 1)


def test_an_error_names_the_field_that_cannot_be_a_column(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"field 'x' cannot be a column.*key: 3"):
        ps.from_items([{"x": i if i != 3 else object()} for i in range(9)]).write_parquet(tmp_path)
    with pytest.raises(DataError, match="x has incompatible types: int64 vs string"):
        ps.from_items([{"x": 1}, {"x": "a"}]).write_parquet(tmp_path)
    with pytest.raises(DataError, match="shapes"):
        ps.from_items([{"x": np.zeros((2, i))} for i in (1, 2)]).write_parquet(tmp_path)
    with pytest.raises(DataError, match=r"int64 and uint8|uint8 and int64"):
        ps.from_items([{"x": np.zeros(1, np.uint8)}, {"x": np.zeros(1, np.int64)}]).write_parquet(tmp_path)
    with pytest.raises(DataError, match="samples with fields"):
        ps.from_items([1, 2]).write_parquet(tmp_path)


def test_a_given_schema_is_written(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int16()), ("late", pa.string())], metadata={b"key": b"value"})
    rows = [{"id": i, "late": None if i < 30 else "here"} for i in range(40)]
    ps.from_items(rows).write_parquet(tmp_path, schema=schema, max_samples=10)
    found = pq.read_schema(tmp_path / "00000-of-00004.parquet")
    assert found.equals(schema, check_metadata=True)
    assert ps.read_parquet(tmp_path).take_all() == rows


def test_values_of_all_types_round_trip(tmp_path: Path) -> None:
    torch = __import__("torch")
    rows = [
        {
            "number": i,
            "image": np.full((2, 3, 1), i, np.uint8),
            "tensor": torch.full((2, 2), float(i)),
            "maybe": None if i % 2 else np.array([i], np.float32),
            "when": np.datetime64("2024-01-01") + i,
            "list": ["a", None],
            "nothing": None,
        }
        for i in range(5)
    ]
    ps.from_items(rows).write_parquet(tmp_path)
    want = [{**row, "tensor": row["tensor"].numpy()} for row in rows]
    assert fingerprint(ps.read_parquet(tmp_path).take_all()) == fingerprint(want)
    assert next(iter(ps.read_parquet(tmp_path).iter_batches(5)))["image"].shape == (5, 2, 3, 1)


def test_images_are_embedded_and_decoded_again(tmp_path: Path) -> None:
    image = __import__("PIL.Image").Image
    rows = [{"picture": image.new("RGB", (4, 3), (i, 2, 3)), "label": i} for i in range(3)]
    ps.from_items(rows).write_parquet(tmp_path)
    found = ps.read_parquet(tmp_path).decode().take_all()
    assert [np.asarray(s["picture"]).tolist() for s in found] == [np.asarray(row["picture"]).tolist() for row in rows]
    assert [s["label"] for s in found] == [0, 1, 2]


def test_shards_go_to_tables_and_back(tmp_path: Path) -> None:
    rows = [{"__key__": f"k{i:03d}", "jpg": os.urandom(20), "cls": str(i).encode()} for i in range(20)]
    ps.from_items(rows).write_tar(str(tmp_path / "tar"))
    ps.read_tar(str(tmp_path / "tar")).drop("__url__").write_parquet(tmp_path / "tables")
    ps.read_parquet(tmp_path / "tables").write_tar(str(tmp_path / "again"))
    assert ps.read_tar(str(tmp_path / "again")).drop("__url__").take_all() == rows


def test_a_dataset_without_samples_gives_a_file_without_rows(tmp_path: Path) -> None:
    assert ps.from_items([]).write_parquet(tmp_path / "out").shards == ("00000-of-00001.parquet",)
    schema = pa.schema([("n", pa.int64())])
    ps.from_items([]).write_parquet(tmp_path / "typed", schema=schema)
    assert pq.read_table(tmp_path / "typed").schema.equals(schema)
    assert ps.read_parquet(str(tmp_path / "out")).take_all() == []


def test_arrow_tables_round_trip_in_memory() -> None:
    table = pa.table({"a": [1, 2, 3], "b": ["x", None, "z"]})
    ds = ps.from_arrow(table)
    assert ds.to_arrow().equals(table)
    assert [batch.to_pydict() for batch in ds.iter_batches(2, format="arrow")] == [
        {"a": [1, 2], "b": ["x", None]},
        {"a": [3], "b": ["z"]},
    ]
    frames = list(ds.iter_batches(2, format="pandas", drop_last=True))
    assert [frame["a"].tolist() for frame in frames] == [[1, 2]]
    assert ds.to_pandas()["a"].tolist() == [1, 2, 3]
    assert ps.from_items([{"a": 1}, {"a": 2.5}]).to_arrow().to_pydict() == {"a": [1.0, 2.5]}
    assert ps.from_items([]).to_arrow().num_rows == 0
    assert next(iter(ds.iter_batches(3, format="torch")))["a"].tolist() == [1, 2, 3]
    assert table_from([{"a": 1}, {"b": 2}]).to_pydict() == {"a": [1, None], "b": [None, 2]}
    with pytest.raises(PlanError, match=r"pyarrow\.Table"):
        ps.from_arrow([1])


SCRIPT = """
import sys, time
import penstock as ps
import numpy as np

def row(s):
    if {slow}:
        time.sleep(0.02)
    return {{"id": s["id"], "data": np.random.default_rng(s["id"]).bytes(100)}}

ds = ps.from_items([{{"id": i}} for i in range(900)]).shuffle().map(row, workers=2).epoch(0)
print(ds.write_parquet(sys.argv[1], max_bytes=12_000).samples)
"""


def test_a_killed_run_is_resumed_and_gives_the_same_files(tmp_path: Path, warm_python: str) -> None:
    # One script for all runs, so that they write the same dataset: an argument makes the first one slow.
    script = tmp_path / "write.py"
    script.write_text(textwrap.dedent(SCRIPT.format(slow="len(sys.argv) > 2")))
    victim = subprocess.Popen([warm_python, str(script), str(tmp_path / "out"), "slow"])
    journal = tmp_path / "out/.penstock-parquet/journal.jsonl"
    until = time.monotonic() + 120
    while not (journal.exists() and b"entry" in journal.read_bytes()) and time.monotonic() < until:
        time.sleep(0.01)
    victim.send_signal(signal.SIGRTMIN)
    victim.wait()
    assert not [name for name in os.listdir(tmp_path / "out") if name.endswith(".parquet")]
    first = journal.parent / "00000.parquet"
    stamp = first.stat()
    os.utime(first, ns=(1, 1))
    for folder in ("out", "whole"):
        done = subprocess.run([warm_python, str(script), str(tmp_path / folder)], capture_output=True, text=True)
        assert done.stdout.strip() == "900", done.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert min(path.stat().st_mtime_ns for path in visible(tmp_path / "out")) == 1 < stamp.st_mtime_ns


def test_the_files_of_an_interrupted_run_of_another_dataset_are_not_used(tmp_path: Path) -> None:
    failing = samples(500).map(lambda s: {"id": 1 // (s["id"] - 400), "data": s["data"]})
    with pytest.raises(ps.errors.StageError):
        failing.write_parquet(tmp_path, max_bytes=5_000)
    assert (tmp_path / ".penstock-parquet/journal.jsonl").exists()
    with pytest.raises(PlanError, match=r"unfinished run of another source; repeat that run.*mode='replace'"):
        samples(20).write_parquet(tmp_path, max_bytes=5_000)
    samples(20).write_parquet(tmp_path, max_bytes=5_000, mode="replace")
    assert [s["id"] for s in ps.read_parquet(tmp_path)] == list(range(20))
