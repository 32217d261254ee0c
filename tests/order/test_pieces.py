from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.order import pieces as piece_ops
from penstock.order.pieces import ENDLESS, Piece

CUTS = st.sampled_from(["range", "step"])
WORLDS = st.integers(1, 7)


@st.composite
def piece_lists(draw: st.DrawFn) -> list[Piece]:
    """Generate pieces without common positions: random residue classes of a few ranges, in any order."""
    out: list[Piece] = []
    at = 0
    for _ in range(draw(st.integers(0, 4))):
        at += draw(st.integers(0, 3))
        stop = at + draw(st.integers(0, 40))
        step = draw(st.integers(1, 6))
        for residue in draw(st.lists(st.integers(0, step - 1), unique=True, max_size=step)):
            out.append([at + residue, stop, step, draw(st.sampled_from([0, 0, 0, 2]))])
        at = max(at + step, stop)
    return list(draw(st.permutations(out)))


def positions(pieces: list[Piece]) -> list[tuple[int, int]]:
    """Return every position in order, with the number of its outputs that are already delivered."""
    return [(p, sub if p == a else 0) for a, b, step, sub in pieces for p in range(a, b, step)]


@given(piece_lists(), st.integers(0, 100))
def test_head_and_tail_split_the_positions(pieces: list[Piece], n: int) -> None:
    everything = positions(pieces)
    assert positions(piece_ops.head(pieces, n)) == everything[:n]
    assert positions(piece_ops.tail(pieces, n)) == everything[n:]
    assert piece_ops.total(pieces) == len(everything)


@given(piece_lists(), WORLDS, CUTS)
def test_cuts_are_disjoint_and_cover_everything(pieces: list[Piece], world: int, kind: str) -> None:
    shares = [positions(piece_ops.cut(pieces, rank, world, kind)) for rank in range(world)]
    assert Counter(p for share in shares for p in share) == Counter(positions(pieces))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(piece_lists(), WORLDS)
def test_a_step_cut_takes_every_world_th_position(pieces: list[Piece], world: int) -> None:
    for rank in range(world):
        assert positions(piece_ops.cut(pieces, rank, world, "step")) == positions(pieces)[rank::world]


@given(piece_lists(), WORLDS)
def test_a_range_cut_takes_a_contiguous_run(pieces: list[Piece], world: int) -> None:
    shares = [piece_ops.cut(pieces, rank, world, "range") for rank in range(world)]
    assert [p for share in shares for p in positions(share)] == positions(pieces)


@given(piece_lists())
def test_join_keeps_positions_and_their_order(pieces: list[Piece]) -> None:
    assert positions(piece_ops.join(pieces)) == positions(pieces)


@given(piece_lists(), WORLDS)
def test_merge_keeps_positions_and_sorts_pieces(pieces: list[Piece], world: int) -> None:
    merged = piece_ops.merge(pieces, world)
    assert Counter(positions(merged)) == Counter(positions(pieces))
    assert merged == sorted(merged)


@given(piece_lists(), WORLDS, CUTS)
def test_merging_untouched_cuts_keeps_every_position(pieces: list[Piece], world: int, kind: str) -> None:
    shares = [piece for rank in range(world) for piece in piece_ops.cut(pieces, rank, world, kind)]
    assert Counter(positions(piece_ops.merge(shares, world))) == Counter(positions(pieces))


@pytest.mark.parametrize("world", [1, 2, 3, 8, 12, 64])
@pytest.mark.parametrize("kind", ["range", "step"])
def test_ranks_in_lockstep_leave_few_pieces(world: int, kind: str) -> None:
    whole = [[0, 100_003, 1, 0]]
    shares = [piece_ops.tail(piece_ops.cut(whole, rank, world, kind), 96) for rank in range(world)]
    merged = piece_ops.merge([piece for share in shares for piece in share], world)
    assert len(merged) == (1 if kind == "step" else world)


def test_lockstep_stays_small_when_the_world_changes() -> None:
    left = [[0, 1_000_003, 1, 0]]
    for world in (8, 6, 16, 3, 64):
        shares = [piece_ops.tail(piece_ops.cut(left, rank, world, "step"), 32) for rank in range(world)]
        left = piece_ops.merge([piece for share in shares for piece in share], world)
        assert len(left) <= 2
    assert piece_ops.total(left) == 1_000_003 - 32 * (8 + 6 + 16 + 3 + 64)


@pytest.mark.parametrize("kind", ["range", "step"])
def test_ranks_out_of_step_leave_a_few_pieces_each(kind: str) -> None:
    """A range cut leaves a gap for every rank so far; a step cut forgets the ranks of earlier worlds."""
    rng = random.Random(0)
    left = [[0, 1_000_003, 1, 0]]
    ranks = 0
    for world in (8, 6, 16, 3, 64):
        ranks += world
        shares = [
            piece_ops.tail(piece_ops.cut(left, rank, world, kind), 1000 + rng.randrange(50)) for rank in range(world)
        ]
        left = piece_ops.merge([piece for share in shares for piece in share], world)
        assert len(left) <= (ranks if kind == "range" else 2 * world)


def test_a_partly_delivered_position_joins_what_follows_it() -> None:
    assert piece_ops.join([[5, 6, 1, 2], [9, 100, 4, 0]]) == [[5, 100, 4, 2]]
    assert piece_ops.join([[5, 6, 1, 2], [6, 7, 1, 1]]) == [[5, 6, 1, 2], [6, 7, 1, 1]]


def test_residue_classes_of_different_ends_are_merged_where_all_are_present() -> None:
    assert piece_ops.merge([[0, 90, 2, 0], [1, 100, 2, 0]], 2) == [[0, 90, 1, 0], [91, 100, 2, 0]]


def test_an_endless_order_can_only_be_cut_by_step() -> None:
    whole = [[0, ENDLESS, 1, 0]]
    assert piece_ops.cut(whole, 1, 4, "step") == [[1, ENDLESS, 4, 0]]
    assert piece_ops.cut(whole, 0, 1, "range") == whole
    with pytest.raises(PlanError, match='cut="step"'):
        piece_ops.cut(whole, 0, 4, "range")


def test_endless_pieces_stay_endless_through_a_merge() -> None:
    shares = [piece_ops.tail(piece_ops.cut([[0, ENDLESS, 1, 0]], rank, 3, "step"), 10) for rank in range(3)]
    assert piece_ops.merge([piece for share in shares for piece in share], 3) == [[30, ENDLESS, 1, 0]]


@pytest.mark.parametrize(("rank", "world", "kind"), [(2, 2, "range"), (-1, 2, "step"), (0, 0, "range"), (0, 1, "zip")])
def test_an_impossible_cut_is_refused(rank: int, world: int, kind: str) -> None:
    with pytest.raises(PlanError):
        piece_ops.cut([[0, 9, 1, 0]], rank, world, kind)


def test_a_duplicate_position_stays_duplicated() -> None:
    pieces = [[0, 40, 2, 0], [0, 40, 2, 0], [21, 40, 2, 0]]
    assert Counter(positions(piece_ops.merge(pieces, 2))) == Counter(positions(pieces))


def test_arguments_are_never_modified() -> None:
    pieces = [[0, 5, 1, 0], [5, 9, 1, 0], [20, 40, 4, 1]]
    before = [list(piece) for piece in pieces]
    shared = piece_ops.cut(pieces, 0, 1, "range")
    shared[0][0] = 99
    for change in (piece_ops.join, lambda p: piece_ops.merge(p, 2), lambda p: piece_ops.head(p, 7)):
        change(pieces)[0][0] = 99
    assert pieces == before
