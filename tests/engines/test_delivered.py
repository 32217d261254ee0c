"""A run that delivers out of order knows which positions are left."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock.dataset import Dataset
from penstock.engines import Program
from penstock.engines.delivered import can_run_unordered
from penstock.testing import fingerprint, numbers, one_epoch_loader


class Straggler:
    """Holds the first sample that arrives once it is armed, until the consumer has received an item."""

    def __init__(self) -> None:
        self._armed = threading.Semaphore(0)
        self._received = threading.Event()

    def arm(self) -> None:
        self._received.clear()
        self._armed.release()

    def release(self) -> None:
        self._received.set()

    def __call__(self) -> None:
        if self._armed.acquire(blocking=False):
            assert self._received.wait(60), "no other sample was delivered"


STRAGGLER = Straggler()


def slow_at_times(sample: dict[str, Any]) -> dict[str, Any]:
    STRAGGLER()
    time.sleep(0.01 if sample["x"] % 9 == 0 else 0.0002)
    return sample


def copies(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**sample, "copy": n} for n in range(sample["x"] % 4)]


def is_odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def every_fifth_fails(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["x"] % 5 == 0:
        raise ValueError("divisible by five")
    return sample


PLANS: dict[str, Callable[[], Dataset]] = {
    "mapped": lambda: numbers((40, 7, 60)).shuffle().map(slow_at_times, workers=3),
    "flat_map": lambda: numbers((40, 7, 60)).map(slow_at_times, workers=3).flat_map(copies, workers=2),
    "filter": lambda: numbers((40, 7, 60)).shuffle().map(slow_at_times, workers=3).filter(is_odd),
    "skips": lambda: numbers((40, 7, 60)).map(slow_at_times, workers=3).map(every_fifth_fails).on_error("skip"),
    "limit": lambda: numbers((40, 7, 60)).shuffle().skip(9).limit(71).map(slow_at_times, workers=3),
    "batches": lambda: numbers((40, 7, 60)).shuffle().map(slow_at_times, workers=3).batched(8),
    "batches of flat_map": lambda: numbers((40, 7, 60)).map(slow_at_times, workers=3).flat_map(copies).batched(5),
}


def samples(items: list[Any]) -> Counter[Any]:
    """Count the samples, whatever batches they are in."""
    flat: list[Any] = []
    for item in items:
        if isinstance(item["x"], int):
            flat.append(item)
        else:
            flat += [dict(zip(item, row, strict=True)) for row in zip(*item.values(), strict=True)]
    plain = ({name: v if isinstance(v, str) else int(v) for name, v in sample.items()} for sample in flat)
    return Counter(fingerprint(sample) for sample in plain)


def take(loader: Any, count: int) -> tuple[list[Any], int]:
    """Return the next items, and the most pieces that a state had on the way."""
    out: list[Any] = []
    pieces = 0
    for item in loader:
        out.append(item)
        pieces = max(pieces, len(loader.state_dict()["left"]))
        STRAGGLER.release()
        if len(out) >= count:
            break
    return out, pieces


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", PLANS)
def test_a_run_that_is_restored_repeatedly_delivers_every_sample_once(name: str, world: int) -> None:
    ds = PLANS[name]().on("local", ordered=False)
    want = samples(list(PLANS[name]().epoch(0).on("serial")))
    rng = random.Random(name)
    got: Counter[Any] = Counter()
    states: list[Any] | None = None
    most_pieces = 0
    STRAGGLER.arm()
    for _ in range(4):
        following = []
        for rank in range(world):
            loader = one_epoch_loader(ds, rank, world)
            if states is not None:
                loader.load_state_dict(states[rank])
            items, pieces = take(loader, rng.randrange(1, 9))
            got += samples(items)
            most_pieces = max(most_pieces, pieces)
            following.append(json.loads(json.dumps(loader.state_dict())))
            loader.close()
        states = following
    for rank in range(2):  # the rest goes to another number of ranks
        loader = one_epoch_loader(ds, rank, 2)
        loader.load_state_dict(states=states)
        got += samples(list(loader))
    assert got == want
    assert most_pieces > 1, "nothing was delivered out of order"


def test_the_state_of_an_unordered_run_stays_small() -> None:
    ds = numbers((3000,)).map(slow_at_times, workers=4).on("local", ordered=False)
    loader = ds.loader(uneven="keep")
    for number, _ in enumerate(loader):
        if number % 400 == 0:
            assert len(json.dumps(loader.state_dict())) < 2000


def test_plans_whose_state_cannot_have_gaps_run_in_order() -> None:
    ds = numbers((40, 7)).map(slow_at_times, workers=3).batched(4).shuffle(3).on("local", ordered=False)
    want = [fingerprint(item) for item in ds.epoch(0).on("serial")]
    assert [fingerprint(item) for item in ds.loader(uneven="keep")] == want
    program = Program(ds.plan)
    assert not can_run_unordered(program, program.start(program.order(0), None))
