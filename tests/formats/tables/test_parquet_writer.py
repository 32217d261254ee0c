from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.errors import DataError, PlanError
from penstock.formats.tables import parquet_writer
from penstock.formats.tables.parquet_writer import (
    ParquetLayout,
    TableWriter,
    check_compression,
    choose_layout,
    row_sizes,
)

NOISE = random.Random(5)
MEDIA = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def random_table(rng: random.Random, rows: int) -> pa.Table:
    noise = [rng.randbytes(rng.choice([0, 3, 40, 900])) for _ in range(rows)]
    return pa.table(
        {
            "id": pa.array([rng.randrange(1 << 40) for _ in range(rows)], pa.int64()),
            "data": pa.array(noise, pa.binary()),
            "text": pa.array([data.hex() if len(data) % 2 else None for data in noise], pa.string()),
            "v": pa.array([np.zeros(rng.randrange(9)) for _ in range(rows)], pa.list_(pa.float64())),
            "s": pa.array([{"a": 1, "b": [b"x" * rng.randrange(30)]} for _ in range(rows)]),
        }
    )


def write_files(folder: Path, table: pa.Table, cuts: list[int], **options: Any) -> list[Path]:
    """Write a table in pieces, and return the files."""
    folder.mkdir()
    writer = TableWriter(str(folder), **options)
    low = 0
    for high in [*cuts, table.num_rows]:
        writer.write(table.slice(low, high - low))
        low = high
    writer.close()
    return sorted(folder.iterdir())


@pytest.mark.parametrize("seed", range(200 if os.environ.get("PENSTOCK_FULL") else 8))
def test_no_file_exceeds_its_maximum_size(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    if seed % 3 == 0:  # so that the bound by size in memory is used too
        monkeypatch.setattr(parquet_writer, "_PAGE_OVERHEAD_BYTES", 0)
        monkeypatch.setattr(parquet_writer, "GROUP_BYTES", 2000)
    table = random_table(rng, rng.randrange(1, 250))
    limit = rng.choice([4_000, 9_000, 60_000, 300_000])
    options = {"max_bytes": limit, "compression": rng.choice(["zstd", "none", "snappy"])}
    options["max_rows"] = rng.choice([None, 7, 150])
    files = write_files(tmp_path / "a", table, [], **options)
    for path in files:
        rows = pq.read_metadata(path).num_rows
        assert path.stat().st_size <= limit or rows == 1
        assert rows <= (options["max_rows"] or rows)
    assert pa.concat_tables(map(pq.read_table, files)).equals(table)
    cuts = sorted(rng.choices(range(table.num_rows + 1), k=5))
    again = write_files(tmp_path / "b", table, cuts, **options)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in files]


def test_files_are_filled(tmp_path: Path) -> None:
    rng = random.Random(1)
    table = pa.table({"data": [rng.randbytes(1000) for _ in range(2000)]})
    files = write_files(tmp_path / "a", table, [], max_bytes=400_000)
    assert [path.stat().st_size > 300_000 for path in files[:-1]] == [True] * (len(files) - 1)


def test_a_sample_larger_than_a_file_gets_its_own(tmp_path: Path) -> None:
    rng = random.Random(1)
    table = pa.table({"data": [rng.randbytes(n) for n in (10, 50_000, 10, 10)]})
    files = write_files(tmp_path / "a", table, [], max_bytes=5_000)
    assert [pq.read_metadata(path).num_rows for path in files] == [1, 1, 2]


def test_columns_that_change_are_refused(tmp_path: Path) -> None:
    writer = TableWriter(str(tmp_path), max_bytes=10_000, max_rows=2)
    writer.write(pa.table({"a": [1, 2], "b": ["x", None]}))
    writer.write(pa.table({"a": [3], "b": pa.nulls(1)}))
    writer.write(pa.table({"a": [4]}))
    with pytest.raises(DataError, match="'a' is int64 in earlier samples"):
        writer.write(pa.table({"a": ["no", "number"], "b": ["x", "y"]}))
    writer.drop()
    (tmp_path / "fresh").mkdir()
    fresh = TableWriter(str(tmp_path / "fresh"), max_bytes=10_000, max_rows=1)
    fresh.write(pa.table({"a": [1]}))
    with pytest.raises(DataError, match="'c' is not in earlier samples"):
        fresh.write(pa.table({"a": [1], "c": [1]}))
    fresh.drop()


