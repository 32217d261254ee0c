"""A list in memory as a dataset."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError, StageError
from penstock.formats.items import ItemsSource
from penstock.plan import EVERYTHING, ByObject


def read(items: list[Any], indices: list[int]) -> list[Any]:
    reader = ItemsSource(ByObject(items)).open()
    index = np.array(indices, np.int64)
    samples, errors = reader.locate(np.zeros_like(index), index, EVERYTHING).read()
    assert not errors
    return samples


def test_items_of_any_type_are_yielded_unchanged() -> None:
    items = [1, "two", (3, 4), None, [5]]
    assert list(ps.from_items(items)) == items


def test_items_are_read_in_the_requested_order() -> None:
    assert read(["a", "b", "c"], [2, 0, 0]) == ["c", "a", "a"]


def test_a_stage_may_change_a_sample_without_changing_the_list() -> None:
    def change_in_place(sample: dict[str, int]) -> dict[str, int]:
        sample["x"] += 1
        sample["new"] = 0
        return sample

    items = [{"x": 1}, {"x": 2}]
    ds = ps.from_items(items).map(change_in_place)
    assert [list(ds), list(ds)] == [[{"x": 2, "new": 0}, {"x": 3, "new": 0}]] * 2
    assert items == [{"x": 1}, {"x": 2}]


def test_a_subclass_of_dict_is_copied_and_keeps_its_class() -> None:
    items = [OrderedDict(x=0), OrderedDict(x=1), OrderedDict(x=2)]
    part = list(ps.from_items(items).shard(0, 2, uneven="pad"))
    assert [type(sample) for sample in part] == [OrderedDict, OrderedDict]
    assert part[1].pop("__pad__")
    assert items == [{"x": 0}, {"x": 1}, {"x": 2}]


def test_two_reads_of_one_item_do_not_share_a_dict() -> None:
    first, second = read([{"x": 1}], [0, 0])
    assert first == second
    assert first is not second


def test_any_iterable_is_accepted() -> None:
    assert list(ps.from_items(range(3))) == [0, 1, 2]
    assert list(ps.from_items(x for x in "ab")) == ["a", "b"]  # type: ignore[arg-type]
    assert list(ps.from_items(np.arange(3))) == [0, 1, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize("items", ["text", b"bytes", 3, None])
def test_a_value_that_is_not_a_list_is_refused(items: Any) -> None:
    with pytest.raises(PlanError, match="needs a list"):
        ps.from_items(items)


def test_an_empty_list_is_an_empty_dataset() -> None:
    assert list(ps.from_items([])) == []
    assert len(ps.from_items([])) == 0


def test_errors_name_the_index_or_the_key() -> None:
    def fail(sample: Any) -> Any:
        raise KeyError("x")

    with pytest.raises(StageError) as by_index:
        list(ps.from_items([3]).map(fail))
    assert (by_index.value.shard, by_index.value.key) == ("items", "0")
    with pytest.raises(StageError) as by_key:
        list(ps.from_items([{"__key__": "a/1"}]).map(fail))
    assert by_key.value.key == "a/1"


def test_shuffle_without_arguments_mixes_all_items() -> None:
    order = list(ps.from_items(range(1000)).shuffle())
    assert sorted(order) == list(range(1000))
    assert max(order[:100]) > 900


def test_the_description_of_the_source_leaves_out_the_items() -> None:
    assert ItemsSource(ByObject(["secret"] * 3)).describe() == "from_items(3 items)"
