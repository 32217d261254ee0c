"""Scripted faults in front of real servers: reads are exact, or the error names the fault; nothing hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StorageError
from penstock.storage import HTTP, S3, Retry, exists
from penstock.testing.proxy import Proxy
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, http_server, plain_server, s3_server

QUICK = Retry(tries=3, base_s=0.01, most_s=0.3, stall_s=1.0, connect_s=1.0)
DATA = os.urandom(300_000)
RANGE = (1_000, 290_000)
KINDS = ("s3", "http")

# Each list is what happens to the first requests, in order; later ones succeed.
RECOVERABLE: dict[str, list[dict[str, Any]]] = {
    "latency": [{"latency": 0.3}],
    "reset before the response": [{"refuse": True}, {"refuse": True}],
    "reset before the body": [{"reset_after": 0}],
    "reset in the body": [{"reset_after": 100_000}, {"reset_after": 70_000}],
    "cut short": [{"truncate_after": 1_000}],
    "cut short at the last byte": [{"truncate_after": RANGE[1] - RANGE[0] - 1}],
    "silent before the response": [{"hang": True}],
    "silent in the body": [{"stall_after": 50_000}],
    "a trickle": [{"trickle": 2_000}],
    "not HTTP": [{"garbage": True}],
    "500": [{"status": 500}],
    "502, 504": [{"status": 502}, {"status": 504}],
    "503 twice": [{"status": 503}, {"status": 503}],
    "429": [{"status": 429, "retry_after": "0.1"}],
    "408": [{"status": 408}],
    "another range": [{"headers": {"Content-Range": "bytes 5-288999/300000"}}],
    "a range with a wrong end": [{"headers": {"Content-Range": "bytes 1000-2000/300000"}}],
    "an invalid range": [{"headers": {"Content-Range": "lines 1-2"}}],
    "several faults": [{"status": 503}, {"reset_after": 200_000}, {"garbage": True}],
}
FATAL: dict[str, tuple[dict[str, Any], str]] = {
    "503 for ever": ({"status": 503}, "answers 503"),
    "429 for ever": ({"status": 429, "retry_after": "3600"}, "answers 429"),
    "resets for ever": ({"reset_after": 1_000}, "connection broke"),
    "refusals for ever": ({"refuse": True}, "connection broke"),
    "silence for ever": ({"hang": True}, "stalled"),
    "silence in the body for ever": ({"stall_after": 1_000}, "stalled"),
    "a trickle for ever": ({"trickle": 2_000}, "stalled"),
    "not HTTP for ever": ({"garbage": True}, "not HTTP"),
    "cut short for ever": ({"truncate_after": 1_000}, "early"),
    "another range for ever": ({"headers": {"Content-Range": "bytes 5-9/300000"}}, "another range"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "bucket").mkdir()
    (folder / "bucket" / "a.bin").write_bytes(DATA)
    return folder


@pytest.fixture(scope="module")
def ports(folder: Path) -> Iterator[dict[str, int]]:
    with s3_server(folder) as s3, http_server(folder) as http, s3_server(folder, keys=False) as unlocked:
        yield {"s3": s3, "http": http, "unlocked s3": unlocked}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def proxy(ports: dict[str, int], kind: str) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", ports[kind]) as proxy:
        yield proxy


@pytest.fixture
def url(kind: str, proxy: Proxy) -> str:
    return "s3://bucket/a.bin" if "s3" in kind else f"http://me:{SECRET_KEY}@127.0.0.1:{proxy.port}/bucket/a.bin"


def _storage(kind: str, port: int, retry: Retry = QUICK) -> S3 | HTTP:
    return S3(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY, retry=retry) if "s3" in kind else HTTP(retry=retry)


@pytest.fixture
def storage(kind: str, proxy: Proxy) -> S3 | HTTP:
    return _storage(kind, proxy.port)


def _script(proxy: Proxy, faults: list[dict[str, Any]]) -> None:
    for fault in faults:
        proxy.rule("GET", **fault)


@pytest.mark.parametrize("fault", RECOVERABLE)
def test_a_read_is_exact_in_spite_of(fault: str, proxy: Proxy, storage: S3 | HTTP, url: str) -> None:
    _script(proxy, RECOVERABLE[fault])
    begin = time.monotonic()
    assert storage.read(url, *RANGE) == DATA[slice(*RANGE)]
    assert time.monotonic() - begin < 60
    assert len(proxy.requests) >= len(RECOVERABLE[fault])


@pytest.mark.parametrize("fault", ["reset in the body", "silent in the body", "503 twice"])
def test_a_stream_is_exact_in_spite_of(fault: str, proxy: Proxy, storage: S3 | HTTP, url: str) -> None:
    _script(proxy, RECOVERABLE[fault])
    assert b"".join(storage.stream(url)) == DATA


@pytest.mark.parametrize("faults", [[{}], [{"reset_after": 1_000}, {}]], ids=["from the start", "after a break"])
@pytest.mark.parametrize("kind", ["unlocked s3", "http"])  # a proxy cannot remove a range header that is signed
def test_a_server_that_ignores_ranges_is_read(
    faults: list[dict[str, Any]], kind: str, proxy: Proxy, storage: S3 | HTTP, url: str
) -> None:
    _script(proxy, [*faults[:-1], {"ignore_range": True}])
    assert storage.read(url, *RANGE) == DATA[slice(*RANGE)]
    proxy.clear()
    _script(proxy, [*faults[:-1], {"ignore_range": True}])
    assert b"".join(storage.stream(url)) == DATA


@pytest.mark.parametrize(
    "fault", ["silent before the response", "503 twice", "429", "not HTTP", "reset before the response"]
)
def test_info_is_correct_in_spite_of(fault: str, proxy: Proxy, storage: S3 | HTTP, url: str) -> None:
    for rule in RECOVERABLE[fault]:
        proxy.rule(**rule)
    assert storage.info(url).size == len(DATA)


@pytest.mark.parametrize("name", FATAL)
def test_an_error_names_the_fault(name: str, proxy: Proxy, kind: str, url: str) -> None:
    fault, problem = FATAL[name]
    proxy.rule(times=None, **fault)
    retry = replace(QUICK, tries=2, stall_s=0.5 if problem == "stalled" else 1.0)
    begin = time.monotonic()
    with pytest.raises(StorageError, match=problem) as caught:
        _storage(kind, proxy.port, retry).read(url, *RANGE)
    assert time.monotonic() - begin < 60
    assert len(proxy.requests) == 2
    assert "a.bin" in str(caught.value)
    assert SECRET_KEY not in f"{caught.value}{caught.value!r}"


@pytest.mark.parametrize("status", [400, 401, 403, 405, 501])
def test_final_statuses_are_not_retried(status: int, proxy: Proxy, storage: S3 | HTTP, url: str) -> None:
    proxy.rule(times=None, status=status)
    with pytest.raises(StorageError):
        storage.read(url, *RANGE)
    assert len(proxy.requests) == 1


def test_a_read_resumes_where_it_broke(proxy: Proxy, storage: S3 | HTTP, url: str) -> None:
    proxy.rule("GET", reset_after=100_000)
    assert storage.read(url, *RANGE) == DATA[slice(*RANGE)]
    first, second = (_requested_start(request.headers) for request in proxy.requests)
    assert first == 1_000
    assert 1_000 < second <= 101_000


def _requested_start(headers: Any) -> int:
    value = {name.lower(): value for name, value in headers.items()}["range"]
    return int(value.removeprefix("bytes=").partition("-")[0])


def test_failures_between_good_progress_do_not_add_up(ports: dict[str, int], kind: str, proxy: Proxy, url: str) -> None:
    proxy.rule("GET", times=9, reset_after=30_000)
    retry = replace(QUICK, floor=10_000)  # 10,000 bytes reset the failures
    assert _storage(kind, proxy.port, retry).read(url, *RANGE) == DATA[slice(*RANGE)]


def test_another_tag_after_a_break_is_an_error(proxy: Proxy, storage: S3 | HTTP, url: str) -> None:
    proxy.rule("GET", reset_after=1_000)
    proxy.rule("GET", headers={"ETag": '"another"'})
    with pytest.raises(StorageError, match="changed while it was being read"):
        storage.read(url, *RANGE)


def test_another_size_after_a_break_is_an_error(proxy: Proxy, storage: S3 | HTTP, url: str) -> None:
    same = {"ETag": '"same"'}
    proxy.rule("GET", reset_after=1_000, headers=same)
    # What a server would answer for a longer object.
    proxy.rule(lambda request: True, ignore_range=True, headers={**same, "Content-Length": "300001"})
    with pytest.raises(StorageError, match="changed while it was being read"):
        storage.read(url, *RANGE)


def test_a_stream_whose_object_is_replaced_is_an_error(
    ports: dict[str, int], kind: str, proxy: Proxy, storage: S3 | HTTP, url: str, folder: Path
) -> None:
    direct = _storage("s3", ports["s3"])

    def replace_object() -> None:
        with direct.put("s3://bucket/replaced.bin") as upload:
            upload.write(DATA[::-1] + b"more")
            upload.commit()

    with direct.put("s3://bucket/replaced.bin") as upload:
        upload.write(DATA)
        upload.commit()
    proxy.rule("GET", reset_after=100_000)
    proxy.rule("GET", before=replace_object)
    with pytest.raises(StorageError, match="changed while it was being read"):
        list(storage.stream(url.replace("a.bin", "replaced.bin")))


def test_retry_after_is_honoured_up_to_most_s(proxy: Proxy, kind: str, url: str) -> None:
    storage = _storage(kind, proxy.port, replace(QUICK, most_s=0.8))
    storage.info(url)
    proxy.rule(status=429, retry_after="0.5")
    begin = time.monotonic()
    storage.info(url)
    assert time.monotonic() - begin >= 0.5
    proxy.rule(status=503, retry_after="3600")
    begin = time.monotonic()
    storage.info(url)
    assert 0.8 <= time.monotonic() - begin < 60


def test_a_hedged_request_overtakes_a_silent_one(proxy: Proxy, kind: str, url: str) -> None:
    storage = _storage(kind, proxy.port, replace(QUICK, stall_s=60.0, hedge=0.4))
    storage.info(url)
    for fault in ({"hang": True}, {"latency": 60.0}, {"stall_after": 0}):
        proxy.clear()
        proxy.rule("GET", **fault)
        begin = time.monotonic()
        assert storage.read(url, *RANGE) == DATA[slice(*RANGE)]
        assert time.monotonic() - begin < 50
        assert len(proxy.requests) == 2


def test_no_hedged_request_is_sent_when_the_first_is_quick(proxy: Proxy, kind: str, url: str) -> None:
    storage = _storage(kind, proxy.port, replace(QUICK, hedge=5.0))
    assert storage.read(url, *RANGE) == DATA[slice(*RANGE)]
    assert len(proxy.requests) == 1


def test_a_server_that_is_down_is_an_error_soon(kind: str) -> None:
    url = "s3://bucket/a.bin" if kind == "s3" else "http://127.0.0.1:1/a.bin"
    begin = time.monotonic()
    with pytest.raises(StorageError, match="refuses connections"):
        _storage(kind, 1).read(url, 0, 1)
    assert time.monotonic() - begin < 60


def test_without_a_tag_a_read_restarts_and_a_stream_fails(folder: Path) -> None:
    with plain_server(folder) as port, Proxy("127.0.0.1", port) as proxy:
        proxy.rule("GET", times=None, skip=1, headers={"Last-Modified": None})
        proxy.rule("GET", times=1, reset_after=50_000, headers={"Last-Modified": None})
        storage, url = HTTP(retry=QUICK), f"http://127.0.0.1:{proxy.port}/bucket/a.bin"
        assert storage.read(url, *RANGE) == DATA[slice(*RANGE)]
        proxy.clear()
        proxy.rule("GET", reset_after=50_000, headers={"Last-Modified": None})
        with pytest.raises(StorageError, match="sends no ETag, so the read cannot resume"):
            list(storage.stream(url))


class TestUploads:
    """Uploads, which S3 supports and HTTP does not."""

    SIZE = 17 * 2**20

    @pytest.fixture
    def kind(self) -> str:
        return "s3"

    @pytest.mark.parametrize(
        ("match", "fault"),
        [
            ("PUT", {"status": 503}),
            ("PUT", {"refuse": True}),
            ("PUT", {"deaf": True}),
            ("POST", {"status": 500}),
            ("POST", {"garbage": True}),
        ],
    )
    def test_a_multipart_upload_survives(
        self, match: str, fault: dict[str, Any], proxy: Proxy, storage: S3, folder: Path
    ) -> None:
        data = os.urandom(self.SIZE)
        proxy.rule(match, times=2, **fault)
        with storage.put("s3://bucket/up.bin", size_hint=self.SIZE) as upload:
            upload.write(data)
            assert upload.commit().size == self.SIZE
        assert (folder / "bucket" / "up.bin").read_bytes() == data

    def test_an_upload_succeeds_although_the_last_response_is_lost(
        self, proxy: Proxy, storage: S3, folder: Path
    ) -> None:
        data = os.urandom(self.SIZE)
        proxy.rule(lambda request: request.method == "POST" and "uploadId=" in request.path, deaf=True)
        with storage.put("s3://bucket/lost.bin", size_hint=self.SIZE) as upload:
            upload.write(data)
            assert upload.commit().size == self.SIZE
        assert (folder / "bucket" / "lost.bin").read_bytes() == data

    @pytest.mark.parametrize("size", [1_000, SIZE])
    def test_a_failed_upload_leaves_nothing(self, size: int, proxy: Proxy, storage: S3) -> None:
        proxy.rule("PUT", times=None, status=503)
        with storage.put("s3://bucket/never.bin", size_hint=size) as upload:
            upload.write(bytes(size))
            with pytest.raises(StorageError, match="503"):
                upload.commit()
        assert not exists(storage, "s3://bucket/never.bin")
        aborts = [request for request in proxy.requests if request.method == "DELETE"]
        assert len(aborts) == (1 if size == self.SIZE else 0)
