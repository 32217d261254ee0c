"""The rows of a job, into one file that appears whole or not at all: Parquet, CSV or JSON lines."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.blobs.draft import put_object
from penstock.dataset import from_items
from penstock.errors import DataError, PlanError
from penstock.formats.tables.arrow_table import table_from
from penstock.formats.tables.parquet_writer import TableWriter
from penstock.formats.tables.source import require_arrow
from penstock.packing.tar_output import failures_of
from penstock.storage import Storage, local_path, open_storage, redacted
from penstock.storage.protocol import scheme

if TYPE_CHECKING:
    import pyarrow as pa

INPUT = "input"  # the field that names the input of a row
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON = (".jsonl", ".json", ".ndjson")
_LOT = 8192  # rows that are made a table together


def check_metadata(url: str) -> None:
    """Require the name of a file that rows can be written to.

    Raises:
        PlanError: its ending means nothing.
        MissingExtra: it is Parquet, and pyarrow is not installed.
    """
    if url.endswith(".parquet"):
        require_arrow("metadata in Parquet")
    elif not url.endswith((*_DELIMITERS, *_JSON)):
        raise PlanError(f"metadata={redacted(url)!r}: give a file that ends in .parquet, .csv, .tsv or .jsonl")


def filled(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the fields of all of them, in the order they first come; what a row does not have is ``None``."""
    names: dict[str, None] = {INPUT: None} if rows else {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return [{name: row.get(name) for name in names} for row in rows]


def write_metadata(rows: Sequence[dict[str, Any]], url: str, storage: Storage | None) -> None:
    """Write rows of the same fields.

    Raises:
        DataError: a value has no place in such a file.
        StorageError: it cannot be written.
    """
    with failures_of(url):
        if url.endswith(".parquet"):
            _write_parquet(rows, url, storage)
        elif url.endswith(_JSON):
            from_items(rows).write_json(url, storage=storage)
        elif rows:
            from_items(rows).write_csv(url, delimiter=_DELIMITERS[os.path.splitext(url)[1]], storage=storage)
        else:
            put_object(open_storage(url, storage), url, f"{INPUT}\n".encode())


def _write_parquet(rows: Sequence[dict[str, Any]], url: str, storage: Storage | None) -> None:
    local = scheme(url) == "file"
    target = os.path.abspath(local_path(url)) if local else ""
    if local:
        os.makedirs(os.path.dirname(target), exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".penstock-", dir=os.path.dirname(target) or None) as folder:
        writer = TableWriter(folder, max_bytes=1 << 60, schema=_schema(rows))
        for table in _tables(rows):
            writer.write(table)
        writer.close()
        written = Path(folder, "00000.parquet")
        if not rows:
            _write_empty(written)
        if local:
            written.replace(target)
        else:
            put_object(open_storage(url, storage), url, written.read_bytes())


def _tables(rows: Sequence[dict[str, Any]]) -> Iterator[pa.Table]:
    for low in range(0, len(rows), _LOT):
        try:
            yield table_from(rows[low : low + _LOT]).replace_schema_metadata(None)
        except DataError:
            for row in rows[low : low + _LOT]:  # name the one that is to blame by itself
                try:
                    table_from([row])
                except DataError as own:
                    raise DataError(own.problem, None, str(row[INPUT])) from own
            raise


def _schema(rows: Sequence[dict[str, Any]]) -> pa.Schema | None:
    """The types that all rows fit, wherever in them a value first comes."""
    import pyarrow as pa

    schemas = [table.schema for table in _tables(rows)]
    if not schemas:
        return None
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowException, TypeError) as exc:
        raise DataError(f"rows do not go together in a table: {str(exc).splitlines()[0]}") from exc


def _write_empty(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({INPUT: pa.array([], pa.string())}), path)
