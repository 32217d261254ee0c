"""A failed training of Ray Train resumes in mid-epoch with fewer workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_train.py"


FULL = os.environ.get("PENSTOCK_FULL") == "1"


if FULL:  # it starts its own Ray and two trainings; tests/feed has a small training, on the Ray of the other tests

    @pytest.mark.timeout(600)
    def test_two_workers_resume_after_one_of_three_failed(tmp_path: Path) -> None:
        call = [sys.executable, str(EXAMPLE), "--samples", "400", "--epochs", "1", "--folder", str(tmp_path / "run")]
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(call, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text = done.stdout.decode()
        assert done.returncode == 0, text
        assert "two workers resumed after step 4" in text
        assert "every sample came exactly once" in text
