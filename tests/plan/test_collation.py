from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.errors import DataError
from penstock.plan import collate, column, pad, uncollate
from penstock.testing import fingerprint


def _equal(actual: Any, expected: Any) -> bool:
    return bool(fingerprint(actual) == fingerprint(expected))


def test_dicts_become_a_dict_of_columns() -> None:
    batch = collate([{"__key__": "a", "x": 1}, {"__key__": "b", "x": 2}])
    assert _equal(batch, {"__key__": ["a", "b"], "x": np.array([1, 2])})


def test_tuples_become_a_tuple_of_columns() -> None:
    assert _equal(collate([(1, "a"), (2, "b")]), (np.array([1, 2]), ["a", "b"]))


def test_other_items_become_one_column() -> None:
    assert _equal(collate([1, 2]), np.array([1, 2]))
    assert collate(["a", "b"]) == ["a", "b"]
    assert collate([[1], [2]]) == [[1], [2]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], np.array([1, 2])),
        ([1, 2.5], np.array([1.0, 2.5])),
        ([True, False], np.array([True, False])),
        ([np.bool_(True), np.bool_(False)], np.array([True, False])),
        ([np.float32(1), np.float32(2)], np.array([1, 2], np.float32)),
        ([np.zeros(2, np.uint8), np.ones(2, np.uint8)], np.array([[0, 0], [1, 1]], np.uint8)),
        ([np.array(1), np.array(2)], np.array([1, 2])),
    ],
)
def test_numbers_and_equal_arrays_are_stacked(values: list[Any], expected: Any) -> None:
    assert _equal(column(values), expected)


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b"], [b"a", b"b"], [None, None], [1, "a"], [1, None], [[1], [2]], [{"a": 1}],
        [np.zeros(2), np.zeros(3)], [np.zeros(2), 1], [np.array(["a"], object), np.array(["b"], object)],
    ],
    ids=str,
)  # fmt: skip
def test_everything_else_stays_a_list(values: list[Any]) -> None:
    assert column(values) is values


def test_decimals_keep_their_digits() -> None:
    assert list(column([Decimal("0.10"), Decimal("0.20")])) == [Decimal("0.10"), Decimal("0.20")]


def test_equal_tensors_are_stacked() -> None:
    stacked = column([torch.zeros(2), torch.ones(2)])
    assert stacked.shape == (2, 2)
    assert isinstance(column([torch.zeros(2), torch.zeros(3)]), list)


def test_differing_fields_are_an_error_that_names_them() -> None:
    with pytest.raises(DataError, match="differ in fields: __key__, cls, txt") as caught:
        collate([{"x": 1, "cls": 1}, {"__key__": "b", "x": 1, "txt": 2}])
    assert caught.value.key == "b"


@pytest.mark.parametrize("samples", [[{"x": 1}, 3], [(1, 2), (1,)]], ids=str)
def test_differing_kinds_of_samples_are_an_error(samples: list[Any]) -> None:
    with pytest.raises(DataError, match="differ in"):
        collate(samples)


def test_the_padding_mark_becomes_a_column() -> None:
    batch = collate([{"x": 1}, {"x": 1, "__pad__": True}])
    assert _equal(batch, {"x": np.array([1, 1]), "__pad__": np.array([False, True])})


def test_uncollate_reverses_collate() -> None:
    samples = [{"__key__": "a", "x": 1, "v": np.zeros(2)}, {"__key__": "b", "x": 2, "v": np.ones(2)}]
    back = uncollate(collate(samples))
    assert [(s["__key__"], s["x"], s["v"].tolist()) for s in back] == [("a", 1, [0, 0]), ("b", 2, [1, 1])]
    assert uncollate(collate([(1, "a"), (2, "b")])) == [(1, "a"), (2, "b")]
    assert uncollate([1, 2]) == [1, 2]


def test_columns_of_different_lengths_are_an_error() -> None:
    with pytest.raises(DataError, match=r"differ in length.*'a': 2.*'b': 1"):
        uncollate({"a": [1, 2], "b": [1]})


LARGE = 2**63 + 5


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([LARGE, 7], np.uint64),
        ([7, np.uint64(LARGE), np.int64(3)], np.uint64),
        ([2**64 - 1], np.uint64),
        ([LARGE, -1], object),
        ([1, 2], np.int64),
        ([1, 2.5], np.float64),
    ],
)
def test_integers_stay_exact(numbers: list[Any], dtype: Any) -> None:
    batch = collate([{"id": number} for number in numbers])["id"]
    assert batch.dtype == dtype
    assert batch.tolist() == numbers
    assert batch.dtype.char != "Q"  # which torch does not take


def test_padded_integers_stay_exact() -> None:
    batch = pad()([{"ids": [LARGE, 7]}, {"ids": [1]}])["ids"]
    assert batch.dtype == np.uint64
    assert batch.tolist() == [[LARGE, 7], [1, 0]]


def test_padding_grows_to_the_largest_shape() -> None:
    batch = ps.pad(-1)([{"ids": [1, 2, 3], "n": 3}, {"ids": [4], "n": 1}])
    assert _equal(batch, {"ids": np.array([[1, 2, 3], [4, -1, -1]]), "n": np.array([3, 1])})
    images = ps.pad()([{"i": np.ones((1, 2), np.uint8)}, {"i": np.ones((2, 1), np.uint8)}])["i"]
    assert _equal(images, np.array([[[1, 1], [0, 0]], [[1, 0], [1, 0]]], np.uint8))


def test_padding_leaves_text_and_differing_dimensions_unchanged() -> None:
    batch = ps.pad()([{"t": "ab", "v": np.ones(1)}, {"t": "c", "v": np.ones((1, 1))}])
    assert batch["t"] == ["ab", "c"]
    assert isinstance(batch["v"], list)


def test_tensors_are_padded_to_tensors() -> None:
    padded = ps.pad()([torch.ones(2), torch.ones(1)])
    assert padded.tolist() == [[1, 1], [1, 0]]


def test_decoded_audio_is_padded() -> None:
    sounds = [{"a": {"array": np.ones(n, np.float32), "sampling_rate": 8}} for n in (1, 3)]
    batch = ps.pad()(sounds)
    assert batch["a"]["array"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch["a"]["sampling_rate"].tolist() == [8, 8]
