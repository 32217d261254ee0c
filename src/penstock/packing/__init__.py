"""Writes any dataset to shards, local or remote: in one exact order, resuming where a run was interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.packing.packer import pack as pack
    from penstock.packing.parquet_output import TableOptions as TableOptions
    from penstock.packing.parquet_output import write_tables as write_tables
    from penstock.packing.row_output import AsCsv as AsCsv
    from penstock.packing.row_output import AsExample as AsExample
    from penstock.packing.row_output import AsJson as AsJson
    from penstock.packing.row_output import RowStage as RowStage
    from penstock.packing.row_output import write_rows as write_rows
    from penstock.packing.tar_output import Packed as Packed
    from penstock.packing.tar_output import write_shards as write_shards
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
