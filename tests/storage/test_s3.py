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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import MissingExtra, PlanError, StorageError
from penstock.formats.manifest import write_manifest
from penstock.storage import S3, Retry, Storage, exists, expand
from penstock.storage.protocol import NotFound
from penstock.storage.s3 import part_size
from penstock.testing.proxy import Proxy
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, s3_server
from penstock.testing.storages import DATA, StorageTests, write

QUICK = Retry(tries=3, base_s=0.02, most_s=0.1, stall_s=20.0, connect_s=20.0)
FULL = os.environ.get("PENSTOCK_FULL") == "1"
SHARDS = 5_000 if FULL else 2_000  # a page of a listing has 1,000
LARGE = 20 * 2**20 + 12_345  # three parts of an upload


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "bucket").mkdir()
    with ps.TarWriter(folder / "one.tar") as writer:
        writer.write({"__key__": "sample", "txt": b"text"})
    for name in ("plain", "with-manifest"):
        (folder / "full" / name).mkdir(parents=True)
        for number in range(SHARDS):
            os.link(folder / "one.tar", folder / "full" / name / f"{number:05}.tar")
    entry = writer.entry
    assert entry is not None
    entries = [entry._replace(name=f"{number:05}.tar") for number in range(SHARDS)]
    write_manifest(folder / "full" / "with-manifest", entries)
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


def test_a_large_object_is_uploaded_in_parts_and_read_back(storage: S3, root: str) -> None:
    data = os.urandom(LARGE)
    with storage.put(f"{root}/large", size_hint=LARGE) as upload:
        for at in range(0, LARGE, 3_000_000):
            upload.write(data[at : at + 3_000_000])
        info = upload.commit()
    assert info.size == LARGE
    assert storage.info(f"{root}/large").tag == info.tag
    assert b"".join(storage.stream(f"{root}/large")) == data
    assert storage.read(f"{root}/large", LARGE - 9_000_000, LARGE) == data[-9_000_000:]


def test_an_aborted_large_upload_leaves_nothing(port: int, root: str) -> None:
    with Proxy("127.0.0.1", port) as proxy:
        storage = _storage(proxy.port)
        with storage.put(f"{root}/large", size_hint=LARGE) as upload:
            upload.write(bytes(LARGE))
        assert [r.method for r in proxy.requests].count("DELETE") == 1
        assert not exists(storage, f"{root}/large")


def test_a_listing_reads_all_pages(port: int) -> None:
    with Proxy("127.0.0.1", port) as proxy:
        found = [entry.url for entry in _storage(proxy.port).list("s3://full/plain")]
        assert found == [f"s3://full/plain/{number:05}.tar" for number in range(SHARDS)]
        assert len(proxy.requests) == SHARDS // 1000


@pytest.mark.parametrize("name", ["plain", "with-manifest"])
def test_a_folder_of_thousands_of_shards_is_read(storage: S3, name: str) -> None:
    begin = time.monotonic()
    ds = ps.read_tar(f"s3://full/{name}/", storage=storage)
    if name == "with-manifest":
        assert len(ds) == SHARDS
        assert ds[1321]["__url__"] == "s3://full/with-manifest/01321.tar"
    else:
        found = [sample["__url__"] for sample in ds.take(20)]
        assert found == [f"s3://full/{name}/{number:05}.tar" for number in range(20)]
    assert time.monotonic() - begin < 100


def test_globs_folders_and_braces_are_expanded(storage: S3, root: str) -> None:
    names = ["a-0.tar", "a-1.tar", "b.txt", ".hidden.tar", "sub/a-2.tar", "sub/deep/a-3.tar"]
    for name in names:
        write(storage, f"{root}/{name}", b"x")
    patterns = {
        f"{root}/*.tar": names[:2],
        f"{root}/a-[!0].tar": names[1:2],
        f"{root}/**/a-?.tar": [names[0], names[1], names[4], names[5]],
        f"{root}/*/*.tar": names[4:5],
        f"{root}/": names[:2],
        f"{root}": names[:2],
        f"{root}/sub/a-{{2,9}}.tar": ["sub/a-2.tar", "sub/a-9.tar"],
    }
    for pattern, want in patterns.items():
        assert expand([pattern], [".tar"], storage) == [f"{root}/{name}" for name in want], pattern
    with pytest.raises(StorageError, match="matches no files"):
        expand([f"{root}/*.zip"], [".tar"], storage)


