"""Measure Penstock beside its peers in one run, and print what came out as Markdown.

Every round runs every row once, each in a fresh process, so that what disturbs the machine disturbs all of them.
Figures are medians over the rounds; a ratio is taken in each round first, and its median shown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import cases
import data
import engine_cases
import remote_cases
import table_cases
import torch_cases
from cases import Case, Result, Row

_MODULES = (cases, engine_cases, remote_cases, table_cases, torch_cases)
SCRIPTS = {name: module for module in _MODULES for name in module.CASES}
CASES: dict[str, Case] = {name: module.CASES[name] for name, module in SCRIPTS.items()}

PEERS = sorted(path.stem for path in (data.HERE / "peers").glob("*.txt"))
ENVS = data.HERE / ".envs"
TIMEOUT_S = 300
SHOWN = {
    "CPU s",
    "bytes a sample",
    "files opened",
    "shards touched",
    "numpy imported",
    "own MB",
    "private MB",
    "us over a loop",
    "with start, samples/s",
    "threads, at the end",
    "processes, at the end",
    "slowest pool busy",
}

Rounds = list[Result | str]  # what a row gave in each round; a text is what went wrong


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that is promised: the seconds of ``over`` to those of ``row``, or a value of ``row``."""

    text: str
    row: str
    limit: float
    over: str | None = None
    value: str = "seconds"
    at_least: bool = False

    def met(self, figure: float) -> bool:
        """Whether the promise is kept."""
        return figure >= self.limit if self.at_least else figure <= self.limit


def _raw_targets(at_least: float, first: float) -> tuple[Target, ...]:
    ours = "penstock"
    return (
        Target(f"{ours}, to webdataset", ours, at_least, over="webdataset", at_least=True),
        Target("first contact, to webdataset", f"{ours}, first contact", first, over="webdataset", at_least=True),
        Target(f"{ours}, to SPDL", ours, 1.0, over="SPDL iter_tarfile", at_least=True),
        Target("shuffled epoch, times unshuffled", ours, 1.2, over=f"{ours}, shuffled"),
    )


# Of the pipeline. Which of the two is the best depends on what else the two cores have to do.
BEST = ("hand-set: 16, 1, 1", "hand-set: 16, 2, 2")
SELF = "sizes its pools itself"

PROMISES: dict[str, tuple[Target, ...]] = {
    "raw-photos": _raw_targets(12, 12),
    "raw-tiny": _raw_targets(40, 20),
    "open": (
        Target("seconds to the first sample, pattern", "penstock, pattern", 1.0),
        Target("seconds to the first sample, folder", "penstock, folder", 1.0),
        Target("shards touched, pattern", "penstock, pattern", 1, value="shards touched"),
        Target("shards touched, folder", "penstock, folder", 1, value="shards touched"),
    ),
    "start": (
        Target("seconds to import penstock", "import penstock", 0.150),
        Target("numpy imported by it", "import penstock", 0, value="numpy imported"),
    ),
    "memory": tuple(
        Target(f"{value} for 10x the {what}, times", f"penstock, {what}", 1.1, f"penstock, 10x {what}", value)
        for what in ("photos", "tiny")
        for value in ("own MB", "peak MB")
    ),
    "hop": tuple(
        Target(f"us a sample over a plain loop, {what}", f"{what}, threads", 2.0, value="us over a loop")
        for what in ("ints", "photos in memory")
    ),
    "process": (
        Target("made in the worker, to DataLoader", "penstock, made in the worker", 1.5, "DataLoader", at_least=True),
        Target(
            "images sent to the worker, to DataLoader",
            "penstock, images sent to the worker",
            1.0,
            "DataLoader",
            at_least=True,
        ),
    ),
    "process-memory": tuple(
        Target(f"{value} of DataLoader, times", "DataLoader", 1.0, "penstock, made in the worker", value)
        for value in ("peak MB", "private MB")
    ),
    "pipeline": (
        Target("share of its time that the slowest pool works", BEST[0], 0.9, value="slowest pool busy", at_least=True),
        *(Target(f"sizes its pools itself, to {best}", SELF, 0.8, best, at_least=True) for best in BEST),
    ),
    "first": (
        Target("seconds to the first sample, threads", "penstock, threads", 0.020),
        Target("seconds to the first sample, processes", "penstock, processes", 1.0),
    ),
    "remote": (
        Target("penstock, to bare ranges", "penstock", 0.85, remote_cases.LIMIT, at_least=True),
        Target("penstock, shuffled, to bare ranges", "penstock, shuffled", 0.85, remote_cases.LIMIT, at_least=True),
        *(Target(f"penstock, to {row}", "penstock", 3, row, at_least=True) for row in remote_cases.WEBDATASET),
    ),
    **{
        case: (Target("a DataLoader over penstock, to webdataset", "penstock", 2.0, "webdataset", at_least=True),)
        for case in ("torch-photos", "torch-thumbnails")
    },
    "loader": (
        Target("us a sample over the dataset itself", "a sample", 1.0, value="us over a loop"),
        Target("us a sample of a ledger, batches of 64", "a sample, with a ledger", 1.0, value="us over a loop"),
        Target("seconds a state takes", "a state", 0.001),
    ),
    "table-batches": (Target("penstock, to read_table", "penstock", 1.0, table_cases.LIMIT, at_least=True),),
    "cached": (
        Target("through a cache, times local files", "penstock, local files", 1.1, "penstock, through a cache"),
    ),
    "pack": tuple(
        Target(f"{ours}, to {peer}", ours, limit, peer, at_least=True)
        for ours in ("penstock", "penstock, shuffled")
        for peer, limit in (("webdataset", 2), ("GNU tar", 0.7))
    ),
}


