"""Random plans and faults run for a minute in one process, which must not grow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FULL = os.environ.get("PENSTOCK_FULL") == "1"

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
SECONDS = 60


if FULL:  # it takes a minute

    def test_plans_with_faults_yield_exact_results_and_leave_no_threads_or_processes() -> None:
        command = [sys.executable, "-W", "error", str(SOAK), "--minutes", str(SECONDS / 60)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 240, check=False)
        assert done.returncode == 0, done.stderr[-4000:] + done.stdout
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
        ends = {row[0]: int(row[3]) for row in rows[2:]}
        assert ends["children"] == 0
        assert ends["threads"] == 1
