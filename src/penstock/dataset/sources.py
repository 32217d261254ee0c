"""The functions a dataset begins with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

from penstock.dataset.chain import Workers, branch
from penstock.dataset.fluent import Dataset
from penstock.errors import PlanError
from penstock.formats.files import FilesSource, ImagesSource
from penstock.formats.huggingface import HuggingFaceSource, check_dataset
from penstock.formats.items import ItemsSource
from penstock.formats.lines import JsonLayout, TextLayout, csv_layout, types_of
from penstock.formats.parquet.source import ParquetSource, TableSource, table_of
from penstock.formats.ray import RaySource, is_ray_dataset
from penstock.formats.rows import RowsSource
from penstock.formats.tar.source import TarSource
from penstock.formats.tfrecord import TfRecordLayout
from penstock.formats.torch import TorchSource
from penstock.plan import ByObject, Mix, Plan, check_branch, check_choice
from penstock.storage import Cache, Storage, spell

Places = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def read_tar(
    urls: Places, *, workers: Workers = None, storage: Storage | None = None, cache: Cache | None = None
) -> Dataset:
    """Read tar shards: ``"train-{0000..0147}.tar"``, ``"a.tar::b.tar"``, a glob, a folder, a list, ``"-"`` for stdin.

    Args:
        urls: Local paths, or URLs: ``s3://``, ``http(s)://``, ``memory://`` and what fsspec knows.
        workers: Workers that read, where one is not enough.
        storage: How to reach what is remote, such as ``ps.S3(endpoint=...)``; by default as the environment says.
        cache: Where to keep what was fetched, such as ``ps.Cache("dir", max_bytes="200GB")``.

    Raises:
        PlanError: no path is given.
    """
    return _source(TarSource(spell(urls), workers, storage=storage, cache=cache))


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
    if isinstance(columns, str) or not (columns is None or isinstance(columns, Iterable)):
        raise PlanError(f"columns={columns!r}: give a list of names")
    names = None if columns is None else tuple(columns)
    return _source(ParquetSource(spell(urls), names, workers, storage, cache))


def from_arrow(table: Any) -> Dataset:
    """Read the rows of a ``pyarrow.Table`` or ``RecordBatch``, which is not copied.

    Raises:
        MissingExtra: pyarrow is not installed.
        PlanError: it is no table.
    """
    return _source(TableSource(ByObject(table_of(table))))


def read_files(urls: Places, *, workers: Workers = None, storage: Storage | None = None) -> Dataset:
    """Read whole files, local or remote: fields ``path`` and ``bytes``."""
    return _source(FilesSource(spell(urls), workers, storage))


def read_images(
    folder: Places,
    mode: str | None = None,
    labels: str | None = None,
    *,
    workers: Workers = None,
    storage: Storage | None = None,
) -> Dataset:
    """Read image files in path order: ``image`` (uint8), ``path``, and with ``labels="folder"`` the class as ``label``.

    Raises:
        PlanError: an unknown mode.
    """
    return _source(ImagesSource(spell(folder), mode, labels, workers, storage))


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
    return _source(RowsSource(spell(urls), csv_layout(delimiter, names, types), workers, storage, cache))


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
    return _source(RowsSource(spell(urls), JsonLayout(types_of(types)), workers, storage, cache))


def read_text(
    urls: Places, *, workers: Workers = None, storage: Storage | None = None, cache: Cache | None = None
) -> Dataset:
    """Read lines of text, also of compressed files: each is a sample, ``{"text": line}``."""
    return _source(RowsSource(spell(urls), TextLayout(), workers, storage, cache))


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
    return _source(RowsSource(spell(urls), TfRecordLayout(names), workers, storage, cache))


def from_items(items: Sequence[Any]) -> Dataset:
    """Read samples from a list.

    Raises:
        PlanError: it is no list.
    """
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise PlanError(f"from_items needs a list, not {type(items).__name__}")
    return _source(ItemsSource(ByObject(items if isinstance(items, Sequence) else list(items))))


def from_torch(dataset: Any, fields: Sequence[str] = ("image", "label"), *, workers: Workers = None) -> Dataset:
    """Read the items of a map-style dataset: a tuple's values under the names in ``fields``, a dict as it is.

    One thread asks it for items, since nobody promises that several may; ``workers`` says how many may.

    Raises:
        PlanError: it has no length or no items by number, or ``fields`` are no names.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise PlanError(f"from_torch needs a dataset with a length and items by number, not {type(dataset).__name__}")
    names = tuple(fields) if not isinstance(fields, str) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise PlanError(f"fields={fields!r}: give names, such as ('image', 'label')")
    return _source(TorchSource(ByObject(dataset), names, workers))


