"""Any dataset into shards: on disk or elsewhere, in one exact order, taken up again where it was interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.later import later

if TYPE_CHECKING:
    from penstock.packing.packer import pack
    from penstock.packing.rows import AsCsv, AsExample, AsJson, RowStage, write_rows
    from penstock.packing.tables import TableOptions, write_tables
    from penstock.packing.writing import Packed, write_shards

__all__ = [
    "AsCsv",
    "AsExample",
    "AsJson",
    "Packed",
    "RowStage",
    "TableOptions",
    "pack",
    "write_rows",
    "write_shards",
    "write_tables",
]

__getattr__ = later(
    __name__,
    {
        "AsCsv": "rows",
        "AsExample": "rows",
        "AsJson": "rows",
        "Packed": "writing",
        "RowStage": "rows",
        "TableOptions": "tables",
        "pack": "packer",
        "write_rows": "rows",
        "write_shards": "writing",
        "write_tables": "tables",
    },
)
