"""Mixing orders by weight, without keeping anything per sample.

A mix is a row of blocks of about 64 positions. How many samples a source has given before block ``b`` is
``floor(b * 64 * weight)``, so the content of any block is known without the ones before it; who stands where
inside a block is a keyed permutation. When a source runs out, the others go on as a new *phase*; so they do
where the weights change, whose position is exact: the block before it is cut short, by quotas of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.order.hashing import I64, U64, fold, fold_into, permutations
from penstock.order.orders import Order, Refs, Spans, counted, scatter
from penstock.order.pieces import ENDLESS
from penstock.order.windows import by_label

_BLOCK = 64
_FRACTION = 28  # bits after the point: products of two such numbers stay within 63 bits
_STRETCH = 4096  # positions that a shuffle over a mix keeps together


@dataclass(frozen=True, slots=True)
class _Phase:
    """A stretch in which the same sources are alive and have the same weights.

    ``rates`` are fixed-point samples per block (0 for a source that has run out), ``given`` what each source
    gave before. After ``blocks`` whole blocks comes one last block with quotas of its own, ``last``.
    """

    number: int
    start: int
    given: I64
    rates: I64
    blocks: int
    last: I64

    def before(self, block: I64) -> I64:
        """How many samples each source has given, in this phase, before each block: (blocks, sources)."""
        high, low = block[:, None] >> _FRACTION, block[:, None] & ((1 << _FRACTION) - 1)
        return high * self.rates + (low * self.rates >> _FRACTION)

    def block_of(self, offset: I64) -> I64:
        """Which block each offset into the phase is in: estimated, then corrected."""
        per_block = float(self.rates.sum()) / (1 << _FRACTION)
        block = np.minimum((offset / per_block).astype(np.int64), self.blocks)
        while (late := self.before(block).sum(1) > offset).any():
            block = block - late
        while (early := (block < self.blocks) & (self.before(block + 1).sum(1) <= offset)).any():
            block = block + early
        return block

    def quotas(self, block: I64, before: I64) -> I64:
        """How many samples of each source each block holds."""
        closing = (block == self.blocks)[:, None]
        return np.where(closing, self.last, self.before(np.minimum(block + 1, self.blocks)) - before)


class MixedOrder(Order):
    """Samples of several orders, interleaved by weight, each source in its own order.

    Args:
        orders: The sources.
        weights: Their shares; not negative, not all zero.
        changes: Later shares, each with the position of the mix from which it holds; ascending, above 0. Where "all"
            has only sources left whose share is zero, the next change comes early.
        stop: "first" ends where a source would be asked for a sample it has not; "all" goes on with the rest.
        seed: The run's seed.
        epoch: The epoch; it decides the arrangement, never the size or how much a source gives between changes.

    Raises:
        PlanError: a source is not counted.
    """

    fixed = False

    def __init__(
        self,
        orders: Sequence[Order],
        weights: Sequence[float],
        stop: str,
        seed: int,
        epoch: int,
        changes: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        self._orders = [counted(order, "mix") for order in orders]
        self._stop, self._seed, self._epoch = stop, seed, epoch
        ends = [*(position for position, _ in changes), ENDLESS]
        self._shares = list(zip([weights, *(later for _, later in changes)], ends, strict=True))  # each with its end
        self._phases = list(self._plan_phases())
        self._starts = np.array([phase.start for phase in self._phases], np.int64)
        self.size, used = self._end()
        self.stable = all(o.fixed or (o.stable and taken == o.size) for o, taken in zip(orders, used, strict=True))

    def at(self, p: I64) -> Refs:
        source, inner = np.empty_like(p), np.empty_like(p)
        for i, places in by_label(np.searchsorted(self._starts, p, "right") - 1):
            phase = self._phases[i]
            source[places], inner[places] = self._locate(phase, p[places] - phase.start)
        parts = [(places, self._orders[c].at(inner[places])) for c, places in by_label(source)]
        return scatter(len(p), parts)

    def _plan_phases(self) -> Iterator[_Phase]:
        """Lay out the phases: each ends where a source runs out or the weights change."""
        sizes = [order.size for order in self._orders]
        given, start, number = [0] * len(sizes), 0, 0
        for weights, end in self._shares:
            while start < end:
                left = [ENDLESS if s >= ENDLESS else s - had for s, had in zip(sizes, given, strict=True)]
                rates = self._rates(weights, left)
                if not rates:
                    break
                phase, had = _phase(number, start, end, given, left, rates, cut=self._stop == "all")
                yield phase
                whole = int(phase.last.sum()) + sum(_floors(phase.blocks, rates))
                if phase.blocks >= ENDLESS or (self._stop == "first" and sum(had) < whole):
                    return
                start, number = start + whole, number + 1
                given = [a + b for a, b in zip(given, had, strict=True)]

    def _rates(self, weights: Sequence[float], left: Sequence[int]) -> list[int]:
        """Fixed-point samples per block of the sources that are alive; empty when none is."""
        first = self._stop == "first"
        alive = [w if w > 0 and (first or have > 0) else 0.0 for w, have in zip(weights, left, strict=True)]
        whole = sum(alive)
        return [max(1, round(_BLOCK * w / whole * (1 << _FRACTION))) if w else 0 for w in alive] if whole else []

    def _end(self) -> tuple[int, list[int]]:
        """The size, and how many samples each source gives in all."""
        if not self._phases:
            return 0, [0] * len(self._orders)
        phase = self._phases[-1]
        if phase.blocks >= ENDLESS:
            return ENDLESS, [0] * len(self._orders)
        whole = [phase.blocks * rate >> _FRACTION for rate in phase.rates.tolist()]
        used = [a + b for a, b in zip(phase.given.tolist(), whole, strict=True)]
        begin = phase.start + sum(whole)
        if self._stop == "all":
            return begin + int(phase.last.sum()), [a + b for a, b in zip(used, phase.last.tolist(), strict=True)]
        block = np.array([phase.blocks], np.int64)
        source, ordinal = self._arranged(phase, block, phase.last[None, :])
        left = _ints([order.size - had for order, had in zip(self._orders, used, strict=True)])
        end = int(np.flatnonzero(ordinal[0] >= left[source[0]])[0])
        extra = np.bincount(source[0][:end], minlength=len(used)).tolist()
        return begin + end, [a + b for a, b in zip(used, extra, strict=True)]

    def _locate(self, phase: _Phase, offset: I64) -> tuple[I64, I64]:
        """Which source, and which position of it, stands at each offset into a phase."""
        block, which = np.unique(phase.block_of(offset), return_inverse=True)
        before = phase.before(block)
        quotas = phase.quotas(block, before)
        slot = offset - before.sum(1)[which]
        source, inner = np.empty_like(offset), np.empty_like(offset)
        for _, rows in by_label(quotas.sum(1)):  # blocks of one length at once
            row_of = np.full(len(block), -1, np.int64)
            row_of[rows] = np.arange(len(rows))
            places = np.flatnonzero(row_of[which] >= 0)
            row = row_of[which[places]]
            sources, ordinals = self._arranged(phase, block[rows], quotas[rows])
            c = sources[row, slot[places]]
            source[places] = c
            inner[places] = phase.given[c] + before[rows][row, c] + ordinals[row, slot[places]]
        return source, inner

    def _arranged(self, phase: _Phase, block: I64, quotas: I64) -> tuple[I64, I64]:
        """Which source each slot of blocks of one length holds, and its how-manieth: both (blocks, slots)."""
        rows, length = len(block), int(quotas[0].sum())
        sources = np.tile(np.arange(quotas.shape[1]), rows).repeat(quotas.ravel()).reshape(rows, length)
        placed = np.take_along_axis(sources, permutations(self._keys(phase, block), length), 1)
        rank = np.empty_like(placed)
        np.put_along_axis(rank, np.argsort(placed, axis=1, kind="stable"), np.arange(length)[None, :], 1)
        firsts = np.cumsum(quotas, axis=1) - quotas
        return placed, rank - np.take_along_axis(firsts, placed, 1)

    def _keys(self, phase: _Phase, block: I64) -> U64:
        keys = fold_into(np.full(len(block), fold(self._seed, self._epoch, 3, phase.number), np.uint64), block)
        if self._stop == "first":
            # The arrangement of the last block decides the size, which must not differ between epochs.
            keys[block == phase.blocks] = fold(self._seed, 3, phase.number, phase.blocks)
        return keys

    def _spans(self, stop: int) -> Spans:
        number = np.arange(-(-stop // _STRETCH), dtype=np.uint64)
        bounds = np.minimum(np.arange(len(number) + 1, dtype=np.int64) * _STRETCH, stop)
        return Spans(bounds, fold_into(number, 3))


def _phase(
    number: int, start: int, end: int, given: Sequence[int], left: Sequence[int], rates: Sequence[int], cut: bool
) -> tuple[_Phase, list[int]]:
    """The phase that begins at ``start`` and goes to ``end`` at most; and what each source has for it.

    Its last block asks for what a whole block would, or for what fits before ``end``. What a source does not have is
    left out of the block if ``cut``; else the block shows that it was asked for.
    """
    served = min(_blocks_within(have, rate) for have, rate in zip(left, rates, strict=True) if rate)
    fitting = _blocks_before(end - start, rates) if end < ENDLESS else ENDLESS
    blocks = min(served, fitting)
    if blocks >= ENDLESS:
        nothing = np.zeros(len(rates), np.int64)
        return _Phase(number, start, _ints(given), _ints(rates), ENDLESS, nothing), list(left)
    whole = _floors(blocks, rates)
    asked = [b - a for a, b in zip(whole, _floors(blocks + 1, rates), strict=True)]
    if blocks == fitting:
        asked = _shared(end - start - sum(whole), asked)
    taken = [min(ask, have - had) for ask, have, had in zip(asked, left, whole, strict=True)]
    last = taken if cut else asked
    phase = _Phase(number, start, _ints(given), _ints(rates), blocks, _ints(last))
    return phase, [a + b for a, b in zip(whole, taken, strict=True)]


def _floors(blocks: int, rates: Sequence[int]) -> list[int]:
    """What each source gives in so many blocks."""
    return [blocks * rate >> _FRACTION for rate in rates]


def _blocks_before(positions: int, rates: Sequence[int]) -> int:
    """How many whole blocks fit in so many positions."""
    blocks = (positions << _FRACTION) // sum(rates)
    while sum(_floors(blocks + 1, rates)) <= positions:  # a few: rounding takes less than one sample of each source
        blocks += 1
    return blocks


def _shared(slots: int, asked: Sequence[int]) -> list[int]:
    """Share so many slots, fewer than all, in proportion to ``asked``: largest remainders first."""
    whole = sum(asked)
    shares = [slots * ask // whole for ask in asked]
    behind = sorted(range(len(asked)), key=lambda c: (-(slots * asked[c] % whole), c))
    for c in behind[: slots - sum(shares)]:
        shares[c] += 1
    return shares


def _blocks_within(have: int, rate: int) -> int:
    """How many whole blocks a source can serve."""
    return ENDLESS if have >= ENDLESS else (((have + 1) << _FRACTION) - 1) // rate


def _ints(values: Sequence[int]) -> I64:
    return np.array(values, np.int64)
