from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import penstock as ps
from penstock.errors import DataError, PlanError, StageError
from penstock.formats.tables.columns import ArrowColumns
from penstock.order import I64
from penstock.plan import (
    Block,
    ByObject,
    Columns,
    Context,
    Drop,
    Fields,
    FilterFn,
    FlatMapFn,
    Lineage,
    MapBatches,
    MapFn,
    MapTuple,
    Place,
    Rename,
    Resources,
    Select,
    Slot,
    SplitBy,
    Stage,
    ToTuple,
)


class FakeOrigin:
    """An origin whose samples have their numbers as keys."""

    def cursor(self, done: int, sub: int) -> Any:
        return (done, sub)

    def place(self, number: int) -> Place:
        return Place("s.tar", str(number))

    def slot(self, number: int) -> Slot:
        raise NotImplementedError

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        raise NotImplementedError


def _block(items: Any) -> Block:
    return Block(items, np.arange(len(items), dtype=np.uint64), Lineage(FakeOrigin(), len(items)))


def _run(stage: Stage, *items: Any) -> list[Any]:
    out = stage.run(_block(list(items)), Context(0))
    if out.lineage.error is not None:
        raise out.lineage.error
    return list(out.items)


def _numbers(*values: Any) -> list[dict[str, Any]]:
    return [{"x": value} for value in values]


@pytest.mark.parametrize(
    ("stage", "name", "description"),
    [
        (MapFn(len), "map", "map(len)"),
        (FilterFn(len), "filter", "filter(len)"),
        (FlatMapFn(len), "flat_map", "flat_map(len)"),
        (MapBatches(len), "map_batches", "map_batches(len)"),
        (MapBatches(len, 8), "map_batches", "map_batches(len, batch_size=8)"),
        (Select(("a", "b")), "select", "select('a', 'b')"),
        (Drop(("a",)), "drop", "drop('a')"),
        (Rename((("image", "jpg;png"),)), "rename", "rename(image='jpg;png')"),
        (ToTuple(("jpg;png", "cls")), "to_tuple", "to_tuple('jpg;png', 'cls')"),
        (MapTuple((len, None)), "map_tuple", "map_tuple(len, None)"),
        (SplitBy("k", 0.2, 0, True), "train_test_split", "train_test_split(test_size=0.2, by='k')[1]"),
    ],
)
def test_a_stage_is_described_as_the_call_that_created_it(stage: Stage, name: str, description: str) -> None:
    assert (stage.name, stage.describe()) == (name, description)


@pytest.mark.parametrize("kind", [MapFn, FilterFn, FlatMapFn, MapBatches])
def test_a_stage_without_a_function_is_refused(kind: Any) -> None:
    with pytest.raises(PlanError, match=r"needs a function.*, not 3"):
        kind(3)


def test_a_function_with_rng_gets_the_generator_of_the_sample() -> None:
    stage = MapFn(lambda item, rng: (item, int(rng.integers(1 << 40))))
    together = stage.run(_block(["a", "b", "c"]), Context(5)).items
    alone = [stage.run(_block(["a", "b", "c"]).keep([i], [item]), Context(5)).items[0] for i, item in enumerate("abc")]
    assert list(together) == alone
    assert len({number for _, number in alone}) == 3
    assert list(stage.run(_block(["a", "b", "c"]), Context(6)).items) != alone


def test_a_function_with_device_gets_the_device_of_the_worker() -> None:
    stage = MapFn(lambda item, device: (item, device))
    assert stage.run(_block([1]), Context(0, device="cuda:1")).items == [(1, "cuda:1")]


def test_map_batches_calls_the_function_on_columns_of_batch_size_rows() -> None:
    calls: list[list[int]] = []

    def double(batch: dict[str, Any]) -> dict[str, Any]:
        calls.append(batch["x"].tolist())
        return {"x": batch["x"] * 2}

    assert _run(MapBatches(double, 2), *_numbers(1, 2, 3)) == _numbers(2, 4, 6)
    assert calls == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (MapFn, _numbers(11, 12, 13)),
        (FilterFn, _numbers(1, 2, 3)),
        (FlatMapFn, _numbers(11, 12, 13)),
        (partial(MapBatches, batch_size=2), _numbers(11, 12, 13)),
    ],
)
def test_a_class_with_callable_instances_is_constructed_once_per_worker_and_closed(kind: Any, expected: Any) -> None:
    events: list[Any] = []

    class Add:
        def __init__(self, number: int, device: str = "none") -> None:
            self.number = number
            events.append(("constructed", device))

        def __call__(self, sample: dict[str, Any]) -> Any:
            added = {"x": sample["x"] + self.number}
            return [added] if kind is FlatMapFn else added

        def close(self) -> None:
            events.append("closed")

    stage, ctx = kind(Add, args=ByObject((10,))), Context(0, device="cpu")
    stage.prepare(ctx)
    for _ in range(2):
        assert stage.run(_block(_numbers(1, 2, 3)), ctx).items == expected
    stage.finish(ctx)
    assert events == [("constructed", "cpu"), "closed"]


