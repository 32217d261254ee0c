"""Epochs over shards on failing real servers: every sample is delivered exactly once, or one error names the fault."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PenstockError
from penstock.storage import HTTP, S3, Retry
from penstock.testing.proxy import Proxy, Request
from penstock.testing.servers import ACCESS_KEY, SECRET_KEY, http_server, s3_server

SAMPLES = [{"__key__": f"{i:03}", "bin": os.urandom(5_000), "cls": i % 5} for i in range(300)]
WANT = Counter((sample["__key__"], sample["bin"]) for sample in SAMPLES)
QUICK = Retry(tries=4, base_s=0.01, most_s=0.2, stall_s=0.7, connect_s=1.0)

# The fault of requests for shards (not for their indexes), how often it happens, and the message; "": retries succeed.
FAULTS: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "latency": ({"latency": 0.1}, None, ""),
    "resets before the answer": ({"refuse": True}, 2, ""),
    "resets after some bytes": ({"reset_after": 30_000}, 3, ""),
    "truncated bodies": ({"truncate_after": 10_000}, 3, ""),
    "stalls": ({"stall_after": 20_000}, 2, ""),
    "silence": ({"hang": True}, 2, ""),
    "a trickle": ({"trickle": 2_000}, 2, ""),
    "503": ({"status": 503}, 3, ""),
    "429 with Retry-After": ({"status": 429, "retry_after": "0.1"}, 3, ""),
    "no HTTP": ({"garbage": True}, 2, ""),
    "another content under the same name": ({"headers": {"ETag": '"other"'}}, None, "changed while it was being read"),
    "503 for ever": ({"status": 503}, None, "answers 503"),
    "stalls for ever": ({"stall_after": 100}, None, "stalled"),
    "no permission": ({"status": 403}, None, "403"),
    "gone": ({"status": 404}, None, "no such object"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    ps.from_items(SAMPLES).write_tar(str(folder / "bucket" / "train"), max_samples=50)
    return folder


@pytest.fixture(scope="module")
def ports(folder: Path) -> Iterator[dict[str, int]]:
    with s3_server(folder) as s3, http_server(folder) as http:
        yield {"s3": s3, "http": http}


@pytest.mark.parametrize("kind", ["s3", "http"])
@pytest.mark.parametrize("fault_name", FAULTS)
def test_an_epoch_is_exact_or_raises_an_error_that_names_the_fault(
    fault_name: str, kind: str, ports: dict[str, int]
) -> None:
    fault, times, message = FAULTS[fault_name]
    started = time.monotonic()
    with Proxy("127.0.0.1", ports[kind]) as proxy:
        hits: list[str] = []

        def on_shard(request: Request) -> bool:
            """Match reads of a shard's bytes, but not requests for its size and tag."""
            reads = request.headers.get("Range", "bytes=0-0") != "bytes=0-0"
            matches = reads and request.path.partition("?")[0].endswith(".tar")
            hits.extend([request.path] * matches)
            return bool(matches)

        proxy.rule(on_shard, times=times, **fault)
        ds = _dataset(kind, proxy.port)
        if not message:
            assert Counter((sample["__key__"], sample["bin"]) for sample in ds) == WANT
        else:
            with pytest.raises(PenstockError, match=message) as caught:
                list(ds)
            assert "shard-" in str(caught.value)
            assert SECRET_KEY not in f"{caught.value}{caught.value.__cause__}{caught.value.__context__}"
        assert hits, "the fault did not happen"
    assert time.monotonic() - started < 100


def _dataset(kind: str, port: int) -> ps.Dataset:
    storage: S3 | HTTP
    if kind == "s3":
        storage = S3(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY, retry=QUICK)
        return ps.read_tar("s3://bucket/train", storage=storage).shuffle(100, shards=3)
    names = "shard-{000000..000005}.tar"
    url = f"http://me:{SECRET_KEY}@127.0.0.1:{port}/bucket/train/{names}"
    return ps.read_tar(url, storage=HTTP(retry=QUICK)).shuffle(100, shards=3)
