"""Write fields of samples as a table: TSV, CSV, JSON lines or Parquet."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import DataError, import_extra
from penstock.tarstream.raw import RawSample

TABLE_FORMATS = ("tsv", "csv", "jsonl", "parquet")
WriteBytes = Callable[[bytes], object]

_TSV_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
_TSV_UNESCAPES = {"\\": "\\", "t": "\t", "n": "\n", "r": "\r"}
_ROW_GROUP_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of a table.

    Attributes:
        name: The name of the column.
        fields: The fields that it may be read from; the first one that a sample has is used.
    """

    name: str
    fields: tuple[str, ...]

    def of(self, raw: RawSample) -> bytes | None:
        """Return the bytes of the column in a sample; None if the sample has none of the fields."""
        return next((raw.value(field) for field in self.fields if field in raw.field_names), None)


def parse_columns(spec: str) -> tuple[TableColumn, ...]:
    """Parse a list of columns: ``"jpg;png cls"`` is two columns, the first read from ``jpg`` or else ``png``.

    >>> [column.name for column in parse_columns("jpg;png cls")]
    ['jpg', 'cls']
    """
    groups = [tuple(name.lower() for name in group.split(";") if name) for group in spec.replace(",", " ").split()]
    return tuple(TableColumn(group[0], group) for group in groups if group)


def text_columns(raw: RawSample) -> tuple[TableColumn, ...]:
    """Return the default columns of a table, given its first sample: the fields that are text."""
    return tuple(TableColumn(name, (name,)) for name, data in raw.fields().items() if _text(data) is not None)


class SampleTable(Protocol):
    """A table that is being written, row by row."""

    def add(self, raw: RawSample) -> None:
        """Add a sample as a row.

        Raises:
            DataError: A field does not fit its column: it is not text, or not valid JSON.
        """

    def close(self) -> None:
        """Write the remaining rows and end the table."""


def open_table(
    format: str, columns: Sequence[TableColumn], write: WriteBytes, *, key: bool = True, header: bool = True
) -> SampleTable:
    """Start writing a table.

    Args:
        format: One of ``TABLE_FORMATS``.
        columns: The columns of the table.
        write: Called with the bytes of the table as they are produced.
        key: Whether the first column is ``__key__``.
        header: Whether TSV and CSV begin with a line of column names.

    Raises:
        MissingExtra: The format is Parquet and pyarrow is not installed.
    """
    if format == "parquet":
        return _ParquetTable(columns, write, key)
    if format == "jsonl":
        return _JsonLinesTable(columns, write, key)
    return _TextTable(columns, write, key, header, _csv_line if format == "csv" else _tsv_line)


def unescape_tsv(cell: str) -> str:
    r"""Undo the escapes in a TSV cell: ``\t``, ``\n``, ``\r`` and ``\\`` are one character each."""
    if "\\" not in cell:
        return cell
    out, letters = "", iter(cell)
    for letter in letters:
        if letter == "\\":
            after = next(letters, "")
            out += _TSV_UNESCAPES.get(after, "\\" + after)
        else:
            out += letter
    return out


def _tsv_line(cells: Iterable[str]) -> str:
    return "\t".join(cell.translate(_TSV_ESCAPES) for cell in cells) + "\n"


