from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ps.from_items([{"txt": f"{n}"} for n in range(9)]).write_tar(str(tmp_path / "out"), max_samples=3)
    return tmp_path / "out"


def test_whole_shards_are_well(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == "3 shards, all well\n"


def test_all_that_is_wrong_is_listed_and_exit_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "shard-000000.tar.index").unlink()
    (folder / "shard-000002.tar").unlink()
    assert main(["verify", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{folder}/shard-000000.tar: its index is missing",
        f"{folder}/shard-000002.tar: it is in the manifest and not there",
        "3 shards, 2 of them not as they should be",
    ]
    assert main(["verify", str(folder), "--json"]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told[0] == {"shard": f"{folder}/shard-000000.tar", "problem": "its index is missing"}
    assert len(told) == 2


def test_nothing_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "missing" / "*.tar")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
