"""Runs that stop anywhere resume anywhere with exactly the rest, and states that do not fit are refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import StateError
from penstock.feed import Loader
from penstock.plan import Batched
from penstock.testing import BASE, CORPUS, RECUT, LocatedNumbers, fingerprint, numbers, one_epoch_loader, outputs

FULL = os.environ.get("PENSTOCK_FULL") == "1"
How = Literal["range", "step"]


def _even(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 2 == 0)


def _twice(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**sample, "copy": copy} for copy in range(sample["cls"] % 3)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return tar shards of 13, 0, 20 and 7 samples."""
    folder = tmp_path_factory.mktemp("shards")
    for shard, count in enumerate((13, 0, 20, 7)):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(count):
                data = str(shard * 100 + number).encode()
                member = tarfile.TarInfo(f"{shard}-{number}.cls")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return [str(path) for path in sorted(folder.glob("*.tar"))]


Make = Callable[[list[str]], ps.Dataset]


def _items(count: int = 50) -> ps.Dataset:
    return ps.from_items([{"cls": number} for number in range(count)])


def _from_corpus(name: str) -> Make:
    return lambda shards: CORPUS[name]()


# Plans whose items are samples: they can be resumed with another batch size.
SAMPLES: dict[str, Make] = {
    name: _from_corpus(name)
    for name in (
        "read",
        "shuffle",
        "small windows",
        "shuffle all",
        "no counts, shuffled",
        "random filter",
        "flat_map",
        "random flat_map",
        "skips",
        "skips and copies",
        "skip",
        "repeat",
        "union",
        "mix",
        "mix all",
        "mix repeated",
        "changing mix",
        "exclude",
        "zip",
        "zip with skips",
        "train side",
        "late shuffle",
    )
} | {
    "tar": lambda shards: ps.read_tar(shards).decode(),
    "tar shuffled and filtered": lambda shards: ps.read_tar(shards).shuffle(6, shards=2).decode().filter(_even),
    "tar copied": lambda shards: ps.read_tar(shards).shuffle(30).decode().flat_map(_twice),
    "items": lambda shards: _items().shuffle(),
    "items copied and repeated": lambda shards: _items(17).shuffle().repeat(3).flat_map(_twice),
    "items and tar": lambda shards: ps.mix(
        [_items().shuffle(), ps.read_tar(shards).decode().drop("__key__", "__url__")],
        [(0, [1, 0]), (20, [1, 1])],
        "all",
    ),
}
# Plans with batches in the middle, or with batches of different sizes.
OTHERS: dict[str, Make] = {
    name: _from_corpus(name)
    for name in ("batched by size", "batches shuffled", "unbatched", "rebatched", "stream limit and batches")
}


def _batches(ds: ps.Dataset, size: int) -> ps.Dataset:
    return ds.batched(size, collate=list)


def _loaded(ds: ps.Dataset, state: Any, **where: Any) -> Loader:
    loader = one_epoch_loader(ds, **where)
    if isinstance(state, list):
        loader.load_state_dict(states=json.loads(json.dumps(state)))
    elif state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


WAYS: tuple[Callable[[ps.Dataset], ps.Dataset], ...] = (
    lambda ds: _batches(ds, 5).on("serial"),
    lambda ds: _batches(ds.map(dict, workers=3), 2),
    lambda ds: _batches(ds, 64),
    lambda ds: ds.map(_alone).on("serial"),
)


def _alone(sample: Any) -> list[Any]:
    return [sample]


@pytest.mark.parametrize("name", SAMPLES if FULL else random.Random(7).sample(sorted(SAMPLES), 12))
def test_the_rest_after_any_batch_is_exact(name: str, shards: list[str]) -> None:
    ds = SAMPLES[name](shards)
    want = outputs(ds.epoch(0).on("serial"))
    loader = one_epoch_loader(_batches(ds, 5))
    done: list[Any] = []
    with contextlib.closing(loader):
        states = [loader.state_dict()]
        counts = [0]
        for batch in loader:
            done += map(fingerprint, batch)
            states.append(loader.state_dict())
            counts.append(len(done))
    assert done == want
    for number, (count, state) in enumerate(zip(counts, states, strict=True)):
        for way in WAYS if FULL else (WAYS[number % len(WAYS)],):
            again = _loaded(way(ds), state)
            assert [fingerprint(sample) for batch in again for sample in batch] == want[count:], (number, count)


@pytest.mark.parametrize("name", OTHERS)
def test_the_rest_after_any_item_is_exact(name: str, shards: list[str]) -> None:
    ds = OTHERS[name](shards)
    want = outputs(ds.epoch(0).on("serial"))
    loader = one_epoch_loader(ds)
    states = [loader.state_dict()]
    for _ in loader:
        states.append(loader.state_dict())
    for count, state in enumerate(states):
        assert outputs(_loaded(ds.on("serial") if count % 2 else ds, state)) == want[count:], count


