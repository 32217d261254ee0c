from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.order import pieces as runs_of
from penstock.order.pieces import ENDLESS, Piece

CUTS = st.sampled_from(["range", "step"])
WORLDS = st.integers(1, 7)


@st.composite
def piece_lists(draw: st.DrawFn) -> list[Piece]:
    """Pieces with no position in common: random classes of a few stretches, in any order."""
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
    """Every position in order, with what is delivered of it."""
    return [(p, sub if p == a else 0) for a, b, step, sub in pieces for p in range(a, b, step)]


@given(piece_lists(), st.integers(0, 100))
def test_head_and_tail_part_a_list(pieces: list[Piece], n: int) -> None:
    everything = positions(pieces)
    assert positions(runs_of.head(pieces, n)) == everything[:n]
    assert positions(runs_of.tail(pieces, n)) == everything[n:]
    assert runs_of.total(pieces) == len(everything)


@given(piece_lists(), WORLDS, CUTS)
def test_cuts_are_disjoint_and_cover(pieces: list[Piece], world: int, how: str) -> None:
    shares = [positions(runs_of.cut(pieces, rank, world, how)) for rank in range(world)]
    assert Counter(p for share in shares for p in share) == Counter(positions(pieces))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(piece_lists(), WORLDS)
def test_a_step_cut_takes_every_world_th_position(pieces: list[Piece], world: int) -> None:
    for rank in range(world):
        assert positions(runs_of.cut(pieces, rank, world, "step")) == positions(pieces)[rank::world]


@given(piece_lists(), WORLDS)
def test_a_range_cut_takes_a_contiguous_run(pieces: list[Piece], world: int) -> None:
    shares = [runs_of.cut(pieces, rank, world, "range") for rank in range(world)]
    assert [p for share in shares for p in positions(share)] == positions(pieces)


@given(piece_lists())
def test_join_keeps_positions_and_their_order(pieces: list[Piece]) -> None:
    assert positions(runs_of.join(pieces)) == positions(pieces)


@given(piece_lists(), WORLDS)
def test_merge_keeps_positions_and_sorts_pieces(pieces: list[Piece], world: int) -> None:
    merged = runs_of.merge(pieces, world)
    assert Counter(positions(merged)) == Counter(positions(pieces))
    assert merged == sorted(merged)


@given(piece_lists(), WORLDS, CUTS)
def test_merging_untouched_cuts_keeps_every_position(pieces: list[Piece], world: int, how: str) -> None:
    shares = [piece for rank in range(world) for piece in runs_of.cut(pieces, rank, world, how)]
    assert Counter(positions(runs_of.merge(shares, world))) == Counter(positions(pieces))


@pytest.mark.parametrize("world", [1, 2, 3, 8, 12, 64])
@pytest.mark.parametrize("how", ["range", "step"])
def test_ranks_in_lockstep_leave_few_pieces(world: int, how: str) -> None:
    whole = [[0, 100_003, 1, 0]]
    shares = [runs_of.tail(runs_of.cut(whole, rank, world, how), 96) for rank in range(world)]
    merged = runs_of.merge([piece for share in shares for piece in share], world)
    assert len(merged) == (1 if how == "step" else world)


def test_lockstep_stays_small_when_the_world_changes() -> None:
    left = [[0, 1_000_003, 1, 0]]
    for world in (8, 6, 16, 3, 64):
        shares = [runs_of.tail(runs_of.cut(left, rank, world, "step"), 32) for rank in range(world)]
        left = runs_of.merge([piece for share in shares for piece in share], world)
        assert len(left) <= 2
    assert runs_of.total(left) == 1_000_003 - 32 * (8 + 6 + 16 + 3 + 64)


@pytest.mark.parametrize("how", ["range", "step"])
def test_drifted_ranks_leave_a_few_pieces_each(how: str) -> None:
    """A range cut leaves a hole for every rank there ever was; a step cut forgets ranks of the past."""
    chance = random.Random(0)
    left = [[0, 1_000_003, 1, 0]]
    ranks = 0
    for world in (8, 6, 16, 3, 64):
        ranks += world
        shares = [
            runs_of.tail(runs_of.cut(left, rank, world, how), 1000 + chance.randrange(50)) for rank in range(world)
        ]
        left = runs_of.merge([piece for share in shares for piece in share], world)
        assert len(left) <= (ranks if how == "range" else 2 * world)


def test_a_begun_position_joins_what_follows_it() -> None:
    assert runs_of.join([[5, 6, 1, 2], [9, 100, 4, 0]]) == [[5, 100, 4, 2]]
    assert runs_of.join([[5, 6, 1, 2], [6, 7, 1, 1]]) == [[5, 6, 1, 2], [6, 7, 1, 1]]


def test_classes_that_end_apart_are_merged_where_all_are() -> None:
    assert runs_of.merge([[0, 90, 2, 0], [1, 100, 2, 0]], 2) == [[0, 90, 1, 0], [91, 100, 2, 0]]


def test_an_endless_order_is_cut_by_step_alone() -> None:
    whole = [[0, ENDLESS, 1, 0]]
    assert runs_of.cut(whole, 1, 4, "step") == [[1, ENDLESS, 4, 0]]
    assert runs_of.cut(whole, 0, 1, "range") == whole
    with pytest.raises(PlanError, match='cut="step"'):
        runs_of.cut(whole, 0, 4, "range")


def test_endless_pieces_stay_endless_through_a_merge() -> None:
    shares = [runs_of.tail(runs_of.cut([[0, ENDLESS, 1, 0]], rank, 3, "step"), 10) for rank in range(3)]
    assert runs_of.merge([piece for share in shares for piece in share], 3) == [[30, ENDLESS, 1, 0]]


@pytest.mark.parametrize(("rank", "world", "how"), [(2, 2, "range"), (-1, 2, "step"), (0, 0, "range"), (0, 1, "zip")])
def test_an_impossible_cut_is_refused(rank: int, world: int, how: str) -> None:
    with pytest.raises(PlanError):
        runs_of.cut([[0, 9, 1, 0]], rank, world, how)


def test_a_position_given_twice_stays_twice() -> None:
    pieces = [[0, 40, 2, 0], [0, 40, 2, 0], [21, 40, 2, 0]]
    assert Counter(positions(runs_of.merge(pieces, 2))) == Counter(positions(pieces))


def test_nothing_given_is_changed() -> None:
    pieces = [[0, 5, 1, 0], [5, 9, 1, 0], [20, 40, 4, 1]]
    before = [list(piece) for piece in pieces]
    shared = runs_of.cut(pieces, 0, 1, "range")
    shared[0][0] = 99
    for change in (runs_of.join, lambda p: runs_of.merge(p, 2), lambda p: runs_of.head(p, 7)):
        change(pieces)[0][0] = 99
    assert pieces == before
