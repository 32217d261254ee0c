from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main

Capture = pytest.CaptureFixture[bytes]


def test_every_format_keeps_hostile_text(
    hostile_shard: str, hostile_keys: list[str], tmp_path: Path, capfdbinary: Capture
) -> None:
    expected = [[key, f'a\tb\n"c", \\d {number}'] for number, key in enumerate(hostile_keys)]
    assert main(["tsv", hostile_shard]) == 0
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert lines[0] == "__key__\ttxt"
    assert [_unescape(line) for line in lines[1:]] == expected
    assert main(["tsv", "-F", "csv", "-f", "txt", hostile_shard]) == 0
    assert list(csv.reader(io.StringIO(capfdbinary.readouterr().out.decode(), newline="")))[1:] == expected
    assert main(["tsv", "--json", hostile_shard]) == 0
    rows = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [[row["__key__"], row["txt"]] for row in rows] == expected
    assert main(["tsv", "-o", str(tmp_path / "t.parquet"), hostile_shard]) == 0
    assert [[row["__key__"], row["txt"]] for row in ps.read_parquet(str(tmp_path / "t.parquet"))] == expected


def _unescape(line: str) -> list[str]:
    plain = {"\\t": "\t", "\\n": "\n", "\\\\": "\\"}
    cells = []
    for cell in line.split("\t"):
        text, position = "", 0
        while position < len(cell):
            step = 2 if cell[position : position + 2] in plain else 1
            text += plain.get(cell[position : position + 2], cell[position])
            position += step
        cells.append(text)
    return cells


def test_a_column_may_come_from_several_fields(shard: str, capfdbinary: Capture) -> None:
    assert main(["tsv", "-f", "png;txt cls", "--nokey", "-c", "1", shard]) == 0
    assert capfdbinary.readouterr().out == b"png\tcls\nt0\t9\n"


def test_a_column_that_no_sample_has_is_an_error_and_leaves_no_file(
    shard: str, tmp_path: Path, capfdbinary: Capture
) -> None:
    assert main(["tsv", "-f", "clss", shard, "-o", str(tmp_path / "out.tsv")]) == 1
    assert b"no field 'clss'; the fields are cls, jpg, txt: did you mean cls?" in capfdbinary.readouterr().err
    assert not (tmp_path / "out.tsv").exists()


def test_bytes_need_a_format_that_can_store_them(shard: str, tmp_path: Path, capfdbinary: Capture) -> None:
    assert main(["tsv", "-f", "jpg", shard]) == 1
    assert b"the field 'jpg' is not text" in capfdbinary.readouterr().err
    assert main(["tsv", "-f", "jpg", "-c", "2", "--json", shard]) == 0
    assert b'{"__key__": "k01", "jpg": {"base64": "/w=="}}' in capfdbinary.readouterr().out
    assert main(["tsv", "-f", "jpg", "-o", str(tmp_path / "t.parquet"), shard]) == 0
    assert ps.read_parquet(str(tmp_path / "t.parquet")).take_all()[3]["jpg"] == b"\xff" * 3
