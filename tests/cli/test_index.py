from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.formats.tar.index import read_beside
from penstock.storage import Memory


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("1.txt", "2.txt"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"abc"))
    return tmp_path / "a.tar"


def test_an_index_is_stored_beside_its_shard(shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(shard.parent)]) == 0
    assert capsys.readouterr().out == f"{shard}: 2 samples\n"
    index = read_beside(str(shard))
    assert index is not None
    assert len(index.checksums) == 1


def test_json_is_one_line_per_shard(shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(shard), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shard": str(shard), "samples": 2, "bad": 0, "skipped": 0}


def test_an_unwritable_folder_is_reported_in_one_line(shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shard.parent / "a.tar.index").mkdir()
    assert main(["index", str(shard)]) == 1
    error = capsys.readouterr().err
    assert "the index cannot be written beside it: Is a directory" in error
    assert error.count("\n") == 1


def test_a_remote_shard_gets_its_index_beside_it(shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Memory().put("memory://cli-index/a.tar") as upload:
        upload.write(shard.read_bytes())
        upload.commit()
    assert main(["index", "memory://cli-index"]) == 0
    assert Memory().info("memory://cli-index/a.tar.index").size


def test_a_damaged_shard_is_reported_and_exit_1(shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard.write_bytes(shard.read_bytes()[:1600])
    assert main(["index", str(shard)]) == 1
    assert "1 of them unreadable" in capsys.readouterr().out
    assert main(["index", str(shard.with_name("missing.tar"))]) == 1
    assert capsys.readouterr().err.startswith("penstock: ")
