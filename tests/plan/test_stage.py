from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from penstock.errors import DataError, MissingExtra, StageError
from penstock.order import I64
from penstock.plan import Block, Context, Fields, Filter, FlatMap, Map, Place, Scope, Slot


class Where:
    """An origin whose inputs are named by their numbers."""

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
class Down(FlatMap):
    def function(self, ctx: Context) -> Callable[..., Any]:
        def down(item: int) -> Any:
            for n in range(item):
                if n == 3:
                    raise ValueError("three")
                yield n

        return down


def _block(*items: Any) -> Block:
    return Block(list(items), np.arange(len(items), dtype=np.uint64), Where(), len(items))


def _skipping() -> Context:
    return Context(0, skip=True)


def test_a_map_is_one_function() -> None:
    assert Inverse().run(_block(1, 2, 3), Context(0)).items == [6, 3, 2]


def test_a_failing_item_ends_the_block_after_what_came_before() -> None:
    out = Inverse().run(_block(1, 0, 3), Context(0))
    assert (out.items, out.inputs) == ([6], 1)
    assert isinstance(out.error, StageError)
    assert str(out.error).startswith("ZeroDivisionError")
    assert (out.error.stage, out.error.shard, out.error.key) == ("inverse()", "s.tar", "1")


def test_a_failing_item_is_left_out_and_noted_where_samples_are_skipped() -> None:
    out = Inverse().run(_block(0, 1, 0, 3), _skipping())
    assert (out.items, out.error) == ([6, 2], None)
    assert [(skip.input, skip.place.key, skip.stage) for skip in out.skips] == [
        (0, "0", "inverse"),
        (2, "2", "inverse"),
    ]
    assert [out.place(n).key for n in range(2)] == ["1", "3"]


def test_a_key_the_item_carries_is_preferred() -> None:
    out = Inverse().run(_block({"__key__": "own"}), Context(0))
    assert isinstance(out.error, StageError)
    assert out.error.key == "own"


def test_an_error_that_names_its_place_is_passed_on_as_it_is() -> None:
    error = DataError("bad", "other.tar", "k")

    @dataclass(frozen=True)
    class Bad(Map):
        def function(self, ctx: Context) -> Callable[..., Any]:
            def fail(item: Any) -> Any:
                raise error

            return fail

    assert Bad().run(_block(1), Context(0)).error is error


def test_what_is_no_fault_of_the_sample_ends_the_block_even_where_samples_are_skipped() -> None:
    @dataclass(frozen=True)
    class Lacking(Map):
        def function(self, ctx: Context) -> Callable[..., Any]:
            def fail(item: Any) -> Any:
                raise MissingExtra("x", "audio")

            return fail

    assert isinstance(Lacking().run(_block(1), _skipping()).error, MissingExtra)


def test_a_filter_keeps_items_with_their_origin() -> None:
    out = Divides().run(_block(1, 4, 3, 0, 5), _skipping())
    assert (out.items, [out.place(n).key for n in range(2)]) == ([1, 3], ["0", "2"])
    assert [skip.input for skip in out.skips] == [3]


def test_outputs_of_a_flat_map_have_identities_of_their_own() -> None:
    out = Down().run(_block(2, 0, 3), Context(0))
    assert out.items == [0, 1, 0, 1, 2]
    assert len(set(out.keys.tolist())) == 5
    assert [out.place(n).key for n in range(5)] == ["0", "0", "2", "2", "2"]


def test_what_a_flat_map_gave_before_it_failed_stays() -> None:
    out = Down().run(_block(2, 5, 1), Context(0))
    assert out.items == [0, 1, 0, 1, 2]
    assert isinstance(out.error, StageError)
    skipped = Down().run(_block(2, 5, 1), _skipping())
    assert skipped.items == [0, 1, 0, 1, 2, 0]
    assert [skip.input for skip in skipped.skips] == [1]


def test_a_stage_describes_itself_by_what_differs_from_the_default() -> None:
    assert (Inverse().describe(), Inverse(7).describe()) == ("inverse()", "inverse(numerator=7)")


def test_a_stage_needs_every_field_and_keeps_the_count_unless_it_says_otherwise() -> None:
    assert Inverse().needs(Fields(frozenset({"x"}))) == Fields()
    assert (Inverse().length(7), Divides().length(7), Inverse().scope) == (7, None, Scope.EACH)


@pytest.mark.parametrize("stage", [Inverse(), Divides(), Down()])
def test_an_empty_block_stays_empty(stage: Any) -> None:
    assert stage.run(_block(), Context(0)).items == []
