"""The order of shards that nobody has counted yet.

It is the same order as with counts: a group of shards needs only the counts of its own shards, and those are
asked for when the group is opened. A position is ``group * V + offset``. A piece of step 1 goes through its
groups one after the other; a piece of step ``n * V`` takes every n-th group, the first from its offset on and
the later ones from their beginning. Cuts fall between groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from penstock.errors import PlanError
from penstock.order import pieces as runs_of
from penstock.order.hashing import I64, U64
from penstock.order.orders import (
    UNKNOWN,
    Order,
    Refs,
    Spans,
    counted,
    doubling,
    scatter,
    shard_keys,
    shard_refs,
)
from penstock.order.pieces import Piece, V
from penstock.order.windows import DEFAULT_WINDOW, Group, by_label, shuffled_spans


class UncountedOrder(Order):
    """Shards in order or shuffled, counted one group at a time.

    Args:
        names_hash: The shards' names, hashed.
        count: Says how many samples a shard has; asked when its group is opened, once per shard and order.
        leaf: The branch.
        seed: The run's seed.
        epoch: The epoch.
        window: As in ``Shuffled``.
        shards: As in ``Shuffled``; unshuffled, a group is one shard.
        shuffle: Whether the order is shuffled.
    """

    size = UNKNOWN
    stable = True

    def __init__(
        self,
        names_hash: U64,
        count: Callable[[int], int],
        leaf: int,
        seed: int,
        epoch: int,
        *,
        window: int | None,
        shards: int,
        shuffle: bool,
    ) -> None:
        names = np.asarray(names_hash, np.uint64)
        self.leaf, self.fixed = leaf, not shuffle
        self._count, self._seed, self._epoch = count, seed, epoch
        self._window = DEFAULT_WINDOW if window is None else window
        self._per_group = shards if shuffle else 1
        self._keys = shard_keys(names, leaf, seed, epoch)
        self._taken = shuffled_spans(names, seed, epoch) if shuffle else np.arange(len(names))
        self._counts = np.full(len(names), UNKNOWN, np.int64)
        self.group_count = -(-len(names) // self._per_group)

    def at(self, p: I64) -> Refs:
        return scatter(len(p), [(places, self._in_group(g, p[places] - g * V)) for g, places in by_label(p // V)])

    def shards_of(self, group: int) -> list[int]:
        """Say which shards are read for a group, so that they can be fetched ahead."""
        first = group * self._per_group
        taken: list[int] = self._taken[first : first + self._per_group].tolist()
        return taken

    def walk(self, piece: Piece, sizes: Iterator[int] | None = None) -> Iterator[tuple[I64, Refs, int]]:
        start, stop, _, _ = piece
        sizes = sizes or doubling()
        while start < stop:
            g, offset = divmod(start, V)
            end = min(int(self._group_counts(g).sum()), stop - g * V)
            following = (g + _stride(piece)) * V
            while offset < end:
                offsets = np.arange(offset, min(offset + next(sizes), end), dtype=np.int64)
                offset += len(offsets)
                after = g * V + offset if offset < end else following
                yield g * V + offsets, self._in_group(g, offsets), after
            start = following

    def whole(self) -> list[Piece]:
        return [[0, self.group_count * V, 1, 0]] if self.group_count else []

    def cut(self, pieces: Sequence[Piece], rank: int, world: int, how: str) -> list[Piece]:
        runs_of.check_cut(rank, world, how)
        if world > self.group_count:
            raise PlanError(
                f"{world} ranks cannot share {self.group_count} windows of shards that are not counted: "
                "run `penstock index` on the shards first, or use fewer ranks or shuffle(shards=) with fewer"
            )
        count = sum(map(_groups_in, pieces))
        first, last = (rank * count // world, (rank + 1) * count // world) if how == "range" else (0, count)
        out: list[Piece] = []
        seen = 0
        for piece in pieces:
            here = _groups_in(piece)
            if how == "range":
                out += _pick(piece, max(first - seen, 0), min(last - seen, here), 1)
            else:
                out += _pick(piece, (rank - seen) % world, here, world)
            seen += here
        return out

    def merge(self, pieces: Iterable[Piece], world: int) -> list[Piece]:
        loose: list[Piece] = []
        groups: list[Piece] = []
        for piece in pieces:
            parts, numbers = _untouched(piece)
            loose += parts
            groups += numbers
        whole = [[a * V, b * V, _step_of(n), 0] for a, b, n, _ in runs_of.merge(groups, world)]
        return _join(sorted(loose + whole))

    def holds(self, piece: Piece) -> bool:
        return piece[1] <= self.group_count * V

    def _spans(self, stop: int) -> Spans:
        counted(self, "this order")
        raise AssertionError

    def spans(self, stop: int | None = None) -> Spans:
        """Refuse: without counts there are no stretches.

        Raises:
            PlanError: always.
        """
        return self._spans(0)

    def _group_counts(self, g: int) -> I64:
        """The counts of a group's shards; two threads may both ask for one, and write the same number."""
        shards = self.shards_of(g)
        for shard in shards:
            if self._counts[shard] == UNKNOWN:
                self._counts[shard] = self._count(shard)
        return self._counts[shards]

    def _in_group(self, g: int, offsets: I64) -> Refs:
        counts = self._group_counts(g)
        if self.fixed:
            span, index = np.zeros_like(offsets), offsets  # its one shard
        else:
            span, index = Group(counts, self._window, (self._seed, self._epoch, g)).locate(offsets)
        return shard_refs(self.leaf, self._keys, self._taken[g * self._per_group + span], index)