def _csv_line(cells: Iterable[str]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(cells)
    return line.getvalue()


def _text(data: bytes) -> str | None:
    """Return bytes as text; None if they are not text."""
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


class _TextTable:
    def __init__(
        self,
        columns: Sequence[TableColumn],
        write: WriteBytes,
        key: bool,
        header: bool,
        line: Callable[[Iterable[str]], str],
    ) -> None:
        self._columns, self._write, self._with_key, self._line = columns, write, key, line
        if header:
            self._put(["__key__"] * key + [column.name for column in columns])

    def add(self, raw: RawSample) -> None:
        self._put([raw.key] * self._with_key + [self._cell(column, raw) for column in self._columns])

    def close(self) -> None:
        pass

    def _put(self, cells: list[str]) -> None:
        self._write(self._line(cells).encode("utf-8", "surrogateescape"))

    def _cell(self, column: TableColumn, raw: RawSample) -> str:
        data = column.of(raw)
        text = "" if data is None else _text(data)
        if text is None:
            problem = f"the field {column.name!r} is not text: leave it out, or choose the format jsonl or parquet"
            raise DataError(problem, raw.shard, raw.key)
        return text


class _JsonLinesTable:
    def __init__(self, columns: Sequence[TableColumn], write: WriteBytes, key: bool) -> None:
        self._columns, self._write, self._with_key = columns, write, key

    def add(self, raw: RawSample) -> None:
        row: dict[str, Any] = {"__key__": raw.key} if self._with_key else {}
        row |= {column.name: self._value(column, raw) for column in self._columns}
        self._write(json.dumps(row, ensure_ascii=not _encodable(raw.key)).encode() + b"\n")

    def close(self) -> None:
        pass

    def _value(self, column: TableColumn, raw: RawSample) -> Any:
        """Return text as a string, JSON as the value it holds, and anything else as {"base64": ...}."""
        data = column.of(raw)
        if data is None:
            return None
        if column.name.rpartition(".")[2] == "json":
            try:
                return json.loads(data)
            except ValueError as exc:
                raise DataError(f"the field {column.name!r} is not valid JSON: {exc}", raw.shard, raw.key) from exc
        text = _text(data)
        return {"base64": base64.b64encode(data).decode()} if text is None else text


def _encodable(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


class _ParquetTable:
    """Columns of strings, or of bytes where the first row group holds anything that is not text."""

    def __init__(self, columns: Sequence[TableColumn], write: WriteBytes, key: bool) -> None:
        import_extra("pyarrow.parquet", "writing Parquet", "tables")
        self._arrow = import_extra("pyarrow", "writing Parquet", "tables")
        self._columns, self._write, self._with_key = columns, write, key
        self._rows: list[list[Any]] = []
        self._sink = _WriteOnlyFile(write)
        self._writer: Any = None
        self._binary: tuple[bool, ...] | None = None

    def add(self, raw: RawSample) -> None:
        values = [column.of(raw) for column in self._columns]
        self._rows.append([raw.key, *values])
        if len(self._rows) >= _ROW_GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        arrow = self._arrow
        binary_columns = self._binary_columns()
        names = ["__key__"] * self._with_key + [column.name for column in self._columns]
        types = [arrow.string()] * self._with_key + [
            arrow.binary() if binary else arrow.string() for binary in binary_columns
        ]
        keys = [[_valid_text(row[0]) for row in self._rows]] * self._with_key
        cells = [
            [self._cell(row, number, binary) for row in self._rows] for number, binary in enumerate(binary_columns)
        ]
        arrays = [arrow.array(column, type) for column, type in zip([*keys, *cells], types, strict=True)]
        table = arrow.Table.from_arrays(arrays, schema=arrow.schema(list(zip(names, types, strict=True))))
        if self._writer is None:
            self._writer = arrow.parquet.ParquetWriter(arrow.PythonFile(self._sink, mode="w"), table.schema)
        self._writer.write_table(table)
        self._rows = []

    def _binary_columns(self) -> tuple[bool, ...]:
        if self._binary is None:
            columns = range(1, len(self._columns) + 1)  # column 0 is the key
            self._binary = tuple(
                any(row[column] is not None and _text(row[column]) is None for row in self._rows) for column in columns
            )
        return self._binary

    def _cell(self, row: list[Any], number: int, binary: bool) -> Any:
        data = row[number + 1]
        if data is None or binary:
            return data
        text = _text(data)
        if text is None:
            problem = f"the field {self._columns[number].name!r} is text in the first samples, but not in this one"
            raise DataError(problem, None, row[0])
        return text


def _valid_text(key: str) -> str:
    """Return a key with the bytes that are not UTF-8 replaced."""
    return key if _encodable(key) else key.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class _WriteOnlyFile(io.RawIOBase):
    """A file that passes all bytes to a function."""

    def __init__(self, write: WriteBytes) -> None:
        self._write = write

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        owned = bytes(data)  # Arrow may reuse its buffer
        self._write(owned)
        return len(owned)
