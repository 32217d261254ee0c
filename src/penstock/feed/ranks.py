"""Finds the rank of this process if the caller does not give one."""

from __future__ import annotations

import os
import sys
import warnings

from penstock.errors import PlanError
from penstock.plan import check_count

# Rank and world as launchers set them: torchrun and most others, Slurm, Open MPI.
_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


def find_rank(rank: int | None, world: int | None) -> tuple[int, int]:
    """Return the given rank and world, else those of torch.distributed, Ray Train or the environment, else 0 and 1.

    Raises:
        PlanError: Only one of them is given, or the values, given or in the environment, are not numbers.
    """
    if rank is not None and world is not None:
        return check_count("rank", rank), check_count("world", world, least=1)
    if rank is not None or world is not None:
        raise PlanError(f"rank={rank!r}, world={world!r}: give both, or neither")
    return _in_process_group() or _in_ray_train() or _in_environment() or (0, 1)


def _in_process_group() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _in_ray_train() -> tuple[int, int] | None:
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    # Outside of a worker, some versions raise an error, and others warn and return None.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            context = train.get_context()
            rank, world = context.get_world_rank(), context.get_world_size()
        except (RuntimeError, AttributeError):
            return None
    return (rank, world) if isinstance(rank, int) and isinstance(world, int) else None


def _in_environment() -> tuple[int, int] | None:
    for names in _VARIABLES:
        rank, world = (os.environ.get(name) for name in names)
        if rank is None or world is None:
            continue
        try:
            return int(rank), int(world)
        except ValueError:
            found = f"{names[0]}={rank!r}, {names[1]}={world!r}"
            raise PlanError(
                f"the environment has {found}, which are not numbers: correct them, or give loader(rank, world)"
            ) from None
    return None
