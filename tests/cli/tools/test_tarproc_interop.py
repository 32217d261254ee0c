"""Our tools read what tarproc's tools write, and tarproc's tools read what ours write."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main

# tarproc was written for an older Python, which allowed flags anywhere in a pattern.
RUN_SCRIPT = """
import re, runpy, sys
strict = re._compile
def tolerant(pattern, flags):
    loose = isinstance(pattern, str) and "(?i)" in pattern
    return strict(pattern.replace("(?i)", ""), flags | re.IGNORECASE) if loose else strict(pattern, flags)
re._compile = tolerant
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    with ps.TarWriter(tmp_path / "ours.tar") as writer:
        for number in range(9):
            writer.write({"__key__": f"k{number}", "cls": b"%d" % (number % 3), "txt": b"text %d" % number})
    return tmp_path / "ours.tar"


def run_tarproc(name: str, *words: str, data: bytes = b"") -> bytes:
    path = os.path.join(sysconfig.get_path("scripts"), name)
    script = [sys.executable, "-W", "ignore", "-c", RUN_SCRIPT, path, *words]
    return subprocess.run(script, input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout


def test_tarproc_reads_our_archives_and_we_read_those_of_tarproc(
    shard: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "tarproc.tar").write_bytes(run_tarproc("tarcats", str(shard)))
    for path in (str(tmp_path / "tarproc.tar"), str(shard)):
        rows = ps.read_tar(path).drop("__url__").take_all()
        assert [row["__key__"] for row in rows] == [f"k{number}" for number in range(9)]
        assert set(rows[0]) == {"__key__", "cls", "txt"}
        assert main(["cat", path, "-c", "3", "-o", str(tmp_path / "some.tar")]) == 0
        assert len(ps.read_tar(str(tmp_path / "some.tar"))) == 3
        (tmp_path / "again.tar").write_bytes(run_tarproc("tarcats", str(tmp_path / "some.tar")))
        assert len(ps.read_tar(str(tmp_path / "again.tar"))) == 3
        assert main(["tsv", "-f", "cls", path]) == 0
        assert capfdbinary.readouterr().out.count(b"\n") == 10


def test_a_plan_of_tarproc_yields_the_same_samples(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"\xff")
    with open(tmp_path / "plan.tsv", "w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([["__key__", "@jpg", "cls"], ["k", str(tmp_path / "a.jpg"), "3"]])
    run_tarproc("tsv2tar", "-o", str(tmp_path / "tarproc.tar"), str(tmp_path / "plan.tsv"))
    assert main(["create", str(tmp_path / "plan.tsv"), "-o", str(tmp_path / "ours.tar")]) == 0
    rows = [ps.read_tar(str(tmp_path / name)).drop("__url__").take_all() for name in ("tarproc.tar", "ours.tar")]
    assert rows[0] == rows[1] == [{"__key__": "k", "cls": b"3", "jpg": b"\xff"}]
