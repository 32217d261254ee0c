"""Parquet and Arrow files, and Arrow tables in memory, as sources of samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote

import numpy as np

from penstock.codecs.features import features_of
from penstock.errors import DataError, PlanError, StorageError, import_extra
from penstock.formats.files import find_files
from penstock.formats.manifest import check_sets, current_files
from penstock.formats.tables.arrow_file import open_arrow
from penstock.formats.tables.columns import ArrowColumns
from penstock.formats.tables.parquet_file import Partition, open_parquet
from penstock.formats.tables.reader import FileOpener, ParquetReader
from penstock.formats.tables.values import plain, plain_type
from penstock.order import I64
from penstock.plan import ByObject, Fields, Reader, Resources, Source, Traits
from penstock.plan.values import available_cores
from penstock.storage import Cache, Storage, expand_braces, local_path, redacted, relative_names
from penstock.storage.cache import check_places, wrap_with_cache
from penstock.storage.protocol import scheme, without_query
from penstock.storage.urls import natural_key

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET_SUFFIXES = (".parquet", ".pq", ".parq")
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
_REMOTE_WORKERS = 8  # row groups of remote files that are decoded at a time: most of these threads wait for bytes
_PARTITION_FOLDER = re.compile(r"([^=/]+)=([^/]*)")
_CACHE_FILE = re.compile(r"(?:cache|indices)-[0-9a-f]{8,}.*\.arrow")  # Hugging Face leaves them beside a dataset
_INTEGER = re.compile(r"-?\d{1,18}")
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


def require_arrow(purpose: str) -> None:
    """Check that pyarrow is installed.

    Raises:
        MissingExtra: pyarrow is not installed.
    """
    import_extra("pyarrow.parquet", purpose, "tables")


@dataclass(frozen=True, slots=True)
class ParquetSource(Source):
    """Parquet files; ``patterns`` are the paths as the user wrote them."""

    patterns: tuple[str, ...]
    columns: tuple[str, ...] | None = None
    workers: int | tuple[int, int] | None = None
    storage: Storage | None = None
    cache: Cache | None = None

    function_name: ClassVar[str] = "read_parquet"
    suffixes: ClassVar[tuple[str, ...]] = PARQUET_SUFFIXES

    def __post_init__(self) -> None:
        names = self.columns
        if names is not None and not (names and all(isinstance(name, str) for name in names)):
            raise PlanError(f"columns={names!r}: give a list of column names")
        if names is not None and len({*names}) < len(names):
            raise PlanError(f"columns={list(names)}: a name occurs twice")
        check_places(self.storage, self.cache)
        Resources(self.workers)

    def open(self) -> ParquetReader:
        """List the files.

        Raises:
            MissingExtra: pyarrow is not installed.
            StorageError: There are no files, or a numbered set of files is incomplete.
        """
        require_arrow(self.function_name)
        paths = current_files(self._list_files, self.patterns, self.suffixes[0][1:], self.storage)
        check_sets([path for path in paths if path not in self.patterns], self.storage)
        remote = any(scheme(path) != "file" for path in paths)
        workers = max(self.workers) if isinstance(self.workers, tuple) else self.workers
        return ParquetReader(
            [redacted(path) for path in paths],
            relative_names(paths),
            paths,
            self.columns,
            partitions_of(paths),
            workers or (_REMOTE_WORKERS if remote else available_cores()),
            wrap_with_cache(self.cache, paths, self.storage),
            self._opener(),
        )

    def _list_files(self) -> list[str]:
        return _visible(find_files(self.patterns, self.suffixes, self.storage, natural_key), self.patterns)

    def _opener(self) -> FileOpener:
        return open_parquet

    def describe(self) -> str:
        shown = ", ".join(repr(redacted(pattern)) for pattern in self.patterns[:3])
        more = ", ..." if len(self.patterns) > 3 else ""
        return f"{self.function_name}({shown}{more}{f', columns={list(self.columns)}' if self.columns else ''})"


@dataclass(frozen=True, slots=True)
class ArrowSource(ParquetSource):
    """Files in Arrow's IPC format, as files or as streams."""

    function_name: ClassVar[str] = "read_arrow"
    suffixes: ClassVar[tuple[str, ...]] = ARROW_SUFFIXES

    def _opener(self) -> FileOpener:
        return open_arrow


def _visible(paths: list[str], patterns: Sequence[str]) -> list[str]:
    """Drop files in hidden and ``_temporary`` subfolders, which are being written, and Hugging Face's cache files.

    Files that the user named are kept.

    Raises:
        StorageError: No file is left.
    """
    given = [
        local_path(path) if scheme(path) == "file" else path for pattern in patterns for path in expand_braces(pattern)
    ]
    roots = [f"{path.rstrip('/')}/" for path in given]

    def is_hidden(path: str) -> bool:
        inside = next((path.removeprefix(root) for root in roots if path.startswith(root)), "")
        *folders, name = inside.split("/")
        return bool(any(folder[:1] in (".", "_") for folder in folders) or _CACHE_FILE.fullmatch(name))

    visible = [path for path in paths if not is_hidden(path)]
    if not visible:
        raise StorageError("there are no files of this format", redacted(patterns[0]))
    return visible