def from_huggingface(dataset: Any, split: str | None = None, *, workers: Workers = None) -> Any:
    """Read a Hugging Face dataset, with its features: ``decode()`` follows them.

    A ``Dataset`` is read from its Arrow table, by all workers and without copies; an ``IterableDataset`` and a builder
    (or its class) front to back, as their examples come.

    Args:
        dataset: A ``Dataset``, ``IterableDataset``, ``DatasetDict`` or builder; or the folder or name of a dataset,
            which is loaded when it is used.
        split: Which split of a folder, name or builder, if there are several.
        workers: Workers that read, where one is not enough.

    Returns:
        A ``Dataset``; of a ``DatasetDict``, a dict of them.

    Raises:
        PlanError: it is none of these.
    """
    if isinstance(dataset, Mapping):
        return {str(name): from_huggingface(part, workers=workers) for name, part in dataset.items()}
    if isinstance(dataset, str | os.PathLike):
        return _source(HuggingFaceSource(os.fspath(dataset), split, workers))
    check_dataset(dataset)
    return _source(HuggingFaceSource(ByObject(dataset), split, workers))


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
    return _source(RaySource(dataset, workers))


def _source(source: Any) -> Dataset:
    resources = source.resources  # checks the number of workers where it is written
    del resources
    return Dataset(Plan(source))


def mix(
    datasets: Sequence[Dataset],
    weights: Sequence[float] | Sequence[tuple[int, Sequence[float]]] | None = None,
    stop: Literal["first", "all"] = "first",
) -> Dataset:
    """Mix datasets by weight, counted in samples of their sources.

    Nothing repeats unless a dataset says ``repeat()``. ``stop="first"`` ends where a dataset would be asked for a
    sample it does not have; ``"all"`` goes on with the others.

    ``weights=[(0, [0.7, 0.3]), (10_000, [0.5, 0.5])]`` changes them at positions of the mixture: source samples of an
    epoch, counted over all ranks together and before any filter. A training step of ``world`` ranks is ``world *
    batch_size`` positions; use ``cut="step"``, so that all ranks pass a change at the same time. A weight may be 0 for
    a while.

    Raises:
        PlanError: the weights do not fit, or a dataset holds a stage that joins samples.
    """
    check_choice("stop", stop, ("first", "all"))
    datasets = list(datasets) if isinstance(datasets, Iterable) else []
    if not datasets or not all(isinstance(ds, Dataset) for ds in datasets):
        raise PlanError("mix needs a list of datasets")
    (_, shares), *changes = _schedule([1.0] * len(datasets) if weights is None else weights, len(datasets))
    for ds in datasets:
        check_branch(ds.plan, "mix")
    first = datasets[0].plan
    source = Mix(tuple(branch(ds.plan) for ds in datasets), shares, stop, tuple(changes))
    return Dataset(Plan(source, (), None, None, None, first.errors, first.engine))


def _schedule(weights: Any, many: int) -> list[tuple[int, tuple[float, ...]]]:
    """The weights by the position from which they hold."""
    given = list(weights) if isinstance(weights, Iterable) else []
    if not given or not all(isinstance(row, Sequence) and len(row) == 2 for row in given):
        if len(given) != many or not all(_weight(w) and w for w in given):
            raise PlanError(f"weights={weights!r}: give one positive number for each of {many} datasets")
        return [(0, tuple(map(float, given)))]
    positions = [position for position, _ in given]
    rows = [tuple(row) if isinstance(row, Iterable) else () for _, row in given]
    if not all(type(p) is int for p in positions) or positions[0] != 0 or positions != sorted({*positions}):
        raise PlanError(f"weights change at {positions!r}: give whole numbers that rise, the first of them 0")
    for position, row in zip(positions, rows, strict=True):
        if len(row) != many or not all(map(_weight, row)) or not any(row):
            raise PlanError(f"weights from {position} on: {row!r}: give {many} numbers from 0, not all of them 0")
    if unused := [number for number in range(many) if not any(row[number] for row in rows)]:
        raise PlanError(f"weights: dataset {unused[0]} never has a weight above 0; leave it out")
    return [(position, tuple(map(float, row))) for position, row in zip(positions, rows, strict=True)]


def _weight(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < float("inf")