def _yields_samples(name: str) -> bool:
    """Return whether a plan of the corpus can be batched and then cut again: batches of batches cannot."""
    return not any(isinstance(stage, Batched) for stage in CORPUS[name]().plan.body)


# The corpus without plans that need more windows than there are ranks.
ELASTIC = {name: _from_corpus(name) for name in RECUT if "no counts" not in name and _yields_samples(name)} | {
    name: make for name, make in SAMPLES.items() if name not in CORPUS
}


PARTS = 6  # of the corpus, each with a test of its own, so that the full run stays within the time limit of a test


@pytest.mark.parametrize("part", range(PARTS))
@settings(max_examples=100 if FULL else 6)
@given(
    st.data(),
    st.lists(
        st.tuples(st.integers(1, 8), st.sampled_from(["range", "step"]), st.integers(1, 6)), min_size=1, max_size=3
    ),
    st.randoms(use_true_random=False),
)
def test_any_world_after_any_world_delivers_each_sample_once(
    shards: list[str], part: int, data: st.DataObject, sessions: list[tuple[int, How, int]], dice: random.Random
) -> None:
    name = data.draw(st.sampled_from(sorted(ELASTIC)[part::PARTS]))
    ds = ELASTIC[name](shards).on("serial")
    want = Counter(outputs(ds.epoch(0)))
    got: Counter[Any] = Counter()
    states: list[Any] | None = None
    for world, how, batch in sessions:
        following = []
        for rank in range(world):
            loader = _loaded(_batches(ds, batch), states, rank=rank, world=world, cut=how)
            got.update(_some(loader, dice.randrange(5)))
            following.append(loader.state_dict())
            loader.close()
        states = following
    world, how = dice.randrange(1, 9), dice.choice(["range", "step"])
    for rank in range(world):
        loader = _loaded(_batches(ds, 3), states, rank=rank, world=world, cut=how)
        got.update(fingerprint(sample) for batch in loader for sample in batch)
    assert got == want


def _some(loader: Loader, count: int) -> Iterator[Any]:
    if count:
        for number, batch in enumerate(loader, 1):
            yield from map(fingerprint, batch)
            if number == count:
                return


@pytest.mark.parametrize("how", ["range", "step"])
def test_ranks_that_have_ended_or_not_begun_can_be_cut_again(how: How) -> None:
    ds = numbers(BASE).shuffle(9)
    states = []
    got = []
    for rank in range(8):
        loader = ds.loader(rank, 8, cut=how, uneven="keep")
        if rank % 2:
            got += outputs(loader)
        states.append(loader.state_dict())
    for rank in range(3):
        got += outputs(_loaded(ds, states, rank=rank, world=3, cut="range" if how == "step" else "step"))
    assert Counter(got) == Counter(outputs(ds.epoch(0)))


# States that do not fit

WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    7,
    10**30,
    "x",
    "",
    [],
    [[]],
    [3],
    [None],
    {},
    {"of": 1},
    [{}],
    [[1, 2, 3]],
)
STATES: dict[str, Callable[[], ps.Dataset]] = {
    "plain": lambda: numbers(BASE).shuffle(9).batched(4),
    "open window": CORPUS["late shuffle"],
    "half a group": CORPUS["batches shuffled"],
    "counted": CORPUS["stream limit"],
    "not counted": CORPUS["no counts, shuffled"],
}


def _midway(ds: ps.Dataset, **where: Any) -> dict[str, Any]:
    loader = ds.loader(**where)
    with contextlib.closing(loader):
        run = iter(loader)
        for _ in range(4):
            next(run)
        state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


@pytest.mark.parametrize("name", STATES)
def test_a_damaged_state_is_refused_or_has_a_meaning(name: str) -> None:
    ds = STATES[name]().on("serial")
    state, fresh = _midway(ds), ds.loader().state_dict()
    refused = 0
    for key in (*state, "open", "tail", "counted", "lazy"):
        for wrong in WRONG:
            if wrong == state.get(key) and type(wrong) is type(state.get(key)):
                continue
            loader = ds.loader()
            try:
                loader.load_state_dict({**state, key: wrong})
            except StateError:
                refused += 1
                assert loader.state_dict() == fresh  # the loader has not changed
            else:
                assert key in {"open", "tail", "counted", "lazy", "left", "epoch"}, (key, wrong)
                next(iter(loader), None)
                loader.close()
    assert refused > 100


@pytest.mark.parametrize("key", ["v", "plan", "seed", "epoch", "cut", "rank", "world", "open", "left"])
def test_a_missing_entry_of_a_state_is_named_by_the_error(key: str) -> None:
    ds = STATES["plain"]()
    state = _midway(ds)
    del state[key]
    with pytest.raises(StateError, match=f"no '{key}'"):
        ds.loader().load_state_dict(state)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ({"open": [{"of": [[0, 5, 1, 0]], "n": 5, "done": 2, "sub": 0}]}, "no stage of this plan has windows"),
        ({"tail": [[9, 1, 0, 0]]}, "level 9"),
        ({"counted": {"quota": -4}}, "quota=-4"),
    ],
    ids=str,
)
def test_well_formed_entries_that_do_not_fit_are_refused(damage: dict[str, Any], problem: str) -> None:
    ds = STATES["plain"]()
    loader = ds.loader(0, 2, uneven="drop")
    with pytest.raises(StateError, match=problem):
        loader.load_state_dict({**_midway(ds, rank=0, world=2, uneven="drop"), **damage})


