"""Line-based formats: text, JSON lines and CSV. Arrow parses the rows of a block in one call."""

from __future__ import annotations

import csv
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from penstock.codecs.features import Value, arrow_type
from penstock.errors import DataError, PlanError, import_extra
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
_WHITESPACE = b" \t\r\n\v\f"


@dataclass(frozen=True, slots=True)
class TextFormat:
    """Every line is a sample, also an empty one: ``{"text": line}``, strict UTF-8, without its newline."""

    scan_key = "text"
    columnar = False
    function_name, suffixes, cheap = "read_text", (".txt", ".text", ".log"), True

    def scan(self, data: FileBytes, problem: str | None) -> RowOffsets:
        return scan_lines(data, _bom_bytes(data), find_line_ends, None, problem)

    def infer_schema(self, file: RowFile) -> None:
        """Return ``None``: text has no schema."""

    def key(self, file: RowFile, row: int) -> str:
        return f"line {row + 1}"

    def read(self, file: RowFile, rows: I64, fields: Fields, schema: None) -> ReadResult:
        if not fields.wants("text"):
            return [{} for _ in rows], {}
        samples: list[Any] = []
        errors: dict[int, DataError] = {}
        for position, line in enumerate(find_rows(file, rows, find_line_ends, None).separate(file.data)):
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
    blank: bytes  # the characters of blank lines, which are not rows

    def key(self, file: RowFile, row: int) -> str:
        return f"line {line_number(file, row, self.find_ends, self.blank)}"

    def read(self, file: RowFile, rows: I64, fields: Fields, schema: Any) -> ReadResult:
        parse = self.parser(file, fields, schema)
        byte_range = aligned_range(file.offsets, rows)
        batch = None if byte_range is None else _try_parse(parse, memoryview(file.data)[byte_range], len(rows))[0]
        if batch is not None:
            return self._columns_of([batch], np.arange(len(rows)), None, fields), {}
        batches, problems = _parse_valid_rows(parse, find_rows(file, rows, self.find_ends, self.blank), file.data)
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


_NOT_ONE_ROW = "the line does not hold exactly one row"
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
        return None, _NOT_ONE_ROW
    return batch, ""


