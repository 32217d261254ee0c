"""Ranks that agree, as real processes of a gloo group; this file is also the program that the ranks run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import penstock as ps
from penstock.errors import EngineError, PlanError
from penstock.feed import Loader
from penstock.testing import numbers

COUNTS = (30, 12, 20)
WORLDS = (2, 4)
Uneven = Literal["drop", "pad"]
How = Literal["range", "step"]
FULL = os.environ.get("PENSTOCK_FULL") == "1"
ENDS: tuple[tuple[Uneven, How], ...] = (("drop", "range"), ("drop", "step"), ("pad", "range"), ("pad", "step"))


def late(sample: dict[str, Any]) -> bool:
    """Reject the first samples, so that the first rank has few items, and none if there are four ranks."""
    return bool(sample["x"] >= 16 and sample["x"] % 3)


def copies(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**sample, "copy": number} for number in range(sample["x"] % 4)]


def weight(sample: dict[str, Any]) -> int:
    return 1 + int(sample["x"]) % 5


def picky(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "inverse": 1 // (sample["x"] % 5 * (sample["x"] > 9))}


def fails_at_40(sample: dict[str, Any]) -> bool:
    if sample["x"] == 40:
        raise ValueError("forty")
    return True


PLANS: dict[str, Callable[[], ps.Dataset]] = {
    "filter": lambda: numbers(COUNTS).filter(late).batched(4),
    "single samples": lambda: numbers(COUNTS).filter(late),
    "flat_map": lambda: numbers(COUNTS).shuffle(8).flat_map(copies).batched(5),
    "batched_by": lambda: numbers(COUNTS).shuffle(8).batched_by(weight, 9),
    "skips": lambda: numbers(COUNTS).map(picky).batched(3).on_error("skip"),
    "late shuffle": lambda: numbers(COUNTS).flat_map(copies).shuffle(7).batched(4),
}


# Every plan with every end; unless ``FULL``, with two ends that differ in both, and the first plan with all of them.
CASES: list[tuple[str, Uneven, How]] = [
    (name, uneven, cut)
    for number, name in enumerate(PLANS)
    for uneven, cut in (ENDS if FULL or number == 0 else ENDS[::3] if number % 2 else ENDS[1:3])
]
EVERY = [" ".join(case) for case in CASES]


# The program of a rank


def _step(item: Any) -> dict[str, Any]:
    """Return the numbers in an item, and how many of them are padding."""
    xs = [item["x"]] if isinstance(item["x"], int) else item["x"].tolist()
    copy = item.get("copy")
    numbered = zip(xs, [0] * len(xs) if copy is None else copy.tolist(), strict=True)
    pads = item.get("__pad__", [])
    return {"items": [list(pair) for pair in numbered], "pads": int(np.sum(pads))}


def _rest(loader: Loader) -> list[dict[str, Any]]:
    return [_step(item) for item in loader]


def _whole(ds: ps.Dataset, uneven: Uneven, cut: How) -> dict[str, Any]:
    loader = ds.loader(cut=cut, uneven=uneven)
    steps = _rest(loader)
    again = ds.loader(cut=cut, uneven=uneven)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    restored = again.epoch
    return {
        "steps": steps,
        "dropped": loader.dropped,
        "padded": loader.padded,
        "named": [len(loader.dropped_samples), len(loader.padded_samples)],
        "epoch": loader.epoch,
        "restored": restored,
        "next epoch": _rest(again),
    }


def _resumed(ds: ps.Dataset, uneven: Uneven, cut: How) -> dict[str, Any]:
    """Stop after every step, and resume from its state in a new loader."""
    steps: list[dict[str, Any]] = []
    state: Any = None
    ended = False
    while not ended:
        loader = ds.loader(cut=cut, uneven=uneven)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        for item in loader:  # of the next epoch, if nothing of this one is left
            steps += [_step(item)] if loader.epoch == 0 else []
            break
        ended = loader.epoch > 0
        state = loader.state_dict()
        loader.close()
    return {"steps": steps}


def _failing() -> dict[str, Any]:
    loader = numbers(COUNTS).filter(fails_at_40).loader(cut="step", uneven="drop")
    got = []
    try:
        for item in loader:
            got.append(item["x"])
    except Exception as exc:
        left = sum(-(-(b - a) // step) for a, b, step, _ in loader.state_dict()["left"])
        return {"got": got, "error": type(exc).__name__, "message": str(exc), "left": left}
    return {"got": got, "error": None, "message": "", "left": 0}


def _refused() -> list[str]:
    messages = []
    for rank, world in ((0, 3), (0, 8)):
        try:
            numbers(COUNTS).filter(late).loader(rank, world)
        except PlanError as exc:
            messages.append(str(exc))
    return messages


def _saved(folder: Path) -> dict[str, Any]:
    """Deliver three steps, and save the state for another world."""
    loader = PLANS["flat_map"]().loader(cut="step", uneven="drop")
    run = iter(loader)
    steps = [_step(next(run)) for _ in range(3)]
    rank = loader.cut.rank
    (folder / f"state-{loader.cut.world}-{rank}.json").write_text(json.dumps(loader.state_dict()))
    loader.close()
    return {"steps": steps}


def _resumed_in_another_world(folder: Path, world: int) -> dict[str, Any]:
    states = [json.loads((folder / f"state-{world}-{rank}.json").read_text()) for rank in range(world)]
    loader = PLANS["flat_map"]().loader(uneven="pad")
    loader.load_state_dict(states=states)
    return {"steps": _rest(loader)}


def _rank(rank: int, world: int, folder: Path) -> None:
    import torch.distributed

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    done: dict[str, Any] = {}
    for name, uneven, cut in CASES:
        done[f"{name} {uneven} {cut}"] = _whole(PLANS[name](), uneven, cut)
        if world == WORLDS[0] or name == "filter":
            done[f"{name} {uneven} {cut} resumed"] = _resumed(PLANS[name](), uneven, cut)
    done["refused"] = _refused()
    if world == 4:
        done["saved"] = _saved(folder)
    elif (folder / "state-4-3.json").exists():
        done["resumed in another world"] = _resumed_in_another_world(folder, 4)
    done["failing"] = _failing()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    (folder / f"done-{world}-{rank}.json").write_text(json.dumps(done))


def main(folder: Path) -> None:
    """Run all ranks of every world; torch is imported once, before they are forked."""
    import torch.distributed  # noqa: F401

    for world in sorted(WORLDS, reverse=True):
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                try:
                    _rank(rank, world, folder)
                    os._exit(0)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            raise SystemExit(f"a rank of {world} failed")


# What is expected of the ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> dict[int, list[dict[str, Any]]]:
    """The results of the ranks, by world."""
    folder = tmp_path_factory.mktemp("ranks")
    process = subprocess.run([warm_python, __file__, str(folder)], capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, process.stderr
    return {
        world: [json.loads((folder / f"done-{world}-{rank}.json").read_text()) for rank in range(world)]
        for world in WORLDS
    }


Ranks = dict[int, list[dict[str, Any]]]


def _delivered(steps: list[dict[str, Any]]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(item) for step in steps for item in step["items"] if not step["pads"])


def _all_of(name: str) -> Counter[tuple[int, ...]]:
    return _delivered([_step(item) for item in PLANS[name]().epoch(0)])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("what", EVERY)
def test_every_rank_has_the_same_number_of_steps_and_nothing_is_repeated(ranks: Ranks, what: str, world: int) -> None:
    name, uneven, _ = what.rsplit(" ", 2)
    done = [rank[what] for rank in ranks[world]]
    assert len({len(rank["steps"]) for rank in done}) == 1
    got = sum((_delivered(rank["steps"]) for rank in done), Counter[tuple[int, ...]]())
    want = _all_of(name)
    assert got <= want
    if uneven == "pad":
        assert got == want
        assert not any(rank["dropped"] for rank in done)
    else:
        assert not any(step["pads"] for rank in done for step in rank["steps"])
        assert bool(want - got) <= any(rank["dropped"] for rank in done)


@pytest.mark.parametrize("world", WORLDS)
def test_dropped_and_padded_samples_are_counted_and_named(ranks: Ranks, world: int) -> None:
    for what in EVERY:
        for rank in ranks[world]:
            done = rank[what]
            assert done["named"] == [done["dropped"], done["padded"]]
            assert bool(done["padded"]) == any(step["pads"] for step in done["steps"])
    assert sum(rank["filter drop range"]["dropped"] for rank in ranks[world]) > 0
    assert sum(rank["filter pad range"]["padded"] for rank in ranks[world]) > 0


@pytest.mark.parametrize("world", WORLDS)
def test_the_epoch_ends_for_all_ranks_and_its_state_restores_to_the_next(ranks: Ranks, world: int) -> None:
    for what in EVERY:
        assert {rank[what]["epoch"] for rank in ranks[world]} == {1}
        assert {rank[what]["restored"] for rank in ranks[world]} == {1}
        assert len({len(rank[what]["next epoch"]) for rank in ranks[world]}) == 1


def test_a_rank_without_samples_repeats_those_of_other_ranks(ranks: Ranks) -> None:
    first = ranks[4][0]["filter pad range"]["steps"]
    assert first
    assert all(step["pads"] == len(step["items"]) for step in first)
    assert all(step["steps"] == [] for step in (rank["filter drop range"] for rank in ranks[4]))


@pytest.mark.parametrize("world", WORLDS)
def test_a_state_after_any_step_resumes_with_the_rest_and_its_padding(ranks: Ranks, world: int) -> None:
    resumed = [what for what in EVERY if f"{what} resumed" in ranks[world][0]]
    assert resumed
    for what in resumed:
        for rank in ranks[world]:
            assert rank[f"{what} resumed"]["steps"] == rank[what]["steps"], what


def test_another_world_resumes_and_agrees_on_its_own_end(ranks: Ranks) -> None:
    before = [rank["saved"]["steps"] for rank in ranks[4]]
    after = [rank["resumed in another world"]["steps"] for rank in ranks[2]]
    assert len({len(steps) for steps in after}) == 1
    assert sum(map(_delivered, [*before, *after]), Counter[tuple[int, ...]]()) == _all_of("flat_map")


@pytest.mark.parametrize("world", WORLDS)
def test_if_one_rank_fails_the_others_do_not_wait_for_it(ranks: Ranks, world: int) -> None:
    done = [rank["failing"] for rank in ranks[world]]
    culprit = 40 % world
    for rank, one in enumerate(done):
        assert one["error"] == ("StageError" if rank == culprit else EngineError.__name__)
        assert ("forty" if rank == culprit else "another rank failed") in one["message"]
        assert len(one["got"]) == 40 // world
        assert one["left"] == len(range(rank, 62, world)) - len(one["got"])  # no sample is lost


@pytest.mark.parametrize("world", WORLDS)
def test_a_process_group_does_not_agree_for_other_ranks(ranks: Ranks, world: int) -> None:
    for rank, done in enumerate(ranks[world]):
        assert len(done["refused"]) == 2
        assert all(f"this is rank {rank} of {world}" in message for message in done["refused"])


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("filter", r"filter\(late\)"),
        ("flat_map", "flat_map"),
        ("batched_by", r"batched_by\(weight, 9\)"),
        ("skips", r"on_error\(\"skip\"\)"),
    ],
)
def test_without_a_process_group_equal_ranks_are_refused_with_the_name_of_the_stage(name: str, stage: str) -> None:
    for uneven in ("drop", "pad"):
        with pytest.raises(PlanError, match=rf"{stage}.*init_process_group.*uneven='keep'"):
            PLANS[name]().loader(0, 2, uneven=uneven)
        with pytest.raises(PlanError, match=rf"{stage}.*uneven='keep'.*loader"):
            PLANS[name]().shard(0, 2, uneven=uneven)


def test_a_single_rank_needs_no_agreement() -> None:
    for uneven in ("drop", "pad"):
        loader = PLANS["filter"]().loader(0, 1, uneven=uneven)
        assert sum((_delivered([_step(item)]) for item in loader), Counter[tuple[int, ...]]()) == _all_of("filter")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
