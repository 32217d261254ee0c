from __future__ import annotations

import json
import pickle
import time
from collections import Counter
from itertools import islice
from typing import Any, Literal

import pytest

import penstock as ps
from penstock.errors import PlanError, StateError
from penstock.feed import Loader
from penstock.testing import numbers


@pytest.fixture(autouse=True)
def _no_ranks_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def _xs(items: Any) -> list[int]:
    return [int(sample["x"]) for sample in items]


def _row(batch: Any) -> list[int]:
    return [int(x) for x in batch["x"]]


def _xs_of(batches: Any) -> list[int]:
    return [x for batch in batches for x in _row(batch)]


def _some(loader: Loader, count: int) -> list[int]:
    out: list[int] = []
    for sample in loader:
        out.append(sample["x"])
        if len(out) == count:
            break
    return out


def _ds() -> ps.Dataset:
    return numbers((30, 12, 20)).shuffle(10)


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def test_rank_and_world_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = _ds().loader()
    assert (loader.cut.rank, loader.cut.world) == (1, 4)
    assert _xs(loader) == _xs(_ds().loader(1, 4))


def test_by_default_one_rank_keeps_everything_and_several_are_equal() -> None:
    assert _ds().loader().cut.uneven == "keep"
    assert _ds().loader(0, 4).cut.uneven == "drop"
    assert _ds().loader(0, 4, uneven="keep").cut.uneven == "keep"


def test_a_dataset_that_is_cut_keeps_its_cut() -> None:
    part = _ds().shard(2, 4, "step", "pad")
    loader = part.loader()
    assert loader.cut == part.plan.cut
    assert _xs(loader) == _xs(part.epoch(0))


def test_the_loader_moves_on_to_the_next_epoch_at_the_end_of_one() -> None:
    loader = _ds().loader(epoch=3)
    assert loader.epoch == 3
    assert [_xs(loader), _xs(loader)] == [_xs(_ds().epoch(3)), _xs(_ds().epoch(4))]
    assert loader.epoch == 5


def test_setting_the_current_epoch_keeps_the_rest_of_it() -> None:
    loader = _ds().loader()
    before = _some(loader, 3)
    loader.set_epoch(0)
    assert before + _xs(loader) == _xs(_ds().epoch(0))
    loader.set_epoch(6)
    assert _xs(loader) == _xs(_ds().epoch(6))


def test_a_new_iterator_continues_where_the_one_before_stopped() -> None:
    loader = _ds().loader()
    assert _some(loader, 5) + _some(loader, 7) + _xs(loader) == _xs(_ds().epoch(0))
    assert loader.epoch == 1


def test_there_is_one_live_iterator() -> None:
    loader = _ds().map(dict).loader()
    first = iter(loader)
    got = [next(first)["x"]]
    got += _xs(loader)
    assert got == _xs(_ds().epoch(0))


def test_the_length_is_that_of_a_whole_epoch() -> None:
    loader = _ds().batched(4).loader(0, 3)
    assert len(loader) == 5
    assert len(next(iter(loader))["x"]) == 4
    assert len(loader) == 5
    with pytest.raises(TypeError, match="not known"):
        len(_ds().filter(_odd).loader())


@pytest.mark.parametrize("how", ["range", "step"])
@pytest.mark.parametrize(("uneven", "each", "padded", "dropped"), [("drop", 20, 0, 2), ("pad", 21, 1, 0)])
def test_ranks_are_equal_and_the_difference_is_counted(
    how: Literal["range", "step"], uneven: Literal["drop", "pad"], each: int, padded: int, dropped: int
) -> None:
    loaders = [_ds().loader(rank, 3, cut=how, uneven=uneven) for rank in range(3)]
    parts = [list(loader) for loader in loaders]
    assert [len(part) for part in parts] == [each] * 3
    assert [len(loader) for loader in loaders] == [each] * 3
    assert sum(loader.padded for loader in loaders) == padded
    assert sum(loader.dropped for loader in loaders) == dropped
    own = Counter(s["x"] for part in parts for s in part if "__pad__" not in s)
    assert max(own.values()) == 1
    assert len(own) == 62 - dropped


