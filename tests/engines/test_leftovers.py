"""However a run ends, nothing is left of it: no process, no thread, no shared memory, no file.

Other programs use the machine at the same time. So each test marks its processes by a variable of the environment and
gives them a folder for temporary files, and counts only what these processes leave.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
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
SHM = "/dev/shm"
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test


# In this process.


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Mark the processes that this test starts; return the mark."""
    name = uuid.uuid4().hex
    monkeypatch.setenv(MARK, name)
    return name


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder for the temporary files of this process, and of those that it starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def marked(mark: str) -> list[int]:
    """The living processes with a mark, except this one."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # the process has just ended
            continue
        if f"{MARK}={mark}".encode() in environment.split(b"\0") and int(pid) != os.getpid():
            found.append(int(pid))
    return found


def all_ended(mark: str, within_s: float = 60) -> bool:
    """Wait until no process has the mark."""
    deadline = time.monotonic() + within_s
    while marked(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def traces() -> tuple[list[str], int, int]:
    """The threads, the number of open files and the number of mapped regions of this process."""
    gc.collect()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")]
    maps = Path("/proc/self/maps").read_text().count("memfd:penstock")
    return names, len(os.listdir("/proc/self/fd")), maps


def shared_files() -> set[str]:
    """The files in shared memory with a name that a run could have given them."""
    with os.scandir(SHM) as entries:
        files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    return {name for name in files if "penstock" in name or name.startswith("psm_")}


def files_in_use() -> set[str]:
    """The files in shared memory that a process other than this one has open or mapped."""
    names: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        paths: list[str] = []
        with suppress(OSError):  # the process has just ended, or is another user's
            paths += [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        with suppress(OSError):
            paths += [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        names |= {Path(path).name for path in paths if path.startswith(f"{SHM}/")}
    return names


def left_in_shared_memory(before: set[str]) -> set[str]:
    """The files that are new since ``before``, stay, and belong to no other program."""
    deadline = time.monotonic() + 60
    while left := shared_files() - before:
        left -= files_in_use()
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return left


@pytest.fixture
def leaves_nothing(mark: str, temporary: Path) -> Callable[[], None]:
    """Return a check that nothing is left of what happened since the beginning of the test."""
    before, shared = traces(), shared_files()

    def check() -> None:
        gc.collect()
        assert all_ended(mark, 0.5)
        assert traces() == before
        assert not left_in_shared_memory(shared)
        assert not os.listdir(temporary)

    return check


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


def break_out() -> None:
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


def never_started() -> None:
    iter(plan())


ENDS: list[Callable[[], None]] = [
    success,
    failure,
    break_out,
    close,
    forget,
    cycle,
    consumer_fails,
    loader_closed,
    never_started,
]


@pytest.mark.parametrize("end", ENDS if FULL else ENDS[::3], ids=lambda end: end.__name__)
def test_a_run_leaves_nothing_behind_in_a_process_that_continues(
    end: Callable[[], None], leaves_nothing: Callable[[], None]
) -> None:
    end()
    leaves_nothing()


@pytest.mark.parametrize("inside", ["sleep", "regex"] if FULL else ["regex"])
def test_a_close_does_not_wait_for_a_worker_inside_a_long_call(inside: str, leaves_nothing: Callable[[], None]) -> None:
    def long_call(x: int) -> int:
        if x >= 3 and inside == "sleep":
            time.sleep(60)
        elif x >= 3:
            import re

            re.match(r"(a+)+$", "a" * 60 + "b")
        return x

    run: Any = iter(from_items(list(range(100))).map(long_call, on="processes", workers=1))
    assert next(run) == 0
    time.sleep(0.1)
    started_at = time.monotonic()
    run.close()
    assert time.monotonic() - started_at < 30  # the call takes a minute or more
    leaves_nothing()


def test_a_killed_worker_leaves_nothing_behind(mark: str, leaves_nothing: Callable[[], None]) -> None:
    got = []
    for x in from_items(list(range(200))).map(slow, on="processes", workers=WORKERS):
        got.append(x)
        if x == 20:
            for pid in marked(mark):
                with suppress(ProcessLookupError):  # it has ended with its parent
                    os.kill(pid, signal.SIGKILL)
    assert got == list(range(200))
    leaves_nothing()


# In a separate process, which ends in the middle of a run.

BUSY = {
    "working": "time.sleep(0.002)",
    "sleeping": "time.sleep(60)",
    "in C": "re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "nested": "list(from_items(range(9)).map(lambda s: time.sleep(s) or s, on='processes', workers=1))",
}
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
FINISHES = {
    "sys.exit": "sys.exit(3)",
    "an exception": "raise KeyError('the end')",
    "the last line": "",
    "os._exit": "os._exit(4)",
}


def start(tmp_path: Path, busy: str, ending: str, mark: str) -> subprocess.Popen[str]:
    """Start a script, and return it in the middle of a run."""
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
            print("running", flush=True)
            """
        )
        + ending
        + "\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with (tmp_path / "stderr").open("w") as stderr:  # not a pipe: a process that is left behind would keep it open
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE, "TMPDIR": str(temporary), MARK: mark},
            start_new_session=True,
        )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


