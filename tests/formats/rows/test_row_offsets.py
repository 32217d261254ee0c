"""Row offsets are cached as long as their file does not change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.blobs.stamp import Stamp
from penstock.errors import DataError
from penstock.formats.rows.row_offsets import RowOffsets, read_cached_offsets, write_cached_offsets

OFFSETS = RowOffsets(
    64, 130, np.array([0, 700, 1500]), 1600, np.array([1, 65, 129]), "cut short", ("a", "b"), Stamp(1, 2, 3)
)


def test_offsets_round_trip_through_bytes() -> None:
    back = RowOffsets.from_bytes(OFFSETS.to_bytes())
    assert back.starts.tolist() == [0, 700, 1500]
    assert back.lines.tolist() == [1, 65, 129]
    assert (back.interval, back.row_count, back.end, back.problem, back.columns, back.stamp) == (
        *(64, 130, 1600, "cut short"),
        *(("a", "b"), Stamp(1, 2, 3)),
    )


@pytest.mark.parametrize("offset", [0, 20, -1])
def test_damaged_bytes_are_refused(offset: int) -> None:
    data = bytearray(OFFSETS.to_bytes())
    data[offset] ^= 1
    with pytest.raises(DataError):
        RowOffsets.from_bytes(bytes(data))


def test_the_cache_is_keyed_by_file_stamp_and_scan_key() -> None:
    stamp = Stamp(10, 20, 30)
    write_cached_offsets("some/file.csv", "csv", OFFSETS, stamp)
    cached = read_cached_offsets("some/file.csv", "csv", stamp)
    assert cached is not None
    assert cached.row_count == 130
    assert read_cached_offsets("some/file.csv", "csv", Stamp(10, 21, 30)) is None
    assert read_cached_offsets("some/file.csv", "text", stamp) is None
    assert read_cached_offsets("other/file.csv", "csv", stamp) is None


def test_a_cache_that_cannot_be_written_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    assert write_cached_offsets("a", "csv", OFFSETS, Stamp(1, 1, 1)).row_count == 130