def test_with_keep_ranks_differ_by_at_most_one() -> None:
    parts = [_xs(_ds().loader(rank, 3, uneven="keep")) for rank in range(3)]
    assert sorted(map(len, parts)) == [20, 21, 21]
    assert sorted(x for part in parts for x in part) == list(range(62))


def test_equal_ranks_stay_equal_when_resumed() -> None:
    for uneven in ("drop", "pad"):
        ds = _ds()
        whole = [_xs(ds.loader(rank, 3, uneven=uneven)) for rank in range(3)]
        for rank in range(3):
            for done in (0, 1, 19):
                loader = ds.loader(rank, 3, uneven=uneven)
                got = _some(loader, done) if done else []
                again = ds.loader(rank, 3, uneven=uneven)
                again.load_state_dict(loader.state_dict())
                loader.close()
                assert got + _xs(again) == whole[rank], (uneven, rank, done)


def test_equal_ranks_stay_equal_in_another_world() -> None:
    states = []
    got: Counter[int] = Counter()
    for rank in range(2):
        loader = _ds().loader(rank, 2, uneven="drop")
        got.update(_some(loader, 10 + rank))
        states.append(loader.state_dict())
        loader.close()
    rest = []
    for rank in range(5):
        loader = _ds().loader(rank, 5, uneven="drop")
        loader.load_state_dict(states=states)
        rest.append(_xs(loader))
    assert {len(part) for part in rest} == {(62 - 21) // 5}
    got.update(x for part in rest for x in part)
    assert max(got.values()) == 1


def test_equal_ranks_after_a_filter_need_a_process_group() -> None:
    with pytest.raises(PlanError, match="uneven='keep'"):
        _ds().filter(_odd).loader(0, 2)
    assert _xs(_ds().filter(_odd).loader(0, 2, uneven="keep"))


def test_a_state_is_small_json() -> None:
    loader = numbers((10_000,) * 20).shuffle().batched(64).loader(3, 8)
    run = iter(loader)
    for _ in range(50):
        next(run)
    state = loader.state_dict()
    loader.close()
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < 400


@pytest.mark.parametrize("uneven", ["keep", "drop", "pad"])
def test_an_epoch_ends_with_its_last_batch_whether_or_not_the_consumer_asks_again(
    uneven: Literal["keep", "drop", "pad"],
) -> None:
    for rank in range(3):
        loader, straight = (_ds().batched(4).loader(rank, 3, uneven=uneven) for _ in range(2))
        for epoch in range(4):
            expected = [_row(batch) for batch in straight]
            assert [_row(batch) for _, batch in zip(range(len(loader)), loader, strict=False)] == expected
            assert loader.epoch == straight.epoch == epoch + 1
            assert (
                loader.state_dict()
                == straight.state_dict()
                == _ds().batched(4).loader(rank, 3, epoch + 1, uneven=uneven).state_dict()
            )


def test_a_state_after_the_last_batch_restores_to_the_next_epoch() -> None:
    for finish in (list, lambda loader: list(islice(loader, 16))):
        loader, again = _ds().batched(4).loader(), _ds().batched(4).loader()
        assert len(finish(loader)) == 16
        again.load_state_dict(loader.state_dict())
        assert again.epoch == 1
        second = _ds().batched(4).loader(epoch=1)
        assert [_row(batch) for batch in again] == [_row(batch) for batch in second]


def test_an_iteration_that_finds_nothing_left_of_an_epoch_continues_with_the_next() -> None:
    def ds() -> ps.Dataset:
        return _ds().filter(lambda sample: sample["x"] % 3 == 0).batched(4)

    epochs = [[_row(batch) for batch in ds().loader(epoch=epoch)] for epoch in range(3)]
    loader = ds().loader()
    for epoch in range(3):
        assert [_row(batch) for batch in islice(loader, len(epochs[epoch]))] == epochs[epoch]
        assert loader.epoch == epoch, "only a run can tell that this was the last batch"
    state = loader.state_dict()
    again = ds().loader()
    again.load_state_dict(state)
    assert [_row(batch) for batch in again] == [_row(batch) for batch in ds().loader(epoch=3)]


def test_a_rank_that_delivered_its_share_continues_with_the_next_epoch_even_if_another_cut_gave_it_none() -> None:
    loader = numbers((2,)).filter(lambda sample: True).loader(2, 3, uneven="keep")
    assert _xs(islice(loader, 1)) == [1]
    assert loader.epoch == 0
    assert _xs(loader) == [1]
    assert loader.epoch == 2


def test_an_epoch_that_is_empty_from_its_start_is_yielded_empty() -> None:
    loader = _ds().filter(lambda sample: False).loader()
    assert [list(loader) for _ in range(3)] == [[], [], []]
    assert loader.epoch == 3
    few = numbers((1,)).loader(0, 2, uneven="keep")
    assert [list(few) for _ in range(2)] == [[], []]
    assert few.epoch == 2


@pytest.mark.parametrize("filtered", [False, True])
def test_a_rank_without_a_part_of_the_rest_yields_nothing_of_it(filtered: bool) -> None:
    ds = (numbers((6,)).filter(lambda sample: True) if filtered else numbers((6,))).batched(3)
    before = [ds.loader(rank, 2, uneven="keep") for rank in range(2)]
    list(islice(before[0], 1))
    states = [loader.state_dict() for loader in before]
    assert [state["epoch"] for state in states] == [0 if filtered else 1, 0]
    rest = []
    for rank in range(4):
        loader = ds.loader(rank, 4, uneven="keep")
        loader.load_state_dict(states=states)
        copy = pickle.loads(pickle.dumps(loader))
        rest.append(_xs_of(loader))
        assert _xs_of(copy) == rest[-1]
        assert loader.epoch == copy.epoch == 1
    assert sorted(x for part in rest for x in part) == [3, 4, 5]
    assert [] in rest


def test_a_fixed_epoch_is_that_epoch_every_time() -> None:
    loader = _ds().epoch(2).loader()
    epochs = [_xs(loader) for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2] == _xs(_ds().loader(epoch=2))
    assert loader.epoch == 2
    assert _xs(_ds().epoch(2).loader(epoch=2)) == epochs[0]
    for fixed, epoch in ((2, 3), (0, 3), (3, 0)):
        with pytest.raises(PlanError, match=rf"ds.epoch\({fixed}\) fixes the epoch"):
            _ds().epoch(fixed).loader(epoch=epoch)
    with pytest.raises(StateError, match=r"epoch 1, but ds.epoch\(2\) fixes another"):
        loader.load_state_dict(_ds().loader(epoch=1).state_dict())


def test_states_on_both_sides_of_the_end_of_an_epoch_are_merged() -> None:
    for done in range(1, 5):
        loaders = [numbers((20, 12)).shuffle().batched(4).loader(rank, 2, uneven="keep") for rank in range(2)]
        got = [_xs_of(islice(loaders[0], 4)), _xs_of(islice(loaders[1], done))]
        states = [loader.state_dict() for loader in loaders]
        assert [state["epoch"] for state in states] == [1, int(done == 4)]
        for rank in range(3):
            loader = numbers((20, 12)).shuffle().batched(4).loader(rank, 3, uneven="keep")
            loader.load_state_dict(states=states)
            got.append(_xs_of(loader) if done < 4 else [])
        assert sorted(x for part in got for x in part) == list(range(32))


def test_ranks_that_are_further_apart_are_not_merged() -> None:
    loaders = [_ds().batched(4).loader(rank, 2, uneven="keep") for rank in range(2)]
    list(islice(loaders[0], 3))
    list(loaders[1])
    list(islice(loaders[1], 1))
    with pytest.raises(StateError, match="rank 1 is in epoch 1, another rank is still in epoch 0"):
        _ds().batched(4).loader().load_state_dict(states=[loader.state_dict() for loader in loaders])


def test_a_state_of_a_later_epoch_resumes_that_epoch() -> None:
    loader = _ds().loader()
    list(loader)
    got = _some(loader, 9)
    again = _ds().loader()
    again.load_state_dict(loader.state_dict())
    assert again.epoch == 1
    assert got + _xs(again) == _xs(_ds().epoch(1))


def test_a_state_can_be_saved_before_the_first_batch() -> None:
    state = _ds().loader(epoch=2).state_dict()
    again = _ds().loader()
    again.load_state_dict(state)
    assert _xs(again) == _xs(_ds().epoch(2))


def test_workers_engine_and_batch_size_may_change() -> None:
    loader = _ds().map(dict, workers=2).batched(4).loader()
    run = iter(loader)
    for _ in range(3):
        next(run)
    state = loader.state_dict()
    loader.close()
    again = _ds().map(dict, workers=1).on("serial").loader()
    again.load_state_dict(state)
    assert _xs(again) == _xs(_ds().epoch(0))[12:]


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (numbers((30, 12, 21)).shuffle(10), "another dataset or plan"),
        (numbers((30, 12, 20), name="other").shuffle(10), "another dataset or plan"),
        (numbers((30, 12, 20)), "another dataset or plan"),
        (numbers((30, 12, 20)).shuffle(11), "another dataset or plan"),
        (numbers((30, 12, 20)).shuffle(10).limit(60), "another dataset or plan"),
        (numbers((30, 12, 20)).shuffle(10).filter(_odd), "another dataset or plan"),
        (numbers((30, 12, 20)).shuffle(10).seed(1), "seed 0, this dataset has seed 1"),
    ],
    ids=["counts", "names", "order", "window", "limit", "filter", "seed"],
)
def test_a_state_refuses_another_dataset(other: ps.Dataset, problem: str) -> None:
    with pytest.raises(StateError, match=problem):
        other.loader().load_state_dict(_ds().loader().state_dict())


