"""Remote shards yield the samples of the local ones, and fetch only what is needed."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import penstock as ps
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.manifest import MANIFEST
from penstock.formats.tar.index import INDEX_SUFFIX
from penstock.formats.tar.remote import index_url
from penstock.storage import Forbidden, Info, Memory

SAMPLES = [
    {"__key__": f"{i:04}", "bin": os.urandom(200 + 37 * i % 9000), "cls": i % 7, "txt": f"sample {i}"}
    for i in range(400)
]
COMPRESSED = ["gz", "zst"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards on disk, for tests to upload."""
    folder = tmp_path_factory.mktemp("remote")
    ps.from_items(SAMPLES).write_tar(str(folder), max_samples=90)
    return folder


@pytest.fixture
def target() -> Iterator[str]:
    """A folder in memory for one test."""
    url = f"memory://{uuid4().hex}"
    yield url
    for found in list(Memory().list(url)):
        Memory().delete(found.url)


def upload(folder: Path, url: str, without: tuple[str, ...] = ()) -> None:
    for file in sorted(folder.iterdir()):
        if file.is_file() and not file.name.endswith(without or ("no such ending",)):
            store(f"{url}/{file.name}", file.read_bytes())


def store(url: str, data: bytes) -> None:
    with Memory().put(url) as put:
        put.write(data)
        put.commit()


def stored(url: str) -> bytes:
    return b"".join(Memory().stream(url))


def contents(ds: ps.Dataset) -> list[tuple[str, bytes, bytes]]:
    return [(sample["__key__"], sample["bin"], sample["cls"]) for sample in ds]


@dataclass(frozen=True)
class Counting(Memory):
    """Memory that logs its reads."""

    def read(self, url: str, start: int, stop: int, **kwargs: Any) -> Any:
        LOG.append((url.rpartition("/")[2], stop - start))
        return super().read(url, start, stop, **kwargs)


LOG: list[tuple[str, int]] = []


@pytest.mark.parametrize("without", [(), (INDEX_SUFFIX,), (MANIFEST,), (INDEX_SUFFIX, MANIFEST)], ids=str)
@pytest.mark.parametrize("shuffled", [False, True])
def test_remote_samples_equal_those_of_the_local_shards(
    folder: Path, target: str, shuffled: bool, without: tuple[str, ...]
) -> None:
    upload(folder, target, without)
    local, remote = ps.read_tar(str(folder)), ps.read_tar(target)
    if shuffled:
        local, remote = local.shuffle(), remote.shuffle()
    assert contents(remote) == contents(local)
    assert remote.count() == len(SAMPLES)
    assert remote[123]["__key__"] == local[123]["__key__"]


@pytest.mark.parametrize("without", [(), (INDEX_SUFFIX,), (MANIFEST,)], ids=str)
def test_the_length_comes_from_the_manifest_or_from_the_indexes(
    folder: Path, target: str, without: tuple[str, ...]
) -> None:
    upload(folder, target, without)
    LOG.clear()
    assert len(ps.read_tar(target, storage=Counting())) == len(SAMPLES)
    assert not [name for name, _ in LOG if name.endswith(".tar")]


def test_no_shard_is_fetched_just_for_the_length(folder: Path, target: str) -> None:
    upload(folder, target, (INDEX_SUFFIX, MANIFEST))
    LOG.clear()
    with pytest.raises(TypeError, match=r"count\(\)"):
        len(ps.read_tar(target, storage=Counting()))
    assert not [name for name, _ in LOG if name.endswith(".tar")]


def test_a_state_of_local_shards_restores_on_remote_ones(folder: Path, target: str) -> None:
    upload(folder, target)
    local, remote = (ps.read_tar(url).shuffle().batched(16) for url in (str(folder), target))
    loader = local.loader(0, 1)
    run = iter(loader)
    for _ in range(7):
        next(run)
    other = remote.loader(0, 1)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [batch["__key__"] for batch in other] == [batch["__key__"] for batch in run]


