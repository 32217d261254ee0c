"""Detects which worker of a torch DataLoader this process is, and the batch size of that DataLoader."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from penstock.plan import Cut


@dataclass(frozen=True, slots=True)
class TorchWorker:
    """A worker process of a DataLoader.

    Attributes:
        id: The number of the worker, from 0.
        workers: The number of workers.
        group: A number that workers have in common if they were started together.
    """

    id: int
    workers: int
    group: int


def this_worker(cut: Cut | None = None) -> TorchWorker | None:
    """Return which worker of a DataLoader this process is; None if it is not a worker.

    A ``cut`` that was made in this worker is the worker's own and must not be shared again: the answer is None.
    """
    if cut is not None and cut.in_loader_worker:
        return None
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None and hasattr(data, "get_worker_info") else None
    return None if info is None else TorchWorker(info.id, info.num_workers, info.seed - info.id)


def called_by_torch() -> bool:
    """Return whether the caller of this function was called by a DataLoader without workers, to begin a pass."""
    caller = sys._getframe(2)
    return caller.f_globals.get("__name__") == "torch.utils.data._utils.fetch"


def items_per_fetch() -> int:
    """Return how many items the DataLoader collates into a batch; call this while its worker fetches one.

    Torch does not pass the batch size to workers, so it is read from the frame of the function that fetches a batch.
    Without such a frame, the answer is 1: batches are then cut differently than without workers, but hold the same
    samples.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "fetch" and "possibly_batched_index" in frame.f_code.co_varnames:
            wanted = frame.f_locals["possibly_batched_index"]
            return len(wanted) if isinstance(wanted, list) and wanted else 1
    return 1
