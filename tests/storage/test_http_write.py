"""Objects are written, listed and deleted over WebDAV as on any storage, and over plain PUT."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import pytest

import penstock as ps
from penstock.errors import PlanError, StorageError
from penstock.formats.files import find_files
from penstock.storage import HTTP, Retry, expand
from penstock.storage.protocol import Storage
from penstock.testing.proxy import Proxy
from penstock.testing.servers import http_server, webdav_server
from penstock.testing.storages import DATA, StorageTests, write

QUICK = Retry(tries=6, base_s=0.02, most_s=0.1, stall_s=30.0, connect_s=10.0)
USER, PASSWORD = "user", "never-to-be-seen"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dav")


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    with webdav_server(folder, "--user", USER, "--pass", PASSWORD) as port:
        yield port


@pytest.fixture
def storage() -> HTTP:
    return HTTP(USER, PASSWORD, retry=QUICK)


@pytest.fixture
def root(port: int) -> str:
    return f"http://127.0.0.1:{port}/{uuid4().hex}"


class TestWebDav(StorageTests):
    def test_a_listing_is_of_the_folder_recursive_and_sorted(self, storage: Storage, root: str) -> None:
        names = ["b/z", "b/a/x", "b/a-", "bc", "b.tar", "b/ü ü+", "b/100%25", "b/2", "b/10"]
        for number, name in enumerate(names):
            write(storage, f"{root}/{name}", b"x" * number)
        want = sorted((f"{root}/{name}", number) for number, name in enumerate(names) if name.startswith("b/"))
        for prefix in (f"{root}/b", f"{root}/b/"):
            assert [(found.url, found.size) for found in storage.list(prefix)] == want
        for url, size in want:
            assert storage.info(url).size == size
        assert list(storage.list(f"{root}/nothing")) == []


def test_shards_are_packed_to_webdav_and_read_back(root: str) -> None:
    storage = HTTP(USER, PASSWORD)  # patient: there are many requests, and the machine may be busy
    samples = [{"__key__": f"{n:04d}", "txt": str(n).encode()} for n in range(50)]
    ps.from_items(samples).write_tar(f"{root}/shards", max_samples=20, storage=storage)
    ds = ps.read_tar(f"{root}/shards", storage=storage)
    assert len(ds) == 50
    assert [sample["txt"] for sample in ds] == [sample["txt"] for sample in samples]


def test_globs_and_folders_are_listed_on_webdav(root: str, storage: HTTP) -> None:
    for name in ("a-0.tar", "a-1.tar", "a b.csv", "t.csv", "in/a-2.tar", ".index"):
        write(storage, f"{root}/{name}", DATA)

    def names(pattern: str, *suffixes: str) -> list[str]:
        return [url.removeprefix(f"{root}/") for url in expand([f"{root}/{pattern}"], suffixes, storage)]

    assert names("*.tar") == names("a-[01].tar") == names("", ".tar") == ["a-0.tar", "a-1.tar"]
    assert names("**/a-*.tar") == ["a-0.tar", "a-1.tar", "in/a-2.tar"]
    assert names("a%20*.csv") == ["a b.csv"]
    assert names("*.tar?token=1") == ["*.tar?token=1"]
    assert find_files((f"{root}/",), (".tar",), storage) == [
        f"{root}/{n}" for n in ("a-0.tar", "a-1.tar", "in/a-2.tar")
    ]
    with pytest.raises(StorageError, match="matches no files"):
        names("*.parquet")


def test_names_on_webdav_are_in_natural_order_below_the_folder_as_it_was_written(root: str, storage: HTTP) -> None:
    for name in ("a-1.csv", "a-10.csv", "a-2.csv"):
        write(storage, f"{root}/in here/{name}", b"x\n1\n")
    for folder in (f"{root}/in here", f"{root}/in%20here"):
        names = [f"{folder}/{name}" for name in ("a-1.csv", "a-2.csv", "a-10.csv")]
        assert expand([f"{folder}/"], (".csv",), storage) == names
        assert sorted(entry.url for entry in storage.list(folder)) == sorted(names)
    assert [url[-6:] for url in expand([f"{root}/in here/*.csv"], (), storage)] == ["-1.csv", "-2.csv", "10.csv"]


def test_folders_of_shards_on_webdav_have_no_hidden_shards_and_may_be_alternatives(root: str, storage: HTTP) -> None:
    content = io.BytesIO()
    with ps.TarWriter(content) as writer:
        writer.write({"__key__": "a", "txt": b"x"})
    for name in ("train/a.tar", "train/._a.tar", "val/b.tar"):
        write(storage, f"{root}/{name}", content.getvalue())
    ds = ps.read_tar(f"{root}/{{train,val}}", storage=storage)
    assert [sample["__url__"] for sample in ds] == [f"{root}/train/a.tar", f"{root}/val/b.tar"]


@pytest.mark.parametrize("pattern", ["", "*.csv"])
def test_a_folder_or_glob_on_a_server_that_cannot_list_is_an_error(folder: Path, pattern: str) -> None:
    with http_server(folder) as port, pytest.raises(StorageError, match="cannot be listed; write out the names"):
        ps.read_csv(f"http://127.0.0.1:{port}/{pattern}").first()


def test_a_name_with_the_characters_of_a_glob_is_read_where_no_folder_is_listed(tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    (served / "a[1]*.csv").write_text("x\n1\n")
    with http_server(served) as port:
        assert ps.read_csv(f"http://127.0.0.1:{port}/a[1]*.csv").take_all() == [{"x": 1}]


def test_an_upload_survives_connections_that_break(storage: HTTP, port: int) -> None:
    with Proxy("127.0.0.1", port) as proxy:
        for method in ("PUT", "MOVE"):
            proxy.rule(method, refuse=True)
            proxy.rule(method, status=503)
            proxy.rule(method, deaf=True)
        url = f"http://127.0.0.1:{proxy.port}/broken/object"
        write(storage, url, DATA)
        assert storage.read(url, 0, len(DATA)) == DATA
        assert [found.url for found in storage.list(f"http://127.0.0.1:{proxy.port}/broken")] == [url]


def test_nothing_is_left_of_an_upload_that_fails(storage: HTTP, port: int, folder: Path) -> None:
    with Proxy("127.0.0.1", port) as proxy:
        url = f"http://127.0.0.1:{proxy.port}/failing/object"
        write(storage, url, b"old")
        proxy.rule("MOVE", times=None, status=507)
        with pytest.raises(StorageError, match="507"):
            write(storage, url, DATA)
        assert storage.read(url, 0, 3) == b"old"
    assert [path.name for path in (folder / "failing").iterdir()] == ["object"]


class _PutHandler(SimpleHTTPRequestHandler):
    """A plain server that accepts PUT and DELETE with a token, and has none of WebDAV's methods."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {PASSWORD}":
            return self._answer(401)
        path = Path(self.translate_path(self.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self._answer(201)

    def do_DELETE(self) -> None:
        path = Path(self.translate_path(self.path))
        existed = path.exists()
        path.unlink(missing_ok=True)
        self._answer(204 if existed else 404)


@contextmanager
def put_server(folder: Path) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_PutHandler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_plain_server_is_written_by_put_with_a_token(tmp_path: Path) -> None:
    with put_server(tmp_path) as port:
        storage, url = HTTP(token=PASSWORD, retry=QUICK), f"http://127.0.0.1:{port}/a/b.bin"
        write(storage, url, DATA)
        assert storage.read(url, 0, len(DATA)) == DATA
        storage.delete(url)
        storage.delete(url)
        assert not list(tmp_path.rglob("*.bin"))
        with pytest.raises(StorageError, match="cannot be listed"):
            list(storage.list(url))
        with pytest.raises(StorageError, match=r"requires authentication \(401\)") as caught:
            write(HTTP(token="wrong", retry=QUICK), url, DATA)
        assert "wrong" not in str(caught.value).replace("missing or wrong", "")


def test_a_plain_server_takes_single_archives_and_refuses_runs(tmp_path: Path) -> None:
    with put_server(tmp_path) as port:
        storage, host = HTTP(token=PASSWORD, retry=QUICK), f"http://127.0.0.1:{port}"
        with ps.TarWriter(f"{host}/one.tar", storage=storage) as shard:
            shard.write({"__key__": "k", "txt": "text"})
        assert ps.read_tar(f"{host}/one.tar", storage=storage).first()["txt"] == b"text"
        with pytest.raises(
            StorageError, match=r"a run has to list its target.*cannot be listed; .*ps.TarWriter\(url\)"
        ):
            ps.from_items([{"txt": "text"}]).write_tar(f"{host}/many", storage=storage)
        assert sorted(path.name for path in tmp_path.rglob("*.*") if path.is_file()) == ["one.tar", "one.tar.index"]


def test_a_server_that_only_reads_says_so(tmp_path: Path) -> None:
    with http_server(tmp_path) as port:
        url = f"http://127.0.0.1:{port}/object"
        with pytest.raises(StorageError, match=r"does not accept uploads \(405\)"):
            write(HTTP(retry=QUICK), url, DATA)
        with pytest.raises(StorageError, match=r"does not delete objects \(405\)"):
            HTTP(retry=QUICK).delete(url)


def test_credentials_are_checked_and_never_shown() -> None:
    assert PASSWORD not in repr(HTTP(USER, PASSWORD))
    assert PASSWORD not in repr(HTTP(token=PASSWORD))
    with pytest.raises(PlanError, match="both user and password"):
        HTTP(user=USER)
    with pytest.raises(PlanError, match="not both"):
        HTTP(USER, PASSWORD, token=PASSWORD)
    assert HTTP(headers={"X-Key": "k"}) == HTTP(headers=(("X-Key", "k"),))  # type: ignore[arg-type]
    for wrong in ({"headers": ("X-Key", "k")}, {"headers": {"X-Key": 3}}, {"token": 3}, {"retry": 3}):
        with pytest.raises(PlanError, match=next(iter(wrong))):
            HTTP(**wrong)
