"""The functions a dataset begins with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, Literal

from penstock.dataset.chain import Workers, branch
from penstock.dataset.fluent import Dataset
from penstock.errors import PlanError
from penstock.formats.files import FilesSource, ImagesSource
from penstock.formats.items import ItemsSource
from penstock.formats.tar.source import TarSource
from penstock.formats.torch import TorchSource
from penstock.plan import ByObject, Mix, Plan, check_branch, check_choice
from penstock.storage import Cache, Storage, spell

Places = str | Iterable[str]


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


def _source(source: Any) -> Dataset:
    resources = source.resources  # checks the number of workers where it is written
    del resources
    return Dataset(Plan(source))


def mix(
    datasets: Sequence[Dataset],
    weights: Sequence[float] | None = None,
    stop: Literal["first", "all"] = "first",
) -> Dataset:
    """Mix datasets by weight, counted in samples of their sources.

    Nothing repeats unless a dataset says ``repeat()``. ``stop="first"`` ends where a dataset would be asked for a
    sample it does not have; ``"all"`` goes on with the others.

    Raises:
        PlanError: the weights do not fit, or a dataset holds a stage that joins samples.
    """
    check_choice("stop", stop, ("first", "all"))
    datasets = list(datasets) if isinstance(datasets, Iterable) else []
    if not datasets or not all(isinstance(ds, Dataset) for ds in datasets):
        raise PlanError("mix needs a list of datasets")
    given = [1.0] * len(datasets) if weights is None else list(weights)
    if len(given) != len(datasets) or not all(isinstance(w, Real) and 0 < w < float("inf") for w in given):
        raise PlanError(f"weights={given}: give one positive number for each of {len(datasets)} datasets")
    shares = tuple(map(float, given))
    for ds in datasets:
        check_branch(ds.plan, "mix")
    first = datasets[0].plan
    source = Mix(tuple(branch(ds.plan) for ds in datasets), shares, stop)
    return Dataset(Plan(source, (), None, None, None, first.errors, first.engine))
