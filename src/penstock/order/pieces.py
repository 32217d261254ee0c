"""Pieces: the positions that a rank still has to deliver, cut by rank and resumed, as arithmetic progressions.

A piece is ``[start, stop, step, sub]``: the positions ``start, start + step, ...`` below ``stop``, where ``sub``
outputs of the *first* position have already been delivered. No function here modifies its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.errors import PlanError

Piece = list[int]

ENDLESS = 1 << 62  # the size of an endless order; positions stay below it, so that the sum of two fits in 63 bits
GROUP_STRIDE = 1 << 40  # an uncounted position is group * GROUP_STRIDE + offset; no group has that many samples
CUTS = ("range", "step")


def size(piece: Piece) -> int:
    """Return the number of positions in a piece."""
    start, stop, step, _ = piece
    return max(0, (stop - start + step - 1) // step)


def total(pieces: Iterable[Piece]) -> int:
    """Return the number of positions in all pieces."""
    return sum(map(size, pieces))


def head(pieces: Iterable[Piece], n: int) -> list[Piece]:
    """Return pieces for the first ``n`` positions."""
    out: list[Piece] = []
    for piece in pieces:
        if n <= 0:
            break
        start, stop, step, sub = piece
        count = size(piece)
        if count:
            out.append([start, stop if n >= count else start + (n - 1) * step + 1, step, sub])
        n -= count
    return out


def tail(pieces: Iterable[Piece], n: int) -> list[Piece]:
    """Return pieces for everything after the first ``n`` positions."""
    out: list[Piece] = []
    for piece in pieces:
        start, stop, step, sub = piece
        count = size(piece)
        dropped = min(max(n, 0), count)
        n -= dropped
        if dropped < count:
            out.append([start + dropped * step, stop, step, 0 if dropped else sub])
    return out


def check_cut(rank: int, world: int, kind: str) -> None:
    """Check the arguments of a cut.

    Raises:
        PlanError: ``rank`` is not in ``[0, world)``, or ``kind`` is neither "range" nor "step".
    """
    if kind not in CUTS:
        raise PlanError(f'cut={kind!r} is not supported: use "range" or "step"')
    if not 0 <= rank < world:
        raise PlanError(f"rank {rank} is out of range for a world of {world}: ranks run from 0 to world - 1")


def cut(pieces: Sequence[Piece], rank: int, world: int, kind: str) -> list[Piece]:
    """Return a rank's share: a contiguous run of the positions ("range") or every world-th position ("step").

    Raises:
        PlanError: The rank, the world or the kind is invalid, or an endless order is cut into ranges.
    """
    check_cut(rank, world, kind)
    if world == 1:
        return [list(piece) for piece in pieces if size(piece)]
    if kind == "range":
        if any(piece[1] >= ENDLESS for piece in pieces):
            raise PlanError('an endless order cannot be cut into ranges: use cut="step", or repeat(n)')
        count = total(pieces)
        first, last = rank * count // world, (rank + 1) * count // world
        return head(tail(pieces, first), last - first)
    out: list[Piece] = []
    seen = 0
    for piece in pieces:
        start, stop, step, sub = piece
        skipped = (rank - seen) % world
        count = size(piece)
        seen += count
        if skipped < count:
            out.append([start + skipped * step, stop, step * world, 0 if skipped else sub])
    return out


def join(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbouring pieces where possible; the positions and their order stay the same."""
    out: list[Piece] = []
    for piece in pieces:
        count = size(piece)
        if not count:
            continue
        start, stop, step, sub = piece if count > 1 else [piece[0], piece[0] + 1, 1, piece[3]]
        common = _common_step(out[-1], [start, stop, step, sub]) if out else 0
        if common:
            out[-1] = [out[-1][0], stop, common, out[-1][3]]
        else:
            out.append([start, stop, step, sub])
    return out


