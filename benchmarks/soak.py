"""Run random plans in one process for long, with everything going wrong that can, and see whether anything grows.

Every iteration is compared with a plain loop over the same functions, and leaves neither a thread nor a process behind.
``python benchmarks/soak.py --minutes 10`` prints a table of what the process held, and fails if that grew.
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

Item = tuple[int, int]  # the sample it comes from, and a value
Dice = random.Random
Numbers = dict[str, float]

STUCK_S = 120  # an iteration that takes longer hangs
LIMIT_S = 0.3  # what a sample may take where a function hangs
GROWTH_MB = 20  # of memory between warm and end: an allocator's holes, not a leak


# What stages do


def shift(item: Item) -> Item:
    """Change the value."""
    return item[0], 3 * item[1] + 1


def linger(item: Item) -> Item:
    """Wait a little."""
    time.sleep(0.001)
    return item


def kept(item: Item) -> bool:
    """Two of three."""
    return item[1] % 3 != 0


def copies(item: Item) -> list[Item]:
    """None, one or two."""
    return [(item[0], item[1] + 7 * number) for number in range(item[1] % 3)]


def nested(item: Item) -> Item:
    """A run inside a worker of another run."""
    inner = ps.from_items([item] * 8).map(shift, workers=(1, 2))
    found: Item = inner.first() if item[0] % 7 == 0 else shift(item)
    return found


def broken(bad: frozenset[int], how: str, item: Item) -> Item:
    """Fail on some samples: by an exception, with the whole process, or by never coming back."""
    if item[0] in bad:
        if how == "exit":
            os._exit(3)
        if how == "hang":
            time.sleep(10 * STUCK_S)
        raise ValueError(f"sample {item[0]} is bad")
    return item


# Plans, each with what it must give


@dataclass(slots=True)
class Trial:
    """A plan, and what comes out of it when nothing is at fault but what is meant to be."""

    ds: Any
    expected: list[Item]
    note: list[str] = field(default_factory=list)

    def then(self, kind: str, fn: Callable[[Item], Any], **needs: Any) -> None:
        """Add a stage."""
        name = getattr(fn, "__name__", "broken")
        self.note.append(f"{kind}({name}{''.join(f', {key}={value}' for key, value in needs.items())})")
        self.ds = getattr(self.ds, kind)(fn, **needs)
        if kind == "map":
            self.expected = [fn(item) for item in self.expected]
        elif kind == "filter":
            self.expected = [item for item in self.expected if fn(item)]
        else:
            self.expected = [out for item in self.expected for out in fn(item)]


def needs(dice: Dice, on: str | None = None) -> dict[str, Any]:
    """Any pool: of one size, or one that grows and shrinks."""
    return {
        "workers": dice.choice([1, 2, (1, 4), None]),
        "on": on or dice.choice(["threads", "threads", "processes"]),
    }


def planned(dice: Dice, count: int) -> Trial:
    """The source of a plan."""
    items = [(number, dice.randrange(1000)) for number in range(count)]
    return Trial(ps.from_items(items), items)


def grown(dice: Dice, trial: Trial) -> Trial:
    """Add a few stages."""
    for _ in range(dice.randint(1, 3)):
        kind, fn = dice.choice([("map", shift), ("map", linger), ("filter", kept), ("flat_map", copies)])
        trial.then(kind, fn, **needs(dice))
    return trial


def faulty(dice: Dice, how: str, *, skip: bool) -> Trial:
    """A plan whose first stage fails on some samples."""
    alone = how != "raise"  # each costs workers
    count = dice.randint(40, 150 if alone else 600)
    trial = planned(dice, count)
    bad = frozenset(dice.sample(range(count), 1 if alone else 5))
    fn = partial(broken, bad, how)
    pool = needs(dice, "processes" if alone else None)
    limit = {"timeout_s": LIMIT_S} if how == "hang" else {}
    trial.note.append(f"map(broken, how={how}, bad={sorted(bad)}, {pool})")
    trial.ds = trial.ds.map(fn, **pool, **limit)
    if skip:
        trial.ds = trial.ds.on_error("skip")
        trial.expected = [item for item in trial.expected if item[0] not in bad]
    else:
        trial.expected = [item for item in trial.expected if item[0] < min(bad)]
    return grown(dice, trial)


# Iterations


def check(trial: Trial, got: list[Item]) -> None:
    """Compare, item by item.

    Raises:
        AssertionError: they differ.
    """
    if got != trial.expected:
        missing, extra = Counter(trial.expected) - Counter(got), Counter(got) - Counter(trial.expected)
        what = f"missing {list(missing)[:5]}, extra {list(extra)[:5]}"
        raise AssertionError(f"{len(got)} of {len(trial.expected)} items, {what}: {' -> '.join(trial.note)}")


def plain(dice: Dice) -> None:
    """Everything comes, in order."""
    trial = grown(dice, planned(dice, dice.randint(1, 3000)))
    check(trial, list(trial.ds))


def unordered(dice: Dice) -> None:
    """Everything comes, in any order."""
    trial = grown(dice, planned(dice, dice.randint(1, 3000)))
    trial.expected.sort()
    check(trial, sorted(trial.ds.on("local", ordered=False)))


def raising(dice: Dice) -> None:
    """What comes before the failure is delivered, then it is raised."""
    trial = faulty(dice, "raise", skip=False)
    got: list[Item] = []
    try:
        got.extend(trial.ds)
    except StageError:
        check(trial, got)
    else:
        raise AssertionError("a failing function was not noticed")


def skipping(dice: Dice, how: str) -> None:
    """Everything comes but the samples that fail."""
    trial = faulty(dice, how, skip=True)
    check(trial, list(trial.ds))


def killed(dice: Dice) -> None:
    """A worker is killed in the middle of its work; nobody notices."""
    trial = planned(dice, dice.randint(300, 800))
    trial.then("map", linger, workers=dice.choice([2, (1, 4)]), on="processes")
    run = iter(trial.ds)
    got = [next(run)]
    threading.Timer(dice.uniform(0, 0.2), kill_one, [dice.random()]).start()
    got.extend(run)
    check(trial, got)


def kill_one(which: float) -> None:
    """End one of the worker processes, if there are any, without a word."""
    if found := children():
        os.kill(found[int(which * len(found))], signal.SIGKILL)


def left(dice: Dice) -> None:
    """The consumer leaves early: by a close, or by forgetting the iterator."""
    trial = grown(dice, planned(dice, dice.randint(500, 3000)))
    run = iter(trial.ds)
    wanted = dice.randint(0, 50)
    got = [item for item, _ in zip(run, range(wanted), strict=False)]
    trial.expected = trial.expected[: len(got)] if len(got) == wanted else trial.expected
    check(trial, got)
    if dice.random() < 0.5:
        run.close()
    del run


def within(dice: Dice) -> None:
    """Workers that run plans of their own."""
    trial = planned(dice, dice.randint(10, 80))
    trial.then("map", nested, workers=dice.choice([1, 2, (1, 4)]))
    check(grown(dice, trial), list(trial.ds))


KINDS: dict[str, Callable[[Dice], None]] = {
    "plain": plain,
    "unordered": unordered,
    "raising": raising,
    "skipping": partial(skipping, how="raise"),
    "exiting": partial(skipping, how="exit"),
    "hanging": partial(skipping, how="hang"),
    "killed": killed,
    "left": left,
    "within": within,
}


# What the process holds


def children() -> list[int]:
    """The processes this one started and has not buried."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += [int(pid) for pid in (task / "children").read_text().split()]
        except OSError:  # a thread that has just ended
            continue
    return found


