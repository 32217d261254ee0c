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

    def __call__(self, *args: Any, **kw: Any) -> FilterFunction:
        return FilterFunction(self.f, *args, **kw)


def pipelinefilter(f: Callable[..., Any]) -> RestCurried:
    """Turn ``f(data, *args)`` into ``g(*args)``, which returns a stage."""
    curried = RestCurried(f)
    functools.update_wrapper(curried, f)
    return curried


def compose2(f: Callable[[Any], Any], g: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``g(f(x))`` as a function of x."""
    return lambda x: g(f(x))


def compose(*args: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the functions, applied from left to right, as one."""
    return functools.reduce(compose2, args)


def pipeline(source: Any, *args: Callable[[Any], Any]) -> Any:
    """Apply filters to a source, from left to right."""
    return compose(*args)(source) if args else source


def getfirst(a: Sample, keys: Any, default: Any = None, missing_is_error: bool = True) -> Any:
    """Return the value of the first key that a sample has; keys are a list, or text separated by ``;``.

    Raises:
        ValueError: The sample has none of them.
    """
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


def _each(data: Iterable[Any], f: Callable[[Any], Any], handler: Handler) -> Iterator[tuple[Any, Any]]:
    """Yield each sample with what ``f`` makes of it; the handler decides about errors."""
    for sample in data:
        try:
            result = f(sample)
        except Exception as exn:
            if handler(exn):
                continue
            return
        yield sample, result


def _info(
    data: Iterable[Any],
    fmt: str | None = None,
    n: int = 3,
    every: int = -1,
    width: int = 50,
    stream: Any = None,
    name: str = "",
) -> Iterator[Any]:
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
    data: Iterable[Any],
    bufsize: int = 1000,
    initial: int = 100,
    rng: random.Random | None = None,
    seed: Any = None,
    handler: Any = None,
) -> Iterator[Any]:
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

    def run(self, src: Iterable[Any]) -> Iterator[Any]:
        """Shuffle the next epoch."""
        self.epoch += 1
        return _shuffle(src, self.bufsize, self.initial, random.Random(int(self.seed) + self.epoch))


def _select(data: Iterable[Any], predicate: Callable[[Any], bool]) -> Iterator[Any]:
    """Keep the samples for which the predicate holds."""
    return filter(predicate, data)


def _log_keys(data: Iterable[Sample], logfile: str | None = None) -> Iterator[Sample]:
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


def _decode(data: Iterable[Sample], *args: Any, handler: Handler = reraise_exception, **kw: Any) -> Iterator[Sample]:
    """Decode the fields of samples, see ``autodecode.Decoder``."""
    handlers = [autodecode.ImageHandler(arg) if isinstance(arg, str) else arg for arg in args]
    return (result for _, result in _each(data, autodecode.Decoder(handlers, **kw), handler))


