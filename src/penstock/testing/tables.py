"""Plans over tables for the corpus: Parquet files with row groups of a few rows, and tables in memory."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from penstock.dataset import Dataset, from_arrow, read_parquet
from penstock.errors import MissingExtra
from penstock.plan import col


def _table(shard: int, count: int, first: int) -> Any:
    try:
        import pyarrow as pa
    except ImportError as exc:
        raise MissingExtra("the plans over tables", "tables") from exc
    x = np.arange(first, first + count)
    lists = [np.arange(i % 4, dtype=np.int32) for i in x.tolist()]
    return pa.table(
        {
            "shard": np.full(count, shard),
            "index": np.arange(count),
            "x": x,
            "text": pa.array([None if i % 5 == 2 else f"row {i}" for i in x.tolist()], pa.string()),
            "ragged": pa.array(lists, pa.list_(pa.int32())),
            "even": pa.array([[i, i + 1] for i in x.tolist()], pa.list_(pa.float32(), 2)),
        }
    )


@cache
def _folder(counts: tuple[int, ...]) -> str:
    import pyarrow.parquet as pq

    folder = tempfile.mkdtemp(prefix="penstock-corpus-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    first = 0
    for shard, count in enumerate(counts):
        pq.write_table(_table(shard, count, first), os.path.join(folder, f"part-{shard:04d}.parquet"), row_group_size=4)
        first += count
    return folder


def tables(counts: Sequence[int]) -> Dataset:
    """A dataset of Parquet files with these counts: the fields of ``numbers``, text and lists."""
    return read_parquet(_folder(tuple(counts)))


def table_plans(
    counts: Sequence[int], noise: Callable[..., Any], doubled: Callable[..., Any]
) -> dict[str, Callable[[], Dataset]]:
    """Plans over tables, with a function that takes ``rng`` and one on batches."""
    return {
        "tables": lambda: tables(counts),
        "tables shuffled": lambda: tables(counts).shuffle(7, shards=3).select("x", "ragged").map(noise),
        "tables filtered": lambda: (
            tables(counts).shuffle().filter((col("x") > 20) & ~col("text").is_null()).drop("even")
        ),
        "tables in batches": lambda: tables(counts).shuffle(9).filter(col("x") < 50).map_batches(doubled).batched(4),
        "columns in batches": lambda: tables(counts).rename(y="x").batched(5),
        "table in memory": lambda: from_arrow(_table(0, 23, 0)).shuffle().filter(col("text").isin(["row 1", "row 9"])),
    }
