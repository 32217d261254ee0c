from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / "src" / name).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "src" / name / f"{number}.jpg").write_bytes(bytes(number * 100))
    return tmp_path / "src"


def test_a_folder_is_packed_and_summarised(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["pack", str(source), out, "--max-samples", "8", "--seed", "3", "--workers", "2"]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 20 samples in 3 shards, ")
    expected = ps.pack(source, tmp_path / "expected", max_samples=8, seed=3)
    for name in expected.shards:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_parquet_files_are_written_on_request(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["pack", str(source), str(tmp_path / "out"), "--format", "parquet", "--no-shuffle", "--compress", "snappy"]
    assert main(call) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: 20 samples in 1 file, ")
    labels = [sample["cls"] for sample in ps.read_parquet(tmp_path / "out")]
    assert labels == [0] * 10 + [1] * 10


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(source), str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["samples"], printed["estimated"]) == (20, False)
    assert not (tmp_path / "out").exists()


def test_options_are_passed_on(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["pack", str(source), out, "--no-shuffle", "--compress", "gz"]) == 0
    assert [sample["__key__"][-1] for sample in ps.read_tar(out)] == list("0123456789") * 2
    assert main(["pack", str(source), out, "--mode", "append"]) == 0
    assert len(ps.read_tar(out)) == 40
    capsys.readouterr()
    assert main(["pack", str(source), out, "--max-bytes", "5KB"]) == 1
    assert capsys.readouterr().err.startswith("penstock: ")
    assert main(["pack", str(source), out, "--max-bytes", "5KB", "--mode", "replace"]) == 0
    assert len(ps.read_tar(out)) == 20


def test_unreadable_samples_are_skipped_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / "list.csv").write_text("path,label\na.jpg,1\nb.jpg,2\n")
    assert main(["pack", str(tmp_path / "list.csv"), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "line 3" in error
    assert error.count("\n") == 1
    assert main(["pack", str(tmp_path / "list.csv"), str(tmp_path / "out"), "--skip-errors"]) == 0
    assert "1 skipped" in capsys.readouterr().out


def test_ctrl_c_exits_with_130_and_the_next_call_resumes(tmp_path: Path, warm_python: str) -> None:
    (tmp_path / "src" / "a").mkdir(parents=True)
    for number in range(800):
        (tmp_path / "src" / "a" / f"{number}.txt").write_bytes(b"x" * 900)
    call = [warm_python, "-m", "penstock", "pack", str(tmp_path / "src"), str(tmp_path / "out"), "--max-samples=5"]
    with subprocess.Popen(call, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "out" / "shard-000003.tar").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (130, "penstock: interrupted\n")
    assert "manifest.json" not in os.listdir(tmp_path / "out")
    assert not [name for name in os.listdir(tmp_path / "out") if name.endswith(".partial")]
    assert ps.pack(tmp_path / "src", tmp_path / "out", max_samples=5).samples == 800
