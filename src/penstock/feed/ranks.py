"""Which rank this process is, where nobody says."""

from __future__ import annotations

import os
import sys
import warnings

from penstock.errors import PlanError

# What launchers tell their processes: torchrun and most others, Slurm, Open MPI.
_TOLD = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def find_rank(rank: int | None, world: int | None) -> tuple[int, int]:
    """The rank and world to use: those given, else of torch.distributed, Ray Train, the environment, else 0 of 1.

    Raises:
        PlanError: only one of them is given, or the environment says something else than numbers.
    """
    if rank is not None and world is not None:
        return rank, world
    if rank is not None or world is not None:
        raise PlanError(f"rank={rank!r}, world={world!r}: give both, or neither")
    return _of_group() or _of_ray() or _of_environment() or (0, 1)


def _of_group() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _of_ray() -> tuple[int, int] | None:
    """Those of the Ray Train worker that this process is."""
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    # Outside of a worker some versions raise, others warn and give None.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            context = train.get_context()
            rank, world = context.get_world_rank(), context.get_world_size()
        except (RuntimeError, AttributeError):
            return None
    return (rank, world) if isinstance(rank, int) and isinstance(world, int) else None


def _of_environment() -> tuple[int, int] | None:
    for names in _TOLD:
        rank, world = (os.environ.get(name) for name in names)
        if rank is None or world is None:
            continue
        try:
            return int(rank), int(world)
        except ValueError:
            told = f"{names[0]}={rank!r}, {names[1]}={world!r}"
            raise PlanError(f"the environment says {told}; give loader(rank, world) or correct it") from None
    return None
