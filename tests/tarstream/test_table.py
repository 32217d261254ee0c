"""Fields of samples become a table that can be read back, or an error names the field that does not fit."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import penstock as ps
from penstock.errors import DataError
from penstock.tarstream.gather import gather_samples
from penstock.tarstream.raw import RawSample
from penstock.tarstream.table import open_table, parse_columns, text_columns, unescape_tsv

TEXT = 'a\tb\n"c", \\d\r'


@pytest.fixture
def samples(tmp_path: Path) -> list[RawSample]:
    with ps.TarWriter(tmp_path / "in.tar") as writer:
        writer.write({"__key__": "a", "txt": TEXT, "json": {"n": [1]}, "bin": b"\xff\0"})
        writer.write({"__key__": "b", "bin": b"text"})
    return list(gather_samples([str(tmp_path / "in.tar")]))


def table(format: str, spec: str, samples: list[RawSample], **options: Any) -> bytes:
    written: list[bytes] = []
    rows = open_table(format, parse_columns(spec), written.append, **options)
    for raw in samples:
        rows.add(raw)
    rows.close()
    return b"".join(written)


def test_columns_are_fields_or_alternatives() -> None:
    image, label = parse_columns("JPG;png, cls")
    assert (image.name, image.fields, label.fields) == ("jpg", ("jpg", "png"), ("cls",))
    assert parse_columns(" ;, ") == ()


def test_default_columns_are_the_fields_that_hold_text(samples: list[RawSample]) -> None:
    assert [column.name for column in text_columns(samples[0])] == ["json", "txt"]


def test_tsv_cells_can_be_unescaped(samples: list[RawSample]) -> None:
    lines = table("tsv", "none;txt json", samples).decode().splitlines()
    assert lines[0] == "__key__\tnone\tjson"
    assert [unescape_tsv(cell) for cell in lines[1].split("\t")] == ["a", TEXT, '{"n":[1]}']
    assert lines[2] == "b\t\t"
    assert unescape_tsv("\\x\\") == "\\x\\"


def test_csv_is_quoted(samples: list[RawSample]) -> None:
    data = table("csv", "txt", samples, key=False, header=False).decode()
    assert list(csv.reader(io.StringIO(data, newline=""))) == [[TEXT], [""]]


def test_json_lines_hold_text_documents_and_base64(samples: list[RawSample]) -> None:
    rows = [json.loads(line) for line in table("jsonl", "txt json bin", samples).splitlines()]
    assert rows[0] == {"__key__": "a", "txt": TEXT, "json": {"n": [1]}, "bin": {"base64": "/wA="}}
    assert rows[1] == {"__key__": "b", "txt": None, "json": None, "bin": "text"}


def test_parquet_columns_are_strings_or_bytes(samples: list[RawSample]) -> None:
    found = pyarrow.parquet.read_table(io.BytesIO(table("parquet", "txt bin", samples)))
    assert found.to_pylist() == [
        {"__key__": "a", "txt": TEXT, "bin": b"\xff\0"},
        {"__key__": "b", "txt": None, "bin": b"text"},
    ]


@pytest.mark.parametrize("format", ["tsv", "csv", "jsonl", "parquet"])
def test_a_table_without_rows_is_valid(format: str) -> None:
    data = table(format, "txt", [])
    if format == "parquet":
        assert pyarrow.parquet.read_table(io.BytesIO(data)).column_names == ["__key__", "txt"]
    else:
        assert data.split() == {"tsv": [b"__key__", b"txt"], "csv": [b"__key__,txt"], "jsonl": []}[format]


def test_bytes_do_not_fit_a_text_table(samples: list[RawSample]) -> None:
    with pytest.raises(DataError, match=r"'bin' is not text: leave it out.*key: a"):
        table("tsv", "bin", samples)


def test_a_damaged_json_field_is_a_data_error(tmp_path: Path) -> None:
    with ps.TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "k", "json": b"{"})
    with pytest.raises(DataError, match=r"'json' is not valid JSON.*key: k"):
        table("jsonl", "json", list(gather_samples([str(tmp_path / "a.tar")])))


def test_a_column_that_begins_as_text_stays_text(samples: list[RawSample], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tarstream.table._ROW_GROUP_ROWS", 1)
    with pytest.raises(DataError, match=r"'bin' is text in the first samples, but not in this one.*key: a"):
        table("parquet", "bin", samples[::-1])