def test_an_instance_gets_the_generator_of_the_sample_and_the_device() -> None:
    class Draw:
        def __call__(self, item: Any, device: str, rng: Any) -> Any:
            return item, device, int(rng.integers(1 << 40))

    def draw(item: Any, device: str, rng: Any) -> Any:
        return item, device, int(rng.integers(1 << 40))

    ctx = Context(5, device="cuda:1")
    assert (
        MapFn(Draw).run(_block(["a", "b"]), ctx).items
        == MapFn(draw).run(_block(["a", "b"]), Context(5, device="cuda:1")).items
    )


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(MapFn(str), ["0", "1"]), (FilterFn(bool), [1]), (FlatMapFn(range), [0]), (MapFn(Exception), None)],
)
def test_any_other_class_is_called_on_every_sample(stage: Stage, expected: Any) -> None:
    out = list(stage.run(_block([0, 1]), Context(0)).items)
    assert out == expected if expected is not None else [e.args for e in out] == [(0,), (1,)]


@pytest.mark.parametrize("fn", [len, dict])
def test_constructor_arguments_need_a_class_that_is_constructed(fn: Any) -> None:
    with pytest.raises(PlanError, match="fn_args and fn_kwargs are for a class"):
        MapBatches(fn, args=ByObject((1,)))


def test_a_class_that_cannot_be_constructed_is_a_stage_error_without_a_sample() -> None:
    class Broken:
        def __init__(self) -> None:
            raise OSError("no weights")

        def __call__(self, batch: Any) -> Any:
            return batch

    for stage in (MapBatches(Broken), MapFn(Broken)):
        with pytest.raises(StageError, match="OSError: no weights") as caught:
            stage.run(_block(_numbers(1)), Context(0, skip=True))
        assert caught.value.key is None


@pytest.mark.parametrize("kind", [MapFn, MapBatches])
def test_a_function_that_returns_none_is_a_stage_error(kind: Any) -> None:
    def forgets(sample: dict[str, Any]) -> None:
        sample["x"] += 1

    out = kind(forgets).run(_block(_numbers(1, 2)), Context(0))
    assert (out.items, type(out.lineage.error)) == ([], StageError)
    assert "returned None: return the new sample" in str(out.lineage.error)
    skipped = kind(lambda sample: None if sample["x"] == 2 else sample).run(
        _block(_numbers(1, 2)), Context(0, skip=True)
    )
    assert (list(skipped.items), len(skipped.lineage.skips)) == (_numbers(1), 1)


