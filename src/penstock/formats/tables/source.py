"""Parquet and Arrow files, and Arrow tables in memory, as sources of samples."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote

import numpy as np

from penstock.codecs.features import features_of
from penstock.errors import DataError, MissingExtra, PlanError, StorageError
from penstock.formats.files import find
from penstock.formats.tables.arrow_file import open_ipc
from penstock.formats.tables.columns import ArrowColumns
from penstock.formats.tables.parquet_file import Told, open_file
from penstock.formats.tables.reader import Open, ParquetReader
from penstock.formats.tables.values import plain, plain_type
from penstock.order import I64
from penstock.plan import ByObject, Fields, Resources
from penstock.storage import Cache, Storage, braces, local_path, redacted, relative
from penstock.storage.cache import through
from penstock.storage.protocol import scheme

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".parquet", ".pq", ".parq")
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
_FAR = 8  # row groups of remote files that are fetched and decoded at a time: most of them wait
_PART = re.compile(r"([^=/]+)=([^/]*)")
_SET = re.compile(r"(.*?)(\d{5,})-of-(\d{5,})(\.(?:parquet|arrow))")
_BY_THE_WAY = re.compile(r"(?:cache|indices)-[0-9a-f]{8,}.*\.arrow")  # what Hugging Face leaves beside a dataset
_NUMBER = re.compile(r"-?\d{1,18}")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


def require_arrow(what: str) -> None:
    """Require that pyarrow is installed.

    Raises:
        MissingExtra: it is not.
    """
    try:
        import pyarrow.parquet
    except ImportError as exc:
        raise MissingExtra(what, "tables") from exc
    del pyarrow


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """Parquet files: paths as the user wrote them."""

    patterns: tuple[str, ...]
    columns: tuple[str, ...] | None = None
    workers: int | tuple[int, int] | None = None
    storage: Storage | None = None
    cache: Cache | None = None

    random_access = False
    columnar = True
    verb: ClassVar[str] = "read_parquet"
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES

    def __post_init__(self) -> None:
        names = self.columns
        if names is not None and not (names and all(isinstance(name, str) for name in names)):
            raise PlanError(f"columns={names!r}: give the names of columns")
        Resources(self.workers)

    @property
    def resources(self) -> Resources | None:
        """No pool of its own: row groups are decoded by the reader's threads, however many blocks are cut of them."""
        return None

    def open(self) -> ParquetReader:
        """List the files.

        Raises:
            MissingExtra: pyarrow is not installed.
            StorageError: nothing is there, or a set of files is not whole.
        """
        require_arrow(self.verb)
        paths = _visible(find(self.patterns, self.suffixes, self.storage), self.patterns)
        _check_sets([path for path in paths if path not in self.patterns])
        far = any(scheme(path) != "file" for path in paths)
        workers = max(self.workers) if isinstance(self.workers, tuple) else self.workers
        return ParquetReader(
            [redacted(path) for path in paths],
            relative(paths),
            paths,
            self.columns,
            told_by(paths),
            workers or (_FAR if far else len(os.sched_getaffinity(0))),
            through(self.cache, paths, self.storage),
            self._how(),
        )

    def _how(self) -> Open:
        return open_file

    def describe(self) -> str:
        """The call that made it."""
        some = ", ".join(repr(redacted(one)) for one in self.patterns[:3]) + (", ..." if len(self.patterns) > 3 else "")
        return f"{self.verb}({some}{f', columns={list(self.columns)}' if self.columns else ''})"


@dataclass(frozen=True, slots=True)
class ArrowSource(ParquetSource):
    """Files in Arrow's own format, as files or as streams."""

    verb: ClassVar[str] = "read_arrow"
    suffixes: ClassVar[tuple[str, ...]] = ARROW_SUFFIXES

    def _how(self) -> Open:
        return open_ipc


def _visible(paths: list[str], patterns: Sequence[str]) -> list[str]:
    """Without what lies in hidden folders, or ``_temporary`` ones, of folders that were listed: it is being written.

    Nor are there what Hugging Face keeps of its ``map`` and ``filter`` beside a dataset.

    Raises:
        StorageError: there is nothing else.
    """
    given = [local_path(one) if scheme(one) == "file" else one for pattern in patterns for one in braces(pattern)]
    roots = [f"{one.rstrip('/')}/" for one in given]

    def is_hidden(path: str) -> bool:
        inside = next((path.removeprefix(root) for root in roots if path.startswith(root)), "")
        *folders, name = inside.split("/")
        return bool(any(part[:1] in (".", "_") for part in folders) or _BY_THE_WAY.fullmatch(name))

    kept = [path for path in paths if not is_hidden(path)]
    if not kept:
        raise StorageError("no file of the wanted kind is there", redacted(patterns[0]))
    return kept


