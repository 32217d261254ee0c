"""What is measured of the tar tools: copying, splitting, sorting, a command for each sample, and how soon they start.

``python tool_cases.py CASE ROW`` measures one row once, as ``cases.py`` does for the others. All rows are whole
commands, their start included, on 1 GB of samples of 30 KB and two members; PENSTOCK_TOOL_SAMPLES says otherwise.
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
from cases import Case, Result, Row, Task, main
from data import FULL, Fields, Made, Sizes

PENSTOCK = [sys.executable, "-m", "penstock"]
SORTED = 5  # times as many samples
COMMANDS = 400  # samples that a command is run for

# The old tools are for a Python that took flags anywhere in a pattern.
TOLERANT = """
import re, runpy, sys
strict = re._compile
def tolerant(pattern, flags):
    loose = isinstance(pattern, str) and "(?i)" in pattern
    return strict(pattern.replace("(?i)", ""), flags | re.IGNORECASE) if loose else strict(pattern, flags)
re._compile = tolerant
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OLD = [sys.executable, "-W", "ignore", "-c", TOLERANT]  # in the environment of the peer, which measures its own rows

Words = Callable[[Made, Path], list[str]]


def shards(sizes: Sizes, times: int = 1) -> Made:
    """Samples of 30 KB of noise and a class, in one shard."""
    count = times * int(os.environ.get("PENSTOCK_TOOL_SAMPLES", "32000")) // (1 if sizes == FULL else 20)
    return data.made(f"tools-{count}", count, lambda at: data.write_foreign(at, _samples(count), 1))


def _samples(count: int) -> Iterator[tuple[str, Fields]]:
    dice = random.Random(9)
    noise = dice.randbytes(1 << 20)
    order = list(range(count))
    dice.shuffle(order)
    for number in order:
        start = dice.randrange(900_000)
        yield (
            f"train/{number:08d}",
            {"cls": b"%d" % (number % 1000), "jpg": noise[start : start + 28_000 + number % 4000]},
        )


def ran(
    words: Words, times: int = 1, count: Callable[[Made], int] = lambda made: made.samples
) -> Callable[[Task], Result]:
    """Measure a command whose output goes to a file."""

    def measure(task: Task) -> Result:
        made = shards(task.sizes, times)
        task.scratch.mkdir(parents=True, exist_ok=True)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begun = time.perf_counter()
        with open(task.scratch / "out.tar", "wb") as out:
            subprocess.run(words(made, task.scratch), stdout=out, stderr=subprocess.DEVNULL, check=True)
        seconds = time.perf_counter() - begun
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        many = count(made)
        if task.check:
            return {"samples": many}
        return {
            "seconds": seconds,
            "samples": many,
            "nbytes": made.nbytes,
            "CPU s": cpu,
            "own MB": after.ru_maxrss / 1e3,
        }

    return measure


def _old(name: str, *more: str) -> Words:
    script = os.path.join(sysconfig.get_path("scripts"), name)
    return lambda made, _: [*OLD, script, *more, *made.shards]


def _old_split(made: Made, scratch: Path) -> list[str]:
    script = os.path.join(sysconfig.get_path("scripts"), "tarsplit")
    return [*OLD, script, "-s", "2e8", "-o", str(scratch / "old"), *made.shards]


def _old_sort(made: Made, scratch: Path) -> list[str]:
    script = os.path.join(sysconfig.get_path("scripts"), "tarsort")
    return [*OLD, script, "-t", str(scratch / "old.db"), *made.shards]


def _old_proc(made: Made, scratch: Path) -> list[str]:
    script = os.path.join(sysconfig.get_path("scripts"), "tarproc")
    words = ["-c", "/bin/true", "--count", str(COMMANDS), "-w", str(scratch / "each"), "-o", str(scratch / "old.tar")]
    return [*OLD, script, *words, *made.shards]


def _tar(made: Made, scratch: Path) -> list[str]:
    """What GNU tar does with as many files: reads them and writes an archive."""
    return ["tar", "-cf", "-", "-C", str(_files(made)), "."]


def _files(made: Made) -> Path:
    folder = made.folder / "files"
    if not folder.is_dir():
        unfinished = made.folder / ".files"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        subprocess.run(["tar", "-xf", made.shards[0], "-C", str(unfinished)], check=True)
        unfinished.rename(folder)
    return folder


