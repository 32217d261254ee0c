"""Worker processes that die, hang, or cannot start: the stream does not change, and the item to blame is named."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from penstock.dataset import Dataset, from_items
from penstock.engines import Program
from penstock.engines.flow import BlockSizer, walk
from penstock.engines.local.pool import Closed
from penstock.engines.local.process_proxy import ProcessPayload
from penstock.engines.local.worker_proxy import RemoteWorkerProxy
from penstock.engines.meter import Event, Meter, Meters
from penstock.errors import EngineError, StageError
from penstock.plan import Block
from penstock.testing import fingerprint, numbers, outputs

FULL = os.environ.get("PENSTOCK_FULL") == "1"
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test

Sample = dict[str, Any]
BOTH: dict[str, Any] = {"on": "processes", "workers": 2}


def processes() -> dict[int, int]:
    """The fork servers and workers of this process, with their parents; not its other children."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline", "rb") as command:
                state, parent = stat.read().rpartition(")")[2].split()[:2]
                if b"penstock.engines.local.process_worker" in command.read() and state != "Z":
                    found[int(pid)] = int(parent)
        except OSError:  # the process has just ended
            continue
    servers = {pid for pid, parent in found.items() if parent == os.getpid()}
    return {pid: parent for pid, parent in found.items() if pid in servers or parent in servers}


def workers() -> list[int]:
    """The workers among ``processes()``."""
    return sorted(pid for pid, parent in processes().items() if parent != os.getpid())


def slow(sample: Sample) -> Sample:
    time.sleep(0.003)
    return {**sample, "slow": True}


def noisy(sample: Sample, rng: Any) -> Sample:
    time.sleep(0.003)
    return {**sample, "noise": int(rng.integers(1 << 40))}


def many_outputs(sample: Sample, rng: Any) -> Iterator[tuple[int, int]]:
    time.sleep(0.01)
    for number in range(3000):
        yield sample["x"], int(rng.integers(99)) + number


def fails(sample: Sample) -> Sample:
    time.sleep(0.003)
    return {**sample, "inverse": 1 // (sample["x"] % 5)}


def is_odd(sample: Sample) -> bool:
    return bool(sample["x"] % 2)


class Model:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, batch: Sample) -> Sample:
        time.sleep(0.01)
        return {**batch, "y": batch["x"] * self.factor}


PLANS: dict[str, Callable[[], Dataset]] = {
    "map": lambda: numbers((70, 50)).shuffle().map(noisy, **BOTH),
    "parts of a flat_map": lambda: numbers((24,)).flat_map(many_outputs, **BOTH),
    "filter and skip": lambda: numbers((60, 60)).map(fails, **BOTH).filter(is_odd, **BOTH).on_error("skip"),
    "batched": lambda: numbers((60, 60)).shuffle().map(slow, **BOTH).batched(7),
    "a class": lambda: numbers((60, 60)).map_batches(Model, 4, fn_args=(3,), **BOTH),
}
KILLS = 4 if FULL else 1


@pytest.mark.parametrize("ordered", [True, False] if FULL else [True])
@pytest.mark.parametrize("name", PLANS)
def test_killing_workers_does_not_change_the_stream(name: str, ordered: bool) -> None:
    ds = PLANS[name]().epoch(0)
    want = outputs(ds.on("serial"))
    rng = random.Random(name)
    step = len(want) // 8  # kill early, while most items are not delivered
    moments = {number * step + rng.randrange(1, step + 1) for number in range(KILLS)}
    ds = ds.on("local", ordered=ordered)
    got: list[Any] = []
    killed = 0
    for item in ds:
        got.append(fingerprint(item))
        if len(got) in moments:
            time.sleep(1.0 if killed else 0.0)  # a worker that is killed at its start twice in a row ends the run
            for pid in rng.sample(alive := workers(), min(1, len(alive))):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    if ordered:
        assert got == want
    elif name == "batched":  # which samples form a batch depends on which are finished first
        assert len(got) == len(want)
    else:
        assert Counter(got) == Counter(want)
    assert 1 <= sum(segment.deaths for segment in ds.stats().segments) <= killed
    assert not processes()


def test_killing_the_fork_server_does_not_change_the_stream() -> None:
    ds = from_items([{"x": n} for n in range(400)]).map(slow, **BOTH)
    got = []
    for number, sample in enumerate(ds):
        got.append(sample["x"])
        if number == 50:
            (fork_server,) = set(processes()) - set(workers())
            os.kill(fork_server, signal.SIGKILL)
    assert got == list(range(400))
    assert 1 <= ds.stats().segments[-1].deaths <= 2
    assert not processes()


