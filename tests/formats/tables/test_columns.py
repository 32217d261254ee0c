from __future__ import annotations

import pickle
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.formats.tables.columns import ABSENT, ArrowColumns
from penstock.plan import col, collate, join_columns, pick_rows
from penstock.plan.expressions import Compare
from penstock.testing import fingerprint


def make_batch(first: int, rows: int) -> pa.RecordBatch:
    numbers = range(first, first + rows)
    return pa.RecordBatch.from_pydict(
        {
            "x": pa.array(numbers, pa.int64()),
            "s": pa.array([None if i % 3 == 1 else f"s{i}" for i in numbers]),
            "v": pa.array([[i] * (i % 3) for i in numbers], pa.list_(pa.int16())),
            "f": pa.array([[i, -i] for i in numbers], pa.list_(pa.float32(), 2)),
        }
    )


BATCHES = [make_batch(0, 20), make_batch(20, 7), make_batch(27, 13)]
ROWS = [row for batch in BATCHES for row in ArrowColumns([batch], np.arange(batch.num_rows))]


def make_columns(numbers: list[int]) -> ArrowColumns:
    """Rows of three batches, numbered across the batches."""
    offsets = np.array([0, 20, 27, 40])
    slot = np.searchsorted(offsets, numbers, "right") - 1
    return ArrowColumns(BATCHES, np.array(numbers, np.int64) - offsets[slot], slot, row_bytes=10)


def is_same(left: Any, right: Any) -> bool:
    return bool(fingerprint(left) == fingerprint(right))


@pytest.mark.parametrize("op", ["==", "!=", "<", "<=", ">", ">="])
@pytest.mark.parametrize("value", [7, -1, 2**63 - 1, 2**63 + 5, 2**64, -(2**70)])
def test_a_condition_on_columns_takes_integers_of_any_size(op: str, value: int) -> None:
    numbers = {"signed": [7, -1, 2**63 - 1], "unsigned": [7, 2**63 + 5, 2**64 - 1], "small": [7, 0, 1]}
    kinds = {"signed": pa.int64(), "unsigned": pa.uint64(), "small": pa.uint8()}
    batch = pa.RecordBatch.from_pydict({name: pa.array(numbers[name], kind) for name, kind in kinds.items()})
    columns = ArrowColumns([batch], np.arange(3))
    for name in kinds:
        for condition in (Compare(name, op, value), col(name).isin([value, 7])):
            mask = columns.mask(condition)
            held = [condition.holds(row) for row in columns]
            assert held == (held if mask is None else mask.tolist())
        sums = columns.computed({"sum": col(name) + value})
        assert sums is None or [row["sum"] for row in sums] == [number + value for number in numbers[name]]


def test_isin_finds_a_float_in_a_column_of_32_bits_if_python_would() -> None:
    batch = pa.RecordBatch.from_pydict({"x": pa.array([0.1, 0.5], pa.float32())})
    mask = ArrowColumns([batch], np.arange(2)).mask(col("x").isin([0.1, 0.5]))
    assert mask is not None
    assert mask.tolist() == [False, True]


@pytest.mark.parametrize("seed", range(12))
def test_columns_behave_like_a_list_of_their_rows(seed: int) -> None:
    rng = random.Random(seed)
    numbers = [rng.randrange(40) for _ in range(rng.randrange(1, 30))]
    if seed % 3 == 0:
        numbers = list(range(rng.randrange(25), 40))
    columns, rows = make_columns(numbers), [ROWS[i] for i in numbers]
    assert is_same(list(columns), rows)
    assert is_same([columns[i] for i in range(-1, len(rows))], [rows[i] for i in range(-1, len(rows))])
    low, high = sorted(rng.choices(range(len(rows) + 1), k=2))
    assert is_same(list(columns[low:high]), rows[low:high])
    which = np.array(rng.choices(range(len(rows)), k=5))
    assert is_same(list(pick_rows(columns, which)), [rows[i] for i in which])
    assert is_same(columns.collate(), collate(rows))
    assert is_same(list(pickle.loads(pickle.dumps(columns[low:high]))), rows[low:high])
    cuts = [0, low, high, len(rows)]
    parts = [columns[a:b] for a, b in pairwise(cuts) if a < b]
    again = join_columns(parts)
    assert isinstance(again, ArrowColumns)
    assert is_same(list(again), rows)
    assert is_same(again.collate(), collate(rows))
    mask = columns.mask((col("x") > 11) & ~col("s").is_null())
    assert mask is not None
    assert mask.tolist() == [row["x"] > 11 and row["s"] is not None for row in rows]


def test_consecutive_rows_are_joined_without_copying() -> None:
    parts = [ArrowColumns(BATCHES[:1], np.arange(low, low + 5)) for low in (0, 5, 10)]
    joined = join_columns(parts)
    assert isinstance(joined, ArrowColumns)
    numbers = joined.collate()["x"]
    assert numbers.__array_interface__["data"][0] == BATCHES[0].column("x").buffers()[1].address
    assert not numbers.flags.writeable


def test_columns_of_different_fields_are_joined_as_rows() -> None:
    left, right = make_columns([1, 2]), make_columns([3]).renamed({"x": "x"})
    assert is_same(join_columns([left, right]), [*left, *right])
    assert join_columns([left, [{"x": 1}]])[-1] == {"x": 1}


def test_fields_are_renamed_and_dropped() -> None:
    columns = make_columns([3, 30]).renamed({"y": "x", "s": "s"}).renamed({"z": "y"})
    assert columns.names == ("z",)
    assert list(columns) == [{"z": 3}, {"z": 30}]
    assert columns.batch().to_pydict() == {"z": [3, 30]}
    assert list(columns.renamed({})) == [{}, {}]


def test_absent_rows_are_none() -> None:
    columns = ArrowColumns(BATCHES[:1], np.array([4, ABSENT, 6]))
    assert [row and row["x"] for row in columns] == [4, None, 6]
    assert columns.present() is not None
    assert np.array_equal(columns.present(), [0, 2])  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(columns))
    assert [row and row["x"] for row in again] == [4, None, 6]
    assert make_columns([1]).present() is None


def test_a_comparison_that_differs_in_arrow_is_done_in_python() -> None:
    columns = make_columns([1, 2, 3])
    assert columns.mask(col("none") == 1) is None
    assert columns.mask(col("x") == "1") is None
    assert columns.mask(col("s") < 3) is None
    assert columns.mask(col("x") == np.int64(2)) is not None


def test_a_pickle_has_only_its_own_rows() -> None:
    large = pa.RecordBatch.from_pydict({"x": np.arange(100_000)})
    columns = ArrowColumns([large], np.arange(10))
    assert len(pickle.dumps(columns)) < 2000
