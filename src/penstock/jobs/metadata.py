"""Write the rows of a job to one Parquet, CSV or JSON-lines file, which is replaced whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.blobs.draft import put_file, put_object
from penstock.engines import start_run
from penstock.errors import DataError, PlanError
from penstock.formats.items import ItemsSource
from penstock.formats.rows.encoding import AsCsv, AsJson, RowStage
from penstock.formats.tables.arrow_table import table_from
from penstock.formats.tables.parquet_writer import TableWriter
from penstock.formats.tables.source import require_arrow
from penstock.landing import storage_errors
from penstock.landing.lock import remove_partials
from penstock.plan import ByObject, Plan
from penstock.storage import Storage, local_path, open_storage, redacted
from penstock.storage.protocol import scheme

if TYPE_CHECKING:
    import pyarrow as pa

INPUT_FIELD = "input"  # of a row: the name of its input
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_EXTENSIONS = (".jsonl", ".json", ".ndjson")
_ROWS_PER_TABLE = 8192  # rows converted to Arrow at once


def check_metadata(url: str) -> None:
    """Check that rows can be written to a file of this name.

    Raises:
        PlanError: The extension is not supported.
        MissingExtra: The file is Parquet, and pyarrow is not installed.
    """
    if url.endswith(".parquet"):
        require_arrow("metadata in Parquet")
    elif not url.endswith((*_DELIMITERS, *_JSON_EXTENSIONS)):
        raise PlanError(f"metadata={redacted(url)!r}: give a file that ends in .parquet, .csv, .tsv or .jsonl")


def fill_fields(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every row the fields of all rows, in the order in which they first appear; missing values are ``None``."""
    names: dict[str, None] = {INPUT_FIELD: None} if rows else {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return [{name: row.get(name) for name in names} for row in rows]


def write_metadata(rows: Sequence[dict[str, Any]], url: str, storage: Storage | None, drafts: str) -> None:
    """Write rows, which must all have the same fields.

    Args:
        rows: The rows.
        url: The file.
        storage: The storage of a remote file.
        drafts: A local folder for a draft, which the next run empties if this one is killed.

    Raises:
        DataError: The format cannot store a value.
        StorageError: The file cannot be written.
    """
    on_disk = scheme(url) == "file"
    target = open_storage(url, None if on_disk else storage)
    with storage_errors(url):
        if on_disk:
            remove_partials(*os.path.split(os.path.realpath(local_path(url))))
        if url.endswith(".parquet"):
            _write_parquet(rows, url, target, drafts)
        elif url.endswith(_JSON_EXTENSIONS):
            _write_rows(AsJson(), rows, url, target)
        elif rows:
            _write_rows(AsCsv(_DELIMITERS[os.path.splitext(url)[1]]), rows, url, target)
        else:
            _put(f"{INPUT_FIELD}\n".encode(), url, target)


def _write_rows(encoder: RowStage, rows: Sequence[dict[str, Any]], url: str, storage: Storage) -> None:
    encoded = list(start_run(Plan(ItemsSource(ByObject(rows)), (encoder,)), 0).items())
    framed = encoder.frame(encoded, encoded[0]) if encoded else []
    head = encoder.head(encoded[0]) if encoded else b""
    _put(b"".join([head, *framed]), url, storage)


def _put(data: bytes, url: str, storage: Storage) -> None:
    put_object(storage, url, data)


def _write_parquet(rows: Sequence[dict[str, Any]], url: str, storage: Storage, drafts: str) -> None:
    os.makedirs(drafts, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=drafts) as folder:
        writer = TableWriter(folder, max_bytes=1 << 60, schema=_common_schema(rows))
        for table in _tables(rows):
            writer.write(table)
        writer.close()
        written = Path(folder, "00000.parquet")
        if not rows:
            _write_empty(written)
        put_file(storage, url, written)


def _tables(rows: Sequence[dict[str, Any]]) -> Iterator[pa.Table]:
    for start in range(0, len(rows), _ROWS_PER_TABLE):
        chunk = rows[start : start + _ROWS_PER_TABLE]
        try:
            yield table_from(chunk).replace_schema_metadata(None)
        except DataError:
            for row in chunk:  # find a row that fails by itself, to name its input
                try:
                    table_from([row])
                except DataError as exc:
                    raise DataError(exc.problem, None, str(row[INPUT_FIELD])) from exc
            raise


def _common_schema(rows: Sequence[dict[str, Any]]) -> pa.Schema | None:
    """Return a schema that all rows fit, even if the first rows of a column are null; None if there are no rows."""
    import pyarrow as pa

    schemas = [table.schema for table in _tables(rows)]
    if not schemas:
        return None
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowException, TypeError) as exc:
        raise DataError(f"the rows do not fit into one table: {str(exc).splitlines()[0]}") from exc


def _write_empty(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({INPUT_FIELD: pa.array([], pa.string())}), path)
