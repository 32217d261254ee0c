"""Columnar tables, which are found by row group: Parquet, Arrow, Hugging Face and Ray datasets; and Parquet writing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.formats.tables.arrow_table import ArrowBatch as ArrowBatch
    from penstock.formats.tables.arrow_table import array_from as array_from
    from penstock.formats.tables.arrow_table import joined_table as joined_table
    from penstock.formats.tables.arrow_table import pandas_frame as pandas_frame
    from penstock.formats.tables.arrow_table import polars_frame as polars_frame
    from penstock.formats.tables.arrow_table import table_from as table_from
    from penstock.formats.tables.source import ParquetSource as ParquetSource
    from penstock.formats.tables.source import TableSource as TableSource
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
