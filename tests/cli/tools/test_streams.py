"""Properties of all tools: hostile keys, full disks, closed pipes, other storages, keys that lead out of a folder."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main

Capture = pytest.CaptureFixture[bytes]
KeysOf = Callable[[bytes], list[str]]


def numbered(*numbers: int) -> list[str]:
    return [f"k{number:02d}" for number in numbers]


def test_hostile_keys_go_through_every_tool(
    hostile_shard: str, hostile_keys: list[str], tmp_path: Path, keys_of: KeysOf, capfdbinary: Capture
) -> None:
    for words in (["cat"], ["sort"], ["shuffle"], ["cat", "-f", "txt"], ["proc", "-c", "true"]):
        assert main([*words, hostile_shard]) == 0
        assert sorted(keys_of(capfdbinary.readouterr().out)) == sorted(hostile_keys)
    assert main(["split", "-n", "2", "-o", f"{tmp_path}/split/", hostile_shard]) == 0
    assert [sample["__key__"] for sample in ps.read_tar(f"{tmp_path}/split/")] == hostile_keys
    with tarfile.open(tmp_path / "up.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("../up.txt"))
    capfdbinary.readouterr()
    assert main(["proc", "-c", "true", str(tmp_path / "up.tar")]) == 1
    assert b"paths with '..' are refused" in capfdbinary.readouterr().err


@pytest.mark.parametrize(
    "words", [["cat", "-o"], ["sort", "-o"], ["split", "-o"], ["tsv", "--json", "-f", "bin", "-o"]]
)
def test_a_full_disk_is_one_line_and_leaves_nothing(words: list[str], tmp_path: Path) -> None:
    with ps.TarWriter(tmp_path / "in.tar") as writer:
        for number in range(40):
            writer.write({"__key__": f"{number}", "bin": os.urandom(100_000)})
    (tmp_path / "out").mkdir()

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words, str(tmp_path / "out" / "x.tar"), str(tmp_path / "in.tar")],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit_file_size,
    )
    assert done.returncode == 1
    assert done.stderr.lower().startswith("penstock: ")
    assert "file too large" in done.stderr.lower()
    assert str(tmp_path / "out" / "x.tar") in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_a_pipe_that_is_closed_early_is_not_an_error(tmp_path: Path, warm_python: str) -> None:
    with ps.TarWriter(tmp_path / "big.tar") as writer:
        for number in range(300):
            writer.write({"__key__": f"{number}", "bin": os.urandom(20_000)})
    script = """set -o pipefail
    "$1" -m penstock cat "$2" | head -c 10000 > /dev/null
    cat "$2" | "$1" -m penstock cat -c 2 > "$3" || test $? = 141
    "$1" -m penstock tsv --json -f bin "$2" | head -n 1 > /dev/null"""
    words = ["bash", "-c", script, "bash", warm_python, str(tmp_path / "big.tar"), str(tmp_path / "two.tar")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(ps.read_tar(str(tmp_path / "two.tar"))) == 2


def test_other_storages_are_read_and_written(shard: str, keys_of: KeysOf, capfdbinary: Capture) -> None:
    root = "memory://tools"
    assert main(["cat", shard, "-o", f"{root}/in.tar"]) == 0
    assert main(["split", "-n", "6", "-o", f"{root}/set/", f"{root}/in.tar"]) == 0
    assert main(["sort", "-r", f"{root}/set/*.tar"]) == 0
    assert keys_of(capfdbinary.readouterr().out) == numbered(*reversed(range(20)))
    assert main(["tsv", "-f", "cls", "-o", f"{root}/t.tsv", f"{root}/set/"]) == 0
    pattern = f"{root}/set/shard-{{000000..000003}}.tar"
    assert main(["proc", "-c", "rm sample.jpg", pattern, "-o", f"{root}/p/{{}}.tar"]) == 0
    samples = ps.read_tar(f"{root}/p/").take_all()
    assert [sample["__key__"] for sample in samples] == numbered(*range(20))
    assert set(samples[0]) == {"__key__", "__url__", "cls", "txt"}


@pytest.mark.parametrize("tool", ["cat", "sort", "split", "tsv", "proc"])
def test_a_key_that_leads_out_of_the_folder_is_refused_and_nothing_written(
    tool: str, tmp_path: Path, capfdbinary: Capture
) -> None:
    with tarfile.open(tmp_path / "in.tar", "w") as tar:
        for name in ("a.txt", "../../evil.txt"):
            tar.addfile(tarfile.TarInfo(name))
    options = ["-c", "true"] if tool == "proc" else []
    assert main([tool, *options, str(tmp_path / "in.tar"), "-o", str(tmp_path / "out" / "x")]) == 1
    assert b"paths with '..' are refused" in capfdbinary.readouterr().err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["in.tar"]


def test_a_file_list_that_cannot_be_read_or_is_empty_is_named(tmp_path: Path, capfdbinary: Capture) -> None:
    assert main(["cat", "-T", str(tmp_path / "gone.txt")]) == 1
    assert b"cannot read the list of shards: No such file or directory" in capfdbinary.readouterr().err
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(SystemExit) as exit_:
        main(["cat", "-T", str(tmp_path / "empty.txt")])
    assert exit_.value.code == 2
    assert b"empty.txt lists no shard" in capfdbinary.readouterr().err


@pytest.mark.parametrize(
    "words", [["cat", "-c", "2"], ["sort"], ["mix"], ["proc", "--command", "true"], ["tsv"], ["first", "-f", "cls"]]
)
def test_an_output_that_is_also_an_input_is_refused(
    words: list[str], shard: str, tmp_path: Path, capfdbinary: Capture
) -> None:
    before = Path(shard).read_bytes()
    (tmp_path / "link.tar").symlink_to(shard)
    for output in (shard, f"{tmp_path}/../{tmp_path.name}/in.tar", f"{tmp_path}/link.tar"):
        with pytest.raises(SystemExit) as exit:
            main([*words, shard, "-o", output])
        assert exit.value.code == 2
        assert b"in.tar is read, and would be replaced" in capfdbinary.readouterr().err
    assert Path(shard).read_bytes() == before


def test_a_fifo_and_a_link_are_written_through(shard: str, tmp_path: Path, keys_of: KeysOf) -> None:
    fifo, link, target = tmp_path / "fifo", tmp_path / "link.tar", tmp_path / "target.tar"
    os.mkfifo(fifo)
    target.write_bytes(b"old")
    link.symlink_to(target)
    for words in (["cat"], ["cat", "-z", "gz"], ["tsv", "-f", "cls"]):
        with subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE) as reader:
            assert main([*words, shard, "-o", str(fifo)]) == 0
            received = reader.communicate()[0]
        if words == ["cat"]:
            assert keys_of(received) == numbered(*range(20))
        assert received
        assert fifo.is_fifo()
    assert main(["cat", "-c", "1", shard, "-o", str(link)]) == 0
    assert link.is_symlink()
    assert keys_of(target.read_bytes()) == numbered(0)
    assert not (tmp_path / "fifo.index").exists()