def partitions_of(paths: Sequence[str]) -> list[Partition]:
    """Return the columns that the folders right above each file name, with their values.

    ``label=3/year=2024/part-0.parquet`` has the columns label and year. A column whose values are all whole numbers is
    a column of integers, else one of text.

    Raises:
        DataError: The folders of the files name different columns.
    """
    texts = [_partition_texts(path) for path in paths]
    for path, own in zip(paths, texts, strict=True):
        if list(own) != list(texts[0]):
            columns = [", ".join(found) or "no columns" for found in (own, texts[0])]
            raise DataError(
                f"its folders name {columns[0]}, but those of {redacted(paths[0])} name {columns[1]}", redacted(path)
            )
    values = {name: [own[name] for own in texts] for name in (texts[0] if texts else ())}
    integers = {name for name, found in values.items() if all(v is None or _INTEGER.fullmatch(v) for v in found)}
    return [
        tuple((name, int(v) if name in integers and v is not None else v) for name, v in own.items()) for own in texts
    ]


def _partition_texts(path: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in reversed(without_query(path).split("/")[:-1]):
        match = _PARTITION_FOLDER.fullmatch(folder)
        if match is None:
            break
        value = unquote(match[2])
        found[unquote(match[1])] = None if value == _NULL_PARTITION else value
    return dict(reversed(found.items()))


@dataclass(frozen=True, slots=True)
class TableSource(Source):
    """An Arrow table in memory; two sources are equal if they hold the same object."""

    table: ByObject

    random_access = True

    def open(self) -> ArrowTableReader:
        return ArrowTableReader(self.table.value)

    def describe(self) -> str:
        return f"from_arrow({self.table.value.num_rows} rows of {', '.join(self.table.value.schema.names)})"


class ArrowTableReader(Reader):
    """Reads a table in memory as one shard."""

    def __init__(self, table: pa.Table) -> None:
        self.names = ["table"]
        self._table = table
        self._batches = table.to_batches()
        self._offsets = np.cumsum([0, *(batch.num_rows for batch in self._batches)], dtype=np.int64)

    def counts(self, scan: bool) -> I64 | None:
        return np.array([self._table.num_rows], np.int64)

    def sizes(self) -> list[int]:
        return [int(self._table.nbytes)]

    def metadata(self) -> dict[bytes, bytes]:
        """Return the metadata of the table's schema."""
        return dict(self._table.schema.metadata or {})

    @property
    def traits(self) -> Traits:
        return Traits(in_memory=True, columnar=True, find_features=lambda: features_of(self.metadata()) or {})

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedTableRows:
        row_bytes = self._table.nbytes / max(1, self._table.num_rows)
        wanted = {name: name for name in self._table.schema.names if fields.wants(name)}
        slot = np.searchsorted(self._offsets, index, "right") - 1
        rows = ArrowColumns(self._batches, index - self._offsets[slot], slot, wanted, row_bytes) if len(index) else []
        return LocatedTableRows(rows, np.full(len(index), max(1, int(row_bytes)), np.int64))

    def fields(self, shard: int) -> tuple[str, ...]:
        return tuple(self._table.schema.names)

    def url(self, shard: int) -> str:
        return "table"


@dataclass(slots=True)
class LocatedTableRows:
    """Rows of a table in memory."""

    rows: Sequence[Any]
    nbytes: I64

    def take(self, sel: slice) -> LocatedTableRows:
        return LocatedTableRows(self.rows[sel], self.nbytes[sel])

    def read(self) -> tuple[Sequence[Any], dict[int, DataError]]:
        return self.rows, {}


def plain_table(given: Any) -> pa.Table:
    """Return a table or record batch as a table of plain types, as if it had been read from a file.

    Raises:
        MissingExtra: pyarrow is not installed.
        PlanError: The argument is neither a table nor a record batch, or two of its columns have one name.
    """
    require_arrow("from_arrow")
    import pyarrow as pa

    if isinstance(given, pa.RecordBatch):
        given = pa.Table.from_batches([given])
    if not isinstance(given, pa.Table):
        raise PlanError(f"from_arrow needs a pyarrow.Table or RecordBatch, not {type(given).__name__}")
    if twice := [name for name in given.schema.names if given.schema.names.count(name) > 1]:
        raise PlanError(f"two columns are named {twice[0]!r}")
    fields = [field.with_type(plain_type(field.type)) for field in given.schema]
    columns = [
        pa.chunked_array([plain(chunk) for chunk in column.chunks], field.type)
        for field, column in zip(fields, given.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=given.schema.metadata))
