"""A loader whose batches come from servers: it yields what a local loader yields, and exchanges states with it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import vision
from penstock.errors import EngineError, PlanError, StageError, StateError
from penstock.serving import Feed
from penstock.testing import CORPUS, fingerprint, numbers
from penstock.testing.plans import noise

FULL = os.environ.get("PENSTOCK_FULL") == "1"
WORLDS = (1, 2, 3, 4)
SERVERS = (1, 2, 3)
# Plans in which every kind of stage and source occurs, for the quick tests.
QUICK = (
    "shuffle",
    "no counts, shuffled",
    "filter",
    "random flat_map",
    "skips",
    "skips and copies",
    "union",
    "mix all",
    "zip with skips",
    "rows of a late shuffle",
    "late shuffle and more",
    "batches shuffled",
    "batches mapped",
    "rebatched",
    "batched by size",
    "empty",
    "columns in batches",
    "json lines in batches",
)


@contextmanager
def served(ds: ps.Dataset, servers: int = 1, **options: Any) -> Iterator[Callable[..., Feed]]:
    """Serve a dataset by several servers; yield a function that connects to them."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(ps.serve(ds, "grpc://127.0.0.1:0", **options)).address for _ in range(servers)]

        def connect(**arguments: Any) -> Feed:
            feed = ps.connect(addresses, **arguments)
            stack.callback(feed.close)
            return feed

        yield connect


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> ps.Dataset:
    from PIL import Image

    folder = tmp_path_factory.mktemp("photos")
    noise_of = np.random.default_rng(1)
    with ps.TarWriter(folder / "shard-000000.tar") as writer:
        for number in range(24):
            data = io.BytesIO()
            Image.fromarray(noise_of.integers(0, 255, (60, 80, 3), np.uint8)).save(data, "JPEG")
            writer.write({"__key__": f"{number:04}", "jpg": data.getvalue(), "cls": str(number).encode()})
    return ps.read_tar(str(folder)).shuffle().decode(jpg=vision.RandomResizedCrop(32, flip=True)).batched(5)


def _combinations(name: str) -> list[tuple[int, int, int]]:
    """Return servers, world and rank of the cases of a plan: all of them, or one of each kind."""
    every = [(servers, world, rank) for servers, world in product(SERVERS, WORLDS) for rank in range(world)]
    if FULL:
        return every
    random = Random(name)
    return [random.choice([case for case in every if case[0] == servers]) for servers in (1, random.choice((2, 3)))]


def _check_equal(ds: ps.Dataset, name: str) -> None:
    for servers, cases in _by_servers(_combinations(name)).items():
        with served(ds, servers) as connect:
            for world, rank in cases:
                options: dict[str, Any] = {"rank": rank, "world": world, "uneven": "keep"}
                if (problem := _cut_problem(ds, options)) is not None:
                    with pytest.raises(PlanError, match=re.escape(problem)):
                        connect(**options)
                    continue
                feed, local = connect(**options), ds.loader(**options)
                for _ in range(2):
                    assert fingerprint(list(feed)) == fingerprint(list(local))
                    assert feed.epoch == local.epoch
                    assert feed.state_dict() == local.state_dict()
                local.close()


def _cut_problem(ds: ps.Dataset, options: dict[str, Any]) -> str | None:
    """Return why a plan has no loader for a rank; None if it has one."""
    try:
        ds.loader(**options).state_dict()
    except PlanError as exc:
        return str(exc)
    return None


def _by_servers(cases: list[tuple[int, int, int]]) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for servers, world, rank in cases:
        found.setdefault(servers, []).append((world, rank))
    return found


@pytest.mark.parametrize("name", sorted(CORPUS) if FULL else QUICK)
def test_a_served_plan_is_the_local_one_in_every_world(name: str) -> None:
    _check_equal(CORPUS[name](), name)


def test_served_photos_are_the_local_ones(photos: ps.Dataset) -> None:
    _check_equal(photos, "photos")


def _rest(loader: Any, state: dict[str, Any]) -> Any:
    loader.load_state_dict(state)
    return fingerprint(list(loader))


@pytest.mark.parametrize("name", sorted(CORPUS) if FULL else Random(3).sample(QUICK, 5))
def test_states_move_between_local_and_served_at_every_batch(name: str) -> None:
    ds = CORPUS[name]()
    with served(ds, 2) as connect:
        feed, other, local = connect(rank=0, world=1), connect(rank=0, world=1), ds.loader(0, 1)
        whole = fingerprint(list(ds.loader(0, 1)))
        steps = (
            range(len(whole) + 1) if FULL else sorted(Random(name).sample(range(len(whole) + 1), min(4, len(whole))))
        )
        for step in steps:
            for source in (feed, ds.loader(0, 1)):
                source.set_epoch(1)
                source.set_epoch(0)
                for _ in islice(source, step):
                    pass
                state = source.state_dict()
                assert _rest(other, state) == _rest(local, state)
                source.close()
        local.close()


