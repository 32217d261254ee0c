from __future__ import annotations

import gzip
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.formats.tar.writer import ShardWriter

Capture = pytest.CaptureFixture[bytes]


def test_shards_are_split_by_count_and_size_with_index_and_manifest(
    shard: str, tmp_path: Path, capfdbinary: Capture
) -> None:
    for name, options in {"n": ["-n", "6"], "s": ["-s", "20KB"]}.items():
        out = tmp_path / name
        assert main(["split", *options, "-o", f"{out}/", "--json", shard]) == 0
        entries = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
        assert [entry["name"] for entry in entries] == sorted(path.name for path in out.glob("*.tar"))
        assert [sample["__key__"] for sample in ps.read_tar(str(out))] == [f"k{number:02d}" for number in range(20)]
        assert main(["verify", str(out)]) == 0
        assert b"no problems found" in capfdbinary.readouterr().out
    manifest = json.loads((tmp_path / "n" / "manifest.json").read_text())
    assert [entry["samples"] for entry in manifest["shards"]] == [6, 6, 6, 2]
    assert all(path.stat().st_size <= 20_000 for path in (tmp_path / "s").glob("*.tar"))


@pytest.mark.parametrize("source_kind", ["file", "pipe", "gz"])
@pytest.mark.parametrize("limits", [{"max_bytes": 60_000}, {"max_bytes": 90_000, "max_samples": 25}])
def test_shards_equal_those_of_a_writer_that_gets_samples_one_by_one(
    source_kind: str, limits: dict[str, Any], tmp_path: Path, warm_python: str
) -> None:
    rows = [{"__key__": f"k{n:03}", "cls": b"%d" % n, "txt": b"x" * (n * 37 % 1500)} for n in range(70)]
    source = tmp_path / ("in.tar.gz" if source_kind == "gz" else "in.tar")
    with ps.TarWriter(source) as writer:
        for row in rows:
            writer.write(row)
    with ShardWriter(tmp_path / "one", **limits) as shards:
        for row in rows:
            shards.write(row)
    options = ["-s", str(limits.get("max_bytes", 10**9)), "-n", str(limits.get("max_samples", 10**6))]
    words = ["split", *options, "-o", f"{tmp_path}/two/"]
    if source_kind == "pipe":
        with open(source, "rb") as file:
            subprocess.run([warm_python, "-m", "penstock", *words], stdin=file, check=True)
    else:
        assert main([*words, str(source)]) == 0
    names = sorted(path.name for path in (tmp_path / "one").glob("*.tar"))
    assert names == sorted(path.name for path in (tmp_path / "two").glob("*.tar"))
    assert len(names) > 2
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)
    assert (tmp_path / "one/manifest.json").read_bytes() == (tmp_path / "two/manifest.json").read_bytes()


@pytest.mark.parametrize("name", ["x", "x-{shard:06d}.tar", "x-%06d.tar"])
def test_splitting_stops_after_the_maximum_number_of_shards(name: str, shard: str, tmp_path: Path) -> None:
    assert main(["split", "-n", "6", "--maxshards", "2", "-o", str(tmp_path / "o" / name), shard]) == 0
    assert sorted(path.name for path in (tmp_path / "o").glob("*.tar")) == ["x-000000.tar", "x-000001.tar"]
    assert len(ps.read_tar(str(tmp_path / "o"))) == 12


def _archive_with_other_members(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for name in ("d", "d/a.txt", "d/README", "d/.DS_Store", "d/b.txt", "d/LICENSE", "d/b.__source__"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if name == "d" else tarfile.REGTYPE
            tar.addfile(member)
        for name, kind in {"d/c.txt": tarfile.SYMTYPE, "d/e.txt": tarfile.LNKTYPE}.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "d/a.txt"
            tar.addfile(member)


@pytest.mark.parametrize("source_kind", ["file", "gz"])
def test_members_that_are_left_out_are_counted_by_kind(
    source_kind: str, shard: str, tmp_path: Path, capfdbinary: Capture
) -> None:
    source = tmp_path / "other.tar"
    _archive_with_other_members(source)
    if source_kind == "gz":
        source = source.rename(tmp_path / "other.tar.gz")
        source.write_bytes(gzip.compress(source.read_bytes()))
    assert main(["split", "-o", f"{tmp_path}/out/", shard, str(source)]) == 0
    assert capfdbinary.readouterr().err == (
        b"penstock: left out members that belong to no sample "
        b"(__source__ records: 1, files without extension: 2, folders: 1, hidden files: 1, links or devices: 2)\n"
    )


def test_nothing_is_printed_if_nothing_is_left_out(shard: str, tmp_path: Path, capfdbinary: Capture) -> None:
    assert main(["split", "-o", f"{tmp_path}/out/", shard]) == 0
    assert capfdbinary.readouterr() == (b"", b"")


@pytest.mark.parametrize("place", ["out/", "memory://split/"])
def test_shards_that_are_read_are_not_replaced(
    place: str, shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["split", "-n", "5", "-o", place, shard]) == 0
    before = [sample["__key__"] for sample in ps.read_tar(place)]
    with pytest.raises(SystemExit):
        main(["split", "-n", "2", "-o", place, f"{place}shard-000003.tar"])
    assert b"shard-000003.tar is read, and would be replaced" in capfdbinary.readouterr().err
    assert [sample["__key__"] for sample in ps.read_tar(place)] == before
