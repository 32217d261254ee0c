"""Memory is bounded by the blocks in progress, never by the dataset.

Every measurement runs in a separate process. Pages of mapped shards count as resident but belong to the file cache,
so the tests compare anonymous memory: what the program itself holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.dataset import from_items

FULL = os.environ.get("PENSTOCK_FULL") == "1"
SOURCE = str(Path(penstock.__file__).parents[1])
# The small dataset is large enough to fill every queue: below that, more data means more blocks in progress.
SAMPLE_BYTES, SMALL_BYTES, LARGE_BYTES = 30_000, 24_000_000, 240_000_000 if FULL else 120_000_000

HEAD = """
import json, sys, time
import numpy as np
import penstock as ps
from penstock.dataset import from_items, read_tar

def anonymous():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1000 for line in lines if line.startswith("Anonymous"))

def readings(items, every):
    "Anonymous memory in excess of that at the beginning, after each `every` items; and the number of items."
    before, count, seen = anonymous(), 0, [0]
    for count, _ in enumerate(items, 1):
        if count % every == 0:
            seen.append(anonymous() - before)
    return sorted(seen), count

def peak(items, every):
    "The highest reading, and the number of items."
    seen, count = readings(items, every)
    return seen[-1], count
"""


def measure(script: str, *args: str) -> Any:
    """Run a script and return the JSON that it prints."""
    env = {**os.environ, "PYTHONPATH": SOURCE, "MALLOC_ARENA_MAX": "2"}
    code = HEAD + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two folders of shards, the second many times as large as the first."""
    folder = tmp_path_factory.mktemp("memory")
    noise = np.random.default_rng(0).bytes(SAMPLE_BYTES)
    for name, size in (("small", SMALL_BYTES), ("large", LARGE_BYTES)):
        (folder / name).mkdir()
        for shard in range(4):
            with tarfile.open(folder / name / f"{shard}.tar", "w") as tar:
                for number in range(size // SAMPLE_BYTES // 4):
                    member = tarfile.TarInfo(f"{number:06}.bin")
                    member.size = SAMPLE_BYTES
                    tar.addfile(member, BytesIO(noise))
    return str(folder / "small"), str(folder / "large")


KINDS = {
    "decoded by two workers": ".shuffle().map(lambda s: np.frombuffer(s['bin'], np.uint8).repeat(4), workers=2)",
    "late shuffle": ".flat_map(lambda s: [s['bin'][i:] for i in range(3)]).shuffle(20)",
}
if FULL:
    KINDS |= {
        "inline": "",
        "shuffled": ".shuffle()",
        "batched": ".shuffle().map(lambda s: s['bin'], workers=2).batched(16, collate=list)",
    }


@pytest.mark.parametrize("stages", KINDS.values(), ids=KINDS.keys())
def test_an_epoch_of_a_larger_dataset_needs_no_more_memory(shards: tuple[str, str], stages: str) -> None:
    script = f"print(json.dumps(readings(read_tar(sys.argv[1]){stages}, 40)))"
    small, _ = measure(script, shards[0])
    large, count = measure(script, shards[1])
    assert count > 160
    # A peak is the largest of many readings that fluctuate; so the medians are compared, and the peak is bounded.
    assert large[len(large) // 2] < small[len(small) // 2] + 12_000_000
    assert large[-1] < 40_000_000


def test_the_outputs_of_a_flat_map_are_delivered_before_all_of_them_exist() -> None:
    grown, count = measure(
        """
        def frames(number):
            for _ in range(200):
                yield np.ones(1_000_000, np.uint8)

        print(json.dumps(peak(from_items([0, 1]).flat_map(frames, workers=1), 1)))
        """
    )
    assert count == 400
    assert grown < 150_000_000, "one item yields 200 MB, two yield 400 MB"


def test_a_flat_map_may_be_endless() -> None:
    def counting(start: int) -> Iterator[int]:
        while True:
            yield start
            start += 1

    run = iter(from_items([5]).flat_map(counting))
    assert [next(run) for _ in range(10_000)] == list(range(5, 10_005))
    run.close()  # type: ignore[attr-defined]


def test_large_outputs_are_bounded_by_the_memory_option() -> None:
    script = """
        def grow(number):
            return np.ones(5_000_000, np.uint8)

        ds = from_items(list(range(60))).map(grow, workers=2).on("local", memory=sys.argv[1])
        print(json.dumps(peak((time.sleep(0.01) for _ in ds), 1)))
        """
    grown, count = measure(script, "60MB")
    assert count == 60
    assert grown < 60_000_000 + 3 * 5_000_000, "two being created and one with the consumer"


def most_undelivered(nbytes: int, count: int, **options: Any) -> int:
    """Return how many samples, at most, were created but not delivered to a slow consumer."""
    created, lock = [0], threading.Lock()

    def make(number: int) -> Any:
        with lock:
            created[0] += 1
        return np.zeros(nbytes, np.uint8)

    most = 0
    ds = from_items(list(range(count))).map(make, workers=2).on("local", **options)
    for delivered, _ in enumerate(ds, 1):
        if delivered <= 40:
            time.sleep(0.005)
        most = max(most, created[0] - delivered)
    return most


def test_a_fast_producer_does_not_run_far_ahead_of_a_slow_consumer() -> None:
    assert most_undelivered(10, 20_000) <= 10 * 512


def test_only_few_large_samples_are_created_ahead() -> None:
    assert most_undelivered(5_000_000, 80) * 5_000_000 <= 250_000_000
    assert most_undelivered(5_000_000, 60, memory="40MB") * 5_000_000 <= 50_000_000


def test_the_first_sample_of_a_slow_function_does_not_wait_for_a_large_block() -> None:
    called: list[int] = []
    resume = threading.Event()

    def slow(number: int) -> int:
        called.append(number)
        if number:
            assert resume.wait(60)
        return number

    run = iter(from_items(list(range(1000))).map(slow, workers=1))
    assert next(run) == 0
    assert len(called) <= 2  # the first block has one sample; the worker may be at the next
    resume.set()
    run.close()  # type: ignore[attr-defined]
