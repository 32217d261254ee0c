"""Run random plans with all kinds of faults in one process for a long time, and check that it does not grow.

The items of every iteration are compared with those of a plain loop over the same functions, and an iteration must
leave neither a thread nor a process behind. ``python benchmarks/soak.py --minutes 10`` prints a table of the memory,
threads, open files and child processes of this process, and fails if any of them grew.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.errors import StageError

Item = tuple[int, int]  # the number of its sample, and a value
Rng = random.Random
Numbers = dict[str, float]

STUCK_S = 120  # an iteration that takes longer is considered stuck
TIMEOUT_S = 0.3  # of a sample in a stage whose function hangs
MAX_GROWTH_MB = 20  # of memory after the warm-up: fragmentation of the allocator, not a leak


# The functions of stages


def shift(item: Item) -> Item:
    """Change the value."""
    return item[0], 3 * item[1] + 1


def wait_briefly(item: Item) -> Item:
    """Return the item after a millisecond."""
    time.sleep(0.001)
    return item


def keep_two_thirds(item: Item) -> bool:
    """Return whether the value is not divisible by three."""
    return item[1] % 3 != 0


def multiply(item: Item) -> list[Item]:
    """Return no item, one or two."""
    return [(item[0], item[1] + 7 * number) for number in range(item[1] % 3)]


def run_nested(item: Item) -> Item:
    """Change the value; for every seventh sample in a run inside the worker."""
    inner = ps.from_items([item] * 8).map(shift, workers=(1, 2))
    result: Item = inner.first() if item[0] % 7 == 0 else shift(item)
    return result


def fail(bad: frozenset[int], how: str, item: Item) -> Item:
    """Fail on the bad samples: raise an exception, end the process, or hang.

    Raises:
        ValueError: The sample is bad.
    """
    if item[0] in bad:
        if how == "exit":
            os._exit(3)
        if how == "hang":
            time.sleep(10 * STUCK_S)
        raise ValueError(f"sample {item[0]} is bad")
    return item


# Plans with the items that they must deliver


@dataclass(slots=True)
class Trial:
    """A dataset, the items that it must deliver, and its stages in words."""

    ds: Any
    expected: list[Item]
    stages: list[str] = field(default_factory=list)

    def add_stage(self, method: str, fn: Callable[[Item], Any], **options: Any) -> None:
        """Call a method of the dataset with a function, and apply the function to the expected items."""
        name = getattr(fn, "__name__", "fail")
        self.stages.append(f"{method}({name}{''.join(f', {key}={value}' for key, value in options.items())})")
        self.ds = getattr(self.ds, method)(fn, **options)
        if method == "map":
            self.expected = [fn(item) for item in self.expected]
        elif method == "filter":
            self.expected = [item for item in self.expected if fn(item)]
        else:
            self.expected = [out for item in self.expected for out in fn(item)]


def random_pool(rng: Rng, on: str | None = None) -> dict[str, Any]:
    """Return the options of a random pool: of a fixed size, or one that grows and shrinks."""
    return {
        "workers": rng.choice([1, 2, (1, 4), None]),
        "on": on or rng.choice(["threads", "threads", "processes"]),
    }


def new_trial(rng: Rng, count: int) -> Trial:
    """Return a trial without stages."""
    items = [(number, rng.randrange(1000)) for number in range(count)]
    return Trial(ps.from_items(items), items)


def add_stages(rng: Rng, trial: Trial) -> Trial:
    """Add one to three random stages."""
    functions = [("map", shift), ("map", wait_briefly), ("filter", keep_two_thirds), ("flat_map", multiply)]
    for _ in range(rng.randint(1, 3)):
        method, fn = rng.choice(functions)
        trial.add_stage(method, fn, **random_pool(rng))
    return trial


def faulty_trial(rng: Rng, how: str, *, skip: bool) -> Trial:
    """Return a trial whose first stage fails on some samples."""
    costs_workers = how != "raise"
    count = rng.randint(40, 150 if costs_workers else 600)
    trial = new_trial(rng, count)
    bad = frozenset(rng.sample(range(count), 1 if costs_workers else 5))
    fn = partial(fail, bad, how)
    pool = random_pool(rng, "processes" if costs_workers else None)
    timeout = {"timeout_s": TIMEOUT_S} if how == "hang" else {}
    trial.stages.append(f"map(fail, how={how}, bad={sorted(bad)}, {pool})")
    trial.ds = trial.ds.map(fn, **pool, **timeout)
    if skip:
        trial.ds = trial.ds.on_error("skip")
        trial.expected = [item for item in trial.expected if item[0] not in bad]
    else:
        trial.expected = [item for item in trial.expected if item[0] < min(bad)]
    return add_stages(rng, trial)


# Iterations


def check(trial: Trial, delivered: list[Item]) -> None:
    """Compare the delivered items with the expected ones.

    Raises:
        AssertionError: They differ.
    """
    if delivered != trial.expected:
        missing, extra = Counter(trial.expected) - Counter(delivered), Counter(delivered) - Counter(trial.expected)
        difference = f"missing {list(missing)[:5]}, extra {list(extra)[:5]}"
        stages = " -> ".join(trial.stages)
        raise AssertionError(f"{len(delivered)} of {len(trial.expected)} items, {difference}: {stages}")


def run_plain(rng: Rng) -> None:
    """Check that all items are delivered, in order."""
    trial = add_stages(rng, new_trial(rng, rng.randint(1, 3000)))
    check(trial, list(trial.ds))


def run_unordered(rng: Rng) -> None:
    """Check that all items are delivered, in any order."""
    trial = add_stages(rng, new_trial(rng, rng.randint(1, 3000)))
    trial.expected.sort()
    check(trial, sorted(trial.ds.on("local", ordered=False)))


def run_raising(rng: Rng) -> None:
    """Check that the items before a failure are delivered, and that the failure is then raised."""
    trial = faulty_trial(rng, "raise", skip=False)
    delivered: list[Item] = []
    try:
        delivered.extend(trial.ds)
    except StageError:
        check(trial, delivered)
    else:
        raise AssertionError("the failure of a function was not raised")


def run_skipping(rng: Rng, how: str) -> None:
    """Check that all items are delivered except those of failing samples."""
    trial = faulty_trial(rng, how, skip=True)
    check(trial, list(trial.ds))


def run_with_kill(rng: Rng) -> None:
    """Check that all items are delivered although a worker is killed."""
    trial = new_trial(rng, rng.randint(300, 800))
    trial.add_stage("map", wait_briefly, workers=rng.choice([2, (1, 4)]), on="processes")
    run = iter(trial.ds)
    delivered = [next(run)]
    threading.Timer(rng.uniform(0, 0.2), kill_one, [rng.random()]).start()
    delivered.extend(run)
    check(trial, delivered)


def kill_one(position: float) -> None:
    """Send SIGKILL to one of the child processes, if there are any."""
    if pids := children():
        os.kill(pids[int(position * len(pids))], signal.SIGKILL)


def run_partly(rng: Rng) -> None:
    """Stop early, by closing the iterator or by dropping the reference to it."""
    trial = add_stages(rng, new_trial(rng, rng.randint(500, 3000)))
    run = iter(trial.ds)
    count = rng.randint(0, 50)
    delivered = [item for item, _ in zip(run, range(count), strict=False)]
    trial.expected = trial.expected[: len(delivered)] if len(delivered) == count else trial.expected
    check(trial, delivered)
    if rng.random() < 0.5:
        run.close()
    del run


def run_with_nested_runs(rng: Rng) -> None:
    """Check that workers can run plans."""
    trial = new_trial(rng, rng.randint(10, 80))
    trial.add_stage("map", run_nested, workers=rng.choice([1, 2, (1, 4)]))
    check(add_stages(rng, trial), list(trial.ds))


KINDS: dict[str, Callable[[Rng], None]] = {
    "plain": run_plain,
    "unordered": run_unordered,
    "raising": run_raising,
    "skipping": partial(run_skipping, how="raise"),
    "exiting": partial(run_skipping, how="exit"),
    "hanging": partial(run_skipping, how="hang"),
    "killed": run_with_kill,
    "left": run_partly,
    "within": run_with_nested_runs,
}


# The resources of the process


def children() -> list[int]:
    """Return the child processes of this process that it has not waited for."""
    pids = []
    for task in Path("/proc/self/task").iterdir():
        try:
            pids += [int(pid) for pid in (task / "children").read_text().split()]
        except OSError:  # the thread has just ended
            continue
    return pids


def resources() -> Numbers:
    """Return the memory, threads, open files and children of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "memory MB": int(status["RssAnon"].split()[0]) / 1e3,
        "threads": threading.active_count(),
        "open files": len(os.listdir("/proc/self/fd")),
        "children": len(children()),
    }