def test_anonymous_urls_are_not_signed(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.bin").write_bytes(DATA)
    with s3_server(tmp_path, keys=False) as port, Proxy("127.0.0.1", port) as proxy:
        storage = S3(f"http://127.0.0.1:{proxy.port}", retry=QUICK)
        for _ in range(3):
            assert storage.read("s3://anonymous@open/a.bin", 1, 9) == DATA[1:9]
        assert [entry.url for entry in storage.list("s3://anonymous@open")] == ["s3://anonymous@open/a.bin"]
        assert not any("Authorization" in request.headers for request in proxy.requests)


def test_objects_of_a_known_bucket_are_requested_without_botocore(port: int, root: str) -> None:
    names = ["first", "a b", "ü~", "50%+c=d&e", "f/(g)*!'#?:@,;$.h"]
    for name in names:
        write(_storage(port), f"{root}/{name}", name.encode())
    with Proxy("127.0.0.1", port) as proxy:
        storage = _storage(proxy.port)

        def botocores() -> list[str]:
            agents = [request.headers.get("User-Agent", "") for request in proxy.requests]
            proxy.requests.clear()
            return ["botocore" if "Botocore" in agent else "own" for agent in agents]

        for name in names:
            size = len(name.encode())
            assert storage.read(f"{root}/{name}", 1, size) == name.encode()[1:], name
        assert botocores() == ["botocore", *["own"] * (len(names) - 1)]
        assert not exists(storage, f"{root}/missing")
        assert storage.info(f"{root}/first").size == 5
        assert botocores() == ["own", "own"]
        proxy.rule("first", times=1, status=403)
        assert storage.read(f"{root}/first", 0, 5) == b"first"  # botocore's request succeeds
        assert botocores() == ["own", "botocore"]
        proxy.rule("first", times=None, status=403)
        with pytest.raises(StorageError, match="access denied"):
            storage.read(f"{root}/first", 0, 5)
        proxy.clear()
        proxy.rule("first", times=1, status=503)
        assert storage.read(f"{root}/first", 0, 5) == b"first"


def test_a_missing_object_is_not_asked_for_twice() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            known = self.path.endswith("known")
            body = b"known" if known else b"<Error><Code>NoSuchKey</Code></Error>"
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    storage = _storage(server.server_port)
    try:
        assert b"".join(storage.stream("s3://bucket/known")) == b"known"
        with pytest.raises(NotFound):
            storage.read("s3://bucket/missing", 0, 1)
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
    assert asked == ["/bucket/known", "/bucket/missing"]


def test_the_token_of_temporary_keys_is_in_every_request(port: int, root: str) -> None:
    write(_storage(port), f"{root}/a", DATA)
    with Proxy("127.0.0.1", port) as proxy:
        storage = S3(f"http://127.0.0.1:{proxy.port}", ACCESS_KEY, SECRET_KEY, session_token="T0KEN", retry=QUICK)
        for _ in range(3):
            assert storage.read(f"{root}/a", 1, 9) == DATA[1:9]
        assert [request.headers["X-Amz-Security-Token"] for request in proxy.requests] == ["T0KEN"] * 3


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
    "keys in the url": (None, None, "s3://me:never-to-be-seen@bucket/a", "do not belong in a URL"),
    "no key": (ACCESS_KEY, SECRET_KEY, "s3://bucket", "names a bucket"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_explained_soon_and_without_secrets(port: int, mistake: str) -> None:
    access, secret, url, problem = WRONG[mistake]
    storage = S3(f"http://127.0.0.1:{port}", access, secret)
    begin = time.monotonic()
    for action in (lambda: storage.info(url), lambda: storage.read(url, 0, 1), lambda: list(storage.stream(url))):
        with pytest.raises(StorageError, match=problem) as caught:
            action()
        assert "never-to-be-seen" not in f"{caught.value}{caught.value!r}{caught.value.url}"
    assert time.monotonic() - begin < 60


def test_the_error_of_a_failed_listing_names_the_problem(storage: S3, port: int) -> None:
    with pytest.raises(StorageError, match="no such bucket"):
        list(storage.list("s3://nowhere/"))
    with pytest.raises(StorageError, match="secret key is wrong"):
        list(S3(f"http://127.0.0.1:{port}", ACCESS_KEY, "wrong").list("s3://bucket/"))


def test_missing_keys_are_an_error(port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageError, match="no credentials were found"):
        S3(f"http://127.0.0.1:{port}").info("s3://bucket/a")


def test_secrets_are_not_shown_or_logged(port: int, root: str, caplog: pytest.LogCaptureFixture) -> None:
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
    output = caplog.text + f"{storage!r}{storage}{caught.value!r}" + "".join(traceback.format_exception(caught.value))
    assert "503" in caplog.text  # logging was on
    for secret in (SECRET_KEY, token):
        assert secret not in output


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
        correct = all(storage.read(url, at, at + 100) == DATA[at : at + 100] for at in range(number, 2000, 100))
        os._exit(0 if correct else 1)
    finally:
        os._exit(2)


def test_a_fork_while_another_thread_creates_a_client_does_not_hang(storage: S3, root: str) -> None:
    write(storage, f"{root}/busy", DATA)
    stop = threading.Event()

    def make_clients() -> None:
        while not stop.is_set():
            new = S3(storage.endpoint, ACCESS_KEY, SECRET_KEY, region=f"r-{secrets.token_hex(2)}", retry=QUICK)
            new.info(f"{root}/busy")

    thread = threading.Thread(target=make_clients)
    thread.start()
    try:
        time.sleep(0.1)
        assert os.waitpid(_fork(storage, f"{root}/busy", 0), 0)[1] == 0
    finally:
        stop.set()
        thread.join()


def test_a_spawned_child_can_read(storage: S3, root: str) -> None:
    write(storage, f"{root}/spawn", DATA)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(storage.read, (f"{root}/spawn", 3, 30)) == DATA[3:30]


def test_connections_are_reused(port: int, root: str) -> None:
    write(_storage(port), f"{root}/again", DATA)
    with Proxy("127.0.0.1", port) as proxy:
        storage = _storage(proxy.port)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda at: storage.read(f"{root}/again", at, at + 9), range(100)))
        assert proxy.accepted <= 4


