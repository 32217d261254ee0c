"""JSON answers about a server's plan: its identity, length and schema; a consumer cannot choose what is read."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from penstock.engines import EpochStart, Pipeline, Program, Restored, Start, is_untouched, make_state, restore
from penstock.errors import StateError
from penstock.feed.ledger import dropped_rows, session_dataset
from penstock.landing.fingerprint import stages_digest
from penstock.order import Piece, UncountedOrder, total
from penstock.plan import Cut, Plan
from penstock.serving.requests import BadRequest, BatchRequest, get_cut, get_number, get_pieces

# What has to be equal, and how a sentence names it.
_COMPARED = {
    "penstock": "the version of penstock",
    "data": "the dataset: its shards, or their numbers of samples,",
    "order": "the order of the samples: shuffle, seed, or the way that datasets are combined",
    "stages": "the stages",
    "code": "the code or the arguments of a stage",
}


def identify(program: Program) -> dict[str, Any]:
    """Return what two servers must have in common to continue for each other.

    Raises:
        StorageError: A source cannot be read.
    """
    plan = program.plan
    leaves, samples = [], 0
    for reader in program.readers:
        counts = reader.counts(scan=True)
        leaves.append([reader.names, reader.sizes() if counts is None else counts.tolist()])
        samples += 0 if counts is None else int(counts.sum())
    return {
        "penstock": sys.modules["penstock"].__version__,
        "data": _digest(leaves),
        "order": _digest([program.identity(counts=False), program.seed, plan.epoch]),
        "stages": [stage.describe() for stage in _all_stages(plan)],
        "code": stages_digest(plan, unseen=""),
        "shards": sum(len(names) for names, _ in leaves),
        "samples": samples,
    }


def _all_stages(plan: Plan) -> list[Any]:
    return [*plan.stages, *(stage for branch in plan.branches() for stage in _all_stages(branch))]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=12).hexdigest()


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return what differs between two identities, as a part of a sentence; None if they can replace each other."""
    for name, text in _COMPARED.items():
        if one.get(name) != other.get(name):
            return f"{text} differ{'s' if name in ('penstock', 'data', 'order') else ''}{_facts(name, one, other)}"
    return None


