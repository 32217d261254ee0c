"""Functions that create a dataset from rows: tables, files of rows, and datasets of other libraries."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.dataset.dataset import Dataset
from penstock.dataset.sources import Urls, dataset_of
from penstock.errors import PlanError
from penstock.formats.rows.lines import JsonFormat, TextFormat, column_types, csv_format
from penstock.formats.rows.reader import RowsSource
from penstock.formats.rows.tfrecord import TfRecordFormat
from penstock.formats.tables.huggingface import HuggingFaceSource, check_dataset
from penstock.formats.tables.ray import RaySource, is_ray_dataset
from penstock.formats.tables.source import ArrowSource, ParquetSource, TableSource, plain_table
from penstock.plan import ByObject
from penstock.plan.values import Workers
from penstock.storage import Cache, Storage, url_patterns


def read_parquet(
    urls: Urls,
    columns: Sequence[str] | None = None,
    *,
    workers: Workers = None,
    storage: Storage | None = None,
    cache: Cache | None = None,
) -> Dataset:
    """Read Parquet files: a file, a folder with its subfolders, a glob, ``"part-{000..147}.parquet"``, a list.

    A file is a shard, a row a sample, a column a field; folders named ``label=3`` add a column. Batches are slices of
    the columns; rows are built only for functions of a sample.

    Args:
        urls: Local paths, or URLs: ``s3://``, ``http(s)://``, ``memory://`` and any scheme that fsspec supports.
        columns: The columns to read; by default those that the stages need.
        workers: How many row groups to decode at a time; by default as many as there are cores.
        storage: How to reach remote files, such as ``ps.S3(endpoint=...)``; by default set by the environment.
        cache: Where to keep fetched files, such as ``ps.Cache("dir", max_bytes="200GB")``.

    Raises:
        PlanError: No path is given, or ``columns`` are not names.
    """
    return dataset_of(ParquetSource(url_patterns(urls), _chosen(columns), workers, storage, cache))


def read_arrow(
    urls: Urls,
    columns: Sequence[str] | None = None,
    *,
    workers: Workers = None,
    storage: Storage | None = None,
    cache: Cache | None = None,
) -> Dataset:
    """Read Arrow files (``.arrow``, ``.feather``, ``.ipc``; file or stream format), such as Hugging Face caches.

    The arguments are those of ``read_parquet``; a record batch corresponds to a row group. Local files without
    compression are memory-mapped, and their columns are not copied.

    Raises:
        PlanError: No path is given, or ``columns`` are not names.
    """
    return dataset_of(ArrowSource(url_patterns(urls), _chosen(columns), workers, storage, cache))


def _chosen(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(columns, str) or not (columns is None or isinstance(columns, Iterable)):
        raise PlanError(f"columns={columns!r}: give a list of names")
    return None if columns is None else tuple(columns)


def from_arrow(table: Any) -> Dataset:
    """Read the rows of a ``pyarrow.Table`` or ``RecordBatch``, which is not copied.

    Raises:
        MissingExtra: pyarrow is not installed.
        PlanError: ``table`` is not a ``pyarrow.Table`` or ``RecordBatch``.
    """
    return dataset_of(TableSource(ByObject(plain_table(table))))


def read_csv(
    urls: Urls,
    *,
    delimiter: str | None = None,
    names: Iterable[str] | None = None,
    types: Mapping[str, str] | None = None,
    workers: Workers = None,
    storage: Storage | None = None,
    cache: Cache | None = None,
) -> Dataset:
    """Read the rows of CSV files, compressed or not: a field per column, typed by Arrow.

    Types are inferred once, from the first megabytes of the first file. A row that does not fit the types is a
    ``DataError`` that names file and line; ``on_error("skip")`` skips it.

    Args:
        urls: Local paths, or URLs; a glob, a folder, a list.
        delimiter: The character between values; by default a tab for names that end in ``.tsv``, else a comma.
        names: The names of the columns, for files without a header.
        types: Types by column, such as ``{"price": "float64", "zip": "string"}``, instead of the inferred ones.
        workers: How many workers read.
        storage: How to reach remote files.
        cache: Where to keep fetched files.

    Raises:
        PlanError: An argument is not valid.
    """
    patterns = url_patterns(urls)
    if delimiter is None:
        delimiter = "\t" if all(re.search(r"\.tsv(\.\w+)?$", pattern) for pattern in patterns) else ","
    return dataset_of(RowsSource(patterns, csv_format(delimiter, names, types), workers, storage, cache))


def read_json(
    urls: Urls,
    *,
    types: Mapping[str, str] | None = None,
    workers: Workers = None,
    storage: Storage | None = None,
    cache: Cache | None = None,
) -> Dataset:
    """Read JSON lines, compressed or not: an object per line, typed by Arrow. The arguments are those of ``read_csv``.

    Raises:
        PlanError: An argument is not valid.
    """
    return dataset_of(RowsSource(url_patterns(urls), JsonFormat(column_types(types)), workers, storage, cache))


def read_text(
    urls: Urls, *, workers: Workers = None, storage: Storage | None = None, cache: Cache | None = None
) -> Dataset:
    """Read lines of text, compressed or not: each line is a sample, ``{"text": line}``.

    Raises:
        PlanError: No path is given.
    """
    return dataset_of(RowsSource(url_patterns(urls), TextFormat(), workers, storage, cache))


def read_tfrecords(
    urls: Urls,
    *,
    lists: Iterable[str] = (),
    workers: Workers = None,
    storage: Storage | None = None,
    cache: Cache | None = None,
) -> Dataset:
    """Read TFRecord files of ``tf.train.Example``, compressed or not, without TensorFlow; checksums are verified.

    A field with one value is that value; a field with several values is an array, or a list if the values are bytes.
    Fields named in ``lists`` are always arrays or lists. Text is read as bytes.

    Raises:
        PlanError: An argument is not valid.
    """
    names = tuple(lists) if isinstance(lists, Iterable) else (lists,)
    if isinstance(lists, str) or not all(isinstance(name, str) for name in names):
        raise PlanError(f"lists={lists!r}: give a list of field names")
    return dataset_of(RowsSource(url_patterns(urls), TfRecordFormat(names), workers, storage, cache))


def from_huggingface(dataset: Any, split: str | None = None, *, workers: Workers = None) -> Dataset:
    """Read a Hugging Face dataset with its features, by which ``decode()`` decodes.

    A ``Dataset`` is read from its Arrow table, by any number of workers and without copies. An ``IterableDataset`` and
    a builder (or its class) are read front to back.

    Args:
        dataset: A ``Dataset``, ``IterableDataset``, ``DatasetDict`` or builder; or the folder or name of a dataset,
            which is loaded on first use.
        split: The split to read; required for a ``DatasetDict``.
        workers: How many workers read.

    Raises:
        PlanError: ``dataset`` is of another type, or the split does not exist.
    """
    if isinstance(dataset, Mapping):
        if split not in dataset:
            names = ", ".join(map(repr, dataset))
            raise PlanError(f"split={split!r}: the dataset has the splits {names}; give one of them")
        return from_huggingface(dataset[split], workers=workers)
    if isinstance(dataset, str | os.PathLike):
        return dataset_of(HuggingFaceSource(os.fspath(dataset), split, workers))
    check_dataset(dataset)
    return dataset_of(HuggingFaceSource(ByObject(dataset), split, workers))


def from_ray(dataset: Any, *, workers: Workers = None) -> Dataset:
    """Read the rows of a ``ray.data.Dataset``: each block is a shard, tensors become numpy arrays.

    The Ray dataset runs once, when its rows are first read, and its blocks stay in Ray's object store. Pickling the
    result pickles references to the blocks, so Ray tasks and actors can read it, too.

    Args:
        dataset: The Ray dataset.
        workers: How many workers read.

    Raises:
        PlanError: ``dataset`` is not a Ray dataset.
    """
    if not is_ray_dataset(dataset):
        raise PlanError(f"from_ray needs a ray.data.Dataset, not {type(dataset).__name__}")
    return dataset_of(RaySource(dataset, workers))
