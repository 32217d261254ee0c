from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.blobs.checksums import CELL
from penstock.errors import StorageError
from penstock.formats.manifest import ShardEntry
from penstock.formats.tar import load_index
from penstock.formats.tar.index import Index, read_beside
from penstock.formats.tar.indexing import build_index, make_manifest_entry, store_index
from penstock.storage import Memory


def write_foreign_shard(path: Path) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for number in range(5):
            for name, data in ((f"{number}.jpg", bytes(number * 300_000)), (f"{number}.cls", b"1")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def cell_checksums(data: bytes) -> list[int]:
    return [zlib.crc32(data[start : start + CELL]) for start in range(0, len(data), CELL)]


def test_the_index_of_a_foreign_shard_has_checksums(tmp_path: Path) -> None:
    path = write_foreign_shard(tmp_path / "a.tar")
    index = build_index(str(path))
    assert index.checksums.tolist() == cell_checksums(path.read_bytes())
    store_index(str(path), index)
    beside = read_beside(str(path))
    assert beside is not None
    assert beside.checksums.tolist() == index.checksums.tolist()
    assert load_index(str(path)).samples == 5


def test_a_remote_shard_gets_its_index_beside_it(tmp_path: Path) -> None:
    data, url = write_foreign_shard(tmp_path / "a.tar").read_bytes(), "memory://indexing/a.tar"
    with Memory().put(url) as upload:
        upload.write(data)
        upload.commit()
    store_index(url, build_index(url))
    index = Index.from_bytes(b"".join(Memory().stream(url + ".index")))
    assert (index.samples, index.shard_size, index.checksums.tolist()) == (5, len(data), cell_checksums(data))
    assert len(ps.read_tar(url)) == 5


def test_an_index_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    path = write_foreign_shard(tmp_path / "a.tar")
    (tmp_path / "a.tar.index").mkdir()
    with pytest.raises(StorageError, match="the index cannot be written beside it"):
        store_index(str(path), build_index(str(path)))


def test_shards_that_we_write_have_the_checksums_of_their_files(tmp_path: Path) -> None:
    items = [{"__key__": f"k{n:02d}", "bin": bytes([n]) * 200_000} for n in range(20)]
    ps.from_items(items).write_tar(str(tmp_path), max_samples=8)
    for path in tmp_path.glob("*.tar"):
        assert np.array_equal(load_index(str(path)).checksums, cell_checksums(path.read_bytes()))


def test_a_manifest_entry_has_the_checksum_and_leaves_an_index_beside_the_shard(tmp_path: Path) -> None:
    path = write_foreign_shard(tmp_path / "a.tar")
    data = path.read_bytes()
    entry = ShardEntry("a.tar", 5, len(data), hashlib.sha256(data).hexdigest())
    assert make_manifest_entry(str(path)) == entry
    beside = Path(f"{path}.index")
    before = beside.read_bytes()
    assert make_manifest_entry(str(path)) == entry
    assert beside.read_bytes() == before


def test_a_missing_shard_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such"):
        build_index(str(tmp_path / "a.tar"))