def test_map_batches_skips_only_the_row_that_fails() -> None:
    stage = MapBatches(lambda batch: {"x": [6 // x for x in batch["x"]]}, 4)
    out = stage.run(_block(_numbers(1, 0, 3)), Context(0, skip=True))
    assert out.items == _numbers(6, 2)
    assert [skip.place.key for skip in out.lineage.skips] == ["1"]


def test_rows_that_are_tried_again_get_fresh_generators() -> None:
    def draw(batch: dict[str, Any], rng: list[Any]) -> dict[str, Any]:
        drawn = [int(generator.integers(1 << 40)) for generator in rng]
        if 0 in batch["x"].tolist():
            raise ValueError("zero")
        return {"x": drawn}

    stage = MapBatches(draw, 3)
    expected = stage.run(_block(_numbers(1, 2, 3)), Context(0)).items
    out = stage.run(_block(_numbers(1, 0, 3)), Context(0, skip=True))
    assert out.items == [expected[0], expected[2]]


def test_an_error_that_only_the_batch_raises_is_not_lost() -> None:
    def needs_one(batch: dict[str, Any]) -> dict[str, Any]:
        if len(batch["x"]) > 1:
            raise MemoryError("too many rows")
        return batch

    out = MapBatches(needs_one, 3).run(_block(_numbers(1, 2, 3)), Context(0))
    assert "MemoryError: too many rows" in str(out.lineage.error)
    assert MapBatches(needs_one, 3).run(_block(_numbers(1, 2, 3)), Context(0, skip=True)).items == _numbers(1, 2, 3)


def test_rows_that_make_no_batch_are_processed_one_by_one() -> None:
    assert _run(MapBatches(lambda batch: batch, 2), {"x": 1}, {"y": 2}) == [{"x": 1}, {"y": 2}]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ({"x": [1, 2, 3], "y": [1]}, r"differ in length: \{'x': 3, 'y': 1\}"),
        ({"x": [1, 2, 3], "y": "abc"}, "column 'y' is a str"),
        ({"x": [1, 2, 3], "y": {"a": 1, "b": 2, "c": 3}}, "column 'y' is a dict"),
        ({"x": [1, 2, 3], "y": 5}, "column 'y' is an int"),
        ({"x": [1, 2, 3], "y": np.array(5)}, "column 'y' is a ndarray"),
        (pd.DataFrame({"x": [1, 2, 3]}), "returned a DataFrame: return a dict of columns"),
        (pa.table({"x": [1, 2, 3]}), "returned a Table"),
        ("abc", "returned a str"),
        (([1, 2, 3], [1, 2, 3], [1, 2, 3]), "returned a tuple"),
        ([{"x": 1}, None, {"x": 3}], "returned None"),
    ],
)
def test_what_is_no_columns_and_no_rows_is_an_error_of_map_batches(result: Any, problem: str) -> None:
    out = MapBatches(lambda batch: result, 3).run(_block(_numbers(1, 2, 3)), Context(0))
    assert out.items == []
    assert re.search(rf"{problem}.*map_batches", str(out.lineage.error))


def test_columns_may_come_from_arrow_and_pandas_and_in_any_mapping() -> None:
    for column in (pa.array([1, 2]), pa.chunked_array([[1], [2]]), pd.Series([1, 2], index=[7, 8])):
        assert _run(MapBatches(lambda _, x=column: UserDict(x=x), 2), *_numbers(0, 0)) == _numbers(1, 2)


def test_numbers_of_python_stay_numbers_of_python_among_others() -> None:
    rows = _run(MapBatches(lambda batch: batch, 3), *[{"x": number} for number in (1, 2.5, np.int64(3))])
    assert [type(row["x"]) for row in rows] == [float, float, np.float64]


@pytest.mark.parametrize("result", [None, {"x": 1}, "abc"])
def test_a_flat_map_that_returns_no_samples_is_an_error(result: Any) -> None:
    out = FlatMapFn(lambda sample: result).run(_block(_numbers(1)), Context(0))
    assert re.search(r"returned (None|a dict|a str): return a list of samples.*flat_map", str(out.lineage.error))


def test_outputs_before_a_failure_are_kept_with_retries_too() -> None:
    def count(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield sample
        raise ValueError("x")

    for retries in (0, 2):
        stage = FlatMapFn(count, resources=Resources(retries=retries))
        out = stage.run(_block(_numbers(1, 2)), Context(0, skip=True))
        assert (out.items, len(out.lineage.skips)) == (_numbers(1, 2), 2)


async def _wait(sample: Any) -> Any:
    return sample


class _Waiting:
    async def __call__(self, sample: Any) -> Any:
        return sample


@pytest.mark.parametrize("kind", [MapFn, FilterFn, FlatMapFn, MapBatches])
@pytest.mark.parametrize(
    "fn", [_wait, _Waiting, _Waiting(), partial(_wait)], ids=["function", "class", "self", "partial"]
)
def test_async_functions_are_refused(kind: Any, fn: Any) -> None:
    with pytest.raises(PlanError, match=r"needs a plain function, and .* is async"):
        kind(fn)


def test_a_function_that_returns_a_coroutine_fails() -> None:
    out = MapFn(lambda sample: _wait(sample)).run(_block(_numbers(1)), Context(0))
    assert "the function is async" in str(out.lineage.error)


def test_another_number_of_rows_is_the_fault_of_the_function() -> None:
    stage = MapBatches(lambda batch: {"x": batch["x"][:1]}, 3)
    out = stage.run(_block(_numbers(1, 2, 3)), Context(0, skip=True))
    assert (out.items, out.lineage.skips) == ([], ())
    assert isinstance(out.lineage.error, StageError)
    assert "3 rows in, 1 rows out" in str(out.lineage.error)


def test_select_keeps_its_fields_and_those_in_double_underscores() -> None:
    sample = {"__key__": "k", "a": 1, "b": 2, "c": 3}
    assert _run(Select(("c", "a")), sample) == [{"__key__": "k", "c": 3, "a": 1}]


def test_drop_removes_its_fields_and_ignores_missing_ones() -> None:
    assert _run(Drop(("a", "z")), {"a": 1, "b": 2}) == [{"b": 2}]


def test_rename_takes_the_first_alternative_that_has_a_value() -> None:
    stage = Rename((("image", "jpg;png"),))
    assert _run(stage, {"jpg": 1, "cls": 2}, {"png": 3, "cls": 4}) == [{"image": 1, "cls": 2}, {"image": 3, "cls": 4}]
    assert _run(stage, {"jpg": None, "png": 3}) == [{"image": 3}]
    assert _run(stage, {"jpg": None, "png": None}) == [{"image": None}]


def test_rename_replaces_an_existing_field_of_the_new_name() -> None:
    assert _run(Rename((("a", "b"),)), {"a": 1, "b": 2}) == [{"a": 2}]
    assert _run(Rename((("a", "b"), ("b", "a"))), {"a": 1, "b": 2}) == [{"b": 1, "a": 2}]


def test_rename_moves_typed_features_to_the_new_names() -> None:
    assert Rename((("a", "b;c"),)).features_after({"a": "A", "c": "C", "d": "D"}) == {"a": "C", "d": "D"}
    assert Rename((("a", "z"),)).features_after({"a": "A", "d": "D"}) == {"d": "D"}


def test_to_tuple_returns_the_values_in_order() -> None:
    assert _run(ToTuple(("jpg;png", "cls")), {"cls": 1, "png": 2}) == [(2, 1)]


@pytest.mark.parametrize(
    "stage", [Select(("z",)), Rename((("a", "z;y"),)), ToTuple(("z",)), SplitBy("z", 0.5, 0, True)]
)
def test_a_missing_field_is_a_data_error_with_shard_and_key(stage: Stage) -> None:
    with pytest.raises(DataError, match="the sample has no field 'z'") as caught:
        _run(stage, {"x": 1})
    assert (caught.value.shard, caught.value.key) == ("s.tar", "0")


@pytest.mark.parametrize("stage", [Select(("z",)), Drop(("z",)), Rename((("a", "z"),)), ToTuple(("z",))])
def test_an_item_without_fields_is_a_data_error(stage: Stage) -> None:
    with pytest.raises(DataError, match="needs a sample with fields, not int"):
        _run(stage, 3)


@pytest.mark.parametrize(
    "create",
    [
        lambda: Select(()),
        lambda: Drop(("",)),
        lambda: Rename((("a", ""),)),
        lambda: Rename((("a", ";"),)),
        lambda: Rename((("a", "c"), ("b", "c"))),
        lambda: ToTuple((3,)),  # type: ignore[arg-type]
        lambda: ToTuple((";",)),
    ],
)
def test_invalid_field_names_are_refused(create: Any) -> None:
    with pytest.raises(PlanError):
        create()


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (Select(("a",)), [{"a": 1}, {"a": 2}]),
        (Drop(("a",)), [{"b": 3}, {"b": 4}]),
        (Rename((("c", "a"),)), [{"c": 1, "b": 3}, {"c": 2, "b": 4}]),
    ],
)
def test_stages_on_names_keep_columns(stage: Stage, expected: list[dict[str, Any]]) -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1, 2], "b": [3, 4]})
    out = stage.run(_block(ArrowColumns([batch], np.arange(2))), Context(0))
    assert isinstance(out.items, Columns)
    assert list(out.items) == expected