def test_only_wanted_fields_are_fetched(tmp_path: Path, target: str) -> None:
    large = [{"__key__": f"{i:02}", "bin": os.urandom(700_000), "cls": i} for i in range(20)]
    ps.from_items(large).write_tar(str(tmp_path), max_samples=10)
    upload(tmp_path, target)
    LOG.clear()
    ds = ps.read_tar(target, storage=Counting()).select("cls")
    assert ds[15]["cls"] == b"15"
    assert sum(size for _, size in LOG) <= 2 << 20, "of 14 MB"
    assert {name for name, _ in LOG} == {"shard-000001.tar"}


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_shards_are_fetched_whole(tmp_path: Path, target: str, kind: Any) -> None:
    ps.from_items(SAMPLES[:100]).write_tar(str(tmp_path), max_samples=40, compress=kind)
    upload(tmp_path, target)
    assert [key for key, _, _ in contents(ps.read_tar(target))] == [sample["__key__"] for sample in SAMPLES[:100]]


def test_a_damaged_byte_is_found_by_the_checksums_of_the_index(folder: Path, target: str) -> None:
    upload(folder, target)
    url = f"{target}/shard-000001.tar"
    damaged = bytearray(stored(url))
    damaged[len(damaged) // 2] ^= 4
    store(url, bytes(damaged))
    with pytest.raises(DataError, match=r"not those that were stored.*shard-000001\.tar"):
        contents(ps.read_tar(target))


def test_a_damaged_shard_without_an_index_is_found_by_its_checksum(folder: Path, target: str) -> None:
    upload(folder, target, (INDEX_SUFFIX,))
    url = f"{target}/shard-000003.tar"
    damaged = bytearray(stored(url))
    damaged[700] ^= 4
    store(url, bytes(damaged))
    with pytest.raises(DataError, match=r"checksum.*shard-000003\.tar"):
        contents(ps.read_tar(target))


@dataclass(frozen=True)
class Changing(Memory):
    """Memory whose shards are replaced as soon as their size and tag have been read."""

    def info(self, url: str) -> Info:
        found = super().info(url)
        store(url, stored(url)[:-512] + bytes(512))
        return found


def test_a_shard_that_changes_is_an_error_instead_of_a_mixture(folder: Path, target: str) -> None:
    upload(folder, target)
    with pytest.raises(StorageError, match=r"changed while it was being read"):
        contents(ps.read_tar(target, storage=Changing()))


def test_a_missing_shard_is_named(folder: Path, target: str) -> None:
    upload(folder, target)
    Memory().delete(f"{target}/shard-000002.tar")
    with pytest.raises(StorageError, match=r"shard-000002\.tar"):
        contents(ps.read_tar(f"{target}/shard-{{000000..000004}}.tar"))
    with pytest.raises(StorageError, match=r"matches no files|no such"):
        contents(ps.read_tar(f"{target}/elsewhere/"))


def test_a_cache_serves_the_second_epoch_from_disk(folder: Path, target: str, tmp_path: Path) -> None:
    upload(folder, target)
    ds = ps.read_tar(target, storage=Counting(), cache=ps.Cache(str(tmp_path), max_bytes="100MB")).shuffle()
    want = contents(ps.read_tar(str(folder)).shuffle().epoch(0))
    assert contents(ds.epoch(0)) == want
    LOG.clear()
    assert contents(ds.epoch(0)) == want
    assert LOG == []


def test_a_remote_dataset_pickles_with_its_storage(folder: Path, target: str) -> None:
    upload(folder, target)
    ds = ps.read_tar(target, storage=Memory()).shuffle()
    assert contents(pickle.loads(pickle.dumps(ds)).epoch(2)) == contents(ds.epoch(2))


def test_no_thread_is_left_after_an_early_end(folder: Path, target: str) -> None:
    upload(folder, target)
    run = iter(ps.read_tar(target).shuffle().map(lambda sample: sample, workers=2))
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]


