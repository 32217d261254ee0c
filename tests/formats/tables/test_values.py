from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.formats.tables.values import cast_like, castable, column_of, plain, plain_type, values_of
from penstock.plan import collate
from penstock.testing import fingerprint


def test_numbers_text_and_bytes_become_python_values() -> None:
    assert values_of(pa.array([1, None], pa.int16())) == [1, None]
    assert values_of(pa.array([0.5, None], pa.float32())) == [0.5, None]
    assert values_of(pa.array([True, None])) == [True, None]
    assert values_of(pa.array(["a", None], pa.large_string())) == ["a", None]
    assert values_of(pa.array([b"a", None], pa.binary())) == [b"a", None]
    assert values_of(pa.array([b"ab", None], pa.binary(2))) == [b"ab", None]
    assert values_of(pa.nulls(2)) == [None, None]
    assert values_of(pa.array([Decimal("1.50")])) == [Decimal("1.50")]
    assert values_of(pa.array([datetime.time(1, 2)])) == [datetime.time(1, 2)]


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int32()), pa.list_(pa.int32(), 2)])
def test_lists_of_numbers_are_arrays_of_their_type(kind: pa.DataType) -> None:
    found = values_of(pa.array([[9, 9], [1, 2], None, [3, 4]], kind).slice(1))
    assert fingerprint(found) == fingerprint([np.array([1, 2], np.int32), None, np.array([3, 4], np.int32)])


def test_arrays_of_rows_are_writable_copies() -> None:
    table = pa.array([[1, 2], [3, 4]])
    first = values_of(table)[0]
    first += 1
    assert table.to_pylist() == [[1, 2], [3, 4]]


def test_a_list_with_a_missing_number_stays_a_list() -> None:
    found = values_of(pa.array([[1, None], [2, 3], None], pa.list_(pa.int64())))
    assert fingerprint(found) == fingerprint([[1, None], np.array([2, 3]), None])


def test_other_lists_stay_lists() -> None:
    assert values_of(pa.array([["a"], [], None, ["b", None]])) == [["a"], [], None, ["b", None]]
    nested = values_of(pa.array([[[1], [2, 3]], []], pa.list_(pa.list_(pa.int8()))))
    assert fingerprint(nested) == fingerprint([[np.array([1], np.int8), np.array([2, 3], np.int8)], []])


def test_structs_and_maps_are_dicts() -> None:
    structs = pa.array([{"a": 0, "b": "-"}, {"a": 1, "b": "x"}, None, {"a": None, "b": None}]).slice(1)
    assert values_of(structs) == [{"a": 1, "b": "x"}, None, {"a": None, "b": None}]
    maps = pa.array([[("z", 0)], [("k", 1), ("l", None)], None, []], pa.map_(pa.string(), pa.int64())).slice(1)
    assert values_of(maps) == [{"k": 1, "l": None}, None, {}]


def test_times_become_numpy_values_in_the_stored_unit() -> None:
    time = np.datetime64("2024-02-03T04:05:06.000000007", "ns")
    found = values_of(pa.array([time, None], pa.timestamp("ns")))
    assert found == [time, None]
    assert found[0].dtype == np.dtype("datetime64[ns]")
    utc = datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.UTC)
    assert values_of(pa.array([utc], pa.timestamp("us", "Europe/Paris"))) == [np.datetime64("2024-01-01T12:00", "us")]
    assert values_of(pa.array([datetime.date(2024, 1, 2)])) == [np.datetime64("2024-01-02", "D")]
    assert values_of(pa.array([datetime.timedelta(seconds=3)])) == [np.timedelta64(3_000_000, "us")]


def test_dictionaries_views_and_extensions_are_resolved() -> None:
    words = pa.array(["a", None, "a"])
    assert plain(words.dictionary_encode()).equals(words)
    assert values_of(words.cast(pa.string_view())) == ["a", None, "a"]
    assert values_of(pa.array([b"x"], pa.binary()).cast(pa.binary_view())) == [b"x"]
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8, dtype=np.int32).reshape(2, 2, 2))
    assert plain_type(tensor.type) == plain(tensor).type


CASES: list[tuple[list[Any], pa.DataType]] = [
    ([1, 2, 3], pa.int64()),
    ([1, None, 3], pa.int64()),
    ([1.5, 2.5, 0.0], pa.float64()),
    ([True, False, True], pa.bool_()),
    (["a", None, "c"], pa.string()),
    ([b"a", b"", b"c"], pa.binary()),
    ([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32())),
    ([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
    ([[1, 2], [], [5]], pa.list_(pa.int16())),
    ([[1, 2], None, [5, 6]], pa.list_(pa.int16())),
    ([[1, None], [1, 2], [5, 6]], pa.list_(pa.int16())),
    ([[True, False], [True, True], [False, False]], pa.list_(pa.bool_())),
    ([["a"], ["b", "c"], []], pa.list_(pa.string())),
    ([{"a": 1}, None, {"a": 2}], pa.struct([("a", pa.int64())])),
    ([0, 1, 2], pa.timestamp("ms")),
    ([0, None, 2], pa.timestamp("ms")),
    ([Decimal("1.5"), None, Decimal("2.5")], pa.decimal128(5, 2)),
]


@pytest.mark.parametrize(("values", "kind"), CASES, ids=str)
def test_a_column_equals_the_collation_of_its_rows(values: list[Any], kind: pa.DataType) -> None:
    array = pa.concat_arrays([pa.array(values[:1], kind), pa.array(values, kind)]).slice(1)
    rows = collate([{"x": value} for value in values_of(array)])["x"]
    assert fingerprint(column_of(array)) == fingerprint(rows)


def test_numbers_of_a_column_are_a_view_in_their_own_type() -> None:
    array = pa.array([1, 2, 3], pa.int32())
    found = column_of(array.slice(1))
    assert found.dtype == np.int32
    assert found.__array_interface__["data"][0] == array.buffers()[1].address + 4


def test_lists_are_reshaped_to_their_stored_shape() -> None:
    array = pa.array([[1, 2, 3, 4]] * 3)
    assert values_of(array, (2, 2))[0].shape == (2, 2)
    assert column_of(array, (2, 2)).shape == (3, 2, 2)


def test_only_types_that_hold_the_same_values_are_castable() -> None:
    assert castable(pa.large_string(), pa.string())
    assert castable(pa.large_list(pa.int8()), pa.list_(pa.int8()))
    assert castable(pa.null(), pa.int8())
    assert not castable(pa.int32(), pa.int64())
    assert not castable(pa.string(), pa.binary())
    batch = pa.RecordBatch.from_pydict({"s": pa.array(["a"], pa.large_string()), "n": pa.nulls(1)})
    schema = pa.schema([("n", pa.int8()), ("s", pa.string())])
    assert cast_like(batch, schema).schema.field("s").type == pa.string()
    assert cast_like(batch, schema).to_pylist() == [{"s": "a", "n": None}]
