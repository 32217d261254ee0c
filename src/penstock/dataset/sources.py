"""Functions that create a dataset from shards, files or objects in memory, and ``mix``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

from penstock.dataset.dataset import Dataset
from penstock.errors import PlanError
from penstock.formats.files import FilesSource, ImagesSource
from penstock.formats.items import ItemsSource
from penstock.formats.lmdb import LmdbSource
from penstock.formats.tar.source import TarSource
from penstock.formats.torch import TorchSource
from penstock.plan import ByObject, Mix, Plan, check_branch, check_choice
from penstock.plan.values import Workers
from penstock.storage import Cache, Storage, url_patterns

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def read_tar(
    urls: Urls,
    *,
    workers: Workers = None,
    storage: Storage | None = None,
    cache: Cache | None = None,
    manifest: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Read tar shards: ``"train-{0000..0147}.tar"``, ``"a.tar::b.tar"``, a glob, a folder, a list, ``"-"`` for stdin.

    Args:
        urls: Local paths, or URLs: ``s3://``, ``http(s)://``, ``memory://`` and any scheme that fsspec supports.
        workers: How many workers read; by default reading is part of the next stage.
        storage: How to reach remote shards, such as ``ps.S3(endpoint=...)``; by default set by the environment.
        cache: Where to keep fetched shards, such as ``ps.Cache("dir", max_bytes="200GB")``.
        manifest: The path or URL of a manifest that ``penstock index --manifest`` made, for shards whose folder cannot
            be written: with it, samples are counted and located as if their indexes were beside them.

    Raises:
        PlanError: No path is given, or an argument is not valid.
    """
    if not isinstance(manifest, str | os.PathLike | None) or manifest == "":
        raise PlanError(f"manifest={manifest!r} is not a path or a URL")
    place = None if manifest is None else os.fspath(manifest)
    return dataset_of(TarSource(url_patterns(urls), workers, storage=storage, cache=cache, manifest=place))


def read_files(urls: Urls, *, workers: Workers = None, storage: Storage | None = None) -> Dataset:
    """Read whole files, local or remote, with the fields ``path`` and ``bytes``.

    Raises:
        PlanError: No path is given.
    """
    return dataset_of(FilesSource(url_patterns(urls), workers, storage))


def read_images(
    folder: Urls,
    mode: Literal["RGB", "L", "RGBA"] | None = None,
    labels: Literal["folder"] | None = None,
    *,
    workers: Workers = None,
    storage: Storage | None = None,
) -> Dataset:
    """Read image files in path order: ``image`` (uint8), ``path``, and with ``labels="folder"`` the class as ``label``.

    Raises:
        PlanError: No path is given, or the mode is unknown.
    """
    return dataset_of(ImagesSource(url_patterns(folder), mode, labels, workers, storage))


def read_lmdb(
    paths: Urls,
    fields: Literal["tf.Example", "msgpack", "pickle", "caffe"] | Callable[[bytes], Mapping[str, Any]] | None = None,
    trust_pickle: bool = False,
    *,
    workers: Workers = None,
) -> Dataset:
    """Read LMDB environments, each a shard: samples in the order of their keys, with ``__key__`` and ``value``.

    The records ``__keys__`` and ``__len__``, which common conversions of image folders add, are not samples.

    Args:
        paths: Files, folders with a ``data.mdb``, or folders of environments. They must not change while they are read.
        fields: What a value holds, to have its fields instead of ``value``: ``"tf.Example"``, ``"msgpack"``,
            ``"pickle"``, ``"caffe"`` (``image`` and ``label``), or a function from the value to a dict. Pickled and
            packed tuples become ``image`` and ``label``.
        trust_pickle: Unpickle values, which can run code.
        workers: How many workers read; by default reading is part of the next stage.

    Raises:
        MissingExtra: A package that ``fields`` needs is not installed.
        PlanError: No path is given, ``fields`` is not valid, or values are pickled and not trusted.
    """
    return dataset_of(LmdbSource(url_patterns(paths), fields, trust_pickle, workers))


def from_items(items: Sequence[Any]) -> Dataset:
    """Read samples from a list.

    Raises:
        PlanError: ``items`` is not a list of items: a table, a dict of columns, text; the message says what to write.
    """
    problem = f"from_items needs a list of samples, not {type(items).__name__}"
    if (instead := _instead_of_items(items)) is not None:
        raise PlanError(f"{problem}: write {instead}")
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise PlanError(problem)
    return dataset_of(ItemsSource(ByObject(items if isinstance(items, Sequence) else list(items))))