def test_a_damaged_sample_can_be_skipped(folder: Path, target: str) -> None:
    upload(folder, target)
    url = f"{target}/shard-000001.tar"
    damaged = bytearray(stored(url))
    damaged[len(damaged) // 2] ^= 4
    store(url, bytes(damaged))
    got = [key for key, _, _ in contents(ps.read_tar(target).on_error("skip"))]
    assert set(got) < {sample["__key__"] for sample in SAMPLES}
    assert set(got) >= {sample["__key__"] for number, sample in enumerate(SAMPLES) if not 90 <= number < 180}


def test_damaged_bytes_are_not_cached(folder: Path, target: str, tmp_path: Path) -> None:
    upload(folder, target)
    cache = ps.Cache(str(tmp_path), max_bytes="100MB")
    FLIPS.append(1)
    want = contents(ps.read_tar(str(folder)))
    assert contents(ps.read_tar(target, storage=Flipping(), cache=cache)) == want
    assert FLIPS == []
    assert contents(ps.read_tar(target, storage=Flipping(), cache=cache)) == want


FLIPS: list[int] = []


@dataclass(frozen=True)
class Flipping(Memory):
    """Memory whose first reads are damaged."""

    def read(self, url: str, start: int, stop: int, **kwargs: Any) -> Any:
        got = super().read(url, start, stop, **kwargs)
        if url.endswith(".tar") and FLIPS:
            FLIPS.pop()
            into = kwargs.get("into")
            if into is None:
                return bytes([got[0] ^ 1]) + bytes(got[1:])
            into[0] ^= 1
        return got


@dataclass(frozen=True)
class Guarded(Memory):
    """Memory that forbids everything but shards, whether it exists or not."""

    def stream(self, url: str) -> Iterator[bytes]:
        if not url.endswith(".tar"):
            raise Forbidden("not for you", url)
        return super().stream(url)


def test_shards_are_read_if_their_indexes_and_manifest_are_forbidden(folder: Path, target: str) -> None:
    upload(folder, target)
    remote = ps.read_tar(f"{target}/shard-00000{{0..4}}.tar", storage=Guarded())
    assert contents(remote) == contents(ps.read_tar(str(folder)))


def test_a_folder_without_a_shard_that_its_manifest_names_is_refused(folder: Path, target: str) -> None:
    upload(folder, target)
    Memory().delete(f"{target}/shard-000003.tar")
    with pytest.raises(StorageError, match=r"the manifest names a shard that does not exist.*shard-000003\.tar"):
        contents(ps.read_tar(target))


def test_a_url_shows_neither_password_nor_query(folder: Path) -> None:
    ds = ps.read_tar("https://user:secret@host/a.tar?sig=secret")
    assert "secret" not in repr(ds) + ds.explain()


def test_the_index_url_keeps_the_query_of_a_signed_url() -> None:
    assert index_url("https://host/a.tar?sig=1") == "https://host/a.tar.index?sig=1"
    assert index_url("s3://bucket/a?.tar") == "s3://bucket/a?.tar.index"


def test_one_cache_is_for_one_kind_of_url(tmp_path: Path) -> None:
    ds = ps.read_tar(["memory://a/b.tar", "https://host/a.tar"], cache=ps.Cache(str(tmp_path)))
    with pytest.raises(PlanError, match=r"memory, https"):
        ds.first()


@dataclass(frozen=True, slots=True)
class _InPairs(Memory):
    """A storage that answers for the last shards only when two of them are asked for at a time."""

    asked: list[str] = field(default_factory=list, compare=False)
    pair: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=30), compare=False)

    def info(self, url: str) -> Info:
        if url.endswith(".tar"):
            self.asked.append(url)
            if url[-6:-4] >= "40":
                self.pair.wait()
        return Memory.info(self, url)


@pytest.mark.parametrize("stored", ["manifest", "indexes"])
@pytest.mark.parametrize("order", ["in order", "all"])
def test_many_small_shards_are_opened_together_and_once(tmp_path: Path, target: str, stored: str, order: str) -> None:
    ps.from_items(SAMPLES[:120]).write_tar(str(tmp_path), max_samples=2)
    upload(tmp_path, target, without=(MANIFEST,) if stored == "indexes" else ())
    storage = _InPairs()
    ds = ps.read_tar(f"{target}/shard-{{000000..000059}}.tar", storage=storage)
    found = {sample["__key__"] for sample in (ds.shuffle(all=True) if order == "all" else ds)}
    assert found == {sample["__key__"] for sample in SAMPLES[:120]}
    assert len(storage.asked) == len(set(storage.asked)) == 60