def _check_sets(paths: Sequence[str]) -> None:
    """Files that say how many they are must be as many: some of them alone are an unfinished write.

    Raises:
        StorageError: one is missing from a folder that was listed.
    """
    sets: dict[tuple[str, str, str, str], set[int]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        if match := _SET.fullmatch(name):
            sets.setdefault((folder, match[1], match[3], match[4]), set()).add(int(match[2]))
    for (folder, prefix, many, suffix), found in sets.items():
        if missing := sorted(set(range(int(many))) - found):
            name = f"{folder}/{prefix}{missing[0]:05d}-of-{many}{suffix}"
            raise StorageError(
                f"a file of a set of {int(many)} is not there: the set was not written whole", redacted(name)
            )


def told_by(paths: Sequence[str]) -> list[Told]:
    """What the folders right above each file tell: ``label=3/year=2024/part-0.parquet`` has columns label and year.

    A column whose values are all whole numbers is one of numbers.

    Raises:
        DataError: files differ in the columns their folders tell.
    """
    raw = [_parts(path) for path in paths]
    for path, found in zip(paths, raw, strict=True):
        if list(found) != list(raw[0]):
            words = [", ".join(one) or "no column" for one in (found, raw[0])]
            raise DataError(
                f"its folders tell {words[0]}, and those of {redacted(paths[0])} {words[1]}", redacted(path)
            )
    values = {name: [found[name] for found in raw] for name in (raw[0] if raw else ())}
    numbers = {name for name, found in values.items() if all(v is None or _NUMBER.fullmatch(v) for v in found)}
    return [
        tuple((name, int(v) if name in numbers and v is not None else v) for name, v in found.items()) for found in raw
    ]


def _parts(path: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in reversed(path.split("/")[:-1]):
        match = _PART.fullmatch(folder)
        if match is None:
            break
        value = unquote(match[2])
        found[unquote(match[1])] = None if value == _NO_VALUE else value
    return dict(reversed(found.items()))


@dataclass(frozen=True, slots=True)
class TableSource:
    """A table that is in memory, compared by object."""

    table: ByObject

    random_access = True
    columnar = True

    @property
    def resources(self) -> Resources | None:
        """Reading costs nothing."""
        return None

    def open(self) -> TableReader:
        """Nothing to open."""
        return TableReader(self.table.value)

    def describe(self) -> str:
        """The call that made it."""
        return f"from_arrow({self.table.value.num_rows} rows of {', '.join(self.table.value.schema.names)})"


class TableReader:
    """One shard: the table."""

    at_hand = True  # in the memory of this process, and nowhere else

    def __init__(self, table: pa.Table) -> None:
        self.names = ["table"]
        self._table = table
        self._batches = table.to_batches()
        self._edges = np.cumsum([0, *(batch.num_rows for batch in self._batches)], dtype=np.int64)

    def counts(self, scan: bool) -> I64 | None:
        """The rows of the table."""
        return np.array([self._table.num_rows], np.int64)

    def count(self, shard: int) -> int:
        """The rows of the table."""
        return int(self._table.num_rows)

    def sizes(self) -> list[int]:
        """The bytes of the table."""
        return [int(self._table.nbytes)]

    def metadata(self) -> dict[bytes, bytes]:
        """What the schema says beside its columns."""
        return dict(self._table.schema.metadata or {})

    @property
    def features(self) -> dict[str, Any]:
        """What the schema says its columns mean, where it says so."""
        return features_of(self.metadata()) or {}

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedTableRows:
        """Remember which."""
        each = self._table.nbytes / max(1, self._table.num_rows)
        wanted = {name: name for name in self._table.schema.names if fields.wants(name)}
        slot = np.searchsorted(self._edges, index, "right") - 1
        rows = ArrowColumns(self._batches, index - self._edges[slot], slot, wanted, each) if len(index) else []
        return LocatedTableRows(rows, np.full(len(index), max(1, int(each)), np.int64))

    def key(self, shard: int, index: int) -> str | None:
        """The number of the row."""
        return str(index)

    def url(self, shard: int) -> str:
        """A table lies nowhere."""
        return "table"


@dataclass(slots=True)
class LocatedTableRows:
    """Rows that are there."""

    rows: Sequence[Any]
    nbytes: I64

    def take(self, sel: slice) -> LocatedTableRows:
        """Some of them."""
        return LocatedTableRows(self.rows[sel], self.nbytes[sel])

    def read(self) -> tuple[Sequence[Any], dict[int, DataError]]:
        """The rows."""
        return self.rows, {}


def table_of(given: Any) -> pa.Table:
    """A table in memory, as plain as a file's would be.

    Raises:
        MissingExtra: pyarrow is not installed.
        PlanError: it is no table.
    """
    require_arrow("from_arrow")
    import pyarrow as pa

    if isinstance(given, pa.RecordBatch):
        given = pa.Table.from_batches([given])
    if not isinstance(given, pa.Table):
        raise PlanError(f"from_arrow needs a pyarrow.Table or RecordBatch, not {type(given).__name__}")
    fields = [own.with_type(plain_type(own.type)) for own in given.schema]
    columns = [
        pa.chunked_array([plain(chunk) for chunk in column.chunks], own.type)
        for own, column in zip(fields, given.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=given.schema.metadata))
