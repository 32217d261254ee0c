from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main

Capture = pytest.CaptureFixture[bytes]
KeysOf = Callable[[bytes], list[str]]


def numbered(*numbers: int) -> list[str]:
    return [f"k{number:02d}" for number in numbers]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-c", "3"], numbered(0, 1, 2)),
        (["-c", "0"], []),
        (["-s", "18"], numbered(18, 19)),
        (["-s", "2", "-c", "2"], numbered(2, 3)),
        (["--slice", "4:8"], numbered(4, 5, 6, 7)),
        (["--slice", "::7"], numbered(0, 7, 14)),
        (["--slice", ":9:4", "-s", "1", "-c", "2"], numbered(1, 5)),
        (["--where", "cls == 3"], numbered(6, 16)),
        (["--where", "cls < 5 and size('jpg') > 15", "-c", "2"], numbered(16, 17)),
        (["--rename", "{shard}/{number:03d}-{key}", "-c", "1"], ["in/000-k00"]),
    ],
)
def test_selected_samples_are_copied(
    options: list[str], expected: list[str], shard: str, keys_of: KeysOf, capfdbinary: Capture
) -> None:
    assert main(["cat", shard, *options]) == 0
    assert keys_of(capfdbinary.readouterr().out) == expected


def test_shards_may_be_named_by_patterns_and_lists(
    shard: str, tmp_path: Path, keys_of: KeysOf, capfdbinary: Capture
) -> None:
    assert main(["split", "-n", "7", "-o", str(tmp_path / "part"), shard]) == 0
    (tmp_path / "list.txt").write_text(f"{tmp_path}/part-000001.tar\n")
    for pattern in (f"{tmp_path}/part-{{000000..000002}}.tar", f"{tmp_path}/part-*.tar"):
        assert main(["cat", pattern]) == 0
        assert keys_of(capfdbinary.readouterr().out) == numbered(*range(20))
    assert main(["cat", f"{tmp_path}/part-000002.tar", "-v", "-T", str(tmp_path / "list.txt")]) == 0
    captured = capfdbinary.readouterr()
    assert keys_of(captured.out) == numbered(*range(14, 20), *range(7, 14))
    assert captured.err == b"13 samples\n"
    assert main(["cat", "-p", "3", f"{tmp_path}/part-*.tar"]) == 0
    assert sorted(keys_of(capfdbinary.readouterr().out)) == numbered(*range(20))


def test_fields_are_kept_or_dropped(shard: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.tar.gz")
    assert main(["cat", shard, "-f", "txt cls", "-x", "cls", "-o", out]) == 0
    assert gzip.decompress(Path(out).read_bytes())
    assert [set(sample) - {"__key__", "__url__"} for sample in ps.read_tar(out)] == [{"txt"}] * 20
    assert len(ps.read_tar(out)) == 20
    assert (tmp_path / "out.tar.gz.index").exists()


def test_a_copy_of_a_whole_shard_is_identical(shard: str, tmp_path: Path, capfdbinary: Capture) -> None:
    assert main(["cat", shard]) == 0
    assert capfdbinary.readouterr().out == Path(shard).read_bytes()
    assert main(["cat", shard, "-o", str(tmp_path / "out.tar")]) == 0
    assert (tmp_path / "out.tar").read_bytes() == Path(shard).read_bytes()
    assert main(["verify", str(tmp_path / "out.tar")]) == 0


def test_a_shuffle_buffer_loses_nothing_and_follows_the_seed(shard: str, keys_of: KeysOf, capfdbinary: Capture) -> None:
    orders = []
    for seed in ("1", "1", "2"):
        assert main(["cat", shard, "--shuffle", "5", "--seed", seed]) == 0
        orders.append(keys_of(capfdbinary.readouterr().out))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == numbered(*range(20)) != orders[0]


def test_a_repeated_key_is_refused_and_renaming_helps(shard: str, tmp_path: Path, capfdbinary: Capture) -> None:
    assert main(["cat", shard, shard]) == 1
    message = b"the key was written before; make keys unique with penstock cat --rename (shard: -, key: k00)"
    assert message in capfdbinary.readouterr().err
    assert main(["cat", shard, shard, "--rename", "{number}", "-o", str(tmp_path / "both.tar")]) == 0
    assert len(ps.read_tar(str(tmp_path / "both.tar"))) == 40
    assert main(["cat", shard, "--rename", "same", "-o", str(tmp_path / "same.tar")]) == 1
    assert not (tmp_path / "same.tar").exists()


def test_a_damaged_sample_stops_the_copy_or_is_skipped(shard: str, tmp_path: Path, capfdbinary: Capture) -> None:
    data = bytearray(Path(shard).read_bytes())
    data[5000] ^= 255
    (tmp_path / "bad.tar").write_bytes(data[:-2000])
    out = str(tmp_path / "out.tar")
    assert main(["cat", str(tmp_path / "bad.tar"), "-o", out]) == 1
    assert not Path(out).exists()
    assert b"bad.tar" in capfdbinary.readouterr().err
    assert main(["cat", str(tmp_path / "bad.tar"), "-o", out, "--on-error", "skip"]) == 0
    assert b"penstock: skipped: " in capfdbinary.readouterr().err
    assert len(ps.read_tar(out)) >= 15


@pytest.mark.parametrize("option", [["--where", "clss == 3"], ["-f", "clss"], ["-x", "clss"]])
def test_a_field_that_no_sample_has_is_an_error_and_leaves_no_archive(
    option: list[str], shard: str, tmp_path: Path, capfdbinary: Capture
) -> None:
    assert main(["cat", shard, *option, "-o", str(tmp_path / "out.tar")]) == 1
    assert b"no field 'clss'; the fields are cls, jpg, txt: did you mean cls?" in capfdbinary.readouterr().err
    assert not (tmp_path / "out.tar").exists()