def held() -> Numbers:
    """What this process holds right now."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "memory MB": int(status["RssAnon"].split()[0]) / 1e3,
        "threads": threading.active_count(),
        "open files": len(os.listdir("/proc/self/fd")),
        "children": len(children()),
    }


@contextmanager
def leaving_nothing(told: str) -> Iterator[None]:
    """Fail if the block hangs, or leaves a worker behind.

    Raises:
        AssertionError: it does.
    """
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    yield
    gc.collect()
    until = time.monotonic() + 5  # a timer of ours, a thread that ends after its answer
    while (there := _workers()) and time.monotonic() < until:
        time.sleep(0.01)
    faulthandler.cancel_dump_traceback_later()
    if there:
        raise AssertionError(f"{told} left {there} behind")


def _workers() -> list[str]:
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return names + [f"process {pid}" for pid in children()]


@dataclass(slots=True)
class History:
    """What was held, and when."""

    first: Numbers
    warm: Numbers | None = None
    last: Numbers = field(default_factory=dict)
    most: Numbers = field(default_factory=dict)

    def add(self, now: Numbers) -> None:
        """Note it."""
        self.last = now
        self.most = {name: max(value, self.most.get(name, 0)) for name, value in now.items()}

    def table(self) -> str:
        """The history as Markdown."""
        lines = ["| held | start | after warm-up | end | max |", "|---|---:|---:|---:|---:|"]
        columns = (self.first, self.warm or self.last, self.last, self.most)
        for name in self.first:
            lines.append(f"| {name} | {' | '.join(f'{column[name]:.0f}' for column in columns)} |")
        return "\n".join(lines)

    def growth(self) -> list[str]:
        """What was more at the end than when everything had happened once."""
        warm = self.warm or self.last
        room = {"memory MB": GROWTH_MB}
        return [name for name, value in self.last.items() if value > warm[name] + room.get(name, 0)]


def soak(seconds: float, seed: int) -> tuple[History, Counter[str]]:
    """Run every kind of iteration in turn until the time is over, each at least once.

    Raises:
        AssertionError: an iteration gave something else than it should, or left something behind.
    """
    history = History(held())
    done: Counter[str] = Counter()
    begun = looked = time.monotonic()
    number = 0
    while time.monotonic() - begun < seconds or history.warm is None:
        name = list(KINDS)[number % len(KINDS)]
        told = f"iteration {number} ({name}) of --seed {seed}"
        try:
            with leaving_nothing(told):
                KINDS[name](Dice(f"{seed} {number}"))
        except Exception as exc:
            exc.add_note(told)
            raise
        done[name] += 1
        number += 1
        if time.monotonic() - looked > 2 or number % len(KINDS) == 0:
            looked = time.monotonic()
            history.add(held())
        if history.warm is None and number >= len(KINDS) and looked - begun >= seconds / 5:
            history.warm = held()
    history.add(held())
    return history, done


def main() -> None:
    """Soak, print the table, fail if something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("penstock").setLevel(logging.ERROR)  # skipped samples are what this is about
    history, done = soak(60 * args.minutes, args.seed)
    counts = ", ".join(f"{name} {many}" for name, many in done.items())
    sys.stdout.write(f"{history.table()}\n\n{done.total()} iterations: {counts}\n")
    if grown := history.growth():
        sys.exit(f"grew: {', '.join(grown)}")


if __name__ == "__main__":
    main()