@contextmanager
def leaving_no_workers(iteration: str) -> Iterator[None]:
    """Fail if the context leaves a worker behind; end the process with all tracebacks if it hangs.

    Raises:
        AssertionError: A thread or a process is left.
    """
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    yield
    gc.collect()
    deadline = time.monotonic() + 5  # for the timer of a kill, and for threads that end after they delivered a result
    while (workers := _workers()) and time.monotonic() < deadline:
        time.sleep(0.01)
    faulthandler.cancel_dump_traceback_later()
    if workers:
        raise AssertionError(f"{iteration} left {workers} behind")


def _workers() -> list[str]:
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return names + [f"process {pid}" for pid in children()]


@dataclass(slots=True)
class History:
    """The resources of the process at several times, and their maxima."""

    first: Numbers
    warm: Numbers | None = None
    last: Numbers = field(default_factory=dict)
    maximum: Numbers = field(default_factory=dict)

    def add(self, current: Numbers) -> None:
        """Record the current resources."""
        self.last = current
        self.maximum = {name: max(value, self.maximum.get(name, 0)) for name, value in current.items()}

    def table(self) -> str:
        """Return the history as Markdown."""
        lines = ["| resource | start | after warm-up | end | max |", "|---|---:|---:|---:|---:|"]
        columns = (self.first, self.warm or self.last, self.last, self.maximum)
        for name in self.first:
            lines.append(f"| {name} | {' | '.join(f'{column[name]:.0f}' for column in columns)} |")
        return "\n".join(lines)

    def growth(self) -> list[str]:
        """Return the names of resources of which the process has more at the end than after the warm-up."""
        warm = self.warm or self.last
        allowed = {"memory MB": MAX_GROWTH_MB}
        return [name for name, value in self.last.items() if value > warm[name] + allowed.get(name, 0)]


