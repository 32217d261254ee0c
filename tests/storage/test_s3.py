from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import MissingExtra, StorageError
from penstock.formats.manifest import write_manifest
from penstock.storage import S3, Retry, Storage, exists, expand
from penstock.storage.s3 import part_size
from penstock.testing.proxy import Proxy
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, s3_server
from penstock.testing.storages import DATA, StorageTests, write

QUICK = Retry(tries=3, base_s=0.02, most_s=0.1, stall_s=1.0, connect_s=1.0)
MANY = 5_000  # five pages
LARGE = 20 * 2**20 + 12_345  # three parts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "bucket").mkdir()
    with ps.TarWriter(folder / "one.tar") as writer:
        writer.write({"__key__": "sample", "txt": b"text"})
    for name in ("many", "told"):
        (folder / "full" / name).mkdir(parents=True)
        for number in range(MANY):
            os.link(folder / "one.tar", folder / "full" / name / f"{number:05}.tar")
    told = writer.entry
    assert told is not None
    write_manifest(folder / "full" / "told", [told._replace(name=f"{number:05}.tar") for number in range(MANY)])
    return folder


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    with s3_server(folder) as port:
        yield port


def _storage(port: int) -> S3:
    return S3(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY, retry=QUICK)


@pytest.fixture
def storage(port: int) -> S3:
    return _storage(port)


@pytest.fixture
def root() -> str:
    return f"s3://bucket/{secrets.token_hex(4)}"


class TestS3(StorageTests):
    @pytest.fixture
    def storage(self, port: int) -> Storage:
        return _storage(port)

    @pytest.fixture
    def root(self) -> str:
        return f"s3://bucket/{secrets.token_hex(4)}"


def test_a_large_object_goes_in_parts_and_comes_back(storage: S3, root: str) -> None:
    data = os.urandom(LARGE)
    with storage.put(f"{root}/large", size_hint=LARGE) as upload:
        for at in range(0, LARGE, 3_000_000):
            upload.write(data[at : at + 3_000_000])
        info = upload.commit()
    assert info.size == LARGE
    assert storage.info(f"{root}/large").tag == info.tag
    assert b"".join(storage.stream(f"{root}/large")) == data
    assert storage.read(f"{root}/large", LARGE - 9_000_000, LARGE) == data[-9_000_000:]


def test_a_large_upload_that_is_dropped_leaves_nothing(port: int, root: str) -> None:
    with Proxy("127.0.0.1", port) as proxy:
        storage = _storage(proxy.port)
        with storage.put(f"{root}/large", size_hint=LARGE) as upload:
            upload.write(bytes(LARGE))
        assert [r.method for r in proxy.requests].count("DELETE") == 1
        assert not exists(storage, f"{root}/large")


def test_a_listing_has_as_many_pages_as_it_takes(port: int) -> None:
    with Proxy("127.0.0.1", port) as proxy:
        found = [one.url for one in _storage(proxy.port).list("s3://full/many")]
        assert found == [f"s3://full/many/{number:05}.tar" for number in range(MANY)]
        assert len(proxy.requests) == 5


@pytest.mark.parametrize("name", ["many", "told"])
def test_a_folder_of_5000_shards_is_read(storage: S3, name: str) -> None:
    begin = time.monotonic()
    ds = ps.read_tar(f"s3://full/{name}/", storage=storage)
    if name == "told":
        assert len(ds) == MANY
        assert ds[4321]["__url__"] == "s3://full/told/04321.tar"
    else:
        found = [sample["__url__"] for sample in ds.take(20)]
        assert found == [f"s3://full/{name}/{number:05}.tar" for number in range(20)]
    assert time.monotonic() - begin < 20