def _instead_of_items(items: Any) -> str | None:
    """Return what to write for a table or columns; ``None`` if ``items`` is a list of items."""
    if isinstance(items, Mapping):
        return "ps.from_arrow(pyarrow.table(columns)) for a dict of columns, ps.from_items([sample]) for one sample"
    if isinstance(items, Dataset):
        return "the Dataset itself"
    if hasattr(items, "to_batches") and hasattr(items, "schema"):
        return "ps.from_arrow(table)"
    if hasattr(items, "to_arrow"):
        return "ps.from_arrow(frame.to_arrow())"
    if hasattr(items, "columns") and hasattr(items, "iloc"):
        return "ps.from_arrow(pyarrow.Table.from_pandas(frame))"
    return None


def from_torch(dataset: Any, fields: Sequence[str] = ("image", "label"), *, workers: Workers = None) -> Dataset:
    """Read the items of a map-style dataset: a tuple with the names in ``fields``, a dict as it is.

    One thread reads the items, since the dataset may not be thread-safe; ``workers`` sets another number of threads.

    Raises:
        PlanError: The dataset does not have ``__len__`` and ``__getitem__``, or ``fields`` are not names.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise PlanError(f"from_torch needs a dataset with __len__ and __getitem__, not {type(dataset).__name__}")
    names = tuple(fields) if not isinstance(fields, str) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise PlanError(f"fields={fields!r}: give names, such as ('image', 'label')")
    return dataset_of(TorchSource(ByObject(dataset), names, workers))


def dataset_of(source: Any) -> Dataset:
    """Return a dataset that reads a source.

    Raises:
        PlanError: The number of workers is out of range.
    """
    _ = source.resources  # checks the number of workers where the user wrote it
    return Dataset(Plan(source))


def mix(
    datasets: Sequence[Dataset],
    weights: Sequence[float] | Sequence[tuple[int, Sequence[float]]] | None = None,
    stop: Literal["first", "all"] = "first",
) -> Dataset:
    """Draw samples from several datasets by weight; weights count samples of the sources.

    No sample repeats unless its dataset has a ``repeat()``. ``stop="first"`` ends when the first dataset is exhausted;
    ``"all"`` continues with the others.

    ``weights=[(0, [0.7, 0.3]), (10_000, [0.5, 0.5])]`` changes the weights at positions of the mixture. Positions count
    the source samples of an epoch, over all ranks together and before any filter. A training step of ``world`` ranks
    takes ``world * batch_size`` positions; use ``cut="step"`` so that all ranks pass a change at the same time. A
    weight may be 0 for a while.

    Raises:
        PlanError: The weights are not valid, or a dataset has a stage that joins samples.
    """
    check_choice("stop", stop, ("first", "all"))
    datasets = list(datasets) if isinstance(datasets, Iterable) else []
    if not datasets or not all(isinstance(ds, Dataset) for ds in datasets):
        raise PlanError("mix needs a list of datasets")
    (_, shares), *changes = _schedule([1.0] * len(datasets) if weights is None else weights, len(datasets))
    for ds in datasets:
        check_branch(ds.plan, "mix")
    first = datasets[0].plan
    source = Mix(tuple(ds.plan.as_branch() for ds in datasets), shares, stop, tuple(changes))
    return Dataset(Plan(source, (), None, None, None, first.errors, first.engine))


def _schedule(weights: Any, count: int) -> list[tuple[int, tuple[float, ...]]]:
    """Return the weights with the position from which they apply."""
    given = list(weights) if isinstance(weights, Iterable) else []
    if not given or not all(isinstance(row, Sequence) and len(row) == 2 for row in given):
        if len(given) != count or not all(_is_weight(w) and w for w in given):
            raise PlanError(f"weights={weights!r}: give one positive number for each of {count} datasets")
        return [(0, tuple(map(float, given)))]
    positions = [position for position, _ in given]
    rows = [tuple(row) if isinstance(row, Iterable) else () for _, row in given]
    if not all(type(p) is int for p in positions) or positions[0] != 0 or positions != sorted({*positions}):
        raise PlanError(f"weights change at {positions!r}: give increasing integers that start with 0")
    for position, row in zip(positions, rows, strict=True):
        if len(row) != count or not all(map(_is_weight, row)) or not any(row):
            raise PlanError(f"weights from position {position}: {row!r}: give {count} numbers >= 0, not all of them 0")
    if unused := [number for number in range(count) if not any(row[number] for row in rows)]:
        raise PlanError(f"weights: dataset {unused[0]} never has a weight above 0; remove it")
    return [(position, tuple(map(float, row))) for position, row in zip(positions, rows, strict=True)]


def _is_weight(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < float("inf")
