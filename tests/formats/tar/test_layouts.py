"""Buckets as other people made them, on real S3 and HTTP servers: the right samples, or an error that says why not."""

from __future__ import annotations

import gzip
import io
import os
import random
import shutil
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import penstock as ps
from penstock.blobs.prefetch import CHUNK
from penstock.cli import main
from penstock.errors import DataError, PenstockError, PlanError, StateError, StorageError
from penstock.storage import HTTP, S3, Retry
from penstock.testing.proxy import Proxy, Request
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, http_server, s3_server

FULL = os.environ.get("PENSTOCK_FULL") == "1"
QUICK = Retry(tries=4, base_s=0.01, most_s=0.2, stall_s=20.0, connect_s=20.0)
LARGE_BYTES = 1 << 30 if FULL else 24 << 20
SHARDS = (50_000, 1 << 20) if FULL else (60, 20_000)  # how many, and their size
OBJECTS = 100_000 if FULL else 1_300  # a page of a listing has 1,000

# Both servers, in order and shuffled; unless ``FULL``, each of the two in one of the ways.
SHUFFLED = pytest.mark.parametrize(
    ("server", "shuffled"),
    [("s3", False), ("http", True), *([("s3", True), ("http", False)] if FULL else [])],
    indirect=["server"],
)

Contents = list[tuple[str, dict[str, bytes]]]


