"""Feeds a consumer: loaders and their state, ranks, the loaders and workers of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.feed.batch_format import BatchFormat as BatchFormat
    from penstock.feed.batch_format import map_ahead as map_ahead
    from penstock.feed.epochs import Epochs as Epochs
    from penstock.feed.loader import Loader as Loader
    from penstock.feed.ranks import find_rank as find_rank
    from penstock.feed.torch_isinstance import torch_class as torch_class
    from penstock.feed.torch_isinstance import warn_uncut as warn_uncut
    from penstock.feed.torch_stream import TorchStream as TorchStream
    from penstock.feed.torch_workers import TorchWorker as TorchWorker
    from penstock.feed.torch_workers import this_worker as this_worker
    from penstock.feed.worker_split import WorkerShare as WorkerShare
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
