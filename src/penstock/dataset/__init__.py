"""The fluent API: a dataset is a value; each method adds a stage or calls a package below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import lazy

if TYPE_CHECKING:
    from penstock.dataset.conversion import convert as convert
    from penstock.dataset.dataset import Dataset as Dataset
    from penstock.dataset.sources import from_items as from_items
    from penstock.dataset.sources import from_torch as from_torch
    from penstock.dataset.sources import mix as mix
    from penstock.dataset.sources import read_files as read_files
    from penstock.dataset.sources import read_images as read_images
    from penstock.dataset.sources import read_lmdb as read_lmdb
    from penstock.dataset.sources import read_tar as read_tar
    from penstock.dataset.table_sources import from_arrow as from_arrow
    from penstock.dataset.table_sources import from_huggingface as from_huggingface
    from penstock.dataset.table_sources import from_ray as from_ray
    from penstock.dataset.table_sources import read_arrow as read_arrow
    from penstock.dataset.table_sources import read_csv as read_csv
    from penstock.dataset.table_sources import read_json as read_json
    from penstock.dataset.table_sources import read_parquet as read_parquet
    from penstock.dataset.table_sources import read_text as read_text
    from penstock.dataset.table_sources import read_tfrecords as read_tfrecords
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