@pytest.mark.parametrize(
    "other",
    [
        lambda: numbers((*BASE, 4)).shuffle(9).batched(4),
        lambda: numbers(BASE, name="other").shuffle(9).batched(4),
        lambda: numbers(BASE).shuffle(9, shards=2).batched(4),
        lambda: numbers(BASE).exclude((0, "shard-0000", 1)).shuffle(9).batched(4),
        lambda: numbers(BASE).shuffle(9).filter(bool).batched(4),
        lambda: numbers(BASE).shuffle(9).batched(4).unbatched(),
        lambda: ps.mix([numbers(BASE).shuffle(9)]).batched(4),
    ],
    ids=["a shard was added", "names", "order", "exclude", "filter", "groups", "mix"],
)
def test_a_state_of_another_or_changed_dataset_is_refused(other: Callable[[], ps.Dataset]) -> None:
    with pytest.raises(StateError, match="another dataset or plan"):
        other().loader().load_state_dict(_midway(STATES["plain"]()))


def test_a_mix_whose_weights_change_at_another_position_is_another_plan() -> None:
    def mixed(position: int) -> ps.Dataset:
        return ps.mix([numbers((50,)), numbers((50,), name="b")], [(0, [1, 1]), (position, [1, 2])])

    state = _midway(mixed(20))
    assert outputs(_loaded(mixed(20), state)) == outputs(mixed(20).epoch(0))[4:]
    with pytest.raises(StateError, match="another dataset or plan"):
        mixed(21).loader().load_state_dict(state)


# Large datasets

SHARDS = 10_000
LARGE: dict[str, Callable[[], ps.Dataset]] = {
    "shuffled": lambda: numbers((100,) * SHARDS).shuffle(),
    "mixed": lambda: ps.mix(
        [numbers((100,) * SHARDS).shuffle(), numbers((50,) * SHARDS, name="b").shuffle().repeat()],
        [(0, [3, 1]), (300_000, [1, 1])],
    ),
    "unordered": lambda: numbers((100,) * SHARDS).shuffle().map(dict, workers=4).on("local", ordered=False),
    "all": lambda: numbers((100,) * SHARDS).shuffle(all=True),
    "excluded": lambda: (
        numbers((100,) * SHARDS).shuffle().exclude([(0, f"shard-{i:04d}", i % 100) for i in range(500)])
    ),
}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which every read appends its number of samples."""
    counts: list[int] = []
    read = LocatedNumbers.read

    def counting(self: LocatedNumbers) -> Any:
        counts.append(len(self.index))
        return read(self)

    monkeypatch.setattr(LocatedNumbers, "read", counting)
    return counts


@pytest.mark.parametrize("how", ["range", "step"])
@pytest.mark.parametrize("name", LARGE)
def test_a_state_within_10_000_shards_is_small_and_loads_at_once(name: str, how: How, reads: list[int]) -> None:
    ds = LARGE[name]().batched(64)
    first = ds.loader(3, 8, cut=how, uneven="drop")
    state = first.state_dict()
    start, stop, step, _ = state["left"][0]
    state["left"] = [[start + (stop - start) // (2 * step) * step, stop, step, 0]]  # half of it is delivered
    state["counted"] = {"quota": state["counted"]["quota"] // 2}
    began = time.process_time()
    loader = ds.loader(3, 8, cut=how, uneven="drop")
    loader.load_state_dict(state)
    with contextlib.closing(loader):
        run = iter(loader)
        for _ in range(40):
            batch = next(run)
        assert len(batch["x"]) == 64
        assert time.process_time() - began < 1
        assert sum(reads) < 40 * 64 + 40_000  # the prefetch, and none of the 60,000 before
        assert len(json.dumps(loader.state_dict())) < 2000


@pytest.mark.parametrize("name", LARGE)
def test_another_world_computes_its_share_of_a_million_samples_at_once(name: str, reads: list[int]) -> None:
    ds = LARGE[name]().batched(64)
    states = []
    for rank in range(5):
        loader = ds.loader(rank, 5, cut="step", uneven="drop")
        with contextlib.closing(loader):
            run = iter(loader)
            for _ in range(rank + 1):
                next(run)
            states.append(loader.state_dict())
    reads.clear()
    began = time.process_time()
    loader = ds.loader(1, 3, cut="step", uneven="drop")
    loader.load_state_dict(states=states)
    with contextlib.closing(loader):
        next(iter(loader))
        assert time.process_time() - began < 1
        assert sum(reads) < 40_000
        assert len(json.dumps(loader.state_dict())) < 2000
