from __future__ import annotations

import gzip
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.tarstream import sort as sorting

Capture = pytest.CaptureFixture[bytes]
KeysOf = Callable[[bytes], list[str]]


def numbered(*numbers: int) -> list[str]:
    return [f"k{number:02d}" for number in numbers]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], numbered(*range(20))),
        (["-r"], numbered(*reversed(range(20)))),
        (["-s", "cls", "-S", "int", "-c", "12"], numbered(9, 8, 7, 6, 5, 4, 3, 2, 11, 1, 10, 0)),
        (["-s", "txt", "--where", "cls == 9"], numbered(0, 10)),
    ],
)
@pytest.mark.parametrize("records", [200_000, 3], ids=["in memory", "in merged runs"])
def test_the_order_is_by_key_field_or_number_and_stable(
    options: list[str],
    expected: list[str],
    records: int,
    shard: str,
    monkeypatch: pytest.MonkeyPatch,
    keys_of: KeysOf,
    capfdbinary: Capture,
) -> None:
    monkeypatch.setattr(sorting, "_RUN_RECORDS", records)
    assert main(["sort", shard, *options]) == 0
    keys = keys_of(capfdbinary.readouterr().out)
    if "cls" in options:
        labels = [9 - int(key[1:]) % 10 for key in keys]
        assert labels == sorted(labels)
        assert len(keys) == 12
        expected = sorted(keys, key=lambda key: (9 - int(key[1:]) % 10, key))
    assert keys == expected


def test_sorting_a_pipe_or_a_compressed_shard_gives_the_same_as_sorting_the_file(
    shard: str, tmp_path: Path, pipe: Callable[..., bytes], keys_of: KeysOf, capfdbinary: Capture
) -> None:
    assert main(["shuffle", "--seed", "3", shard]) == 0
    shuffled = capfdbinary.readouterr().out
    assert sorted(keys_of(shuffled)) == numbered(*range(20)) != keys_of(shuffled)
    assert pipe(gzip.compress(shuffled), "sort", "-t", str(tmp_path)) == Path(shard).read_bytes()
    assert pipe(gzip.compress(Path(shard).read_bytes()), "shuffle", "--seed", "3") == shuffled


@pytest.mark.parametrize("field", ["none", "txt"])
def test_a_sample_that_cannot_be_compared_is_named(field: str, shard: str, capfdbinary: Capture) -> None:
    assert main(["sort", shard, "-s", field, "-S", "float"]) == 1
    assert b"key: k00" in capfdbinary.readouterr().err


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_archive_whose_members_are_not_sorted_is_sorted(on_error: str, tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "a.cls", "b.cls"):
        (tmp_path / name).write_text("1")
    unsorted = tmp_path / "unsorted.tar"
    subprocess.run(["tar", "-C", tmp_path, "-cf", unsorted, "b.txt", "a.txt", "a.cls", "b.cls"], check=True)
    assert main(["sort", str(unsorted), "--on-error", on_error, "-o", str(tmp_path / "sorted.tar")]) == 0
    samples = [(sample["__key__"], sorted(sample)[2:]) for sample in ps.read_tar(tmp_path / "sorted.tar")]
    assert samples == [("a", ["cls", "txt"]), ("b", ["cls", "txt"])]
