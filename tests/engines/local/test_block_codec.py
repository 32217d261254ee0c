from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.engines.local.block_codec import (
    RemoteOrigin,
    answer_origin_query,
    decode_block,
    decode_error,
    encode_block,
    encode_error,
)
from penstock.engines.read_stage import BufferedSamples, PieceRows, Span
from penstock.errors import DataError, StageError
from penstock.order import Refs
from penstock.plan import Block, Lineage, Place, Skipped
from penstock.testing import BASE, Numbers


class NotRebuildable(Exception):
    """Can be pickled but not unpickled: its args are not those of its constructor."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class NotPicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not me")


def origin() -> Span:
    """Samples 0 and 3 of shard 2, and sample 1 of shard 0."""
    zero = np.zeros(3, np.int64)
    refs = Refs(zero, np.array([2, 2, 0]), np.array([0, 3, 1]), np.arange(3, dtype=np.uint64))
    return Span(zero, (PieceRows(0, 0, 0, 3),), refs, [Numbers(BASE).open()], BufferedSamples([], {}, zero))


def block() -> Block:
    skip = Skipped(1, Place("shard-0002", "10"), "map", "no good")
    keys = np.array([5, 6, 7], np.uint64)
    owner = np.array([0, 0, 2])
    error = StageError("KeyError: 'x'", "map(f)", "1", "shard-0000")
    return Block(["a", "b", "c"], keys, Lineage(origin(), 3, owner, (skip,), error, 1, 4, True, True))


def test_a_block_survives_encoding() -> None:
    sent, new_origin = block(), origin()
    got = decode_block(pickle.loads(pickle.dumps(encode_block(sent))), new_origin)
    assert got.lineage.origin is new_origin
    assert got.items == sent.items
    for name in ("inputs", "skips", "begin", "base", "more", "ends_part"):
        assert getattr(got.lineage, name) == getattr(sent.lineage, name), name
    np.testing.assert_array_equal(got.keys, sent.keys)
    np.testing.assert_array_equal(got.lineage.owner, sent.lineage.owner)
    assert (type(got.lineage.error), str(got.lineage.error)) == (StageError, str(sent.lineage.error))


def test_a_block_without_owner_or_error_still_has_none_after_encoding() -> None:
    sent = block()
    sent.lineage = replace(sent.lineage, owner=None, error=None)
    got = decode_block(encode_block(sent), origin())
    assert got.lineage.owner is None
    assert got.lineage.error is None


def test_a_remote_origin_answers_as_the_origin_itself() -> None:
    local = origin()
    remote = RemoteOrigin(lambda *query: pickle.loads(pickle.dumps(answer_origin_query(local, *query))))
    assert [remote.place(n) for n in range(3)] == [local.place(n) for n in range(3)]
    assert remote.place(1) == Place("shard-0002", "10", 0, 3, "shard-0002")
    slot, local_slot = remote.slot(0), local.slot(0)
    np.testing.assert_array_equal(slot.leaves, local_slot.leaves)
    np.testing.assert_array_equal(slot.keys, local_slot.keys)
    assert [slot.place(n) for n in range(3)] == [local_slot.place(n) for n in range(3)]
    with pytest.raises(AssertionError):
        remote.cursor(0, 0)


def raised(error: Exception, cause: BaseException | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as exc:
        return exc


def round_trip(error: BaseException) -> Exception:
    return decode_error(pickle.loads(pickle.dumps(encode_error(error))))


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("x"), DataError("bad", "a.tar", "1")])
def test_an_error_that_can_be_pickled_is_decoded_as_itself(error: Exception) -> None:
    got = round_trip(raised(error))
    assert type(got) is type(error)
    assert (got.args, str(got)) == (error.args, str(error))


def test_an_error_is_decoded_with_its_causes_and_their_tracebacks() -> None:
    got = round_trip(raised(StageError("it fails", "map(f)", "7"), raised(KeyError("x"), raised(OSError(2, "gone")))))
    assert isinstance(got, StageError)
    assert got.key == "7"
    assert isinstance(got.__cause__, KeyError)
    assert isinstance(got.__cause__.__cause__, FileNotFoundError)
    assert got.__cause__.__cause__.__cause__ is None
    assert "in a worker process" in got.__notes__[0]
    assert "test_block_codec.py" in got.__notes__[0]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NotRebuildable(1, 2), "NotRebuildable: 1 and 2"),
        (NotPicklable("hm"), "NotPicklable: hm"),
        (ValueError(open), "built-in function open"),
        (ValueError(lambda: 0), "lambda"),
    ],
)
def test_an_error_that_cannot_be_pickled_is_decoded_with_its_text(error: Exception, text: str) -> None:
    got = round_trip(raised(StageError("it fails", "map(f)"), raised(error)))
    assert isinstance(got, StageError)
    assert text in str(got.__cause__)


@pytest.mark.parametrize("error", [KeyboardInterrupt("k"), SystemExit(3)])
def test_an_error_that_is_not_an_exception_is_decoded_as_one(error: BaseException) -> None:
    got = round_trip(error)
    assert isinstance(got, RuntimeError)
    assert type(error).__name__ in str(got)


def test_an_interrupt_in_a_worker_process_is_named() -> None:
    error = decode_error(encode_error(KeyboardInterrupt()))
    assert isinstance(error, StageError)
    assert "interrupted" in str(error)
