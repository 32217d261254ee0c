"""Makes datasets instances of torch's IterableDataset without importing torch.

A DataLoader checks ``isinstance(dataset, IterableDataset)``, and treats everything else as a dataset with random
access. ``isinstance`` also reads the ``__class__`` of the object. Once torch's data module is loaded, a dataset answers
there with a class that derives from its own class and from torch's, so it does not matter whether torch or Penstock
was imported first. The type of the object does not change.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache

from penstock.feed.epochs import Epochs
from penstock.feed.torch_workers import this_worker
from penstock.plan import Plan

_warned = False


def torch_class(own: type, epochs: Epochs) -> type:
    """Return the value of ``__class__`` for a dataset of class ``own``.

    The caller may be a DataLoader that will fork workers, so ``epochs`` is shared with all processes that are forked
    from now on.
    """
    iterable = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
    if iterable is None:
        return own
    epochs.share_on_fork()
    return _derived_class(own, iterable)


@cache
def _derived_class(own: type, iterable: type) -> type:
    return type(iterable)(own.__name__, (own, iterable), {"__slots__": (), "__module__": own.__module__})


def warn_uncut(plan: Plan) -> None:
    """Warn once per process if a process group is running and every rank would read the whole dataset."""
    global _warned
    distributed = sys.modules.get("torch.distributed")
    if _warned or plan.cut is not None or distributed is None:
        return
    worker = this_worker()
    if worker is not None and worker.id:
        return  # the warning of the first worker is enough
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return
    _warned = True
    warnings.warn(
        f"a process group of {distributed.get_world_size()} is running, and every rank reads the whole dataset: "
        "use ds.loader() or ds.shard(rank, world) to share it, or ds.shard(0, 1) if this is intended",
        stacklevel=3,
    )
