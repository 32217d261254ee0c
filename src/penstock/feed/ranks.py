"""Which rank this process is, where nobody says."""

from __future__ import annotations

import os
import sys

from penstock.errors import PlanError


def find_rank(rank: int | None, world: int | None) -> tuple[int, int]:
    """The rank and world to use: those given, else of torch.distributed, else of the environment, else 0 of 1.

    Raises:
        PlanError: only one of them is given, or the environment says something else than numbers.
    """
    if rank is not None and world is not None:
        return rank, world
    if rank is not None or world is not None:
        raise PlanError(f"rank={rank!r}, world={world!r}: give both, or neither")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    told = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if told[0] is None or told[1] is None:
        return 0, 1
    try:
        return int(told[0]), int(told[1])
    except ValueError:
        raise PlanError(f"the environment says RANK={told[0]!r}, WORLD_SIZE={told[1]!r}") from None