def test_a_pickle_keeps_the_keys_and_the_repr_hides_them() -> None:
    storage = S3(access_key=ACCESS_KEY, secret_key=SECRET_KEY)
    assert pickle.loads(pickle.dumps(storage)) == storage
    assert SECRET_KEY not in repr(storage)
    assert ACCESS_KEY not in repr(storage)
    assert repr(S3(endpoint="http://me:word@host:9000")).startswith("S3(endpoint='http://host:9000', region=None")


def test_an_endpoint_is_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"S3\(endpoint='localhost:9000'\): it must begin with http://"):
        S3(endpoint="localhost:9000")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(StorageError, match="the endpoint in the environment or the profile is not a URL"):
        S3(access_key=ACCESS_KEY, secret_key=SECRET_KEY).info("s3://bucket/a")


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
def credentials(port: int, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Sets the keys and the endpoint in the environment."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def assert_refused(command: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Require that a command exits with 1 soon, and prints one line with the problem and without secrets."""
    begin = time.monotonic()
    assert main(command) == 1
    error = capsys.readouterr().err
    assert time.monotonic() - begin < 60
    assert problem in error
    assert error.count("\n") == 1
    assert error.startswith("penstock: ")
    assert "never-to-be-seen" not in error


@pytest.mark.parametrize("mistake", REFUSED)
def test_reading_and_packing_report_a_mistake(
    mistake: str, photos: Path, credentials: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables, bucket, problem = REFUSED[mistake]
    for name, value in variables.items():
        credentials.setenv(name, value)
    for url in (f"s3://{bucket}/folder", f"s3://{bucket}/folder/a.tar", f"s3://{bucket}/a-{{0..3}}.tar"):
        with pytest.raises(StorageError, match=problem):
            list(ps.read_tar(url))
    with pytest.raises(StorageError, match=problem):
        ps.pack(photos, f"s3://{bucket}/out")
    assert_refused(["pack", str(photos), f"s3://{bucket}/out"], problem, capsys)
    assert_refused(["info", f"s3://{bucket}/folder"], problem, capsys)
    assert_refused(["index", f"s3://{bucket}/folder"], problem, capsys)


def test_a_missing_shard_of_a_brace_range_is_named(
    photos: Path, credentials: pytest.MonkeyPatch, root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.pack(photos, root, max_samples=3)
    S3().delete(f"{root}/shard-000002.tar")
    url = f"{root}/shard-{{000000..000003}}.tar"
    with pytest.raises(StorageError, match=r"no such object.*shard-000002\.tar"):
        list(ps.read_tar(url))
    assert_refused(["info", url], "shard-000002.tar", capsys)
    assert main(["verify", url]) == 1
    assert "shard-000002.tar: it is in the manifest but does not exist" in capsys.readouterr().out


def test_keys_without_write_permission_are_an_error(
    photos: Path, port: int, credentials: pytest.MonkeyPatch, root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Proxy("127.0.0.1", port) as proxy:
        credentials.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{proxy.port}")
        proxy.rule("PUT", times=None, status=403)
        with pytest.raises(StorageError, match="access denied: these keys lack the permission"):
            ps.pack(photos, root)
        assert_refused(["pack", str(photos), root], "access denied", capsys)
        proxy.clear()
        proxy.rule("POST", times=None, status=403)  # multipart uploads are not permitted
        with pytest.raises(StorageError, match="access denied"), S3().put(f"{root}/large", size_hint=LARGE) as upload:
            upload.write(bytes(LARGE))


def test_keys_without_the_permission_to_list_are_told_to_write_out_the_names(
    photos: Path, port: int, credentials: pytest.MonkeyPatch, root: str
) -> None:
    ps.pack(photos, root)
    with Proxy("127.0.0.1", port) as proxy:
        credentials.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{proxy.port}")
        proxy.rule("list-type", times=None, status=403)
        with pytest.raises(StorageError, match=r"access denied.*s3:ListBucket.*write out the names"):
            ps.read_tar(f"{root}/*.tar").first()
        assert ps.read_tar(f"{root}/shard-{{000000..000000}}.tar").first()
        with pytest.raises(StorageError, match=r"a run has to list its target.*access denied"):
            ps.pack(photos, f"{root}/other")


def test_a_forbidden_manifest_or_index_is_treated_as_missing(port: int, root: str) -> None:
    sample = {"__key__": "a", "txt": b"text"}
    with ps.TarWriter(f"{root}/a.tar", storage=_storage(port)) as writer:
        writer.write(sample)
    for name in ("manifest.json", "a.tar.index"):
        with Proxy("127.0.0.1", port) as proxy:
            proxy.rule(name, times=None, status=403)
            found = list(ps.read_tar(f"{root}/a.tar", storage=_storage(proxy.port)))
            assert [sample["txt"] for sample in found] == [b"text"]


def test_unfinished_uploads_are_aborted_if_they_are_ours(storage: S3, root: str) -> None:
    folder = root.removeprefix("s3://bucket/")
    for name in ("/shard-0.tar", "/shard-1.tar", "/shard-2.tar", "-not/shard-1.tar", "/other"):
        storage.call("create_multipart_upload", root, {"Bucket": "bucket", "Key": folder + name})

    def pending() -> set[str]:
        found = storage.call("list_multipart_uploads", root, {"Bucket": "bucket", "Prefix": folder})
        return {upload["Key"].removeprefix(folder) for upload in found["Uploads"]}

    assert storage.drop_uploads(root, lambda name: name in ("shard-1.tar", "shard-2.tar")) == 2
    assert pending() == {"/shard-0.tar", "-not/shard-1.tar", "/other"}
    assert storage.drop_uploads(root, lambda name: True) == 2
    assert pending() == {"-not/shard-1.tar"}


@pytest.mark.parametrize("hint", [None, 0, 1, 10**8, 10**10, 10**11, 5 * 10**12])
def test_no_object_needs_more_parts_than_s3_allows(hint: int | None) -> None:
    size = part_size(hint)
    assert 8 << 20 <= size <= 5 << 30
    assert (hint or 0) * 1.1 <= size * 10_000


def test_common_shards_are_uploaded_in_parts_of_8_to_16_mib() -> None:
    assert {part_size(hint) for hint in (None, 10**6, 10**9, 10**11)} == {8 << 20, 16 << 20}


def test_folders_of_a_long_listing_are_listed_side_by_side(port: int) -> None:
    with Proxy("127.0.0.1", port) as proxy:
        storage = _storage(proxy.port)
        found = [entry.url for entry in storage.list("s3://full/")]
        assert found == sorted(found)
        assert len(found) == len(set(found)) > 2 * SHARDS
        assert sum("delimiter" in request.path for request in proxy.requests) == 1