def soak(seconds: float, seed: int) -> tuple[History, Counter[str]]:
    """Run all kinds of iterations one after the other until the time is over, each at least once.

    Raises:
        AssertionError: An iteration delivered wrong items, or left a thread or a process behind.
    """
    history = History(resources())
    counts: Counter[str] = Counter()
    started_at = recorded_at = time.monotonic()
    number = 0
    while time.monotonic() - started_at < seconds or history.warm is None:
        name = list(KINDS)[number % len(KINDS)]
        iteration = f"iteration {number} ({name}) of --seed {seed}"
        try:
            with leaving_no_workers(iteration):
                KINDS[name](Rng(f"{seed} {number}"))
        except Exception as exc:
            exc.add_note(iteration)
            raise
        counts[name] += 1
        number += 1
        if time.monotonic() - recorded_at > 2 or number % len(KINDS) == 0:
            recorded_at = time.monotonic()
            history.add(resources())
        if history.warm is None and number >= len(KINDS) and recorded_at - started_at >= seconds / 5:
            history.warm = resources()
    history.add(resources())
    return history, counts


def main() -> None:
    """Run the soak test and print the table; fail if the process grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("penstock").setLevel(logging.ERROR)  # no warnings: samples are skipped on purpose
    history, counts = soak(60 * args.minutes, args.seed)
    kinds = ", ".join(f"{name} {count}" for name, count in counts.items())
    sys.stdout.write(f"{history.table()}\n\n{counts.total()} iterations: {kinds}\n")
    if grown := history.growth():
        sys.exit(f"the process grew: {', '.join(grown)}")


if __name__ == "__main__":
    main()