def _common_step(before: Piece, after: Piece) -> int:
    """Return the step with which ``after`` continues ``before``, or 0; a single position fits any step."""
    if after[3]:
        return 0
    before_count, after_count = size(before), size(after)
    if before_count > 1:
        step = before[2]
    elif after_count > 1:
        step = after[2]
    else:
        step = after[0] - before[0]
    fits = step > 0 and after[0] == before[0] + before_count * step and (after_count == 1 or after[2] == step)
    return step if fits else 0


def merge(pieces: Iterable[Piece], world: int) -> list[Piece]:
    """Merge the remaining pieces of all ranks of a world: the same positions, sorted, in as few pieces as possible."""
    started: list[Piece] = []
    by_step: dict[int, list[Piece]] = {}
    for start, stop, step, sub in pieces:
        if start >= stop:
            continue
        if sub:
            started.append([start, start + 1, 1, sub])
            start += step
        if start < stop:
            by_step.setdefault(step, []).append([start, stop, step, 0])
    return join(sorted(started + list(_coalesced(by_step, world))))


def _coalesced(by_step: dict[int, list[Piece]], world: int) -> Iterator[Piece]:
    """Yield the pieces with complete sets of residue classes replaced by runs of a smaller step, largest step first."""
    while by_step:
        step = max(by_step)
        rest = by_step.pop(step)
        for factor in _factors(step, len(rest), world):
            rest, runs = _coalesce_classes(rest, step, factor)
            if runs:
                by_step.setdefault(step // factor, []).extend(runs)
        yield from rest


def _factors(step: int, piece_count: int, world: int) -> Iterator[int]:
    """Yield the factors by which a step may have been cut: the world, then primes up to the number of pieces."""
    if world > 1 and step % world == 0:
        yield world
    factor = 2
    while factor <= min(piece_count, step):
        if step % factor == 0:
            yield factor
            while step % factor == 0:
                step //= factor
        factor += 1


def _coalesce_classes(pieces: list[Piece], step: int, factor: int) -> tuple[list[Piece], list[Piece]]:
    """Replace each range in which all ``factor`` classes are present by one run; return (remaining pieces, runs)."""
    finer = step // factor
    rest: list[Piece] = []
    runs: list[Piece] = []
    families: dict[int, dict[int, list[Piece]]] = {}
    for piece in sorted(pieces):
        runs_of_class = families.setdefault(piece[0] % finer, {}).setdefault(piece[0] % step, [])
        if runs_of_class and piece[0] < runs_of_class[-1][1]:
            rest.append(piece)  # a duplicate: kept separate, so that it is delivered twice
        elif runs_of_class and piece[0] == runs_of_class[-1][0] + size(runs_of_class[-1]) * step:
            runs_of_class[-1] = [runs_of_class[-1][0], piece[1], step, 0]
        else:
            runs_of_class.append(piece)
    for classes in families.values():
        complete = list(_common_ranges(classes, step)) if len(classes) == factor else []
        runs += [[low, high, finer, 0] for low, high in complete]
        for members in classes.values():
            rest += _subtract(members, complete)
    return rest, runs


def _common_ranges(classes: dict[int, list[Piece]], step: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges, at least one step long, in which every class has a piece."""
    members = [piece for pieces in classes.values() for piece in pieces]
    edges = sorted([(start, 1) for start, _, _, _ in members] + [(stop, -1) for _, stop, _, _ in members])
    present = low = 0
    for edge, change in edges:
        if present == len(classes) and edge - low >= step:
            yield low, edge
        present += change
        low = edge


def _subtract(pieces: list[Piece], ranges: list[tuple[int, int]]) -> Iterator[Piece]:
    """Yield the pieces of one class without ``ranges``, each of which is inside one of the pieces."""
    remaining = iter(ranges)
    low, high = next(remaining, (ENDLESS, ENDLESS))
    for start, stop, step, _ in pieces:
        while low < stop:
            if start < low:
                yield [start, low, step, 0]
            start += max(0, -(-(high - start) // step)) * step
            low, high = next(remaining, (ENDLESS, ENDLESS))
        if start < stop:
            yield [start, stop, step, 0]
