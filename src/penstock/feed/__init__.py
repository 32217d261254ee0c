"""Feeding a consumer: loaders, ranks."""

from penstock.feed.loader import Loader
from penstock.feed.ranks import find_rank

__all__ = ["Loader", "find_rank"]