def _facts(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if name == "data":
        sizes = [f"{side.get('shards'):,} shards and {side.get('samples'):,} samples" for side in (one, other)]
        return f" ({sizes[0]} here, {sizes[1]} there)" if sizes[0] != sizes[1] else ""
    if name == "stages":
        pairs = zip([*one["stages"], "nothing"], [*other["stages"], "nothing"], strict=False)
        here, there = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        return f" ({here:.80} here, {there:.80} there)"
    return f" ({one.get(name)} here, {other.get(name)} there)" if name == "penstock" else ""


class Answers:
    """Answers questions about a plan; thread-safe."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Open the sources, so that a server that cannot read its data does not start.

        Raises:
            PenstockError: The plan cannot be served.
        """
        self._pipeline, self._program = pipeline, pipeline.program
        self._plan = self._program.plan
        pipeline.order(self._plan.epoch or 0)
        self.identity = identify(self._program)
        self.actions: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "hello": self._hello,
            "epoch": self._epoch,
            "position": self._position,
            "restore": self._restore,
            "session": self._session,
            "shards": lambda _: session_dataset(self._program, self._pipeline.order(0)).sources(),
            "identities": self._identities,
            "dropped": self._dropped,
        }

    def _hello(self, _: Mapping[str, Any]) -> dict[str, Any]:
        plan = self._plan
        return {
            "identity": self.identity,
            "skips": plan.errors.action == "skip",
            "limit": plan.errors.limit,
            "fixed_epoch": plan.epoch,
            "unknown_count_cause": plan.unknown_count_cause,
            "split_problem": self._pipeline.split_problem,
        }

    def _cut(self, request: Mapping[str, Any]) -> Cut:
        cut = get_cut(request)
        self._plan.shard(cut)  # raises if the plan cannot be cut that way
        return cut

    def _find_epoch_start(self, cut: Cut, epoch: int) -> EpochStart:
        order = self._pipeline.order(epoch)
        return epoch, order, self._program.start(order, cut)

    def state_json(self, cut: Cut, epoch: int, start: Start) -> dict[str, Any]:
        """Return the state of a consumer that continues at ``start``."""
        counts: dict[str, Any] = {} if start.quota is None else {"quota": start.quota}
        epoch_start = (epoch, self._pipeline.order(epoch), start)
        return make_state(self._program, cut, start, epoch_start, counts).to_json()

    def _epoch(self, request: Mapping[str, Any]) -> dict[str, Any]:
        cut, epoch = self._cut(request), get_number(request, "epoch")
        _, order, start = self._find_epoch_start(cut, epoch)
        return {
            "state": self.state_json(cut, epoch, start),
            "pad": start.pad,
            "whole": order.whole(),
            "length": self._program.length(cut),
            "lazy": isinstance(order, UncountedOrder),
        }

    def _restored(self, cut: Cut, states: Any) -> Restored:
        if not isinstance(states, list):
            raise BadRequest("the request has no list of states")
        return restore(self._program, cut, states, lambda epoch: self._find_epoch_start(cut, epoch))

    def _own(self, cut: Cut, state: Any) -> Restored:
        restored = self._restored(cut, [state])
        if restored.own is None:
            raise StateError("the state of a request is that of another rank")
        return restored

    def _position(self, request: Mapping[str, Any]) -> dict[str, Any]:
        cut = self._cut(request)
        restored = self._own(cut, request.get("state"))
        found = self._find_epoch_start(cut, restored.epoch)
        skips = self._plan.errors.action == "skip"
        return {
            "untouched": is_untouched(self._program, cut, restored.start, found),
            "items": None if skips else self._program.items_from(found[1], restored.start),
            "split": self._pipeline.can_split(restored.epoch, restored.start),
        }

    def _restore(self, request: Mapping[str, Any]) -> dict[str, Any]:
        cut = self._cut(request)
        restored = self._restored(cut, request.get("states"))
        return {
            "state": self.state_json(cut, restored.epoch, restored.start),
            "padding_items": restored.padding_items,
            "states": [state.to_json() for state in restored.states],
            "own": None if restored.own is None else restored.states.index(restored.own),
        }

    def _session(self, request: Mapping[str, Any]) -> dict[str, Any]:
        dataset = session_dataset(self._program, self._pipeline.order(get_number(request, "epoch")))
        return {"name": dataset.name, "size": dataset.size, "times": dataset.times, "loose": dataset.loose}

    def _identities(self, request: Mapping[str, Any]) -> list[Any]:
        epoch, pieces = self._known_pieces(request)
        return [
            [identity.source, identity.shard, identity.index]
            for identity in self._program.identities(self._pipeline.order(epoch), pieces)
        ]

    def _dropped(self, request: Mapping[str, Any]) -> list[Any]:
        epoch, pieces = self._known_pieces(request)
        return [rows.tolist() for rows in dropped_rows(self._pipeline.order(epoch), pieces)]

    def _known_pieces(self, request: Mapping[str, Any]) -> tuple[int, list[Piece]]:
        epoch, pieces = get_number(request, "epoch"), get_pieces(request, "pieces")
        if not all(map(self._pipeline.order(epoch).holds, pieces)):
            raise BadRequest("the request has positions that this dataset does not have")
        return epoch, pieces

    def batch_start(self, request: BatchRequest) -> tuple[int, Start]:
        """Return the epoch and the start of a request for batches.

        Raises:
            PenstockError: The plan cannot be cut that way, or the state does not fit it.
        """
        self._plan.shard(request.cut)
        if request.repeated is not None:
            epoch, piece = request.repeated
            if not self._pipeline.order(epoch).holds(piece):
                raise BadRequest("the request has positions that this dataset does not have")
            return epoch, Start([], quota=total([piece]), pad=piece)
        restored = self._own(request.cut, request.state)
        return restored.epoch, restored.start
