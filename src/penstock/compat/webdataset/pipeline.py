"""A pipeline: a list of stages, the first of which is a source; and the ``ps.Dataset`` that known stages describe."""

from __future__ import annotations

import copy
import inspect
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial, reduce
from itertools import islice
from typing import Any, Self

from penstock.compat.webdataset.autodecode import Decoder
from penstock.compat.webdataset.filters import default_collation_fn
from penstock.compat.webdataset.handlers import reraise_exception
from penstock.compat.webdataset.pytorch import DataLoader, IterableDataset, get_worker_info
from penstock.compat.webdataset.utils import PipelineStage
from penstock.dataset import Dataset, read_tar
from penstock.errors import PlanError, StateError

# Stages by the names of their functions. The first ones work on single items, and are called with one item.
_PER_ITEM = (
    *("_map", "_select", "_map_dict", "_map_tuple", "_to_tuple", "_rename", "_rename_keys", "_extract_keys"),
    *("_xdecode", "_associate", "_unbatched", "_unlisted"),
)
_CHANGE_THE_COUNT = ("_map", "_select", "_unbatched", "_unlisted")
_IGNORED = ("single_node_only", "split_by_node", "split_by_worker", "non_empty")
_READING = re.compile(r"\b(tarfile_samples|(url_opener|StreamingOpen|FileCache) tar_file_expander group_by_keys)\b")


class NoLength(AttributeError, TypeError): ...  # for hasattr(pipeline, "__len__"), and for len(pipeline)


class NoState(AttributeError, StateError): ...  # for hasattr(pipeline, "state_dict"), and for pipeline.state_dict()


