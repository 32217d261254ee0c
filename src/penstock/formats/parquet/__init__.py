"""Tables: Parquet files and Arrow tables as samples, and samples as Parquet files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.later import later

if TYPE_CHECKING:
    from penstock.formats.parquet.source import ParquetSource, TableSource
    from penstock.formats.parquet.tables import ArrowBatch, frame, joined_table, polars_frame, table_from

__all__ = [
    "ArrowBatch",
    "ParquetSource",
    "TableSource",
    "frame",
    "joined_table",
    "polars_frame",
    "table_from",
]

__getattr__ = later(
    __name__,
    {
        "ArrowBatch": "tables",
        "ParquetSource": "source",
        "TableSource": "source",
        "frame": "tables",
        "joined_table": "tables",
        "polars_frame": "tables",
        "table_from": "tables",
    },
)
