"""Map-style datasets are read by number, and their failures have one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock as ps
from penstock.errors import DataError, PlanError


class Pairs:
    def __init__(self, many: int, fail: int = -1) -> None:
        self.many, self.fail = many, fail

    def __len__(self) -> int:
        return self.many

    def __getitem__(self, number: int) -> Any:
        if number == self.fail:
            raise KeyError("no such thing")
        return f"image {number}", number


def test_items_become_samples_by_name() -> None:
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


def test_a_list_is_one_value_under_one_name() -> None:
    words = [["ab", "bc"], ["a"], []]
    assert ps.from_torch(words, fields=("words",)).take_all() == [{"words": one} for one in words]
    assert ps.from_torch([[1, 2]]).first() == {"image": 1, "label": 2}


def test_as_many_names_as_values() -> None:
    with pytest.raises(DataError, match="an item has 2 values and there are names for 3: a, b, c"):
        ps.from_torch(Pairs(2), fields=("a", "b", "c")).first()
    with pytest.raises(DataError, match="an item has 1 value and there are names for 2: a, b"):
        ps.from_torch(["text"], fields=("a", "b")).first()
    with pytest.raises(PlanError, match="a name comes twice"):
        ps.from_torch(Pairs(2), fields=("a", "a"))


def test_a_torch_dataset_is_read() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4), torch.arange(4) * 2)
    assert [int(s["label"]) for s in ps.from_torch(data)] == [0, 2, 4, 6]


def test_a_failing_item_is_named_or_skipped() -> None:
    with pytest.raises(DataError, match=r"KeyError.*no such thing.*key: 2"):
        list(ps.from_torch(Pairs(5, fail=2)))
    assert len(list(ps.from_torch(Pairs(5, fail=2)).on_error("skip"))) == 4
    with pytest.raises(DataError, match="an item has 3 values and there are names for 2"):
        ps.from_torch([(1, 2, 3)]).first()


@pytest.mark.parametrize("given", [iter(()), 7])
def test_what_has_no_items_by_number_is_refused(given: Any) -> None:
    with pytest.raises(PlanError, match="items by number"):
        ps.from_torch(given)


@pytest.mark.parametrize("fields", ["image", (), (1,)])
def test_fields_are_names(fields: Any) -> None:
    with pytest.raises(PlanError, match="give names"):
        ps.from_torch(Pairs(1), fields=fields)
