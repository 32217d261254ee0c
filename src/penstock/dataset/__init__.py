"""The fluent face: a dataset is a value; each method adds one stage or calls one room below."""

from penstock.dataset.fluent import Dataset
from penstock.dataset.sources import (
    from_arrow,
    from_huggingface,
    from_items,
    from_torch,
    mix,
    read_csv,
    read_files,
    read_images,
    read_json,
    read_parquet,
    read_tar,
    read_text,
    read_tfrecords,
)

__all__ = [
    "Dataset",
    "from_arrow",
    "from_huggingface",
    "from_items",
    "from_torch",
    "mix",
    "read_csv",
    "read_files",
    "read_images",
    "read_json",
    "read_parquet",
    "read_tar",
    "read_text",
    "read_tfrecords",
]
