"""Fields of samples as a table: TSV, CSV, JSON lines, Parquet."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import DataError, MissingExtra
from penstock.tarstream.raw import RawSample

FORMATS = ("tsv", "csv", "jsonl", "parquet")
Write = Callable[[bytes], object]

_ESCAPED = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
_PLAIN = {"\\": "\\", "t": "\t", "n": "\n", "r": "\r"}
_ROWS = 10_000  # of one row group


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, and the fields it may come from, of which the first that a sample has counts."""

    name: str
    fields: tuple[str, ...]

    def of(self, raw: RawSample) -> bytes | None:
        """The bytes of its field; None where a sample has none."""
        return next((raw.value(field) for field in self.fields if field in raw.kind), None)


def columns(spec: str) -> tuple[Column, ...]:
    """Read which columns a table has: ``"jpg;png cls"`` are two, the first from ``jpg`` or else ``png``.

    >>> [column.name for column in columns("jpg;png cls")]
    ['jpg', 'cls']
    """
    groups = [tuple(name.lower() for name in group.split(";") if name) for group in spec.replace(",", " ").split()]
    return tuple(Column(group[0], group) for group in groups if group)


def text_columns(raw: RawSample) -> tuple[Column, ...]:
    """The columns of a table that nobody described: the fields of its first sample that are texts."""
    return tuple(Column(name, (name,)) for name, data in raw.fields().items() if _text(data) is not None)


class Table(Protocol):
    """A table that is being written, row by row."""

    def add(self, raw: RawSample) -> None:
        """Add a sample.

        Raises:
            DataError: A field is no text, where only texts can go.
        """

    def close(self) -> None:
        """End the table."""


def open_table(format: str, chosen: Sequence[Column], write: Write, *, key: bool = True, header: bool = True) -> Table:
    """Begin a table.

    Args:
        format: One of ``FORMATS``.
        chosen: Its columns.
        write: Takes the bytes of the table as they come.
        key: Begin with a column ``__key__``.
        header: Begin TSV and CSV with a line of names.

    Raises:
        MissingExtra: It is Parquet and there is no pyarrow.
    """
    if format == "parquet":
        return _Parquet(chosen, write, key)
    if format == "jsonl":
        return _Lines(chosen, write, key)
    return _Texts(chosen, write, key, header, _csv_line if format == "csv" else _tsv_line)


def unescaped(cell: str) -> str:
    r"""Read a cell of TSV back: ``\t``, ``\n``, ``\r`` and ``\\`` are one character each."""
    if "\\" not in cell:
        return cell
    out, letters = "", iter(cell)
    for letter in letters:
        if letter == "\\":
            after = next(letters, "")
            out += _PLAIN.get(after, "\\" + after)
        else:
            out += letter
    return out


def _tsv_line(cells: Iterable[str]) -> str:
    return "\t".join(cell.translate(_ESCAPED) for cell in cells) + "\n"


def _csv_line(cells: Iterable[str]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(cells)
    return line.getvalue()


def _text(data: bytes) -> str | None:
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


class _Texts:
    def __init__(
        self, chosen: Sequence[Column], write: Write, key: bool, header: bool, line: Callable[[Iterable[str]], str]
    ) -> None:
        self._columns, self._write, self._key, self._line = chosen, write, key, line
        if header:
            self._put(["__key__"] * key + [column.name for column in chosen])

    def add(self, raw: RawSample) -> None:
        self._put([raw.key] * self._key + [self._cell(column, raw) for column in self._columns])

    def close(self) -> None:
        pass

    def _put(self, cells: list[str]) -> None:
        self._write(self._line(cells).encode("utf-8", "surrogateescape"))

    def _cell(self, column: Column, raw: RawSample) -> str:
        data = column.of(raw)
        text = "" if data is None else _text(data)
        if text is None:
            problem = f"the field {column.name!r} is no text: leave it out, or write jsonl or parquet"
            raise DataError(problem, raw.shard, raw.key)
        return text


class _Lines:
    def __init__(self, chosen: Sequence[Column], write: Write, key: bool) -> None:
        self._columns, self._write, self._key = chosen, write, key

    def add(self, raw: RawSample) -> None:
        row: dict[str, Any] = {"__key__": raw.key} if self._key else {}
        row |= {column.name: self._value(column, raw) for column in self._columns}
        self._write(json.dumps(row, ensure_ascii=not _encodable(raw.key)).encode() + b"\n")

    def close(self) -> None:
        pass

    def _value(self, column: Column, raw: RawSample) -> Any:
        """Texts as they are, JSON as what it says, all else as {"base64": ...}."""
        data = column.of(raw)
        if data is None:
            return None
        if column.name.rpartition(".")[2] == "json":
            try:
                return json.loads(data)
            except ValueError as exc:
                raise DataError(f"the field {column.name!r} is no JSON: {exc}", raw.shard, raw.key) from exc
        text = _text(data)
        return {"base64": base64.b64encode(data).decode()} if text is None else text


def _encodable(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


class _Parquet:
    """Columns of texts, or of bytes where the first sample has bytes."""

    def __init__(self, chosen: Sequence[Column], write: Write, key: bool) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as exc:
            raise MissingExtra("writing Parquet", "tables") from exc
        self._arrow = pyarrow
        self._columns, self._write, self._key = chosen, write, key
        self._rows: list[list[Any]] = []
        self._sink = _Sink(write)
        self._writer: Any = None
        self._binary: tuple[bool, ...] | None = None

    def add(self, raw: RawSample) -> None:
        values = [column.of(raw) for column in self._columns]
        self._rows.append([raw.key, *values])
        if len(self._rows) >= _ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        arrow = self._arrow
        kinds = self._kinds()
        names = ["__key__"] * self._key + [column.name for column in self._columns]
        types = [arrow.string()] * self._key + [arrow.binary() if binary else arrow.string() for binary in kinds]
        keys = [[_clean(row[0]) for row in self._rows]] * self._key
        cells = [[self._cell(row, place, binary) for row in self._rows] for place, binary in enumerate(kinds)]
        arrays = [arrow.array(column, type) for column, type in zip([*keys, *cells], types, strict=True)]
        table = arrow.Table.from_arrays(arrays, schema=arrow.schema(list(zip(names, types, strict=True))))
        if self._writer is None:
            self._writer = arrow.parquet.ParquetWriter(arrow.PythonFile(self._sink, mode="w"), table.schema)
        self._writer.write_table(table)
        self._rows = []

    def _kinds(self) -> tuple[bool, ...]:
        if self._binary is None:
            places = range(1, len(self._columns) + 1)
            self._binary = tuple(any(r[i] is not None and _text(r[i]) is None for r in self._rows) for i in places)
        return self._binary

    def _cell(self, row: list[Any], place: int, binary: bool) -> Any:
        data = row[place + 1]
        if data is None or binary:
            return data
        text = _text(data)
        if text is None:
            raise DataError(
                f"the field {self._columns[place].name!r} is text in some samples, bytes here", None, row[0]
            )
        return text


def _clean(key: str) -> str:
    return key if _encodable(key) else key.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class _Sink(io.RawIOBase):
    """Bytes handed on, as a file that can only be written."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        kept = bytes(data)
        self._write(kept)
        return len(kept)
