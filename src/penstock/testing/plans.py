"""The corpus: a plan of every kind, over synthetic shards, tables and files of rows."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from penstock.dataset import Dataset, from_arrow, mix, read_csv, read_json, read_parquet, read_tfrecords
from penstock.errors import import_extra
from penstock.formats.rows.tfrecord import encode_example, frame_records
from penstock.plan import col
from penstock.testing.number_source import numbers

_MALFORMED = 13  # the sample whose line in the CSV files cannot be parsed


@cache
def _row_folder(counts: tuple[int, ...]) -> str:
    """Write the samples as CSV, JSON lines and TFRecord to a temporary folder that is removed at exit."""
    folder = tempfile.mkdtemp(prefix="penstock-corpus-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    first = 0
    for shard, count in enumerate(counts):
        rows = [{"x": x, "text": f"row {x}\nof {count}"} for x in range(first, first + count)]
        cells = ["oops" if row["x"] == _MALFORMED else f'{row["x"]},"{row["text"]}"' for row in rows]
        _write(folder, f"{shard:04d}.csv", "\n".join(["x,text", *cells]).encode())
        _write(folder, f"{shard:04d}.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        _write(folder, f"{shard:04d}.tfrecord", b"".join(frame_records([encode_example(row) for row in rows])))
        first += count
    return folder


def _write(folder: str, name: str, data: bytes) -> None:
    with open(os.path.join(folder, name), "wb") as file:
        file.write(data)


def _row_plans(counts: Sequence[int]) -> dict[str, Callable[[], Dataset]]:
    """Return plans over files of rows: CSV with a malformed row, JSON lines, TFRecord."""

    def pattern(suffix: str) -> str:
        return os.path.join(_row_folder(tuple(counts[:4])), f"*.{suffix}")  # four shards: opening one parses all rows

    return {
        "csv with a wrong row": lambda: read_csv(pattern("csv")).shuffle(9, shards=3).map(noise).on_error("skip"),
        "json lines in batches": lambda: read_json(pattern("jsonl"), workers=2).shuffle().batched(4),
        "tfrecords": lambda: read_tfrecords(pattern("tfrecord")).shuffle(8).map(noise),
    }


def _table(shard: int, count: int, first: int) -> Any:
    pa = import_extra("pyarrow", "the plans over tables", "tables")
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
def _table_folder(counts: tuple[int, ...]) -> str:
    import pyarrow.parquet as pq

    folder = tempfile.mkdtemp(prefix="penstock-corpus-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    first = 0
    for shard, count in enumerate(counts):
        pq.write_table(_table(shard, count, first), os.path.join(folder, f"part-{shard:04d}.parquet"), row_group_size=4)
        first += count
    return folder


def _tables(counts: Sequence[int]) -> Dataset:
    """Return a dataset of Parquet files with these counts: the fields of ``numbers``, text and lists."""
    return read_parquet(_table_folder(tuple(counts)))


def _table_plans(counts: Sequence[int]) -> dict[str, Callable[[], Dataset]]:
    """Return plans over Parquet files with row groups of a few rows, and over tables in memory."""
    return {
        "tables": lambda: _tables(counts),
        "tables shuffled": lambda: _tables(counts).shuffle(7, shards=3).select("x", "ragged").map(noise),
        "tables filtered": lambda: (
            _tables(counts).shuffle().filter((col("x") > 20) & ~col("text").is_null()).drop("even")
        ),
        "tables in batches": lambda: _tables(counts).shuffle(9).filter(col("x") < 50).map_batches(_doubled).batched(4),
        "columns in batches": lambda: _tables(counts).rename(y="x").batched(5),
        "table in memory": lambda: from_arrow(_table(0, 23, 0)).shuffle().filter(col("text").isin(["row 1", "row 9"])),
    }


def noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Add a number drawn from the sample's own generator."""
    return {**sample, "noise": int(rng.integers(1 << 40))}


def _random_most(sample: dict[str, Any], rng: np.random.Generator) -> bool:
    return bool(rng.random() < 0.7)