def test_killing_workers_of_an_unordered_run_neither_loses_nor_repeats_samples() -> None:
    ds = PLANS["map"]().epoch(0)
    got: list[Any] = []
    for item in ds.on("local", ordered=False):
        got.append(fingerprint(item))
        if len(got) == 20:
            os.kill(workers()[0], signal.SIGKILL)
    assert Counter(got) == Counter(outputs(ds.on("serial")))


def ends_its_worker(how: str) -> Callable[[Sample], Sample]:
    def fatal(sample: Sample) -> Sample:
        if sample["x"] == 13:
            if how == "exit":
                os._exit(3)
            elif how == "segfault":
                ctypes.string_at(0)
            elif how == "sys.exit":
                sys.exit(4)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return sample

    return fatal


@pytest.mark.parametrize(
    ("how", "text"),
    [("exit", "exit status 3"), ("segfault", "SIGSEGV")]
    + ([("sys.exit", "exit status 4"), ("kill", "SIGKILL")] if FULL else []),
)
def test_a_sample_that_ends_its_worker_every_time_is_named(how: str, text: str) -> None:
    ds = numbers((10, 30)).map(ends_its_worker(how), on="processes", workers=1)
    loader = ds.loader()
    got: list[int] = []
    with pytest.raises(StageError, match=rf"{text}.*map\(fatal\).*shard-0001.*key: 13") as caught:
        got.extend(sample["x"] for sample in loader)
    assert got == list(range(13))
    assert (caught.value.key, caught.value.shard) == ("13", "shard-0001")
    assert loader.stats().segments[-1].deaths == 4
    rest = numbers((10, 30)).map(slow).loader()
    rest.load_state_dict(loader.state_dict())
    assert [sample["x"] for sample in rest] == list(range(13, 40)), "a state resumes with the failing sample"


def test_a_sample_that_ends_its_worker_every_time_can_be_skipped() -> None:
    loader = numbers((10, 30)).map(ends_its_worker("exit"), on="processes", workers=1).on_error("skip").loader()
    assert [sample["x"] for sample in loader] == [x for x in range(40) if x != 13]
    (skip,) = loader.skipped
    assert (skip.place.shard, skip.place.key, skip.stage) == ("shard-0001", "13", "map")
    assert "exit status 3" in skip.problem


