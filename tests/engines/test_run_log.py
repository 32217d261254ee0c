"""The monitor's files: small, appended, readable after a kill, and in agreement with ``stats()``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import penstock as ps
from penstock.engines import run_log
from penstock.engines.meter import Meter, Meters
from penstock.engines.run_log import LOG_SUFFIX, RunLog, RunLogReader
from penstock.errors import PlanError

RANK = """
import sys, time
import penstock as ps
ds = ps.from_items(list(range(100_000))).map(lambda x: (time.sleep(0.001), x)[1]).batched(8)
for batch in ds.on("local", monitor=sys.argv[1]).loader(rank=int(sys.argv[2]), world=4):
    print(len(batch), flush=True)
"""
DEADLINE_S = 120.0


@pytest.mark.parametrize("engine", ["local", "serial"])
def test_the_last_line_agrees_with_stats(tmp_path: Path, engine: str) -> None:
    ds = ps.from_items(list(range(500))).map(str).on(engine, monitor=tmp_path / "runs")  # type: ignore[arg-type]
    assert sum(1 for _ in ds) == 500
    (run,) = RunLogReader(tmp_path / "runs").read()
    stats = ds.stats().to_dict()
    for segment in stats["segments"]:
        del segment["sizes"]
    assert {name: run.last[name] for name in stats} == stats
    assert run.status(time.time()) == "ended"
    assert run.begin["rank"] == 0
    assert run.begin["epoch"] == 0
    assert run.last["memory"] > 1_000_000


def test_a_run_on_ray_is_monitored(tmp_path: Path, shared_ray: None) -> None:
    ds = ps.from_items(list(range(50))).map(str, workers=1).on("ray", monitor=tmp_path)
    assert sum(1 for _ in ds) == 50
    (run,) = RunLogReader(tmp_path).read()
    assert (run.begin["engine"], run.last["items"], run.status(time.time())) == ("ray", 50, "ended")
    assert run.last["segments"][0]["on"] == "actors"


def test_every_epoch_of_a_process_goes_into_one_file(tmp_path: Path) -> None:
    loader = ps.from_items(list(range(10))).batched(5).on("local", monitor=tmp_path).loader(rank=1, world=2)
    for _ in range(3):
        list(loader)
    runs = RunLogReader(tmp_path).read()
    assert len(list(tmp_path.glob(f"*{LOG_SUFFIX}"))) == 1
    assert [(run.begin["rank"], run.begin["world"], run.begin["epoch"]) for run in runs] == [
        (1, 2, 0),
        (1, 2, 1),
        (1, 2, 2),
    ]


def test_a_reader_reads_only_what_was_appended(tmp_path: Path) -> None:
    path = tmp_path / f"host-1-1{LOG_SUFFIX}"
    begin = {"run": 0, "time": 1.0, "kind": "begin", "host": "another", "rank": 0, "world": 1}
    line = {"run": 0, "time": 2.0, "kind": "stats", "segments": [], "running": True}
    path.write_text(json.dumps(begin) + "\nnot json\n" + json.dumps(line)[:20])
    reader = RunLogReader(tmp_path)
    (run,) = reader.read()
    assert not run.lines
    with path.open("a") as file:
        file.write(json.dumps(line)[20:] + "\n")
    (run,) = reader.read()
    assert [found["time"] for found in run.lines] == [2.0]
    assert run.status(now=4.0) == "running"
    assert run.status(now=60.0) == "silent"


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    ds = ps.from_items([1, 2, 3]).on("local", monitor=tmp_path / "file" / "runs")
    assert list(ds) == [1, 2, 3]
    assert "not monitored" in caplog.text


@pytest.mark.parametrize("monitor", ["s3://bucket/runs", 3])
def test_a_monitor_that_is_not_a_folder_is_refused(monitor: object) -> None:
    with pytest.raises(PlanError, match="expected a local folder"):
        ps.from_items([1]).on("local", monitor=monitor)  # type: ignore[arg-type]


def test_a_killed_rank_is_lost_and_the_others_are_not(tmp_path: Path, warm_python: str) -> None:
    ranks = [
        subprocess.Popen([warm_python, "-c", RANK, str(tmp_path), str(rank)], stdout=subprocess.PIPE)
        for rank in range(4)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == b"8\n"
        ranks[2].send_signal(signal.SIGKILL)
        ranks[2].wait()
        reader, deadline = RunLogReader(tmp_path), time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            runs = {run.begin["rank"]: run for run in reader.read()}
            if sum(bool(run.lines) for run in runs.values()) >= 3 and runs[2].status(time.time()) == "lost":
                break
            time.sleep(0.1)
        assert {rank: run.status(time.time()) == "lost" for rank, run in runs.items()} == {
            0: False,
            1: False,
            2: True,
            3: False,
        }
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_the_log_takes_less_than_ten_milliseconds_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "INTERVAL_S", 0.001)  # many lines soon; a line costs the same
    meters = Meters([Meter(f"map(function_{number})", "threads", sizes=[(0.0, 2)]) for number in range(12)])
    log = RunLog(meters, str(tmp_path), rank=0, world=1, epoch=0, plan="read")
    log.start()
    reader, deadline = RunLogReader(tmp_path), time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and sum(len(run.lines) for run in reader.read()) < 50:
        time.sleep(0.01)
    log.stop()
    (run,) = reader.read()
    assert len(run.lines) >= 50
    assert log.cpu_s / (len(run.lines) - 1) < 0.010
    assert os.path.getsize(next(tmp_path.iterdir())) / len(run.lines) < 6000
