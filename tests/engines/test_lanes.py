"""Runs that share one set of workers: each yields its own part in order, and one that is not read stops no other."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from penstock.dataset import Dataset
from penstock.engines import Lanes, Program, Run
from penstock.errors import EngineError
from penstock.plan import Cut
from penstock.plan.values import WorkerKind
from penstock.testing import numbers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test


class Model:
    """Counts how many times it is constructed, in a file."""

    def __init__(self, log: str) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "y": batch["x"] + 1}


def lanes_of(ds: Dataset, most: int) -> tuple[Lanes, list[Run], list[list[Any]]]:
    """Return runs of all parts of a dataset on shared workers, and what each part is."""
    program = Program(ds.epoch(0).plan)
    order = program.order(0)
    lanes = Lanes(program, order, 0, most)
    runs = [lanes.run(program.start(order, Cut(rank, most))) for rank in range(most)]
    want = [[row["x"] for row in ds.on("serial").epoch(0).shard(rank, most)] for rank in range(most)]
    return lanes, runs, want


@pytest.mark.parametrize("on", ["threads", "processes"])
def test_parts_in_lock_step_share_one_worker(on: WorkerKind, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ds = numbers((60, 80)).shuffle().map_batches(Model, 5, fn_args=(str(log),), workers=1, on=on).on("local", cpus=4)
    lanes, runs, want = lanes_of(ds, 4)
    log.unlink()  # of the serial runs
    with closing(lanes):
        rows = zip(*(run.items() for run in runs), strict=True)  # each waits for all others, in every step
        got = list(zip(*rows, strict=True))
    assert [[row["x"] for row in part] for part in got] == want
    assert len(log.read_text().split()) == 1


def test_a_run_that_is_not_read_does_not_stop_the_others() -> None:
    ds = numbers((2000,)).map(dict, workers=2).on("local", cpus=4)
    lanes, runs, want = lanes_of(ds, 3)
    with closing(lanes):
        assert next(iter(runs[0].items()))["x"] == want[0][0]
        for number in (1, 2):
            assert [row["x"] for row in runs[number].items()] == want[number]
        runs[0].close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock driver")]


def test_a_run_of_closed_lanes_fails() -> None:
    lanes, runs, _ = lanes_of(numbers((50,)).map(dict, workers=1).on("local", cpus=2), 2)
    lanes.close()
    with pytest.raises(EngineError, match="closed"):
        list(runs[1].items())


def test_serial_has_one_lane() -> None:
    program = Program(numbers((50,)).on("serial").plan)
    assert Lanes(program, program.order(0), 0, 8).count == 1
