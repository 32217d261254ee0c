"""One packing at a time in a folder, and none is kept out by one that is dead."""

from __future__ import annotations

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
from penstock.cli import main
from penstock.errors import PlanError
from penstock.packing.folder_lock import LOCK, Owner, folder_lock
from penstock.packing.journal import read_journal, write_journal
from penstock.storage import Memory

HOLDING = """
import sys
from penstock.packing.folder_lock import folder_lock
with folder_lock(sys.argv[1]):
    print("mine", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that packs into a folder for as long as one likes."""
    call = [sys.executable, "-c", HOLDING, str(folder)]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        yield process


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "src" / "a").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "src" / "a" / f"{number}.txt").write_bytes(b"x" * number)
    return tmp_path / "src"


def test_the_second_packing_is_told_who_the_first_is(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(tmp_path / "out") as first:
        sentence = f"another packing (process {first.pid} on {socket.gethostname()}) is writing there; wait"
        for more in ({}, {"resume": False}, {"append": True}):
            with pytest.raises(PlanError) as caught:
                ps.pack(source, tmp_path / "out", **more)  # type: ignore[arg-type]
            assert sentence in str(caught.value)
        assert main(["pack", str(source), str(tmp_path / "out")]) == 1
        said = capsys.readouterr().err
        assert sentence in said
        assert said.count("\n") == 1
        assert os.listdir(tmp_path / "out") == [LOCK]
        first.communicate("\n")
    assert ps.pack(source, tmp_path / "out").samples == 20
    assert LOCK not in os.listdir(tmp_path / "out")


def test_the_lock_of_a_killed_packing_holds_nobody_up(source: Path, tmp_path: Path) -> None:
    with held(tmp_path / "out") as first:
        first.send_signal(signal.SIGKILL)
    assert os.listdir(tmp_path / "out") == [LOCK]
    assert ps.pack(source, tmp_path / "out").samples == 20
    assert LOCK not in os.listdir(tmp_path / "out")


class Waiting:
    """A dataset whose last items wait until somebody has looked around."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        if number >= 30:
            self.reached.set()
            assert self.go_on.wait(20)
        return {"label": number}


@contextmanager
def packing(source: Waiting, url: str) -> Iterator[list[BaseException]]:
    """A packing in another thread that has come to the last items; how it failed, in the end."""
    failed: list[BaseException] = []

    def pack() -> None:
        try:
            ps.pack(source, url, max_samples=5, shuffle=False)
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=pack)
    thread.start()
    try:
        assert source.reached.wait(20)
        yield failed
    finally:
        source.go_on.set()
        thread.join(20)


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_two_threads_do_not_pack_into_one_folder(where: str, tmp_path: Path) -> None:
    url = str(tmp_path / "out") if where == "disk" else "memory://turn/threads"
    source = Waiting()
    with packing(source, url) as failed:
        for more in ({}, {"resume": False}):
            with pytest.raises(PlanError, match=rf"another packing \(process {os.getpid()} on "):
                ps.pack(Waiting(), url, max_samples=5, shuffle=False, **more)  # type: ignore[arg-type]
    assert failed == []
    assert len(ps.read_tar(url)) == 40


def test_where_nobody_can_know_the_newcomer_takes_over_and_the_first_stops() -> None:
    url, source = "memory://turn/taken", Waiting()
    with packing(source, url) as failed:
        found = read_journal(Memory(), url)
        assert found is not None
        write_journal(Memory(), url, replace(found, by=Owner("elsewhere", 7, "", "mark")))
    assert [type(exc) for exc in failed] == [PlanError]
    assert "another packing (process 7 on elsewhere) is writing there" in str(failed[0])
    source.go_on.set()
    assert ps.pack(source, url, max_samples=5, shuffle=False).samples == 40
    assert [sample["cls"] for sample in ps.read_tar(url).decode()] == list(range(40))


def test_a_process_that_is_gone_or_another_one_does_not_live(tmp_path: Path) -> None:
    with folder_lock(str(tmp_path / "a")) as me:
        assert me.lives()
    assert not me.lives()
    with held(tmp_path / "b") as other:
        born = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        theirs = Owner(socket.gethostname(), other.pid, born, "")
        assert theirs.lives()
        assert not replace(theirs, born="1").lives()  # the number was given to another one since
        assert not replace(theirs, host="elsewhere").lives()
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert not theirs.lives()  # dead, and not yet buried
    assert not theirs.lives()


def test_a_lock_that_was_just_taken_away_is_not_taken_for_one(tmp_path: Path) -> None:
    """Many threads, one at a time: each gets its turn or is refused, and never two at once."""
    inside, most, refused = 0, 0, 0
    lock = threading.Lock()

    def try_it() -> None:
        nonlocal inside, most, refused
        for _ in range(50):
            try:
                with folder_lock(str(tmp_path)):
                    with lock:
                        inside += 1
                        most = max(most, inside)
                    with lock:
                        inside -= 1
            except PlanError:
                with lock:
                    refused += 1

    threads = [threading.Thread(target=try_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert refused < 200
    assert os.listdir(tmp_path) == []