def test_the_neighbours_of_a_fatal_sample_keep_their_outputs_and_errors() -> None:
    def copies(sample: Sample) -> list[Sample]:
        if sample["x"] == 13:
            os._exit(3)
        return [{**sample, "copy": 1 // (sample["x"] % 4 - 1)}] * (sample["x"] % 3)

    def without_fatal_sample(sample: Sample) -> list[Sample]:
        return [{**sample, "copy": 1 // (sample["x"] % 4 - 1)}] * (sample["x"] % 3)

    def plan(fn: Any) -> Any:
        return numbers((10, 30), bad=(12, 15)).flat_map(fn, on="processes", workers=1).on_error("skip").loader()

    loader, want = plan(copies), plan(without_fatal_sample)
    assert list(loader) == [sample for sample in want if sample["x"] != 13]
    assert [s.place.key for s in loader.skipped] == sorted({s.place.key for s in want.skipped} | {"13"}, key=int)


def test_a_memory_error_is_an_error_like_any_other() -> None:
    def greedy(x: int) -> Any:
        return x if x != 5 else bytearray(1 << 46)

    ds = from_items(list(range(10))).map(greedy, on="processes", workers=1)
    with pytest.raises(StageError, match="MemoryError") as caught:
        list(ds)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert list(ds.on_error("skip")) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert ds.stats().segments[-1].deaths == 0


class ExitsInConstructor:
    def __init__(self) -> None:
        os._exit(5)

    def __call__(self, batch: Any) -> Any:
        return batch


class FailsInConstructor:
    def __init__(self) -> None:
        raise ValueError("no weights found")

    def __call__(self, batch: Any) -> Any:
        return batch


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_a_constructor_that_exits_ends_the_run_and_blames_no_sample(action: Any) -> None:
    ds = numbers((500,)).map_batches(ExitsInConstructor, on="processes", workers=1).on_error(action)
    with pytest.raises(EngineError, match=r"map_batches\(ExitsInConstructor\).*at its start: exit status 5"):
        list(ds)
    assert ds.stats().segments[-1].deaths <= 4, "twice for the block that is waited for, and twice for the next one"


def test_a_constructor_that_fails_ends_the_run_and_blames_no_sample() -> None:
    ds = numbers((500,)).map_batches(FailsInConstructor, on="processes", workers=2).on_error("skip")
    with pytest.raises(StageError, match=r"ValueError: no weights found.*FailsInConstructor") as caught:
        list(ds)
    assert caught.value.key is None
    assert isinstance(caught.value.__cause__, ValueError)


def hangs(x: int) -> int:
    if x == 5:
        time.sleep(60)
    return x


def test_a_sample_that_takes_too_long_is_named() -> None:
    ds = from_items(list(range(20))).map(hangs, on="processes", workers=2, timeout_s=0.3)
    got: list[int] = []
    before = time.monotonic()
    with pytest.raises(StageError, match=r"timeout_s=0.3.*map\(hangs\).*key: 5"):
        got.extend(ds)
    assert got == [0, 1, 2, 3, 4]
    assert time.monotonic() - before < 40  # the function sleeps for 60 s
    assert (ds.stats().segments[-1].timeouts, ds.stats().segments[-1].deaths) == (2, 0)
    assert not processes()


def test_a_sample_that_takes_too_long_can_be_skipped() -> None:
    seen: list[Event] = []
    ds = from_items(list(range(20))).map(hangs, on="processes", workers=1, timeout_s=0.3).on_error("skip")
    assert list(ds.on("local", observer=seen.append)) == [x for x in range(20) if x != 5]
    assert [event.kind for event in seen if event.kind in ("timeout", "death")] == ["timeout"] * 2


def test_a_time_limit_applies_to_one_sample_and_not_to_all_together() -> None:
    def takes_a_while(x: int) -> int:
        time.sleep(0.1)
        return x

    ds = from_items(list(range(12))).map(takes_a_while, on="processes", workers=1, timeout_s=0.5)
    assert list(ds) == list(range(12))


def test_retries_in_processes_are_counted() -> None:
    failed: set[int] = set()

    def flaky(x: int) -> int:
        if x % 4 == 0 and x not in failed:
            failed.add(x)
            raise OSError("not this time")
        return x

    ds = from_items(list(range(20))).map(flaky, retries=2, on="processes", workers=1)
    assert list(ds) == list(range(20))
    assert ds.stats().segments[-1].retries == 5


# One worker proxy, without a pool.


def proxies_and_blocks(
    ds: Dataset, meters: Meters | None = None
) -> tuple[Callable[[], RemoteWorkerProxy], Iterator[Block]]:
    """Return a function that creates worker proxies for the last segment of a plan, and the blocks for them."""
    program = Program(ds.plan)
    (segment,) = program.levels[-1].segments
    payload = ProcessPayload.of(segment, program.contexts(segment, 0))
    order = program.order(0)
    blocks = walk(program, order, program.start(order, None), BlockSizer())
    return lambda: RemoteWorkerProxy(payload, "cpu", Meter("test", "processes"), meters or Meters(), 0), blocks


def test_another_proxy_continues_a_block_whose_proxy_is_closed() -> None:
    def copies(x: int) -> Iterator[tuple[int, int]]:
        return ((x, number) for number in range(5000))

    make, blocks = proxies_and_blocks(from_items([1]).flat_map(copies, on="processes"))
    first, second = make(), make()
    done, parts = first(next(blocks))
    got = list(done.items)
    first.close()
    while parts is not None:
        done, parts = second(parts)
        got += done.items
    assert got == list(copies(1))
    assert not done.lineage.more
    second.close()
    assert not processes()


def test_a_worker_that_does_not_get_ready_can_be_aborted() -> None:
    class SleepsWhenLoaded:
        def __reduce__(self) -> Any:
            return time.sleep, (60,)

    never_loads = SleepsWhenLoaded()
    make, blocks = proxies_and_blocks(from_items([1]).map(lambda x: (x, never_loads), on="processes"))
    proxy = make()
    ended: list[str] = []

    def work() -> None:
        try:
            proxy(next(blocks))
        except Closed:
            ended.append("closed")

    thread = threading.Thread(target=work)
    thread.start()
    while not processes():
        time.sleep(0.01)
    time.sleep(0.2)
    proxy.abort()
    thread.join(60)
    assert ended == ["closed"]
    proxy.close()
    assert not processes()


def test_an_aborted_proxy_starts_no_process() -> None:
    make, blocks = proxies_and_blocks(from_items([1]).map(abs, on="processes"))
    proxy = make()
    proxy.abort()
    with pytest.raises(Closed):
        proxy(next(blocks))
    assert not processes()
