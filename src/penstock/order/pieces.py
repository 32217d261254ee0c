"""Pieces: what is still to come, as a short list of arithmetic runs.

A piece is ``[start, stop, step, sub]``: the positions ``start, start + step, ...`` below ``stop``. ``sub``
outputs of its *first* position are already delivered. The functions never change the lists they are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.errors import PlanError

Piece = list[int]

ENDLESS = 1 << 62  # the size of an order without end; positions stay below it, so sums of two fit in 63 bits
V = 1 << 40  # without counts a position is group * V + offset in the group: no group has that many samples
CUTS = ("range", "step")


def size(piece: Piece) -> int:
    """Count the positions of one piece."""
    start, stop, step, _ = piece
    return max(0, (stop - start + step - 1) // step)


def total(pieces: Iterable[Piece]) -> int:
    """Count the positions of all pieces."""
    return sum(map(size, pieces))


def head(pieces: Iterable[Piece], n: int) -> list[Piece]:
    """Keep the first ``n`` positions."""
    out: list[Piece] = []
    for piece in pieces:
        if n <= 0:
            break
        start, stop, step, sub = piece
        here = size(piece)
        if here:
            out.append([start, stop if n >= here else start + (n - 1) * step + 1, step, sub])
        n -= here
    return out


def tail(pieces: Iterable[Piece], n: int) -> list[Piece]:
    """Drop the first ``n`` positions."""
    out: list[Piece] = []
    for piece in pieces:
        start, stop, step, sub = piece
        here = size(piece)
        gone = min(max(n, 0), here)
        n -= gone
        if gone < here:
            out.append([start + gone * step, stop, step, 0 if gone else sub])
    return out


def check_cut(rank: int, world: int, how: str) -> None:
    """Refuse a cut that cannot be made.

    Raises:
        PlanError: ``rank`` is not in ``[0, world)``, or ``how`` is not a cut.
    """
    if how not in CUTS:
        raise PlanError(f'cut={how!r} is not known: use "range" or "step"')
    if not 0 <= rank < world:
        raise PlanError(f"rank {rank} is not in a world of {world}: ranks are 0 to world - 1")


def cut(pieces: Sequence[Piece], rank: int, world: int, how: str) -> list[Piece]:
    """Give a rank its share: a contiguous run of the list ("range") or every world-th position ("step").

    Raises:
        PlanError: the rank, the world or the kind of cut is impossible, or a range of an endless order.
    """
    check_cut(rank, world, how)
    if world == 1:
        return [list(piece) for piece in pieces if size(piece)]
    if how == "range":
        if any(piece[1] >= ENDLESS for piece in pieces):
            raise PlanError('an endless order has no ranges to give to ranks: use cut="step", or repeat(n)')
        count = total(pieces)
        first, last = rank * count // world, (rank + 1) * count // world
        return head(tail(pieces, first), last - first)
    out: list[Piece] = []
    seen = 0
    for piece in pieces:
        start, stop, step, sub = piece
        skipped = (rank - seen) % world
        here = size(piece)
        seen += here
        if skipped < here:
            out.append([start + skipped * step, stop, step * world, 0 if skipped else sub])
    return out


def join(pieces: Iterable[Piece]) -> list[Piece]:
    """Write the same positions, in the same order, with as few pieces as neighbours allow."""
    out: list[Piece] = []
    for piece in pieces:
        here = size(piece)
        if not here:
            continue
        start, stop, step, sub = piece if here > 1 else [piece[0], piece[0] + 1, 1, piece[3]]
        common = _common_step(out[-1], [start, stop, step, sub]) if out else 0
        if common:
            out[-1] = [out[-1][0], stop, common, out[-1][3]]
        else:
            out.append([start, stop, step, sub])
    return out


def _common_step(before: Piece, after: Piece) -> int:
    """The step with which ``after`` continues ``before``, or 0; a single position goes with any step."""
    if after[3]:
        return 0
    many_before, many_after = size(before), size(after)
    if many_before > 1:
        step = before[2]
    elif many_after > 1:
        step = after[2]
    else:
        step = after[0] - before[0]
    fits = step > 0 and after[0] == before[0] + many_before * step and (many_after == 1 or after[2] == step)
    return step if fits else 0


def merge(pieces: Iterable[Piece], world: int) -> list[Piece]:
    """Put together what the ranks of a world have left: the same positions, sorted, in few pieces."""
    begun: list[Piece] = []
    by_step: dict[int, list[Piece]] = {}
    for start, stop, step, sub in pieces:
        if start >= stop:
            continue
        if sub:
            begun.append([start, start + 1, 1, sub])
            start += step
        if start < stop:
            by_step.setdefault(step, []).append([start, stop, step, 0])
    return join(sorted(begun + list(_filled(by_step, world))))


def _filled(by_step: dict[int, list[Piece]], world: int) -> Iterator[Piece]:
    """Replace complete sets of residue classes by runs of a smaller step, from the largest step down."""
    while by_step:
        step = max(by_step)
        rest = by_step.pop(step)
        for factor in _factors(step, len(rest), world):
            rest, runs = _fill(rest, step, factor)
            if runs:
                by_step.setdefault(step // factor, []).extend(runs)
        yield from rest


def _factors(step: int, most: int, world: int) -> Iterator[int]:
    """Into how many classes a step may have been cut: the world, then primes up to the number of pieces."""
    if world > 1 and step % world == 0:
        yield world
    factor = 2
    while factor <= min(most, step):
        if step % factor == 0:
            yield factor
            while step % factor == 0:
                step //= factor
        factor += 1


def _fill(pieces: list[Piece], step: int, factor: int) -> tuple[list[Piece], list[Piece]]:
    """Where all ``factor`` classes of a residue are present, make them one run: (what is left over, runs)."""
    finer = step // factor
    rest: list[Piece] = []
    runs: list[Piece] = []
    families: dict[int, dict[int, list[Piece]]] = {}
    for piece in sorted(pieces):
        known = families.setdefault(piece[0] % finer, {}).setdefault(piece[0] % step, [])
        if known and piece[0] < known[-1][1]:
            rest.append(piece)  # given twice: kept apart, so that it stays twice
        elif known and piece[0] == known[-1][0] + size(known[-1]) * step:
            known[-1] = [known[-1][0], piece[1], step, 0]
        else:
            known.append(piece)
    for classes in families.values():
        shared = list(_shared(classes, step)) if len(classes) == factor else []
        runs += [[low, high, finer, 0] for low, high in shared]
        for members in classes.values():
            rest += _without(members, shared)
    return rest, runs


def _shared(classes: dict[int, list[Piece]], step: int) -> Iterator[tuple[int, int]]:
    """The stretches, of a step or more, in which every class has a piece."""
    members = [piece for pieces in classes.values() for piece in pieces]
    edges = sorted([(start, 1) for start, _, _, _ in members] + [(stop, -1) for _, stop, _, _ in members])
    present = low = 0
    for edge, change in edges:
        if present == len(classes) and edge - low >= step:
            yield low, edge
        present += change
        low = edge


def _without(pieces: list[Piece], gone: list[tuple[int, int]]) -> Iterator[Piece]:
    """Pieces of one class without the stretches ``gone``, each of which lies within one of them."""
    stretches = iter(gone)
    low, high = next(stretches, (ENDLESS, ENDLESS))
    for start, stop, step, _ in pieces:
        while low < stop:
            if start < low:
                yield [start, low, step, 0]
            start += max(0, -(-(high - start) // step)) * step
            low, high = next(stretches, (ENDLESS, ENDLESS))
        if start < stop:
            yield [start, stop, step, 0]
