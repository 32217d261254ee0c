"""The stages of a pipeline: functions from an iterator to an iterator, with their other arguments given beforehand."""

import functools
import io
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from typing import Any

import numpy as np

from penstock.compat.webdataset import autodecode
from penstock.compat.webdataset.handlers import Handler, reraise_exception
from penstock.compat.webdataset.pytorch import TorchTensor
from penstock.compat.webdataset.utils import PipelineStage

Sample = dict[str, Any]
Source = Iterable[Any]
Items = Iterator[Any]


class FilterFunction:
    """A stage: a function over an iterator, with its other arguments; it can be pickled if they can."""

    def __init__(self, f: Callable[..., Any], /, *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = f, args, kw

    def __call__(self, data: Any) -> Any:
        return self.f(data, *self.args, **self.kw)

    def __repr__(self) -> str:
        return f"<{getattr(self.f, '__name__', self.f)} {self.args} {self.kw}>"


class RestCurried:  # takes all arguments of a function but the first, and returns a stage
    def __init__(self, f: Callable[..., Any]) -> None:
        functools.update_wrapper(self, f)
        self.f = f

    def __call__(self, *args: Any, **kw: Any) -> FilterFunction:
        return FilterFunction(self.f, *args, **kw)


pipelinefilter = RestCurried


def _on_each(f: Callable[..., Any], kind: Any = object) -> Callable[..., Items]:
    """Make a function of a sample one of an iterator; None drops a sample, and the handler decides about errors."""

    @functools.wraps(f)
    def stage(data: Source, /, *args: Any, handler: Handler = reraise_exception, **kw: Any) -> Items:
        for sample in data:
            assert isinstance(sample, kind), f"map_dict takes dicts, map_tuple takes tuples, and got {type(sample)}"
            try:
                result = f(sample, *args, **kw)
            except Exception as exn:
                if handler(exn):
                    continue
                return
            if result is not None:
                yield result

    return stage


def pick(buf: list[Any], rng: random.Random) -> Any:
    place = rng.randint(0, len(buf) - 1)
    buf[place], buf[-1] = buf[-1], buf[place]
    return buf.pop()


def _shuffle(
    data: Source, bufsize: int = 1000, initial: int = 100, rng: Any = None, seed: Any = None, handler: Any = None
) -> Items:
    """Yield random items of a buffer that is filled by two for each one, from ``initial`` up to ``bufsize``."""
    if rng is None:
        rng = random.Random(int((os.getpid() + time.time()) * 1e9) if seed is None else seed)
    items, buf, initial = iter(data), [], min(initial, bufsize)
    for item in items:
        buf.append(item)
        if len(buf) < bufsize:
            buf.extend(itertools.islice(items, 1))
        if len(buf) >= initial:
            yield pick(buf, rng)
    while buf:
        yield pick(buf, rng)


class detshuffle(PipelineStage):  # WebDataset's name
    def __init__(self, bufsize: int = 1000, initial: int = 100, seed: int = 0, epoch: int = -1) -> None:
        self.bufsize, self.initial, self.seed, self.epoch = bufsize, initial, seed, epoch

    def run(self, src: Source) -> Items:
        self.epoch += 1
        return _shuffle(src, self.bufsize, self.initial, random.Random(int(self.seed) + self.epoch))


def _select(data: Source, predicate: Callable[[Any], bool]) -> Items:
    return filter(predicate, data)


def _rsample(data: Source, p: float = 0.5) -> Items:
    assert 0 <= p <= 1, f"rsample({p}): give a probability"
    return (sample for sample in data if random.random() < p)


@_on_each
def _map(sample: Any, f: Callable[[Any], Any]) -> Any:
    result = f(sample)
    if isinstance(sample, dict) and isinstance(result, dict):
        result["__key__"] = sample.get("__key__")
    return result


def map(f: Callable[[Any], Any], handler: Handler = reraise_exception) -> FilterFunction:  # WebDataset's name
    return FilterFunction(_map, f, handler=handler)


def decode(*args: Any, handler: Handler = reraise_exception, **kw: Any) -> FilterFunction:
    """Return the stage that decodes fields by image specs and functions; other arguments are those of ``Decoder``."""
    handlers = [autodecode.ImageHandler(arg) if isinstance(arg, str) else arg for arg in args]
    return FilterFunction(_map, autodecode.Decoder(handlers, **kw), handler=handler)


@_on_each
def _associate(sample: Sample, associator: Any) -> Sample:
    find = associator if callable(associator) else associator.get
    return {**sample, **(find(sample["__key__"]) or {})}


@functools.partial(_on_each, kind=dict)
def _map_dict(sample: Sample, /, **kw: Any) -> Sample:
    for name, f in kw.items():
        sample[name] = f(sample[name])
    return sample


def transform_with(sample: Any, transformers: Any) -> Any:
    assert len(transformers or ()) <= len(sample), f"{len(transformers)} functions for {len(sample)} values"
    pairs = itertools.zip_longest(sample, (transformers or ())[: len(sample)])
    return [value if f is None else f(value) for value, f in pairs]


@functools.partial(_on_each, kind=list | tuple)
def _map_tuple(sample: Any, *args: Any) -> tuple[Any, ...]:
    return tuple(transform_with(sample, args[: len(sample)]))


def _alternatives(names: Any) -> Any:
    return names.split(";") if isinstance(names, str) else names


def getfirst(a: Sample, keys: Any, default: Any = None, missing_is_error: bool = True) -> Any:
    """Return the value of the first key that a sample has, of a list or ``"a;b"``; ``ValueError`` if it has none."""
    names = _alternatives(keys)
    for name in names:
        if name in a:
            return a[name]
    if missing_is_error:
        raise ValueError(f"didn't find {names} in {list(a)}")
    return default


@_on_each
def _to_tuple(sample: Sample, *args: Any, missing_is_error: bool = True, none_is_error: Any = None) -> tuple[Any, ...]:
    fields = args[0].split() if len(args) == 1 and isinstance(args[0], str) else args
    result = tuple([getfirst(sample, names, missing_is_error=missing_is_error) for names in fields])
    if (missing_is_error if none_is_error is None else none_is_error) and any(value is None for value in result):
        raise ValueError(f"to_tuple {args} got {list(sample)}")
    return result


@_on_each
def _rename(sample: Sample, /, keep: bool = True, **kw: Any) -> Sample:
    """Rename fields, ``new="old;other"``; ``keep=False`` drops all others."""
    renamed = {new: getfirst(sample, names) for new, names in kw.items()}
    old = {name for names in kw.values() for name in _alternatives(names)}
    return {name: value for name, value in sample.items() if keep and name not in old} | renamed


@_on_each
def _extract_keys(sample: Sample, *patterns: Any, duplicate_is_error: bool = True, ignore_missing: bool = False) -> Any:
    result = []
    for globs in [_alternatives(pattern) for pattern in patterns]:
        matches = [name for name in sample if any(fnmatch("." + name, g) or fnmatch(name, g) for g in globs)]
        if len(matches) > 1 and duplicate_is_error:
            raise ValueError(f"Multiple sample keys {list(sample)} match {globs}.")
        if not matches and not ignore_missing:
            raise ValueError(f"Cannot find {globs} in sample keys {list(sample)}.")
        result += [sample[name] for name in matches[:1]]
    return tuple(result)


def _last_rule(rules: list[tuple[str, Any]], *names: str) -> Any:
    """Return the last rule whose pattern, its first part, matches one of the names; None if there is none."""
    return next((rule for rule in reversed(rules) if any(fnmatch(name.lower(), rule[0]) for name in names)), None)


@_on_each
def _rename_keys(
    sample: Sample, /, *args: Any, must_match: bool = True, duplicate_is_error: bool = True, **kw: Any
) -> Sample:
    """Rename fields by patterns, ``new=pattern``; no match, and two for one name, are a ``ValueError``."""
    keep_unselected = kw.pop("keep_unselected", False)
    rules = [(pattern, new) for new, pattern in (*args, *kw.items())]
    result: Sample = {}
    missing = {pattern for pattern, _ in rules}
    for path, value in sample.items():
        rule = _last_rule(rules, path.rpartition("/")[2])
        if rule is not None:
            missing.discard(rule[0])
            if rule[1] in result and duplicate_is_error:
                raise ValueError(f"Duplicate value in sample {list(sample)} after rename.")
            result.setdefault(rule[1], value)
        elif keep_unselected:
            result[path] = value
    if must_match and missing:
        raise ValueError(f"Not all patterns matched sample keys {list(sample)}: {sorted(missing)}.")
    return result


default_decoders: list[tuple[str, Any]] = [
    ("*.bin", lambda stream: stream.read()),
    ("*.txt", lambda stream: str(stream.read(), "utf-8")),
    ("*.pyd", lambda stream: autodecode.unpickle_loads(stream.read())),
]


@_on_each
def _xdecode(sample: Sample, *args: Any, must_decode: bool = True, defaults: Any = default_decoders, **kw: Any) -> Any:
    """Decode fields by pattern, with functions of a stream; ``ValueError`` for a field without a decoder."""
    rules = [*defaults, *args, *((f"*.{extension}", f) for extension, f in kw.items())]
    result = dict(sample)
    for path, data in sample.items():
        name = path.rpartition("/")[2]
        rule = ("", None) if path.startswith("__") else _last_rule(rules, name, "." + name)
        if rule is None and must_decode:
            raise ValueError(f"No decoder found for {path}.")
        if rule is not None and rule[1]:
            result[path] = rule[1](io.BytesIO(data) if isinstance(data, bytes) else data)
    return result


def combine_values(b: list[Any], combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    first = b[0]
    if isinstance(first, TorchTensor | np.ndarray) and combine_tensors:
        shapes = {tuple(value.shape) for value in b}
        assert len(shapes) == 1, f"all shapes must be equal in collation, got {shapes}"
        return np.array(b) if isinstance(first, np.ndarray) else sys.modules["torch"].stack(b)
    return np.array(b) if isinstance(first, int | float) and combine_scalars else b


def default_collation_fn(samples: Any, combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    named = isinstance(samples[0], dict)
    keys = [sample.keys() if named else len(sample) for sample in samples]
    assert all(each == keys[0] for each in keys), "keys don't match in different samples"
    order = list(samples[0]) if named else range(len(samples[0]))
    columns = ([sample[key] for sample in samples] for key in order)
    values = [combine_values(column, combine_tensors, combine_scalars) for column in columns]
    return dict(zip(order, values, strict=True)) if named else tuple(values)


def _batched(data: Source, batchsize: int = 20, collation_fn: Any = default_collation_fn, partial: bool = True) -> Any:
    if batchsize < 1:
        raise ValueError(f"batched({batchsize}): a batch has at least one sample")
    items = iter(data)
    while batch := list(itertools.islice(items, batchsize)):
        if len(batch) == batchsize or partial:
            yield batch if collation_fn is None else collation_fn(batch)


def _unlisted(data: Iterable[list[Any]]) -> Items:
    for batch in data:
        assert isinstance(batch, list), f"unlisted takes lists, and got {type(batch)}: use unbatched"
        yield from batch


def _unbatched(data: Source) -> Items:
    """Take batches of columns apart; ``ValueError`` for a batch of another kind or with unequal columns."""
    for batch in data:
        named = isinstance(batch, dict)
        if not named and not isinstance(batch, list | tuple):
            raise ValueError(f"unknown sample type: {type(batch)}")
        columns = list(batch.values() if named else batch)
        if len(lengths := {len(column) for column in columns}) > 1:
            raise ValueError(f"unbatched: the columns of a batch have different lengths: {sorted(lengths)}")
        for values in zip(*columns, strict=True):
            yield dict(zip(batch, values, strict=True)) if named else values


class Cached(PipelineStage):
    def __init__(self) -> None:
        self.cached: list[Any] | None = None

    def run(self, source: Source) -> Items:
        kept = []
        for sample in source if self.cached is None else self.cached:
            kept.append(sample)
            yield sample
        self.cached = kept


shuffle, select, rename, associate = (pipelinefilter(f) for f in (_shuffle, _select, _rename, _associate))
map_dict, rsample, to_tuple, map_tuple = (pipelinefilter(f) for f in (_map_dict, _rsample, _to_tuple, _map_tuple))
batched, unbatched, unlisted, xdecode = (pipelinefilter(f) for f in (_batched, _unbatched, _unlisted, _xdecode))
extract_keys, rename_keys, slice = (pipelinefilter(f) for f in (_extract_keys, _rename_keys, itertools.islice))
mcached = Cached