def test_states_of_several_ranks_are_cut_again() -> None:
    ds = numbers((40, 33)).shuffle().map(noise).batched(4)
    with served(ds, 2) as connect:
        states, first = [], []
        for rank in range(3):
            loader: Any = connect(rank=rank, world=3, uneven="keep") if rank != 1 else ds.loader(1, 3, uneven="keep")
            first += [x for batch in islice(loader, 2) for x in batch["x"].tolist()]
            states.append(loader.state_dict())
            loader.close()
        rest = []
        for rank in range(2):
            feed, local = connect(rank=rank, world=2, uneven="keep"), ds.loader(rank, 2, uneven="keep")
            feed.load_state_dict(states=states)
            local.load_state_dict(states=states)
            mine = [x for batch in feed for x in batch["x"].tolist()]
            assert mine == [x for batch in local for x in batch["x"].tolist()]
            rest += mine
        assert sorted(first + rest) == list(range(73))
        with pytest.raises(StateError, match="missing: 1, 2"):
            feed.load_state_dict(states=states[:1])


def test_a_state_of_another_dataset_is_refused() -> None:
    with served(numbers((9,)).batched(2)) as connect, pytest.raises(StateError, match="another dataset or plan"):
        connect().load_state_dict(numbers((10,)).batched(2).loader().state_dict())


@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_ranks_are_made_equal_as_without_servers(uneven: Any, tmp_path: Path) -> None:
    ds = numbers((10,)).shuffle().map(dict).batched(2)
    with served(ds, 2) as connect:
        for rank in range(3):
            feed = connect(rank=rank, world=3, uneven=uneven, ledger=tmp_path / "served")
            local = ds.loader(rank, 3, uneven=uneven, ledger=tmp_path / "local")
            assert len(feed) == len(local) == 2
            assert fingerprint(list(feed)) == fingerprint(list(local))
            assert (feed.dropped, feed.padded) == (local.dropped, local.padded)
            assert feed.dropped_samples == local.dropped_samples
            assert feed.padded_samples == local.padded_samples
            local.close()
    proofs = [ps.ledger(tmp_path / name).verify() for name in ("served", "local")]
    assert all(proof.ok and proof.finished for proof in proofs)
    assert str(proofs[0]) == str(proofs[1])


def test_ranks_of_a_process_group_agree_on_the_end_of_filtered_epochs(tmp_path: Path, warm_python: str) -> None:
    program = """
import json, os, sys, torch.distributed, penstock as ps
rank, address, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
feed = ps.connect(address)
print(json.dumps([[batch["x"].tolist() for batch in feed] for epoch in range(2)]))
feed.close()
torch.distributed.destroy_process_group()
"""
    ds = numbers((30, 31)).shuffle().filter(lambda sample: sample["x"] % 3 > 0).batched(4)
    with ps.serve(ds, "grpc://127.0.0.1:0") as server:
        command = [warm_python, "-c", program]
        ranks = [
            subprocess.Popen([*command, str(rank), server.address, str(tmp_path)], stdout=subprocess.PIPE)
            for rank in range(2)
        ]
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    loaders = [ds.loader(rank, 2, uneven="keep") for rank in range(2)]
    whole = [[[batch["x"].tolist() for batch in loader] for loader in loaders] for epoch in range(2)]
    steps = [min(map(len, shares)) for shares in whole]
    cut = [[share[:count] for share in shares] for shares, count in zip(whole, steps, strict=True)]
    assert [list(shares) for shares in zip(*map(json.loads, outputs), strict=True)] == cut


def test_a_ledger_proves_an_epoch_with_a_state_in_between(tmp_path: Path) -> None:
    ds = numbers((30, 31)).shuffle().filter(lambda sample: sample["x"] % 3 > 0).batched(4)
    with served(ds, 2) as connect:
        feed = connect(ledger=tmp_path)
        for _ in islice(feed, 4):
            pass
        state = feed.state_dict()
        feed.close()
        local = ds.loader(ledger=tmp_path)
        local.load_state_dict(state)
        for _ in islice(local, 3):
            pass
        state = local.state_dict()
        local.close()
        feed = connect(ledger=tmp_path)
        feed.load_state_dict(state)
        list(feed)
    proof = ps.ledger(tmp_path).verify()
    assert proof.ok, proof
    assert proof.finished


