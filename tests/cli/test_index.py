from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import DataError
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


def rewrite(path: Path, count: int) -> None:
    with ps.TarWriter(path) as writer:
        for number in range(count):
            writer.write({"__key__": f"new-{number}", "txt": b"text" * number})


def by_another_tool(path: Path, count: int) -> None:
    other = path.with_name("other")
    with tarfile.open(other, "w") as tar:
        for number in range(count):
            tar.addfile(tarfile.TarInfo(f"new-{number}.txt"))
    other.replace(path)


@pytest.mark.parametrize("tool", [rewrite, by_another_tool])
@pytest.mark.parametrize("count", [3, 5, 9])
def test_a_shard_that_is_written_again_is_named_and_indexing_its_folder_mends_it(
    tool: Callable[[Path, int], None], count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "packed"
    ps.from_items([{"__key__": f"k{n}", "txt": b"x"} for n in range(10)]).write_tar(str(folder), max_samples=5)
    tool(folder / "shard-000001.tar", count)
    if count != 5:
        with pytest.raises(
            DataError, match=r"written again: manifest.json says 5 samples.*run `penstock index"
        ) as caught:
            list(ps.read_tar(str(folder)))
        assert f"penstock index {folder}`" in str(caught.value)
    assert main(["index", str(folder)]) == 0
    assert "manifest.json: 1 entry updated" in capsys.readouterr().err
    keys = [sample["__key__"] for sample in ps.read_tar(str(folder))]
    assert keys == [f"k{n}" for n in range(5)] + [f"new-{n}" for n in range(count)]
    assert len(ps.read_tar(str(folder))) == 5 + count
    assert main(["verify", str(folder)]) == 0
    assert main(["index", str(folder)]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 9])
def test_a_shard_without_a_manifest_that_is_written_again_is_read_as_it_is(shard: Path, count: int) -> None:
    assert main(["index", str(shard)]) == 0
    by_another_tool(shard, count)
    assert [sample["__key__"] for sample in ps.read_tar(shard)] == [f"new-{n}" for n in range(count)]
