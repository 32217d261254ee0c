from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from penstock.engines.local.block_codec import (
    RemoteOrigin,
    answer,
    decode_block,
    decode_error,
    encode_block,
    encode_error,
)
from penstock.engines.read_stage import Held, Span
from penstock.errors import DataError, StageError
from penstock.order import Refs
from penstock.plan import Block, Place, Skipped
from penstock.testing import BASE, Numbers


class Stubborn(Exception):
    """Cannot be made again from its args."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not me")


def origin() -> Span:
    """Samples 0 and 3 of shard 2, and sample 1 of shard 0."""
    zero = np.zeros(3, np.int64)
    refs = Refs(zero, np.array([2, 2, 0]), np.array([0, 3, 1]), np.arange(3, dtype=np.uint64))
    return Span(0, 0, zero, 3, refs, [Numbers(BASE).open()], Held([], {}, zero))


def block() -> Block:
    skip = Skipped(1, Place("shard-0002", "10"), "map", "no good")
    keys = np.array([5, 6, 7], np.uint64)
    owner = np.array([0, 0, 2])
    error = StageError("KeyError: 'x'", "map(f)", "1", "shard-0000")
    return Block(["a", "b", "c"], keys, origin(), 3, owner, error, [skip], 4, True, 1, True)


def test_a_block_is_the_same_after_its_way() -> None:
    sent, there = block(), origin()
    got = decode_block(pickle.loads(pickle.dumps(encode_block(sent))), there)
    assert got.origin is there
    for name in ("items", "inputs", "skips", "base", "ends_part", "begin", "more"):
        assert getattr(got, name) == getattr(sent, name), name
    np.testing.assert_array_equal(got.keys, sent.keys)
    np.testing.assert_array_equal(got.owner, sent.owner)
    assert (type(got.error), str(got.error)) == (StageError, str(sent.error))


def test_a_block_without_owner_or_error_stays_without() -> None:
    sent = block()
    sent.owner = sent.error = None
    got = decode_block(encode_block(sent), origin())
    assert got.owner is None
    assert got.error is None


def test_the_origin_of_a_block_afar_answers_as_the_origin_itself() -> None:
    here = origin()
    afar = RemoteOrigin(lambda *words: pickle.loads(pickle.dumps(answer(here, *words))))
    assert [afar.place(n) for n in range(3)] == [here.place(n) for n in range(3)]
    assert afar.place(1) == Place("shard-0002", "10", 0, 3, "shard-0002")
    slot, own = afar.slot(0), here.slot(0)
    np.testing.assert_array_equal(slot.leaves, own.leaves)
    np.testing.assert_array_equal(slot.keys, own.keys)
    assert [slot.place(n) for n in range(3)] == [own.place(n) for n in range(3)]
    with pytest.raises(AssertionError):
        afar.cursor(0, 0)


def raised(error: Exception, cause: BaseException | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as exc:
        return exc


def returned(error: BaseException) -> Exception:
    return decode_error(pickle.loads(pickle.dumps(encode_error(error))))


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("x"), DataError("bad", "a.tar", "1")])
def test_an_error_that_can_be_pickled_comes_back_as_itself(error: Exception) -> None:
    got = returned(raised(error))
    assert type(got) is type(error)
    assert (got.args, str(got)) == (error.args, str(error))


def test_an_error_brings_its_causes_and_where_they_were_raised() -> None:
    got = returned(raised(StageError("it fails", "map(f)", "7"), raised(KeyError("x"), raised(OSError(2, "gone")))))
    assert isinstance(got, StageError)
    assert got.key == "7"
    assert isinstance(got.__cause__, KeyError)
    assert isinstance(got.__cause__.__cause__, FileNotFoundError)
    assert got.__cause__.__cause__.__cause__ is None
    assert "in a worker process" in got.__notes__[0]
    assert "test_block_codec.py" in got.__notes__[0]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Stubborn(1, 2), "Stubborn: 1 and 2"),
        (Unsendable("hm"), "Unsendable: hm"),
        (ValueError(open), "built-in function open"),
        (ValueError(lambda: 0), "lambda"),
    ],
)
def test_an_error_that_cannot_be_pickled_comes_back_in_words(error: Exception, words: str) -> None:
    got = returned(raised(StageError("it fails", "map(f)"), raised(error)))
    assert isinstance(got, StageError)
    assert words in str(got.__cause__)


@pytest.mark.parametrize("error", [KeyboardInterrupt("k"), SystemExit(3)])
def test_what_is_no_exception_comes_back_as_one(error: BaseException) -> None:
    got = returned(error)
    assert isinstance(got, RuntimeError)
    assert type(error).__name__ in str(got)
