"""Samples by position, key, condition and chance: exact, and within bounds of bytes and requests."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.formats.tar.writer import ShardWriter
from penstock.testing.proxy import Proxy
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, http_server, s3_server
from penstock.view.browser import Browser, parse_position

FULL = os.environ.get("PENSTOCK_FULL") == "1"
SAMPLES, SHARDS = (1_000_000, 200) if FULL else (2_000, 20)
LABELS = 1000 if FULL else 20
LATENCY_S = 0.05


@pytest.fixture(scope="module")
def browser(tiny_shards: list[Path]) -> Browser:
    """The samples in ``tiny_shards``, which have no index beside them."""
    return Browser(ps.read_tar([str(path) for path in tiny_shards]))


def test_positions_are_those_of_the_dataset(browser: Browser, tiny_shards: list[Path]) -> None:
    ds = ps.read_tar([str(path) for path in tiny_shards])
    for sample in browser.page([0, 24, 25, 99, 3]):
        assert sample.key == ds[sample.position]["__key__"]
        assert sample.fields["jpg"] == ds[sample.position]["jpg"]
        assert sample.shard == ds[sample.position]["__url__"]
    with pytest.raises(IndexError, match="the last one is 99"):
        browser.place(100)


def test_only_the_shards_up_to_a_position_are_counted(tiny_shards: list[Path]) -> None:
    browser = Browser(ps.read_tar([str(path) for path in tiny_shards]))
    assert browser.total is None
    browser.place(3)
    assert browser.counted == 25
    browser.place(99)
    assert browser.total == 100


def test_a_key_is_found_in_any_shard(browser: Browser) -> None:
    assert [browser.find_key(f"{number:06}") for number in (0, 30, 99)] == [0, 30, 99]
    assert browser.find_key("000100") is None
    assert browser.find_key("../../etc/passwd") is None


def test_a_condition_finds_what_a_filter_finds(browser: Browser, tiny_shards: list[Path]) -> None:
    found = browser.search('cls == 1 and json["number"] > 20', 0, 1000, seconds=60)
    samples = ps.read_tar([str(path) for path in tiny_shards]).decode(json=None, cls=None).take_all()
    wanted = [place for place, sample in enumerate(samples) if sample["cls"] == 1 and sample["json"]["number"] > 20]
    assert (found.positions, found.after, found.searched) == (wanted, None, 100)
    first = browser.search("cls == 1", 0, 5, seconds=60)
    rest = browser.search("cls == 1", first.after or 0, 1000, seconds=60)
    assert [*first.positions, *rest.positions] == [number for number in range(100) if number % 3 == 1]


def test_a_search_ends_in_time_and_continues(browser: Browser) -> None:
    found = browser.search("cls == 7", 0, 5, seconds=0.0)
    assert found.positions == []
    assert found.after is not None
    assert found.after <= found.searched <= 100
    with pytest.raises(PlanError, match="is not an expression"):
        browser.search("cls ==", 0, 5)


def test_an_index_with_values_answers_alone(tmp_path: Path) -> None:
    samples = [{"__key__": f"{n}", "cls": str(n % 4).encode(), "jpg": bytes(200)} for n in range(40)]
    ps.from_items(samples).write_tar(tmp_path / "a.tar")
    browser = Browser(ps.read_tar(tmp_path / "a.tar"))
    found = browser.search("cls == 2", 0, 100)
    assert found.from_index
    assert found.positions == list(range(2, 40, 4))
    assert not browser.search('has("jpg") and cls == 2', 0, 100).from_index
    assert browser.search('cls == 2 and key == "6"', 0, 100).positions == [6]


def test_a_random_order_has_every_sample_once_and_depends_on_the_seed(browser: Browser) -> None:
    order = browser.random_positions(5, 0, 200)
    assert sorted(order) == list(range(100))
    assert browser.random_positions(5, 10, 5) == order[10:15]
    assert browser.random_positions(6, 0, 200) != order


def test_large_fields_are_named_and_not_read(tmp_path: Path) -> None:
    sample = {"__key__": "a", "txt": b"small", "bin": bytes(20_000_000)}
    with ps.TarWriter(tmp_path / "a.tar") as writer:
        writer.write(sample)
    browser = Browser(ps.read_tar(tmp_path / "a.tar"))
    shown = browser.page([0])[0]
    assert shown.fields == {"txt": b"small"}
    assert shown.large == {"bin": 20_000_000}
    assert browser.sample(0).fields.keys() == {"txt", "bin"}


def test_conditions_on_tables_see_values(tmp_path: Path) -> None:
    rows = [{"label": n % 3, "name": f"n{n}", "vector": np.zeros(3)} for n in range(30)]
    ps.from_items(rows).write_parquet(tmp_path / "rows")
    browser = Browser(ps.read_parquet(tmp_path / "rows"))
    assert browser.search("label == 1", 0, 4).positions == [1, 4, 7, 10]
    assert browser.search('name == "n7"', 0, 4).positions == [7]
    assert browser.search("label > name", 0, 4).positions == []  # cannot be compared: not met


def test_remote_shards_without_an_index_are_not_all_fetched(tiny_shards: list[Path], tmp_path: Path) -> None:
    for path in tiny_shards:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with http_server(tmp_path) as port, Proxy("127.0.0.1", port) as proxy:
        browser = Browser(ps.read_tar(f"http://127.0.0.1:{proxy.port}/train-{{0000..0003}}.tar"))
        assert not browser.indexed
        assert [sample.key for sample in browser.page([0, 1])] == ["000000", "000001"]
        for refused in (lambda: browser.find_key("000050"), lambda: browser.random_positions(1, 0, 5)):
            with pytest.raises(PlanError, match="penstock index"):
                refused()
        assert not [request for request in proxy.requests if "train-0002" in request.path and request.method == "GET"]
        browser.close()


@pytest.mark.parametrize("text", ["-1", "1.5", "x", "٣", "9" * 20, " 1", "1\n"])
def test_a_position_is_digits(text: str) -> None:
    with pytest.raises(PlanError, match="is not a position"):
        parse_position(text, None)


@pytest.fixture
def remote(tmp_path: Path, warm_python: str) -> Iterator[tuple[str, str, Proxy]]:
    """The address and the cookie of a page over shards on an S3 server with 50 ms latency, and the proxy before it."""
    root = tmp_path / "s3"
    root.mkdir()
    with ShardWriter(str(root / "bucket"), max_samples=SAMPLES // SHARDS, background=True) as writer:
        for number in range(SAMPLES):  # keys in no order, as after a shuffle
            key = f"{number * 7919 % SAMPLES:07}"
            writer.write({"__key__": key, "txt": b"t" * 500, "cls": str(number * 31 % LABELS).encode()})
    with s3_server(root) as port, Proxy("127.0.0.1", port) as proxy:
        proxy.rule(times=None, latency=LATENCY_S)
        env = {**os.environ, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        env |= {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{proxy.port}", "AWS_DEFAULT_REGION": "us-east-1"}
        command = [warm_python, "-m", "penstock", "view", "s3://bucket/", "--no-browser"]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            match = re.fullmatch(r"http://(127\.0\.0\.1:(\d+))/\?token=(\S+)\n", process.stdout.readline())
            assert match
            yield match[1], f"penstock_view_{match[2]}={match[3]}", proxy
        finally:
            process.terminate()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _timed(remote: tuple[str, str, Proxy], path: str) -> tuple[float, int, str]:
    """Return the seconds and the requests to the storage that a page takes, and its content or target."""
    host, cookie, proxy = remote
    before, begun = len(proxy.requests), time.perf_counter()
    connection = HTTPConnection(host, timeout=120)
    connection.request("GET", path, headers={"Cookie": cookie})
    response = connection.getresponse()
    body = response.read().decode()
    seconds = time.perf_counter() - begun
    connection.close()
    assert response.status in (200, 303), body
    return seconds, len(proxy.requests) - before, response.getheader("location") or body


def test_pages_over_remote_shards_take_few_requests(remote: tuple[str, str, Proxy]) -> None:
    opening = len(remote[2].requests)
    seconds = {}
    seconds["first page"], requests, body = _timed(remote, "/samples?n=50")
    assert requests + opening <= 20
    assert body.count('class="card"') == 50
    last = SAMPLES // 50
    page = min(5000, last - 1)
    seconds["page 5,000"], requests, body = _timed(remote, f"/samples?n=50&page={page}")
    assert requests <= 20
    assert f"Page {page:,} of {last:,}" in body
    position = SAMPLES * 3 // 4 + 7
    key = f"{position * 7919 % SAMPLES:07}"
    seconds["key"], _, target = _timed(remote, f"/samples?find={key}")
    assert target == f"/sample/{position}"
    label = 31 * 7 % LABELS
    seconds["label"], _, body = _timed(remote, f"/samples?n=50&where=cls=={label}")
    assert body.count('class="card"') == 50
    assert "searched by the indexes" in body
    whole = [request for request in remote[2].requests if request.path.endswith(".tar") and request.method == "GET"]
    assert all("Range" in request.headers for request in whole)
    if FULL:
        print(seconds)
        assert max(seconds.values()) < 1.5, seconds
