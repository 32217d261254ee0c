"""Measure rows of cases with the code of another checkout beside this one: in turn, each call in a fresh process.

``python benchmarks/beside.py ../old images="penstock, antialias=True" process="penstock, made in the worker"`` prints
for each row the ratio of the seconds of the other checkout to those of this one: above 1, this one is faster. Both
checkouts need their environments (``make demo`` creates one), and create their data in the first, unmeasured round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from environments import last_line

HERE = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600


def main() -> None:
    """Measure the rows, and print a line for each round and a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("rows", nargs="+", metavar="CASE=ROW")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    trees = (args.other.resolve(), HERE)
    lines = [f"| row | {trees[0].name}, s | this, s | ratio | rounds |", "| --- | ---: | ---: | ---: | ---: |"]
    for given in args.rows:
        case, _, row = given.partition("=")
        for tree in trees:
            _seconds(tree, case, row)
        rounds = [_round(trees if number % 2 else trees[::-1], case, row) for number in range(args.rounds)]
        ratios = sorted(seconds[trees[0]] / seconds[trees[1]] for seconds in rounds)
        before, now = (statistics.median(seconds[tree] for seconds in rounds) for tree in trees)
        spread = f"{statistics.median(ratios):.2f} [{ratios[0]:.2f} - {ratios[-1]:.2f}]"
        lines.append(f"| {case}: {row} | {before:.3g} | {now:.3g} | {spread} | {len(rounds)} |")
        sys.stderr.write(lines[-1] + "\n")
    sys.stdout.write("\n".join(lines) + "\n")


def _round(trees: tuple[Path, ...], case: str, row: str) -> dict[Path, float]:
    return {tree: _seconds(tree, case, row) for tree in trees}


def _seconds(tree: Path, case: str, row: str) -> float:
    folder = tree / "benchmarks"
    script = next(path for path in sorted(folder.glob("*cases.py")) if f'"{case}": Case(' in path.read_text())
    call = [tree / ".venv" / "bin" / "python", script, case, row]
    os.sync()  # so that no call waits for the writes of the one before
    done = subprocess.run(
        call,
        env=os.environ | {"PENSTOCK_CACHE": str(folder / ".data" / "cache" / "beside")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {case}: {row}: {done.stderr[-2000:]}")
    return float(json.loads(last_line(done.stdout))["seconds"])


if __name__ == "__main__":
    main()
