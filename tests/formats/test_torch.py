"""Map-style datasets are read by index, and errors name the index."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock as ps
from penstock.errors import DataError, PlanError


class Pairs:
    def __init__(self, length: int, failing_index: int = -1) -> None:
        self.length, self.failing_index = length, failing_index

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.failing_index:
            raise KeyError("no such thing")
        return f"image {index}", index


def test_the_values_of_items_are_named_by_fields() -> None:
    ds = ps.from_torch(Pairs(5))
    assert len(ds) == 5
    assert ds.take_all() == [{"image": f"image {n}", "label": n} for n in range(5)]
    assert ds[3]["label"] == 3
    assert ps.from_torch(Pairs(5), fields=("x", "y")).first() == {"x": "image 0", "y": 0}
    assert "from_torch(Pairs, 5 items)" in repr(ds)


def test_the_order_is_shuffled_like_any_other() -> None:
    ds = ps.from_torch(Pairs(50), workers=3).shuffle(seed=1)
    labels = [sample["label"] for sample in ds]
    assert sorted(labels) == list(range(50))
    assert labels != sorted(labels)


def test_dicts_and_single_values_are_samples_too() -> None:
    assert ps.from_torch([{"a": 1}]).first() == {"a": 1}
    assert ps.from_torch(["text"]).first() == {"image": "text"}


def test_a_list_is_one_value_if_there_is_one_field() -> None:
    words = [["ab", "bc"], ["a"], []]
    assert ps.from_torch(words, fields=("words",)).take_all() == [{"words": item} for item in words]
    assert ps.from_torch([[1, 2]]).first() == {"image": 1, "label": 2}


def test_there_must_be_as_many_names_as_values() -> None:
    with pytest.raises(DataError, match="an item has 2 values, but there are 3 field names: a, b, c"):
        ps.from_torch(Pairs(2), fields=("a", "b", "c")).first()
    with pytest.raises(DataError, match="an item has 1 value, but there are 2 field names: a, b"):
        ps.from_torch(["text"], fields=("a", "b")).first()
    with pytest.raises(PlanError, match="a name occurs twice"):
        ps.from_torch(Pairs(2), fields=("a", "a"))


def test_a_torch_dataset_is_read() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4), torch.arange(4) * 2)
    assert [int(s["label"]) for s in ps.from_torch(data)] == [0, 2, 4, 6]


def test_the_error_of_a_failing_item_names_it_and_it_can_be_skipped() -> None:
    with pytest.raises(DataError, match=r"KeyError.*no such thing.*key: 2"):
        list(ps.from_torch(Pairs(5, failing_index=2)))
    assert len(list(ps.from_torch(Pairs(5, failing_index=2)).on_error("skip"))) == 4
    with pytest.raises(DataError, match="an item has 3 values, but there are 2 field names"):
        ps.from_torch([(1, 2, 3)]).first()


@pytest.mark.parametrize("given", [iter(()), 7])
def test_an_object_without_items_by_index_is_refused(given: Any) -> None:
    with pytest.raises(PlanError, match="__len__ and __getitem__, not"):
        ps.from_torch(given)


@pytest.mark.parametrize("fields", ["image", (), (1,)])
def test_fields_must_be_names(fields: Any) -> None:
    with pytest.raises(PlanError, match="give names"):
        ps.from_torch(Pairs(1), fields=fields)
