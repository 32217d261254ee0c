"""Mixing orders by weight, without storing anything per sample.

A mix is a sequence of cycles of about 64 positions. Before cycle ``c``, a source has contributed
``floor(c * 64 * weight)`` samples, so the content of any cycle is known without visiting the cycles before it. Within a
cycle, a keyed permutation arranges the samples. A new *phase* begins where a source runs out and the others continue,
and where the weights change. The position of a change is exact: the cycle before it is shorter and has its own quotas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.order.hashing import I64, U64, fold, fold_into, permutations
from penstock.order.orders import Order, Refs, Spans, require_counts, scatter
from penstock.order.pieces import ENDLESS
from penstock.order.windows import indices_by_label

_CYCLE = 64  # positions in a cycle, about
_FRACTION_BITS = 28  # of the fixed-point rates: the product of two such numbers fits in 63 bits
_SPAN = 4096  # positions that a shuffle over a mix keeps together


@dataclass(frozen=True, slots=True)
class _Phase:
    """A run of cycles in which the same sources are active with the same weights.

    ``rates`` are fixed-point samples per cycle (0 for a source that has run out). ``used`` counts the samples of each
    source before this phase. After ``cycles`` whole cycles, one last cycle has the quotas ``last``.
    """

    number: int
    start: int
    used: I64
    rates: I64
    cycles: int
    last: I64

    def used_before(self, cycle: I64) -> I64:
        """Return how many samples of each source this phase uses before each cycle, shaped (cycles, sources)."""
        high, low = cycle[:, None] >> _FRACTION_BITS, cycle[:, None] & ((1 << _FRACTION_BITS) - 1)
        return high * self.rates + (low * self.rates >> _FRACTION_BITS)

    def cycle_of(self, offset: I64) -> I64:
        """Return the cycle of each offset into the phase: estimated, then corrected."""
        per_cycle = float(self.rates.sum()) / (1 << _FRACTION_BITS)
        cycle = np.minimum((offset / per_cycle).astype(np.int64), self.cycles)
        while (late := self.used_before(cycle).sum(1) > offset).any():
            cycle = cycle - late
        while (early := (cycle < self.cycles) & (self.used_before(cycle + 1).sum(1) <= offset)).any():
            cycle = cycle + early
        return cycle

    def quotas(self, cycle: I64, before: I64) -> I64:
        """Return how many samples of each source each cycle contains."""
        is_last = (cycle == self.cycles)[:, None]
        return np.where(is_last, self.last, self.used_before(np.minimum(cycle + 1, self.cycles)) - before)


class MixedOrder(Order):
    """Samples of several orders, interleaved by weight; the samples of each source keep their order.

    Args:
        orders: The sources.
        weights: One weight per source; not negative, not all zero.
        stop: "first" ends the mix when it needs a sample of a source that has run out; "all" continues with the rest.
        seed: The run's seed.
        epoch: The epoch. It decides the arrangement, but not the size, nor how many samples of a source are used
            between changes.
        changes: New weights, each with the position of the mix from which they apply; ascending, above 0. If "all" has
            only sources with a weight of zero left, the next change takes effect early.

    Raises:
        PlanError: A source is not counted.
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
        self._orders = [require_counts(order, "mix") for order in orders]
        self._stop, self._seed, self._epoch = stop, seed, epoch
        ends = [*(position for position, _ in changes), ENDLESS]
        # Weights, each with the position at which they end.
        self._weights = list(zip([weights, *(changed for _, changed in changes)], ends, strict=True))
        self._phases = list(self._plan_phases())
        self._starts = np.array([phase.start for phase in self._phases], np.int64)
        self.size, used = self._end()
        self.stable = all(o.fixed or (o.stable and count == o.size) for o, count in zip(orders, used, strict=True))

    def at(self, p: I64) -> Refs:
        source, inner = np.empty_like(p), np.empty_like(p)
        for i, indices in indices_by_label(np.searchsorted(self._starts, p, "right") - 1):
            phase = self._phases[i]
            source[indices], inner[indices] = self._locate(phase, p[indices] - phase.start)
        parts = [(indices, self._orders[c].at(inner[indices])) for c, indices in indices_by_label(source)]
        return scatter(len(p), parts)

    def _plan_phases(self) -> Iterator[_Phase]:
        """Yield the phases: each ends where a source runs out or the weights change."""
        sizes = [order.size for order in self._orders]
        used, start, number = [0] * len(sizes), 0, 0
        for weights, end in self._weights:
            while start < end:
                remaining = [ENDLESS if s >= ENDLESS else s - count for s, count in zip(sizes, used, strict=True)]
                rates = self._rates(weights, remaining)
                if not rates:
                    break
                phase, in_phase = _phase(number, start, end, used, remaining, rates, cut=self._stop == "all")
                yield phase
                length = int(phase.last.sum()) + sum(_samples_in(phase.cycles, rates))
                if phase.cycles >= ENDLESS or (self._stop == "first" and sum(in_phase) < length):
                    return
                start, number = start + length, number + 1
                used = [a + b for a, b in zip(used, in_phase, strict=True)]

    def _rates(self, weights: Sequence[float], remaining: Sequence[int]) -> list[int]:
        """Return fixed-point samples per cycle, 0 for sources that are not active; empty if none is active."""
        first = self._stop == "first"
        active = [w if w > 0 and (first or have > 0) else 0.0 for w, have in zip(weights, remaining, strict=True)]
        total = sum(active)
        return [max(1, round(_CYCLE * w / total * (1 << _FRACTION_BITS))) if w else 0 for w in active] if total else []

    def _end(self) -> tuple[int, list[int]]:
        """Return the size, and how many samples of each source are used in total."""
        if not self._phases:
            return 0, [0] * len(self._orders)
        phase = self._phases[-1]
        if phase.cycles >= ENDLESS:
            return ENDLESS, [0] * len(self._orders)
        whole = [phase.cycles * rate >> _FRACTION_BITS for rate in phase.rates.tolist()]
        used = [a + b for a, b in zip(phase.used.tolist(), whole, strict=True)]
        begin = phase.start + sum(whole)
        if self._stop == "all":
            return begin + int(phase.last.sum()), [a + b for a, b in zip(used, phase.last.tolist(), strict=True)]
        cycle = np.array([phase.cycles], np.int64)
        source, ordinal = self._arranged(phase, cycle, phase.last[None, :])
        remaining = _ints([order.size - count for order, count in zip(self._orders, used, strict=True)])
        end = int(np.flatnonzero(ordinal[0] >= remaining[source[0]])[0])
        extra = np.bincount(source[0][:end], minlength=len(used)).tolist()
        return begin + end, [a + b for a, b in zip(used, extra, strict=True)]

    def _locate(self, phase: _Phase, offset: I64) -> tuple[I64, I64]:
        """Return the source, and the position within that source, at each offset into a phase."""
        cycle, cycle_index = np.unique(phase.cycle_of(offset), return_inverse=True)
        before = phase.used_before(cycle)
        quotas = phase.quotas(cycle, before)
        slot = offset - before.sum(1)[cycle_index]
        source, inner = np.empty_like(offset), np.empty_like(offset)
        for _, rows in indices_by_label(quotas.sum(1)):  # all cycles of one length at once
            row_of = np.full(len(cycle), -1, np.int64)
            row_of[rows] = np.arange(len(rows))
            indices = np.flatnonzero(row_of[cycle_index] >= 0)
            row = row_of[cycle_index[indices]]
            sources, ordinals = self._arranged(phase, cycle[rows], quotas[rows])
            c = sources[row, slot[indices]]
            source[indices] = c
            inner[indices] = phase.used[c] + before[rows][row, c] + ordinals[row, slot[indices]]
        return source, inner

    def _arranged(self, phase: _Phase, cycle: I64, quotas: I64) -> tuple[I64, I64]:
        """Return, for cycles of one length, each slot's source and its ordinal in that source; both (cycles, slots)."""
        rows, length = len(cycle), int(quotas[0].sum())
        sources = np.tile(np.arange(quotas.shape[1]), rows).repeat(quotas.ravel()).reshape(rows, length)
        placed = np.take_along_axis(sources, permutations(self._keys(phase, cycle), length), 1)
        ordinal = np.empty_like(placed)
        np.put_along_axis(ordinal, np.argsort(placed, axis=1, kind="stable"), np.arange(length)[None, :], 1)
        firsts = np.cumsum(quotas, axis=1) - quotas
        return placed, ordinal - np.take_along_axis(firsts, placed, 1)

    def _keys(self, phase: _Phase, cycle: I64) -> U64:
        keys = fold_into(np.full(len(cycle), fold(self._seed, self._epoch, 3, phase.number), np.uint64), cycle)
        if self._stop == "first":
            # The arrangement of the last cycle decides the size, which must not differ between epochs.
            keys[cycle == phase.cycles] = fold(self._seed, 3, phase.number, phase.cycles)
        return keys

    def _spans(self, stop: int) -> Spans:
        number = np.arange(-(-stop // _SPAN), dtype=np.uint64)
        bounds = np.minimum(np.arange(len(number) + 1, dtype=np.int64) * _SPAN, stop)
        return Spans(bounds, fold_into(number, 3))


def _phase(
    number: int, start: int, end: int, used: Sequence[int], remaining: Sequence[int], rates: Sequence[int], cut: bool
) -> tuple[_Phase, list[int]]:
    """Return the phase that begins at ``start`` and ends at ``end`` or before, and the samples of each source in it.

    The last cycle of the phase wants as many samples as a whole cycle, or as many as fit before ``end``. With ``cut``,
    samples that a source does not have are left out of that cycle; otherwise they stay in the quotas, and the mix ends
    there.
    """
    served = min(_cycles_served(have, rate) for have, rate in zip(remaining, rates, strict=True) if rate)
    fitting = _cycles_within(end - start, rates) if end < ENDLESS else ENDLESS
    cycles = min(served, fitting)
    if cycles >= ENDLESS:
        nothing = np.zeros(len(rates), np.int64)
        return _Phase(number, start, _ints(used), _ints(rates), ENDLESS, nothing), list(remaining)
    whole = _samples_in(cycles, rates)
    wanted = [b - a for a, b in zip(whole, _samples_in(cycles + 1, rates), strict=True)]
    if cycles == fitting:
        wanted = _apportion(end - start - sum(whole), wanted)
    available = [min(want, have - count) for want, have, count in zip(wanted, remaining, whole, strict=True)]
    last = available if cut else wanted
    phase = _Phase(number, start, _ints(used), _ints(rates), cycles, _ints(last))
    return phase, [a + b for a, b in zip(whole, available, strict=True)]


def _samples_in(cycles: int, rates: Sequence[int]) -> list[int]:
    """Return how many samples of each source a number of whole cycles uses."""
    return [cycles * rate >> _FRACTION_BITS for rate in rates]


def _cycles_within(positions: int, rates: Sequence[int]) -> int:
    """Return how many whole cycles fit into a number of positions."""
    cycles = (positions << _FRACTION_BITS) // sum(rates)
    while (
        sum(_samples_in(cycles + 1, rates)) <= positions
    ):  # a few times: rounding costs less than one sample per source
        cycles += 1
    return cycles


def _apportion(slots: int, wanted: Sequence[int]) -> list[int]:
    """Divide ``slots``, fewer than the sum of ``wanted``, in proportion to it; the largest remainders round up."""
    total = sum(wanted)
    shares = [slots * want // total for want in wanted]
    by_remainder = sorted(range(len(wanted)), key=lambda c: (-(slots * wanted[c] % total), c))
    for c in by_remainder[: slots - sum(shares)]:
        shares[c] += 1
    return shares


def _cycles_served(have: int, rate: int) -> int:
    """Return how many whole cycles a source can serve."""
    return ENDLESS if have >= ENDLESS else (((have + 1) << _FRACTION_BITS) - 1) // rate


def _ints(values: Sequence[int]) -> I64:
    return np.array(values, np.int64)