def test_a_filter_in_a_branch_is_part_of_the_plan() -> None:
    plain = numbers((9,)).union(numbers((9,), name="b"))
    other = numbers((9,)).filter(_odd).union(numbers((9,), name="b"))
    with pytest.raises(StateError, match="another dataset or plan"):
        other.loader().load_state_dict(plain.loader().state_dict())


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ({"left": None}, "'left' is null"),
        ({"left": [[0, 1]]}, "not a piece"),
        ({"left": [[5, 1, 1, 0]]}, "impossible"),
        ({"left": [[0, 1000, 1, 0]]}, "positions that this dataset does not have"),
        ({"open": [{"of": [[0, 1000, 1, 0]], "n": 3, "done": 1, "sub": 0}]}, "positions that this dataset"),
        ({"v": 99}, "version 99"),
        ({"epoch": -1}, "negative"),
        ({"cut": "hash"}, "hash"),
        ({"rank": 7}, "rank 7"),
        ({"seed": "0"}, "'seed'"),
        ({"plan": 3}, "'plan'"),
        ({"tail": [[1, 2]]}, "tail"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_with_the_reason(damage: dict[str, Any], problem: str) -> None:
    loader = _ds().loader()
    got = _some(loader, 4)
    with pytest.raises(StateError, match=problem):
        loader.load_state_dict({**loader.state_dict(), **damage})
    assert got + _xs(loader) == _xs(_ds().epoch(0))  # the loader has not changed


@pytest.mark.parametrize("key", ["v", "plan", "seed", "epoch", "cut", "rank", "world", "open", "left"])
def test_a_missing_entry_of_a_state_is_named(key: str) -> None:
    state = _ds().loader().state_dict()
    del state[key]
    with pytest.raises(StateError, match=f"'{key}'"):
        _ds().loader().load_state_dict(state)


@pytest.mark.parametrize("state", [[], "state", 3])
def test_values_that_are_not_states_are_refused(state: Any) -> None:
    with pytest.raises(StateError):
        _ds().loader().load_state_dict(state)


def test_one_state_or_all_states_must_be_given() -> None:
    state = _ds().loader().state_dict()
    both: list[dict[str, Any]] = [{}, {"state": state, "states": [state]}]
    for given in both:
        with pytest.raises(StateError, match="give one state, or states="):
            _ds().loader().load_state_dict(**given)
    with pytest.raises(StateError, match="all ranks"):
        _ds().loader().load_state_dict(states=[])


def test_missing_ranks_are_named_and_nothing_changes() -> None:
    states = [_ds().loader(rank, 4, epoch=6).state_dict() for rank in range(4)]
    loader = _ds().loader(0, 2)
    with pytest.raises(StateError, match="missing: 1, 3"):
        loader.load_state_dict(states=[states[0], states[2]])
    with pytest.raises(StateError, match="missing"):
        loader.load_state_dict(states[1])
    assert loader.epoch == 0


def test_states_that_do_not_belong_together_are_refused() -> None:
    states = [_ds().loader(rank, 2, epoch=2 * rank).state_dict() for rank in range(2)]
    with pytest.raises(StateError, match="rank 1 is in epoch 2, another rank is still in epoch 0"):
        _ds().loader().load_state_dict(states=states)
    twice = [_ds().loader(rank, 2).state_dict() for rank in (0, 1, 1)]
    with pytest.raises(StateError, match=r"more than one state.*1"):
        _ds().loader().load_state_dict(states=twice)


def test_from_all_states_of_its_world_a_rank_takes_its_own() -> None:
    states, parts = [], []
    for rank in range(2):
        loader = _ds().loader(rank, 2)
        parts.append(_some(loader, 3 + rank))
        states.append(loader.state_dict())
        loader.close()
    for rank in range(2):
        loader = _ds().loader(rank, 2)
        loader.load_state_dict(states=states)
        assert parts[rank] + _xs(loader) == _xs(_ds().loader(rank, 2))


def _sometimes_slow(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.002 * (sample["x"] % 7 == 3))
    return sample


def test_an_unordered_loader_delivers_each_sample_once() -> None:
    ds = _ds().map(_sometimes_slow, workers=3).on("local", ordered=False)
    assert sorted(_xs(ds.loader())) == list(range(62))


def test_a_plan_whose_state_cannot_have_gaps_runs_in_order() -> None:
    ds = _ds().map(_sometimes_slow, workers=3).batched(5).shuffle(3).unbatched()
    assert _xs(ds.on("local", ordered=False).loader()) == _xs(ds.epoch(0))


def test_a_closed_loader_continues_where_it_stopped() -> None:
    loader = _ds().map(dict, workers=2).loader()
    run = iter(loader)
    first = next(run)["x"]
    loader.close()
    assert [first, *_xs(loader)] == _xs(_ds().epoch(0))


def test_a_loader_without_counts_can_resume() -> None:
    ds = numbers((9, 9, 9, 9), hidden=True).shuffle(4, shards=2)
    loader = ds.loader()
    got = _some(loader, 13)
    again = ds.loader()
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert got + _xs(again) == _xs(ds.epoch(0))


def test_equal_ranks_need_counts() -> None:
    with pytest.raises(PlanError, match="penstock index"):
        list(numbers((9, 9), hidden=True).loader(0, 2, uneven="drop"))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("late", [True, False], ids=["mapped late", "mapped early"])
def test_padding_stays_marked_and_counted_by_a_map_that_returns_a_new_dict(late: bool, batched: bool) -> None:
    def renewed(item: Any) -> Any:
        return {"x": item["x"]}

    ds = numbers((10,)) if late else numbers((10,)).map(renewed)
    ds = ds.batched(2) if batched else ds
    loader = (ds.map(renewed) if late else ds).loader(0, 3, uneven="pad")
    items = list(loader)
    assert loader.padded == 1
    marks = [item.get("__pad__") for item in items]
    if batched:
        assert marks[0] is None
        assert marks[-1].tolist() == [False, True]
    else:
        assert marks == [None, None, None, True]
