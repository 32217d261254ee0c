"""Cases of the tar tools: copying, splitting, sorting, a command for each sample, and how soon they start.

``python tool_cases.py CASE ROW`` measures one row once, see ``cases.py``. All rows are whole commands with their start,
on 1 GB of samples of 30 KB and two members; set PENSTOCK_TOOL_SAMPLES for another number of samples.
"""

from __future__ import annotations

import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import data
from cases import Case, Measure, Result, Row, Task, main
from data import FULL, Fields, Sizes, StoredData

PENSTOCK = [sys.executable, "-m", "penstock"]
SORT_FACTOR = 5  # times as many samples
COMMANDS = 400  # the number of samples that a command is run for

# tarproc's patterns have flags in the middle, which newer Pythons refuse.
RUN_WITH_OLD_PATTERNS = """
import re, runpy, sys
strict = re._compile
def tolerant(pattern, flags):
    loose = isinstance(pattern, str) and "(?i)" in pattern
    return strict(pattern.replace("(?i)", ""), flags | re.IGNORECASE) if loose else strict(pattern, flags)
re._compile = tolerant
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# The rows of the peer run in its own environment, so this is its interpreter.
TARPROC = [sys.executable, "-W", "ignore", "-c", RUN_WITH_OLD_PATTERNS]

Command = Callable[[StoredData, Path], list[str]]  # takes the shards and a scratch folder


def shards(sizes: Sizes, times: int = 1) -> StoredData:
    """Return samples of 30 KB of noise and a class, in one shard."""
    count = times * int(os.environ.get("PENSTOCK_TOOL_SAMPLES", "32000")) // (1 if sizes == FULL else 20)
    return data.create_once(f"tools-{count}", count, lambda folder: data.write_with_tarfile(folder, _samples(count), 1))


def _samples(count: int) -> Iterator[tuple[str, Fields]]:
    rng = random.Random(9)
    noise = rng.randbytes(1 << 20)
    order = list(range(count))
    rng.shuffle(order)
    for number in order:
        start = rng.randrange(900_000)
        yield (
            f"train/{number:08d}",
            {"cls": b"%d" % (number % 1000), "jpg": noise[start : start + 28_000 + number % 4000]},
        )


def _measure_command(
    command: Command, times: int = 1, count_of: Callable[[StoredData], int] = lambda stored: stored.samples
) -> Measure:
    """Measure a command whose output goes to a file."""

    def measure(task: Task) -> Result:
        stored = shards(task.sizes, times)
        task.scratch.mkdir(parents=True, exist_ok=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started_at = time.perf_counter()
        with open(task.scratch / "out.tar", "wb") as out:
            subprocess.run(command(stored, task.scratch), stdout=out, stderr=subprocess.DEVNULL, check=True)
        seconds = time.perf_counter() - started_at
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        count = count_of(stored)
        if task.check:
            return {"samples": count}
        return {
            "seconds": seconds,
            "samples": count,
            "nbytes": stored.nbytes,
            "CPU s": cpu_s,
            "own MB": after.ru_maxrss / 1e3,
        }

    return measure


def _tarproc(name: str, *options: str) -> Command:
    return lambda stored, _: [*TARPROC, _script(name), *options, *stored.shards]


def _tarproc_split(stored: StoredData, scratch: Path) -> list[str]:
    return [*TARPROC, _script("tarsplit"), "-s", "2e8", "-o", str(scratch / "old"), *stored.shards]


def _tarproc_sort(stored: StoredData, scratch: Path) -> list[str]:
    return [*TARPROC, _script("tarsort"), "-t", str(scratch / "old.db"), *stored.shards]


def _tarproc_proc(stored: StoredData, scratch: Path) -> list[str]:
    options = ["-c", "/bin/true", "--count", str(COMMANDS), "-w", str(scratch / "each"), "-o", str(scratch / "old.tar")]
    return [*TARPROC, _script("tarproc"), *options, *stored.shards]


def _script(name: str) -> str:
    return os.path.join(sysconfig.get_path("scripts"), name)


def _tar(stored: StoredData, scratch: Path) -> list[str]:
    """Let GNU tar read as many files and write an archive."""
    return ["tar", "-cf", "-", "-C", str(_files(stored)), "."]


def _files(stored: StoredData) -> Path:
    folder = stored.folder / "files"
    if not folder.is_dir():
        unfinished = stored.folder / ".files"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        subprocess.run(["tar", "-xf", stored.shards[0], "-C", str(unfinished)], check=True)
        unfinished.rename(folder)
    return folder


def _penstock(*arguments: str) -> Command:
    return lambda stored, _: [*PENSTOCK, *arguments, *stored.shards]


def _piped(command: list[str]) -> Command:
    return lambda stored, _: ["bash", "-c", shlex.join(["cat", *stored.shards]) + " | " + shlex.join(command)]


def _gnu_split(stored: StoredData, scratch: Path) -> list[str]:
    return ["split", "-b", "200M", *stored.shards, str(scratch / "gnu")]


def _split(stored: StoredData, scratch: Path) -> list[str]:
    return [*PENSTOCK, "split", "-s", "2e8", "-o", f"{scratch}/ours/", *stored.shards]


def _help(name: str) -> Measure:
    """Measure how long a command takes to print its help; the best of five."""

    def measure(task: Task) -> Result:
        best = 9.9
        for _ in range(1 if task.check else 5):
            started_at = time.perf_counter()
            subprocess.run([*PENSTOCK, name, "--help"], stdout=subprocess.DEVNULL, check=True)
            best = min(best, time.perf_counter() - started_at)
        return {"samples": 1} if task.check else {"seconds": best, "samples": 1}

    return measure


def _proc(*options: str) -> Command:
    return _penstock("proc", "-c", "/bin/true", "--count", str(COMMANDS), *options)


def _command_count(stored: StoredData) -> int:
    return min(COMMANDS, stored.samples)


def _plain_commands(stored: StoredData, _: Path) -> list[str]:
    return ["bash", "-c", f"for i in $(seq {_command_count(stored)}); do bash -c /bin/true; done"]


CASES = {
    "tools-cat": Case(
        "1 GB of samples of 30 KB copied to a file",
        (
            Row("GNU cat", _measure_command(lambda stored, _: ["cat", *stored.shards])),
            Row("GNU tar, from files", _measure_command(_tar)),
            Row("tarproc's tarcats", _measure_command(_tarproc("tarcats")), peer="tarproc"),
            Row("GNU cat, from a pipe", _measure_command(_piped(["cat"]))),
            Row("penstock cat", _measure_command(_penstock("cat"))),
            Row("penstock cat, from a pipe", _measure_command(_piped([*PENSTOCK, "cat"]))),
            Row("penstock cat -f jpg", _measure_command(_penstock("cat", "-f", "jpg"))),
        ),
        baseline="GNU cat",
        max_rounds=5,
    ),
    "tools-split": Case(
        "1 GB of samples of 30 KB into shards of 200 MB (penstock also hashes, indexes and flushes to disk)",
        (
            Row("GNU split", _measure_command(_gnu_split)),
            Row("GNU tar, from files", _measure_command(_tar)),
            Row("tarproc's tarsplit", _measure_command(_tarproc_split), peer="tarproc"),
            Row("penstock split", _measure_command(_split)),
        ),
        baseline="GNU split",
        max_rounds=5,
    ),
    "tools-sort": Case(
        "5 GB of samples of 30 KB sorted by key",
        (
            Row("GNU cat", _measure_command(lambda stored, _: ["cat", *stored.shards], SORT_FACTOR)),
            Row("penstock sort", _measure_command(_penstock("sort"), SORT_FACTOR)),
            Row("penstock shuffle", _measure_command(_penstock("shuffle"), SORT_FACTOR)),
        ),
        baseline="GNU cat",
        max_rounds=2,
    ),
    "tools-table": Case(
        "The classes of 1 GB of samples of 30 KB as TSV, and the samples sorted by key",
        (
            Row("tarproc's tar2tsv", _measure_command(_tarproc("tar2tsv", "-f", "cls")), peer="tarproc"),
            Row("penstock tsv", _measure_command(_penstock("tsv", "-f", "cls"))),
            Row("tarproc's tarsort", _measure_command(_tarproc_sort), peer="tarproc"),
            Row("penstock sort", _measure_command(_penstock("sort"))),
        ),
        baseline="penstock tsv",
        max_rounds=3,
    ),
    "tools-proc": Case(
        f"/bin/true for each of {COMMANDS} samples",
        (
            Row("bash -c alone, in a loop", _measure_command(_plain_commands, count_of=_command_count)),
            Row("tarproc's tarproc", _measure_command(_tarproc_proc, count_of=_command_count), peer="tarproc"),
            Row("penstock proc", _measure_command(_proc(), count_of=_command_count)),
            Row("penstock proc -p 2", _measure_command(_proc("-p", "2"), count_of=_command_count)),
        ),
        baseline="bash -c alone, in a loop",
        max_rounds=5,
    ),
    "tools-start": Case(
        "From the shell to the end of --help",
        tuple(Row(f"penstock {name} --help", _help(name)) for name in ("cat", "proc", "pack", "info", "verify")),
        baseline=None,
        max_rounds=3,
    ),
}


if __name__ == "__main__":
    main(CASES)
