"""Feeding a consumer: loaders, ranks, torch."""

from penstock.feed.dealing import Deal
from penstock.feed.epochs import Epochs
from penstock.feed.loader import Loader
from penstock.feed.offer import torch_class, warn_uncut
from penstock.feed.ranks import find_rank
from penstock.feed.stream import Stream
from penstock.feed.workers import Worker, this_worker

__all__ = [
    "Deal",
    "Epochs",
    "Loader",
    "Stream",
    "Worker",
    "find_rank",
    "this_worker",
    "torch_class",
    "warn_uncut",
]