def test_a_rename_with_several_alternatives_in_a_table_reads_the_rows() -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1, None], "b": [3, 4]})
    out = Rename((("c", "a;b"),)).run(_block(ArrowColumns([batch], np.arange(2))), Context(0))
    assert list(out.items) == [{"c": 1, "b": 3}, {"c": 4}]


@pytest.mark.parametrize(
    ("stage", "wanted", "unwanted"),
    [
        (Select(("a",)), "a", "b"),
        (Drop(("a",)), "b", "a"),
        (Rename((("a", "b"),)), "b", "a"),
        (ToTuple(("a;b",)), "b", "__key__"),
    ],
)
def test_a_stage_on_fields_needs_only_what_it_passes_on(stage: Stage, wanted: str, unwanted: str) -> None:
    needed = stage.needs(Fields())
    assert (needed.wants(wanted), needed.wants(unwanted)) == (True, False)


def test_a_split_by_a_field_needs_the_field() -> None:
    needed = SplitBy("k", 0.5, 0, True).needs(Fields(frozenset({"x"})))
    assert (needed.wants("k"), needed.wants("x"), needed.wants("y")) == (True, True, False)


def test_map_tuple_applies_each_function_to_its_element() -> None:
    assert _run(MapTuple((str, None)), (1, 2, 3), [4, 5]) == [("1", 2, 3), ("4", 5)]
    drawn = _run(MapTuple((None, lambda value, rng: value + int(rng.integers(1 << 40)))), (1, 0), (1, 0))
    assert len({pair[1] for pair in drawn}) == 2