class DataPipeline(IterableDataset[Any], PipelineStage):
    """Iterates over a list of stages: first a dataset, a list or a function, then functions of an iterator."""

    size: int | None = None
    iterated_in = 0  # the process that did

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        stages = [arg if isinstance(arg, list) else [arg] for arg in args if arg is not None]
        self.pipeline: list[Any] = [stage for some in stages for stage in some]
        self.repetitions, self.nsamples = 1, -1  # how often the stages run in one iteration, and at most how far

    def close(self) -> None:
        for step in self.pipeline:
            getattr(step, "close", bool)()
        self.pipeline = []

    def invoke(self, f: Any, *args: Any, **options: Any) -> Any:
        is_source = isinstance(f, IterableDataset | DataLoader | list) or not callable(f)
        if not args and is_source and hasattr(f, "__iter__"):
            return iter(f)
        run = f.run if isinstance(f, PipelineStage) and hasattr(f, "run") else f
        if not callable(run):
            raise ValueError(f"{f}: not a valid pipeline stage")
        return run(*args, **options)

    def iterator1(self) -> Iterator[Any]:
        source, *steps = self.pipeline
        return reduce(lambda items, step: self.invoke(step, items), steps, self.invoke(source))

    def iterator(self) -> Iterator[Any]:
        for _ in range(self.repetitions):
            sample = nothing = object()
            for sample in self.iterator1():
                yield sample
            if sample is nothing:
                return

    def __iter__(self) -> Iterator[Any]:
        self.iterated_in = os.getpid()
        if self.repetitions != 1 and self.nsamples > 0:
            return islice(self.iterator(), self.nsamples)
        return self.iterator()

    def stage(self, i: int) -> Any:
        return self.pipeline[i]

    def append(self, f: Any) -> None:
        self.pipeline.append(f)

    def compose(self, *args: Any) -> Self:
        result = copy.copy(self)
        result.pipeline = [*self.pipeline, *args]
        return result

    def with_length(self, n: int, silent: bool = False) -> Self:
        if not silent:
            warnings.warn("with_length sets what len() returns, not the number of samples", stacklevel=2)
        self.size = n
        return self

    @property
    def __len__(self) -> Callable[[], int]:
        if (size := self.size) is None:
            raise NoLength(f"{type(self).__name__} has no len(): call with_length(n)")
        return lambda: size

    def __bool__(self) -> bool:
        return True  # whatever its length

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> Self:
        """Yield this many samples per iteration (in each worker), repeating the stages as needed; in place."""
        return self.repeat(nbatches=max(nsamples, nbatches))

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> Self:
        """Run the stages ``nepochs`` times per iteration, without end if it is not positive; in place."""
        self.repetitions, self.nsamples = nepochs if nepochs > 0 else sys.maxsize, nbatches
        return self

    def __getattr__(self, name: str) -> Any:
        """Find ``state_dict`` where stages count epochs in this process: trainers call it wherever they find one."""
        if name != "state_dict":
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        counts = {str(i): getattr(step, "epoch", None) for i, step in enumerate(self.pipeline)}
        epochs = {i: epoch for i, epoch in counts.items() if isinstance(epoch, int)}
        in_workers = self.iterated_in != os.getpid() or get_worker_info() or isinstance(self.pipeline[0], DataLoader)
        if not epochs or in_workers:
            problem = "workers of a DataLoader count their own" if epochs else "no stage of this one counts"
            instead = "write .exact().loader(), which resumes after any batch"
            raise NoState(f"a WebDataset pipeline keeps no position, and {problem} epochs: {instead}")
        return partial(dict, v=1, stages=[_stage_name(step) for step in self.pipeline], epochs=epochs)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the epoch after those in a state; ``StateError`` if it was saved by other stages."""
        stages = [_stage_name(step) for step in self.pipeline]
        if state.get("v") != 1 or state.get("stages") != stages:
            raise StateError("the state was saved by a pipeline with other stages, or by another version")
        for i, epoch in state["epochs"].items():
            self.pipeline[int(i)].epoch = epoch

    def exact(self) -> Dataset:
        """Return the ``ps.Dataset`` with the same samples; ``PlanError`` names a stage that has no counterpart."""
        if not type(self).__iter__.__module__.startswith(__package__ or ""):
            raise _refused(type(self), "its __iter__ is the program's own: call .exact() on a plain pipeline")
        source, *steps = self.pipeline
        if type(source).__name__ != "SimpleShardList":
            raise _refused(source, "shards that are drawn or listed while reading have no exact order: give a list")
        names = " ".join(_stage_name(step) for step in steps)
        reading = _READING.search(names)
        if reading is None:
            raise PlanError("only a pipeline that reads shards, by WebDataset or tarfile_to_samples, can be made exact")
        first, last = names.count(" ", 0, reading.start()), names.count(" ", 0, reading.end()) + 1
        for step in steps[:first]:
            if _stage_name(step) not in (*_IGNORED, "_shuffle", "detshuffle"):
                raise _refused(step, "it is a stage of shards, before they are read: choose them in the list of URLs")
        for step in steps[first:last]:
            _refuse_options(step)
        ds = read_tar(list(source.urls))
        if source.seed is not None:
            ds = ds.shuffle(seed=_seed(source.seed))
        ds = reduce(_with_stage, steps[:first] + steps[last:], ds)
        if self.repetitions != 1 and self.nsamples > 0:
            advice = "since it counts per worker: leave it out, or write .exact().repeat().limit(n)"
            raise PlanError(f"with_epoch({self.nsamples}) has no exact counterpart, {advice}")
        return ds if self.repetitions == 1 else ds.repeat(self.repetitions if self.repetitions < sys.maxsize else None)


def _stage_name(step: Any) -> str:
    return str(getattr(getattr(step, "f", step), "__name__", type(step).__name__))


def _refused(step: Any, advice: str) -> PlanError:
    return PlanError(f"the stage {_stage_name(step).lstrip('_')!r} cannot be made exact: {advice}")


def _seed(seed: Any) -> int:
    return seed if isinstance(seed, int) and 0 <= seed < 1 << 63 else random.Random(seed).getrandbits(32)


def _with_stage(ds: Dataset, step: Any) -> Dataset:
    name, module = _stage_name(step), getattr(getattr(step, "f", step), "__module__", type(step).__module__)
    options, args = dict(getattr(step, "kw", {})), tuple(getattr(step, "args", ()))
    if not (module.startswith(__package__ or "") or name == "islice"):
        raise _refused(step, "it is a function of the whole stream: write it as a function of one sample, in map")
    if name in _IGNORED:
        return ds
    if name in _PER_ITEM:
        return _with_items(ds, step, name, options)
    if name in ("_shuffle", "detshuffle"):
        size, seed = (getattr(step, name, options.get(name)) for name in ("bufsize", "seed"))
        keeps = (args[0] if args else 1000 if size is None else size) <= 1
        return ds if keeps else ds.shuffle(seed=None if seed is None else _seed(seed))
    if name == "_batched":
        named = dict(zip(("batchsize", "collation_fn", "partial"), args, strict=False)) | options
        collate = named.get("collation_fn", default_collation_fn) or list
        return ds.batched(named.get("batchsize", 20), not named.get("partial", True), collate)
    if name == "islice" and (part := slice(*args)).step in (None, 1):
        ds = ds.skip(part.start) if part.start else ds
        return ds if part.stop is None else ds.limit(max(part.stop - (part.start or 0), 0))
    raise _refused(step, "leave it out, or continue with the methods of ps.Dataset after .exact()")


def _refuse_options(step: Any) -> None:
    names = [*inspect.signature(getattr(step, "f", reraise_exception)).parameters][1:]
    given = {"handler": getattr(step, "handler", None), **getattr(step, "kw", {})}
    for name, value in (*given.items(), *zip(names, getattr(step, "args", ()), strict=False)):
        if value is not None and value is not reraise_exception:
            instead = ".exact().on_error('skip')" if name == "handler" else ".exact(), with select, drop or rename"
            raise _refused(step, f"leave out {name}={getattr(value, '__name__', value)} and write {instead}")


def _with_items(ds: Dataset, step: Any, name: str, options: dict[str, Any]) -> Dataset:
    decodes = isinstance(step.args[0] if step.args else options.get("f"), Decoder)
    any_count, handler = name in _CHANGE_THE_COUNT and not decodes, options.get("handler")
    if handler is not None and getattr(handler, "__name__", "") != "reraise_exception":
        any_count = True
        step = type(step)(step.f, *step.args, **{**options, "handler": partial(_continues, handler=handler)})
    return ds.flat_map(partial(_items, stage=step)) if any_count else ds.map(partial(_item, stage=step))


def _items(item: Any, *, stage: Callable[[Iterator[Any]], Any]) -> list[Any]:
    return list(stage(iter([item])))


def _item(item: Any, *, stage: Callable[[Iterator[Any]], Any]) -> Any:
    return _items(item, stage=stage)[0]


def _continues(exn: Exception, *, handler: Any) -> bool:
    """Refuse to stop: a dataset whose end depends on a failing sample has no exact order."""
    if not handler(exn):
        raise exn
    return True
