"""Translates a pipeline of known stages into a ``ps.Dataset`` with the same samples, for exact order and resuming."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.compat.webdataset.autodecode import Decoder
from penstock.compat.webdataset.filters import default_collation_fn
from penstock.dataset import Dataset, read_tar
from penstock.errors import PlanError

if TYPE_CHECKING:
    from penstock.compat.webdataset.pipeline import DataPipeline

# Stages by the names of their functions: these change or drop single samples, and are called with one sample.
_PER_SAMPLE = (
    *("_map", "_select", "_decode", "_map_dict", "_map_tuple", "_to_tuple", "_rename", "_rename_keys"),
    *("_extract_keys", "_xdecode", "_associate"),
)
_MAY_DROP = ("_map", "_select")
_IGNORED = ("single_node_only", "split_by_node", "split_by_worker", "check_empty", "non_empty", "_info")
_READING = ("tarfile_samples", "tar_file_expander", "group_by_keys", "StreamingOpen", "FileCache")
_DROPPED = "penstock: dropped"  # text, so that it is the same in every process


def _on_one_sample(sample: Any, *, stage: Callable[[Iterator[Any]], Any]) -> Any:
    """Call a stage with one sample; a sample that the stage drops becomes a mark, which is filtered out."""
    return next(iter(stage(iter([sample]))), _DROPPED)


def _is_kept(sample: Any) -> bool:
    return not (isinstance(sample, str) and sample == _DROPPED)


def _on_one_batch(batch: Any, *, stage: Callable[[Iterator[Any]], Any]) -> list[Any]:
    return list(stage(iter([batch])))


class _Sampled:
    """Keeps a sample with a probability, by its own generator."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, sample: Any, rng: Any) -> bool:
        return bool(rng.random() < self.p)


def _continues(exn: Exception, *, handler: Any) -> bool:
    """Refuse to stop: a dataset whose end depends on a failing sample has no exact order."""
    if not handler(exn):
        raise exn
    return True


def dataset_of(pipeline: DataPipeline) -> Dataset:
    """Return the dataset that a pipeline describes.

    Ranks and workers are left to the dataset's own ``shard``, ``loader`` and DataLoader; a shuffle becomes the epoch
    order; samples have no ``__local_path__``.

    Raises:
        PlanError: A stage has no counterpart; the message names it.
    """
    if not type(pipeline).__iter__.__module__.startswith(__package__ or ""):
        raise _refused(type(pipeline), "its __iter__ is the program's own: call .exact() on a plain pipeline")
    source, *steps = pipeline.pipeline
    if type(source).__name__ != "SimpleShardList":
        raise _refused(source, "shards that are drawn or listed while reading have no exact order: give a list")
    ds = read_tar(list(source.urls))
    if source.seed is not None:
        ds = ds.shuffle(seed=_seed(source.seed))
    for step in steps:
        ds = _with_stage(ds, step)
    if pipeline.repetitions != 1:
        if pipeline.nsamples > 0:
            raise PlanError(
                f"with_epoch({pipeline.nsamples}) has no exact counterpart, since it counts per worker: leave it out, "
                "or write .exact().repeat().limit(n)"
            )
        ds = ds.repeat(pipeline.repetitions if pipeline.repetitions < 1 << 31 else None)
    return ds


def _with_stage(ds: Dataset, step: Any) -> Dataset:
    name, module = stage_name(step), getattr(getattr(step, "f", step), "__module__", type(step).__module__)
    options, args = dict(getattr(step, "kw", {})), tuple(getattr(step, "args", ()))
    if not (module.startswith(__package__ or "") or name == "islice"):
        raise _refused(step, "it is a function of the whole stream: write it as a function of one sample, in map")
    if name in _IGNORED:
        return ds
    if name in _READING:
        return _with_reading(ds, step, {"handler": getattr(step, "handler", None), **options})
    if name in _PER_SAMPLE:
        return _with_samples(ds, step, name, options)
    if name in ("_shuffle", "detshuffle"):
        seed = getattr(step, "seed", options.get("seed"))
        return ds.shuffle(seed=None if seed is None else _seed(seed))
    if name == "_batched":
        named = dict(zip(("batchsize", "collation_fn", "partial"), args, strict=False)) | options
        collate = named.get("collation_fn", default_collation_fn) or list
        return ds.batched(named.get("batchsize", 20), not named.get("partial", True), collate)
    if name in ("_unbatched", "_unlisted"):
        return ds.flat_map(partial(_on_one_batch, stage=step))
    if name == "_rsample":
        return ds.filter(_Sampled(*args, **options))
    if name == "islice" and len(args) in (1, 2):
        start, stop = (0, args[0]) if len(args) == 1 else args
        return ds.skip(start).limit(stop - start) if start else ds.limit(stop)
    raise _refused(step, "leave it out, or continue with the methods of ps.Dataset after .exact()")


def _with_reading(ds: Dataset, step: Any, options: dict[str, Any]) -> Dataset:
    handler = getattr(options.get("handler"), "__name__", "reraise_exception")
    if options.get("select_files") or options.get("rename_files"):
        raise _refused(step, "select_files and rename_files have no counterpart: use select, drop and rename")
    if handler in ("ignore_and_continue", "warn_and_continue"):
        return ds.on_error("skip")
    if handler != "reraise_exception":
        raise _refused(step, f"the handler {handler} decides by code: use reraise_exception or warn_and_continue")
    return ds


def _with_samples(ds: Dataset, step: Any, name: str, options: dict[str, Any]) -> Dataset:
    handler = options.get("handler")
    drops = name in _MAY_DROP and not isinstance(step.args[0] if step.args else options.get("f"), Decoder)
    if handler is not None and getattr(handler, "__name__", "") != "reraise_exception":
        drops = True
        step = type(step)(step.f, *step.args, **{**options, "handler": partial(_continues, handler=handler)})
    ds = ds.map(partial(_on_one_sample, stage=step))
    return ds.filter(_is_kept) if drops else ds


def _seed(seed: Any) -> int:
    """Return a seed that the dataset accepts: whole and not negative; any other value is hashed by ``random``."""
    return seed if isinstance(seed, int) and 0 <= seed < 1 << 63 else random.Random(seed).getrandbits(32)


def stage_name(step: Any) -> str:
    """Return the name of a stage's function, or of its class."""
    return str(getattr(getattr(step, "f", step), "__name__", type(step).__name__))


def _refused(step: Any, advice: str) -> PlanError:
    return PlanError(f"the stage {stage_name(step).lstrip('_')!r} cannot be made exact: {advice}")
