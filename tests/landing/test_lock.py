"""One run at a time writes to a folder, and a killed run does not keep others out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.blobs.draft import put_object
from penstock.cli import main
from penstock.errors import PlanError
from penstock.landing.lock import LOCK, OWNER, Owner, work_lock
from penstock.storage import Memory

WORK = ".penstock-tar"
HOLD_LOCK = """
import sys
from penstock.landing.lock import work_lock
with work_lock(sys.argv[1], None, "packing run"):
    print("locked", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def locked_by_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process that holds the lock of a folder until it reads a line."""
    call = [sys.executable, "-c", HOLD_LOCK, str(folder / WORK)]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "src" / "a").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "src" / "a" / f"{number}.txt").write_bytes(b"x" * number)
    return tmp_path / "src"


def test_a_second_run_is_refused_and_the_error_names_the_first(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked_by_process(tmp_path / "out") as first:
        sentence = f"another packing run (process {first.pid} on {socket.gethostname()}) is writing there; wait"
        for more in ({}, {"mode": "replace"}, {"mode": "append"}):
            with pytest.raises(PlanError) as caught:
                ps.pack(source, tmp_path / "out", **more)  # type: ignore[arg-type]
            assert sentence in str(caught.value)
        assert main(["pack", str(source), str(tmp_path / "out")]) == 1
        printed = capsys.readouterr().err
        assert sentence in printed
        assert printed.count("\n") == 1
        assert os.listdir(tmp_path / "out" / WORK) == [LOCK]
        first.communicate("\n")
    assert ps.pack(source, tmp_path / "out").samples == 20
    assert not (tmp_path / "out" / WORK).exists()


def test_the_lock_of_a_killed_run_is_released(source: Path, tmp_path: Path) -> None:
    with locked_by_process(tmp_path / "out") as first:
        first.send_signal(signal.SIGKILL)
    assert os.listdir(tmp_path / "out" / WORK) == [LOCK]
    assert ps.pack(source, tmp_path / "out").samples == 20
    assert not (tmp_path / "out" / WORK).exists()


class Blocking:
    """A dataset whose last items block until ``proceed`` is set."""

    def __init__(self) -> None:
        self.reached, self.proceed = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        if number >= 30:
            self.reached.set()
            assert self.proceed.wait(60)
        return {"label": number}


@contextmanager
def packing(source: Blocking, url: str) -> Iterator[list[BaseException]]:
    """Run a packing in another thread up to the items that block, and to its end on exit; yield its exceptions."""
    failures: list[BaseException] = []

    def pack() -> None:
        try:
            ps.pack(source, url, max_samples=5, shuffle=False)
        except BaseException as exc:
            failures.append(exc)

    thread = threading.Thread(target=pack)
    thread.start()
    try:
        assert source.reached.wait(60)
        yield failures
    finally:
        source.proceed.set()
        thread.join(60)


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_two_threads_do_not_pack_into_one_folder(where: str, tmp_path: Path) -> None:
    url = str(tmp_path / "out") if where == "disk" else "memory://folder-lock/threads"
    source = Blocking()
    with packing(source, url) as failures:
        for more in ({}, {"mode": "replace"}):
            with pytest.raises(PlanError, match=rf"another packing run \(process {os.getpid()} on "):
                ps.pack(Blocking(), url, max_samples=5, shuffle=False, **more)  # type: ignore[arg-type]
    assert failures == []
    assert len(ps.read_tar(url)) == 40


def test_a_run_stops_when_another_machine_takes_over_its_remote_folder() -> None:
    url, source = "memory://folder-lock/taken", Blocking()
    with packing(source, url) as failures:
        put_object(Memory(), f"{url}/{WORK}/{OWNER}", json.dumps(Owner("elsewhere", 7, "", "run").to_json()).encode())
    assert [type(exc) for exc in failures] == [PlanError]
    assert "another packing run (process 7 on elsewhere) is writing there" in str(failures[0])
    source.proceed.set()
    assert ps.pack(source, url, max_samples=5, shuffle=False).samples == 40
    assert [sample["cls"] for sample in ps.read_tar(url).decode()] == list(range(40))


def test_an_owner_is_alive_while_its_process_and_run_are(tmp_path: Path) -> None:
    with work_lock("memory://lock/a/work", Memory(), "run"):
        owner = Owner.from_json(json.loads(b"".join(Memory().stream(f"memory://lock/a/work/{OWNER}"))))
        assert owner.is_alive()
    assert not owner.is_alive()
    assert list(Memory().list("memory://lock/a")) == []
    with locked_by_process(tmp_path / "b") as process:
        start_time = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        other = Owner(socket.gethostname(), process.pid, start_time, "")
        assert other.is_alive()
        assert not replace(other, started_at="1").is_alive()  # another process got the same id
        assert not replace(other, host="elsewhere").is_alive()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not other.is_alive()  # a zombie
    assert not other.is_alive()


def test_a_removed_lock_file_does_not_count_as_a_lock(tmp_path: Path) -> None:
    """Many threads lock one folder: each gets the lock or is refused, and never two hold it at once."""
    inside, most_inside, refused = 0, 0, 0
    counters = threading.Lock()

    def lock_repeatedly() -> None:
        nonlocal inside, most_inside, refused
        for _ in range(50):
            try:
                with work_lock(str(tmp_path / "work"), None, "run"):
                    with counters:
                        inside += 1
                        most_inside = max(most_inside, inside)
                    with counters:
                        inside -= 1
            except PlanError:
                with counters:
                    refused += 1

    threads = [threading.Thread(target=lock_repeatedly) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most_inside == 1
    assert refused < 200
    assert os.listdir(tmp_path) == []
