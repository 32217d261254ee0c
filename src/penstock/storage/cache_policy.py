"""The policy of a cache: keep the objects that will be used soonest, by the orders of this and the next epoch.

Pure functions. An object that is read now is kept only if its next use comes before the next use of another object,
which then makes room; so a cache that is too small keeps a part of the data from epoch to epoch, instead of replacing
all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NEVER = math.inf
F64 = NDArray[np.float64]


class Stored(NamedTuple):
    """An object in the cache: its size, its next use (None: no plan names it), and when it was last used."""

    key: str
    nbytes: int
    next_use: float | None
    used_ns: int = 0


def choose_evictions(stored: Iterable[Stored], nbytes: int, spare: int, until: float | None) -> list[Stored]:
    """Return the objects to evict for one that is added, best first; their sizes may add up to less than ``nbytes``.

    Objects that no plan names go first, the least recently used of them before the others; then those that are used
    last. Objects that are used before the added one stay.

    Args:
        stored: The objects that may be evicted.
        nbytes: How many bytes must become free.
        spare: How many more may, so that the next addition need not look again.
        until: When the added object is used the next time, after the use that it is read for; None: unknown.
    """
    unknown = sorted((one for one in stored if one.next_use is None), key=lambda one: one.used_ns)
    known = [one for one in stored if one.next_use is not None and until is not None and one.next_use > until]
    known.sort(key=lambda one: -(one.next_use or 0.0))
    chosen, freed = [], 0
    for one in [*unknown, *known]:
        if freed >= nbytes + spare:
            break
        chosen.append(one)
        freed += one.nbytes
    return chosen


@dataclass(frozen=True, slots=True)
class Uses:
    """When one run uses objects, in the positions of its epoch.

    Attributes:
        keys: The objects, ascending.
        first: The position at which each is first used in this epoch; ``inf``: it is not.
        last: The position at which it is last used in this epoch.
        following: The position at which it is first used in the next epoch, counted from the start of this one.
    """

    keys: NDArray[np.uint64]
    first: F64
    last: F64
    following: F64

    def upcoming(self, progress: float) -> F64:
        """Return how many positions lie between ``progress`` and the next use of each object."""
        ahead = np.where(progress <= self.last, np.maximum(self.first - progress, 0.0), self.following - progress)
        return np.maximum(ahead, 0.0)

    def after_next(self, progress: float) -> F64:
        """Return the same for the use after the one that is under way, or that comes next."""
        return np.maximum(np.where(progress <= self.last, self.following, NEVER) - progress, 0.0)

    def row(self, key: int) -> int | None:
        """Return the row of an object; None if the run does not use it."""
        at = int(np.searchsorted(self.keys, np.uint64(key)))
        return at if at < len(self.keys) and int(self.keys[at]) == key else None


def working_bytes(limit: int) -> int:
    """Return how much of a cache is for objects that are in use but not worth keeping: they may be read repeatedly."""
    return limit // 64


def spare_bytes(limit: int) -> int:
    """Return how much more than needed is evicted at once: the folder is measured before."""
    return limit // 256
