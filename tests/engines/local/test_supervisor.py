"""Pools that grow and shrink, and threads that hang, in whole runs."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any

import cloudpickle
import pytest

from penstock.dataset import from_items
from penstock.engines.local.tuner import TICK_S
from penstock.engines.meter import Event
from penstock.errors import StageError
from penstock.plan.values import WorkerKind

FULL = os.environ.get("PENSTOCK_FULL") == "1"
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test


def waits(x: int) -> int:
    time.sleep(0.02)
    return x


def identity(x: int) -> int:
    return x


def sizes(ds: Any) -> list[int]:
    return [size for _, size in ds.stats().segments[-1].sizes]


@pytest.mark.parametrize("on", ["threads", "processes"] if FULL else ["threads"])
def test_a_pool_grows_while_its_workers_wait_for_something(on: WorkerKind) -> None:
    ds = from_items(list(range(100_000))).map(waits, workers=(1, 6), on=on)
    got = []
    deadline = time.monotonic() + 100
    for x in ds:
        got.append(x)
        if max(sizes(ds)) > 2 or time.monotonic() > deadline:
            break
    assert got == list(range(len(got)))
    assert sizes(ds)[0] <= 2
    assert 2 < max(sizes(ds)) <= 6
    moments = [seconds for seconds, _ in ds.stats().segments[-1].sizes]
    assert moments == sorted(moments)


def test_a_pool_shrinks_to_its_minimum_while_the_consumer_is_slow() -> None:
    ds = from_items(list(range(100_000))).map(identity, workers=(2, 4)).on("local", cpus=4)
    got = []
    deadline = time.monotonic() + 100
    for x in ds:
        got.append(x)
        time.sleep(0.005)
        if sizes(ds)[-1] == 2 or time.monotonic() > deadline:
            break
    assert got == list(range(len(got)))
    assert sizes(ds)[0] == 4
    assert sizes(ds)[-1] == 2
    assert min(sizes(ds)) == 2


def test_a_pool_without_a_workers_argument_stays_within_the_default_bounds() -> None:
    ds = from_items(list(range(300))).map(waits)
    assert list(ds) == list(range(300))
    segment = ds.stats().segments[-1]
    assert (segment.least, segment.most) == (1, max(32, len(os.sched_getaffinity(0))))
    assert all(1 <= size <= segment.most for size in sizes(ds))


def test_a_pool_of_a_fixed_size_is_not_resized_and_has_no_supervisor() -> None:
    ds = from_items(list(range(200))).map(waits, workers=3)
    names = set()
    for _ in ds:
        names |= {thread.name for thread in threading.enumerate()}
    assert sizes(ds) == [3]
    assert "penstock supervisor" not in names
    assert "penstock driver" in names


def test_an_observer_receives_ticks() -> None:
    seen: list[Event] = []
    assert len(list(from_items(list(range(40))).map(waits, workers=2).on("local", observer=seen.append))) == 40
    ticks = [event for event in seen if event.kind == "tick"]
    assert 1 <= len(ticks) <= max(event.seconds for event in seen) / TICK_S + 1


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_a_thread_that_hangs_ends_the_run_and_is_named_in_the_log(
    action: Any, caplog: pytest.LogCaptureFixture
) -> None:
    resume = threading.Event()

    def hangs(x: int) -> int:
        if x == 5:
            assert resume.wait(60)
        return x

    ds = from_items(list(range(50))).map(hangs, workers=2, timeout_s=0.2).on_error(action)
    got: list[int] = []
    before = time.monotonic()
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(StageError, match=r"timeout_s=0.2.*map\(hangs\).*key: 5") as caught,
    ):
        got.extend(ds)
    assert time.monotonic() - before < 30
    assert caught.value.key == "5"
    assert got == list(range(len(got)))
    assert len(got) <= 5
    while len(left := [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]) > 1:
        assert time.monotonic() - before < 60
        time.sleep(0.01)
    assert len(left) == 1
    assert left[0].daemon
    assert left[0].name in caplog.text
    assert ds.stats().segments[-1].timeouts == 1
    resume.set()


def test_a_time_limit_that_is_not_exceeded_changes_nothing() -> None:
    ds = from_items(list(range(60))).map(waits, workers=4, timeout_s=30).map(identity, workers=1, timeout_s=9)
    assert list(ds) == list(range(60))
    assert [segment.timeouts for segment in ds.stats().segments] == [0, 0]
