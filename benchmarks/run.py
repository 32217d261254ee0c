"""Measure Penstock and its peers in one run, and print the results as Markdown.

Every round runs every row of a case once, each in a fresh process, so that noise on the machine affects all rows
alike. Figures are medians over the rounds with the slowest and the fastest round; a ratio is computed in each round,
and its median is shown. Results are saved after each round: --resume continues a run that was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cache_cases
import cases
import chart
import data
import engine_cases
import image_cases
import ray_cases
import remote_cases
import report
import table_cases
import tool_cases
import torch_cases
import writing_cases
from cases import Case, Result, Row
from environments import PEERS, environment, installed_packages, last_line
from report import Rounds, Saved

_MODULES = (
    cache_cases,
    cases,
    engine_cases,
    image_cases,
    ray_cases,
    remote_cases,
    table_cases,
    tool_cases,
    torch_cases,
    writing_cases,
)
SCRIPTS = {name: module for module in _MODULES for name in module.CASES}
CASES: dict[str, Case] = {name: module.CASES[name] for name, module in SCRIPTS.items()}

RESULTS = data.HOME / "results"
ROW_S = 300
CHECK_S = 1200  # the first call may write the data in a library's own format
OWN_PACKAGES = (
    "penstock",
    "numpy",
    "pillow",
    "torch",
    "webdataset",
    "opencv-python-headless",
    "simplejpeg",
    "pyarrow",
    "ray",
)

Interpreters = dict[str, str | Path]  # of each peer, or a text that says why it has none


def main() -> None:
    """Measure and report the chosen cases."""
    args = _arguments()
    for name in args.cases:
        saved = _load(args.results, name, args.quick)
        if not args.report and not (args.resume and saved is not None and saved["rounds"] >= _rounds(args, name)):
            saved = _measure(args, name, saved if args.resume else None)
        if saved is not None:
            _report(args, name, saved)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"by default all of {', '.join(CASES)}")
    parser.add_argument(
        "--peers", nargs="*", help=f"peers with their own environment, by default all: {', '.join(PEERS)}"
    )
    parser.add_argument("--rounds", type=int, help="by default 10, or the maximum of the case")
    parser.add_argument("--quick", action="store_true", help="a tenth of the data, 2 rounds: does everything work?")
    parser.add_argument("--resume", action="store_true", help="continue from the results of an earlier run")
    parser.add_argument("--report", action="store_true", help="measure nothing: report the saved results")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="also write tables and charts into this page")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of numbers (.json) and charts (.png)")
    args = parser.parse_args()
    if unknown := [case for case in args.cases if case not in CASES]:
        parser.error(f"unknown case {', '.join(unknown)}; choose from {', '.join(CASES)}")
    peers = PEERS if args.peers is None else [peer for value in args.peers for peer in value.split(",") if peer]
    if unknown := [peer for peer in peers if peer not in PEERS]:
        parser.error(f"unknown peer {', '.join(unknown)}; choose from {', '.join(PEERS)}")
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {args.rounds}")
    args.peers, args.cases = peers, args.cases or list(CASES)
    return args


def _rounds(args: argparse.Namespace, name: str) -> int:
    return int(args.rounds or min(2 if args.quick else 10, CASES[name].max_rounds))


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")


# Saved results


def _path(folder: Path, name: str, quick: bool, suffix: str = ".json") -> Path:
    return folder / f"{name}{'-quick' * quick}{suffix}"


def _load(folder: Path, name: str, quick: bool) -> Saved | None:
    path = _path(folder, name, quick)
    saved: Saved | None = json.loads(path.read_text()) if path.is_file() else None
    return saved


def _save(folder: Path, name: str, saved: Saved) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, name, saved["quick"])
    draft = path.with_suffix(".unfinished")
    draft.write_text(json.dumps(saved, indent=1) + "\n")
    draft.rename(path)


def _report(args: argparse.Namespace, name: str, saved: Saved) -> None:
    """Print and draw a case, and write both into the page of ``--write``."""
    drawn = _path(args.results, name, args.quick, ".png")
    chart.draw(drawn, name, CASES[name], saved["rows"])
    sys.stdout.write(report.section(name, CASES[name], saved) + "\n")
    sys.stdout.flush()
    _log(f"numbers and chart: {_path(args.results, name, args.quick)}, {drawn}")
    if args.write is not None:
        published = args.write.parent / "pictures" / f"bench-{name}.png"
        published.parent.mkdir(exist_ok=True)
        if drawn.exists():
            shutil.copyfile(drawn, published)
        link = f"pictures/{published.name}" if published.exists() else None
        report.update_page(args.write, name, report.section(name, CASES[name], saved, link))


# Measuring


def _measure(args: argparse.Namespace, name: str, earlier: Saved | None) -> Saved:
    """Measure a case from its first round, or resume where an earlier run was interrupted."""
    rows = [row for row in CASES[name].rows if row.peer is None or row.peer in args.peers]
    _log(f"{name}: creating the data (once)")
    for create in getattr(SCRIPTS[name], "DATA", ()):
        create(data.QUICK if args.quick else data.FULL)
    interpreters = {peer: environment(peer) for peer in {row.peer for row in rows if row.peer is not None}}
    shutil.rmtree(data.HOME / "cache", ignore_errors=True)
    started_at = time.monotonic()
    problems = _check_rows(name, rows, interpreters, args.quick)
    _log(f"{name}: checked all rows in {time.monotonic() - started_at:.0f} s")
    when = time.strftime("%Y-%m-%d")
    saved: Saved = earlier or {"quick": args.quick, "rounds": 0, "rows": {}}
    saved |= {"when": when, "machine": _machine(interpreters)}
    for row in rows:
        if problem := problems[row.name]:
            saved["rows"][row.name] = [problem]
        saved["rows"].setdefault(row.name, [])
    while saved["rounds"] < _rounds(args, name):
        _run_round(name, rows, interpreters, saved)
        _save(args.results, name, saved)
    return saved


def _run_round(name: str, rows: list[Row], interpreters: Interpreters, saved: Saved) -> None:
    started_at = time.monotonic()
    number = saved["rounds"]
    for row in rows if number % 2 == 0 else reversed(rows):  # alternate, so that no row always runs after the same row
        rounds: Rounds = saved["rows"][row.name]
        if not any(isinstance(result, str) for result in rounds):
            rounds.append(_run_row(name, row, interpreters, saved["quick"]))
    saved["rounds"] = number + 1
    _log(f"{name}: round {number + 1} took {time.monotonic() - started_at:.0f} s")


def _check_rows(name: str, rows: list[Row], interpreters: Interpreters, quick: bool) -> dict[str, str | None]:
    """Run every row once, untimed, and return the problems: it must deliver the samples that the other rows deliver.

    This also warms up the page cache, and creates indexes.
    """
    results = {row.name: _run_row(name, row, interpreters, quick, "--check") for row in rows}
    digests = {row: result.get("digest") for row, result in results.items() if isinstance(result, dict)}
    expected = next((digest for digest in digests.values() if digest is not None), None)
    problems = {row: result if isinstance(result, str) else None for row, result in results.items()}
    for row, digest in digests.items():
        if digest not in (None, expected):
            problems[row] = "delivers other samples than the first row that has a digest"
    for row, problem in problems.items():
        if problem is not None:
            _log(f"{name}: {row}: {problem}")
    return problems


def _run_row(name: str, row: Row, interpreters: Interpreters, quick: bool, *options: str) -> Result | str:
    """Measure a row once in a fresh process; return its result, or a text that says what went wrong."""
    python: str | Path = sys.executable
    env = os.environ | {"PENSTOCK_CACHE": str(data.HOME / "cache" / _slug(f"{name}-{row.name}"))}
    if row.peer is not None:
        python = interpreters[row.peer]
        if isinstance(python, str):
            return python
        env.pop("PYTHONPATH", None)
    call = [python, str(SCRIPTS[name].__file__), name, row.name, *options, *["--quick"] * quick]
    os.sync()  # so that no row waits for the writes of the row before
    timeout_s = CHECK_S if options else ROW_S
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(call, env=env, start_new_session=True, **pipes) as process:
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout_s} s"
        finally:  # ends the workers of the row, however the row ended
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        return f"failed: {last_line(errors)}"
    result: Result = json.loads(last_line(out))
    return result


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _machine(interpreters: Interpreters) -> dict[str, str]:
    cpus = Path("/proc/cpuinfo").read_text().split("model name\t: ")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "cpu": f"{cpus[1].splitlines()[0] if len(cpus) > 1 else platform.machine()}, {os.cpu_count()} cores",
        "memory": f"{memory / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "load": f"{os.getloadavg()[0]:.1f} at the start",
        "python": platform.python_version(),
        "own environment": ", ".join(f"{name}=={number}" for name in OWN_PACKAGES if (number := _version(name))),
    }
    for peer, python in sorted(interpreters.items()):
        facts[peer] = installed_packages(python) if isinstance(python, Path) else python
    return facts


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
