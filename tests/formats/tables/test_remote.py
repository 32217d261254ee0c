"""Parquet on real servers, with faults on the way: every row once, and no more bytes than needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from penstock.errors import StorageError
from penstock.storage import HTTP, S3, Retry
from penstock.testing.proxy import Proxy
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, http_server, s3_server

QUICK = Retry(tries=6, base_s=0.01, most_s=0.3, stall_s=20.0, connect_s=20.0)
ROWS = 3000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    folder = tmp_path_factory.mktemp("parquet")
    (folder / "bucket").mkdir()
    text = pa.array([f"{i:0400d}" for i in np.random.default_rng(0).permutation(ROWS).tolist()])
    table = pa.table({"id": np.arange(ROWS), "label": np.arange(ROWS) // 100, "text": text})
    ps.from_arrow(table).write_parquet(folder / "bucket" / "table", max_samples=1000, compression="none")
    with s3_server(folder) as s3, http_server(folder) as http:
        yield {"s3": s3, "http": http}


@pytest.fixture(params=["s3", "http"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def proxy(served: dict[str, int], kind: str) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", served[kind]) as proxy:
        yield proxy


def opened(kind: str, proxy: Proxy) -> ps.Dataset:
    """The three files, through the proxy."""
    names = [f"{number:05d}-of-00003.parquet" for number in range(3)]
    if kind == "s3":
        storage = S3(f"http://127.0.0.1:{proxy.port}", ACCESS_KEY, SECRET_KEY, retry=QUICK)
        return ps.read_parquet("s3://bucket/table", storage=storage)
    urls = [f"http://127.0.0.1:{proxy.port}/bucket/table/{name}" for name in names]
    return ps.read_parquet(urls, storage=HTTP(retry=QUICK))


def test_every_row_is_delivered_once_despite_faults(kind: str, proxy: Proxy) -> None:
    faults: list[dict[str, Any]] = [{"reset_after": 500}, {"status": 503}, {"truncate_after": 99}, {"refuse": True}]
    for skip, fault in enumerate(faults):
        proxy.rule("GET /bucket/table/", skip=2 * skip, **fault)
    got = [i for batch in opened(kind, proxy).shuffle(500).iter_batches(100) for i in batch["id"].tolist()]
    assert sorted(got) == list(range(ROWS))


def test_only_wanted_columns_of_wanted_files_are_fetched(kind: str, proxy: Proxy) -> None:
    ds = opened(kind, proxy).filter(ps.col("label") == 3).select("id")
    assert [sample["id"] for sample in ds] == list(range(300, 400))
    requests = [{name.lower(): value for name, value in request.headers.items()} for request in proxy.requests]
    ranges = [headers["range"].removeprefix("bytes=").split("-") for headers in requests if "range" in headers]
    sizes = [int(high) - int(low) + 1 for low, high in ranges if low and high]
    assert sizes
    assert sum(sizes) < ROWS * 400 / 4  # the footers of three files, and two columns of one


def test_a_server_that_keeps_failing_is_an_error_that_names_the_file(kind: str, proxy: Proxy) -> None:
    proxy.rule("00001-of-00003", times=None, status=503)
    with pytest.raises(StorageError, match=r"00001-of-00003\.parquet"):
        opened(kind, proxy).take_all()


def test_groups_and_sorting_work_on_remote_files(kind: str, proxy: Proxy) -> None:
    counts = opened(kind, proxy).groupby("label").count().take_all()
    assert counts == [{"label": label, "count": 100} for label in range(ROWS // 100)]
    assert opened(kind, proxy).sort("text").first()["text"] == f"{0:0400d}"
