"""Functions that create a dataset from rows: what they read, what they refuse, and that they open nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import PlanError

ROWS = [{"id": i, "text": f"row {i}"} for i in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same rows in a file of every format."""
    ds, table = ps.from_items(ROWS), pa.Table.from_pylist(ROWS)
    ds.write_parquet(tmp_path / "parquet")
    ds.write_csv(str(tmp_path / "rows.csv"))
    ds.write_json(str(tmp_path / "rows.jsonl"))
    ds.write_tfrecords(str(tmp_path / "rows.tfrecord"))
    (tmp_path / "rows.txt").write_text("".join(f"row {i}\n" for i in range(6)))
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return tmp_path


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (ps.read_parquet, "parquet"),
        (ps.read_arrow, "rows.arrow"),
        (ps.read_csv, "rows.csv"),
        (ps.read_json, "rows.jsonl"),
    ],
)
def test_every_format_gives_the_same_rows(read: Callable[..., ps.Dataset], name: str, folder: Path) -> None:
    ds = read(folder / name)
    assert len(ds) == 6
    assert ds.take_all() == ROWS
    assert read(folder / name, workers=2).take_all() == ROWS


def test_lines_and_examples_have_fields_of_their_format(folder: Path) -> None:
    assert ps.read_text(folder / "rows.txt").take_all() == [{"text": row["text"]} for row in ROWS]
    examples = ps.read_tfrecords(folder / "rows.tfrecord", lists=["id"]).take_all()
    assert [(row["id"].tolist(), row["text"]) for row in examples] == [([i], b"row %d" % i) for i in range(6)]


@pytest.mark.parametrize(("read", "name"), [(ps.read_parquet, "parquet"), (ps.read_arrow, "rows.arrow")])
def test_columns_chooses_the_fields(read: Callable[..., ps.Dataset], name: str, folder: Path) -> None:
    assert read(folder / name, columns=["text"]).first() == {"text": "row 0"}


def test_tables_and_datasets_in_memory_are_read() -> None:
    assert ps.from_arrow(pa.Table.from_pylist(ROWS)).take_all() == ROWS
    assert ps.from_arrow(pa.RecordBatch.from_pylist(ROWS)).take_all() == ROWS
    assert ps.from_huggingface(datasets.Dataset.from_list(ROWS)).take_all() == ROWS


@pytest.mark.parametrize(
    "read", [ps.read_parquet, ps.read_arrow, ps.read_csv, ps.read_json, ps.read_text, ps.read_tfrecords]
)
def test_building_a_dataset_opens_nothing(read: Callable[..., ps.Dataset]) -> None:
    ds = read("/nowhere/rows", workers=2)
    assert repr(ds).startswith(f"<Dataset\n  {read.__name__}('/nowhere/rows'")
    assert ds == read("/nowhere/rows", workers=2)
    assert ds != read("/nowhere/others", workers=2)


@pytest.mark.parametrize(
    ("read", "problem"),
    [
        (lambda: ps.read_parquet([]), "path"),
        (lambda: ps.read_parquet("a", columns="id"), "columns='id': give a list of names"),
        (lambda: ps.read_arrow("a", columns=3), "columns=3: give a list of names"),  # type: ignore[arg-type]
        (lambda: ps.read_tfrecords("a", lists="id"), "lists='id': give a list of field names"),
        (lambda: ps.read_csv("a", workers=0), "workers=0"),
        (lambda: ps.from_arrow([1]), "list"),
        (lambda: ps.from_huggingface({"train": []}), "split=None: the dataset has the splits 'train'"),
        (lambda: ps.from_ray([1]), r"from_ray needs a ray\.data\.Dataset, not list"),
    ],
)
def test_a_wrong_argument_of_a_source_is_refused_at_the_call(read: Callable[[], Any], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        read()


def test_files_whose_names_end_in_tsv_are_separated_by_tabs(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": "x,y"}, {"a": 2, "b": "z"}]
    ps.from_items(rows).write_csv(tmp_path / "rows.tsv")
    assert ps.read_csv(tmp_path / "rows.tsv").take_all() == rows
    assert ps.read_csv(f"{tmp_path}/*.tsv").take_all() == rows
    assert list(ps.read_csv(tmp_path / "rows.tsv", delimiter=";").first()) == ["a\tb"]
