from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.formats.tables.parquet_writer import Layout, layout_for

NOISE = random.Random(5)
MEDIA = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def photo(seed: int, side: int = 160) -> bytes:
    dice = np.random.default_rng(seed)
    out = io.BytesIO()
    PIL.Image.fromarray(dice.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(out, "JPEG")
    return out.getvalue()


def group(rows: int) -> pa.Table:
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


def test_bytes_that_do_not_shrink_stay_as_they_are() -> None:
    layout = layout_for(group(20), "zstd")
    assert layout.as_is == ("image.bytes", "clips.list.element.bytes", "noise")
    assert 10 < layout.batch < 100  # of values of some 20,000 bytes, about a megabyte
    assert layout_for(group(3).select(["n", "text", "zeros"]), "zstd") == Layout("zstd")


def test_others_read_what_is_stored_as_it_is() -> None:
    made = group(30)
    data, footer = layout_for(made, "zstd").encoded(made)
    assert pq.read_table(pa.BufferReader(data)).equals(made)
    ways = {one.path_in_schema: one for one in map(footer.row_group(0).column, range(footer.num_columns))}
    assert ways["image.bytes"].compression == "UNCOMPRESSED"
    assert not ways["image.bytes"].has_dictionary_page
    assert ways["text"].compression == "ZSTD"
    assert ways["n"].statistics.max == 29


@pytest.mark.parametrize("rows", [1, 40])
def test_pictures_are_not_compressed_and_sizes_are_exact(rows: int, tmp_path: Path) -> None:
    samples = [{"image": photo(i, 40), "n": i} for i in range(rows)]
    for workers in (1, 2):
        ds = ps.from_items(samples).map(dict, workers=workers)
        ds.write_parquet(tmp_path / str(workers), max_bytes=20_000)
    first, second = ([path.read_bytes() for path in sorted((tmp_path / n).iterdir())] for n in "12")
    assert first == second
    assert max(map(len, first)) <= 20_000
    column = pq.read_metadata(min((tmp_path / "1").iterdir())).row_group(0).column(0)
    assert column.compression == "UNCOMPRESSED"
    assert ps.read_parquet(tmp_path / "1").take_all() == samples


def test_a_run_that_is_taken_up_stores_columns_as_before(tmp_path: Path) -> None:
    """The first rows decide, also for the files that a later run writes."""
    samples = [{"data": NOISE.randbytes(2000) if i < 8 else bytes(2000), "n": i} for i in range(24)]
    ps.from_items(samples).write_parquet(tmp_path / "whole", max_samples=8)

    broken = [True]

    def breaks(sample: dict[str, object]) -> dict[str, object]:
        if broken and sample["n"] == 20:
            raise ValueError("broken")
        return sample

    ds = ps.from_items(samples).map(breaks).on("serial")
    with pytest.raises(Exception, match="broken"):
        ds.write_parquet(tmp_path / "parts", max_samples=8)
    broken.clear()
    ds.write_parquet(tmp_path / "parts", max_samples=8)
    got = {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()}
    assert got == {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
