"""Datasets are written to CSV, JSON lines and TFRecord files, and read back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import penstock as ps
from penstock.errors import DataError, PlanError
from penstock.landing import commit, row_sink
from penstock.storage import open_storage
from penstock.testing import fingerprint, numbers

ROWS = [{"id": n, "t": ["a", 'q"', "n\nl", "c,", "ü"][n % 5], "x": n / 3, "ok": n % 2 == 0} for n in range(300)]


def test_csv_and_json_round_trip(tmp_path: Path) -> None:
    ds = ps.from_items(ROWS)
    packed = ds.write_csv(str(tmp_path / "csv"), max_bytes="1KB")
    assert packed.samples == 300
    assert len(packed.shards) > 5
    assert all(path.stat().st_size <= 1000 for path in (tmp_path / "csv").iterdir())
    assert fingerprint(ps.read_csv(str(tmp_path / "csv")).take_all()) == fingerprint(ROWS)
    ds.write_json(str(tmp_path / "one.jsonl"))
    assert fingerprint(ps.read_json(str(tmp_path / "one.jsonl")).take_all()) == fingerprint(ROWS)
    frames = [pd.read_csv(tmp_path / "csv" / name) for name in packed.shards]
    assert pd.concat(frames)["t"].tolist() == [row["t"] for row in ROWS]
    assert pd.read_json(tmp_path / "one.jsonl", lines=True)["x"].tolist() == pytest.approx([row["x"] for row in ROWS])


def test_the_files_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    ds = numbers((40, 70)).shuffle(9, seed=2)
    for workers in (1, 3):
        ds.map(dict, workers=workers).write_json(str(tmp_path / str(workers)), max_bytes=500)
    one, three = (sorted((tmp_path / name).iterdir()) for name in "13")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in three]
    assert [row["x"] for row in ps.read_json(str(tmp_path / "1"))] == [row["x"] for row in ds.epoch(0)]


class Control(SimpleNamespace):
    """Directs and observes a run; it is pickled by its name, so that what it holds is not part of the code."""

    def __reduce__(self) -> str:
        return "control"


control = Control(at=None, seen=0)


def interrupting(sample: dict[str, Any]) -> dict[str, Any]:
    """Return samples unchanged and count them; interrupt the run at one sample."""
    control.seen += 1
    if sample["id"] == control.at:
        raise KeyboardInterrupt
    return sample


@pytest.mark.parametrize("method", ["write_csv", "write_json", "write_tfrecords"])
@pytest.mark.parametrize("target", ["folder", "file"])
def test_an_interrupted_run_is_resumed_and_gives_the_same_bytes(
    tmp_path: Path, method: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extensions = {"write_csv": "csv", "write_json": "jsonl", "write_tfrecords": "tfrecord"}
    name, max_bytes = (f"one.{extensions[method]}", None) if target == "file" else ("", 2_000)
    monkeypatch.setattr(row_sink, "_CHECKPOINT_BYTES", 2_000)
    rows = [{**row, "ok": number} for number, row in enumerate(ROWS)]
    control.at, control.seen = None, 0
    ds = ps.from_items(rows).map(interrupting, workers=1)
    getattr(ds, method)(str(tmp_path / "whole" / name), max_bytes)
    whole = control.seen
    for at in (120, 250, None):
        control.at, control.seen = at, 0
        if at is None:
            packed = getattr(ds, method)(str(tmp_path / "again" / name), max_bytes)
        else:
            with pytest.raises(KeyboardInterrupt):
                getattr(ds, method)(str(tmp_path / "again" / name), max_bytes)
            assert all(path.name.startswith(".") for path in (tmp_path / "again").iterdir())
    assert (whole, packed.samples) == (300, 300)
    assert control.seen < 150
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("whole", "again")
    )
    assert first == second


def test_a_checkpoint_of_another_dataset_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sink, "_CHECKPOINT_BYTES", 100)
    control.at = 200
    with pytest.raises(KeyboardInterrupt):
        ps.from_items(ROWS).map(interrupting, workers=1).write_json(str(tmp_path / "a.jsonl"))
    with pytest.raises(PlanError, match="unfinished run of another source"):
        ps.from_items(ROWS[:10]).write_json(str(tmp_path / "a.jsonl"))
    packed = ps.from_items(ROWS[:10]).write_json(str(tmp_path / "a.jsonl"), mode="replace")
    assert packed.samples == 10
    assert [row["id"] for row in ps.read_json(str(tmp_path / "a.jsonl"))] == list(range(10))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".penstock-manifest-jsonl.json", "a.jsonl"]


def test_tfrecords_round_trip(tmp_path: Path) -> None:
    samples = [{"id": n, "v": np.arange(n % 4 + 2, dtype=np.float32), "raw": b"%d" % n} for n in range(50)]
    packed = ps.from_items(samples).write_tfrecords(str(tmp_path), max_bytes=800)
    assert len(packed.shards) > 2
    assert fingerprint(ps.read_tfrecords(str(tmp_path)).take_all()) == fingerprint(samples)


def test_samples_of_a_csv_must_have_the_same_fields(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a sample has the fields a, b, but the first sample has a"):
        ps.from_items([{"a": 1}, {"a": 1, "b": 2}]).write_csv(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_failing_samples_are_skipped_and_counted(tmp_path: Path) -> None:
    ds = ps.from_items([{"a": 1}, {"a": b""}, {"a": 3}]).on_error("skip")
    packed = ds.write_csv(str(tmp_path))
    assert (packed.samples, packed.skipped) == (2, 1)
    assert ps.read_csv(str(tmp_path)).take_all() == [{"a": 1}, {"a": 3}]


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    ds = ps.from_items(ROWS[:3])
    ds.write_csv(str(tmp_path))
    with pytest.raises(PlanError, match="mode='replace' replaces"):
        ps.from_items(ROWS[:4]).write_csv(str(tmp_path))


def test_files_are_split_at_max_bytes_and_begin_with_the_header(tmp_path: Path) -> None:
    rows = [{"h": text} for text in ("aaaa", "bbbb", "cccc", "a row that is larger alone", "d")]
    packed = ps.from_items(rows).write_csv(tmp_path, max_bytes=12)
    assert packed.shards == tuple(f"0000{n}-of-00004.csv" for n in range(4))
    assert [(tmp_path / name).read_bytes() for name in packed.shards] == [
        b"h\naaaa\nbbbb\n",
        b"h\ncccc\n",
        b"h\na row that is larger alone\n",
        b"h\nd\n",
    ]
    assert packed.nbytes == sum((tmp_path / name).stat().st_size for name in packed.shards)


def test_a_set_without_rows_is_one_empty_file(tmp_path: Path) -> None:
    assert ps.from_items([]).write_csv(tmp_path).shards == ("00000-of-00001.csv",)
    assert (tmp_path / "00000-of-00001.csv").read_bytes() == b""


def test_remote_folders_get_the_same_files(tmp_path: Path) -> None:
    url = "memory://rows/out"
    local, remote = (ps.from_items(ROWS).write_json(target, max_bytes="2KB") for target in (tmp_path, url))
    storage = open_storage(url)
    assert local.shards == remote.shards
    assert all(b"".join(storage.stream(f"{url}/{n}")) == (tmp_path / n).read_bytes() for n in local.shards)


def test_conflicting_arguments_are_refused() -> None:
    with pytest.raises(PlanError, match="give a folder"):
        ps.from_items(ROWS).write_csv("out.csv", 10)
    with pytest.raises(PlanError, match="compressed files cannot be written"):
        ps.from_items(ROWS).write_csv("out.csv.gz")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("method", ["write_csv", "write_json", "write_tfrecords"])
@pytest.mark.parametrize("step", ["_publish", "write_manifest_at", "_remove_drafts"])
@pytest.mark.parametrize("late", [False, True])
def test_a_replacement_of_equal_size_that_was_killed_is_finished(
    tmp_path: Path, method: str, step: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    extensions = {"write_csv": "csv", "write_json": "jsonl", "write_tfrecords": "tfrecord"}
    path = tmp_path / f"a.{extensions[method]}"

    def write(text: str) -> None:
        getattr(ps.from_items([{"a": text}]), method)(path, mode="replace")

    write("old")
    old = path.read_bytes()
    place: Any = commit if step == "write_manifest_at" else commit.Landing
    do = getattr(place, step)

    def killed(*args: Any, **options: Any) -> None:
        if late:
            do(*args, **options)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(place, step, killed)
        patch.setattr(commit.Landing, "_leave", lambda self: None)
        with pytest.raises(Killed):
            write("new")
    write("new")
    assert path.read_bytes() == old.replace(b"old", b"new") or method == "write_tfrecords"
    assert [row["a"] for row in getattr(ps, method.replace("write", "read"))(str(path))] in (["new"], [b"new"])


def test_a_tsv_file_has_tabs(tmp_path: Path) -> None:
    ps.from_items([{"a": 1, "b": 2}]).write_csv(tmp_path / "a.tsv")
    assert (tmp_path / "a.tsv").read_text() == "a\tb\n1\t2\n"
