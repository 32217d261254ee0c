"""Let the ranks of a process group agree, step by step, where an epoch ends: for plans whose length is unknown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from penstock.engines import DeliveryCallback, Start
from penstock.errors import EngineError, PlanError
from penstock.feed.backend import ItemRun
from penstock.order import I64, Piece, total
from penstock.plan import Cut

StartRun = Callable[[Start, DeliveryCallback | None], ItemRun]


class Agreement:
    """Decides at every step, together with the other ranks of the process group, whether there is another step.

    All ranks must request the same steps. With ``"drop"`` there is another step while every rank has an item, with
    ``"pad"`` while any rank has one.
    """

    def __init__(self, uneven: str, world: int, distributed: Any) -> None:
        """Use ``make_agreement`` to create one; ``distributed`` is the module ``torch.distributed``."""
        self.uneven = uneven
        self._world, self._distributed = world, distributed

    def next_item(self, items: Iterator[Any]) -> tuple[bool, Any]:
        """Return whether there is another item, and the item; if taking it fails, report the failure to all ranks."""
        try:
            return True, next(items)
        except StopIteration:
            return False, None
        except Exception:
            self._sum_over_ranks(-1 - self._world)
            raise

    def has_step(self, has_item: bool) -> bool:
        """Return whether there is another step, given whether this rank has an item for it.

        Raises:
            EngineError: Another rank failed.
        """
        votes = self._sum_over_ranks(int(has_item))
        if votes < 0:
            raise EngineError("another rank failed in this step; see the error of that rank")
        return votes == self._world if self.uneven == "drop" else votes > 0

    def _sum_over_ranks(self, value: int) -> int:
        torch = sys.modules["torch"]
        device = "cuda" if self._distributed.get_backend() == "nccl" else "cpu"
        votes = torch.tensor([value], device=device)
        self._distributed.all_reduce(votes)
        return int(votes.item())


def make_agreement(cause: str | None, cut: Cut) -> Agreement | None:
    """Return the agreement that makes ranks equal; None if the plan makes them equal by itself, or they may differ.

    Args:
        cause: What makes the number of items unknown before a run; None if it is known.
        cut: The rank, and what to do about ranks that differ.

    Raises:
        PlanError: There is no process group, or its ranks are not those of the cut.
    """
    if cut.world == 1 or cut.uneven == "keep" or cause is None:
        return None
    promise = f"uneven={cut.uneven!r} promises ranks of equal length, but {cause} changes the count"
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        raise PlanError(
            f"{promise}: call torch.distributed.init_process_group() first, so that ranks can agree, "
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
    """Repeats the first items of a rank's share, for a rank that has no more items while others have.

    A rank whose share yields no items repeats those of the whole order. Padding samples have the field ``__pad__``.

    Attributes:
        pieces: The positions that were repeated; complete after ``close``.
        delivered: The samples in the last item, as tables (see ``engines.lineage``) with the number of their items.
    """

    def __init__(self, start_run: StartRun, candidates: Sequence[Piece]) -> None:
        """Nothing runs before the first item is requested.

        Args:
            start_run: Starts a run.
            candidates: Pieces to repeat; the first that has any item is used.
        """
        self.pieces: list[Piece] = []
        self.delivered: list[tuple[I64, int]] = []
        self._start_run = start_run
        self._items = self._repeat(candidates)
        self._run: ItemRun | None = None

    def next_item(self) -> Any:
        """Return an item to repeat, and set ``delivered`` to its samples."""
        self.delivered.clear()
        item = next(self._items)
        assert self._run is not None
        self._run.report_delivered()
        return item

    def _repeat(self, candidates: Iterable[Piece]) -> Iterator[Any]:
        """Yield the items of the first piece that has any, again and again."""
        for piece in candidates:
            empty = False
            while not empty:
                empty = True
                for item in self._run_piece(piece):
                    empty = False
                    yield item
        raise EngineError("no rank has a sample to repeat, although a rank has more items to deliver")

    def _run_piece(self, piece: Piece) -> Iterator[Any]:
        start = Start([], quota=total([piece]), pad=piece)
        self._run = self._start_run(start, self._on_delivered)
        try:
            yield from self._run
        finally:
            self._record_piece()
            self._run.close()

    def _on_delivered(self, rows: I64, items: int) -> None:
        self.delivered.append((rows, items))

    def _record_piece(self) -> None:
        """Add the positions that the current run has repeated to ``pieces``."""
        run = self._run
        assert run is not None
        first, stop, step, _ = run.start.pad or [0, 0, 1, 0]
        repeated = (run.start.quota or 0) - (run.here().quota or 0)
        if repeated:
            self.pieces.append([first, min(stop, first + repeated * step), step, 0])

    def close(self) -> None:
        """Stop the current run."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
