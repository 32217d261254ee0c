"""The stages that encode samples as rows of files: CSV, JSON lines and TFRecord."""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np

from penstock.errors import PlanError
from penstock.formats.rows import tfrecord
from penstock.plan import Context, Map, Place, is_tensor, sample_error


class RowStage(Map):
    """A stage that encodes samples as rows, which ``landing.RowSink`` writes to files."""

    suffixes: ClassVar[tuple[str, ...]]  # of the files; a file in a folder gets the first

    def head(self, row: Any) -> bytes:
        """Return the header that every file begins with, given the first row of all."""
        return b""

    def frame(self, rows: list[Any], first: Any) -> list[bytes]:
        """Return rows as a file stores them; ``first`` is the first row of all.

        Raises:
            ValueError: A row has other fields than the first.
        """
        return rows

    def failure(self, exc: Exception, place: Place) -> Exception:
        return sample_error(f"{self.name}: {exc}", place, exc)


def _fields(sample: Any) -> dict[str, Any]:
    if not isinstance(sample, dict):
        raise TypeError(f"a file of rows stores samples with fields, not {type(sample).__name__}")
    return {name: value for name, value in sample.items() if name != "__url__"}


@dataclass(frozen=True)
class AsCsv(RowStage):
    """``write_csv``: a sample is a row, and the first line of a file holds the names of the fields.

    Raises:
        PlanError: ``delimiter`` is not a single character that can separate values.
    """

    delimiter: str = ","

    suffixes = (".csv", ".tsv", ".txt")

    def __post_init__(self) -> None:
        if not isinstance(self.delimiter, str) or len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise PlanError(f"delimiter={self.delimiter!r}: give one character, such as ',' or '\\t'")

    @property
    def name(self) -> str:
        return "write_csv"

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Return the function from a sample to its field names and its line."""

        def row(sample: Any) -> tuple[tuple[str, ...], bytes]:
            fields = _fields(sample)
            return tuple(fields), self._line([_cell(name, value) for name, value in fields.items()])

        return row

    def _line(self, cells: list[Any]) -> bytes:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=self.delimiter, lineterminator="\n")
        writer.writerow(cells)
        if len(cells) == 1 and text.getvalue().isspace():  # readers would take the line for a blank one
            return b'"%b"\n' % str(cells[0]).encode()
        return text.getvalue().encode()

    def head(self, row: Any) -> bytes:
        return self._line(list(row[0]))

    def frame(self, rows: list[Any], first: Any) -> list[bytes]:
        for names, _ in rows:
            if names != first[0]:
                found, expected = ", ".join(names), ", ".join(first[0])
                raise ValueError(f"a sample has the fields {found}, but the first sample has {expected}")
        return [line for _, line in rows]


def _leave_out(name: str) -> str:
    """Return what to do about a field that a format of rows cannot hold."""
    return f"leave it out with drop({name!r}), or write Parquet"


def _cell(name: str, value: Any) -> Any:
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic) and not value.ndim and value.dtype.kind != "M":
        value = value.item()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.datetime):
        return value.isoformat(" ")
    if isinstance(value, Decimal):
        return format(value, "f")
    if value is None or isinstance(value, int | float | str | datetime.date | datetime.time | np.datetime64):
        return value
    raise TypeError(f"field {name!r} ({type(value).__name__}) cannot be stored in CSV; {_leave_out(name)}")


@dataclass(frozen=True)
class AsJson(RowStage):
    """``write_json``: a sample is a JSON object on a line of its own."""

    suffixes = (".jsonl", ".json", ".ndjson")

    @property
    def name(self) -> str:
        return "write_json"

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Return the function from a sample to its line."""
        dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_to_json_value).encode
        return lambda sample: dumps(_fields(sample)).encode() + b"\n"


def _to_json_value(value: Any) -> Any:
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.datetime64):
        return str(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):  # as text, since readers parse JSON numbers as floats
        return format(value, "f")
    raise TypeError(f"a value of type {type(value).__name__} cannot be stored in JSON; drop it, or write Parquet")


@dataclass(frozen=True)
class AsExample(RowStage):
    """``write_tfrecords``: a sample is a ``tf.train.Example``."""

    suffixes = tfrecord.TFRECORD_SUFFIXES

    @property
    def name(self) -> str:
        return "write_tfrecords"

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Return the function from a sample to its record."""
        return lambda sample: tfrecord.encode_example(_fields(sample))

    def frame(self, rows: list[Any], first: Any) -> list[bytes]:
        return tfrecord.frame_records(rows)
