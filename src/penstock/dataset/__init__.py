"""The fluent face: a dataset is a value; each method adds one stage or calls one room below."""

from penstock.dataset.converting import convert
from penstock.dataset.fluent import Dataset
from penstock.dataset.sources import (
    from_arrow,
    from_huggingface,
    from_items,
    from_ray,
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
    "convert",
    "from_arrow",
    "from_huggingface",
    "from_items",
    "from_ray",
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
