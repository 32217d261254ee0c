from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StateError
from penstock.order.hashing import name_hashes
from penstock.order.mixture import MixedOrder
from penstock.order.orders import Order, RepeatedOrder, ShardOrder, ShuffledOrder
from penstock.order.pieces import ENDLESS, GROUP_STRIDE, Piece, join
from penstock.order.state import OpenWindow, State, recut
from penstock.order.uncounted import UncountedOrder

Output = tuple[int, int]

STATE = State(plan="f00d", seed=0, epoch=1, cut="range", rank=1, world=4, open=[], left=[[5, 90, 1, 0]])
WINDOW = OpenWindow(of=[[0, 9, 1, 0]], n=20, done=4, sub=1)


def states_of(world: int, **changes: Any) -> list[State]:
    return [
        replace(STATE, rank=rank, world=world, left=[[rank * 10, rank * 10 + 10, 1, 0]], **changes)
        for rank in range(world)
    ]


def shards(counts: list[int]) -> ShardOrder:
    return ShardOrder(name_hashes(map(str, range(len(counts)))), np.array(counts, np.int64), 0, 0, 0)


def outputs_of(order: Order, piece: Piece) -> list[tuple[int, int, int]]:
    """Return the outputs of a piece under a flat_map: (position, number of the output, next position)."""
    out = []
    for p, refs, after in order.walk(piece):
        following = [*p.tolist()[1:], after]
        for position, key, later in zip(p.tolist(), refs.key.tolist(), following, strict=True):
            out += [(position, j, later) for j in range(key % 4)]
    return [(p, j, later) for p, j, later in out if p != piece[0] or j >= piece[3]]


def advance(order: Order, left: list[Piece], n: int, rng: random.Random) -> tuple[list[Output], list[Piece]]:
    """Deliver ``n`` outputs; return them and what is left, in one of the forms a reader may write."""
    done: list[Output] = []
    for number, piece in enumerate(left):
        _, stop, step, _ = piece
        for p, j, later in outputs_of(order, piece):
            if len(done) == n:
                if j == 0:
                    return done, [[p, stop, step, 0], *left[number + 1 :]]
                if rng.random() < 0.5:
                    return done, [[p, stop, step, j], *left[number + 1 :]]
                rest = [[later, stop, step, 0]] if later < stop else []
                return done, [[p, p + 1, 1, j], *rest, *left[number + 1 :]]
            done.append((p, j))
    return done, []


@st.composite
def orders(draw: st.DrawFn) -> Order:
    counts = draw(st.lists(st.integers(0, 15), min_size=1, max_size=10))
    window, shards_per_group = draw(st.integers(1, 30)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["shards", "shuffle", "mix", "repeat", "lazy"]))
    if kind == "lazy":
        names = name_hashes(map(str, range(len(counts))))
        return UncountedOrder(
            names, counts.__getitem__, 0, 0, 0, window=window, shards=shards_per_group, shuffle=draw(st.booleans())
        )
    plain = shards(counts)
    shuffled = ShuffledOrder(plain, 0, 0, window=window, shards=shards_per_group)
    choices: dict[str, Order] = {
        "shards": plain,
        "shuffle": shuffled,
        "mix": MixedOrder([plain, shuffled], [1, 2], "all", 0, 0),
        "repeat": RepeatedOrder(
            lambda epoch: ShuffledOrder(plain, 0, epoch, window=window, shards=shards_per_group), 0, 3
        ),
    }
    return choices[kind]


@given(orders(), st.randoms(use_true_random=False))
def test_every_output_is_delivered_once_across_up_to_five_recuts(order: Order, rng: random.Random) -> None:
    lazy = isinstance(order, UncountedOrder)
    max_world = min(6, order.group_count) if isinstance(order, UncountedOrder) else 6
    expected = Counter(out[:2] for piece in order.whole() for out in outputs_of(order, piece))
    delivered: Counter[Output] = Counter()
    states = [replace(STATE, rank=0, world=1, left=order.whole(), lazy=lazy)]
    for _ in range(rng.randrange(1, 6)):
        world, kind = rng.randrange(1, max_world + 1), rng.choice(["range", "step"])
        lockstep, step_count = rng.random() < 0.4, rng.randrange(12)
        after = []
        for rank in range(world):
            state = recut(states, rank, world, kind, order)
            done, left = advance(order, state.left, step_count if lockstep else rng.randrange(12), rng)
            delivered.update(done)
            left = left if lazy else join(left)
            after.append(State.from_json(json.loads(json.dumps(replace(state, left=left).to_json()))))
        states = after
    rest = recut(states, 0, 1, "range", order)
    delivered.update(out[:2] for piece in rest.left for out in outputs_of(order, piece))
    assert delivered == expected