def main() -> None:
    """Run the chosen cases."""
    args = _arguments()
    sizes = data.QUICK if args.quick else data.FULL
    _note("making the data (once)")
    for make in (data.photos, data.photos10, data.tiny, data.tiny10, data.jpegs, data.thumbnails, data.many):
        make(sizes)
    pythons = {peer: _environment(peer) for peer in args.peers}
    machine = _machine(pythons)
    results = _measure(args, pythons)
    report = _report(args, machine, results)
    sys.stdout.write(report)
    about = {"machine": machine, "rounds": args.rounds, "quick": args.quick, "cases": results}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(about, indent=1) + "\n")
    _note(f"every number of every round: {args.json}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"all by default: {', '.join(CASES)}")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, help="with environments of their own")
    parser.add_argument("--rounds", type=int, help="10 by default")
    parser.add_argument("--quick", action="store_true", help="a tenth of the data, 2 rounds: does it work?")
    parser.add_argument("--json", type=Path, default=data.HOME / "latest.json", help="where the numbers go")
    args = parser.parse_args()
    if unknown := [case for case in args.cases if case not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    args.cases = args.cases or list(CASES)
    args.rounds = args.rounds or (2 if args.quick else 10)
    return args


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


# Environments


def _environment(peer: str) -> str | Path:
    """The interpreter of a peer's own environment, made if need be; a text says why there is none."""
    wanted = (data.HERE / "peers" / f"{peer}.txt").read_text()
    home = data.private(ENVS) / peer
    stamp, mark = home / ".installed", hashlib.sha256(f"{sys.version}\n{wanted}".encode()).hexdigest()
    python = home / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == mark:
        return python
    _note(f"installing {peer} (once)")
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*install, "-r", data.HERE / "peers" / f"{peer}.txt"], capture_output=True, text=True)
    if done.returncode:
        return f"does not install: {_last_line(done.stderr)}"
    stamp.write_text(mark)
    return python


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1][:200]


def _machine(pythons: dict[str, str | Path]) -> dict[str, str]:
    cpus = Path("/proc/cpuinfo").read_text().split("model name\t: ")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {
        "cpu": f"{cpus[1].splitlines()[0] if len(cpus) > 1 else platform.machine()}, {os.cpu_count()} cores",
        "memory": f"{memory / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "load": f"{os.getloadavg()[0]:.1f} at the start",
        "python": platform.python_version(),
    }
    for package in ("penstock", "numpy", "pillow", "torch", "webdataset"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "as on the path"
    for peer, python in pythons.items():
        found[peer] = _frozen(python) if isinstance(python, Path) else python
    return found


def _frozen(python: Path) -> str:
    done = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True)
    return ", ".join(done.stdout.split())


# Measuring


def _measure(args: argparse.Namespace, pythons: dict[str, str | Path]) -> dict[str, dict[str, Rounds]]:
    shutil.rmtree(data.HOME / "cache", ignore_errors=True)
    results: dict[str, dict[str, Rounds]] = {name: {} for name in args.cases}
    plan = [(name, row) for name in args.cases for row in CASES[name].rows]
    for name in args.cases:
        for title, problem in _rehearse(name, pythons, args.quick).items():
            results[name][title] = [problem] if problem else []
    for number in range(args.rounds):
        begun = time.monotonic()
        for name, row in plan if number % 2 == 0 else reversed(plan):  # no row always follows the same other
            rounds = results[name][row.name]
            if number < CASES[name].most_rounds and not any(isinstance(told, str) for told in rounds):
                rounds.append(_once(name, row, pythons, args.quick))
        _note(f"round {number + 1} of {args.rounds}: {time.monotonic() - begun:.0f} s")
    return results


def _rehearse(name: str, pythons: dict[str, str | Path], quick: bool) -> dict[str, str | None]:
    """Run every row once, unmeasured: files are cached, indexes made, and the same samples come from all."""
    found = {row.name: _once(name, row, pythons, quick, "--check") for row in CASES[name].rows}
    digests = {row: told.get("digest") for row, told in found.items() if isinstance(told, dict)}
    expected = next((digest for digest in digests.values() if digest is not None), None)
    problems: dict[str, str | None] = {row: told if isinstance(told, str) else None for row, told in found.items()}
    for row, digest in digests.items():
        if digest not in (None, expected):
            problems[row] = "gives other samples than the first row that was compared"
    return problems


