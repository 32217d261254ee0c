"""Requests of consumers, as bounded JSON: checked completely before anything is done for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock import errors
from penstock.errors import EngineError, PenstockError, PlanError
from penstock.order import CUTS, Piece, State, is_state_number
from penstock.plan import Cut

PROTOCOL_VERSION = 1  # of requests and messages
MAX_REQUEST_BYTES = 4_000_000  # the states of ten thousand ranks
MAX_SERVERS = 4096  # among which batches are split
MAX_POSITIONS = 65_536  # in a question about single samples
_UNEVEN = ("keep", "drop", "pad")


class BadRequest(PlanError):
    """A request is malformed."""


class Unavailable(EngineError):
    """This server cannot serve the request now, but another one can."""


def parse_request(data: bytes) -> dict[str, Any]:
    """Return the JSON object in a request.

    Raises:
        BadRequest: The request is too large, is not a JSON object, or is of another version.
    """
    if len(data) > MAX_REQUEST_BYTES:
        raise BadRequest(f"the request has {len(data):,} bytes; the most is {MAX_REQUEST_BYTES:,}")
    try:
        request = json.loads(data)
    except (ValueError, RecursionError):
        raise BadRequest("the request is not JSON") from None
    if not isinstance(request, dict):
        raise BadRequest("the request is not a JSON object")
    if request.get("v") != PROTOCOL_VERSION:
        raise BadRequest(
            f"the request has version {request.get('v')!r:.20}; this server speaks version {PROTOCOL_VERSION}"
        )
    return request


def get_number(request: Mapping[str, Any], name: str) -> int:
    """Return a whole number of at least 0.

    Raises:
        BadRequest: It is missing, or something else.
    """
    value: Any = request.get(name)
    if not is_state_number(value):
        raise BadRequest(f"the request's {name!r} is {value!r:.40}, not a whole number of at least 0")
    number: int = value
    return number


def get_cut(request: Mapping[str, Any]) -> Cut:
    """Return how a request cuts the order, and for which rank.

    Raises:
        BadRequest: It is missing or impossible.
    """
    match request.get("cut"):
        case {"rank": rank, "world": world, "kind": str(kind), "uneven": str(uneven)} if (
            is_state_number(rank) and is_state_number(world) and rank < world and kind in CUTS and uneven in _UNEVEN
        ):
            return Cut(rank, world, kind, uneven)  # type: ignore[arg-type]
    raise BadRequest(f"the request's 'cut' is {request.get('cut')!r:.80}, not a rank of a world")


def cut_json(cut: Cut) -> dict[str, Any]:
    """Return a cut as JSON."""
    return {"rank": cut.rank, "world": cut.world, "kind": cut.kind, "uneven": cut.uneven}


def get_pieces(request: Mapping[str, Any], name: str) -> list[Piece]:
    """Return a list of pieces with few positions.

    Raises:
        BadRequest: It is missing or malformed, or has too many positions.
    """
    pieces = request.get(name)
    count = 0
    for piece in pieces if isinstance(pieces, list) else [None]:
        if not (isinstance(piece, list) and len(piece) == 4 and all(map(is_state_number, piece)) and piece[2]):
            raise BadRequest(f"the request's {name!r} is not a list of pieces [start, stop, step, sub]")
        count += max(0, piece[1] - piece[0]) // piece[2] + 1
    if count > 2 * MAX_POSITIONS:
        raise BadRequest(f"the request's {name!r} has more than {MAX_POSITIONS:,} positions")
    assert isinstance(pieces, list)
    return pieces


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request for batches.

    Attributes:
        cut: The rank of the consumer.
        state: Where it continues, as a state; None if a piece is repeated.
        repeated: The epoch and the piece that is repeated as padding.
        part: Which of the batches: number i with ``i % part[1] == part[0]``.
        traced: Batches come with the samples that they hold.
    """

    cut: Cut
    state: dict[str, Any] | None
    repeated: tuple[int, Piece] | None
    part: tuple[int, int]
    traced: bool

    @classmethod
    def from_json(cls, request: Mapping[str, Any]) -> BatchRequest:
        """Check a request.

        Raises:
            BadRequest: An entry is missing or impossible.
            StateError: The state is damaged.
        """
        state, repeated = request.get("state"), request.get("repeated")
        if (state is None) == (repeated is None):
            raise BadRequest("the request needs a state, or a piece to repeat")
        if state is not None:
            State.from_json(state)
        part = request.get("part")
        if not (isinstance(part, list) and len(part) == 2 and all(map(is_state_number, part))):
            raise BadRequest(f"the request's 'part' is {part!r:.40}, not [number, servers]")
        if not part[0] < part[1] <= MAX_SERVERS:
            raise BadRequest(f"the request's 'part' is {part!r:.40}: there is no such server")
        if repeated is not None:
            (piece,) = get_pieces(request, "repeated")[:1] or [[0, 0, 1, 0]]
            repeated = (get_number(request, "epoch"), piece)
        return cls(get_cut(request), state, repeated, (part[0], part[1]), request.get("traced") is True)

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON."""
        out = {"v": PROTOCOL_VERSION, "cut": cut_json(self.cut), "part": list(self.part), "traced": self.traced}
        if self.repeated is not None:
            return {**out, "epoch": self.repeated[0], "repeated": [self.repeated[1]]}
        return {**out, "state": self.state}


def error_json(error: BaseException) -> list[Any]:
    """Return an error as JSON: its class and arguments if it is Penstock's own."""
    own = isinstance(error, PenstockError) and all(isinstance(fact, str | int | None) for fact in error.args)
    if own and getattr(errors, type(error).__name__, None) is type(error):
        return [type(error).__name__, *error.args]
    name = "PlanError" if isinstance(error, PlanError) else "EngineError"
    return [name, str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"]


def error_from_json(described: Any) -> PenstockError:
    """Return the error that ``error_json`` described."""
    match described:
        case [str(name), *facts] if all(isinstance(fact, str | int | None) for fact in facts):
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, PenstockError):
                try:
                    return kind(*facts)
                except TypeError:
                    pass
    return errors.EngineError(f"a server reports: {described!r:.200}")