@given(orders(), st.randoms(use_true_random=False))
def test_the_same_rank_continues_in_order(order: Order, rng: random.Random) -> None:
    lazy = isinstance(order, UncountedOrder)
    world = 1 if isinstance(order, UncountedOrder) and order.group_count < 3 else 3
    rank, kind = rng.randrange(world), rng.choice(["range", "step"])
    left = order.cut(order.whole(), rank, world, kind)
    expected = [out[:2] for piece in left for out in outputs_of(order, piece)]
    delivered: list[Output] = []
    while left:
        done, left = advance(order, left, rng.randrange(1, 9), rng)
        delivered += done
        state = replace(STATE, left=left if lazy else join(left), lazy=lazy)
        left = State.from_json(json.loads(json.dumps(state.to_json()))).left
    assert delivered == expected


def test_a_state_of_one_rank_is_below_200_bytes() -> None:
    for cut, left in (("range", [[625_123_456, 750_000_000, 1, 0]]), ("step", [[625_123_461, 10**9, 64, 3]])):
        state = replace(STATE, plan="0123456789abcdef", epoch=12, cut=cut, rank=37, world=64, left=left)
        assert len(json.dumps(state.to_json())) < 200


def test_a_state_survives_a_round_trip_through_json() -> None:
    for state in (
        STATE,
        replace(STATE, open=[WINDOW], tail=[1, "a"], counted={"skipped": 3}),
        replace(STATE, left=[[3, ENDLESS, 7, 2]], seed=-(2**70)),
        replace(
            STATE,
            lazy=True,
            left=[
                [3 * GROUP_STRIDE + 17, 9 * GROUP_STRIDE, 2 * GROUP_STRIDE, 1],
                [GROUP_STRIDE, 2 * GROUP_STRIDE, 1, 0],
            ],
            open=[WINDOW],
        ),
    ):
        assert State.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_json_omits_empty_entries() -> None:
    names = ["v", "plan", "seed", "epoch", "cut", "rank", "world", "open", "left"]
    assert list(STATE.to_json()) == names
    assert list(replace(STATE, tail=[], counted={}).to_json()) == names


def test_uncounted_positions_are_written_as_pairs() -> None:
    state = replace(
        STATE,
        lazy=True,
        left=[[3 * GROUP_STRIDE + 17, 9 * GROUP_STRIDE, 2 * GROUP_STRIDE, 1], [GROUP_STRIDE, 2 * GROUP_STRIDE, 1, 0]],
    )
    written = state.to_json()
    assert written["left"] == [[[3, 17], [9, 0], [2, 0], 1], [[1, 0], [2, 0], 1, 0]]
    assert written["lazy"] is True


