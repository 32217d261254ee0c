from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from penstock.errors import DataError, MissingExtra, StageError
from penstock.order import I64
from penstock.plan import Block, Context, Fields, Filter, FlatMap, Lineage, Map, Place, Scope, Slot


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


@dataclass(frozen=True)
class Inverse(Map):
    """A stage as a plugin would write it."""

    numerator: int = 6

    def function(self, ctx: Context) -> Callable[..., Any]:
        return lambda item: self.numerator // item


@dataclass(frozen=True)
class Divides(Filter):
    def function(self, ctx: Context) -> Callable[..., Any]:
        return lambda item: 6 % item == 0


@dataclass(frozen=True)
class CountUp(FlatMap):
    def function(self, ctx: Context) -> Callable[..., Any]:
        def count_up(item: int) -> Any:
            for n in range(item):
                if n == 3:
                    raise ValueError("three")
                yield n

        return count_up


def _block(*items: Any) -> Block:
    return Block(list(items), np.arange(len(items), dtype=np.uint64), Lineage(FakeOrigin(), len(items)))


def _skip_context() -> Context:
    return Context(0, skip=True)


def test_a_map_applies_its_function_to_every_item() -> None:
    assert Inverse().run(_block(1, 2, 3), Context(0)).items == [6, 3, 2]


def test_a_failing_item_ends_the_block_after_the_items_before_it() -> None:
    out = Inverse().run(_block(1, 0, 3), Context(0))
    assert (out.items, out.lineage.inputs) == ([6], 1)
    assert isinstance(out.lineage.error, StageError)
    assert str(out.lineage.error).startswith("ZeroDivisionError")
    assert (out.lineage.error.stage, out.lineage.error.shard, out.lineage.error.key) == ("inverse()", "s.tar", "1")


def test_a_failing_item_is_skipped_and_recorded_under_the_skip_policy() -> None:
    out = Inverse().run(_block(0, 1, 0, 3), _skip_context())
    assert (out.items, out.lineage.error) == ([6, 2], None)
    assert [(skip.input, skip.place.key, skip.stage) for skip in out.lineage.skips] == [
        (0, "0", "inverse"),
        (2, "2", "inverse"),
    ]
    assert [out.place(n).key for n in range(2)] == ["1", "3"]


def test_the_key_in_the_item_takes_precedence() -> None:
    out = Inverse().run(_block({"__key__": "own"}), Context(0))
    assert isinstance(out.lineage.error, StageError)
    assert out.lineage.error.key == "own"


def test_an_error_that_names_its_location_is_passed_on_unchanged() -> None:
    error = DataError("bad", "other.tar", "k")

    @dataclass(frozen=True)
    class Failing(Map):
        def function(self, ctx: Context) -> Callable[..., Any]:
            def fail(item: Any) -> Any:
                raise error

            return fail

    assert Failing().run(_block(1), Context(0)).lineage.error is error


def test_an_error_that_no_sample_caused_ends_the_block_even_under_the_skip_policy() -> None:
    @dataclass(frozen=True)
    class NeedsExtra(Map):
        def function(self, ctx: Context) -> Callable[..., Any]:
            def fail(item: Any) -> Any:
                raise MissingExtra("x", "audio")

            return fail

    assert isinstance(NeedsExtra().run(_block(1), _skip_context()).lineage.error, MissingExtra)


def test_a_filter_keeps_the_locations_of_its_items() -> None:
    out = Divides().run(_block(1, 4, 3, 0, 5), _skip_context())
    assert (out.items, [out.place(n).key for n in range(2)]) == ([1, 3], ["0", "2"])
    assert [skip.input for skip in out.lineage.skips] == [3]


def test_every_output_of_a_flat_map_has_its_own_key() -> None:
    out = CountUp().run(_block(2, 0, 3), Context(0))
    assert out.items == [0, 1, 0, 1, 2]
    assert len(set(out.keys.tolist())) == 5
    assert [out.place(n).key for n in range(5)] == ["0", "0", "2", "2", "2"]


def test_outputs_before_the_failure_of_a_flat_map_are_kept() -> None:
    out = CountUp().run(_block(2, 5, 1), Context(0))
    assert out.items == [0, 1, 0, 1, 2]
    assert isinstance(out.lineage.error, StageError)
    skipped = CountUp().run(_block(2, 5, 1), _skip_context())
    assert skipped.items == [0, 1, 0, 1, 2, 0]
    assert [skip.input for skip in skipped.lineage.skips] == [1]


def test_a_description_shows_only_arguments_that_differ_from_the_default() -> None:
    assert (Inverse().describe(), Inverse(7).describe()) == ("inverse()", "inverse(numerator=7)")


def test_by_default_a_stage_needs_every_field_and_keeps_the_count() -> None:
    assert Inverse().needs(Fields(frozenset({"x"}))) == Fields()
    assert (Inverse().length(7), Divides().length(7), Inverse().scope) == (7, None, Scope.EACH)


@pytest.mark.parametrize("stage", [Inverse(), Divides(), CountUp()])
def test_an_empty_block_stays_empty(stage: Any) -> None:
    assert stage.run(_block(), Context(0)).items == []
