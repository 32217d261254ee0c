"""Datasets are written to CSV, JSON lines and TFRecord files, and read back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import penstock as ps
from penstock.errors import DataError, StorageError
from penstock.formats.rows import file_set
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


@dataclass
class Interrupting:
    """Returns samples unchanged and counts them; interrupts the run at one sample."""

    at: int | None = None
    seen: int = 0

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.seen += 1
        if sample["id"] == self.at:
            raise KeyboardInterrupt
        return sample

    def __repr__(self) -> str:
        return "Interrupting"


@pytest.mark.parametrize("method", ["write_csv", "write_json", "write_tfrecords"])
@pytest.mark.parametrize("target", ["folder", "file"])
def test_an_interrupted_run_is_resumed_and_gives_the_same_bytes(
    tmp_path: Path, method: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extensions = {"write_csv": "csv", "write_json": "jsonl", "write_tfrecords": "tfrecord"}
    name, max_bytes = (f"one.{extensions[method]}", None) if target == "file" else ("", 2_000)
    monkeypatch.setattr(file_set, "_CHECKPOINT_BYTES", 2_000)
    rows = [{**row, "ok": number} for number, row in enumerate(ROWS)]
    function = Interrupting()
    ds = ps.from_items(rows).map(function, workers=1)
    getattr(ds, method)(str(tmp_path / "whole" / name), max_bytes)
    whole = function.seen
    for at in (120, 250, None):
        function.at, function.seen = at, 0
        if at is None:
            packed = getattr(ds, method)(str(tmp_path / "again" / name), max_bytes)
        else:
            with pytest.raises(KeyboardInterrupt):
                getattr(ds, method)(str(tmp_path / "again" / name), max_bytes)
            assert all(path.name.startswith(".") for path in (tmp_path / "again").iterdir())
    assert (whole, packed.samples) == (300, 300)
    assert function.seen < 150
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / one).iterdir()} for one in ("whole", "again")
    )
    assert first == second


def test_a_checkpoint_of_another_dataset_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_set, "_CHECKPOINT_BYTES", 100)
    function = Interrupting(200)
    with pytest.raises(KeyboardInterrupt):
        ps.from_items(ROWS).map(function, workers=1).write_json(str(tmp_path / "a.jsonl"))
    packed = ps.from_items(ROWS[:10]).write_json(str(tmp_path / "a.jsonl"))
    assert packed.samples == 10
    assert [row["id"] for row in ps.read_json(str(tmp_path / "a.jsonl"))] == list(range(10))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


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
    with pytest.raises(StorageError, match=r"holds \.csv files already"):
        ds.write_csv(str(tmp_path))


def test_a_file_may_replace_the_one_that_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "a.csv")
    ps.from_items(ROWS).write_csv(path)
    ps.read_csv(path).filter(lambda row: row["ok"]).write_csv(path)
    assert ps.read_csv(path).take_all() == [row for row in ROWS if row["ok"]]
