"""Ranks and workers, repeated iteration, and the switches for untrusted data."""

import functools
import itertools
import math
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from penstock.errors import PlanError

enforce_security = os.environ.get("WDS_SECURE", "0") not in ("", "0")
"""Refuse pickle, commands, rewritten URLs and, in ``gopen``, local files, whatever is trusted."""

_TRUST = "PENSTOCK_TRUST_WDS"  # in the environment, so that worker processes inherit it


def trust(*, pickle: bool | None = None, pipe: bool | None = None) -> None:
    """Allow what WebDataset allows by default, here and in the processes started from here.

    Args:
        pickle: Decode pickled fields, and ``pth`` fields that hold more than tensors: both can run code.
        pipe: Run the shell commands in ``pipe:`` URLs, and let the environment variable ``GOPEN_REWRITE`` change URLs.
    """
    before = os.environ.get(_TRUST, "").split(",")
    chosen = {kind: kind in before if given is None else given for kind, given in (("pickle", pickle), ("pipe", pipe))}
    if not {*chosen.values()} <= {True, False}:
        raise PlanError(f"trust(pickle={pickle!r}, pipe={pipe!r}): give True or False")
    os.environ[_TRUST] = ",".join(kind for kind, allowed in chosen.items() if allowed)


def trusted(kind: str) -> bool:
    chosen = os.environ.get(_TRUST, "").split(",")
    return not enforce_security and (kind in chosen or os.environ.get("WDS_SECURE") == "0")


def require_trust(kind: str, problem: str, enforced: str) -> None:
    """Raise ``ValueError`` for what is not trusted: ``enforced`` where ``enforce_security`` is set, or ``problem``."""
    if enforce_security:
        raise ValueError(enforced)
    if not trusted(kind):
        raise ValueError(f"{problem}; call wds.trust({kind}=True) if you trust where it comes from")


class PipelineStage:
    """A stage with a state of its own; subclasses define ``run(source)``."""


def identity(x: Any) -> Any:
    return x


def make_seed(*args: Any) -> int:
    return functools.reduce(lambda seed, arg: (seed * 31 + hash(arg)) & 0x7FFFFFFF, args, 0)


def repeatedly(
    source: Any, nepochs: int | None = None, nbatches: int | None = None, nsamples: float = math.inf
) -> Iterator[Any]:
    epochs = itertools.repeat(source) if nepochs is None else itertools.repeat(source, nepochs)
    for batch in itertools.islice(itertools.chain.from_iterable(epochs), nbatches):
        yield batch
        nsamples -= len(batch[0]) if nsamples < math.inf else 0
        if nsamples <= 0:
            return


def pytorch_worker_info(group: Any = None) -> tuple[int, int, int, int]:
    """Return rank, world size, worker and number of workers, by environment variables or as torch knows them."""
    rank, world, worker, workers = 0, 1, 0, 1
    torch = sys.modules.get("torch")  # where it is not loaded, neither a group nor a worker exists
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    elif torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    if "WORKER" in os.environ and "NUM_WORKERS" in os.environ:
        worker, workers = int(os.environ["WORKER"]), int(os.environ["NUM_WORKERS"])
    elif torch is not None and (info := torch.utils.data.get_worker_info()) is not None:
        worker, workers = info.id, info.num_workers
    return rank, world, worker, workers


def pytorch_worker_seed(group: Any = None) -> int:
    rank, _, worker, _ = pytorch_worker_info(group=group)
    return rank * 1000 + worker


def warn_deprecated(name: str, advice: str, stacklevel: int = 2) -> None:
    warnings.warn(f"{name} is deprecated: {advice}", DeprecationWarning, stacklevel=stacklevel + 1)