def _copies(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**sample, "copy": j} for j in range(sample["x"] % 4)]


def _random_copies(sample: dict[str, Any], rng: np.random.Generator) -> Iterable[dict[str, Any]]:
    for j in range(int(rng.integers(0, 4))):
        yield {**sample, "copy": j, "draw": float(rng.random())}


def _odd(sample: dict[str, Any]) -> bool:
    return bool(sample["x"] % 2)


def fails(sample: dict[str, Any]) -> dict[str, Any]:
    """Raise ZeroDivisionError for every fifth sample."""
    return {**sample, "inverse": 1 // (sample["x"] % 5)}


class _Adds:
    """A model: constructed once per worker, called on every sample."""

    def __init__(self, number: int, name: str = "sum") -> None:
        self._number, self._name = number, name

    def __call__(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**sample, self._name: sample["x"] + self._number, "draw": int(rng.integers(1 << 40))}


class _Above:
    """A class for filter and flat_map: whether a sample is above a number, or as many copies as it is above."""

    def __init__(self, number: int, copies: int | None = None) -> None:
        self._number, self._copies = number, copies

    def __call__(self, sample: dict[str, Any]) -> Any:
        above = sample["x"] > self._number
        return above if self._copies is None else [sample] * (self._copies * above)


def _doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "double": batch["x"] * 2}


def _batch_sum(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "sum": int(batch["x"].sum())}


def _size(sample: dict[str, Any]) -> int:
    return int(sample["x"] % 7)


BASE = (7, 0, 12, 5, 1, 9, 30, 3)  # the number of samples in each shard, for most plans
OTHER = (4, 11, 6)  # the same for the second branch, if a plan has one