def _once(name: str, row: Row, pythons: dict[str, str | Path], quick: bool, *more: str) -> Result | str:
    """Measure a row once in a fresh process; a text says what went wrong."""
    python: str | Path = sys.executable
    env = os.environ | {"PENSTOCK_CACHE": str(data.HOME / "cache" / _plain(f"{name}-{row.name}"))}
    if row.peer is not None:
        if row.peer not in pythons:
            return "not asked for"
        python = pythons[row.peer]
        if isinstance(python, str):
            return python
        env.pop("PYTHONPATH", None)
    call = [python, str(SCRIPTS[name].__file__), name, row.name, *more, *["--quick"] * quick]
    os.sync()  # what one row has written is not the next one's to wait for
    try:
        done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"not done after {TIMEOUT_S} s"
    if done.returncode:
        return f"failed: {_last_line(done.stderr)}"
    result: Result = json.loads(_last_line(done.stdout))
    return result


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


# Reporting


def _report(args: argparse.Namespace, machine: dict[str, str], results: dict[str, dict[str, Rounds]]) -> str:
    lines = ["# Benchmarks", "", *(f"- {name}: {what}" for name, what in machine.items()), ""]
    how = "median of the rounds, slowest to fastest round in brackets; ratios are medians of each round's ratio"
    lines += [f"{args.rounds} rounds{', a tenth of the data' if args.quick else ''}. {how}.", ""]
    for name, rows in results.items():
        case = CASES[name]
        lines += [f"## {name}: {case.title}", "", *_table(case, rows), ""]
        if name in PROMISES and not args.quick:  # a tenth of the data shows little but the cost of starting
            lines += [*_targets(PROMISES[name], rows), ""]
    return "\n".join(lines)


def _table(case: Case, rows: dict[str, Rounds]) -> list[str]:
    """A table of the rows that ran; below it, why others did not."""
    good = {row: _numbers(rounds) for row, rounds in rows.items() if _numbers(rounds)}
    columns = [(head, tell) for head, tell in _columns(case, good) if any(tell(row) for row in good)]
    lines = _markdown(["row", *(head for head, _ in columns)], [[row, *(t(row) for _, t in columns)] for row in good])
    problems = [(row, told) for row, rounds in rows.items() for told in rounds if isinstance(told, str)]
    return lines + [f"- {row}: {told}" for row, told in problems]


def _columns(case: Case, rows: dict[str, list[Result]]) -> Iterable[tuple[str, Callable[[str], str]]]:
    main_value = "peak MB" if case.peak else "seconds"
    yield main_value, lambda row: _spread(_all(rows[row], main_value))
    yield "samples/s", lambda row: _rate(rows[row], "samples", 1)
    yield "MB/s", lambda row: _rate(rows[row], "nbytes", 1e6)
    if case.baseline in rows:
        yield f"x {case.baseline}", lambda row: _times(rows[row], rows[str(case.baseline)])
    for value in sorted(SHOWN):
        yield value, lambda row, value=value: _middle(_all(rows[row], value))  # type: ignore[misc]


def _numbers(rounds: Rounds) -> list[Result]:
    return [told for told in rounds if isinstance(told, dict)]


def _all(rounds: list[Result], value: str) -> list[float]:
    return [told[value] for told in rounds if value in told]


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _middle(numbers: list[float]) -> str:
    return _short(median(numbers)) if numbers else ""


def _spread(numbers: list[float]) -> str:
    return f"{_middle(numbers)} [{_short(max(numbers))} - {_short(min(numbers))}]" if numbers else ""


def _rate(rounds: list[Result], value: str, unit: float) -> str:
    return _middle([told[value] / told["seconds"] / unit for told in rounds if value in told])


def _ratios(rounds: list[Result], over: list[Result], value: str = "seconds") -> list[float]:
    return [b[value] / a[value] for a, b in zip(rounds, over, strict=False) if value in a and value in b]


def _times(rounds: list[Result], baseline: list[Result]) -> str:
    return _spread(_ratios(rounds, baseline))


def _targets(targets: Iterable[Target], rows: dict[str, Rounds]) -> list[str]:
    return _markdown(["promised", "at", "measured", "kept"], [_verdict(target, rows) for target in targets])


def _verdict(target: Target, rows: dict[str, Rounds]) -> list[str]:
    own = _numbers(rows.get(target.row, []))
    figures = _all(own, target.value)
    if target.over is not None:
        figures = _ratios(own, _numbers(rows.get(target.over, [])), target.value)
    bound = f"{'at least' if target.at_least else 'at most'} {target.limit:g}"
    if not figures:
        return [target.text, bound, "not measured", ""]
    often = f"{sum(map(target.met, figures))} of {len(figures)} rounds"
    return [target.text, bound, _spread(figures), f"{'yes' if target.met(median(figures)) else '**no**'}, {often}"]


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    lines: list[list[Any]] = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    main()
