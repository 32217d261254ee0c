"""Blocks and errors as they travel: without their origin, which stays with the run and is asked when it is needed."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock.engines.local.transport import dumps
from penstock.errors import EngineError, PenstockError
from penstock.order import I64, U64
from penstock.plan import Block, Origin, Place

Ask = Callable[..., Any]  # a question to the run: its words, its answer


def encode_block(block: Block) -> tuple[Any, ...]:
    """What a block is made of, but for its origin."""
    error = None if block.error is None else encode_error(block.error)
    flags = (block.base, block.ends_part, block.begin, block.more)
    return block.items, block.keys, block.inputs, block.owner, error, block.skips, *flags


def decode_block(facts: tuple[Any, ...], origin: Origin) -> Block:
    """The block again, with an origin."""
    items, keys, inputs, owner, error, skips, *flags = facts
    return Block(items, keys, origin, inputs, owner, error and decode_error(error), skips, *flags)


def encode_error(error: BaseException) -> list[tuple[bytes | None, str, str]]:
    """An error and what caused it: pickled where that works both ways, and in words."""
    chain: list[tuple[bytes | None, str, str]] = []
    found: BaseException | None = error
    while found is not None:
        words = f"{type(found).__name__}: {found}"
        told = "".join(traceback.format_tb(found.__traceback__))
        chain.append((_pickled(found), words, told))
        found = found.__cause__
    return chain


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = dumps(error)
        pickle.loads(data)
    except Exception:  # many exceptions cannot be made again from their args
        return None
    return data


def decode_error(chain: list[tuple[bytes | None, str, str]]) -> Exception:
    """The error, with its causes behind it."""
    last: Exception | None = None
    for data, words, told in reversed(chain):
        error = _loaded(data) if data is not None else None
        error = RuntimeError(words) if error is None else error
        if told:
            error.add_note(f"in a worker process:\n{told}")
        error.__cause__, last = last, error
    assert last is not None
    return last


def _loaded(data: bytes) -> Exception | None:
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, Exception) else None


@dataclass(slots=True)
class RemoteOrigin:
    """The origin of a block whose run is in another process."""

    ask: Ask

    def cursor(self, done: int, sub: int) -> Any:
        raise AssertionError("where a stream stands is known to its run alone")

    def place(self, number: int) -> Place:
        place: Place = self.ask("place", None, number)
        return place

    def slot(self, number: int) -> RemoteSlot:
        leaves, keys = self.ask("slot", number, 0)
        return RemoteSlot(leaves, keys, number, self.ask)

    def trace(self, inputs: I64, outputs: I64, kind: int) -> I64:
        raise AssertionError("where samples came from is known to their run alone")


@dataclass(slots=True)
class RemoteSlot:
    """One operand's samples, the run being in another process."""

    leaves: I64
    keys: U64
    number: int
    ask: Ask

    def place(self, number: int) -> Place:
        place: Place = self.ask("place", self.number, number)
        return place


def answer(origin: Origin, word: str, slot: int | None, number: int) -> Any:
    """The answer to a question of ``Afar`` or ``RemoteSlot``."""
    if word == "slot":
        assert slot is not None
        found = origin.slot(slot)
        return found.leaves, found.keys
    return origin.place(number) if slot is None else origin.slot(slot).place(number)


def raise_unready(encode_block: Any, what: str) -> NoReturn:
    """Raise why a worker process cannot begin.

    Raises:
        PenstockError: what was sent, as it is.
        EngineError: anything else, in words.
    """
    problem = decode_error(encode_block)
    if isinstance(problem, PenstockError):
        raise problem
    raise EngineError(f"a worker process cannot {what}: {type(problem).__name__}: {problem}") from problem