def _map(data: Iterable[Any], f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Iterator[Any]:
    """Apply ``f``; None drops the sample, and a dict keeps its key."""
    for sample, result in _each(data, f, handler):
        if result is None:
            continue
        if isinstance(sample, dict) and isinstance(result, dict):
            result["__key__"] = sample.get("__key__")
        yield result


def _rename(
    data: Iterable[Sample], handler: Handler = reraise_exception, keep: bool = True, **kw: Any
) -> Iterator[Sample]:
    """Rename fields, ``new="old;other"``; ``keep=False`` drops all others."""
    old = {name for names in kw.values() for name in (names.split(";") if isinstance(names, str) else names)}

    def renamed(sample: Sample) -> Sample:
        kept = {name: value for name, value in sample.items() if name not in old} if keep else {}
        return kept | {new: getfirst(sample, names) for new, names in kw.items()}

    return (result for _, result in _each(data, renamed, handler))


def _associate(data: Iterable[Sample], associator: Any, **kw: Any) -> Iterator[Sample]:
    """Add the fields that a dict or a function has for the sample's key."""
    for sample in data:
        key = sample["__key__"]
        sample.update(associator(key) if callable(associator) else associator.get(key, {}))
        yield sample


def _map_dict(data: Iterable[Sample], handler: Handler = reraise_exception, **kw: Any) -> Iterator[Sample]:
    """Apply a function to each named field, in place."""
    assert kw, "map_dict needs a function for at least one field"
    assert all(callable(f) for f in kw.values()), kw

    def mapped(sample: Sample) -> Sample:
        for name, f in kw.items():
            sample[name] = f(sample[name])
        return sample

    return (result for _, result in _each(data, mapped, handler))


def _to_tuple(
    data: Iterable[Sample],
    *args: Any,
    handler: Handler = reraise_exception,
    missing_is_error: bool = True,
    none_is_error: bool | None = None,
) -> Iterator[tuple[Any, ...]]:
    """Take fields out of samples: one per argument, or per word of a single argument."""
    none_is_error = missing_is_error if none_is_error is None else none_is_error
    if len(args) == 1 and isinstance(args[0], str) and " " in args[0]:
        args = tuple(args[0].split())
    alternatives = [arg.split(";") if isinstance(arg, str) else arg for arg in args]

    def chosen(sample: Sample) -> tuple[Any, ...]:
        result = tuple([getfirst(sample, names, missing_is_error=missing_is_error) for names in alternatives])
        if none_is_error and any(value is None for value in result):
            raise ValueError(f"to_tuple {args} got {list(sample)}")
        return result

    return (result for _, result in _each(data, chosen, handler))


def _map_tuple(data: Iterable[Any], *args: Any, handler: Handler = reraise_exception) -> Iterator[tuple[Any, ...]]:
    """Apply a function to each leading value of a tuple; None leaves a value as it is."""
    fs = [identity if f is None else f for f in args]
    assert all(callable(f) for f in fs), args

    def mapped(sample: Any) -> tuple[Any, ...]:
        assert isinstance(sample, list | tuple), type(sample)
        return (*[f(value) for f, value in zip(fs, sample, strict=False)], *sample[len(fs) :])

    return (result for _, result in _each(data, mapped, handler))


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
        keys = samples[0].keys()
        assert all(sample.keys() == keys for sample in samples), "keys don't match in different samples"
        return {
            key: combine_values([sample[key] for sample in samples], combine_tensors, combine_scalars) for key in keys
        }
    assert len({len(sample) for sample in samples}) == 1, "keys don't match in different samples"
    columns = zip(*samples, strict=True)
    return tuple([combine_values(list(column), combine_tensors, combine_scalars) for column in columns])


def _batched(
    data: Iterable[Any], batchsize: int = 20, collation_fn: Any = default_collation_fn, partial: bool = True
) -> Iterator[Any]:
    """Join ``batchsize`` neighbours to a batch; ``partial`` keeps a smaller last one."""
    items = iter(data)
    while batch := list(itertools.islice(items, batchsize)):
        if len(batch) == batchsize or partial:
            yield batch if collation_fn is None else collation_fn(batch)


def _unlisted(data: Iterable[list[Any]]) -> Iterator[Any]:
    """Yield the items of lists."""
    for batch in data:
        assert isinstance(batch, list), batch
        yield from batch


def _unbatched(data: Iterable[Any]) -> Iterator[Any]:
    """Take batches of columns apart.

    Raises:
        ValueError: A batch is neither a dict nor a tuple.
    """
    for batch in data:
        if isinstance(batch, list | tuple):
            yield from (tuple([column[i] for column in batch]) for i in range(len(batch[0])))
        elif isinstance(batch, dict):
            lengths = {len(column) for column in batch.values()}
            assert len(lengths) == 1, lengths
            yield from ({name: column[i] for name, column in batch.items()} for i in range(lengths.pop()))
        else:
            raise ValueError(f"unknown sample type: {type(batch)}")


def _rsample(data: Iterable[Any], p: float = 0.5) -> Iterator[Any]:
    """Keep each sample with a probability."""
    assert 0.0 <= p <= 1.0, p
    return (sample for sample in data if random.random() < p)


def _extract_keys(
    source: Iterable[Sample], *patterns: Any, duplicate_is_error: bool = True, ignore_missing: bool = False
) -> Iterator[tuple[Any, ...]]:
    """Take the fields that match patterns out of samples.

    Raises:
        ValueError: No field matches a pattern, or several do.
    """
    for sample in source:
        result = []
        for pattern in patterns:
            globs = pattern.split(";") if isinstance(pattern, str) else pattern
            matches = [name for name in sample if any(fnmatch("." + name, g) or fnmatch(name, g) for g in globs)]
            if len(matches) > 1 and duplicate_is_error:
                raise ValueError(f"Multiple sample keys {list(sample)} match {globs}.")
            if not matches and not ignore_missing:
                raise ValueError(f"Cannot find {globs} in sample keys {list(sample)}.")
            result += [sample[name] for name in matches[:1]]
        yield tuple(result)


def _rename_keys(
    source: Iterable[Sample],
    *args: tuple[str, str],
    keep_unselected: bool = False,
    must_match: bool = True,
    duplicate_is_error: bool = True,
    **kw: str,
) -> Iterator[Sample]:
    """Rename the fields whose last part matches a pattern, ``(new, pattern)`` or ``new=pattern``; later rules win.

    Raises:
        ValueError: A pattern matches no field, or two fields get one name.
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
    """Return the bytes of a stream."""
    return stream.read()


def decode_text(stream: Any) -> str:
    """Return the text of a stream."""
    return str(stream.read(), "utf-8")


def decode_pickle(stream: Any) -> Any:
    """Return the object that is pickled in a stream, if pickle is trusted."""
    return autodecode.unpickle_loads(stream.read())


default_decoders = [("*.bin", decode_bin), ("*.txt", decode_text), ("*.pyd", decode_pickle)]


def find_decoder(decoders: Any, path: str) -> Any:
    """Return the function of the last pattern that matches a field; None if none does."""
    name = path.rpartition("/")[2].lower()
    matches = (f for pattern, f in reversed(decoders) if fnmatch(name, pattern) or fnmatch("." + name, pattern))
    return identity if name.startswith("__") else next(matches, None)


def _xdecode(
    source: Iterable[Sample], *args: Any, must_decode: bool = True, defaults: Any = default_decoders, **kw: Any
) -> Iterator[Sample]:
    """Decode fields by functions of a stream, ``(pattern, f)`` or ``extension=f``; False leaves a field as it is.

    Raises:
        ValueError: A field has no decoder.
    """
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

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the samples of the source, or those that were kept."""
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
        lmdb = import_module("lmdb")
        self.db: Any = lmdb.open(fname, readonly=False, map_size=int(map_size))
        self.pickler, self.chunksize = pickler, chunksize

    def is_complete(self) -> bool:
        """Return whether a whole pass has been stored."""
        with self.db.begin() as txn:
            return txn.get(b"_") is not None

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the samples of the database if it is complete, else those of the source, which are stored."""
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
