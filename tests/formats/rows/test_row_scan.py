"""Rows are found whatever is quoted and however the file is divided into chunks."""

from __future__ import annotations

import csv
import io
import random
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.formats.rows import row_scan
from penstock.formats.rows.reader import RowFile
from penstock.formats.rows.row_scan import (
    find_csv_ends,
    find_line_ends,
    find_newlines,
    find_rows,
    line_number,
    scan_lines,
)

FIND_ENDS = partial(find_csv_ends, delimiter=ord(","))
BLANK = b" \t\r\n"


def ends_of(text: bytes) -> list[int]:
    data = np.frombuffer(text, np.uint8)
    return [int(end) for end in FIND_ENDS(data, find_newlines(data))]


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (b"a,b\nc,d\n", [3, 7]),
        (b'"a\nb",c\nd\n', [7, 9]),
        (b'"say ""no""\n",c\n', [15]),
        (b'"",""\n"\n"\n', [5, 9]),
        (b'5" pipe,x\n6" pipe,y\n', [9, 19]),  # a quote inside an unquoted field has no meaning
        (b'a,5" pipe\nb,"x\ny"\n', [9, 17]),
        (b'"a"b"c\nd\n', [6, 8]),
        (b'"never closed\nb\n', []),
        (b"", []),
    ],
)
def test_a_row_of_csv_ends_at_a_newline_outside_quotes(text: bytes, ends: list[int]) -> None:
    assert ends_of(text) == ends


FIELDS = st.text(st.sampled_from('ab",\n\r'), max_size=5)


@given(st.lists(st.lists(FIELDS, min_size=2, max_size=3), min_size=1, max_size=6))
def test_rows_written_by_the_csv_module_are_found(rows: list[list[str]]) -> None:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    ends = []
    for row in rows:
        writer.writerow(row)
        ends.append(len(out.getvalue()) - 1)
    assert ends_of(out.getvalue().encode()) == ends


@given(st.lists(st.text(st.sampled_from('a",'), min_size=1, max_size=6), min_size=1, max_size=6))
def test_irregular_quotes_are_read_as_arrow_reads_them(lines: list[str]) -> None:
    text = "".join(f"x,{line}\n" for line in lines).encode()
    options = pacsv.ParseOptions(newlines_in_values=True, invalid_row_handler=lambda row: invalid.append(1) or "skip")  # type: ignore[func-returns-value]
    invalid: list[int] = []
    read_options = pacsv.ReadOptions(column_names=["a", "b"], block_size=1000, use_threads=False)
    try:
        table = pacsv.read_csv(pa.py_buffer(text), read_options=read_options, parse_options=options)
    except pa.ArrowInvalid:  # a quote that is never closed
        assert len(ends_of(text)) < len(lines)
        return
    if len(ends_of(text)) and ends_of(text)[-1] == len(text) - 1:
        assert len(ends_of(text)) == table.num_rows + len(invalid)


def content(seed: int) -> tuple[bytes, list[bytes], list[int]]:
    """Return a file, its rows, and the line number of each row."""
    rng = random.Random(seed)
    parts, rows, lines, line = [], [], [], 1
    for number in range(400):
        if rng.random() < 0.1:
            blank = rng.choice([b"\n", b"\r\n", b"  \n"])
            parts.append(blank)
            line += 1
        row = b'%d,"%s"\n' % (number, rng.choice([b"x", b"new\nline", b'q""q', b"a,b" * 20]))
        parts.append(row)
        rows.append(row)
        lines.append(line)
        line += row.count(b"\n")
    return b"".join(parts), rows, lines


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 1 << 20])
@pytest.mark.parametrize("ends_in_newline", [True, False])
def test_any_row_is_found_whatever_the_chunks(
    chunk_bytes: int, ends_in_newline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_scan, "_CHUNK_BYTES", chunk_bytes)
    data, rows, lines = content(chunk_bytes)
    if not ends_in_newline:
        data, rows[-1] = data[:-1], rows[-1][:-1]
    file = RowFile("f", data, scan_lines(data, 0, FIND_ENDS, BLANK, None))
    assert file.offsets.row_count == len(rows)
    assert find_rows(file, np.arange(len(rows)), FIND_ENDS, BLANK).separate(data) == rows
    chosen = np.array(random.Random(1).sample(range(len(rows)), 50))
    spans = find_rows(file, chosen, FIND_ENDS, BLANK)
    assert spans.separate(data) == [rows[i] for i in chosen]
    assert spans.joined(data) == b"".join(rows[i].rstrip(b"\n") + b"\n" for i in chosen)
    assert [line_number(file, i, FIND_ENDS, BLANK) for i in range(0, 400, 7)] == lines[::7]


def test_blank_lines_are_rows_only_if_they_are_kept() -> None:
    data = b"a\n\n\nb"
    assert scan_lines(data, 0, find_line_ends, None, None).row_count == 4
    assert scan_lines(data, 0, find_line_ends, BLANK, None).row_count == 2
    assert scan_lines(b"a\n\n", 0, find_line_ends, None, None).row_count == 2
    assert scan_lines(b"a\tb\n\t\n \n\n", 0, find_line_ends, b" \r\n", None).row_count == 2
    assert scan_lines(b"", 0, find_line_ends, None, None).row_count == 0


def test_a_truncated_file_loses_its_last_line_and_counts_it() -> None:
    offsets = scan_lines(b"a\nb\nhal", 0, find_line_ends, None, "the gz stream is damaged")
    assert (offsets.row_count, offsets.readable_rows, offsets.problem) == (3, 2, "the gz stream is damaged")
