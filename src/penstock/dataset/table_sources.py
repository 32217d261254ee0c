"""The functions a dataset of rows begins with: tables, files of rows, other libraries' datasets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.dataset.dataset import Dataset
from penstock.dataset.sources import Places, begun
from penstock.dataset.stage_methods import Workers
from penstock.errors import PlanError
from penstock.formats.rows.lines import JsonLayout, TextLayout, csv_layout, types_of
from penstock.formats.rows.reader import RowsSource
from penstock.formats.rows.tfrecord import TfRecordLayout
from penstock.formats.tables.huggingface import HuggingFaceSource, check_dataset
from penstock.formats.tables.ray import RaySource, is_ray_dataset
from penstock.formats.tables.source import ArrowSource, ParquetSource, TableSource, table_of
from penstock.plan import ByObject
from penstock.storage import Cache, Storage, spell


def read_parquet(
    urls: Places,
    columns: Sequence[str] | None = None,
    *,
    workers: Workers = None,
    storage: Storage | None = None,
    cache: Cache | None = None,
) -> Dataset:
    """Read Parquet files: a file, a folder with all below it, a glob, ``"part-{000..147}.parquet"``, a list.

    A file is a shard, a row a sample, a column a field; folders named ``label=3`` add a column. Batches are cut out of
    the columns, rows are made only for functions that want them.

    Args:
        urls: Local paths, or URLs: ``s3://``, ``http(s)://``, ``memory://`` and what fsspec knows.
        columns: The columns to read; by default all, or those that the stages ask for.
        workers: How many row groups are decoded at a time; by default as many as there are cores.
        storage: How to reach what is remote, such as ``ps.S3(endpoint=...)``; by default as the environment says.
        cache: Where to keep what was fetched, such as ``ps.Cache("dir", max_bytes="200GB")``.

    Raises:
        PlanError: no path is given, or ``columns`` are no names.
    """
    return begun(ParquetSource(spell(urls), _chosen(columns), workers, storage, cache))


def read_arrow(
    urls: Places,
    columns: Sequence[str] | None = None,
    *,
    workers: Workers = None,
    storage: Storage | None = None,
    cache: Cache | None = None,
) -> Dataset:
    """Read Arrow files (``.arrow``, ``.feather``, ``.ipc``; files or streams), such as Hugging Face's cache has.

    Places and arguments are those of ``read_parquet``; a record batch is what a row group is there. Local files that
    are not compressed are mapped, and their columns not copied.

    Raises:
        PlanError: no path is given, or ``columns`` are no names.
    """
    return begun(ArrowSource(spell(urls), _chosen(columns), workers, storage, cache))


def _chosen(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(columns, str) or not (columns is None or isinstance(columns, Iterable)):
        raise PlanError(f"columns={columns!r}: give a list of names")
    return None if columns is None else tuple(columns)


def from_arrow(table: Any) -> Dataset:
    """Read the rows of a ``pyarrow.Table`` or ``RecordBatch``, which is not copied.

    Raises:
        MissingExtra: pyarrow is not installed.
        PlanError: it is no table.
    """
    return begun(TableSource(ByObject(table_of(table))))


def read_csv(
    urls: Places,
    *,
    delimiter: str = ",",
    names: Iterable[str] | None = None,
    types: Mapping[str, str] | None = None,
    workers: Workers = None,
    storage: Storage | None = None,
    cache: Cache | None = None,
) -> Dataset:
    """Read the rows of CSV files, also compressed ones: a field for each column, typed by Arrow.

    Types are decided once, by the first megabytes of the first file. A row that does not fit is a ``DataError`` with
    file and line, and ``on_error("skip")`` leaves it out.

    Args:
        urls: Local paths, or URLs; a glob, a folder, a list.
        delimiter: What stands between values.
        names: The names of the columns, where the first line of a file does not tell them.
        types: Types by column, such as ``{"price": "float64", "zip": "string"}``, in place of what is guessed.
        workers: Workers that read.
        storage: How to reach what is remote.
        cache: Where to keep what was fetched.

    Raises:
        PlanError: an argument that cannot be meant.
    """
    return begun(RowsSource(spell(urls), csv_layout(delimiter, names, types), workers, storage, cache))


def read_json(
    urls: Places,
    *,
    types: Mapping[str, str] | None = None,
    workers: Workers = None,
    storage: Storage | None = None,
    cache: Cache | None = None,
) -> Dataset:
    """Read JSON lines, also compressed ones: an object on each line, typed by Arrow. Arguments as in ``read_csv``.

    Raises:
        PlanError: an argument that cannot be meant.
    """
    return begun(RowsSource(spell(urls), JsonLayout(types_of(types)), workers, storage, cache))


def read_text(
    urls: Places, *, workers: Workers = None, storage: Storage | None = None, cache: Cache | None = None
) -> Dataset:
    """Read lines of text, also of compressed files: each is a sample, ``{"text": line}``."""
    return begun(RowsSource(spell(urls), TextLayout(), workers, storage, cache))


def read_tfrecords(
    urls: Places,
    *,
    lists: Iterable[str] = (),
    workers: Workers = None,
    storage: Storage | None = None,
    cache: Cache | None = None,
) -> Dataset:
    """Read TFRecord files of ``tf.train.Example``, also compressed ones, without TensorFlow; checksums are checked.

    A field with one value is that value, one with several is an array (of bytes: a list); those named in ``lists`` are
    never a single value. Text comes as bytes.

    Raises:
        PlanError: an argument that cannot be meant.
    """
    names = () if isinstance(lists, str) else tuple(lists)
    if isinstance(lists, str) or not all(isinstance(name, str) for name in names):
        raise PlanError(f"lists={lists!r}: give a list of field names")
    return begun(RowsSource(spell(urls), TfRecordLayout(names), workers, storage, cache))


def from_huggingface(dataset: Any, split: str | None = None, *, workers: Workers = None) -> Any:
    """Read a Hugging Face dataset, with its features: ``decode()`` follows them.

    A ``Dataset`` is read from its Arrow table, by all workers and without copies; an ``IterableDataset`` and a builder
    (or its class) front to back, as their examples come.

    Args:
        dataset: A ``Dataset``, ``IterableDataset``, ``DatasetDict`` or builder; or the folder or name of a dataset,
            which is loaded when it is used.
        split: Which split, if there are several.
        workers: Workers that read, where one is not enough.

    Returns:
        A ``Dataset``; of a ``DatasetDict`` without ``split``, a dict of them.

    Raises:
        PlanError: it is none of these.
    """
    if isinstance(dataset, Mapping) and split is not None:
        if split not in dataset:
            raise PlanError(f"split={split!r}: the dataset has {', '.join(map(str, dataset))}")
        return from_huggingface(dataset[split], workers=workers)
    if isinstance(dataset, Mapping):
        return {str(name): from_huggingface(part, workers=workers) for name, part in dataset.items()}
    if isinstance(dataset, str | os.PathLike):
        return begun(HuggingFaceSource(os.fspath(dataset), split, workers))
    check_dataset(dataset)
    return begun(HuggingFaceSource(ByObject(dataset), split, workers))


def from_ray(dataset: Any, *, workers: Workers = None) -> Dataset:
    """Read the rows of a ``ray.data.Dataset``: tensors are numpy arrays, a block of it is a shard.

    It is run once, when its rows are first asked for, and stays in Ray's object store. Pickled, this is references to
    its blocks, so that tasks and actors of Ray read it too.

    Args:
        dataset: The Ray dataset.
        workers: Workers that read, where one is not enough.

    Raises:
        PlanError: it is no Ray dataset.
    """
    if not is_ray_dataset(dataset):
        raise PlanError(f"from_ray needs a ray.data.Dataset, not {type(dataset).__name__}")
    return begun(RaySource(dataset, workers))