@pytest.mark.parametrize("name", ["v", "plan", "seed", "epoch", "cut", "rank", "world", "open", "left"])
def test_a_state_with_a_missing_entry_is_refused(name: str) -> None:
    written = STATE.to_json()
    del written[name]
    with pytest.raises(StateError, match=f"no '{name}'"):
        State.from_json(written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": 2}, "version 2"),
        ({"plan": 7}, "'plan'.*a string"),
        ({"seed": 1.5}, "'seed'.*an integer"),
        ({"epoch": True}, "'epoch'.*an integer"),
        ({"epoch": -1}, "'epoch'.*negative"),
        ({"rank": -1}, "'rank'.*negative"),
        ({"epoch": 1 << 63}, "'epoch'.*63 bits"),
        ({"world": 10**30}, "'world'.*63 bits"),
        ({"left": [[0, 1 << 63, 1, 0]]}, "impossible.*63 bits"),
        ({"left": [[0, 10, 1, 10**30]]}, "impossible.*63 bits"),
        ({"lazy": True, "left": [[[0, 0], [10**30, 0], 1, 0]]}, "impossible.*63 bits"),
        ({"open": [{"of": [], "n": 1 << 64, "done": 0, "sub": 0}]}, "'n'.*63 bits"),
        ({"rank": 4}, "rank 4 in a world of 4"),
        ({"world": None}, "'world'.*null"),
        ({"cut": "slice"}, "'slice'.*range"),
        ({"left": {}}, "'left'.*a list"),
        ({"left": [[0, 1, 1]]}, "'left'.*not a piece"),
        ({"left": [[0, 1, 1, "0"]]}, "'left'.*not a piece"),
        ({"left": [[0, 1, True, 0]]}, "'left'.*not a piece"),
        ({"left": [[0, 1, 0, 0]]}, "impossible"),
        ({"left": [[-1, 1, 1, 0]]}, "impossible"),
        ({"left": [[5, 1, 1, 0]]}, "impossible"),
        ({"left": [[0, 1, 1, -2]]}, "impossible"),
        ({"left": [[[0, 1], [1, 0], 1, 0]]}, "'left'.*not a piece"),
        ({"lazy": True}, "'left'.*not a piece"),
        ({"lazy": True, "left": [[[0, -1], [1, 0], 1, 0]]}, "'left'.*not a piece"),
        ({"lazy": 1}, "'lazy'.*true or false"),
        ({"tail": 3}, "'tail'.*a list"),
        ({"counted": []}, "'counted'.*an object"),
        ({"open": [3]}, "open window.*an object"),
        ({"open": [{"of": [], "n": 1, "done": 0}]}, "no 'sub'"),
        ({"open": [{"of": [], "n": 1, "done": 2, "sub": 0}]}, "2 of 1"),
        ({"open": [{"of": [[0]], "n": 1, "done": 0, "sub": 0}]}, "'of'.*not a piece"),
    ],
)
def test_a_damaged_state_is_refused_in_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StateError, match=message) as caught:
        State.from_json(STATE.to_json() | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("obj", [None, [], "state", 3])
def test_only_a_json_object_is_accepted_as_a_state(obj: object) -> None:
    with pytest.raises(StateError, match="JSON object"):
        State.from_json(obj)


def test_open_windows_are_distributed_round_robin() -> None:
    states = [replace(s, open=[WINDOW | {"done": s.rank}, WINDOW | {"done": s.rank}]) for s in states_of(3)]
    shares = [recut(states[::-1], rank, 2, "range", shards([40])).open for rank in range(2)]
    assert [[window["done"] for window in share] for share in shares] == [[0, 1, 2], [0, 1, 2]]
    assert [len(recut(states, rank, 4, "step", shards([40])).open) for rank in range(4)] == [2, 2, 1, 1]


def test_a_recut_state_belongs_to_its_new_rank() -> None:
    state = recut(states_of(4, counted={"skipped": 1}), 1, 2, "step", shards([40]))
    assert (state.rank, state.world, state.cut, state.left) == (1, 2, "step", [[1, 40, 2, 0]])
    assert state.counted is None


def test_missing_ranks_are_named() -> None:
    with pytest.raises(StateError, match=r"all 4 ranks; missing: 1, 3$"):
        recut(states_of(4)[::2], 0, 2, "range", shards([40]))
    with pytest.raises(StateError, match="no state"):
        recut([], 0, 2, "range", shards([40]))


def test_a_duplicate_rank_is_named() -> None:
    states = states_of(4)
    with pytest.raises(StateError, match=r"more than one.*: 2$"):
        recut([*states, states[2]], 0, 2, "range", shards([40]))


@pytest.mark.parametrize("change", [{"plan": "beef"}, {"seed": 9}, {"epoch": 9}, {"world": 5}, {"lazy": True}], ids=str)
def test_states_that_do_not_belong_together_are_refused(change: dict[str, Any]) -> None:
    states = states_of(4)
    states[2] = replace(states[2], **change)
    with pytest.raises(StateError, match=f"{next(iter(change))} is .* for rank 0 and .* for rank 2"):
        recut(states, 0, 2, "range", shards([40]))


def test_a_state_with_a_tail_can_only_be_restored_by_its_rank() -> None:
    states = states_of(2)
    states[1] = replace(states[1], tail=["half a group"])
    with pytest.raises(StateError, match="rank 1"):
        recut(states, 0, 1, "range", shards([40]))


def test_the_callers_reason_against_a_recut_is_reported() -> None:
    with pytest.raises(StateError, match="sort"):
        recut(states_of(2), 0, 1, "range", shards([40]), recut_problem="sort needs the whole stream")


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: replace(s, left=[[0, 41, 1, 0]]),
        lambda s: replace(s, open=[WINDOW | {"of": [[39, 60, 9, 0]]}]),
    ],
)
def test_positions_beyond_the_end_are_refused(damage: Callable[[State], State]) -> None:
    states = states_of(2)
    with pytest.raises(StateError, match="positions"):
        recut([damage(states[0]), states[1]], 0, 1, "range", shards([40]))
