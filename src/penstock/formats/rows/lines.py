"""Files of lines: text, JSON lines and CSV. Rows are cut out by line, and typed by Arrow in one call a block."""

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
from penstock.formats.rows.reader import Answer, Buffer, RowFile
from penstock.formats.rows.row_offsets import RowOffsets
from penstock.formats.rows.row_scan import (
    EVERY,
    Ends,
    Spans,
    csv_ends,
    find_rows,
    from_mark_to_mark,
    line_ends,
    line_of,
    scan_lines,
)
from penstock.formats.tables.columns import ABSENT, ArrowColumns
from penstock.order import I64
from penstock.plan import Fields

_HEAD = 4 << 20  # bytes of the first file by which types are decided
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TextLayout:
    """Every line is a sample, empty ones too: ``{"text": line}``, strict UTF-8, without its newline."""

    how = "text"
    columnar = False
    call, suffixes, cheap = "read_text", (".txt", ".text", ".log"), True

    def scan(self, data: Buffer, problem: str | None) -> RowOffsets:
        return scan_lines(data, _after_bom(data), line_ends, True, problem)

    def learn(self, file: RowFile) -> None:
        """Nothing: text is text."""

    def key(self, file: RowFile, row: int) -> str:
        return f"line {row + 1}"

    def read(self, file: RowFile, rows: I64, fields: Fields, learnt: None) -> Answer:
        if not fields.wants("text"):
            return [{} for _ in rows], {}
        out: list[Any] = []
        bad: dict[int, DataError] = {}
        for place, line in enumerate(find_rows(file, rows, line_ends, True).each(file.data)):
            try:
                out.append({"text": line.removesuffix(b"\n").removesuffix(b"\r").decode()})
            except UnicodeDecodeError as exc:
                bad[place] = DataError(f"it is no UTF-8 text: {exc.reason}", file.url, self.key(file, int(rows[place])))
                out.append(None)
        return out, bad


class _Typed(ABC):
    """What layouts share whose rows are typed by Arrow."""

    __slots__ = ()

    columnar = True
    cheap = False
    ends: Ends

    def key(self, file: RowFile, row: int) -> str:
        return f"line {line_of(file, row, self.ends, False)}"

    def read(self, file: RowFile, rows: I64, fields: Fields, learnt: Any) -> Answer:
        parse = self.parser(file, fields, learnt)
        together = from_mark_to_mark(file.marks, rows)
        batch = None if together is None else _tried(parse, file.data[together], len(rows))[0]
        batches: list[Any] = [batch]
        problems: dict[int, str] = {}
        if batch is None:
            batches, problems = _parsed(parse, find_rows(file, rows, self.ends, False), file.data)
        bad = {n: DataError(text, file.url, self.key(file, int(rows[n]))) for n, text in problems.items()}
        if not batches:
            return [None] * len(rows), bad
        many = [batch.num_rows for batch in batches]
        row = np.full(len(rows), ABSENT, np.int64)
        slot = np.zeros(len(rows), np.int64)
        good = np.ones(len(rows), bool)
        good[list(bad)] = False
        row[good] = np.concatenate([np.arange(rows_of) for rows_of in many])
        slot[good] = np.repeat(np.arange(len(batches)), many)
        wanted = {name: name for name in batches[0].schema.names if fields.wants(name)}
        size = sum(batch.nbytes for batch in batches) / len(rows)
        return ArrowColumns(batches, row, slot if len(batches) > 1 else None, wanted, size), bad

    @abstractmethod
    def parser(self, file: RowFile, fields: Fields, learnt: Any) -> Parser:
        """What types the wanted fields of some rows."""


Parser = Callable[[bytes], Any]  # rows in one -> a record batch


def _parsed(parse: Parser, spans: Spans, data: Buffer) -> tuple[list[Any], dict[int, str]]:
    """All rows as record batches, and by number what is wrong with those that are none: found by halving."""
    batch, problem = _tried(parse, spans.joined(data), len(spans.begin))
    if batch is not None:
        return [batch], {}
    if len(spans.begin) == 1:
        return [], {0: problem}
    half = len(spans.begin) // 2
    left, wrong = _parsed(parse, Spans(spans.begin[:half], spans.end[:half]), data)
    right, more = _parsed(parse, Spans(spans.begin[half:], spans.end[half:]), data)
    return left + right, wrong | {half + number: text for number, text in more.items()}


def _tried(parse: Parser, data: bytes, rows: int) -> tuple[Any, str]:
    import pyarrow as pa

    try:
        batch = parse(data)
    except (pa.ArrowException, ValueError, KeyError) as exc:
        return None, _reworded(str(exc))
    if batch.num_rows != rows:
        return None, "the line does not hold one row"
    return batch, ""


