"""Encode blocks and errors for another process.

A block is sent without its origin: the origin stays with the run, and the worker queries it if necessary.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock.engines.local.transport import dumps
from penstock.errors import EngineError, PenstockError, StageError, message_of, user_frames
from penstock.order import I64, U64
from penstock.plan import Block, Lineage, Origin, Place

OriginQuery = Callable[..., Any]  # sends the arguments of ``answer_origin_query`` to the run and returns its answer
EncodedError = list[tuple[bytes | None, str, str]]  # the error, then its causes: pickle, text, traceback


def encode_block(block: Block) -> tuple[Any, ...]:
    """Return the fields of a block, without its origin; the items come first."""
    lineage = block.lineage
    error = None if lineage.error is None else encode_error(lineage.error)
    flags = (lineage.begin, lineage.base, lineage.more, lineage.ends_part)
    return block.items, block.keys, lineage.inputs, lineage.owner, lineage.skips, error, *flags


def decode_block(encoded: tuple[Any, ...], origin: Origin) -> Block:
    """Return the block that ``encode_block`` encoded, with ``origin`` as its origin."""
    items, keys, inputs, owner, skips, error, *flags = encoded
    return Block(items, keys, Lineage(origin, inputs, owner, skips, error and decode_error(error), *flags))


def encode_error(error: BaseException) -> EncodedError:
    """Encode an error and its causes: as text, and as a pickle if it can be unpickled."""
    chain: EncodedError = []
    current: BaseException | None = error
    while current is not None:
        text = message_of(current)
        trace = "".join(traceback.format_tb(current.__traceback__ or user_frames(current)))
        chain.append((_pickle_error(current), text, trace))
        current = current.__cause__
    return chain


def _pickle_error(error: BaseException) -> bytes | None:
    try:
        data = dumps(error)
        pickle.loads(data)
    except Exception:  # many exceptions cannot be constructed from their args
        return None
    return data


def decode_error(chain: EncodedError) -> Exception:
    """Return the error with its chain of causes; the worker's tracebacks become notes.

    An error that could not be pickled is returned as a ``RuntimeError`` with its text.
    """
    last: Exception | None = None
    for data, text, trace in reversed(chain):
        error = _unpickle_error(data) if data is not None else None
        error = RuntimeError(text) if error is None else error
        if trace:
            error.add_note(f"in a worker process:\n{trace}")
        error.__cause__, last = last, error
    assert last is not None
    return last


def _unpickle_error(data: bytes) -> Exception | None:
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    if isinstance(error, KeyboardInterrupt):
        return StageError("a worker process was interrupted (KeyboardInterrupt)")
    return error if isinstance(error, Exception) else None


@dataclass(slots=True)
class RemoteOrigin:
    """The origin of a block whose run is in another process; it sends each query to the run."""

    query: OriginQuery

    def cursor(self, done: int, sub: int) -> Any:
        raise AssertionError("only the run knows the cursor of a stream")

    def place(self, number: int) -> Place:
        place: Place = self.query("place", None, number)
        return place

    def slot(self, number: int) -> RemoteSlot:
        leaves, keys = self.query("slot", number, 0)
        return RemoteSlot(leaves, keys, number, self.query)

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        raise AssertionError("only the run can trace samples")


@dataclass(slots=True)
class RemoteSlot:
    """The samples of one operand of a zip whose run is in another process."""

    leaves: I64
    keys: U64
    number: int
    query: OriginQuery

    def place(self, number: int) -> Place:
        place: Place = self.query("place", self.number, number)
        return place


def answer_origin_query(origin: Origin, kind: str, slot: int | None, number: int) -> Any:
    """Answer a query of ``RemoteOrigin`` or ``RemoteSlot``.

    Args:
        origin: The origin of the block that the worker is working on.
        kind: ``"slot"`` for the leaves and keys of an operand, ``"place"`` for the location of a sample.
        slot: The number of the operand; ``None`` for an input of the block itself.
        number: The input whose location is requested.
    """
    if kind == "slot":
        assert slot is not None
        operand = origin.slot(slot)
        return operand.leaves, operand.keys
    return origin.place(number) if slot is None else origin.slot(slot).place(number)


def raise_startup_error(encoded: EncodedError, action: str) -> NoReturn:
    """Raise the error that kept a worker process from starting.

    Raises:
        PenstockError: The error itself, if it is one of Penstock's.
        EngineError: Any other error, with ``action`` (what the worker could not do) in the message.
    """
    error = decode_error(encoded)
    if isinstance(error, PenstockError):
        raise error
    raise EngineError(f"a worker process cannot {action}: {type(error).__name__}: {error}") from error
