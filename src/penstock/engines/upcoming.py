"""Upcoming uses of shards: which a run will use, and when, so that a cache keeps the right ones and fetches ahead."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.engines.cursor import Start
from penstock.engines.program import Program
from penstock.errors import PenstockError
from penstock.order import ENDLESS, GROUP_STRIDE, I64, Order, Piece, Refs, UncountedOrder, size, total
from penstock.plan import Cut, ShardCache
from penstock.storage.cache_policy import F64

_MIN_POINTS, _POINTS_PER_SHARD = 1 << 14, 8  # how many positions of an epoch are looked at
_MAX_EPOCHS = 4  # of an order without an end


def expect_uses(program: Program, order: Order | None, epoch: int, start: Start, cut: Cut | None) -> list[ShardCache]:
    """Tell the caches of a run's sources what the run will use; return these caches.

    Args:
        program: The program.
        order: The order of the epoch; None for a stream.
        epoch: The number of the epoch.
        start: Where the run begins.
        cut: The rank's cut, for the next epoch; None: all of it.
    """
    if order is None or program.stream is not None:
        return []
    caches = []
    for leaf, reader in enumerate(program.readers):
        if (cache := reader.cache()) is not None:
            whole = program.fields[leaf].only is None
            cache.expect(partial(_two_epochs, program, leaf, order, epoch, start, cut), whole=whole)
            caches.append(cache)
    program.caches = caches
    return caches


def _two_epochs(
    program: Program, leaf: int, order: Order, epoch: int, start: Start, cut: Cut | None
) -> tuple[F64, F64, F64] | None:
    """Return the first and the last use of each shard in this epoch, and the first in the next one; inf: none."""
    pieces = [piece for part in start.parts() for piece in part.pieces]
    length, first, last = shard_uses(program, leaf, order, pieces)
    try:
        following_epoch = epoch + 1 if program.plan.epoch is None else epoch
        following_order = program.order(following_epoch, counts=not isinstance(order, UncountedOrder))
        following_start = program.start(following_order, cut or program.plan.cut)
        _, following, _ = shard_uses(program, leaf, following_order, following_start.left)
    except PenstockError:  # the run itself reports it
        return None
    return first, last, length + following


def shard_uses(program: Program, leaf: int, order: Order, pieces: Sequence[Piece]) -> tuple[float, F64, F64]:
    """Return how long pieces of an order are, and where in them each shard of a source is first and last used.

    Without counts, length and positions are those of groups of shards. A shard that is not used has ``inf``, ``-inf``.
    """
    shards = len(program.readers[leaf].names)
    first, last = np.full(shards, np.inf), np.full(shards, -np.inf)
    if isinstance(order, UncountedOrder):
        groups = [g for start, stop, step, _ in pieces for g in _groups(start, stop, step)]
        for at, group in enumerate(groups):
            used = np.array(order.shards_of(group), np.int64)
            first[used], last[used] = np.minimum(first[used], at), np.maximum(last[used], at)
        return float(len(groups)), first, last
    length = total(pieces)
    if length >= ENDLESS:
        length = _MAX_EPOCHS * sum(
            int(counts.sum()) for reader in program.readers if (counts := reader.counts(False)) is not None
        )
    count = min(length, max(_MIN_POINTS, _POINTS_PER_SHARD * shards))
    points = np.unique(np.linspace(0, length - 1, count).astype(np.int64))
    begun = 0
    for piece in pieces:
        own = points[(points >= begun) & (points < begun + size(piece))]
        refs: Refs | None = order.at(piece[0] + (own - begun) * piece[2]) if len(own) else None
        while refs is not None:
            chosen = refs.leaf == leaf
            _note(refs.shard[chosen], own[chosen], first, last)
            refs = refs.pair
        begun += size(piece)
    return float(length), first, last


def _note(shard: I64, at: I64, first: F64, last: F64) -> None:
    np.minimum.at(first, shard, at)
    np.maximum.at(last, shard, at)


def _groups(start: int, stop: int, step: int) -> Any:
    """Return the numbers of the groups of uncounted shards that a piece covers."""
    return range(start // GROUP_STRIDE, -(-stop // GROUP_STRIDE), max(1, step // GROUP_STRIDE))
