"""Being one of torch's datasets without importing torch.

A DataLoader asks ``isinstance(dataset, IterableDataset)`` and takes everything else for a dataset with random access.
That question looks at the ``__class__`` of what it is given, as Python does for all objects that stand for others: the
one moment at which it does not matter whether torch or Penstock was imported first. So a dataset answers there, once
torch's data module is loaded, with a class that is both its own and torch's. It stays an object of its own class.
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
    """The class that ``__class__`` answers with.

    Whoever asks may be a DataLoader that will fork workers, which is not seen from here: from now on ``epochs`` is kept
    where they can count too.
    """
    iterable = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
    if iterable is None:
        return own
    epochs.share()
    return _both(own, iterable)


@cache
def _both(own: type, iterable: type) -> type:
    return type(iterable)(own.__name__, (own, iterable), {"__slots__": (), "__module__": own.__module__})


def warn_uncut(plan: Plan) -> None:
    """Say once in a process that every rank of a process group will see everything, where nobody has chosen that."""
    global _warned
    distributed = sys.modules.get("torch.distributed")
    if _warned or plan.cut is not None or distributed is None:
        return
    worker = this_worker()
    if worker is not None and worker.id:
        return  # one of them is enough
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return
    _warned = True
    warnings.warn(
        f"a process group of {distributed.get_world_size()} is running, and every rank goes through the whole dataset: "
        "use ds.loader() or ds.shard(rank, world) to share it, or ds.shard(0, 1) if that is meant",
        stacklevel=3,
    )
