"""How the workers of a DataLoader share the order: by samples, in turn, whatever shards these lie in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from penstock.engines import Start
from penstock.errors import PlanError
from penstock.feed.torch_workers import TorchWorker
from penstock.order import ENDLESS, I64, Order, Piece, Refs, Spans, UncountedOrder, total
from penstock.order import size as size_of
from penstock.plan import Batched, EngineOptions, LateShuffle, Plan, Scope

_LOOSE = 256  # samples a worker takes at a time where nothing depends on their number: enough to read in one go
_TURNS = 16  # and it shall have a turn so many times, so that workers end together


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """TorchWorker ``id`` of ``many`` takes ``run`` samples, leaves those of the others, and so on."""

    id: int
    many: int
    run: int | None = None  # None: a number that suits the size of the order
    rest: Start | None = None  # what they share, where it is not the whole epoch

    @classmethod
    def of(cls, worker: TorchWorker, plan: Plan, at_once: int, rest: Start | None = None) -> WorkerShare:
        """The deal for a worker whose DataLoader joins ``at_once`` items: whole batches are taken in turn."""
        unit = _unit(plan)
        return cls(worker.id, worker.many, None if unit is None else unit * at_once, rest)

    def modest(self, engine: EngineOptions) -> EngineOptions:
        """The engine with this worker's share of the machine."""
        return replace(engine, options=(*engine.options, ("sharers", self.many)))

    def share(self, plan: Plan, order: Order, start: Start) -> tuple[Order, Start]:
        """The order that this worker goes through, and where it begins."""
        start = self.rest or start
        begun = start.opens or start.groups or start.seen or any(piece[3] for piece in start.left)
        if begun or any(stage.scope is Scope.ALL for stage in plan.body):
            # What must see the whole stream, or stands in the middle of a group, is the work of one.
            return order, start if self.id == 0 else Start([])
        if isinstance(order, UncountedOrder):
            many = min(self.many, order.group_count)
            return order, Start(order.cut(start.left, self.id, many, "step") if self.id < many else [])
        pieces = [piece for part in start.parts() for piece in part.pieces]
        dealt = Dealt(order, pieces, self.id, self.many, self.run or _suited(total(pieces), self.many))
        padding = start.padded_from()
        if padding < len(pieces):  # of a worker's share, too, the padding is the end
            own = dealt.below(total(pieces[:padding]))
            return dealt, Start([[0, own, 1, 0]] if own else [], quota=dealt.size, pad=[own, dealt.size, 1, 0])
        return dealt, Start(dealt.whole())


def _unit(plan: Plan) -> int | None:
    """The samples that make one item of the plan; ``None`` where that differs from item to item."""
    unit = 1
    if plan.changes_count or plan.errors.action == "skip":
        return None
    for stage in plan.body:
        if isinstance(stage, Batched):
            unit *= stage.batch_size
        elif stage.scope is not Scope.EACH and not isinstance(stage, LateShuffle):
            return None
    return unit


def _suited(samples: int, many: int) -> int:
    return max(1, min(_LOOSE, samples // (_TURNS * many)))


class Dealt(Order):
    """One worker's share of some pieces of an order: a function of integers, as every order is."""

    stable = fixed = False

    def __init__(self, inner: Order, pieces: list[Piece], worker: int, many: int, run: int) -> None:
        self._inner, self._worker, self._many, self._run = inner, worker, many, run
        self._pieces = np.array([piece[:3] for piece in pieces], np.int64).reshape(-1, 3)
        self._ends = np.cumsum([0, *map(size_of, pieces)])
        self.size = ENDLESS if self._ends[-1] >= ENDLESS else self.below(int(self._ends[-1]))

    def below(self, place: int) -> int:
        """How many positions of this share lie before a place in the pieces."""
        turns, over = divmod(place, self._run * self._many)
        return turns * self._run + min(self._run, max(0, over - self._worker * self._run))

    def at(self, p: I64) -> Refs:
        turn, within = np.divmod(p, self._run)
        place = (turn * self._many + self._worker) * self._run + within
        if len(self._pieces) == 1:
            start, _, step = self._pieces[0].tolist()
            return self._inner.at(start + step * place)
        piece = np.searchsorted(self._ends, place, "right") - 1
        return self._inner.at(self._pieces[piece, 0] + self._pieces[piece, 2] * (place - self._ends[piece]))

    def _spans(self, stop: int) -> Spans:
        raise PlanError("a worker's share is not shuffled again")  # it is the last thing done to an order
