"""Damage of every kind is found, all of it, and nothing else."""

from __future__ import annotations

import io
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.blobs.checksums import CELL
from penstock.errors import StorageError
from penstock.formats.manifest import ShardEntry, read_manifest, write_manifest
from penstock.formats.tar import load_index
from penstock.formats.tar.index import Index, read_beside
from penstock.inspection.verify import listed, make_index, put_index, verify
from penstock.storage import Memory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    items = [{"__key__": f"k{n:02d}", "bin": bytes([n]) * 200_000, "cls": n} for n in range(20)]
    ps.from_items(items).write_tar(str(tmp_path / "out"), max_samples=8)
    return tmp_path / "out"


def wrong(*urls: str | Path) -> list[str]:
    return [str(problem) for shard in listed(tuple(map(str, urls))) for problem in verify(shard)]


def only(folder: Path, *words: str) -> None:
    found = wrong(folder)
    assert found
    for problem, word in zip(found, words, strict=True):
        assert word in problem


def test_whole_shards_have_nothing_wrong(folder: Path) -> None:
    assert wrong(folder) == []
    assert wrong(folder / "shard-000001.tar") == []
    assert wrong(f"{folder}/shard-{{000000..000002}}.tar") == []


def test_a_flipped_bit_is_found_and_told_where(folder: Path) -> None:
    path = folder / "shard-000000.tar"
    data = bytearray(path.read_bytes())
    data[CELL + 5000] ^= 4
    path.write_bytes(data)
    only(folder, "SHA-256", "bytes 1,048,576 to ")


def test_a_truncated_shard_is_told_with_what_it_lost(folder: Path) -> None:
    path = folder / "shard-000001.tar"
    path.write_bytes(path.read_bytes()[:1_000_000])
    found = "\n".join(wrong(folder))
    words = (
        "the manifest says 1,614,848 bytes, it has 1,000,000",
        "truncated",
        "the manifest says 8 samples, it holds 4 good ones",
        "other keys",
    )
    for word in words:
        assert word in found
    assert "shard-000000" not in found


def test_a_wrong_count_is_found(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    write_manifest(folder, [manifest.shards[0]._replace(samples=9)])
    only(folder, "the manifest says 9 samples, it holds 8 good ones")


def test_a_key_that_comes_twice_is_found(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("a.txt", "b.txt", "a.txt"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    found = wrong(tmp_path / "a.tar")
    assert len(found) == 1
    assert "sample 2 ('a')" in found[0]


def test_missing_and_stray_and_unindexed_shards_are_found(folder: Path) -> None:
    (folder / "shard-000000.tar").unlink()
    (folder / "shard-000001.tar.index").unlink()
    (folder / "stray.tar").write_bytes(bytes(1024))
    only(folder, "in the manifest and not there", "its index is missing", "it is not in the manifest")


def test_a_damaged_or_foreign_index_is_found(folder: Path) -> None:
    (folder / "shard-000000.tar.index").write_bytes(b"PSTKIX02 nonsense")
    (folder / "shard-000001.tar.index").write_bytes((folder / "shard-000002.tar.index").read_bytes())
    found = "\n".join(wrong(folder))
    assert "shard-000000.tar: the index is damaged" in found
    assert "shard-000001.tar: its index lists other keys than it holds" in found
    assert "shard-000002" not in found


def test_what_lies_elsewhere_is_verified_too(folder: Path) -> None:
    url = "memory://checking/out"
    for path in folder.iterdir():
        with Memory().put(f"{url}/{path.name}") as upload:
            upload.write(path.read_bytes())
            upload.commit()
    assert wrong(url) == []
    Memory().delete(f"{url}/shard-000001.tar")
    assert wrong(url) == [f"{url}/shard-000001.tar: it is in the manifest and not there"]


def foreign(path: Path) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for number in range(5):
            for name, data in ((f"{number}.jpg", bytes(number * 300_000)), (f"{number}.cls", b"1")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def crcs(data: bytes) -> list[int]:
    return [zlib.crc32(data[at : at + CELL]) for at in range(0, len(data), CELL)]


def test_the_index_of_a_foreign_shard_has_a_grid(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a.tar")
    assert wrong(path) == []
    index = make_index(str(path))
    assert index.checksums.tolist() == crcs(path.read_bytes())
    put_index(str(path), index)
    beside = read_beside(str(path))
    assert beside is not None
    assert beside.checksums.tolist() == index.checksums.tolist()
    assert load_index(str(path)).samples == 5
    assert wrong(path) == []


def test_a_shard_elsewhere_is_indexed_there(tmp_path: Path) -> None:
    data, url = foreign(tmp_path / "a.tar").read_bytes(), "memory://checking/a.tar"
    with Memory().put(url) as upload:
        upload.write(data)
        upload.commit()
    put_index(url, make_index(url))
    index = Index.from_bytes(b"".join(Memory().stream(url + ".index")))
    assert (index.samples, index.shard_size, index.checksums.tolist()) == (5, len(data), crcs(data))
    assert len(ps.read_tar(url)) == 5


def test_an_index_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a.tar")
    (tmp_path / "a.tar.index").mkdir()
    with pytest.raises(StorageError, match="the index cannot be written beside it"):
        put_index(str(path), make_index(str(path)))


def test_a_manifest_of_shards_that_are_all_gone_tells_of_each(tmp_path: Path) -> None:
    write_manifest(tmp_path, [ShardEntry(f"{n}.tar", 1, 1, "") for n in range(3)])
    assert len(wrong(tmp_path)) == 3


def test_the_grid_of_what_we_write_is_that_of_the_file(folder: Path) -> None:
    for path in folder.glob("*.tar"):
        assert np.array_equal(load_index(str(path)).checksums, crcs(path.read_bytes()))
