from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.cli.serve import ConsumerRates, serving_table
from penstock.testing import numbers

PROGRAM = """
from penstock.testing import numbers

ds = numbers((40, 31)).shuffle().batched(4)

def make():
    return ds

other = 7

def of(size):
    return ds
"""


def test_a_program_is_served_until_sigterm(tmp_path: Path, warm_python: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-characters\n")
    token.chmod(0o600)
    command = [warm_python, "-m", "penstock", "serve", "program.py:make", "--listen", "127.0.0.1:0"]
    command += ["--token-file", str(token), "--health", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"serving at (\S+), health at (\S+), process", line)
        assert found is not None, line
        with urllib.request.urlopen(found[2], timeout=20) as answer:
            assert answer.status == 200
        ds = numbers((40, 31)).shuffle().batched(4)
        feed = ps.connect(found[1], token.read_text().strip(), plan=ds)
        assert [batch["x"].tolist() for batch in feed] == [batch["x"].tolist() for batch in ds.loader()]
        feed.close()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors == "penstock: ending; consumers move to other servers\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["program.py:other"], "is a int, not a dataset"),
        (
            ["program.py:of"],
            "program.py:of cannot be called without arguments to get a dataset: missing a required arg",
        ),
        (["program.py:none"], "has no 'none'"),
        (["program.py"], "write MODULE:NAME"),
        (["program.py:ds", "--listen", "0.0.0.0:0"], "must show a token"),
    ],
)
def test_what_cannot_be_served_is_an_error_in_one_line(
    words: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["serve", *words]) == 1
    printed = capsys.readouterr().err
    assert problem in printed
    assert printed.count("\n") == 1


def test_the_table_shows_the_rates_of_each_consumer() -> None:
    from rich.console import Console

    rates = ConsumerRates()
    consumer = {
        "peer": "ipv4:1",
        "rank": 1,
        "world": 2,
        "batches": 10,
        "bytes": 2e6,
        "ready_bytes": 5e5,
        "seconds": 2.0,
    }
    assert rates.update([consumer], 100.0) == [("1 of 2", "ipv4:1", 5.0, 1.0, 0.5)]
    later = {**consumer, "batches": 30, "bytes": 6e6, "seconds": 3.0}
    assert rates.update([later], 101.0) == [("1 of 2", "ipv4:1", 20.0, 4.0, 0.5)]
    with ps.serve(numbers((9,)).map(dict), "grpc://127.0.0.1:0") as server:
        console = Console(width=120, file=io.StringIO())
        console.print(serving_table(server, rates))
        assert isinstance(console.file, io.StringIO)
        assert "0 consumers" in console.file.getvalue()
