"""Whatever happens to an iteration, no thread is left behind and nothing hangs.

A fixture also fails every test that leaves a thread.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.dataset import Dataset, from_items
from penstock.engines import EngineName
from penstock.errors import DataError, PenstockError, StageError, StorageError
from penstock.plan import Plan
from penstock.testing import numbers
from penstock.testing.number_source import Numbers, NumbersReader

SOURCE = str(Path(penstock.__file__).parents[1])


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]


def identity(item: Any) -> Any:
    return item


def slow(item: Any) -> Any:
    time.sleep(0.002)
    return item


def on_threads(count: int = 1000) -> Dataset:
    return from_items(list(range(count))).map(slow, workers=2).map(identity, workers=3)


def started(ds: Dataset) -> Iterator[Any]:
    run = iter(ds)
    next(run)
    assert own_threads()
    return run


def test_no_thread_is_left_after_the_end() -> None:
    assert list(on_threads(50)) == list(range(50))
    assert not own_threads()


def test_no_thread_is_left_after_a_break() -> None:
    for item in on_threads():
        if item == 5:
            break
    assert not own_threads()


def test_no_thread_is_left_after_an_error_in_the_consumer() -> None:
    def consume() -> None:
        for _ in on_threads():
            raise KeyError("the consumer's own")

    with pytest.raises(KeyError):
        consume()
    assert not own_threads()


def test_no_thread_is_left_after_an_error_in_a_stage() -> None:
    ds = on_threads().map(lambda x: 1 // (x - 20))
    with pytest.raises(StageError, match="ZeroDivisionError"):
        list(ds)
    assert not own_threads()


def test_no_thread_is_left_after_take_and_first() -> None:
    assert on_threads().take(3) == [0, 1, 2]
    assert on_threads().first() == 0
    gc.collect()
    assert not own_threads()


def test_no_thread_is_left_after_a_loader_is_closed() -> None:
    loader = on_threads().loader()
    run = iter(loader)
    next(run)
    assert own_threads()
    loader.close()
    assert not own_threads()
    assert list(run) == []


def test_a_new_iterator_of_a_loader_ends_the_previous_one() -> None:
    loader = on_threads(40).loader()
    first = iter(loader)
    assert [next(first) for _ in range(3)] == [0, 1, 2]
    second = iter(loader)
    assert next(second) == 3
    assert list(first) == [], "what the second one yields is not yielded twice"
    assert list(second) == list(range(4, 40))
    assert loader.epoch == 1
    assert not own_threads()


def test_a_forgotten_iterator_is_ended_when_it_is_collected() -> None:
    run = started(on_threads())
    del run
    gc.collect()
    assert not own_threads()


def test_a_forgotten_iterator_in_a_cycle_may_be_collected_by_its_own_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    forgotten, collected = threading.Event(), threading.Event()

    def collects(item: int) -> int:
        if forgotten.is_set():
            gc.collect()
            collected.set()
        time.sleep(0.001)
        return item

    cycle: list[Any] = [iter(from_items(list(range(5000))).map(collects, workers=2))]
    cycle.append(cycle)
    next(cycle[0])
    gc.disable()
    try:
        del cycle
        forgotten.set()
        for _ in range(200):  # the worker works only while there is room for its output
            if collected.wait(0.01):
                break
        gc.collect()
    finally:
        gc.enable()
    deadline = time.monotonic() + 60
    while own_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not own_threads()
    assert not raised
    assert "left behind" not in caplog.text


def test_a_worker_stuck_in_a_function_is_named_and_does_not_block_the_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.engines.local.pool.WORKER_JOIN_TIMEOUT_S", 0.1)
    resume, inside = threading.Event(), threading.Event()

    def stuck(item: int) -> int:
        if item == 5:
            inside.set()
            resume.wait(60)
        return item

    run = iter(from_items(list(range(100))).map(stuck, workers=1))
    assert next(run) == 0
    assert inside.wait(60)
    before = time.monotonic()
    with caplog.at_level(logging.WARNING):
        run.close()  # type: ignore[attr-defined]
    assert time.monotonic() - before < 30  # the function waits for 60 s
    assert "still inside a user's function" in caplog.text
    assert "penstock map 0" in caplog.text
    resume.set()


def test_a_driver_stuck_in_a_collate_function_is_named_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.engines.local.pool.WORKER_JOIN_TIMEOUT_S", 2.0)
    resume, inside = threading.Event(), threading.Event()

    def stuck(samples: list[Any]) -> list[Any]:
        if samples[0] == 4:
            inside.set()
            resume.wait(60)
        return samples

    run = iter(from_items(list(range(100))).map(identity).batched(2, collate=stuck))
    assert next(run) == [0, 1]
    assert inside.wait(60)
    run.close()  # type: ignore[attr-defined]
    assert "penstock driver" in caplog.text
    resume.set()


def test_datasets_can_be_iterated_side_by_side() -> None:
    sets = [numbers((7, 30)).map(identity, workers=2).seed(n).shuffle() for n in range(3)]
    runs = [iter(ds.epoch(0)) for ds in sets]
    together = list(zip(*runs, strict=True))
    assert [list(column) for column in zip(*together, strict=True)] == [list(ds.epoch(0)) for ds in sets]


def test_one_dataset_can_be_iterated_twice_at_once() -> None:
    ds = numbers((30,)).shuffle().map(identity, workers=2).epoch(3)
    assert all(a == b for a, b in zip(ds, ds, strict=True))


def test_one_dataset_can_be_iterated_by_several_threads() -> None:
    ds = numbers((40, 40)).shuffle().map(identity, workers=2).epoch(0)
    want = list(ds)
    got: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: got.append(list(ds))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == [want] * 4


def test_every_thread_gets_its_own_epoch() -> None:
    ds = from_items(list(range(50))).shuffle().map(identity, workers=1)
    orders: list[tuple[int, ...]] = []
    threads = [threading.Thread(target=lambda: orders.append(tuple(ds))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(orders)) == 6
    assert sorted(orders) == sorted(tuple(ds.epoch(epoch)) for epoch in range(6))


def test_a_function_may_iterate_another_dataset() -> None:
    inner = from_items([1, 2, 3]).map(identity, workers=2)
    outer = from_items(list(range(20))).map(lambda x: x + sum(inner), workers=2)
    assert list(outer) == [x + 6 for x in range(20)]
    assert list(from_items([0, 1]).flat_map(lambda x: inner.epoch(0))) == [1, 2, 3, 1, 2, 3]
    assert not own_threads()


def test_an_iterator_can_be_passed_to_another_thread() -> None:
    run = started(on_threads(50))
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(run))
    thread.start()
    thread.join(60)
    assert got == list(range(1, 50))
    assert not own_threads()


def test_an_iterator_can_be_closed_by_another_thread() -> None:
    run = started(on_threads())
    thread = threading.Thread(target=run.close)  # type: ignore[attr-defined]
    thread.start()
    thread.join(60)
    assert not own_threads()


def test_all_workers_skip_failing_samples() -> None:
    ds = from_items(list(range(300))).map(lambda x: 1 // (x % 7) + x, workers=4).on_error("skip")
    loader = ds.loader()
    assert len(list(loader)) == 300 - 43
    assert [int(skip.place.key or -1) for skip in loader.skipped] == list(range(0, 300, 7))


def test_too_many_failing_samples_end_the_run() -> None:
    ds = from_items(list(range(300))).map(lambda x: 1 // (x % 7), workers=4).on_error("skip", limit=10)
    with pytest.raises(DataError, match="more than on_error's limit of 10"):
        list(ds)
    assert not own_threads()


@pytest.mark.parametrize("engine", ["serial", "local"])
@pytest.mark.parametrize("method", ["map", "filter", "flat_map"])
def test_a_function_that_raises_stop_iteration_does_not_end_the_stream_silently(
    method: str, engine: EngineName
) -> None:
    def stops(item: int) -> Any:
        if item == 5:
            raise StopIteration
        return [item]

    ds = getattr(from_items(list(range(9))), method)(stops).on(engine)
    got: list[Any] = []
    with pytest.raises(StageError, match="StopIteration"):
        got.extend(ds)
    assert len(got) == 5
    assert len(list(ds.on_error("skip"))) == 8


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_generator_that_raises_stop_iteration_is_an_error(engine: EngineName) -> None:
    def stops(item: int) -> Iterator[int]:
        yield item
        if item == 2:
            raise StopIteration

    got: list[int] = []
    with pytest.raises(StageError, match="StopIteration"):
        got.extend(from_items([1, 2, 3]).flat_map(stops).on(engine))
    assert got == [1, 2]


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_none_is_an_item_like_any_other_but_map_does_not_return_it(engine: EngineName) -> None:
    ds = from_items([None] * 5).filter(lambda x: True).map(lambda x: (x, 1), workers=2).on(engine)
    assert list(ds) == [(None, 1)] * 5
    assert list(from_items([None, 1]).filter(lambda x: None).on(engine)) == []
    with pytest.raises(StageError, match="the function returned None"):
        list(from_items([1, 2]).map(lambda x: None).on(engine))


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_flat_map_whose_function_returns_no_iterable_is_an_error(engine: EngineName) -> None:
    with pytest.raises(StageError, match="TypeError"):
        list(from_items([1]).flat_map(lambda x: None).on(engine))  # type: ignore[arg-type,return-value]


class _LostShard(NumbersReader):
    def count(self, shard: int) -> int:
        if shard == 2:
            raise StorageError("there is no such object", "shard-0002")
        return super().count(shard)


class _WithLostShard(Numbers):
    def open(self) -> NumbersReader:
        return _LostShard(self)


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_what_comes_before_a_shard_that_cannot_be_opened_is_delivered_first(engine: EngineName) -> None:
    ds = Dataset(Plan(_WithLostShard((20, 20, 20), hidden=True))).map(slow, workers=2).on(engine)
    double = ds.map_batches(lambda batch: {"x": batch["x"] * 2}, 16, workers=2)
    for plan, want in [(ds.batched(5), 8), (double.map(identity, workers=3), 40)]:
        got: list[Any] = []
        loader = plan.loader()
        with pytest.raises(StorageError, match="there is no such object"):
            got.extend(loader)
        assert len(got) == want
        assert loader.state_dict()["left"][0][0] == [2, 0]
    assert len(list(ds.flat_map(lambda sample: [sample]).limit(40))) == 40


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_inside_a_worker_reaches_the_consumer(kind: type[BaseException]) -> None:
    def interrupts(item: int) -> int:
        if item == 30:
            raise kind
        return item

    got: list[int] = []
    with pytest.raises(kind):
        got.extend(from_items(list(range(100))).map(interrupts, workers=2))
    assert got == list(range(len(got)))
    assert not own_threads()


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_retry_gets_the_same_random_numbers(engine: EngineName) -> None:
    failed: set[int] = set()

    def flaky(item: int, rng: Any) -> tuple[int, float]:
        drawn = float(rng.random())
        if item not in failed:
            failed.add(item)
            raise OSError("not this time")
        return item, drawn

    def never_fails(item: int, rng: Any) -> tuple[int, float]:
        return item, float(rng.random())

    items = from_items(list(range(20))).on(engine)
    assert list(items.map(flaky, retries=1)) == list(items.map(never_fails))


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_a_generator_that_fails_midway_is_retried_from_its_beginning(engine: EngineName) -> None:
    failed: set[int] = set()

    def flaky(item: int) -> Iterator[tuple[int, int]]:
        yield item, 0
        if item not in failed:
            failed.add(item)
            raise OSError("not this time")
        yield item, 1

    got = list(from_items([1, 2]).flat_map(flaky, retries=1).on(engine))
    assert got == [(1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("number", range(5))
def test_ctrl_c_while_threads_are_started_leaves_none(
    number: int, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers_of_threads, start = count(), threading.Thread.start

    def start_interrupted(thread: threading.Thread) -> None:
        is_last = thread.name.startswith("penstock") and next(numbers_of_threads) == number
        if started or not is_last:
            start(thread)
        if is_last:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(from_items([1]).map(identity, workers=2).map(identity, workers=(1, 2)))
    assert not own_threads()


# Tests that need a separate process.


def start(python: str, script: str) -> subprocess.Popen[str]:
    head = "import os, sys, threading, time\nimport penstock as ps\nfrom penstock.dataset import from_items\n"
    env = {**os.environ, "PYTHONPATH": SOURCE}
    code = head + textwrap.dedent(script)
    return subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def finish(process: subprocess.Popen[str], within_s: float = 120) -> tuple[int, str, str, float]:
    """Wait for a process; return its exit code, its output and errors, and the seconds it took from now."""
    before = time.monotonic()
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        _, err = process.communicate()
        pytest.fail(f"the process hangs; its errors: {err[-500:]!r}")
    return process.returncode, out, err, time.monotonic() - before


@pytest.mark.parametrize("relation", ['read.sort("x")', 'from_items([{"x": 1}]).join(read, "x")'])
def test_ctrl_c_ends_the_run_that_a_sort_or_join_within_another_has_started(relation: str, warm_python: str) -> None:
    process = start(
        warm_python,
        f"""
        def work(sample):
            if sample["x"] == 100:
                print("going", flush=True)
            time.sleep(0.002)
            return sample

        read = from_items([{{"x": x}} for x in range(100_000)]).map(work, workers=2)
        try:
            list({relation}.map(dict, workers=2))
        except KeyboardInterrupt:
            print("left", [t.name for t in threading.enumerate() if t.name.startswith("penstock")])
        """,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    process.send_signal(signal.SIGINT)
    code, out, err, _ = finish(process)
    assert (code, out, err) == (0, "left []\n", "")


@pytest.mark.parametrize("work_s", [0.0, 0.2])
def test_ctrl_c_ends_the_iteration_quickly(work_s: float, warm_python: str) -> None:
    process = start(
        warm_python,
        f"""
        def work(item):
            time.sleep({work_s})
            return item

        try:
            for item in from_items(range(10_000_000)).map(work, workers=2):
                if item == 1:
                    print("going", flush=True)
        except KeyboardInterrupt:
            print("left", [t.name for t in threading.enumerate() if t.name.startswith("penstock")])
            raise
        """,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    code, out, err, took_s = finish(process)
    assert code != 0
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert out == "left []\n"
    assert took_s < 30  # millions of items are left


def test_an_open_iterator_does_not_delay_the_exit_of_the_program(warm_python: str) -> None:
    process = start(
        warm_python,
        """
        def work(item):
            time.sleep(0.001)
            return item

        run = iter(from_items(range(10_000_000)).map(work, workers=2).map(work, workers=1))
        next(run)
        print("end", flush=True)
        """,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "end\n"
    code, _, err, took_s = finish(process)
    assert (code, err) == (0, "")
    assert took_s < 30  # millions of items are left


def test_a_forked_child_can_iterate_after_its_parent(warm_python: str) -> None:
    process = start(
        warm_python,
        """
        ds = from_items(list(range(1000))).map(lambda x: x + 1, workers=2)
        want = list(ds)
        live = iter(ds)  # the parent is in the middle of another iteration
        next(live)
        child = os.fork()
        if child == 0:
            assert list(ds) == want
            try:
                list(live)
            except ps.errors.EngineError as exc:
                print(exc, flush=True)
            sys.exit(7)  # a regular exit, while the parent's iterator exists
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert list(live) == want[1:]
        """,
    )
    code, out, err, _ = finish(process)
    assert (code, err) == (0, "")
    assert "forked" in out


def test_closing_while_reading_never_hangs() -> None:
    for _ in range(20):
        run = started(from_items(list(range(2000))).map(identity, workers=2).map(identity, workers=2))
        closer = threading.Thread(target=_close_quietly, args=(run,))
        closer.start()
        try:
            for _ in run:
                pass
        except (PenstockError, ValueError):
            pass
        closer.join(60)
        assert not closer.is_alive()
    assert not own_threads()


def _close_quietly(run: Any) -> None:
    with contextlib.suppress(ValueError):  # the generator is running in the other thread
        run.close()
