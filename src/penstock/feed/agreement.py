"""Ranks that agree where an epoch ends, one integer a step: for plans whose length only running them tells."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.engines import Program, Run, Start
from penstock.errors import EngineError, PlanError
from penstock.order import I64, Order, Piece, total
from penstock.plan import Cut, Identity, Plan


class Agreement:
    """The ranks of a process group, deciding together at every step whether there is another one.

    All of them must ask for the same steps. ``"drop"`` goes on while every rank has an item, ``"pad"`` while one has.
    """

    def __init__(self, uneven: str, world: int, distributed: Any) -> None:
        """Made by ``agreement``; ``distributed`` is the module of torch."""
        self.uneven = uneven
        self._world, self._distributed = world, distributed

    def next(self, items: Iterator[Any]) -> tuple[bool, Any]:
        """Take an item, if there is one; where taking it fails, the other ranks are told."""
        try:
            return True, next(items)
        except StopIteration:
            return False, None
        except Exception:
            self._sum(-1 - self._world)
            raise

    def go_on(self, have: bool) -> bool:
        """Tell the others whether this rank has an item, and learn whether there is a step.

        Raises:
            EngineError: another rank failed.
        """
        together = self._sum(int(have))
        if together < 0:
            raise EngineError("another rank failed in this step; its own error says why")
        return together == self._world if self.uneven == "drop" else together > 0

    def _sum(self, value: int) -> int:
        torch = sys.modules["torch"]
        device = "cuda" if self._distributed.get_backend() == "nccl" else "cpu"
        vote = torch.tensor([value], device=device)
        self._distributed.all_reduce(vote)
        return int(vote.item())


def agreement(plan: Plan, cut: Cut) -> Agreement | None:
    """What the ranks need to come out equal: nothing where the plan says it beforehand, else a process group.

    Raises:
        PlanError: there is no such group, or it has other ranks than the cut.
    """
    if cut.world == 1 or cut.uneven == "keep" or plan.unsure is None:
        return None
    promise = f"uneven={cut.uneven!r} promises ranks of equal length, but {plan.unsure} changes the count"
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        raise PlanError(
            f"{promise}: call torch.distributed.init_process_group() before, so that ranks can agree, "
            "or pass uneven='keep'"
        )
    group = distributed.get_rank(), distributed.get_world_size()
    if group != (cut.rank, cut.world):
        raise PlanError(
            f"{promise}, and the process group, where this is rank {group[0]} of {group[1]}, cannot agree for "
            f"rank {cut.rank} of {cut.world}: leave out rank and world, or pass uneven='keep'"
        )
    return Agreement(cut.uneven, cut.world, distributed)


class Padding:
    """What a rank repeats while others go on: the first items of its share, again and again.

    Where its share gives nothing, those of the whole order. The samples carry ``__pad__``.
    """

    def __init__(self, program: Program, order: Order, epoch: int, share: Sequence[Piece]) -> None:
        """Begin with ``share``; nothing runs before an item is asked for."""
        self.pieces: list[Piece] = []  # what was repeated
        self.told: list[tuple[I64, int]] = []  # the samples in the last item (see ``engines.tracing``)
        self._program, self._order, self._epoch = program, order, epoch
        self._items = self._again([*share[:1], *order.whole()])
        self._run: Run | None = None

    def take(self) -> Any:
        """The next item."""
        self.told.clear()
        item = next(self._items)
        assert self._run is not None
        self._run.tell()
        return item

    def _again(self, candidates: Iterable[Piece]) -> Iterator[Any]:
        for piece in candidates:
            empty = False
            while not empty:
                empty = True
                for item in self._pass(piece):
                    empty = False
                    yield item
        raise EngineError("no rank has a sample to repeat, though one of them has more to deliver")

    def _pass(self, piece: Piece) -> Iterator[Any]:
        start = Start([], quota=total([piece]), pad=piece)
        tell = lambda rows, many: self.told.append((rows, many))  # noqa: E731
        self._run = Run(self._program, self._order, self._epoch, start, tracked=True, witness=tell)
        try:
            yield from self._run
        finally:
            self._count()
            self._run.close()

    def _count(self) -> None:
        """Note which positions the pass at hand has repeated."""
        run = self._run
        assert run is not None
        at, stop, step, _ = run.start.pad or [0, 0, 1, 0]
        many = (run.start.quota or 0) - (run.here().quota or 0)
        if many:
            self.pieces.append([at, min(stop, at + many * step), step, 0])

    def close(self) -> None:
        """End it; ``pieces`` is complete then."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()


def identities(program: Program, order: Order, pieces: Iterable[Piece]) -> Iterator[Identity]:
    """Name the samples at some positions."""
    for start, stop, step, _ in pieces:
        refs = order.at(np.arange(start, stop, step, dtype=np.int64))
        for leaf, shard, index in zip(refs.leaf.tolist(), refs.shard.tolist(), refs.index.tolist(), strict=True):
            yield Identity(leaf, program.readers[leaf].names[shard], index)
