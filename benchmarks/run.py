"""Measure Penstock beside its peers in one run, and print what came out as Markdown.

Every round runs every row of a case once, each in a fresh process, so that what disturbs the machine disturbs all of
them. Figures are medians over the rounds with the slowest and the fastest; a ratio is taken in each round first, and
its median shown. A case is kept when its last round is done, and after each round what there is of it: a run that was
interrupted goes on with --resume.
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
from cases import Case, Result, Row
from environments import PEERS, environment, frozen, last_line
from report import Rounds, Saved

_MODULES = (cases, engine_cases, image_cases, ray_cases, remote_cases, table_cases, tool_cases, torch_cases)
SCRIPTS = {name: module for module in _MODULES for name in module.CASES}
CASES: dict[str, Case] = {name: module.CASES[name] for name, module in SCRIPTS.items()}

RESULTS = data.HOME / "results"
ROW_S = 300
CHECK_S = 1200  # a library's own copy of the data is made in the first call
OWN = ("penstock", "numpy", "pillow", "torch", "webdataset", "opencv-python-headless", "simplejpeg", "pyarrow", "ray")

Pythons = dict[str, str | Path]  # the interpreter of each peer, or why there is none


def main() -> None:
    """Run the chosen cases."""
    args = _arguments()
    for name in args.cases:
        kept = _kept(args.results, name, args.quick)
        if not args.report and not (args.resume and kept is not None and kept["rounds"] >= _rounds(args, name)):
            kept = _measured(args, name, kept if args.resume else None)
        if kept is not None:
            _tell(args, name, kept)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"all by default: {', '.join(CASES)}")
    parser.add_argument(
        "--peers", nargs="*", help=f"with environments of their own, all by default: {', '.join(PEERS)}"
    )
    parser.add_argument("--rounds", type=int, help="10 by default, or what a case has at most")
    parser.add_argument("--quick", action="store_true", help="a tenth of the data, 2 rounds: does it work?")
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier run has kept")
    parser.add_argument("--report", action="store_true", help="measure nothing: print, or write, what was kept")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put tables and charts into this page too")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of numbers (.json) and charts (.png)")
    args = parser.parse_args()
    if unknown := [case for case in args.cases if case not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    named = PEERS if args.peers is None else [peer for given in args.peers for peer in given.split(",") if peer]
    if strangers := [peer for peer in named if peer not in PEERS]:
        parser.error(f"no peer {', '.join(strangers)}; there are {', '.join(PEERS)}")
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"{args.rounds} rounds measure nothing")
    args.peers, args.cases = named, args.cases or list(CASES)
    return args


def _rounds(args: argparse.Namespace, name: str) -> int:
    return int(args.rounds or min(2 if args.quick else 10, CASES[name].most_rounds))


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


# Results, kept


def _path(folder: Path, name: str, quick: bool, suffix: str = ".json") -> Path:
    return folder / f"{name}{'-quick' * quick}{suffix}"


def _kept(folder: Path, name: str, quick: bool) -> Saved | None:
    path = _path(folder, name, quick)
    found: Saved | None = json.loads(path.read_text()) if path.is_file() else None
    return found


def _keep(folder: Path, name: str, saved: Saved) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, name, saved["quick"])
    draft = path.with_suffix(".unfinished")
    draft.write_text(json.dumps(saved, indent=1) + "\n")
    draft.rename(path)


def _tell(args: argparse.Namespace, name: str, saved: Saved) -> None:
    """Print a case, draw it, and put both into a page if one is named."""
    picture = _path(args.results, name, args.quick, ".png")
    chart.draw(picture, name, CASES[name], saved["rows"])
    sys.stdout.write(report.section(name, CASES[name], saved) + "\n")
    sys.stdout.flush()
    _note(f"numbers and chart: {_path(args.results, name, args.quick)}, {picture}")
    if args.write is not None:
        shown = args.write.parent / "pictures" / f"bench-{name}.png"
        shown.parent.mkdir(exist_ok=True)
        if picture.exists():
            shutil.copyfile(picture, shown)
        link = f"pictures/{shown.name}" if shown.exists() else None
        report.put(args.write, name, report.section(name, CASES[name], saved, link))


# Measuring


def _measured(args: argparse.Namespace, name: str, earlier: Saved | None) -> Saved:
    """Measure a case, from its first round or from where an earlier run was interrupted."""
    rows = [row for row in CASES[name].rows if row.peer is None or row.peer in args.peers]
    _note(f"{name}: making the data (once)")
    for make in getattr(SCRIPTS[name], "DATA", ()):
        make(data.QUICK if args.quick else data.FULL)
    pythons = {peer: environment(peer) for peer in {row.peer for row in rows if row.peer is not None}}
    shutil.rmtree(data.HOME / "cache", ignore_errors=True)
    begun = time.monotonic()
    problems = _rehearse(name, rows, pythons, args.quick)
    _note(f"{name}: rehearsed in {time.monotonic() - begun:.0f} s")
    when = time.strftime("%Y-%m-%d")
    saved: Saved = earlier or {"quick": args.quick, "rounds": 0, "rows": {}}
    saved |= {"when": when, "machine": _machine(pythons)}
    for row in rows:
        if problem := problems[row.name]:
            saved["rows"][row.name] = [problem]
        saved["rows"].setdefault(row.name, [])
    while saved["rounds"] < _rounds(args, name):
        _round(name, rows, pythons, saved)
        _keep(args.results, name, saved)
    return saved


def _round(name: str, rows: list[Row], pythons: Pythons, saved: Saved) -> None:
    begun = time.monotonic()
    number = saved["rounds"]
    for row in rows if number % 2 == 0 else reversed(rows):  # no row always follows the same other
        rounds: Rounds = saved["rows"][row.name]
        if not any(isinstance(told, str) for told in rounds):
            rounds.append(_once(name, row, pythons, saved["quick"]))
    saved["rounds"] = number + 1
    _note(f"{name}: round {number + 1} took {time.monotonic() - begun:.0f} s")


def _rehearse(name: str, rows: list[Row], pythons: Pythons, quick: bool) -> dict[str, str | None]:
    """Run every row once, unmeasured: files are cached, indexes made, and the same samples come from all."""
    found = {row.name: _once(name, row, pythons, quick, "--check") for row in rows}
    digests = {row: told.get("digest") for row, told in found.items() if isinstance(told, dict)}
    expected = next((digest for digest in digests.values() if digest is not None), None)
    problems: dict[str, str | None] = {row: told if isinstance(told, str) else None for row, told in found.items()}
    for row, digest in digests.items():
        if digest not in (None, expected):
            problems[row] = "gives other samples than the first row that was compared"
    for row, problem in problems.items():
        if problem is not None:
            _note(f"{name}: {row}: {problem}")
    return problems


def _once(name: str, row: Row, pythons: Pythons, quick: bool, *more: str) -> Result | str:
    """Measure a row once in a fresh process; a text says what went wrong."""
    python: str | Path = sys.executable
    env = os.environ | {"PENSTOCK_CACHE": str(data.HOME / "cache" / _plain(f"{name}-{row.name}"))}
    if row.peer is not None:
        python = pythons[row.peer]
        if isinstance(python, str):
            return python
        env.pop("PYTHONPATH", None)
    call = [python, str(SCRIPTS[name].__file__), name, row.name, *more, *["--quick"] * quick]
    os.sync()  # what one row has written is not the next one's to wait for
    limit = CHECK_S if more else ROW_S
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(call, env=env, start_new_session=True, **pipes) as process:
        try:
            out, problems = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"not done after {limit} s"
        finally:  # a row's own workers end with it, however it ends
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        return f"failed: {last_line(problems)}"
    result: Result = json.loads(last_line(out))
    return result


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _machine(pythons: Pythons) -> dict[str, str]:
    cpus = Path("/proc/cpuinfo").read_text().split("model name\t: ")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {
        "cpu": f"{cpus[1].splitlines()[0] if len(cpus) > 1 else platform.machine()}, {os.cpu_count()} cores",
        "memory": f"{memory / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "load": f"{os.getloadavg()[0]:.1f} at the start",
        "python": platform.python_version(),
        "own environment": ", ".join(f"{name}=={told}" for name in OWN if (told := _version(name))),
    }
    for peer, python in sorted(pythons.items()):
        found[peer] = frozen(python) if isinstance(python, Path) else python
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
