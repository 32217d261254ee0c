"""What the operating system sees when a run has ended, however it ended: no process, no thread, no memory."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import penstock
from penstock.dataset import Dataset, from_items
from penstock.errors import StageError

FULL = os.environ.get("PENSTOCK_FULL") == "1"
WORKERS = 2 if FULL else 1
SOURCE = str(Path(penstock.__file__).parents[1])
MARK = "PENSTOCK_TEST_MARK"
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test


# In this process.


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """What tells the processes of this test from all others."""
    name = uuid.uuid4().hex
    monkeypatch.setenv(MARK, name)
    return name


def marked(mark: str) -> list[int]:
    """The living processes with a mark, but for this one."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has just ended
            continue
        if f"{MARK}={mark}".encode() in environment.split(b"\0") and int(pid) != os.getpid():
            found.append(int(pid))
    return found


def gone(mark: str, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while marked(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def traces() -> tuple[list[str], int, int, list[str]]:
    """Threads of ours, open files, mapped segments, and files in shared memory that could be ours."""
    gc.collect()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]
    maps = Path("/proc/self/maps").read_text().count("memfd:penstock")
    shared = [name for name in os.listdir("/dev/shm") if "penstock" in name or name.startswith("psm_")]
    return names, len(os.listdir("/proc/self/fd")), maps, shared


def work(x: int) -> Any:
    time.sleep(0.001)
    return {"x": x, "bytes": bytearray(20_000), "inverse": 1 // (x - 40)}


def slow(x: int) -> int:
    time.sleep(0.002)
    return x


def plan() -> Dataset:
    return from_items(list(range(1000))).map(work, on="processes", workers=WORKERS)


def success() -> None:
    assert len(list(plan().limit(30))) == 30


def failure() -> None:
    with pytest.raises(StageError):
        list(plan())


def leave() -> None:
    for _ in plan():
        break


def close() -> None:
    run: Any = iter(plan())
    next(run)
    run.close()


def forget() -> None:
    run = iter(plan())
    next(run)
    del run


def cycle() -> None:
    run = [iter(plan())]
    run.append(run)  # type: ignore[arg-type]
    next(run[0])


def consumer_fails() -> None:
    def consume() -> None:
        for _ in plan():
            raise KeyError("the consumer's own")

    with pytest.raises(KeyError):
        consume()


def loader_closed() -> None:
    loader = plan().loader()
    next(iter(loader))
    loader.close()


def not_begun() -> None:
    iter(plan())


ENDS: list[Callable[[], None]] = [
    success,
    failure,
    leave,
    close,
    forget,
    cycle,
    consumer_fails,
    loader_closed,
    not_begun,
]


@pytest.mark.parametrize("end", ENDS if FULL else ENDS[::3], ids=lambda end: end.__name__)
def test_nothing_is_left_behind_in_a_process_that_goes_on(end: Callable[[], None], mark: str) -> None:
    before = traces()
    end()
    gc.collect()
    assert gone(mark, 0.5)
    assert traces() == before


@pytest.mark.parametrize("how", ["sleep", "regex"] if FULL else ["regex"])
def test_a_close_does_not_wait_for_a_worker_that_is_deep_in_something(how: str, mark: str) -> None:
    before = traces()

    def deep(x: int) -> int:
        if x >= 3 and how == "sleep":
            time.sleep(60)
        elif x >= 3:
            import re

            re.match(r"(a+)+$", "a" * 60 + "b")
        return x

    run: Any = iter(from_items(list(range(100))).map(deep, on="processes", workers=1))
    assert next(run) == 0
    time.sleep(0.1)
    begun = time.monotonic()
    run.close()
    assert time.monotonic() - begun < 3
    gc.collect()
    assert gone(mark, 0.5)
    assert traces() == before


def test_a_worker_that_was_killed_leaves_nothing(mark: str) -> None:
    before = traces()
    got = []
    for x in from_items(list(range(200))).map(slow, on="processes", workers=WORKERS):
        got.append(x)
        if x == 20:
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)
    assert got == list(range(200))
    gc.collect()
    assert gone(mark, 0.5)
    assert traces() == before


# In a process of its own, whose end is the point.

BUSY = {
    "working": "time.sleep(0.002)",
    "sleeping": "time.sleep(60)",
    "in C": "re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "nested": "list(from_items(range(9)).map(time.sleep, on='processes', workers=1))",
}
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
FINISH = {
    "sys.exit": "sys.exit(3)",
    "an exception": "raise KeyError('the end')",
    "the last line": "",
    "os._exit": "os._exit(4)",
}


def start(tmp_path: Path, busy: str, ending: str, mark: str) -> subprocess.Popen[str]:
    """A script that is in the middle of a run."""
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import os, re, sys, time
            import penstock as ps
            from penstock.dataset import from_items

            def work(x):
                if x >= 2:
                    {BUSY[busy]}
                return x

            run = iter(from_items(range(10**7)).map(work, on="processes", workers={WORKERS}))
            assert next(run) == 0
            print("going", flush=True)
            """
        )
        + ending
        + "\n"
    )
    with (tmp_path / "stderr").open("w") as stderr:  # no pipe: who is left behind would keep it open
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE, MARK: mark},
            start_new_session=True,
        )
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    return process


def ended(process: subprocess.Popen[str], tmp_path: Path, mark: str, within_s: float) -> tuple[int, str]:
    """Its code and what it said; nothing with its mark may be there two seconds later."""
    assert process.stdout is not None
    process.stdout.close()
    try:
        code = process.wait(within_s)
        assert gone(mark, 2), "left behind"
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    return code, (tmp_path / "stderr").read_text()


def some(cases: Iterator[Any], *few: tuple[str, str]) -> list[Any]:
    """All of them, or a few and one that is drawn."""
    every = list(cases)
    return every if FULL else [*few, random.Random(3).choice([case for case in every if case not in few])]


@pytest.mark.parametrize(
    ("name", "busy"),
    some(product(SIGNALS, BUSY), ("SIGINT", "sleeping"), ("SIGKILL", "nested")),
)
def test_nothing_is_left_behind_by_a_process_that_gets_a_signal(tmp_path: Path, name: str, busy: str) -> None:
    mark = uuid.uuid4().hex
    process = start(tmp_path, busy, "for _ in run: pass", mark)
    deadline = time.monotonic() + 5
    while busy == "nested" and len(marked(mark)) < 1 + 2 * WORKERS and time.monotonic() < deadline:
        time.sleep(0.02)  # until there are workers of workers
    time.sleep(0.1)
    assert len(marked(mark)) >= 2
    shared = traces()[3]
    os.killpg(process.pid, SIGNALS[name])
    code, err = ended(process, tmp_path, mark, 8)
    assert traces()[3] == shared
    if name == "SIGINT":
        assert code != 0
        assert err.rstrip().endswith("KeyboardInterrupt")
    else:
        assert code == -SIGNALS[name]


@pytest.mark.parametrize(
    ("finish", "busy"), some(product(FINISH, BUSY), ("sys.exit", "sleeping"), ("the last line", "working"))
)
def test_nothing_is_left_behind_by_a_process_that_ends_in_the_middle(tmp_path: Path, finish: str, busy: str) -> None:
    mark = uuid.uuid4().hex
    process = start(tmp_path, busy, "time.sleep(0.2)\n" + FINISH[finish], mark)
    code, err = ended(process, tmp_path, mark, 8)
    assert code == {"sys.exit": 3, "an exception": 1, "the last line": 0, "os._exit": 4}[finish]
    assert ("KeyError" in err) == (finish == "an exception")
    assert finish == "an exception" or err == ""


def test_a_forked_child_that_ends_leaves_its_parents_workers_alone(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    ending = """
child = os.fork()
if child == 0:
    del run
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
assert [next(run) for _ in range(50)] == list(range(1, 51))
"""
    code, err = ended(start(tmp_path, "working", ending, mark), tmp_path, mark, 15)
    assert (code, err) == (0, "")
