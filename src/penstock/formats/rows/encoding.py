"""Samples as rows of files: CSV, JSON lines and TFRecord."""

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

from penstock.errors import DataError, PlanError
from penstock.formats.rows import tfrecord
from penstock.plan import Context, Map, Place, is_tensor


class RowStage(Map):
    """A stage whose items are rows of a file, on their way to ``FileSet``."""

    suffixes: ClassVar[tuple[str, ...]]

    def head(self, row: Any) -> bytes:
        """What a file begins with, by the first row."""
        return b""

    def framed(self, rows: list[Any], first: Any) -> list[bytes]:
        """Rows as they stand in a file; ``first`` is the first of all.

        Raises:
            ValueError: one does not go with the first.
        """
        return rows

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key."""
        error = DataError(f"{self.name}: {exc}", place.shard, place.key)
        error.__cause__ = exc
        return error


def _fields(sample: Any) -> dict[str, Any]:
    if not isinstance(sample, dict):
        raise TypeError(f"a file of rows stores samples with fields, not {type(sample).__name__}")
    return {name: value for name, value in sample.items() if name != "__url__"}


@dataclass(frozen=True)
class AsCsv(RowStage):
    """``write_csv``: a row is a line; the names of the fields are the first."""

    delimiter: str = ","

    suffixes = (".csv", ".tsv", ".txt")

    def __post_init__(self) -> None:
        if not isinstance(self.delimiter, str) or len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise PlanError(f"delimiter={self.delimiter!r}: give one character, such as ',' or '\\t'")

    @property
    def name(self) -> str:
        return "write_csv"

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Give the names and the line."""

        def row(sample: Any) -> tuple[tuple[str, ...], bytes]:
            fields = _fields(sample)
            return tuple(fields), self._line([_cell(name, value) for name, value in fields.items()])

        return row

    def _line(self, cells: list[Any]) -> bytes:
        text = io.StringIO()
        csv.writer(text, delimiter=self.delimiter, lineterminator="\n").writerow(cells)
        return text.getvalue().encode()

    def head(self, row: Any) -> bytes:
        return self._line(list(row[0]))

    def framed(self, rows: list[Any], first: Any) -> list[bytes]:
        for names, _ in rows:
            if names != first[0]:
                raise ValueError(f"a sample has the fields {', '.join(names)}, and the first has {', '.join(first[0])}")
        return [line for _, line in rows]


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
    raise TypeError(f"field {name!r} ({type(value).__name__}) has no place in CSV; leave it out, or write Parquet")


@dataclass(frozen=True)
class AsJson(RowStage):
    """``write_json``: a sample is an object on a line of its own."""

    suffixes = (".jsonl", ".json", ".ndjson")

    @property
    def name(self) -> str:
        return "write_json"

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Give the line."""
        dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_plain).encode
        return lambda sample: dumps(_fields(sample)).encode() + b"\n"


def _plain(value: Any) -> Any:
    if is_tensor(value):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.datetime64):
        return str(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):  # exactly, as no number of JSON is
        return format(value, "f")
    raise TypeError(f"a {type(value).__name__} has no place in JSON; leave it out, or write Parquet")


@dataclass(frozen=True)
class AsExample(RowStage):
    """``write_tfrecords``: a sample is a ``tf.train.Example``."""

    suffixes = tfrecord.SUFFIXES

    @property
    def name(self) -> str:
        return "write_tfrecords"

    def function(self, ctx: Context) -> Callable[..., Any]:
        """Give the record."""
        return lambda sample: tfrecord.example(_fields(sample))

    def framed(self, rows: list[Any], first: Any) -> list[bytes]:
        return tfrecord.framed(rows)
