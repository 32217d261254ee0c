"""All kinds of damage are found, and intact shards have no problems."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

import penstock as ps
from penstock.blobs.checksums import CELL
from penstock.errors import DataError
from penstock.formats.manifest import ShardEntry, read_manifest, write_manifest
from penstock.formats.tar.walker import iter_samples
from penstock.inspection.verify import FileToVerify, shards_to_verify, verify_shard
from penstock.plan import Fields
from penstock.storage import Memory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    items = [{"__key__": f"k{n:02d}", "bin": bytes([n]) * 200_000, "cls": n} for n in range(20)]
    ps.from_items(items).write_tar(str(tmp_path / "out"), max_samples=8)
    return tmp_path / "out"


def problems(*urls: str | Path) -> list[str]:
    return [str(problem) for file in shards_to_verify(tuple(map(str, urls))) for problem in verify_shard(file)]


def check_problems(folder: Path, *expected: str) -> None:
    """Check that the folder has exactly these problems; each is a part of the message."""
    found = problems(folder)
    assert found
    for problem, part in zip(found, expected, strict=True):
        assert part in problem


def test_intact_shards_have_no_problems(folder: Path) -> None:
    assert problems(folder) == []
    assert problems(folder / "shard-000001.tar") == []
    assert problems(f"{folder}/shard-{{000000..000002}}.tar") == []


def test_a_flipped_bit_is_found_and_located(folder: Path) -> None:
    path = folder / "shard-000000.tar"
    data = bytearray(path.read_bytes())
    data[CELL + 5000] ^= 4
    path.write_bytes(data)
    check_problems(folder, "SHA-256", "bytes 1,048,576 to ")


def test_a_truncated_shard_is_found_with_what_it_lost(folder: Path) -> None:
    path = folder / "shard-000001.tar"
    path.write_bytes(path.read_bytes()[:1_000_000])
    found = "\n".join(problems(folder))
    expected = (
        "the manifest says 1,614,848 bytes, but it has 1,000,000",
        "truncated",
        "the manifest says 8 samples, but the shard has 4 good ones",
        "other keys",
    )
    for part in expected:
        assert part in found
    assert "shard-000000" not in found


def test_a_wrong_count_is_found(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    write_manifest(folder, [manifest.shards[0]._replace(samples=9)])
    check_problems(folder, "the manifest says 9 samples, but the shard has 8 good ones")


def test_a_repeated_key_is_found(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("a.txt", "b.txt", "a.txt"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    found = problems(tmp_path / "a.tar")
    assert len(found) == 1
    assert "sample 2 ('a')" in found[0]


def test_missing_unlisted_and_unindexed_shards_are_found(folder: Path) -> None:
    (folder / "shard-000000.tar").unlink()
    (folder / "shard-000001.tar.index").unlink()
    (folder / "stray.tar").write_bytes(bytes(1024))
    check_problems(folder, "in the manifest but does not exist", "its index is missing", "it is not in the manifest")


def test_a_damaged_or_foreign_index_is_found(folder: Path) -> None:
    (folder / "shard-000000.tar.index").write_bytes(b"PSTKIX02 nonsense")
    (folder / "shard-000001.tar.index").write_bytes((folder / "shard-000002.tar.index").read_bytes())
    found = "\n".join(problems(folder))
    assert "shard-000000.tar: the index is damaged" in found
    assert "shard-000001.tar: its index lists other keys than the shard has" in found
    assert "shard-000002" not in found


def test_remote_shards_are_verified(folder: Path) -> None:
    url = "memory://checking/out"
    for path in folder.iterdir():
        with Memory().put(f"{url}/{path.name}") as upload:
            upload.write(path.read_bytes())
            upload.commit()
    assert problems(url) == []
    Memory().delete(f"{url}/shard-000001.tar")
    assert problems(url) == [f"{url}/shard-000001.tar: it is in the manifest but does not exist"]


def test_every_missing_shard_of_a_manifest_is_a_problem(tmp_path: Path) -> None:
    write_manifest(tmp_path, [ShardEntry(f"{n}.tar", 1, 1, "") for n in range(3)])
    assert len(problems(tmp_path)) == 3


@pytest.mark.parametrize(("size", "lost"), [(100_000, False), (3 << 20, True)])
def test_a_shard_whose_second_half_is_zeros_is_reported(
    tmp_path: Path, size: int, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a power cut: the file has its size, but the end was never written."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for number in range(10):
            info = tarfile.TarInfo(f"k{number}.txt")
            info.size = size // 10
            archive.addfile(info, io.BytesIO(b"x" * info.size))
    data = bytearray(path.read_bytes())
    half = data.index(b"k5.txt")
    data[half:] = bytes(len(data) - half)
    path.write_bytes(data)
    (problem,) = verify_shard(FileToVerify(str(path), None, False))
    assert "samples may be lost" in problem.problem
    ds = ps.read_tar(path)
    with path.open("rb") as stream:
        walked = list(iter_samples(stream, "a.tar", Fields()))
    if not lost:
        assert [sample["__key__"] for sample in ds] == [f"k{n}" for n in range(5)]
        assert len(walked) == 5
        assert [record.message.count("samples may be lost") for record in caplog.records] == [1, 1]  # each reader once
        return
    with pytest.raises(DataError, match="last good key: 'k4'"):
        list(ds)
    assert len(list(ds.on_error("skip"))) == 5
    assert "last good key: 'k4'" in str(walked[-1][1])
