"""Line-based formats: text, JSON lines and CSV. Arrow parses the rows of a block in one call."""

from __future__ import annotations

import csv
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from penstock.codecs.features import Value, arrow_type
from penstock.errors import DataError, MissingExtra, PlanError
from penstock.formats.rows.reader import FileBytes, ReadResult, RowFile
from penstock.formats.rows.row_offsets import RowOffsets
from penstock.formats.rows.row_scan import (
    ROWS_PER_OFFSET,
    FindEnds,
    RowSpans,
    aligned_range,
    find_csv_ends,
    find_line_ends,
    find_rows,
    line_number,
    scan_lines,
)
from penstock.formats.tables.columns import ABSENT, ArrowColumns
from penstock.order import I64
from penstock.plan import Fields

_SCHEMA_BYTES = 4 << 20  # how much of the first file the types are inferred from
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TextFormat:
    """Every line is a sample, also an empty one: ``{"text": line}``, strict UTF-8, without its newline."""

    scan_key = "text"
    columnar = False
    function_name, suffixes, cheap = "read_text", (".txt", ".text", ".log"), True

    def scan(self, data: FileBytes, problem: str | None) -> RowOffsets:
        return scan_lines(data, _bom_bytes(data), find_line_ends, True, problem)

    def infer_schema(self, file: RowFile) -> None:
        """Return ``None``: text has no schema."""

    def key(self, file: RowFile, row: int) -> str:
        return f"line {row + 1}"

    def read(self, file: RowFile, rows: I64, fields: Fields, schema: None) -> ReadResult:
        if not fields.wants("text"):
            return [{} for _ in rows], {}
        samples: list[Any] = []
        errors: dict[int, DataError] = {}
        for position, line in enumerate(find_rows(file, rows, find_line_ends, True).separate(file.data)):
            try:
                samples.append({"text": line.removesuffix(b"\n").removesuffix(b"\r").decode()})
            except UnicodeDecodeError as exc:
                key = self.key(file, int(rows[position]))
                errors[position] = DataError(f"the line is not UTF-8: {exc.reason}", file.url, key)
                samples.append(None)
        return samples, errors


class _ArrowParsed(ABC):
    """The formats whose rows are parsed by Arrow."""

    __slots__ = ()

    columnar = True
    cheap = False
    find_ends: FindEnds

    def key(self, file: RowFile, row: int) -> str:
        return f"line {line_number(file, row, self.find_ends, False)}"

    def read(self, file: RowFile, rows: I64, fields: Fields, schema: Any) -> ReadResult:
        parse = self.parser(file, fields, schema)
        byte_range = aligned_range(file.offsets, rows)
        batch = None if byte_range is None else _try_parse(parse, memoryview(file.data)[byte_range], len(rows))[0]
        if batch is not None:
            return self._columns_of([batch], np.arange(len(rows)), None, fields), {}
        batches, problems = _parse_valid_rows(parse, find_rows(file, rows, self.find_ends, False), file.data)
        errors = {n: DataError(problem, file.url, self.key(file, int(rows[n]))) for n, problem in problems.items()}
        if not batches:
            return [None] * len(rows), errors
        counts = [batch.num_rows for batch in batches]
        row_in_batch, batch_number = np.full(len(rows), ABSENT, np.int64), np.zeros(len(rows), np.int64)
        is_valid = np.ones(len(rows), bool)
        is_valid[list(errors)] = False
        row_in_batch[is_valid] = np.concatenate([np.arange(count) for count in counts])
        batch_number[is_valid] = np.repeat(np.arange(len(batches)), counts)
        return self._columns_of(batches, row_in_batch, batch_number if len(batches) > 1 else None, fields), errors

    def _columns_of(self, batches: list[Any], row: I64, slot: I64 | None, fields: Fields) -> ArrowColumns:
        wanted = {name: name for name in batches[0].schema.names if fields.wants(name)}
        return ArrowColumns(batches, row, slot, wanted, sum(batch.nbytes for batch in batches) / len(row))

    @abstractmethod
    def parser(self, file: RowFile, fields: Fields, schema: Any) -> Parser:
        """Return the function that parses rows of a file to a record batch with the wanted fields.

        Raises:
            DataError: The file does not have the common schema.
        """


Parser = Callable[[bytes | memoryview], Any]  # the joined bytes of rows -> a record batch


