"""Samples encoded as rows, and values that are refused."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import DataError, PlanError
from penstock.formats.rows.encoding import AsCsv, AsExample, AsJson, RowStage
from penstock.plan import Context


def encode(stage: RowStage, sample: Any) -> Any:
    return stage.function(Context(0))(sample)


def test_csv_stores_scalars() -> None:
    sample = {
        "i": np.int8(3),
        "f": 0.1,
        "b": True,
        "n": None,
        "t": 'a "b",\nc',
        "w": datetime.datetime(2020, 1, 2, 3),
        "z": np.datetime64("2020-01-02"),
        "x": torch.tensor(1.5),
        "d": Decimal("1E+3"),
        "__url__": "left out",
    }
    names, line = encode(AsCsv(), sample)
    assert names == ("i", "f", "b", "n", "t", "w", "z", "x", "d")
    assert line == b'3,0.1,true,,"a ""b"",\nc",2020-01-02 03:00:00,2020-01-02,1.5,1000\n'
    assert AsCsv(";").head((("a", "b;"), b"")) == b'a;"b;"\n'


def test_json_stores_nested_values_and_arrays() -> None:
    day, exact = datetime.date(2020, 1, 2), Decimal("0.10")
    sample = {"a": {"b": np.arange(3)}, "t": torch.tensor([1.5]), "s": "ü", "d": day, "n": exact}
    line = '{"a": {"b": [0, 1, 2]}, "t": [1.5], "s": "ü", "d": "2020-01-02", "n": "0.10"}\n'
    assert encode(AsJson(), sample) == line.encode()


@pytest.mark.parametrize(
    ("stage", "value", "problem"),
    [
        (AsCsv(), b"bytes", "field 'v' \\(bytes\\) cannot be stored in CSV"),
        (AsCsv(), [1], "list"),
        (AsCsv(), np.zeros(2), "ndarray"),
        (AsJson(), b"bytes", "a value of type bytes cannot be stored in JSON"),
        (AsJson(), float("nan"), "JSON"),
        (AsExample(), np.zeros((2, 2)), "tf.train.Example"),
    ],
)
def test_the_error_of_a_value_that_cannot_be_stored_names_stage_and_sample(
    stage: RowStage, value: Any, problem: str
) -> None:
    ds = ps.from_items([{"v": 1, "__key__": "first"}, {"v": value, "__key__": "second"}])
    write = {AsCsv: ds.write_csv, AsJson: ds.write_json, AsExample: ds.write_tfrecords}[type(stage)]
    with pytest.raises(DataError, match=rf"{stage.name}: .*{problem}.*key: second"):
        write("memory://encoding/none")


def test_a_delimiter_must_be_one_character() -> None:
    with pytest.raises(PlanError, match="delimiter="):
        AsCsv(",,")


@pytest.mark.parametrize("delimiter", [",", "\t"])
@pytest.mark.parametrize("value", [" ", "\t", "\f", "", None])
def test_a_row_of_blank_cells_is_a_row(value: str | None, delimiter: str, tmp_path: Path) -> None:
    for fields in (["a"], ["a", "b"]):
        rows = [dict.fromkeys(fields, text) for text in ("x", value, "y")]
        ps.from_items(rows).write_csv(tmp_path / "x.csv", delimiter=delimiter, mode="replace")
        read = ps.read_csv(tmp_path / "x.csv", delimiter=delimiter).take_all()
        assert read == [rows[0], dict.fromkeys(fields, value or ""), rows[2]]
