"""The worker processes of a torch DataLoader, as one of them sees it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from penstock.plan import Cut


@dataclass(frozen=True, slots=True)
class TorchWorker:
    """This process is worker ``id`` of ``many``."""

    id: int
    many: int
    of: int  # the same number for the workers that were started together


def this_worker(cut: Cut | None = None) -> TorchWorker | None:
    """Which worker of a DataLoader this process is; ``None``: none, or ``cut`` was made here and is its own."""
    if cut is not None and cut.within:
        return None
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None and hasattr(data, "get_worker_info") else None
    return None if info is None else TorchWorker(info.id, info.num_workers, info.seed - info.id)


def wanted_at_once() -> int:
    """How many items a DataLoader makes a batch of: to be asked where its worker fetches one.

    A worker is told its number and how many there are, but not the size of the batches it makes: that is known only to
    the call that fetches one. If it cannot be found there, 1 is right too: then batches are cut differently than
    without workers, but hold the same samples.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "fetch" and "possibly_batched_index" in frame.f_code.co_varnames:
            wanted = frame.f_locals["possibly_batched_index"]
            return len(wanted) if isinstance(wanted, list) and wanted else 1
    return 1
