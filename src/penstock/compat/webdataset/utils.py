"""Detection of ranks and workers, repeated iteration, and the switches for untrusted data."""

from __future__ import annotations

import fnmatch
import functools
import glob
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from penstock.errors import PlanError
from penstock.storage import expand_braces

enforce_security = os.environ.get("WDS_SECURE", "0") not in ("", "0")
"""Refuse pickle, commands, rewritten URLs and, in ``gopen``, local files, whatever is trusted."""

_TRUST = "PENSTOCK_TRUST_WDS"  # in the environment, so that worker processes inherit it


def trust(*, pickle: bool | None = None, pipe: bool | None = None) -> None:
    """Allow what WebDataset allows by default, here and in the processes started from here.

    Args:
        pickle: Decode pickled fields, and ``pth`` fields that hold more than tensors: both can run code.
        pipe: Run the shell commands in ``pipe:`` URLs, and let the environment variable ``GOPEN_REWRITE`` change URLs.

    Raises:
        PlanError: An argument is not a bool.
    """
    chosen = set(filter(None, os.environ.get(_TRUST, "").split(",")))
    for kind, allowed in (("pickle", pickle), ("pipe", pipe)):
        if allowed is not None and not isinstance(allowed, bool):
            raise PlanError(f"trust({kind}={allowed!r}): give True or False")
        chosen = chosen | {kind} if allowed else chosen - ({kind} if allowed is False else set())
    os.environ[_TRUST] = ",".join(sorted(chosen))


def trusted(kind: str) -> bool:
    """Return whether a kind of danger is allowed, by ``trust`` or by ``WDS_SECURE=0`` in the environment."""
    chosen = os.environ.get(_TRUST, "").split(",")
    return not enforce_security and (kind in chosen or os.environ.get("WDS_SECURE") == "0")


def require_trust(kind: str, problem: str, enforced: str) -> None:
    """Raise ``ValueError`` for what is not trusted: ``enforced`` where ``enforce_security`` is set, or ``problem``."""
    if enforce_security:
        raise ValueError(enforced)
    if not trusted(kind):
        raise ValueError(f"{problem}; call wds.trust({kind}=True) if you trust where it comes from")


class PipelineStage:
    """A stage with a state of its own; subclasses define ``run(source)``."""

    def invoke(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


def identity(x: Any) -> Any:
    return x


def is_iterable(obj: Any) -> bool:
    """Return whether an object is a collection or an iterator, but not text."""
    return isinstance(obj, Iterable) and not isinstance(obj, str | bytes)


def make_seed(*args: Any) -> int:
    """Combine values to a seed of 31 bits."""
    return functools.reduce(lambda seed, arg: (seed * 31 + hash(arg)) & 0x7FFFFFFF, args, 0)


def glob_with_braces(pattern: str) -> list[str]:
    return [name for expanded in expand_braces(pattern) for name in glob.glob(expanded)]


def fnmatch_with_braces(filename: str, pattern: str) -> bool:
    return any(fnmatch.fnmatch(filename, expanded) for expanded in expand_braces(pattern))


def repeatedly0(loader: Any, nepochs: int = sys.maxsize, nbatches: int = sys.maxsize) -> Iterator[Any]:
    """Yield the first ``nbatches`` items of ``nepochs`` iterations."""
    return (item for _ in range(nepochs) for item in itertools.islice(loader, nbatches))


def guess_batchsize(batch: Any) -> int:
    return len(batch[0])


def repeatedly(
    source: Any,
    nepochs: int | None = None,
    nbatches: int | None = None,
    nsamples: int | None = None,
    batchsize: Callable[..., int] = guess_batchsize,
) -> Iterator[Any]:
    """Iterate over ``source`` again and again, up to a number of epochs, batches or samples."""
    batches = total = 0
    for _ in itertools.count() if nepochs is None else range(max(nepochs, 1)):
        for sample in source:
            yield sample
            batches += 1
            total += 0 if nsamples is None else batchsize(sample)
            if (nbatches is not None and batches >= nbatches) or (nsamples is not None and total >= nsamples):
                return


def pytorch_worker_info(group: Any = None) -> tuple[int, int, int, int]:
    """Return rank, world size, worker and number of workers, by environment variables or as torch knows them."""
    rank, world, worker, workers = 0, 1, 0, 1
    torch = sys.modules.get("torch")  # where it is not loaded, neither a group nor a worker exists
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    elif torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        group = group or torch.distributed.group.WORLD
        rank, world = torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
    if "WORKER" in os.environ and "NUM_WORKERS" in os.environ:
        worker, workers = int(os.environ["WORKER"]), int(os.environ["NUM_WORKERS"])
    elif torch is not None and (info := torch.utils.data.get_worker_info()) is not None:
        worker, workers = info.id, info.num_workers
    return rank, world, worker, workers


def pytorch_worker_seed(group: Any = None) -> int:
    """Return a number that differs between the workers of all ranks."""
    rank, _, worker, _ = pytorch_worker_info(group=group)
    return rank * 1000 + worker


def warn_deprecated(name: str, advice: str, stacklevel: int = 2) -> None:
    """Warn that WebDataset removed a name, and say what to write."""
    warnings.warn(f"{name} is deprecated: {advice}", DeprecationWarning, stacklevel=stacklevel + 1)


def deprecated(reason: Any = None) -> Any:
    """Decorate a function so that each call warns; ``reason`` says what to write instead."""
    if callable(reason):
        return deprecated()(reason)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            warn_deprecated(function.__name__, reason or "it will be removed", stacklevel=3)
            return function(*args, **options)

        return call

    return decorate


class ObsoleteException(Exception):
    """WebDataset raises it for names on their way out; here those names only warn."""


def obsolete(func: Any = None, *, reason: str | None = None) -> Any:
    """Decorate a function of WebDataset that is on its way out."""
    return functools.partial(obsolete, reason=reason) if func is None else deprecated(reason)(func)


def compute_sample_weights(n_w_pairs: Any) -> Any:
    """Return for pairs of (count, weight) their products, scaled to at most 1."""
    products = np.array([count * weight for count, weight in n_w_pairs])
    return products / products.max()
