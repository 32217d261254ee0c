"""Shards that are not files of this machine."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import penstock as ps
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.manifest import MANIFEST
from penstock.formats.tar.index import SUFFIX
from penstock.formats.tar.remote import beside
from penstock.storage import Forbidden, Info, Memory

SAMPLES = [
    {"__key__": f"{i:04}", "bin": os.urandom(200 + 37 * i % 9000), "cls": i % 7, "txt": f"sample {i}"}
    for i in range(400)
]
COMPRESSED = ["gz", "zst"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards on disk, to be uploaded in several ways."""
    place = tmp_path_factory.mktemp("remote")
    ps.from_items(SAMPLES).write_tar(str(place), max_samples=90)
    return place


@pytest.fixture
def place() -> Iterator[str]:
    """A folder in memory of the test's own."""
    url = f"memory://{uuid4().hex}"
    yield url
    for one in list(Memory().list(url)):
        Memory().delete(one.url)


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


def seen(ds: ps.Dataset) -> list[tuple[str, bytes, bytes]]:
    return [(sample["__key__"], sample["bin"], sample["cls"]) for sample in ds]


@dataclass(frozen=True)
class Counting(Memory):
    """Memory that remembers what was asked of it."""

    def read(self, url: str, start: int, stop: int, **kwargs: Any) -> Any:
        LOG.append((url.rpartition("/")[2], stop - start))
        return super().read(url, start, stop, **kwargs)


LOG: list[tuple[str, int]] = []


@pytest.mark.parametrize("without", [(), (SUFFIX,), (MANIFEST,), (SUFFIX, MANIFEST)], ids=str)
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_samples_are_those_of_the_local_shards(
    folder: Path, place: str, shuffled: bool, without: tuple[str, ...]
) -> None:
    upload(folder, place, without)
    here, there = ps.read_tar(str(folder)), ps.read_tar(place)
    if shuffled:
        here, there = here.shuffle(), there.shuffle()
    assert seen(there) == seen(here)
    assert there.count() == len(SAMPLES)
    assert there[123]["__key__"] == here[123]["__key__"]


@pytest.mark.parametrize("without", [(), (SUFFIX,), (MANIFEST,)], ids=str)
def test_the_length_comes_from_the_manifest_or_from_the_indexes(
    folder: Path, place: str, without: tuple[str, ...]
) -> None:
    upload(folder, place, without)
    LOG.clear()
    assert len(ps.read_tar(place, storage=Counting())) == len(SAMPLES)
    assert not [name for name, _ in LOG if name.endswith(".tar")]


def test_no_shard_is_fetched_just_for_the_length(folder: Path, place: str) -> None:
    upload(folder, place, (SUFFIX, MANIFEST))
    LOG.clear()
    with pytest.raises(TypeError, match=r"count\(\)"):
        len(ps.read_tar(place, storage=Counting()))
    assert not [name for name, _ in LOG if name.endswith(".tar")]


def test_states_go_from_local_to_remote_and_back(folder: Path, place: str) -> None:
    upload(folder, place)
    here, there = (ps.read_tar(url).shuffle().batched(16) for url in (str(folder), place))
    loader = here.loader(0, 1)
    run = iter(loader)
    for _ in range(7):
        next(run)
    other = there.loader(0, 1)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [batch["__key__"] for batch in other] == [batch["__key__"] for batch in run]


def test_only_what_is_wanted_is_fetched(tmp_path: Path, place: str) -> None:
    large = [{"__key__": f"{i:02}", "bin": os.urandom(700_000), "cls": i} for i in range(20)]
    ps.from_items(large).write_tar(str(tmp_path), max_samples=10)
    upload(tmp_path, place)
    LOG.clear()
    ds = ps.read_tar(place, storage=Counting()).select("cls")
    assert ds[15]["cls"] == b"15"
    assert sum(size for _, size in LOG) <= 2 << 20, "of 14 MB"
    assert {name for name, _ in LOG} == {"shard-000001.tar"}


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_shards_are_fetched_whole(tmp_path: Path, place: str, kind: Any) -> None:
    ps.from_items(SAMPLES[:100]).write_tar(str(tmp_path), max_samples=40, compress=kind)
    upload(tmp_path, place)
    assert [key for key, _, _ in seen(ps.read_tar(place))] == [sample["__key__"] for sample in SAMPLES[:100]]