_WORDS: tuple[tuple[str, str], ...] = (
    (r"Expected (\d+) columns, got (\d+)", r"it has \2 values, and there are \1 columns"),
    (r"(In CSV column #\d+): .*CSV conversion error to ([^:]+): invalid value ('.*')", r"\1: \3 is no \2"),
    (r"Column\(/(.*?)\) changed from (\w+) to (\w+)", r"field '\1' is a \3 here, and a \2 is its type"),
    (r"unexpected field", "it has a field that no line of the beginning has"),
)


def _reworded(problem: str) -> str:
    """What Arrow says, in short and without numbers of rows that nobody knows."""
    first = re.sub(r",? in row \d+|Row #\d+: |^(CSV|JSON) parse error: ", "", problem.splitlines()[0])
    for pattern, words in _WORDS:
        if match := re.search(pattern, first):
            return match.expand(words)
    return first


def _batch(table: Any) -> Any:
    import pyarrow as pa

    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _after_bom(data: Buffer) -> int:
    return 3 if data[:3] == _BOM else 0


def _given_types(types: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return {name: arrow_type(Value(dtype)) for name, dtype in types}


def _head(file: RowFile, ends: Ends) -> tuple[bytes, int]:
    """The first rows, some megabytes of them, and how many."""
    marks = file.marks
    last = int(np.searchsorted(marks.start, marks.start[0] + _HEAD)) - 1
    rows = min(marks.readable, (last + 1) * marks.every)
    return find_rows(file, np.arange(rows), ends, False).joined(file.data), rows


@dataclass(frozen=True, slots=True)
class CsvLayout(_Typed):
    """A row is a sample; the first line of each file names the columns, unless ``names`` does."""

    delimiter: str = ","
    names: tuple[str, ...] | None = None
    types: tuple[tuple[str, str], ...] = ()

    call, suffixes = "read_csv", (".csv", ".tsv", ".txt")

    @property
    def how(self) -> str:
        return f"csv {self.delimiter!r} {self.names is None}"

    @property
    def ends(self) -> Ends:  # type: ignore[override]
        return partial(csv_ends, delimiter=ord(self.delimiter))

    def scan(self, data: Buffer, problem: str | None) -> RowOffsets:
        first = _after_bom(data)
        if self.names is not None:
            return scan_lines(data, first, self.ends, False, problem)
        header = scan_lines(data[: first + _HEAD], first, self.ends, False, None)
        if not header.rows:
            return RowOffsets(EVERY, bool(problem), np.zeros(0, np.int64), first, bad=problem or "")
        file = RowFile("", data[: first + _HEAD], header)
        spans = find_rows(file, np.array([0]), self.ends, False)
        text = spans.each(data)[0].decode("utf-8", "replace")
        columns = next(csv.reader(text.splitlines(keepends=True), delimiter=self.delimiter))
        begin = int(spans.end[0])
        line = 1 + data[:begin].count(b"\n")
        return replace(scan_lines(data, begin, self.ends, False, problem, line), columns=tuple(columns))

    def learn(self, file: RowFile) -> tuple[str, dict[str, Any]]:
        """The columns and their types, by the head of the first file."""
        pa, pacsv = _arrow("csv")
        names = self._columns(file)
        given = _given_types(self.types)
        if unknown := [name for name in given if name not in names]:
            raise DataError(f"types name {unknown[0]!r}, and the columns are {', '.join(names)}", file.url)
        found = {name: pa.string() for name in names}
        if file.marks.readable:
            head, _ = _head(file, self.ends)
            skip = pacsv.ParseOptions(
                delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=lambda row: "skip"
            )
            convert = pacsv.ConvertOptions(check_utf8=False)
            table = pacsv.read_csv(
                pa.py_buffer(head),
                read_options=_reading(pacsv, names, head),
                parse_options=skip,
                convert_options=convert,
            )
            found = {one.name: _settled(one.type) for one in table.schema}
        return file.url, found | given

    def parser(self, file: RowFile, fields: Fields, learnt: tuple[str, dict[str, Any]]) -> Parser:
        first, types = learnt
        names = self._columns(file)
        if {*names} != types.keys():
            problem = f"its columns are {', '.join(names)}, and those of {first} are {', '.join(types)}"
            raise DataError(problem, file.url, "line 1")
        wanted = [name for name in types if fields.wants(name)] or [next(iter(types))]
        return partial(self._parse, names=names, types={name: types[name] for name in wanted})

    def _columns(self, file: RowFile) -> tuple[str, ...]:
        names = file.marks.columns if self.names is None else self.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise DataError(f"two columns are called {twice[0]!r}", file.url, "line 1")
        return names

    def _parse(self, data: bytes, names: tuple[str, ...], types: Mapping[str, Any]) -> Any:
        pa, pacsv = _arrow("csv")
        reading = _reading(pacsv, names, data)
        parsing = pacsv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True)
        convert = pacsv.ConvertOptions(column_types=types, include_columns=list(types))
        try:
            table = pacsv.read_csv(
                pa.py_buffer(data), read_options=reading, parse_options=parsing, convert_options=convert
            )
        except pa.ArrowInvalid as exc:
            problem = re.sub(r"In CSV column #(\d+)", lambda m: f"column {names[int(m[1])]!r}", _reworded(str(exc)))
            raise ValueError(problem) from exc
        return _batch(table)


