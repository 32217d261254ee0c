"""A dataset is a value: immutable, readable, comparable, picklable; building one opens nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.testing import numbers, outputs


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": 2 * sample["x"]}


def keep(sample: dict[str, Any]) -> bool:
    return True


def columns(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def size(sample: dict[str, Any]) -> int:
    return 1


STEPS: dict[str, Callable[[ps.Dataset], Any]] = {
    "decode": lambda ds: ds.decode("rgb8", x="json"),
    "map": lambda ds: ds.map(double, workers=2),
    "filter": lambda ds: ds.filter(keep),
    "flat_map": lambda ds: ds.flat_map(list),
    "map_batches": lambda ds: ds.map_batches(columns, 4),
    "select": lambda ds: ds.select("x"),
    "drop": lambda ds: ds.drop("x"),
    "rename": lambda ds: ds.rename(y="x;z"),
    "to_tuple": lambda ds: ds.to_tuple("x", "y;z"),
    "map_tuple": lambda ds: ds.map_tuple(double, None),
    "batched": lambda ds: ds.batched(4, drop_last=True, collate=ps.pad()),
    "batched_by": lambda ds: ds.batched_by(size, 10),
    "unbatched": lambda ds: ds.unbatched(),
    "shuffle": lambda ds: ds.shuffle(10, shards=2),
    "late shuffle": lambda ds: ds.flat_map(list).shuffle(10),
    "limit": lambda ds: ds.limit(3),
    "skip": lambda ds: ds.skip(3),
    "stream limit": lambda ds: ds.filter(keep).limit(3),
    "stream skip": lambda ds: ds.filter(keep).skip(3),
    "repeat": lambda ds: ds.repeat(2),
    "union": lambda ds: ds.union(numbers((2,), name="b")),
    "zip": lambda ds: ds.zip(numbers((2,), name="b"), strict=False, suffix="_b"),
    "mix": lambda ds: ps.mix([ds, numbers((2,), name="b")], [1, 2], stop="all"),
    "train": lambda ds: ds.train_test_split(0.5)[0],
    "test by": lambda ds: ds.train_test_split(0.5, by="x")[1],
    "shard": lambda ds: ds.shard(1, 2, "step", "pad"),
    "split": lambda ds: ds.split(3)[1],
    "seed": lambda ds: ds.seed(3),
    "epoch": lambda ds: ds.epoch(3),
    "on_error": lambda ds: ds.on_error("skip", 0.1),
    "on": lambda ds: ds.on("serial"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_method_returns_a_new_dataset_and_leaves_the_old_one(step: str) -> None:
    ds = numbers((3,))
    before = repr(ds)
    after = STEPS[step](ds)
    assert isinstance(after, ps.Dataset)
    assert after is not ds
    assert after != ds
    assert repr(ds) == before


@pytest.mark.parametrize("step", STEPS)
def test_equal_calls_make_equal_datasets(step: str) -> None:
    one, two = STEPS[step](numbers((3,))), STEPS[step](numbers((3,)))
    assert one == two
    assert hash(one) == hash(two)
    assert one != STEPS[step](numbers((4,)))


@pytest.mark.parametrize("step", STEPS)
def test_a_dataset_can_be_pickled(step: str) -> None:
    ds = STEPS[step](numbers((3,)))
    assert pickle.loads(pickle.dumps(ds)) == ds
    assert repr(pickle.loads(pickle.dumps(ds))) == repr(ds)


def test_functions_are_compared_by_object() -> None:
    assert numbers((3,)).map(lambda s: s) != numbers((3,)).map(lambda s: s)
    assert numbers((3,)).map(double) == numbers((3,)).map(double)


def test_in_memory_sources_are_compared_by_object() -> None:
    items = [1, 2]
    ds = ps.from_items(items)
    assert ds != ps.from_items(items)
    assert ds.limit(1) == ds.limit(1)


def test_a_dataset_of_items_is_pickled_with_its_items() -> None:
    assert list(pickle.loads(pickle.dumps(ps.from_items([1, 2]).limit(1)))) == [1]


def test_the_epoch_counter_is_not_part_of_the_value() -> None:
    ds, fresh = numbers((9,)).shuffle(), numbers((9,)).shuffle()
    list(ds)
    assert ds == fresh
    assert hash(ds) == hash(fresh)
    again = pickle.loads(pickle.dumps(ds))
    assert list(again) == list(fresh)


def test_building_a_dataset_opens_no_file() -> None:
    ds = ps.read_tar("/nowhere/{0..9}.tar").shuffle().decode().batched(4).shard(0, 2)
    assert "read_tar('/nowhere/{0..9}.tar')" in repr(ds)
    with pytest.raises(ps.errors.StorageError, match="nowhere"):
        list(ds)


def test_attributes_cannot_be_added() -> None:
    with pytest.raises(AttributeError):
        numbers((3,)).note = 1


def test_a_dataset_is_true_without_being_counted() -> None:
    assert ps.from_items([])
    assert ps.read_tar("/nowhere.tar")


def test_repr_reads_like_the_code_that_built_the_dataset() -> None:
    ds = ps.read_tar("a-{0..3}.tar").shuffle(100).map(double).batched(8).seed(3).epoch(1).shard(0, 2)
    assert repr(ds) == (
        "<Dataset\n"
        "  read_tar('a-{0..3}.tar')\n"
        "    .shuffle(window=100)\n"
        "    .map(double)\n"
        "    .batched(8)\n"
        "    .seed(3)\n"
        "    .epoch(1)\n"
        "    .shard(0, 2, cut='range', uneven='keep')\n"
        ">"
    )


def test_repr_shows_the_branches_of_a_combination() -> None:
    text = repr(numbers((3,)).map(double).union(numbers((4,), name="b")).limit(2))
    for part in ("union[", "numbers([3])", ".map(double)", "numbers([4])", ".limit(2)"):
        assert part in text


def test_a_pickled_dataset_yields_the_same_samples() -> None:
    ds = numbers((9, 4)).shuffle().map(double)
    assert outputs(pickle.loads(pickle.dumps(ds))) == outputs(ds)


def test_a_dataset_cannot_be_changed() -> None:
    ds = ps.from_items([1])
    with pytest.raises(AttributeError, match="immutable"):
        ds.plan = ps.from_items([2]).plan
    assert ds.take_all() == [1]