@pytest.mark.parametrize(("item", "shape"), [((1,), "1 values"), ({"x": 1}, "a dict; use to_tuple first")])
def test_map_tuple_refuses_items_that_are_too_short(item: Any, shape: str) -> None:
    with pytest.raises(StageError, match=f"map_tuple has 2 functions for {shape}"):
        _run(MapTuple((str, str)), item)


def is_test(value: Any) -> bool:
    return bool(_run(SplitBy("k", 0.5, 0, True), {"k": value}))


def test_equal_values_are_on_the_same_side_of_a_split() -> None:
    for number in range(20):
        others = [float(number), np.int64(number), np.float32(number), np.array(number), torch.tensor(number)]
        assert {is_test(other) for other in (number, *others)} == {is_test(str(number).encode())}
        assert is_test(number / 8) == is_test(np.float32(number / 8))
        assert {is_test(kind([number, number + 1])) for kind in (list, tuple, np.array, torch.tensor)} == {
            is_test(f"[{number}, {number + 1}]")
        }
    long = np.arange(5000)
    assert len({is_test(np.where(long == 2500, number, long)) for number in range(20)}) == 2  # the middle counts


def test_a_split_by_text_or_integers_stays_as_it_was() -> None:
    sides = [int(is_test(value)) for value in [*range(8), *"abcdefgh", b"\xff", "\ud800"]]
    assert sides == [1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("value", [object(), {"a", "b"}])
def test_a_split_by_values_without_a_fixed_text_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"(an object|a set) has no text"):
        is_test(value)


def test_the_sides_of_a_split_by_a_field_are_disjoint_and_complete() -> None:
    samples = [{"k": f"group {number % 50}", "n": number} for number in range(200)]
    test, train = (_run(SplitBy("k", 0.3, 1, side), *samples) for side in (True, False))
    assert sorted(sample["n"] for sample in [*test, *train]) == list(range(200))
    assert not {sample["k"] for sample in test} & {sample["k"] for sample in train}
    assert test != _run(SplitBy("k", 0.3, 2, True), *samples)


def test_bytes_and_text_of_the_same_value_are_on_the_same_side() -> None:
    for number in range(20):
        sides = [_run(SplitBy("k", 0.5, 0, True), {"k": value}) for value in (f"v{number}", f"v{number}".encode())]
        assert len(sides[0]) == len(sides[1])


def test_numbers_that_came_as_pythons_leave_map_batches_as_such() -> None:
    def halved(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "half": batch["label"] // 2, "score": batch["score"] * 2}

    items = [{"label": 3, "score": 0.5, "flag": True, "np": np.int64(7)}, {"label": 4, "score": 2, "flag": None}]
    rows = [ps.from_items([item]).map_batches(halved).first() for item in items]
    assert [type(rows[0][name]) for name in ("label", "score", "flag", "np")] == [int, float, bool, np.int64]
    assert [type(rows[1][name]) for name in ("label", "score")] == [int, int]
    assert isinstance(rows[0]["half"], np.int64)  # a new field is what the function made