def _reading(kind: Any, names: Sequence[str] | None, data: bytes) -> Any:
    """One block, by this thread: workers are the engine's affair."""
    more = {} if names is None else {"column_names": list(names)}
    return kind.ReadOptions(use_threads=False, block_size=len(data) + 1, **more)


def _settled(kind: Any) -> Any:
    """A type that was told by some values, as it is for all: a column of nothing is text."""
    pa, _ = _arrow("csv")
    if pa.types.is_null(kind):
        return pa.string()
    return pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else kind


@dataclass(frozen=True, slots=True)
class JsonLayout(_Typed):
    """A line is a JSON object, and a sample."""

    types: tuple[tuple[str, str], ...] = ()

    how = "json"
    call, suffixes = "read_json", (".jsonl", ".json", ".ndjson")
    ends = staticmethod(line_ends)

    def scan(self, data: Buffer, problem: str | None) -> RowOffsets:
        return scan_lines(data, _after_bom(data), line_ends, False, problem)

    def learn(self, file: RowFile) -> Any:
        """The fields and their types, by the head of the first file."""
        pa, pajson = _arrow("json")
        if not file.marks.readable:
            return pa.schema([])
        head, rows = _head(file, line_ends)
        if head.lstrip()[:1] == b"[":
            raise DataError("it is one JSON array; a JSON object on each line is what can be read", file.url, "line 1")
        given = _given_types(self.types)
        explicit = pajson.ParseOptions(explicit_schema=pa.schema(list(given.items()))) if given else None
        while True:
            try:
                table = pajson.read_json(
                    pa.py_buffer(head), read_options=_reading(pajson, None, head), parse_options=explicit
                )
                break
            except pa.ArrowInvalid as exc:  # a line further on is to blame, and says so when it is read
                if rows == 1:
                    raise DataError(_reworded(str(exc)), file.url, self.key(file, 0)) from exc
                rows //= 2
                head = find_rows(file, np.arange(rows), line_ends, False).joined(file.data)
        return pa.schema([pa.field(one.name, given.get(one.name) or _json_type(one.type)) for one in table.schema])

    def parser(self, file: RowFile, fields: Fields, learnt: Any) -> Parser:
        return partial(_parse_json, schema=learnt)


def _parse_json(data: bytes, schema: Any) -> Any:
    pa, pajson = _arrow("json")
    options = pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
    return _batch(
        pajson.read_json(pa.py_buffer(data), read_options=_reading(pajson, None, data), parse_options=options)
    )


def _json_type(kind: Any) -> Any:
    """What Arrow told of some values, as it is for all: text that looks like a moment is text, nothing is text."""
    pa, _ = _arrow("json")
    if pa.types.is_null(kind) or pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        inner = [kind.field(number) for number in range(kind.num_fields)]
        return pa.struct([pa.field(one.name, _json_type(one.type)) for one in inner])
    return pa.list_(_json_type(kind.value_type)) if pa.types.is_list(kind) else kind


def _arrow(kind: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.json
    except ImportError as exc:
        raise MissingExtra(f"reading {kind}", "tables") from exc
    return pyarrow, getattr(pyarrow, kind)


def csv_layout(delimiter: str, names: Iterable[str] | None, types: Mapping[str, str] | None) -> CsvLayout:
    """Check what a user says of CSV files.

    Raises:
        PlanError: an argument that cannot be meant.
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n' or not delimiter.isascii():
        raise PlanError(f"delimiter={delimiter!r}: give one character, such as ',' or '\\t'")
    given = None if names is None else tuple(names)
    if isinstance(names, str) or (given is not None and not all(isinstance(name, str) for name in given)):
        raise PlanError(f"names={names!r}: give a list of names, one for each column")
    return CsvLayout(delimiter, given, types_of(types))


def types_of(types: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Check types by column.

    Raises:
        PlanError: they are no dict, or one is no name of a type.
    """
    if types is not None and not isinstance(types, Mapping):
        raise PlanError(f"types={types!r}: give a dict, such as {{'price': 'float64'}}")
    return tuple((str(name), Value(dtype).dtype) for name, dtype in (types or {}).items())
