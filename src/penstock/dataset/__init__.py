"""The fluent face: a dataset is a value; each method adds one stage or calls one room below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.later import later

if TYPE_CHECKING:
    from penstock.dataset.converting import convert
    from penstock.dataset.fluent import Dataset
    from penstock.dataset.sources import from_items, from_torch, mix, read_files, read_images, read_tar
    from penstock.dataset.tables import (
        from_arrow,
        from_huggingface,
        from_ray,
        read_arrow,
        read_csv,
        read_json,
        read_parquet,
        read_text,
        read_tfrecords,
    )

__all__ = [
    "Dataset",
    "convert",
    "from_arrow",
    "from_huggingface",
    "from_items",
    "from_ray",
    "from_torch",
    "mix",
    "read_arrow",
    "read_csv",
    "read_files",
    "read_images",
    "read_json",
    "read_parquet",
    "read_tar",
    "read_text",
    "read_tfrecords",
]

__getattr__ = later(
    __name__,
    {
        "Dataset": "fluent",
        "convert": "converting",
        "from_arrow": "tables",
        "from_huggingface": "tables",
        "from_items": "sources",
        "from_ray": "tables",
        "from_torch": "sources",
        "mix": "sources",
        "read_arrow": "tables",
        "read_csv": "tables",
        "read_files": "sources",
        "read_images": "sources",
        "read_json": "tables",
        "read_parquet": "tables",
        "read_tar": "sources",
        "read_text": "tables",
        "read_tfrecords": "tables",
    },
)
