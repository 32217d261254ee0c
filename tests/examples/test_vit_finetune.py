"""The example runs from pictures to predictions, and its model is better than chance."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import penstock as ps

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vit_finetune.py"
FULL = os.environ.get("PENSTOCK_FULL") == "1"


# On Ray it starts a cluster, ranks and actors, which takes a minute. tests/feed tests the parts.
@pytest.mark.parametrize("engine", ["local", "ray"] if FULL else ["local"])
@pytest.mark.timeout(600)
def test_a_fine_tuned_model_classifies_new_pictures(engine: str, tmp_path: Path, warm_python: str) -> None:
    call = [warm_python, str(EXAMPLE), "--engine", engine, "--images", "160", "--folder", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    text = done.stdout.decode()
    assert done.returncode == 0, text
    assert "dims: [{'dims': 2, 'count': 12}, {'dims': 3, 'count': 148}]" in text
    assert re.search(r"40 new pictures: \d+% correct", text)
    rows = ps.read_parquet(tmp_path / "predictions").take_all()
    assert [Path(row["path"]).parent.name for row in rows] == ["stripes"] * 20 + ["dots"] * 20  # in order