def test_globs_folders_and_braces_mean_objects(storage: S3, root: str) -> None:
    names = ["a-0.tar", "a-1.tar", "b.txt", ".hidden.tar", "sub/a-2.tar", "sub/deep/a-3.tar"]
    for name in names:
        write(storage, f"{root}/{name}", b"x")
    meant = {
        f"{root}/*.tar": names[:2],
        f"{root}/a-[!0].tar": names[1:2],
        f"{root}/**/a-?.tar": [names[0], names[1], names[4], names[5]],
        f"{root}/*/*.tar": names[4:5],
        f"{root}/": names[:2],
        f"{root}": names[:2],
        f"{root}/sub/a-{{2,9}}.tar": ["sub/a-2.tar", "sub/a-9.tar"],
    }
    for pattern, want in meant.items():
        assert expand([pattern], [".tar"], storage) == [f"{root}/{name}" for name in want], pattern
    with pytest.raises(StorageError, match="nothing is there"):
        expand([f"{root}/*.zip"], [".tar"], storage)


def test_anonymous_urls_are_not_signed(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.bin").write_bytes(DATA)
    with s3_server(tmp_path, keys=False) as port, Proxy("127.0.0.1", port) as proxy:
        storage = S3(f"http://127.0.0.1:{proxy.port}", retry=QUICK)
        assert storage.read("s3://anonymous@open/a.bin", 1, 9) == DATA[1:9]
        assert [one.url for one in storage.list("s3://anonymous@open")] == ["s3://anonymous@open/a.bin"]
        assert not any("Authorization" in request.headers for request in proxy.requests)


def test_keys_come_from_the_environment(port: int, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    write(S3(retry=QUICK), f"{root}/env", DATA)
    assert S3(retry=QUICK).info(f"{root}/env").size == len(DATA)


def test_keys_come_from_a_profile(port: int, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    (tmp_path / "credentials").write_text(f"[lab]\n{keys}")
    storage = S3(f"http://127.0.0.1:{port}", profile="lab", retry=QUICK)
    write(storage, f"{root}/profile", DATA)
    assert exists(storage, f"{root}/profile")
    with pytest.raises(StorageError, match="no such profile"):
        S3(f"http://127.0.0.1:{port}", profile="none", retry=QUICK).info(f"{root}/profile")


WRONG = {
    "no object": (ACCESS_KEY, SECRET_KEY, "s3://bucket/none", "there is no such object"),
    "no bucket": (ACCESS_KEY, SECRET_KEY, "s3://nowhere/none", "there is no such bucket"),
    "wrong key": ("AKWRONG0000000000000", SECRET_KEY, "s3://bucket/none", "keys are wrong"),
    "wrong secret": (ACCESS_KEY, "wrong-never-to-be-seen", "s3://bucket/none", "secret key is wrong"),
    "keys in the url": (None, None, "s3://me:never-to-be-seen@bucket/a", "do not belong into a URL"),
    "no key": (ACCESS_KEY, SECRET_KEY, "s3://bucket", "names a bucket"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_in_one_sentence_and_soon(port: int, what: str) -> None:
    access, secret, url, sentence = WRONG[what]
    storage = S3(f"http://127.0.0.1:{port}", access, secret)
    begin = time.monotonic()
    for action in (lambda: storage.info(url), lambda: storage.read(url, 0, 1), lambda: list(storage.stream(url))):
        with pytest.raises(StorageError, match=sentence) as caught:
            action()
        assert "never-to-be-seen" not in f"{caught.value}{caught.value!r}{caught.value.url}"
    assert time.monotonic() - begin < 10


def test_a_listing_says_what_is_wrong_too(storage: S3, port: int) -> None:
    with pytest.raises(StorageError, match="no such bucket"):
        list(storage.list("s3://nowhere/"))
    with pytest.raises(StorageError, match="secret key is wrong"):
        list(S3(f"http://127.0.0.1:{port}", ACCESS_KEY, "wrong").list("s3://bucket/"))


def test_no_keys_at_all_is_said(port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageError, match="no keys were found"):
        S3(f"http://127.0.0.1:{port}").info("s3://bucket/a")


def test_secrets_are_nowhere_to_be_seen(port: int, root: str, caplog: pytest.LogCaptureFixture) -> None:
    token = secrets.token_hex()
    caplog.set_level(logging.DEBUG)
    with Proxy("127.0.0.1", port) as proxy:
        storage = S3(f"http://127.0.0.1:{proxy.port}", ACCESS_KEY, SECRET_KEY, session_token=token, retry=QUICK)
        proxy.rule("GET", status=503)
        write(storage, f"{root}/a", DATA)
        assert storage.read(f"{root}/a", 0, 10) == DATA[:10]
        assert any(request.headers.get("X-Amz-Security-Token") == token for request in proxy.requests)
        proxy.rule(times=None, garbage=True)
        with pytest.raises(StorageError) as caught:
            storage.info(f"{root}/a")
    seen = caplog.text + f"{storage!r}{storage}{caught.value!r}" + "".join(traceback.format_exception(caught.value))
    assert "503" in caplog.text  # logs were on
    for secret in (SECRET_KEY, token):
        assert secret not in seen


def test_a_forked_child_makes_its_own_connections(port: int, root: str) -> None:
    with Proxy("127.0.0.1", port) as proxy:
        storage = _storage(proxy.port)
        write(storage, f"{root}/fork", DATA)
        assert storage.read(f"{root}/fork", 0, 10) == DATA[:10]
        children = [_fork(storage, f"{root}/fork", number) for number in range(3)]
        for _ in range(20):
            assert storage.read(f"{root}/fork", 5, 50) == DATA[5:50]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]


def _fork(storage: S3, url: str, number: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        good = all(storage.read(url, at, at + 100) == DATA[at : at + 100] for at in range(number, 2000, 100))
        os._exit(0 if good else 1)
    finally:
        os._exit(2)


def test_a_fork_while_another_thread_makes_the_client_does_not_hang(storage: S3, root: str) -> None:
    write(storage, f"{root}/busy", DATA)
    stop = threading.Event()

    def make_clients() -> None:
        while not stop.is_set():
            fresh = S3(storage.endpoint, ACCESS_KEY, SECRET_KEY, region=f"r-{secrets.token_hex(2)}", retry=QUICK)
            fresh.info(f"{root}/busy")

    thread = threading.Thread(target=make_clients)
    thread.start()
    try:
        time.sleep(0.1)
        assert os.waitpid(_fork(storage, f"{root}/busy", 0), 0)[1] == 0
    finally:
        stop.set()
        thread.join()


def test_a_spawned_child_reads_too(storage: S3, root: str) -> None:
    write(storage, f"{root}/spawn", DATA)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(storage.read, (f"{root}/spawn", 3, 30)) == DATA[3:30]


def test_connections_are_used_again(port: int, root: str) -> None:
    write(_storage(port), f"{root}/again", DATA)
    with Proxy("127.0.0.1", port) as proxy:
        storage = _storage(proxy.port)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda at: storage.read(f"{root}/again", at, at + 9), range(100)))
        assert proxy.accepted <= 4


def test_a_pickled_value_keeps_its_keys_and_hides_them() -> None:
    storage = S3(access_key=ACCESS_KEY, secret_key=SECRET_KEY)
    assert pickle.loads(pickle.dumps(storage)) == storage
    assert SECRET_KEY not in repr(storage)
    assert ACCESS_KEY not in repr(storage)


def test_without_botocore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    with pytest.raises(MissingExtra, match=r"penstock\[s3\]"):
        S3().info("s3://bucket/a")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for number in range(5):
            (folder / name / f"{number}.jpg").write_bytes(bytes(number))
    return folder


KEYS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
REFUSED = {
    "wrong key": ({"AWS_ACCESS_KEY_ID": "AKWRONG0000000000000"}, "bucket", "the keys are wrong"),
    "wrong secret": ({"AWS_SECRET_ACCESS_KEY": "never-to-be-seen"}, "bucket", "the secret key is wrong"),
    "no bucket": ({}, "nowhere", "there is no such bucket"),
}


@pytest.fixture
def keyed(port: int, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The right keys and the server, in the environment."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def refused(call: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with 1 and one line that says it, in time, and no secret."""
    begin = time.monotonic()
    assert main(call) == 1
    said = capsys.readouterr().err
    assert time.monotonic() - begin < 10
    assert sentence in said
    assert said.count("\n") == 1
    assert said.startswith("penstock: ")
    assert "never-to-be-seen" not in said


@pytest.mark.parametrize("what", REFUSED)
def test_whoever_reads_or_packs_is_told_what_is_wrong(
    what: str, photos: Path, keyed: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, bucket, sentence = REFUSED[what]
    for name, value in wrong.items():
        keyed.setenv(name, value)
    for url in (f"s3://{bucket}/folder", f"s3://{bucket}/folder/a.tar", f"s3://{bucket}/a-{{0..3}}.tar"):
        with pytest.raises(StorageError, match=sentence):
            list(ps.read_tar(url))
    with pytest.raises(StorageError, match=sentence):
        ps.pack(photos, f"s3://{bucket}/out")
    refused(["pack", str(photos), f"s3://{bucket}/out"], sentence, capsys)
    refused(["info", f"s3://{bucket}/folder"], sentence, capsys)
    refused(["index", f"s3://{bucket}/folder"], sentence, capsys)


def test_a_shard_that_is_missing_in_a_brace_range_is_named(
    photos: Path, keyed: pytest.MonkeyPatch, root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.pack(photos, root, max_samples=3)
    S3().delete(f"{root}/shard-000002.tar")
    url = f"{root}/shard-{{000000..000003}}.tar"
    with pytest.raises(StorageError, match=r"no such object.*shard-000002\.tar"):
        list(ps.read_tar(url))
    refused(["info", url], "shard-000002.tar", capsys)
    assert main(["verify", url]) == 1
    assert "shard-000002.tar: it is in the manifest and not there" in capsys.readouterr().out


def test_keys_that_may_not_write_are_told_so(
    photos: Path, port: int, keyed: pytest.MonkeyPatch, root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Proxy("127.0.0.1", port) as proxy:
        keyed.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{proxy.port}")
        proxy.rule("PUT", times=None, status=403)
        with pytest.raises(StorageError, match="access denied: these keys may not do this"):
            ps.pack(photos, root)
        refused(["pack", str(photos), root], "access denied", capsys)
        proxy.clear()
        proxy.rule("POST", times=None, status=403)  # parts may not be begun
        with pytest.raises(StorageError, match="access denied"), S3().put(f"{root}/large", size_hint=LARGE) as upload:
            upload.write(bytes(LARGE))


def test_shards_are_read_without_a_manifest_or_index_that_may_not_be_read(port: int, root: str) -> None:
    one = {"__key__": "a", "txt": b"text"}
    with ps.TarWriter(f"{root}/a.tar", storage=_storage(port)) as writer:
        writer.write(one)
    for name in ("manifest.json", "a.tar.index"):
        with Proxy("127.0.0.1", port) as proxy:
            proxy.rule(name, times=None, status=403)
            found = list(ps.read_tar(f"{root}/a.tar", storage=_storage(proxy.port)))
            assert [sample["txt"] for sample in found] == [b"text"]


def test_uploads_that_were_never_completed_are_dropped_where_they_are_ours(storage: S3, root: str) -> None:
    folder = root.removeprefix("s3://bucket/")
    for name in ("/shard-0.tar", "/shard-1.tar", "/shard-2.tar", "-not/shard-1.tar", "/other"):
        storage.call("create_multipart_upload", root, {"Bucket": "bucket", "Key": folder + name})

    def pending() -> set[str]:
        found = storage.call("list_multipart_uploads", root, {"Bucket": "bucket", "Prefix": folder})
        return {one["Key"].removeprefix(folder) for one in found["Uploads"]}

    assert storage.drop_uploads(root, lambda name: name in ("shard-1.tar", "shard-2.tar")) == 2
    assert pending() == {"/shard-0.tar", "-not/shard-1.tar", "/other"}
    assert storage.drop_uploads(root, lambda name: True) == 2
    assert pending() == {"-not/shard-1.tar"}


@pytest.mark.parametrize("hint", [None, 0, 1, 10**8, 10**10, 10**11, 5 * 10**12])
def test_no_object_needs_more_parts_than_s3_allows(hint: int | None) -> None:
    size = part_size(hint)
    assert 8 << 20 <= size <= 5 << 30
    assert (hint or 0) * 1.1 <= size * 10_000


def test_parts_of_common_shards_are_of_8_to_16_mb() -> None:
    assert {part_size(hint) for hint in (None, 10**6, 10**9, 10**11)} == {8 << 20, 16 << 20}
