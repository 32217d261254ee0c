from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import DataError
from penstock.formats.tables import parquet_writer as writing
from penstock.formats.tables.parquet_writer import TableWriter, row_sizes


def table(dice: random.Random, rows: int) -> pa.Table:
    noise = [dice.randbytes(dice.choice([0, 3, 40, 900])) for _ in range(rows)]
    return pa.table(
        {
            "id": pa.array([dice.randrange(1 << 40) for _ in range(rows)], pa.int64()),
            "data": pa.array(noise, pa.binary()),
            "text": pa.array([data.hex() if len(data) % 2 else None for data in noise], pa.string()),
            "v": pa.array([np.zeros(dice.randrange(9)) for _ in range(rows)], pa.list_(pa.float64())),
            "s": pa.array([{"a": 1, "b": [b"x" * dice.randrange(30)]} for _ in range(rows)]),
        }
    )


def written(folder: Path, whole: pa.Table, cuts: list[int], **how: Any) -> list[Path]:
    folder.mkdir()
    writer = TableWriter(str(folder), **how)
    low = 0
    for high in [*cuts, whole.num_rows]:
        writer.write(whole.slice(low, high - low))
        low = high
    writer.close()
    return sorted(folder.iterdir())


@pytest.mark.parametrize("seed", range(200 if os.environ.get("PENSTOCK_FULL") else 8))
def test_no_file_is_larger_than_it_may_be(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    if seed % 3 == 0:  # so that the bound by size in memory is used too
        monkeypatch.setattr(writing, "_PAGES", 0)
        monkeypatch.setattr(writing, "GROUP_BYTES", 2000)
    whole = table(dice, dice.randrange(1, 250))
    limit = dice.choice([4_000, 9_000, 60_000, 300_000])
    how = {"max_bytes": limit, "compression": dice.choice(["zstd", "none", "snappy"])}
    how["max_rows"] = dice.choice([None, 7, 150])
    files = written(tmp_path / "a", whole, [], **how)
    for path in files:
        rows = pq.read_metadata(path).num_rows
        assert path.stat().st_size <= limit or rows == 1
        assert rows <= (how["max_rows"] or rows)
    assert pa.concat_tables(map(pq.read_table, files)).equals(whole)
    cuts = sorted(dice.choices(range(whole.num_rows + 1), k=5))
    again = written(tmp_path / "b", whole, cuts, **how)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in files]


def test_files_are_filled(tmp_path: Path) -> None:
    dice = random.Random(1)
    whole = pa.table({"data": [dice.randbytes(1000) for _ in range(2000)]})
    files = written(tmp_path / "a", whole, [], max_bytes=400_000)
    assert [path.stat().st_size > 300_000 for path in files[:-1]] == [True] * (len(files) - 1)


def test_a_sample_that_is_too_large_stands_alone(tmp_path: Path) -> None:
    dice = random.Random(1)
    whole = pa.table({"data": [dice.randbytes(n) for n in (10, 50_000, 10, 10)]})
    files = written(tmp_path / "a", whole, [], max_bytes=5_000)
    assert [pq.read_metadata(path).num_rows for path in files] == [1, 1, 2]


def test_columns_that_change_are_refused(tmp_path: Path) -> None:
    writer = TableWriter(str(tmp_path), max_bytes=10_000, max_rows=2)
    writer.write(pa.table({"a": [1, 2], "b": ["x", None]}))
    writer.write(pa.table({"a": [3], "b": pa.nulls(1)}))
    writer.write(pa.table({"a": [4]}))
    with pytest.raises(DataError, match="'a' is int64 in the samples before"):
        writer.write(pa.table({"a": ["no", "number"], "b": ["x", "y"]}))
    writer.drop()
    fresh = TableWriter(str(tmp_path), max_bytes=10_000, max_rows=1)
    fresh.write(pa.table({"a": [1]}))
    with pytest.raises(DataError, match="'c' is not in the samples before"):
        fresh.write(pa.table({"a": [1], "c": [1]}))
    fresh.drop()


def test_the_size_of_a_row_is_its_own() -> None:
    whole = table(random.Random(4), 50)
    sizes = row_sizes(whole)
    assert sizes.tolist() == [int(row_sizes(whole.slice(i, 1))[0]) for i in range(50)]
    for kind in (pa.null(), pa.int8(), pa.string(), pa.list_(pa.int8())):
        assert row_sizes(pa.table({"x": pa.array([None] * 2, kind)})).tolist() == [0, 0]
    assert row_sizes(pa.table({"x": ["abc", None], "y": [1, None]})).tolist() == [11, 0]
