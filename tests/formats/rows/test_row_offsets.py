"""Marks are kept while their file stays what it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.blobs.stamp import Stamp
from penstock.errors import DataError
from penstock.formats.rows.row_offsets import RowOffsets, read_cached_offsets, write_cached_offsets

MARKS = RowOffsets(
    64, 130, np.array([0, 700, 1500]), 1600, np.array([1, 65, 129]), "cut short", ("a", "b"), Stamp(1, 2, 3)
)


def test_they_are_the_same_when_they_are_read_back() -> None:
    back = RowOffsets.from_bytes(MARKS.to_bytes())
    assert back.start.tolist() == [0, 700, 1500]
    assert back.line.tolist() == [1, 65, 129]
    assert (back.every, back.rows, back.end, back.bad, back.columns, back.stamp) == (
        *(64, 130, 1600, "cut short"),
        *(("a", "b"), Stamp(1, 2, 3)),
    )


@pytest.mark.parametrize("place", [0, 20, -1])
def test_damage_is_noticed(place: int) -> None:
    data = bytearray(MARKS.to_bytes())
    data[place] ^= 1
    with pytest.raises(DataError):
        RowOffsets.from_bytes(bytes(data))


def test_they_are_kept_for_one_file_and_one_way_of_reading_it() -> None:
    stamp = Stamp(10, 20, 30)
    write_cached_offsets("some/file.csv", "csv", MARKS, stamp)
    found = read_cached_offsets("some/file.csv", "csv", stamp)
    assert found is not None
    assert found.rows == 130
    assert read_cached_offsets("some/file.csv", "csv", Stamp(10, 21, 30)) is None
    assert read_cached_offsets("some/file.csv", "text", stamp) is None
    assert read_cached_offsets("other/file.csv", "csv", stamp) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    assert write_cached_offsets("a", "csv", MARKS, Stamp(1, 1, 1)).rows == 130