_REWORDED: tuple[tuple[str, str], ...] = (  # patterns of Arrow's messages, and what users see
    (r"Expected (\d+) columns, got (\d+)", r"expected \1 values in the row, found \2"),
    (r"(In CSV column #\d+): .*CSV conversion error to ([^:]+): invalid value ('.*')", r"\1: \3 is not a valid \2"),
    (r"Column\(/(.*?)\) changed from (\w+) to (\w+)", r"field '\1': expected \2, found \3"),
    (r"Column\(/(.*?)\) was specified twice", r"the field '\1' appears twice"),
    (r"Invalid UTF8 sequence", "the line is not UTF-8"),
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


def _large_numbers(batches: Iterable[Any]) -> list[str]:
    """Return the columns that are inferred as floats and may hold integers beyond the range of signed 64 bits."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns = ((name, column) for batch in batches for name, column in zip(batch.schema.names, batch, strict=True))
    floats = ((name, column) for name, column in columns if pa.types.is_float64(column.type))
    return list(dict.fromkeys(name for name, column in floats if (pc.max(column).as_py() or 0) >= 2**63))


_NO_HEADER = "the first line names no columns: it is not text, or the lines end in carriage returns alone"


def _unreadable(first: int, problem: str | None) -> RowOffsets:
    """Return the offsets of a file without rows, or of one that is lost as a whole and counts as one damaged row."""
    return RowOffsets(ROWS_PER_OFFSET, bool(problem), np.zeros(0, np.int64), first, problem=problem or "")


@dataclass(frozen=True, slots=True)
class CsvFormat(_ArrowParsed):
    """A row is a sample; the first line of each file names the columns, unless ``names`` does."""

    delimiter: str = ","
    names: tuple[str, ...] | None = None
    types: tuple[tuple[str, str], ...] = ()

    function_name, suffixes = "read_csv", (".csv", ".tsv", ".txt")

    @property
    def scan_key(self) -> str:
        return f"csv {self.delimiter!r} {self.names is None} {len(self.blank)}"

    @property
    def blank(self) -> bytes:  # type: ignore[override]
        return _WHITESPACE.replace(self.delimiter.encode(), b"")  # a line of tabs is a row of empty cells

    @property
    def find_ends(self) -> FindEnds:  # type: ignore[override]
        return partial(find_csv_ends, delimiter=ord(self.delimiter))

    def scan(self, data: FileBytes, problem: str | None) -> RowOffsets:
        first = _bom_bytes(data)
        if self.names is not None:
            return scan_lines(data, first, self.find_ends, self.blank, problem)
        beginning = data[: first + _SCHEMA_BYTES]
        offsets = scan_lines(beginning, first, self.find_ends, self.blank, None)
        if not offsets.row_count:
            return _unreadable(first, problem)
        header = find_rows(RowFile("", beginning, offsets), np.array([0]), self.find_ends, self.blank)
        text = header.separate(data)[0].decode("utf-8", "replace")
        try:
            columns = next(csv.reader([text], delimiter=self.delimiter))
        except csv.Error:  # a carriage return outside quotes, or a name without an end
            return _unreadable(first, _NO_HEADER)
        if "\0" in text:
            return _unreadable(first, _NO_HEADER)
        first_row = int(header.ends[0])
        line = 1 + data[:first_row].count(b"\n")
        return replace(scan_lines(data, first_row, self.find_ends, self.blank, problem, line), columns=tuple(columns))

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
                table = self._infer(
                    find_rows(file, np.arange(count), self.find_ends, self.blank).joined(file.data), names
                )
            inferred = {column.name: _csv_type(column.type) for column in table.schema}
            for name in _large_numbers(table.to_batches()):
                with suppress(pa.ArrowInvalid):
                    self._infer(data, names, {name: pa.uint64()})
                    inferred[name] = pa.uint64()
        return file.url, inferred | given

    def _infer(self, data: bytes | memoryview, names: tuple[str, ...], types: Mapping[str, Any] | None = None) -> Any:
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
            convert_options=pacsv.ConvertOptions(check_utf8=False, column_types=types),
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

    scan_key, blank = "json", _WHITESPACE
    function_name, suffixes = "read_json", (".jsonl", ".json", ".ndjson")
    find_ends = staticmethod(find_line_ends)

    def scan(self, data: FileBytes, problem: str | None) -> RowOffsets:
        return scan_lines(data, _bom_bytes(data), find_line_ends, self.blank, problem)

    def infer_schema(self, file: RowFile) -> Any:
        """Return the Arrow schema, inferred from the first rows of the file."""
        pa, _ = _arrow("json")
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
        types = _given_types(self.types)
        batches, problems = self._first_batches(file, data, rows, types)
        if not batches:
            raise DataError(problems[0], file.url, self.key(file, 0))
        for name in _large_numbers(batches):
            exact = types | {name: pa.uint64()}
            if len(self._first_batches(file, data, rows, exact)[1]) == len(problems):
                types = exact
        return pa.schema(list((_json_types(batches) | types).items()))

    def _first_batches(
        self, file: RowFile, data: bytes | memoryview, rows: int, types: Mapping[str, Any]
    ) -> tuple[list[Any], dict[int, str]]:
        """Return the first rows with inferred types in place of those that are not given, without invalid rows."""
        pa, _ = _arrow("json")
        parse = partial(_parse_json, schema=pa.schema(list(types.items())), unexpected="infer")
        batch, _ = _try_parse(parse, data, rows)
        if batch is not None:
            return [batch], {}
        return _parse_valid_rows(parse, find_rows(file, np.arange(rows), find_line_ends, self.blank), file.data)

    def parser(self, file: RowFile, fields: Fields, schema: Any) -> Parser:
        return partial(_parse_json, schema=schema)


def _opens_object(data: bytes) -> bool:
    """Return whether the first line only opens an object, as in JSON that was printed for people."""
    line, _, rest = (part.strip() for part in data.lstrip().partition(b"\n"))
    is_open = line == b"{" or (line[:1] == b"{" and line[-1:] == b"," and line.count(b"{") > line.count(b"}"))
    return is_open and rest[:1] != b"{"  # which begins the next row: the first line is damaged


def _parse_json(data: bytes | memoryview, schema: Any, unexpected: str = "error") -> Any:
    pa, pajson = _arrow("json")
    if not _has_objects_only(bytes(data)):
        raise ValueError("the line is not a JSON object")
    options = pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
    batch = _batch(
        pajson.read_json(pa.py_buffer(data), read_options=_read_options(pajson, None, data), parse_options=options)
    )
    batch.validate(full=True)  # Arrow does not check that text is UTF-8
    return batch


def _has_objects_only(data: bytes) -> bool:
    """Return whether each line begins and ends with a brace.

    Arrow ignores line breaks, and crashes where all lines are ``null``. No JSON value has a line break between ``}``
    and ``{``, so each line of valid JSON with these braces has at least one object.
    """
    data = data.strip()
    if data[:1] == b"{" and data[-1:] == b"}" and data.count(b"}\n{") == data.count(b"\n"):
        return True
    lines = filter(None, map(bytes.strip, data.split(b"\n")))
    return all(line[:1] == b"{" and line[-1:] == b"}" for line in lines)


def _json_types(batches: Sequence[Any]) -> dict[str, Any]:
    """Return the types of the fields for all rows from the batches of the first valid rows.

    If two batches have types of a field that no type can replace, the one with more rows counts.
    """
    pa, _ = _arrow("json")
    found: dict[str, list[tuple[Any, int]]] = {}  # by field, types that exclude each other, and their rows
    for batch in batches:
        for field in batch.schema:
            kind, types = _without_timestamps(field.type), found.setdefault(field.name, [])
            for number, (other, rows) in enumerate(types):
                with suppress(pa.ArrowTypeError, pa.ArrowInvalid):
                    schemas = [pa.schema([("", one)]) for one in (other, kind)]
                    unified = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
                    types[number] = unified, rows + batch.num_rows
                    break
            else:
                types.append((kind, batch.num_rows))
    return {name: _without_nulls(max(types, key=itemgetter(1))[0]) for name, types in found.items()}


def _without_timestamps(inferred: Any) -> Any:
    """Return the type with text in place of timestamps: text that looks like a timestamp stays text."""
    pa, _ = _arrow("json")
    return _replaced(inferred, pa.types.is_timestamp)


def _without_nulls(inferred: Any) -> Any:
    """Return the type with text in place of nulls: a field without values is text."""
    pa, _ = _arrow("json")
    return _replaced(inferred, pa.types.is_null)


def _replaced(kind: Any, is_text: Callable[[Any], bool]) -> Any:
    pa, _ = _arrow("json")
    if is_text(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        members = [kind.field(number) for number in range(kind.num_fields)]
        return pa.struct([pa.field(member.name, _replaced(member.type, is_text)) for member in members])
    return pa.list_(_replaced(kind.value_type, is_text)) if pa.types.is_list(kind) else kind


def _arrow(module: str) -> tuple[Any, Any]:
    """Return pyarrow and its module ``csv`` or ``json``."""
    parser = import_extra(f"pyarrow.{module}", f"reading {module}", "tables")
    return import_extra("pyarrow", f"reading {module}", "tables"), parser


def csv_format(delimiter: str, names: Iterable[str] | None, types: Mapping[str, str] | None) -> CsvFormat:
    """Return the CSV format for the arguments of ``read_csv``.

    Raises:
        PlanError: An argument is not valid.
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n' or not delimiter.isascii():
        raise PlanError(f"delimiter={delimiter!r}: give one character, such as ',' or '\\t'")
    columns = None if names is None else tuple(names) if isinstance(names, Iterable) else ()
    if isinstance(names, str) or columns == () or not all(isinstance(name, str) for name in columns or ()):
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