def test_a_damaged_byte_is_found_by_the_checksums_of_the_index(folder: Path, place: str) -> None:
    upload(folder, place)
    url = f"{place}/shard-000001.tar"
    damaged = bytearray(stored(url))
    damaged[len(damaged) // 2] ^= 4
    store(url, bytes(damaged))
    with pytest.raises(DataError, match=r"not those that were stored.*shard-000001\.tar"):
        seen(ps.read_tar(place))


def test_a_damaged_shard_without_an_index_is_found_by_its_checksum(folder: Path, place: str) -> None:
    upload(folder, place, (SUFFIX,))
    url = f"{place}/shard-000003.tar"
    damaged = bytearray(stored(url))
    damaged[700] ^= 4
    store(url, bytes(damaged))
    with pytest.raises(DataError, match=r"checksum.*shard-000003\.tar"):
        seen(ps.read_tar(place))


@dataclass(frozen=True)
class Moving(Memory):
    """Memory in which shards are replaced by others as soon as somebody has looked at them."""

    def info(self, url: str) -> Info:
        found = super().info(url)
        store(url, stored(url)[:-512] + bytes(512))
        return found


def test_a_shard_that_changes_is_an_error_and_no_mixture(folder: Path, place: str) -> None:
    upload(folder, place)
    with pytest.raises(StorageError, match=r"changed while it was being read"):
        seen(ps.read_tar(place, storage=Moving()))


def test_a_missing_shard_is_named(folder: Path, place: str) -> None:
    upload(folder, place)
    Memory().delete(f"{place}/shard-000002.tar")
    with pytest.raises(StorageError, match=r"shard-000002\.tar"):
        seen(ps.read_tar(f"{place}/shard-{{000000..000004}}.tar"))
    with pytest.raises(StorageError, match=r"nothing|no such"):
        seen(ps.read_tar(f"{place}/elsewhere/"))


def test_a_cache_serves_the_second_epoch_from_disk(folder: Path, place: str, tmp_path: Path) -> None:
    upload(folder, place)
    ds = ps.read_tar(place, storage=Counting(), cache=ps.Cache(str(tmp_path), max_bytes="100MB")).shuffle()
    want = seen(ps.read_tar(str(folder)).shuffle().epoch(0))
    assert seen(ds.epoch(0)) == want
    LOG.clear()
    assert seen(ds.epoch(0)) == want
    assert LOG == []


def test_a_remote_dataset_pickles_with_its_storage(folder: Path, place: str) -> None:
    upload(folder, place)
    ds = ps.read_tar(place, storage=Memory()).shuffle()
    assert seen(pickle.loads(pickle.dumps(ds)).epoch(2)) == seen(ds.epoch(2))


def test_nothing_goes_on_in_the_background_after_an_early_end(folder: Path, place: str) -> None:
    upload(folder, place)
    run = iter(ps.read_tar(place).shuffle().map(lambda sample: sample, workers=2))
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]


def test_a_damaged_sample_is_skipped_where_that_is_asked_for(folder: Path, place: str) -> None:
    upload(folder, place)
    url = f"{place}/shard-000001.tar"
    damaged = bytearray(stored(url))
    damaged[len(damaged) // 2] ^= 4
    store(url, bytes(damaged))
    got = [key for key, _, _ in seen(ps.read_tar(place).on_error("skip"))]
    assert set(got) < {sample["__key__"] for sample in SAMPLES}
    assert set(got) >= {sample["__key__"] for number, sample in enumerate(SAMPLES) if not 90 <= number < 180}


def test_damage_is_not_kept_by_a_cache(folder: Path, place: str, tmp_path: Path) -> None:
    upload(folder, place)
    cache = ps.Cache(str(tmp_path), max_bytes="100MB")
    FLIPS.append(1)
    want = seen(ps.read_tar(str(folder)))
    assert seen(ps.read_tar(place, storage=Flipping(), cache=cache)) == want
    assert FLIPS == []
    assert seen(ps.read_tar(place, storage=Flipping(), cache=cache)) == want


FLIPS: list[int] = []


@dataclass(frozen=True)
class Flipping(Memory):
    """Memory whose first answers are damaged on the way."""

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
    """Memory that does not say whether what may not be read is there."""

    def stream(self, url: str) -> Iterator[bytes]:
        if not url.endswith(".tar"):
            raise Forbidden("not for you", url)
        return super().stream(url)


def test_shards_are_read_without_what_may_not_be_read_beside_them(folder: Path, place: str) -> None:
    upload(folder, place)
    there = ps.read_tar(f"{place}/shard-00000{{0..4}}.tar", storage=Guarded())
    assert seen(there) == seen(ps.read_tar(str(folder)))


def test_a_folder_without_a_shard_that_its_manifest_names_is_refused(folder: Path, place: str) -> None:
    upload(folder, place)
    Memory().delete(f"{place}/shard-000003.tar")
    with pytest.raises(StorageError, match=r"the manifest names a shard that is not there.*shard-000003\.tar"):
        seen(ps.read_tar(place))


def test_a_url_shows_neither_password_nor_query(folder: Path) -> None:
    ds = ps.read_tar("https://user:secret@host/a.tar?sig=secret")
    assert "secret" not in repr(ds) + ds.explain()


def test_the_index_of_a_signed_url_is_asked_for_by_its_path() -> None:
    assert beside("https://host/a.tar?sig=1") == "https://host/a.tar.index?sig=1"
    assert beside("s3://bucket/a?.tar") == "s3://bucket/a?.tar.index"


def test_one_cache_is_for_one_kind_of_url(tmp_path: Path) -> None:
    ds = ps.read_tar(["memory://a/b.tar", "https://host/a.tar"], cache=ps.Cache(str(tmp_path)))
    with pytest.raises(PlanError, match=r"memory, https"):
        ds.first()
