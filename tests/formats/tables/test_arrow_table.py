"""Samples as Arrow tables, whatever their values are."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import torch

import penstock as ps
from penstock.codecs.features import ClassLabel, Value
from penstock.errors import DataError
from penstock.formats.tables.arrow_table import ArrowBatch, joined_table, pandas_frame, polars_frame, table_from
from penstock.formats.tables.columns import ArrowColumns
from penstock.formats.tables.values import SHAPE
from penstock.testing import fingerprint


def test_a_field_that_a_sample_lacks_is_null() -> None:
    assert table_from([{"a": 1}, {"b": 2}]).to_pydict() == {"a": [1, None], "b": [None, 2]}


def test_arrays_and_tensors_become_lists_that_keep_their_shape() -> None:
    table = table_from([{"grid": torch.ones(2, 3), "v": np.arange(i)} for i in range(2)])
    assert json.loads(table.schema.field("grid").metadata[SHAPE]) == [-1, 3]
    assert table.schema.field("grid").type == pa.list_(pa.float32())
    assert table.schema.field("v").metadata is None
    assert table["v"].to_pylist() == [[], [0]]


def test_a_missing_array_is_null_and_an_array_without_dimensions_a_number() -> None:
    table = table_from([{"v": np.arange(2), "n": np.array(3)}, {"v": None, "n": np.array(4)}])
    assert table.to_pydict() == {"v": [[0, 1], None], "n": [3, 4]}


def test_integers_from_2_to_the_63_on_stay_exact_in_every_table(tmp_path: Path) -> None:
    numbers = [7, 2**63 + 5, 1, None, 2**64 - 1]
    ds = ps.from_items([{"id": number} for number in numbers])
    assert ds.to_arrow().column("id").type == pa.uint64()
    assert ds.to_arrow().column("id").to_pylist() == numbers
    ds.write_parquet(str(tmp_path))
    read = ps.read_parquet(str(tmp_path))
    assert [row["id"] for row in read] == numbers
    for either in (ds, read):
        assert [row["id"] for row in either.sort("id")] == [1, 7, 2**63 + 5, 2**64 - 1, None]
        assert len(list(either.groupby("id").count())) == 5


def test_times_may_be_missing() -> None:
    table = table_from([{"t": np.datetime64("2024-01-01", "s")}, {"t": None}])
    assert table.schema.field("t").type == pa.timestamp("s")
    assert table["t"].null_count == 1


def test_images_become_files_in_the_format_of_their_field() -> None:
    image = PIL.Image.new("RGB", (4, 3))
    (row,) = table_from([{"jpg": image, "photo": image}]).to_pylist()
    assert [PIL.Image.open(io.BytesIO(row[name])).format for name in ("jpg", "photo")] == ["JPEG", "PNG"]


def test_a_feature_decides_how_a_field_is_stored() -> None:
    table = table_from([{"label": "dog", "n": 1}], {"label": ClassLabel(("cat", "dog")), "n": Value("int8")})
    assert table.to_pydict() == {"label": [1], "n": [1]}
    assert table.schema.field("n").type == pa.int8()


def test_columns_are_not_copied() -> None:
    batch = pa.record_batch({"n": np.arange(10)})
    table = table_from(ArrowColumns([batch], np.arange(2, 6)))
    assert table["n"].to_pylist() == [2, 3, 4, 5]
    assert table["n"].chunk(0).buffers()[1].address == batch.column("n").buffers()[1].address


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, object()], "field 'x' cannot be a column"),
        ([np.zeros((2, 1)), np.zeros((2, 2))], r"shapes \(2, 1\) and \(2, 2\); pad them"),
        ([np.zeros(1, np.uint8), np.zeros(1, np.int64)], "int64 and uint8; convert them to one type"),
    ],
)
def test_values_that_fit_no_column_are_named(values: list[object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        table_from([{"x": value} for value in values])


def test_items_without_fields_are_refused() -> None:
    with pytest.raises(DataError, match="needs samples with fields, not int"):
        table_from([1])


def test_runs_are_joined_into_one_table() -> None:
    columns = ArrowColumns([pa.record_batch({"a": [1, 2]})], np.arange(2))
    assert joined_table([[{"a": 0}], columns, [{"b": 3.5}]]).to_pydict() == {
        "a": [0, 1, 2, None],
        "b": [None, None, None, 3.5],
    }
    assert joined_table([columns[:0]]).schema.names == ["a"]
    assert joined_table([]).num_rows == 0
    with pytest.raises(DataError, match="do not have the same columns"):
        joined_table([[{"a": 1}], [{"a": "x"}]])


def test_tables_become_data_frames() -> None:
    table = table_from([{"a": 1, "b": "x"}, {"a": 2, "b": None}])
    assert pandas_frame(table)["a"].tolist() == [1, 2]
    assert polars_frame(table).to_dicts() == table.to_pylist()
    assert ArrowBatch()([{"a": 1}]).to_pydict() == {"a": [1]}
    assert ArrowBatch("pandas")([{"a": 1}])["a"].tolist() == [1]


def test_arrays_whose_first_length_differs_are_written_and_read_back(tmp_path: Path) -> None:
    boxes = [np.arange(4 * n, dtype=np.float32).reshape(n, 4) for n in (1, 0, 3, 3)]
    ps.from_items([{"boxes": array} for array in boxes]).write_parquet(str(tmp_path / "t"))
    back = ps.read_parquet(str(tmp_path / "t"))
    assert [fingerprint(sample["boxes"]) for sample in back] == [fingerprint(array) for array in boxes]
    batch = back.skip(2).batched(2).first()["boxes"]
    assert fingerprint(np.asarray(batch)) == fingerprint(np.stack(boxes[2:]))