# Plans by name; each call builds a new one, so that importing this module opens nothing.
CORPUS: dict[str, Callable[[], Dataset]] = {
    "read": lambda: numbers(BASE),
    "shuffle": lambda: numbers(BASE).shuffle(),
    "small windows": lambda: numbers(BASE).shuffle(5, shards=3),
    "shuffle all": lambda: numbers(BASE).shuffle(all=True),
    "no counts": lambda: numbers(BASE, hidden=True),
    "no counts, shuffled": lambda: numbers(BASE, hidden=True).shuffle(6, shards=2),
    "map": lambda: numbers(BASE).shuffle().map(noise),
    "two pools": lambda: numbers(BASE).map(noise, workers=2).map(noise, workers=3),
    "filter": lambda: numbers(BASE).shuffle().filter(_odd),
    "random filter": lambda: numbers(BASE).shuffle().map(noise).filter(_random_most),
    "flat_map": lambda: numbers(BASE).shuffle().flat_map(_copies),
    "random flat_map": lambda: numbers(BASE).shuffle().flat_map(_random_copies).map(noise),
    "flat_map twice": lambda: numbers(BASE).flat_map(_copies).filter(_random_most).flat_map(_random_copies),
    "skips": lambda: numbers(BASE, bad=(3, 20)).shuffle().map(fails).on_error("skip"),
    "skips and copies": lambda: numbers(BASE).shuffle().map(fails).flat_map(_copies).on_error("skip"),
    "limit": lambda: numbers(BASE).shuffle().limit(23),
    "skip": lambda: numbers(BASE).skip(9).shuffle(4, shards=2).limit(31),
    "repeat": lambda: numbers(BASE).shuffle(8).repeat(3).map(noise),
    "union": lambda: numbers(BASE).map(noise).union(numbers(OTHER, name="other").filter(_odd)).shuffle(6),
    "mix": lambda: mix([numbers(BASE).shuffle(), numbers(OTHER, name="other").map(noise)], [0.7, 0.3]),
    "mix all": lambda: mix([numbers(BASE), numbers(OTHER, name="o").flat_map(_copies)], [1, 2], stop="all").map(noise),
    "mix repeated": lambda: mix([numbers(OTHER).shuffle().repeat(), numbers(BASE, name="b")], [0.5, 0.5]),
    "changing mix": lambda: mix(
        [numbers(BASE).shuffle(6), numbers(OTHER, name="o").map(noise)], [(0, [3, 0]), (21, [1, 2]), (45, [1, 1])]
    ),
    "exclude": lambda: numbers(BASE).shuffle(5, shards=3).exclude([(0, "shard-0002", i) for i in (0, 4, 11)]),
    "zip": lambda: numbers(BASE).zip(numbers((67,), name="b").map(noise).select("noise")).shuffle(9),
    "zip with skips": lambda: (
        numbers(BASE).map(fails).zip(numbers((67,), name="b", bad=(2,)), suffix="_b").map(noise).on_error("skip")
    ),
    "zip of three": lambda: (
        numbers(BASE)
        .zip(numbers((67,), name="b").rename(y="x").select("y"))
        .map(noise)
        .zip(numbers((60, 7), name="c").map(noise).rename(z="noise").select("z"))
    ),
    "train side": lambda: numbers(BASE).shuffle(7).train_test_split(0.3)[0],
    "test side": lambda: numbers(BASE).shuffle(7).train_test_split(0.3)[1].map(noise),
    "classes": lambda: (
        numbers(BASE)
        .map(_Adds, fn_args=(5,), fn_kwargs={"name": "more"})
        .filter(_Above, fn_constructor_args=(9,), concurrency=2)
        .map(dict)
        .flat_map(_Above, fn_constructor_kwargs={"number": 20, "copies": 2})
    ),
    "map_batches": lambda: numbers(BASE).shuffle().map_batches(_doubled, 4),
    "rows of a filter": lambda: numbers(BASE).shuffle().filter(_odd).map_batches(_doubled, 5).map(noise),
    "rows of copies, with skips": lambda: (
        numbers(BASE).flat_map(_copies).map(fails).map_batches(_doubled, 4).flat_map(_random_copies).on_error("skip")
    ),
    "rows of a late shuffle": lambda: numbers(BASE).flat_map(_copies).shuffle(10).map_batches(_doubled, 7),
    "late shuffle": lambda: numbers(BASE).flat_map(_copies).shuffle(10),
    "late shuffle and more": lambda: (
        numbers(BASE).shuffle().flat_map(_random_copies).shuffle(13).map(noise).flat_map(_copies)
    ),
    "late shuffle with skips": lambda: (
        numbers(BASE).flat_map(_copies).shuffle(6).map(fails).filter(_random_most).on_error("skip")
    ),
    "batches shuffled": lambda: numbers(BASE).shuffle().batched(4).shuffle(3),
    "batches mapped": lambda: numbers(BASE).shuffle().batched(4).map(_batch_sum, workers=2),
    "unbatched": lambda: numbers(BASE).shuffle().batched(4).unbatched().map(noise),
    "rebatched": lambda: numbers(BASE).shuffle().batched(4).unbatched().filter(_odd).batched(3),
    "batched by size": lambda: numbers(BASE).shuffle().batched_by(_size, 9),
    "stream limit": lambda: numbers(BASE).shuffle().filter(_odd).skip(3).limit(17),
    "stream limit and batches": lambda: numbers(BASE).flat_map(_copies).limit(29).batched(4).shuffle(2),
    "empty": lambda: numbers((0, 0)).shuffle().map(noise),
    **_table_plans(BASE),
    **_row_plans(BASE),
}
# The plans that can be restored under another number of ranks.
RECUT = tuple(
    name
    for name in CORPUS
    if name
    not in {
        "batches shuffled",
        "batches mapped",
        "unbatched",
        "rebatched",
        "batched by size",
        "tables in batches",
        "columns in batches",
        "json lines in batches",
        "stream limit",
        "stream limit and batches",
        "no counts, shuffled",  # it has fewer windows than the largest world has ranks
    }
)


# The plans with a stage that joins neighbours: out of order, its outputs differ from those of serial.
ORDER_DEPENDENT = frozenset(name for name in CORPUS if "batch" in name or "late" in name or "stream" in name)
