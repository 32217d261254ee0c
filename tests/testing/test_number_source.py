"""Synthetic shards hold numbers, hide their counts and fail on request."""

from __future__ import annotations

import pickle

import pytest

from penstock.errors import DataError
from penstock.testing import numbers


def test_samples_know_their_shard_and_their_number() -> None:
    assert numbers([2, 0, 1]).take_all() == [
        {"shard": 0, "index": 0, "x": 0},
        {"shard": 0, "index": 1, "x": 1},
        {"shard": 2, "index": 0, "x": 2},
    ]


def test_hidden_counts_are_unknown_until_shards_are_opened() -> None:
    assert len(numbers([2, 3])) == 5
    hidden = numbers([2, 3], hidden=True)
    with pytest.raises(TypeError):
        len(hidden)
    assert hidden.count() == 5


def test_bad_numbers_cannot_be_read() -> None:
    ds = numbers([2, 3], bad=[3], name="s")
    with pytest.raises(DataError, match=r"made to fail \(shard: s-0001, key: 3\)"):
        ds.take_all()
    assert [sample["x"] for sample in ds.on_error("skip")] == [0, 1, 2, 4]


def test_a_dataset_of_numbers_is_a_value() -> None:
    ds = numbers([2, 3], bad=[3])
    assert pickle.loads(pickle.dumps(ds)) == ds == numbers((2, 3), bad=(3,))
    assert ds != numbers([2, 3])