def write_shard(path: Path, keys: list[str], size: int = 3_000, fields: tuple[str, ...] = ("bin", "cls")) -> None:
    """Write a shard as other tools do, without an index."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key in keys:
            for field in fields:
                data = random.Random(f"{path.name} {key}").randbytes(size) if field == "bin" else key.encode()
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def numbered(count: int, prefix: str = "") -> list[str]:
    return [f"{prefix}{number:05}" for number in range(count)]


@dataclass
class Server:
    """A server behind a proxy, and the folder that it serves."""

    kind: str
    folder: Path
    proxy: Proxy
    port: int  # the proxy's, or the server's own

    @property
    def storage(self) -> Any:
        if self.kind == "http":
            return HTTP(retry=QUICK)
        endpoint = f"http://127.0.0.1:{self.port}"
        if self.kind == "anonymous":
            return S3(endpoint, anonymous=True, retry=QUICK)
        return S3(endpoint, ACCESS_KEY, SECRET_KEY, retry=QUICK)

    def url(self, path: str) -> str:
        if self.kind == "http":
            return f"http://127.0.0.1:{self.port}/bucket/{quote(path, safe='/{}.,')}"
        return f"s3://bucket/{path}"

    def urls(self, folder: str) -> list[str]:
        return [self.url(f"{folder}/{name}") for name in sorted(os.listdir(self.folder / "bucket" / folder))]

    def read(self, urls: Any, **options: Any) -> ps.Dataset:
        return ps.read_tar(urls, storage=self.storage, **options)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, int]]]:
    s3, http = (tmp_path_factory.mktemp(kind) for kind in ("s3", "http"))
    for root in (s3, http):
        (root / "bucket").mkdir()
    with s3_server(s3, True, "--dir-cache-time", "0s") as s3_port, http_server(http) as http_port:
        yield {"s3": (s3, s3_port), "http": (http, http_port)}


@pytest.fixture(params=["s3", "http"])
def server(request: pytest.FixtureRequest, roots: dict[str, tuple[Path, int]]) -> Iterator[Server]:
    folder, port = roots[request.param]
    with Proxy("127.0.0.1", port) as proxy:
        yield Server(request.param, folder, proxy, proxy.port)
    for path in (folder / "bucket").iterdir():
        shutil.rmtree(path)


@contextmanager
def quick_to_look_up(server: Server, *, proxied: bool) -> Iterator[Server]:
    """A server of the same folder that neither lists the folder nor hashes the object at every request."""
    start = (
        http_server(server.folder, "--dir-cache-time", "5m")
        if server.kind == "http"
        else (s3_server(server.folder, True, "--etag-hash", ""))
    )
    with start as port, Proxy("127.0.0.1", port) as proxy:
        yield replace(server, proxy=proxy, port=proxy.port if proxied else port)


@pytest.fixture(autouse=True)
def _own_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "user-cache"))


def contents(ds: ps.Dataset) -> Contents:
    return [(s["__key__"], {name: value for name, value in s.items() if not name.startswith("__")}) for s in ds]


def local(server: Server, folder: str) -> ps.Dataset:
    return ps.read_tar(str(server.folder / "bucket" / folder))


def is_list(request: Request) -> bool:
    return "list-type=2" in request.path


@SHUFFLED
def test_shards_with_unsorted_keys_read_as_local_ones(server: Server, shuffled: bool) -> None:
    for number in range(5):
        keys = numbered(40)
        random.Random(number).shuffle(keys)
        write_shard(server.folder / f"bucket/unsorted/{number}.tar", keys)
    want, got = local(server, "unsorted"), server.read(server.urls("unsorted"))
    assert contents(got.shuffle() if shuffled else got) == contents(want.shuffle() if shuffled else want)


def test_a_large_shard_delivers_its_first_sample_at_once_and_reads_every_byte_once(
    server: Server, record_property: Callable[[str, object], None]
) -> None:
    path = server.folder / "bucket/large/a.tar"
    keys = numbered(LARGE_BYTES // (300_000 + 2048))
    write_shard(path, keys, 300_000)
    with quick_to_look_up(server, proxied=True) as server:
        check_large_shard(server, keys, record_property)


def check_large_shard(server: Server, keys: list[str], record_property: Callable[[str, object], None]) -> None:
    server.proxy.rule(times=None, latency=0.05)
    ds = server.read(server.url("large/a.tar"))
    begun = time.monotonic()
    run = iter(ds)
    first = next(run)
    first_s = time.monotonic() - begun
    record_property("seconds to the first sample", round(first_s, 3))
    assert first["__key__"] == keys[0]
    assert first_s < 5  # 0.2 s on an idle machine; all of the gigabyte takes longer than this
    got = [first, *run]
    assert [sample["__key__"] for sample in got] == keys
    assert got[-1]["bin"] == random.Random(f"a.tar {keys[-1]}").randbytes(300_000)
    ranges = [request.headers["Range"] for request in server.proxy.requests if request.headers.get("Range")]
    assert len(ranges) == len(set(ranges))


@pytest.mark.timeout(3600 if FULL else 60)  # 50 GB of each server
def test_many_small_shards_are_read_in_order(server: Server) -> None:
    count, size = SHARDS
    for number in range(count):
        path = server.folder / f"bucket/many/{number:06}.tar"
        if number < 20:
            write_shard(path, numbered(4), size // 4)
        else:  # the same file under another name: 50 GB are sent, but not stored
            path.hardlink_to(server.folder / f"bucket/many/{number % 20:06}.tar")
    pattern = f"{{000000..{count - 1:06}}}.tar"
    with quick_to_look_up(server, proxied=False) as server:
        read = server.read(server.url(f"many/{pattern}")).select("__url__")
        got = [(sample["__url__"][-10:], sample["__key__"]) for sample in read]
    assert got == [(f"{number:06}.tar", key) for number in range(count) for key in numbered(4)]


@SHUFFLED
def test_a_server_without_ranges_gives_the_same_samples(server: Server, shuffled: bool) -> None:
    for number in range(3):
        write_shard(server.folder / f"bucket/whole/{number}.tar", numbered(60))
    packed = server.folder / "bucket/whole/2.tar"  # its name does not say that it is compressed
    packed.write_bytes(gzip.compress(packed.read_bytes(), 1))
    if server.kind == "s3":  # the signature covers the Range header, so that a proxy cannot remove it
        with s3_server(server.folder, False) as port, Proxy("127.0.0.1", port) as proxy:
            check_without_ranges(Server("anonymous", server.folder, proxy, proxy.port), shuffled)
    else:
        check_without_ranges(server, shuffled)


def check_without_ranges(server: Server, shuffled: bool) -> None:
    server.proxy.rule(times=None, ignore_range=True)
    want, got = local(server, "whole"), server.read(server.urls("whole"))
    assert contents(got.shuffle() if shuffled else got) == contents(want.shuffle() if shuffled else want)


@SHUFFLED
def test_compressed_shards_read_as_local_ones(server: Server, shuffled: bool) -> None:
    for number in range(3):
        path = server.folder / f"bucket/gz/{number}.tar"
        write_shard(path, numbered(60))
        path.with_suffix(".tar.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
        path.unlink()
    hidden = server.folder / "bucket/gz/3.tar"  # its name does not say that it is compressed
    hidden.write_bytes((server.folder / "bucket/gz/0.tar.gz").read_bytes())
    want, got = local(server, "gz"), server.read(server.urls("gz"))
    assert contents(got.shuffle() if shuffled else got) == contents(want.shuffle() if shuffled else want)


@SHUFFLED
def test_shards_with_and_without_an_index_can_be_mixed(server: Server, shuffled: bool) -> None:
    folder = server.folder / "bucket/mixed"
    for number in range(6):
        write_shard(folder / f"{number}.tar", numbered(30))
    assert main(["index", str(folder / "1.tar"), str(folder / "4.tar")]) == 0
    urls = [server.url(f"mixed/{number}.tar") for number in range(6)]
    want, got = local(server, "mixed"), server.read(urls)
    assert contents(got.shuffle() if shuffled else got) == contents(want.shuffle() if shuffled else want)
    with pytest.raises(TypeError):
        len(server.read(server.url("mixed/5.tar") + "::" + server.url("mixed/1.tar")).shard(0, 2))


def test_a_listing_of_many_pages_finds_every_shard(server: Server) -> None:
    folder = server.folder / "bucket/pages"
    (folder / "notes").mkdir(parents=True)
    for number in range(OBJECTS):
        (folder / "notes" / f"{number:06}.txt").touch()
    for number in range(3):
        write_shard(folder / f"x{number}.tar", numbered(10))
    if server.kind == "http":
        with pytest.raises(StorageError, match=r"cannot be listed.*write out the shard names"):
            server.read(server.url("pages")).take(1)
        return
    want = contents(local(server, "pages"))
    with quick_to_look_up(server, proxied=True) as server:
        assert contents(server.read("s3://bucket/pages")) == want
        assert contents(server.read("s3://bucket/pages/**/*.tar")) == want
        assert sum(map(is_list, server.proxy.requests)) > OBJECTS / 1000


def test_names_with_spaces_and_unicode(server: Server) -> None:
    keys = [f"ein Bild {number}/Größe +%41 {number}" for number in range(20)]
    for name in ("a b.tar", "köln #1.tar", "日本 50%.tar"):
        write_shard(server.folder / "bucket/odd names" / name, keys)
    got = contents(server.read(server.urls("odd names")))
    assert got == contents(local(server, "odd names"))
    assert got[0][0] == keys[0]


def test_a_bucket_that_allows_get_but_not_list(server: Server) -> None:
    for number in range(3):
        write_shard(server.folder / f"bucket/secret/{number}.tar", numbered(20))
    server.proxy.rule(is_list, times=None, status=403)
    server.proxy.rule(lambda request: request.path.endswith((".index", "manifest.json")), times=None, status=403)
    assert contents(server.read(server.url("secret/{0..2}.tar"))) == contents(local(server, "secret"))
    with pytest.raises(StorageError, match=r"denied|cannot be listed"):
        server.read(server.url("secret")).take(1)


def test_an_object_that_is_changed_in_mid_read(server: Server) -> None:
    path = server.folder / "bucket/changed/a.tar"
    write_shard(path, numbered(80), 300_000)

    def change() -> None:  # at once, as servers do
        write_shard(server.folder / "a.tar", numbered(80, "new"), 299_000)
        os.replace(server.folder / "a.tar", path)

    middle = f"bytes={(1 << 20) + 2 * CHUNK}-"  # the first request is for 1 MiB
    server.proxy.rule(lambda request: request.headers.get("Range", "").startswith(middle), before=change)
    seen: list[dict[str, Any]] = []

    def read() -> None:
        seen.extend(server.read(server.url("changed/a.tar")))

    with pytest.raises((StorageError, DataError), match=r"changed|has .* bytes|damaged header .*a\.tar"):
        read()
    if server.kind == "http":  # this S3 server may answer with the tag of the old object and bytes of the new one
        assert [sample["__key__"] for sample in seen] == numbered(80)[: len(seen)]
        for sample in seen:
            assert sample["bin"] == random.Random(f"a.tar {sample['__key__']}").randbytes(300_000)


def test_a_connection_that_breaks_resumes(server: Server) -> None:
    write_shard(server.folder / "bucket/broken/a.tar", numbered(40), 300_000)
    server.proxy.rule(lambda request: request.path.endswith("a.tar"), 6, skip=1, reset_after=200_000)
    assert contents(server.read(server.url("broken/a.tar"))) == contents(local(server, "broken"))


def test_a_size_that_no_object_has_is_refused(server: Server) -> None:
    write_shard(server.folder / "bucket/claims/a.tar", numbered(4))
    claim = {"Content-Range": f"bytes 0-0/{10**18 - 1}"}
    server.proxy.rule(lambda request: request.path.endswith("a.tar"), times=None, headers=claim)
    with pytest.raises(PenstockError, match=r"declares 999,999,999,999,999,999 bytes.*a\.tar"):
        list(server.read(server.url("claims/a.tar")))
    with pytest.raises(PenstockError, match=r"999,999,999,999,999,999 bytes.*a\.tar"):
        list(server.read(server.url("claims/a.tar")).shuffle())


# Counts: the user's cache, manifests anywhere, ranks and states


def write_some(server: Server, count: int = 6) -> list[str]:
    for number in range(count):
        write_shard(server.folder / f"bucket/some/{number}.tar", numbered(10 + number), fields=("cls",))
    return [server.url(f"some/{number}.tar") for number in range(count)]


def keys_of(items: Any) -> list[str]:
    return [(item["__url__"][-5:] + item["__key__"]) for item in items]


def test_the_index_that_falls_out_is_used_by_the_next_run_of_a_single_rank_only(server: Server) -> None:
    urls = write_some(server)
    with pytest.raises(TypeError, match=r"count\(\)"):
        len(server.read(urls))
    want = contents(server.read(urls))
    assert len(server.read(urls)) == len(want) == 75
    with pytest.raises(TypeError):
        len(server.read(urls).shard(0, 2))
    server.proxy.clear()
    assert contents(server.read(urls).shuffle()) == contents(local(server, "some").shuffle())
    write_shard(server.folder / "bucket/some/3.tar", numbered(2), fields=("cls",))
    with pytest.raises(TypeError, match=r"count\(\)"):
        len(server.read(urls))
    assert len(contents(server.read(urls))) == 75 - 13 + 2


@SHUFFLED
def test_ranks_cut_uncounted_shards_between_windows_and_resume_in_another_world(server: Server, shuffled: bool) -> None:
    urls = write_some(server)
    ds = server.read(urls)
    ds = ds.shuffle(shards=2) if shuffled else ds
    want = Counter(keys_of(ds))
    loaders = [ds.loader(rank, 2, uneven="keep") for rank in range(2)]
    runs = [iter(loader) for loader in loaders]
    seen = [next(run) for run, count in zip(runs, (5, 17), strict=True) for _ in range(count)]
    states = [loader.state_dict() for loader in loaders]
    own = ds.loader(1, 2, uneven="keep")
    own.load_state_dict(states[1])
    assert keys_of(own) == keys_of(runs[1])
    rest: list[Any] = []
    for rank in range(3):
        loader = ds.loader(rank, 3, uneven="keep")
        loader.load_state_dict(states=states)
        rest += loader
    assert Counter(keys_of(seen)) + Counter(keys_of(rest)) == want
    with pytest.raises(PlanError, match="penstock index"):
        list(ds.loader(0, 7, uneven="keep"))
    with pytest.raises(PlanError, match="penstock index"):
        list(ds.loader(0, 2))


def test_a_single_rank_resumes_in_the_first_epoch_and_is_exact_in_the_second(server: Server) -> None:
    urls = write_some(server)
    ds = server.read(urls).shuffle(shards=2)
    loader = ds.loader(0, 1)
    run = iter(loader)
    for _ in range(20):
        next(run)
    first_state = loader.state_dict()
    rest = keys_of(run)
    other = ds.loader(0, 1)
    other.load_state_dict(first_state)
    assert keys_of(other) == rest
    second = iter(loader)
    for _ in range(30):
        next(second)
    second_state, rest = loader.state_dict(), keys_of(second)
    assert (first_state["lazy"], second_state.get("lazy", False)) == (True, False)
    other = ds.loader(0, 1)
    other.load_state_dict(second_state)
    assert keys_of(other) == rest


def test_a_counted_state_is_refused_where_the_counts_are_unknown(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = write_some(server)
    counted = ps.read_tar(str(server.folder / "bucket/some")).loader(0, 1)
    next(iter(counted))
    with pytest.raises(StateError, match="counted, and their counts are not known here; run `penstock index`"):
        server.read(urls).loader(0, 1).load_state_dict(counted.state_dict())


def test_a_manifest_anywhere_gives_all_ranks_counts_and_indexes(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = write_some(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.proxy.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    manifest = tmp_path / "ours" / "some.json"
    assert main(["index", *urls, "--manifest", str(manifest)]) == 0
    assert "0.tar: 10 samples" in capsys.readouterr().out
    assert not list((server.folder / "bucket/some").glob("*.index"))
    ds = server.read(urls, manifest=manifest)
    assert len(ds) == 75
    assert len(ds.shard(0, 2)) + len(ds.shard(1, 2)) == 75
    server.proxy.clear()
    assert ds[70]["cls"] == contents(local(server, "some"))[70][1]["cls"]
    sent = [request for request in server.proxy.requests if request.path.endswith(".index")]
    assert not sent
    assert contents(ds.shuffle()) == contents(local(server, "some").shuffle())
    write_shard(server.folder / "bucket/some/9.tar", numbered(2))
    with pytest.raises(StorageError, match=r"does not list this shard.*penstock index --manifest"):
        server.read([*urls, server.url("some/9.tar")], manifest=manifest).take(1)
    with pytest.raises(StorageError, match="there is no such manifest"):
        server.read(urls, manifest=tmp_path / "none.json").take(1)


def test_members_that_take_longer_than_a_request_are_skipped(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.formats.tar.indexing import index_shard

    write_shard(server.folder / "bucket/video/a.tar", numbered(3), 6_000_000)
    server.proxy.rule(times=None, latency=0.05)
    index, entry = index_shard(server.url("video/a.tar"), server.storage)
    assert (index.samples, entry.samples, entry.bytes) == (3, 3, os.path.getsize(server.folder / "bucket/video/a.tar"))
    local_index, local_entry = index_shard(str(server.folder / "bucket/video/a.tar"))
    assert index.start.tolist() == local_index.start.tolist()
    assert entry.sha256 in ("", local_entry.sha256)
    if entry.sha256:
        assert index.checksums.tolist() == local_index.checksums.tolist()


def test_a_damaged_unindexed_shard_fails_where_it_is_damaged(server: Server) -> None:
    path = server.folder / "bucket/damaged/a.tar"
    write_shard(path, numbered(50))
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = data[len(data) // 2 : -20_000]
    path.write_bytes(bytes(data))
    errors: dict[str, str] = {}
    for name, ds in (("remote", server.read(server.url("damaged/a.tar"))), ("local", local(server, "damaged"))):
        with pytest.raises(DataError) as caught:
            list(ds)
        errors[name] = caught.value.problem
    assert errors["remote"] == errors["local"]
