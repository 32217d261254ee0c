"""Plans over files of rows for the corpus: CSV with a row that does not fit, JSON lines, TFRecord."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from penstock.dataset import Dataset, read_csv, read_json, read_tfrecords
from penstock.formats.tfrecord import example, framed

_WRONG = 13  # the sample whose row in the CSV files is no row


@cache
def _folder(counts: tuple[int, ...]) -> str:
    folder = tempfile.mkdtemp(prefix="penstock-corpus-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    first = 0
    for shard, count in enumerate(counts):
        rows = [{"x": x, "text": f"row {x}\nof {count}"} for x in range(first, first + count)]
        cells = ["oops" if row["x"] == _WRONG else f'{row["x"]},"{row["text"]}"' for row in rows]
        _write(folder, f"{shard:04d}.csv", "\n".join(["x,text", *cells]).encode())
        _write(folder, f"{shard:04d}.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        _write(folder, f"{shard:04d}.tfrecord", b"".join(framed([example(row) for row in rows])))
        first += count
    return folder


def _write(folder: str, name: str, data: bytes) -> None:
    with open(os.path.join(folder, name), "wb") as file:
        file.write(data)


def line_plans(counts: Sequence[int], noise: Callable[..., Any]) -> dict[str, Callable[[], Dataset]]:
    """Plans over files of rows, with a function that takes ``rng``."""

    def at(kind: str) -> str:
        return os.path.join(_folder(tuple(counts[:4])), f"*.{kind}")  # opening one parses rows: fewer say as much

    return {
        "csv with a wrong row": lambda: read_csv(at("csv")).shuffle(9, shards=3).map(noise).on_error("skip"),
        "json lines in batches": lambda: read_json(at("jsonl"), workers=2).shuffle().batched(4),
        "tfrecords": lambda: read_tfrecords(at("tfrecord")).shuffle(8).map(noise),
    }