def ended(process: subprocess.Popen[str], tmp_path: Path, mark: str, within_s: float = 60) -> tuple[int, str]:
    """Wait for a script; fail if a process or a file of it is left. Return its exit code and its errors."""
    assert process.stdout is not None
    process.stdout.close()
    try:
        code = process.wait(within_s)
        assert all_ended(mark), "left behind"
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    assert not os.listdir(tmp_path / "temporary")
    return code, (tmp_path / "stderr").read_text()


def sampled(cases: Iterator[Any], *chosen: tuple[str, str]) -> list[Any]:
    """All cases; unless ``FULL``, the chosen ones and a random one."""
    every = list(cases)
    return every if FULL else [*chosen, random.Random(3).choice([case for case in every if case not in chosen])]


@pytest.mark.parametrize(
    ("name", "busy"),
    sampled(product(SIGNALS, BUSY), ("SIGINT", "sleeping"), ("SIGKILL", "nested")),
)
def test_a_process_that_gets_a_signal_leaves_nothing_behind(tmp_path: Path, name: str, busy: str) -> None:
    mark = uuid.uuid4().hex
    shared = shared_files()
    process = start(tmp_path, busy, "for _ in run: pass", mark)
    deadline = time.monotonic() + 60
    while busy == "nested" and len(marked(mark)) < 1 + 2 * WORKERS and time.monotonic() < deadline:
        time.sleep(0.02)  # until the workers have workers
    time.sleep(0.1)
    assert len(marked(mark)) >= 2
    os.killpg(process.pid, SIGNALS[name])
    code, err = ended(process, tmp_path, mark)
    assert not left_in_shared_memory(shared)
    if name == "SIGINT":
        assert code != 0
        assert err.rstrip().endswith("KeyboardInterrupt")
    else:
        assert code == -SIGNALS[name]


@pytest.mark.parametrize(
    ("finish", "busy"), sampled(product(FINISHES, BUSY), ("sys.exit", "sleeping"), ("the last line", "working"))
)
def test_a_process_that_ends_in_the_middle_leaves_nothing_behind(tmp_path: Path, finish: str, busy: str) -> None:
    mark = uuid.uuid4().hex
    process = start(tmp_path, busy, "time.sleep(0.2)\n" + FINISHES[finish], mark)
    code, err = ended(process, tmp_path, mark)
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


# The iterator is in a module that was imported before penstock: the interpreter clears such a module after ours.
HELD_AT_EXIT = """
import os, sys
import penstock as ps

def double(row):
    return {"x": 2 * row["x"]}

if __name__ == "__main__":
    ds = ps.from_items([{"x": number} for number in range(1000)])
"""
HELD: dict[str, str] = {
    "serial": "iter(ds)",
    "threads": "iter(ds.map(double, workers=2))",
    "processes": "iter(ds.map(double, workers=1, on='processes'))",
    "loader": "iter(ds.map(double, workers=2).batched(8).loader())",
    "to_torch": "iter(ds.map(double, workers=2).batched(8).to_torch())",
    "DataLoader": "iter(__import__('torch.utils.data').utils.data.DataLoader("
    "ds.map(double).batched(8).to_torch(), batch_size=None, num_workers=1))",
}


@pytest.mark.parametrize("holder", ["os", "sys.modules['__main__']"] if FULL else ["os"])
@pytest.mark.parametrize("iterator", HELD if FULL else ["threads", "processes", "DataLoader"])
def test_a_program_that_ends_with_an_open_iterator_prints_nothing(
    iterator: str, holder: str, tmp_path: Path, warm_python: str
) -> None:
    lines = f"    {holder}.held = {HELD[iterator]}\n    next({holder}.held)\n"
    (tmp_path / "program.py").write_text(HELD_AT_EXIT + lines)
    python = sys.executable if FULL else warm_python
    for _ in range(20 if FULL else 1):
        done = subprocess.run([python, "program.py"], cwd=tmp_path, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


READ_BY_A_THREAD = """
import atexit, threading
started, resumed = threading.Event(), threading.Event()

def resume():  # after penstock has closed its runs: exit functions run in reverse order
    resumed.set()
    thread.join(60)

atexit.register(resume)
import penstock as ps

def read():
    try:
        for _ in ps.from_items(range(10**6)).map(str, workers=2):
            started.set()
            resumed.wait()
        print("the data has ended")
    except ps.errors.EngineError as exc:
        print(exc)

thread = threading.Thread(target=read, daemon=True)
thread.start()
started.wait()
"""


def test_a_thread_that_reads_while_the_program_ends_does_not_see_the_end_of_the_data() -> None:
    done = subprocess.run([sys.executable, "-c", READ_BY_A_THREAD], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"the run was closed while it was being read\n", b"")