def test_the_size_of_a_row_does_not_depend_on_its_table() -> None:
    table = random_table(random.Random(4), 50)
    sizes = row_sizes(table)
    assert sizes.tolist() == [int(row_sizes(table.slice(i, 1))[0]) for i in range(50)]
    for kind in (pa.null(), pa.int8(), pa.string(), pa.list_(pa.int8())):
        assert row_sizes(pa.table({"x": pa.array([None] * 2, kind)})).tolist() == [0, 0]
    assert row_sizes(pa.table({"x": ["abc", None], "y": [1, None]})).tolist() == [11, 0]


def test_an_unknown_compression_is_refused() -> None:
    check_compression("lz4")
    with pytest.raises(PlanError, match=r"compression='zip': choose one of 'zstd'"):
        check_compression("zip")


# How columns are stored


def photo(seed: int, side: int = 160) -> bytes:
    rng = np.random.default_rng(seed)
    out = io.BytesIO()
    PIL.Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(out, "JPEG")
    return out.getvalue()


def media_table(rows: int) -> pa.Table:
    noise = [NOISE.randbytes(3000) for _ in range(rows)]
    return pa.table(
        {
            "image": pa.array([{"bytes": photo(i), "path": f"{i}.jpg"} for i in range(rows)], MEDIA),
            "clips": pa.array([[{"bytes": data, "path": None}] for data in noise], pa.list_(MEDIA)),
            "noise": pa.array([None, *noise[1:]], pa.large_binary()),
            "zeros": pa.array([bytes(3000)] * rows, pa.binary()),
            "short": pa.array([data[:16] for data in noise], pa.binary()),
            "text": [data.hex() for data in noise],
            "n": range(rows),
        }
    )


def test_bytes_that_do_not_compress_are_stored_as_they_are() -> None:
    layout = choose_layout(media_table(20), "zstd")
    assert layout.as_is == ("image.bytes", "clips.list.element.bytes", "noise")
    assert 10 < layout.batch < 100  # of values of some 20,000 bytes, about a megabyte
    assert choose_layout(media_table(3).select(["n", "text", "zeros"]), "zstd") == ParquetLayout("zstd")


def test_pyarrow_reads_columns_that_are_stored_as_they_are() -> None:
    table = media_table(30)
    data, footer = choose_layout(table, "zstd").encode(table)
    assert pq.read_table(pa.BufferReader(data)).equals(table)
    chunks = {chunk.path_in_schema: chunk for chunk in map(footer.row_group(0).column, range(footer.num_columns))}
    assert chunks["image.bytes"].compression == "UNCOMPRESSED"
    assert not chunks["image.bytes"].has_dictionary_page
    assert chunks["text"].compression == "ZSTD"
    assert chunks["n"].statistics.max == 29


@pytest.mark.parametrize("rows", [1, 40])
def test_files_of_images_are_uncompressed_and_stay_within_their_size(rows: int, tmp_path: Path) -> None:
    samples = [{"image": photo(i, 40), "n": i} for i in range(rows)]
    for workers in (1, 2):
        ds = ps.from_items(samples).map(dict, workers=workers)
        ds.write_parquet(tmp_path / str(workers), max_bytes=20_000)
    first, second = ([path.read_bytes() for path in sorted((tmp_path / n).glob("*.parquet"))] for n in "12")
    assert first == second
    assert max(map(len, first)) <= 20_000
    column = pq.read_metadata(min((tmp_path / "1").glob("*.parquet"))).row_group(0).column(0)
    assert column.compression == "UNCOMPRESSED"
    assert ps.read_parquet(tmp_path / "1").take_all() == samples


def test_a_resumed_run_stores_columns_as_the_first_run_did(tmp_path: Path) -> None:
    """The first rows decide, also for the files that a later run writes."""
    samples = [{"data": NOISE.randbytes(2000) if i < 8 else bytes(2000), "n": i} for i in range(24)]
    ps.from_items(samples).write_parquet(tmp_path / "whole", max_samples=8)

    fault = tmp_path / "fault"
    fault.touch()

    def breaks(sample: dict[str, object]) -> dict[str, object]:
        if sample["n"] == 20 and fault.exists():
            raise ValueError("broken")
        return sample

    ds = ps.from_items(samples).map(breaks).on("serial")
    with pytest.raises(Exception, match="broken"):
        ds.write_parquet(tmp_path / "parts", max_samples=8)
    fault.unlink()
    ds.write_parquet(tmp_path / "parts", max_samples=8)
    got = {path.name: path.read_bytes() for path in (tmp_path / "parts").glob("*.parquet")}
    assert got == {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("*.parquet")}
    assert len(got) == 3