def _penstock(*words: str) -> Words:
    return lambda made, _: [*PENSTOCK, *words, *made.shards]


def _piped(words: list[str]) -> Words:
    return lambda made, _: ["bash", "-c", shlex.join(["cat", *made.shards]) + " | " + shlex.join(words)]


def _split(made: Made, scratch: Path) -> list[str]:
    return [*PENSTOCK, "split", "-s", "2e8", "-o", f"{scratch}/ours/", *made.shards]


def _started(name: str) -> Callable[[Task], Result]:
    """Measure how long a command takes to say how it is called; the best of five."""

    def measure(task: Task) -> Result:
        best = 9.9
        for _ in range(1 if task.check else 5):
            begun = time.perf_counter()
            subprocess.run([*PENSTOCK, name, "--help"], stdout=subprocess.DEVNULL, check=True)
            best = min(best, time.perf_counter() - begun)
        return {"samples": 1} if task.check else {"seconds": best, "samples": 1}

    return measure


def _proc(*words: str) -> Words:
    return _penstock("proc", "-c", "/bin/true", "--count", str(COMMANDS), *words)


def _some(made: Made) -> int:
    return min(COMMANDS, made.samples)


def _plain_commands(made: Made, _: Path) -> list[str]:
    return ["bash", "-c", f"for i in $(seq {_some(made)}); do bash -c /bin/true; done"]


CASES = {
    "tools-cat": Case(
        "1 GB of samples of 30 KB copied to a file",
        (
            Row("GNU cat", ran(lambda made, _: ["cat", *made.shards])),
            Row("GNU tar, from files", ran(_tar)),
            Row("tarproc's tarcats", ran(_old("tarcats")), peer="tarproc"),
            Row("GNU cat, from a pipe", ran(_piped(["cat"]))),
            Row("penstock cat", ran(_penstock("cat"))),
            Row("penstock cat, from a pipe", ran(_piped([*PENSTOCK, "cat"]))),
            Row("penstock cat -f jpg", ran(_penstock("cat", "-f", "jpg"))),
        ),
        baseline="GNU cat",
        most_rounds=5,
    ),
    "tools-split": Case(
        "1 GB of samples of 30 KB into shards of 200 MB (penstock also hashes, indexes and flushes to disk)",
        (
            Row("GNU split", ran(lambda made, at: ["split", "-b", "200M", *made.shards, str(at / "gnu")])),
            Row("GNU tar, from files", ran(_tar)),
            Row("tarproc's tarsplit", ran(_old_split), peer="tarproc"),
            Row("penstock split", ran(_split)),
        ),
        baseline="GNU split",
        most_rounds=5,
    ),
    "tools-sort": Case(
        "5 GB of samples of 30 KB sorted by key",
        (
            Row("GNU cat", ran(lambda made, _: ["cat", *made.shards], SORTED)),
            Row("penstock sort", ran(_penstock("sort"), SORTED)),
            Row("penstock shuffle", ran(_penstock("shuffle"), SORTED)),
        ),
        baseline="GNU cat",
        most_rounds=2,
    ),
    "tools-table": Case(
        "the classes of 1 GB of samples of 30 KB as TSV, and the samples sorted by key",
        (
            Row("tarproc's tar2tsv", ran(_old("tar2tsv", "-f", "cls")), peer="tarproc"),
            Row("penstock tsv", ran(_penstock("tsv", "-f", "cls"))),
            Row("tarproc's tarsort", ran(_old_sort), peer="tarproc"),
            Row("penstock sort", ran(_penstock("sort"))),
        ),
        baseline="penstock tsv",
        most_rounds=3,
    ),
    "tools-proc": Case(
        f"/bin/true for each of {COMMANDS} samples",
        (
            Row("bash -c alone, in a loop", ran(_plain_commands, count=_some)),
            Row("tarproc's tarproc", ran(_old_proc, count=_some), peer="tarproc"),
            Row("penstock proc", ran(_proc(), count=_some)),
            Row("penstock proc -p 2", ran(_proc("-p", "2"), count=_some)),
        ),
        baseline="bash -c alone, in a loop",
        most_rounds=5,
    ),
    "tools-start": Case(
        "From the shell to the end of --help",
        tuple(Row(f"penstock {name} --help", _started(name)) for name in ("cat", "proc", "pack", "info", "verify")),
        baseline=None,
        most_rounds=3,
    ),
}


if __name__ == "__main__":
    main(CASES)
