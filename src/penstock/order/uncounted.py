"""The order of shards without an index, whose samples are not counted yet.

It is the same order as with counts: a group of shards needs only the counts of its own shards, and requests them when
the group is opened. A position is ``group * GROUP_STRIDE + offset``. A piece of step 1 covers its groups one after
another; a piece of step ``n * GROUP_STRIDE`` covers every n-th group, the first one from its offset and the others
from their beginning. Cuts fall between groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from penstock.errors import PlanError
from penstock.order import pieces as piece_ops
from penstock.order.hashing import I64, U64
from penstock.order.orders import (
    UNKNOWN,
    Order,
    Refs,
    Spans,
    doubling_sizes,
    require_counts,
    scatter,
    shard_keys,
    shard_refs,
)
from penstock.order.pieces import GROUP_STRIDE, Piece
from penstock.order.windows import DEFAULT_WINDOW, Group, indices_by_label, shuffled_span_order

_EXPECTED_GROUPS = 24  # announced ahead where a group is one shard, which may be small


class UncountedOrder(Order):
    """Shards in sequence or shuffled, counted one group at a time.

    Args:
        names_hash: The hashes of the shards' names.
        count: Returns the number of samples in a shard; called when its group is opened, once per shard and order.
        leaf: The number of the source.
        seed: The run's seed.
        epoch: The epoch.
        window: As in ``ShuffledOrder``.
        shards: As in ``ShuffledOrder``; without a shuffle, a group is one shard.
        shuffle: Whether the order is shuffled.
        grow: Returns how many samples of a shard are known to be there, and whether these are all; waits until more
            are known than a given number. By default a shard is counted at once.
        expect: Called with the shards that will be read next, in order, and whether all of their counts are needed.
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
        window: int | None = None,
        shards: int = 1,
        shuffle: bool = False,
        grow: Callable[[int, int], tuple[int, bool]] | None = None,
        expect: Callable[[Sequence[int], bool], None] | None = None,
    ) -> None:
        names = self._names = np.asarray(names_hash, np.uint64)
        self.leaf, self.fixed = leaf, not shuffle
        self._count, self._seed, self._epoch = count, seed, epoch
        self._grow, self._expect = grow or (lambda shard, _: (count(shard), True)), expect or (lambda *_: None)
        self._window = DEFAULT_WINDOW if window is None else window
        self._per_group = shards if shuffle else 1
        self._keys = shard_keys(names, leaf, seed, epoch)
        self._visited = shuffled_span_order(names, seed, epoch) if shuffle else np.arange(len(names))
        self._counts = np.full(len(names), UNKNOWN, np.int64)
        self.group_count = -(-len(names) // self._per_group)

    def shuffled(self, window: int | None, shards: int) -> UncountedOrder:
        """Return the order of the same shards, shuffled."""
        return UncountedOrder(
            self._names,
            self._count,
            self.leaf,
            self._seed,
            self._epoch,
            window=window,
            shards=shards,
            shuffle=True,
            grow=self._grow,
            expect=self._expect,
        )

    def at(self, p: I64) -> Refs:
        return scatter(
            len(p),
            [
                (indices, self._in_group(g, p[indices] - g * GROUP_STRIDE))
                for g, indices in indices_by_label(p // GROUP_STRIDE)
            ],
        )

    def shards_of(self, group: int) -> list[int]:
        """Return the shards that a group reads, so that they can be prefetched."""
        first = group * self._per_group
        shards: list[int] = self._visited[first : first + self._per_group].tolist()
        return shards

    def walk(self, piece: Piece, sizes: Iterator[int] | None = None) -> Iterator[tuple[I64, Refs, int]]:
        start, stop, _, _ = piece
        sizes = sizes or doubling_sizes()
        while start < stop:
            g, offset = divmod(start, GROUP_STRIDE)
            following = (g + _stride(piece)) * GROUP_STRIDE
            last, known, whole = stop - g * GROUP_STRIDE, 0, False
            self._expect_after(g, piece)
            while offset < last:
                if offset >= known:
                    known, whole = (0, True) if whole else self._known(g, offset)
                    if offset >= known:
                        break
                offsets = np.arange(offset, min(offset + next(sizes), known, last), dtype=np.int64)
                offset += len(offsets)
                ended = offset >= last or (whole and offset >= known)
                after = following if ended else g * GROUP_STRIDE + offset
                yield g * GROUP_STRIDE + offsets, self._in_group(g, offsets), after
            start = following

    def _known(self, g: int, beyond: int) -> tuple[int, bool]:
        """Return how many samples of a group are known, more than ``beyond`` unless these are all."""
        if not self.fixed:
            return int(self._group_counts(g).sum()), True
        shard = self.shards_of(g)[0]
        if self._counts[shard] != UNKNOWN:
            return int(self._counts[shard]), True
        known, whole = self._grow(shard, beyond)
        if whole:
            self._counts[shard] = known
        return known, whole

    def _expect_after(self, g: int, piece: Piece) -> None:
        """Announce the shards of a group and of those after it, as far as a piece goes."""
        groups = range(g, min(self.group_count, -(-piece[1] // GROUP_STRIDE)), _stride(piece))
        ahead = groups[:_EXPECTED_GROUPS] if self.fixed else groups[:2]
        self._expect([shard for group in ahead for shard in self.shards_of(group)], not self.fixed)

    def whole(self) -> list[Piece]:
        return [[0, self.group_count * GROUP_STRIDE, 1, 0]] if self.group_count else []

    def cut(self, pieces: Sequence[Piece], rank: int, world: int, kind: str) -> list[Piece]:
        piece_ops.check_cut(rank, world, kind)
        if world > self.group_count:
            raise PlanError(
                f"{world} ranks cannot share {self.group_count} groups of uncounted shards: "
                "run `penstock index` on the shards first, use fewer ranks, or lower shuffle(shards=)"
            )
        count = sum(map(_group_count, pieces))
        first, last = (rank * count // world, (rank + 1) * count // world) if kind == "range" else (0, count)
        out: list[Piece] = []
        seen = 0
        for piece in pieces:
            group_count = _group_count(piece)
            if kind == "range":
                out += _pick_groups(piece, max(first - seen, 0), min(last - seen, group_count), 1)
            else:
                out += _pick_groups(piece, (rank - seen) % world, group_count, world)
            seen += group_count
        return out

    def merge(self, pieces: Iterable[Piece], world: int) -> list[Piece]:
        partial: list[Piece] = []
        groups: list[Piece] = []
        for piece in pieces:
            partial_groups, whole_groups = _separate_whole_groups(piece)
            partial += partial_groups
            groups += whole_groups
        whole = [[a * GROUP_STRIDE, b * GROUP_STRIDE, _step_for(n), 0] for a, b, n, _ in piece_ops.merge(groups, world)]
        return _join_runs(sorted(partial + whole))

    def holds(self, piece: Piece) -> bool:
        return piece[1] <= self.group_count * GROUP_STRIDE

    def _spans(self, stop: int) -> Spans:
        require_counts(self, "this order")
        raise AssertionError

    def spans(self, stop: int | None = None) -> Spans:
        """Raise a PlanError: without counts there are no spans.

        Raises:
            PlanError: Always.
        """
        return self._spans(0)

    def _group_counts(self, g: int) -> I64:
        """Return the counts of a group's shards; two threads may both count a shard and store the same number."""
        shards = self.shards_of(g)
        for shard in shards:
            if self._counts[shard] == UNKNOWN:
                self._counts[shard] = self._count(shard)
        return self._counts[shards]

    def _in_group(self, g: int, offsets: I64) -> Refs:
        if self.fixed:
            span, index = np.zeros_like(offsets), offsets  # the group is one shard
        else:
            span, index = Group(self._group_counts(g), self._window, (self._seed, self._epoch, g)).locate(offsets)
        return shard_refs(self.leaf, self._keys, self._visited[g * self._per_group + span], index, self._epoch)


def to_counted(pieces: Iterable[Piece], groups: I64) -> list[Piece]:
    """Translate pieces of an uncounted order to positions of the same order with counts.

    Args:
        pieces: Pieces with positions ``group * GROUP_STRIDE + offset``, from a state.
        groups: ``groups()`` of the counted order, a ``ShuffledOrder`` or ``ShardOrder``.
    """
    out: list[Piece] = []
    bounds: list[int] = groups.tolist()
    for piece in pieces:
        start, stop, _, sub = piece
        if start >= stop:
            continue
        stride, last = _stride(piece), -(-stop // GROUP_STRIDE)
        first, end = start // GROUP_STRIDE, min(last, len(bounds) - 1)
        if stride == 1 and first < end:
            out.append([_counted_position(start, bounds), _counted_position(stop, bounds), 1, sub])
            continue
        for g in range(first, end, stride):
            first_position = start if g == first else g * GROUP_STRIDE
            out.append(
                [
                    _counted_position(first_position, bounds),
                    _counted_position(min(stop, (g + 1) * GROUP_STRIDE), bounds),
                    1,
                    sub if g == first else 0,
                ]
            )
    return piece_ops.join(out)


def _counted_position(position: int, bounds: list[int]) -> int:
    g, offset = divmod(position, GROUP_STRIDE)
    if g >= len(bounds) - 1:
        return bounds[-1]
    return min(bounds[g] + offset, bounds[g + 1])


def _stride(piece: Piece) -> int:
    """Return the distance in groups from one group of a piece to the next."""
    return max(1, piece[2] // GROUP_STRIDE)


def _step_for(stride: int) -> int:
    return 1 if stride == 1 else stride * GROUP_STRIDE


def _group_count(piece: Piece) -> int:
    """Return the number of groups that a piece covers, wholly or in part."""
    start, stop, _, _ = piece
    return piece_ops.size([start // GROUP_STRIDE, -(-stop // GROUP_STRIDE), _stride(piece), 0]) if start < stop else 0


def _pick_groups(piece: Piece, first: int, last: int, every: int) -> list[Piece]:
    """Return the groups ``first, first + every, ...`` below ``last`` of those that a piece covers."""
    if first >= last:
        return []
    start, stop, _, sub = piece
    stride, group = _stride(piece), start // GROUP_STRIDE
    final = first + (last - 1 - first) // every * every
    begin = (group + first * stride) * GROUP_STRIDE if first else start
    end = min(stop, (group + final * stride + 1) * GROUP_STRIDE)
    step = 1 if final == first else _step_for(stride * every)
    return [[begin, end, step, 0 if first else sub]]


def _separate_whole_groups(piece: Piece) -> tuple[list[Piece], list[Piece]]:
    """Split a piece into the groups that it covers in part, and the numbers of those that it covers wholly."""
    start, stop, _, sub = piece
    stride = _stride(piece)
    partial_groups: list[Piece] = []
    if start < stop and (start % GROUP_STRIDE or sub):
        partial_groups.append([start, min(stop, (start // GROUP_STRIDE + 1) * GROUP_STRIDE), 1, sub])
        start = (start // GROUP_STRIDE + stride) * GROUP_STRIDE
    whole = [start // GROUP_STRIDE, stop // GROUP_STRIDE, stride, 0]
    count = piece_ops.size(whole)
    last_group = (start // GROUP_STRIDE + count * stride) * GROUP_STRIDE
    if start < stop and last_group < stop:
        partial_groups.append([last_group, stop, 1, 0])
    return partial_groups, [whole] if count else []


def _join_runs(pieces: list[Piece]) -> list[Piece]:
    """Join adjacent runs of step 1."""
    out: list[Piece] = []
    for piece in pieces:
        if out and out[-1][2] == piece[2] == 1 and out[-1][1] == piece[0] and not piece[3]:
            out[-1] = [out[-1][0], piece[1], 1, out[-1][3]]
        else:
            out.append(piece)
    return out