def _parse_valid_rows(parse: Parser, spans: RowSpans, data: FileBytes) -> tuple[list[Any], dict[int, str]]:
    """Parse the valid rows to record batches; invalid rows are found by halving and returned with their problems."""
    batch, problem = _try_parse(parse, spans.joined(data), len(spans.starts))
    if batch is not None:
        return [batch], {}
    if len(spans.starts) == 1:
        return [], {0: problem}
    half = len(spans.starts) // 2
    left, left_problems = _parse_valid_rows(parse, RowSpans(spans.starts[:half], spans.ends[:half]), data)
    right, right_problems = _parse_valid_rows(parse, RowSpans(spans.starts[half:], spans.ends[half:]), data)
    return left + right, left_problems | {half + number: problem for number, problem in right_problems.items()}


def _try_parse(parse: Parser, data: bytes | memoryview, rows: int) -> tuple[Any, str]:
    """Return the record batch of ``rows`` rows, or ``None`` and what is wrong with them."""
    import pyarrow as pa

    try:
        batch = parse(data)
    except (pa.ArrowException, ValueError, KeyError) as exc:
        return None, _reworded(str(exc))
    if batch.num_rows != rows:
        return None, "the line does not hold exactly one row"
    return batch, ""


_REWORDED: tuple[tuple[str, str], ...] = (  # patterns of Arrow's messages, and what users see
    (r"Expected (\d+) columns, got (\d+)", r"expected \1 values in the row, found \2"),
    (r"(In CSV column #\d+): .*CSV conversion error to ([^:]+): invalid value ('.*')", r"\1: \3 is not a valid \2"),
    (r"Column\(/(.*?)\) changed from (\w+) to (\w+)", r"field '\1' is a \3, but a \2 is expected"),
    (r"unexpected field", "the row has a field that none of the first rows has"),
)


def _reworded(message: str) -> str:
    """Shorten a message of Arrow, and remove row numbers: they count from the start of a block."""
    first_line = re.sub(r",? in row \d+|Row #\d+: |^(CSV|JSON) parse error: ", "", message.splitlines()[0])
    for pattern, template in _REWORDED:
        if match := re.search(pattern, first_line):
            return match.expand(template)
    return first_line


def _batch(table: Any) -> Any:
    """Return a table as one record batch."""
    import pyarrow as pa

    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _bom_bytes(data: FileBytes) -> int:
    """Return the length of the byte order mark: 3, or 0 if there is none."""
    return 3 if data[:3] == _BOM else 0


