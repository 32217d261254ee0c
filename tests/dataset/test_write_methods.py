"""An interrupted run of write_tar or write_parquet is resumed: a rerun writes what is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PlanError

SAMPLES = 1000
KILLED_AT = 700

# A slow model that can kill its process at a certain sample.
INFERENCE = f"""
import os, signal, sys, time
import numpy as np
import penstock as ps

out, log, kill = sys.argv[1:]

class Predictor:
    def __init__(self):
        self.note("constructed")

    def __call__(self, batch):
        if kill == "kill" and batch["n"].max() >= {KILLED_AT}:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        self.note(f"{{len(batch['n'])}}")
        return {{"twice.npy": np.stack([batch["n"]] * 2, 1)}}

    def note(self, what):
        with open(log, "a") as file:
            file.write(what + "\\n")

items = [{{"n": number}} for number in range({SAMPLES})]
predicted = ps.from_items(items).map_batches(Predictor, batch_size=50, workers=2)
if out.endswith("tar"):
    predicted.write_tar(out, max_samples=100, resume=True)
else:
    predicted.rename(twice="twice.npy").write_parquet(out, max_samples=100)
"""


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_rerun_of_killed_inference_predicts_only_missing_samples(kind: str, tmp_path: Path) -> None:
    def run(kill: str) -> list[str]:
        log = tmp_path / f"{kill}.log"
        call = [sys.executable, "-c", INFERENCE, str(tmp_path / kind), str(log), kill]
        assert (subprocess.run(call).returncode == 0) is (kill == "no")
        return log.read_text().split()

    run("kill")
    again = run("no")
    assert again.count("constructed") == 2  # once in every worker
    assert sum(int(line) for line in again if line != "constructed") < SAMPLES - KILLED_AT // 3
    read: Any = ps.read_tar if kind == "tar" else ps.read_parquet
    field = "twice.npy" if kind == "tar" else "twice"
    found = [sample[field].tolist() for sample in read(str(tmp_path / kind)).decode()]
    assert found == [[number, number] for number in range(SAMPLES)]
    assert len(list((tmp_path / kind).glob(f"*.{kind}"))) == 10


def test_shards_with_pickles_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="does not store pickles"):
        ps.from_items([{"a": 1}]).write_tar(str(tmp_path), trust_pickle=True, resume=True)