def to_known(pieces: Iterable[Piece], groups: I64) -> list[Piece]:
    """Rewrite pieces of an uncounted order for the same order with counts.

    Args:
        pieces: Pieces in positions ``group * V + offset``, from a state.
        groups: ``Shuffled.groups()`` or ``Shards.groups()`` of the counted order.
    """
    out: list[Piece] = []
    bounds: list[int] = groups.tolist()
    for piece in pieces:
        start, stop, _, sub = piece
        if start >= stop:
            continue
        stride, last = _stride(piece), -(-stop // V)
        first, end = start // V, min(last, len(bounds) - 1)
        if stride == 1 and first < end:
            out.append([_known(start, bounds), _known(stop, bounds), 1, sub])
            continue
        for g in range(first, end, stride):
            begin = start if g == first else g * V
            out.append([_known(begin, bounds), _known(min(stop, (g + 1) * V), bounds), 1, sub if g == first else 0])
    return runs_of.join(out)


def _known(position: int, bounds: list[int]) -> int:
    g, offset = divmod(position, V)
    if g >= len(bounds) - 1:
        return bounds[-1]
    return min(bounds[g] + offset, bounds[g + 1])


def _stride(piece: Piece) -> int:
    """How many groups further the next one is."""
    return max(1, piece[2] // V)


def _step_of(stride: int) -> int:
    return 1 if stride == 1 else stride * V


def _groups_in(piece: Piece) -> int:
    """How many groups a piece touches."""
    start, stop, _, _ = piece
    return runs_of.size([start // V, -(-stop // V), _stride(piece), 0]) if start < stop else 0


def _pick(piece: Piece, first: int, last: int, every: int) -> list[Piece]:
    """Take the groups ``first, first + every, ...`` below ``last`` of those a piece touches."""
    if first >= last:
        return []
    start, stop, _, sub = piece
    stride, group = _stride(piece), start // V
    final = first + (last - 1 - first) // every * every
    begin = (group + first * stride) * V if first else start
    end = min(stop, (group + final * stride + 1) * V)
    step = 1 if final == first else _step_of(stride * every)
    return [[begin, end, step, 0 if first else sub]]


def _untouched(piece: Piece) -> tuple[list[Piece], list[Piece]]:
    """Part a piece into groups it holds in part, and the numbers of those it holds whole."""
    start, stop, _, sub = piece
    stride = _stride(piece)
    loose: list[Piece] = []
    if start < stop and (start % V or sub):
        loose.append([start, min(stop, (start // V + 1) * V), 1, sub])
        start = (start // V + stride) * V
    whole = [start // V, stop // V, stride, 0]
    count = runs_of.size(whole)
    partial = (start // V + count * stride) * V
    if start < stop and partial < stop:
        loose.append([partial, stop, 1, 0])
    return loose, [whole] if count else []


def _join(pieces: list[Piece]) -> list[Piece]:
    """Join runs of step 1 that follow each other."""
    out: list[Piece] = []
    for piece in pieces:
        if out and out[-1][2] == piece[2] == 1 and out[-1][1] == piece[0] and not piece[3]:
            out[-1] = [out[-1][0], piece[1], 1, out[-1][3]]
        else:
            out.append(piece)
    return out