def _given_types(types: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return {name: arrow_type(Value(dtype)) for name, dtype in types}


def _first_rows(file: RowFile) -> tuple[bytes | memoryview, int]:
    """Return the first rows of a file, about ``_SCHEMA_BYTES`` of them, and their number."""
    offsets = file.offsets
    last = int(np.searchsorted(offsets.starts, offsets.starts[0] + _SCHEMA_BYTES)) - 1
    count = min(offsets.readable_rows, (last + 1) * offsets.interval)
    return memoryview(file.data)[slice(*offsets.byte_range(0, last))], count


@dataclass(frozen=True, slots=True)
class CsvFormat(_ArrowParsed):
    """A row is a sample; the first line of each file names the columns, unless ``names`` does."""

    delimiter: str = ","
    names: tuple[str, ...] | None = None
    types: tuple[tuple[str, str], ...] = ()

    function_name, suffixes = "read_csv", (".csv", ".tsv", ".txt")

    @property
    def scan_key(self) -> str:
        return f"csv {self.delimiter!r} {self.names is None}"

    @property
    def find_ends(self) -> FindEnds:  # type: ignore[override]
        return partial(find_csv_ends, delimiter=ord(self.delimiter))

    def scan(self, data: FileBytes, problem: str | None) -> RowOffsets:
        first = _bom_bytes(data)
        if self.names is not None:
            return scan_lines(data, first, self.find_ends, False, problem)
        beginning = data[: first + _SCHEMA_BYTES]
        offsets = scan_lines(beginning, first, self.find_ends, False, None)
        if not offsets.row_count:
            return RowOffsets(ROWS_PER_OFFSET, bool(problem), np.zeros(0, np.int64), first, problem=problem or "")
        header = find_rows(RowFile("", beginning, offsets), np.array([0]), self.find_ends, False)
        text = header.separate(data)[0].decode("utf-8", "replace")
        columns = next(csv.reader(text.splitlines(keepends=True), delimiter=self.delimiter))
        first_row = int(header.ends[0])
        line = 1 + data[:first_row].count(b"\n")
        return replace(scan_lines(data, first_row, self.find_ends, False, problem, line), columns=tuple(columns))

    def infer_schema(self, file: RowFile) -> tuple[str, dict[str, Any]]:
        """Return the URL of the file and the Arrow types of its columns, inferred from its first rows."""
        pa, _ = _arrow("csv")
        names = self._columns(file)
        given = _given_types(self.types)
        if unknown := [name for name in given if name not in names]:
            raise DataError(f"types names the column {unknown[0]!r}, but the columns are {', '.join(names)}", file.url)
        inferred = {name: pa.string() for name in names}
        if file.offsets.readable_rows:
            data, count = _first_rows(file)
            table = self._infer(data, names)
            if table.num_rows > count:  # Arrow takes a line of spaces for a value
                table = self._infer(find_rows(file, np.arange(count), self.find_ends, False).joined(file.data), names)
            inferred = {column.name: _csv_type(column.type) for column in table.schema}
        return file.url, inferred | given

    def _infer(self, data: bytes | memoryview, names: tuple[str, ...]) -> Any:
        """Parse rows with inferred types, without those that have too many or too few values."""
        pa, pacsv = _arrow("csv")
        data = str(data, "utf-8", "replace").encode()  # Arrow passes invalid rows to the handler as text
        skip_invalid = pacsv.ParseOptions(
            delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=lambda row: "skip"
        )
        return pacsv.read_csv(
            pa.py_buffer(data),
            read_options=_read_options(pacsv, names, data),
            parse_options=skip_invalid,
            convert_options=pacsv.ConvertOptions(check_utf8=False),
        )

    def parser(self, file: RowFile, fields: Fields, schema: tuple[str, dict[str, Any]]) -> Parser:
        first_url, types = schema
        names = self._columns(file)
        if {*names} != types.keys():
            problem = f"the columns are {', '.join(names)}, but those of {first_url} are {', '.join(types)}"
            raise DataError(problem, file.url, "line 1")
        wanted = [name for name in types if fields.wants(name)] or [next(iter(types))]
        return partial(self._parse, names=names, types={name: types[name] for name in wanted})

    def _columns(self, file: RowFile) -> tuple[str, ...]:
        names = file.offsets.columns if self.names is None else self.names
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise DataError(f"two columns are named {duplicates[0]!r}", file.url, "line 1")
        return names

    def _parse(self, data: bytes | memoryview, names: tuple[str, ...], types: Mapping[str, Any]) -> Any:
        pa, pacsv = _arrow("csv")
        try:
            table = pacsv.read_csv(
                pa.py_buffer(data),
                read_options=_read_options(pacsv, names, data),
                parse_options=pacsv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                convert_options=pacsv.ConvertOptions(column_types=types, include_columns=list(types)),
            )
        except pa.ArrowInvalid as exc:
            problem = re.sub(r"In CSV column #(\d+)", lambda m: f"column {names[int(m[1])]!r}", _reworded(str(exc)))
            raise ValueError(problem) from exc
        return _batch(table)


def _read_options(module: Any, names: Sequence[str] | None, data: bytes | memoryview) -> Any:
    """Return options to parse ``data`` as one block in this thread: the engine provides the parallelism."""
    columns = {} if names is None else {"column_names": list(names)}
    return module.ReadOptions(use_threads=False, block_size=len(data) + 1, **columns)


def _csv_type(inferred: Any) -> Any:
    """Return the type for all rows of a column from the one inferred from the first: an empty column is text."""
    pa, _ = _arrow("csv")
    if pa.types.is_null(inferred):
        return pa.string()
    return pa.timestamp("us", inferred.tz) if pa.types.is_timestamp(inferred) else inferred


_JSON_LINES = "only JSON lines, with an object on each line, can be read"
_LONGEST_FIRST_LINE = 4096  # bytes that are looked at to recognise JSON over several lines


@dataclass(frozen=True, slots=True)
class JsonFormat(_ArrowParsed):
    """A line is a JSON object, and a sample."""

    types: tuple[tuple[str, str], ...] = ()

    scan_key = "json"
    function_name, suffixes = "read_json", (".jsonl", ".json", ".ndjson")
    find_ends = staticmethod(find_line_ends)

    def scan(self, data: FileBytes, problem: str | None) -> RowOffsets:
        return scan_lines(data, _bom_bytes(data), find_line_ends, False, problem)

    def infer_schema(self, file: RowFile) -> Any:
        """Return the Arrow schema, inferred from the first rows of the file."""
        pa, pajson = _arrow("json")
        if not file.offsets.readable_rows:
            return pa.schema([])
        data, rows = _first_rows(file)
        if bytes(data[:1024]).lstrip()[:1] == b"[":
            raise DataError(
                f"the file is one JSON array; {_JSON_LINES} (`jq -c '.[]'` writes them)", file.url, "line 1"
            )
        if rows > 1 and _opens_object(bytes(data[:_LONGEST_FIRST_LINE])):
            raise DataError(
                f"the file is JSON over several lines; {_JSON_LINES} (`jq -c .` writes them)", file.url, "line 1"
            )
        given = _given_types(self.types)
        options = pajson.ParseOptions(explicit_schema=pa.schema(list(given.items()))) if given else None
        while True:
            try:
                table = pajson.read_json(
                    pa.py_buffer(data), read_options=_read_options(pajson, None, data), parse_options=options
                )
                break
            except pa.ArrowInvalid as exc:  # an invalid row: fewer rows may do, and it fails when it is read
                if rows == 1:
                    raise DataError(_reworded(str(exc)), file.url, self.key(file, 0)) from exc
                rows //= 2
                data = find_rows(file, np.arange(rows), find_line_ends, False).joined(file.data)
        return pa.schema(
            [pa.field(field.name, given.get(field.name) or _json_type(field.type)) for field in table.schema]
        )

    def parser(self, file: RowFile, fields: Fields, schema: Any) -> Parser:
        return partial(_parse_json, schema=schema)


def _opens_object(data: bytes) -> bool:
    """Return whether the first line only opens an object, as in JSON that was printed for people."""
    line = data.lstrip().partition(b"\n")[0].strip()
    return line == b"{" or (line.startswith(b"{") and line.endswith(b",") and line.count(b"{") > line.count(b"}"))


def _parse_json(data: bytes | memoryview, schema: Any) -> Any:
    pa, pajson = _arrow("json")
    options = pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
    return _batch(
        pajson.read_json(pa.py_buffer(data), read_options=_read_options(pajson, None, data), parse_options=options)
    )


def _json_type(inferred: Any) -> Any:
    """Return the type for all rows of a field from the one inferred from the first.

    Text that looks like a timestamp stays text, and so does a field without values.
    """
    pa, _ = _arrow("json")
    if pa.types.is_null(inferred) or pa.types.is_timestamp(inferred):
        return pa.string()
    if pa.types.is_struct(inferred):
        members = [inferred.field(number) for number in range(inferred.num_fields)]
        return pa.struct([pa.field(member.name, _json_type(member.type)) for member in members])
    return pa.list_(_json_type(inferred.value_type)) if pa.types.is_list(inferred) else inferred


def _arrow(module: str) -> tuple[Any, Any]:
    """Return pyarrow and its module ``csv`` or ``json``."""
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.json
    except ImportError as exc:
        raise MissingExtra(f"reading {module}", "tables") from exc
    return pyarrow, getattr(pyarrow, module)


def csv_format(delimiter: str, names: Iterable[str] | None, types: Mapping[str, str] | None) -> CsvFormat:
    """Return the CSV format for the arguments of ``read_csv``.

    Raises:
        PlanError: An argument is not valid.
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n' or not delimiter.isascii():
        raise PlanError(f"delimiter={delimiter!r}: give one character, such as ',' or '\\t'")
    columns = None if names is None else tuple(names)
    if isinstance(names, str) or (columns is not None and not all(isinstance(name, str) for name in columns)):
        raise PlanError(f"names={names!r}: give a list of names, one for each column")
    return CsvFormat(delimiter, columns, column_types(types))


def column_types(types: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Check the ``types`` argument and return its items.

    Raises:
        PlanError: ``types`` is not a dict, or a value is not the name of a type.
    """
    if types is not None and not isinstance(types, Mapping):
        raise PlanError(f"types={types!r}: give a dict, such as {{'price': 'float64'}}")
    return tuple((str(name), Value(dtype).dtype) for name, dtype in (types or {}).items())