def test_an_error_comes_after_the_batches_before_it() -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["x"] == 17:
            raise ValueError("seventeen")
        return sample

    ds = numbers((40,)).map(fail).batched(4)
    with served(ds, 3) as connect:
        batches = iter(connect())
        assert [x for batch in islice(batches, 4) for x in batch["x"].tolist()] == list(range(16))
        with pytest.raises(StageError, match="seventeen") as error:
            next(batches)
        assert error.value.key is not None


def test_skipped_samples_are_reported() -> None:
    ds = numbers((40,), bad=(3, 9)).map(dict).on_error("skip").batched(4)
    with served(ds, 2) as connect:
        feed, local = connect(), ds.loader()
        assert fingerprint(list(feed)) == fingerprint(list(local))
        assert [(skip.place, skip.problem) for skip in feed.skipped] == [
            (skip.place, skip.problem) for skip in local.skipped
        ]


def test_tensors_are_put_where_the_consumer_wants_them() -> None:
    import torch

    ds = numbers((20,)).map(lambda sample: {"x": np.float32(sample["x"])}).batched(4)
    with served(ds) as connect:
        batches = list(connect(format="torch", device="cpu"))
        assert [batch["x"].tolist() for batch in batches] == [[4 * n + i for i in range(4)] for n in range(5)]
        assert all(isinstance(batch["x"], torch.Tensor) for batch in batches)
        plain = next(iter(connect()))
        plain["x"][0] = 7  # arrays that arrive are writable, as local ones are


def test_a_value_that_cannot_be_sent_is_named() -> None:
    ds = numbers((9,)).map(lambda sample: {"x": sample["x"], "when": {"at": object()}})
    with served(ds) as connect, pytest.raises(PlanError, match=r"field 'when\.at' is a object, which cannot be sent"):
        list(connect())


def test_explain_and_stats_say_where_batches_come_from() -> None:
    with served(numbers((900,)).batched(2), 2) as connect:
        feed = connect()
        assert "batch i comes from server i mod the number of servers" in feed.explain()
        assert len(feed.servers) == 2
        list(feed)
        assert feed.stats().items == 450
        assert re.search(r"is the limit|are the limit.* of [\d.]+ [GM]B/s", feed.stats().bottleneck)
    with served(numbers((9,)).filter(lambda sample: sample["x"] > 1).batched(2), 2) as connect:
        assert "one server at a time sends all batches, because filter" in connect().explain()


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (numbers((8, 9)).batched(3), "the dataset"),
        (numbers((9, 9)).shuffle().batched(3), "the order"),
        (numbers((9, 9)).batched(4), r"the stages differ \(batched\(4\) here, batched\(3\) there\)"),
    ],
)
def test_another_plan_is_refused_with_what_differs(other: ps.Dataset, differs: str) -> None:
    ds = numbers((9, 9)).batched(3)
    with served(ds) as connect:
        connect(plan=ds)
        with pytest.raises(PlanError, match=f"serves another plan: {differs}"):
            connect(plan=other)


def test_servers_with_different_code_are_refused() -> None:
    one, other = (numbers((9,)).map(eval(f"lambda sample: dict(sample, y={value})")) for value in (1, 2))
    differs = pytest.raises(PlanError, match="the code or the arguments of a stage differ")
    with ps.serve(one, "grpc://127.0.0.1:0") as a, ps.serve(other, "grpc://127.0.0.1:0") as b, differs:
        ps.connect([a.address, b.address])


def test_a_plan_that_cannot_be_cut_is_refused_when_it_is_connected() -> None:
    refused = pytest.raises(PlanError, match="cannot be cut for 2 ranks")
    with served(numbers((9,)).filter(lambda sample: True).limit(3)) as connect, refused:
        connect(rank=0, world=2, uneven="keep")


def test_a_plan_that_is_not_a_dataset_is_refused() -> None:
    plan: Any = "train.py:ds"
    with pytest.raises(PlanError, match=r"plan=.train\.py:ds.: give the dataset that is served"):
        ps.connect("grpc://127.0.0.1:9", plan=plan)


def test_no_server_is_an_error_after_the_time_limit() -> None:
    with pytest.raises(EngineError, match=r"no server answered within 0\.3 s: grpc://127\.0\.0\.1:9 "):
        ps.connect("grpc://127.0.0.1:9", timeout_s=0.3)


def test_a_loader_from_connect_stays_in_its_process() -> None:
    import pickle

    with served(numbers((9,)).batched(3)) as connect, pytest.raises(PlanError, match="in the process that made it"):
        pickle.dumps(connect())
