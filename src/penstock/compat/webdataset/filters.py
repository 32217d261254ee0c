"""The stages of a pipeline: functions from an iterator to an iterator, with their other arguments given beforehand."""

from __future__ import annotations

import fcntl
import functools
import io
import itertools
import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from importlib import import_module
from typing import Any

import numpy as np

from penstock.compat.webdataset import autodecode
from penstock.compat.webdataset.handlers import Handler, reraise_exception
from penstock.compat.webdataset.pytorch import TorchTensor
from penstock.compat.webdataset.utils import PipelineStage, identity

Sample = dict[str, Any]
Source = Iterable[Any]
Items = Iterator[Any]


class FilterFunction:
    """A stage: a function over an iterator, with its other arguments; it can be pickled if they can."""

    def __init__(self, f: Callable[..., Any], *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = f, args, kw

    def __call__(self, data: Any) -> Any:
        return self.f(data, *self.args, **self.kw)

    def __repr__(self) -> str:
        return f"<{getattr(self.f, '__name__', self.f)} {self.args} {self.kw}>"


class RestCurried:
    """A function that takes all arguments but the first and returns a stage."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f
        functools.update_wrapper(self, f)

    def __call__(self, *args: Any, **kw: Any) -> FilterFunction:
        return FilterFunction(self.f, *args, **kw)


pipelinefilter = RestCurried


def compose2(f: Callable[[Any], Any], g: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: g(f(x))


def compose(*args: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the functions, applied from left to right, as one."""
    return functools.reduce(compose2, args)


def pipeline(source: Any, *args: Callable[[Any], Any]) -> Any:
    return compose(identity, *args)(source)


def _alternatives(names: Any) -> list[str]:
    """Return the names in ``"jpg;png"``, or a list as it is."""
    return list(names.split(";") if isinstance(names, str) else names)


def getfirst(a: Sample, keys: Any, default: Any = None, missing_is_error: bool = True) -> Any:
    """Return the value of the first key that a sample has, of a list or ``"a;b"``; ``ValueError`` if it has none."""
    names = keys.split(";") if isinstance(keys, str) else keys
    for name in names:
        if name in a:
            return a[name]
    if missing_is_error:
        raise ValueError(f"didn't find {names} in {list(a)}")
    return default


def parse_field_spec(fields: Any) -> list[list[str]]:
    """Split ``"jpg;png cls"`` into a list of alternatives for each field."""
    return [field.split(";") for field in (fields.split() if isinstance(fields, str) else fields)]


def transform_with(sample: Any, transformers: Any) -> Any:
    """Apply a function to each leading value; None leaves a value as it is."""
    if not transformers:
        return sample
    rest = list(sample)[len(transformers) :]
    return [value if f is None else f(value) for f, value in zip(transformers, sample, strict=False)] + rest


def _each(data: Source, f: Callable[[Any], Any], handler: Handler) -> Items:
    """Yield what ``f`` makes of each sample; the handler decides about errors."""
    for sample in data:
        try:
            result = f(sample)
        except Exception as exn:
            if handler(exn):
                continue
            return
        yield result


def _info(
    data: Source, fmt: Any = None, n: int = 3, every: int = -1, width: int = 50, stream: Any = None, name: str = ""
) -> Items:
    """Print the first ``n`` samples, and after them one of ``every``."""
    stream = stream or sys.stderr
    for number, sample in enumerate(data):
        if number < n or (every > 0 and (number + 1) % every == 0):
            fields = [f"{key} {repr(value)[:width]}" for key, value in sample.items()] if fmt is None else []
            print("\n".join([f"--- {name}", *fields]) if fmt is None else fmt.format(**sample), file=stream)
        yield sample


def pick(buf: list[Any], rng: random.Random) -> Any:
    """Remove a random item of a buffer; the last one takes its place."""
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
    """A shuffle by seed and epoch; each iteration is the next epoch."""

    def __init__(self, bufsize: int = 1000, initial: int = 100, seed: int = 0, epoch: int = -1) -> None:
        self.bufsize, self.initial, self.seed, self.epoch = bufsize, initial, seed, epoch

    def run(self, src: Source) -> Items:
        self.epoch += 1
        return _shuffle(src, self.bufsize, self.initial, random.Random(int(self.seed) + self.epoch))


def _select(data: Source, predicate: Callable[[Any], bool]) -> Items:
    """Keep the samples for which the predicate holds."""
    return filter(predicate, data)


def _log_keys(data: Source, logfile: str | None = None) -> Items:
    """Append number, worker, rank and key of each sample to a file."""
    if not logfile:
        yield from data
        return
    with open(logfile, "a") as stream:
        for number, sample in enumerate(data):
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
            print(number, *(sample.get(f"__{name}__") for name in ("worker", "rank", "key")), sep="\t", file=stream)
            stream.flush()
            fcntl.flock(stream.fileno(), fcntl.LOCK_UN)
            yield sample


def _decode(data: Source, *args: Any, handler: Handler = reraise_exception, **kw: Any) -> Items:
    """Decode the fields of samples, see ``autodecode.Decoder``; text stands for an image spec."""
    return _each(data, autodecode.Decoder(autodecode.field_handlers(args), **kw), handler)


def _map(data: Source, f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Items:
    """Apply ``f``; None drops the sample, and a dict keeps its key."""

    def mapped(sample: Any) -> Any:
        result = f(sample)
        if isinstance(sample, dict) and isinstance(result, dict):
            result["__key__"] = sample.get("__key__")
        return result

    return (result for result in _each(data, mapped, handler) if result is not None)


def _rename(data: Source, handler: Handler = reraise_exception, keep: bool = True, **kw: Any) -> Items:
    """Rename fields, ``new="old;other"``; ``keep=False`` drops all others."""
    old = {name for names in kw.values() for name in _alternatives(names)}

    def renamed(sample: Sample) -> Sample:
        kept = {name: value for name, value in sample.items() if name not in old} if keep else {}
        return kept | {new: getfirst(sample, names) for new, names in kw.items()}

    return _each(data, renamed, handler)


def _associate(data: Source, associator: Any, **kw: Any) -> Items:
    """Add the fields that a dict or a function has for the sample's key."""
    for sample in data:
        key = sample["__key__"]
        sample.update(associator(key) if callable(associator) else associator.get(key, {}))
        yield sample


def _map_dict(data: Source, handler: Handler = reraise_exception, **kw: Any) -> Items:
    """Apply a function to each named field, in place."""
    assert kw, "map_dict needs a function for at least one field"
    assert all(callable(f) for f in kw.values()), kw

    def mapped(sample: Sample) -> Sample:
        for name, f in kw.items():
            sample[name] = f(sample[name])
        return sample

    return _each(data, mapped, handler)


def _to_tuple(
    data: Source,
    *args: Any,
    handler: Handler = reraise_exception,
    missing_is_error: bool = True,
    none_is_error: bool | None = None,
) -> Items:
    """Take fields out of samples: one per argument, or per word of a single argument."""
    none_is_error = missing_is_error if none_is_error is None else none_is_error
    if len(args) == 1 and isinstance(args[0], str) and " " in args[0]:
        args = tuple(args[0].split())
    fields = [_alternatives(arg) for arg in args]

    def chosen(sample: Sample) -> tuple[Any, ...]:
        result = tuple([getfirst(sample, names, missing_is_error=missing_is_error) for names in fields])
        if none_is_error and any(value is None for value in result):
            raise ValueError(f"to_tuple {args} got {list(sample)}")
        return result

    return _each(data, chosen, handler)


def _map_tuple(data: Source, *args: Any, handler: Handler = reraise_exception) -> Items:
    """Apply a function to each leading value of a tuple; None leaves a value as it is."""
    assert all(f is None or callable(f) for f in args), args

    def mapped(sample: Any) -> tuple[Any, ...]:
        assert isinstance(sample, list | tuple), type(sample)
        return tuple(transform_with(sample, args))

    return _each(data, mapped, handler)


def combine_values(b: Any, combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """Join the values of one field: numbers to an array, tensors and arrays by stacking, all others to a list."""
    first = b[0]
    if isinstance(first, int | float):
        return np.array(list(b)) if combine_scalars else b
    if isinstance(first, TorchTensor | np.ndarray):
        if not combine_tensors:
            return b
        shapes = {tuple(value.shape) for value in b}
        assert len(shapes) == 1, f"all shapes must be equal in collation, got {shapes}"
        return np.array(list(b)) if isinstance(first, np.ndarray) else sys.modules["torch"].stack(list(b))
    return list(b)


def default_collation_fn(samples: Any, combine_tensors: bool = True, combine_scalars: bool = True) -> Any:
    """Join samples, tuples or dicts with the same fields, to one of columns."""
    if isinstance(samples[0], dict):
        columns = {key: [sample.get(key) for sample in samples] for key in samples[0]}
        assert all(sample.keys() == columns.keys() for sample in samples), "keys don't match in different samples"
        return {key: combine_values(column, combine_tensors, combine_scalars) for key, column in columns.items()}
    assert len({len(sample) for sample in samples}) == 1, "keys don't match in different samples"
    values = zip(*samples, strict=True)
    return tuple([combine_values(list(column), combine_tensors, combine_scalars) for column in values])


def _batched(
    data: Source, batchsize: int = 20, collation_fn: Any = default_collation_fn, partial: bool = True
) -> Items:
    """Join ``batchsize`` neighbours to a batch; ``partial`` keeps a smaller last one."""
    items = iter(data)
    while batch := list(itertools.islice(items, batchsize)):
        if len(batch) == batchsize or partial:
            yield batch if collation_fn is None else collation_fn(batch)


def _unlisted(data: Iterable[list[Any]]) -> Items:
    """Yield the items of lists."""
    for batch in data:
        assert isinstance(batch, list), batch
        yield from batch


def _unbatched(data: Source) -> Items:
    """Take batches of columns apart; ``ValueError`` for a batch that is neither a dict nor a tuple."""
    for batch in data:
        if isinstance(batch, list | tuple):
            yield from (tuple([column[i] for column in batch]) for i in range(len(batch[0])))
        elif isinstance(batch, dict):
            lengths = {len(column) for column in batch.values()}
            assert len(lengths) == 1, lengths
            yield from ({name: column[i] for name, column in batch.items()} for i in range(lengths.pop()))
        else:
            raise ValueError(f"unknown sample type: {type(batch)}")


def _rsample(data: Source, p: float = 0.5) -> Items:
    """Keep each sample with a probability."""
    assert 0.0 <= p <= 1.0, p
    return (sample for sample in data if random.random() < p)


def _extract_keys(
    source: Source, *patterns: Any, duplicate_is_error: bool = True, ignore_missing: bool = False
) -> Items:
    """Take the fields that match patterns out of samples; none for a pattern, or several, is a ``ValueError``."""
    for sample in source:
        result = []
        for globs in [_alternatives(pattern) for pattern in patterns]:
            matches = [name for name in sample if any(fnmatch("." + name, g) or fnmatch(name, g) for g in globs)]
            if len(matches) > 1 and duplicate_is_error:
                raise ValueError(f"Multiple sample keys {list(sample)} match {globs}.")
            if not matches and not ignore_missing:
                raise ValueError(f"Cannot find {globs} in sample keys {list(sample)}.")
            result += [sample[name] for name in matches[:1]]
        yield tuple(result)


def _rename_keys(
    source: Source,
    *args: tuple[str, str],
    keep_unselected: bool = False,
    must_match: bool = True,
    duplicate_is_error: bool = True,
    **kw: str,
) -> Items:
    """Rename the fields whose last part matches a pattern, ``(new, pattern)`` or ``new=pattern``; later rules win.

    A pattern that matches no field, and two fields that get one name, are a ``ValueError``.
    """
    rules = [*args, *kw.items()]
    for sample in source:
        result: Sample = {}
        missing = {pattern for _, pattern in rules}
        for path, value in sample.items():
            name = path.rpartition("/")[2].lower()
            rule = next((rule for rule in reversed(rules) if fnmatch(name, rule[1])), None)
            if rule is None:
                result |= {path: value} if keep_unselected else {}
                continue
            missing.discard(rule[1])
            if rule[0] in result and duplicate_is_error:
                raise ValueError(f"Duplicate value in sample {list(sample)} after rename.")
            result.setdefault(rule[0], value)
        if must_match and missing:
            raise ValueError(f"Not all patterns matched sample keys {list(sample)}: {sorted(missing)}.")
        yield result


def decode_bin(stream: Any) -> Any:
    return stream.read()


def decode_text(stream: Any) -> str:
    return str(stream.read(), "utf-8")


def decode_pickle(stream: Any) -> Any:
    return autodecode.unpickle_loads(stream.read())


default_decoders = [("*.bin", decode_bin), ("*.txt", decode_text), ("*.pyd", decode_pickle)]


def find_decoder(decoders: Any, path: str) -> Any:
    """Return the function of the last pattern that matches a field; None if none does."""
    name = path.rpartition("/")[2].lower()
    matches = (f for pattern, f in reversed(decoders) if fnmatch(name, pattern) or fnmatch("." + name, pattern))
    return identity if name.startswith("__") else next(matches, None)


def _xdecode(
    source: Source, *args: Any, must_decode: bool = True, defaults: Any = default_decoders, **kw: Any
) -> Items:
    """Decode fields by pattern, with functions of a stream; ``ValueError`` for a field without a decoder."""
    decoders = [*defaults, *args, *((f"*.{extension}", f) for extension, f in kw.items())]

    def decoded(path: str, data: Any) -> Any:
        f: Any = False if path.startswith("__") else find_decoder(decoders, path)
        if f is None and must_decode:
            raise ValueError(f"No decoder found for {path}.")
        return f(io.BytesIO(data) if isinstance(data, bytes) else data) if f else data

    return ({path: decoded(path, data) for path, data in sample.items()} for sample in source)


class Cached(PipelineStage):
    """Keeps all samples in memory after one whole pass."""

    def __init__(self) -> None:
        self.cached: list[Any] | None = None

    def run(self, source: Source) -> Items:
        if self.cached is not None:
            yield from self.cached
            return
        kept = []
        for sample in source:
            kept.append(sample)
            yield sample
        self.cached = kept


class LMDBCached(PipelineStage):
    """Keeps all samples in an LMDB database after one whole pass; ``pickler`` encodes them."""

    def __init__(self, fname: str, map_size: float = 1e12, pickler: Any = pickle, chunksize: int = 500) -> None:
        self.db: Any = import_module("lmdb").open(fname, readonly=False, map_size=int(map_size))
        self.pickler, self.chunksize = pickler, chunksize

    def is_complete(self) -> bool:
        with self.db.begin() as txn:
            return txn.get(b"_") is not None

    def run(self, source: Source) -> Items:
        if self.is_complete():
            with self.db.begin() as txn:
                yield from (self.pickler.loads(value) for key, value in txn.cursor() if key != b"_")
            return
        numbered = enumerate(source)
        while chunk := list(itertools.islice(numbered, self.chunksize)):
            with self.db.begin(write=True) as txn:
                for number, sample in chunk:
                    key = sample.get("__key__") if isinstance(sample, dict) else None
                    txn.put((key or str(number)).encode(), self.pickler.dumps(sample))
            yield from (sample for _, sample in chunk)
        with self.db.begin(write=True) as txn:
            txn.put(b"_", b"1")


info, shuffle, select, log_keys = (pipelinefilter(f) for f in (_info, _shuffle, _select, _log_keys))
decode, rename, associate, map_dict = (pipelinefilter(f) for f in (_decode, _rename, _associate, _map_dict))
to_tuple, map_tuple, batched, unlisted = (pipelinefilter(f) for f in (_to_tuple, _map_tuple, _batched, _unlisted))
unbatched, rsample, extract_keys = (pipelinefilter(f) for f in (_unbatched, _rsample, _extract_keys))
rename_keys, xdecode = (pipelinefilter(f) for f in (_rename_keys, _xdecode))
slice = pipelinefilter(itertools.islice)
map = pipelinefilter(_map)
