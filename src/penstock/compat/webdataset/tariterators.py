"""From shards to samples by three iterators, which programs may replace; the last two, if original, are one loop."""

from __future__ import annotations

import contextlib
import inspect
import re
import tarfile
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.blobs.object_file import ObjectReader
from penstock.compat.webdataset import gopen
from penstock.compat.webdataset.filters import Sample, pipelinefilter
from penstock.compat.webdataset.handlers import Handler, reraise_exception
from penstock.errors import DataError
from penstock.formats.tar.members import archive_members

_NAME = re.compile(r"((?:.*/|)[^.]+)\.([^/]*)\Z")
_SKIPPED = r"__[^/]*__($|/)"
meta_prefix = meta_suffix = "__"  # of members about the shard
_reported: set[str] = set()  # damage that this process has warned of
_SHARDS_AHEAD = 2  # remote shards that are fetched behind the one that is read, as far as memory allows

Run = tuple[Sample, list[str], list[Any]]  # fields about a shard, names and data of some members; none: it has ended


class ShardError(DataError, tarfile.ReadError): ...  # a shard is damaged or truncated


def base_plus_ext(path: str) -> tuple[str, str] | tuple[None, None]:
    """Split a path at the first dot of its last part: ``("a.d/b", "seg.jpg")``; (None, None) if there is none."""
    match = _NAME.match(path)
    return (match[1], match[2]) if match else (None, None)


def valid_sample(sample: Any) -> bool:
    return isinstance(sample, dict) and len(sample) > 0 and not sample.get("__bad__", False)


def _handled(error: Exception, handler: Handler, *where: Any) -> bool:
    """Return whether the handler continues after an error, which says where it happened."""
    error.args = (*error.args, *where)
    return handler(error)


def url_opener(data: Iterable[Sample], handler: Handler = reraise_exception, **options: Any) -> Iterator[Sample]:
    return open_each(data, lambda url: (gopen.gopen(url, **options), None), handler)


def open_each(data: Iterable[Any], open_url: Callable[[str], tuple[Any, Any]], handler: Handler) -> Iterator[Sample]:
    """Yield each shard with its stream, opened by ``open_url``, which also returns the local path, if there is one."""
    opened: deque[Sample] = deque()  # remote shards, which are yielded when enough others are being fetched
    for item in data:
        sample = item if isinstance(item, dict) else {"url": item}
        try:
            stream, path = open_url(sample["url"])
        except Exception as exn:
            yield from opened
            opened.clear()
            if _handled(exn, handler, sample.get("url")):
                continue
            return
        sample.update({"stream": stream} if path is None else {"stream": stream, "local_path": path})
        if isinstance(stream, ObjectReader):
            stream.fetch(after=opened[-1]["stream"] if opened else None)
        opened.append(sample)
        while len(opened) > (_SHARDS_AHEAD if isinstance(stream, ObjectReader) else 0):
            yield opened.popleft()
    yield from opened


class ShardEnd(dict[str, Any]):  # empty; for programs that do not know such marks, a member without a name
    def __missing__(self, name: str) -> str:
        return ""


@dataclass(eq=False, repr=False)
class tar_file_expander(Iterator[Sample]):  # WebDataset's name
    """The members of opened shards, with ``eof_value`` after the last of each: a sample ends with its shard."""

    data: Iterable[Sample]
    handler: Handler = reraise_exception
    select_files: Any = None
    rename_files: Any = None
    eof_value: Any = field(default_factory=ShardEnd)
    skip_meta: str | None = _SKIPPED

    def __post_init__(self) -> None:
        self.members = self._members()

    def __iter__(self) -> Iterator[Sample]:
        return self.members

    def __next__(self) -> Sample:
        return next(self.members)

    def _members(self) -> Generator[Sample]:
        for marks, names, values in self.runs():
            for name, value in zip(names, values, strict=True):
                yield {"fname": name, "data": value, **marks}
            if not names:
                yield self.eof_value

    def runs(self) -> Iterator[Run]:
        losses: list[ShardError] = []
        try:
            for source in self.data:
                try:
                    stopped = yield from self._shard_runs(source, losses)
                except Exception as exn:
                    stopped = not _handled(exn, self.handler, source.get("stream"), source.get("url"))
                finally:
                    with contextlib.suppress(Exception):  # a command may fail if it is closed early
                        getattr(source.get("stream"), "close", bool)()
                if stopped:
                    return
        finally:
            losses = [loss for loss in losses if str(loss) not in _reported]
            if losses:
                _reported.update(map(str, losses))
                problem = f"{len(losses)} damaged places in shards were skipped; the first: {losses[0]}"
                warnings.warn(problem, RuntimeWarning, stacklevel=3)

    def _shard_runs(self, source: Sample, losses: list[ShardError]) -> Generator[Run, None, bool]:
        stream, url, path = source["stream"], source["url"], source.get("local_path")
        marks = {"__url__": url} if path is None else {"__url__": url, "__local_path__": path}
        for run in archive_members(stream, url, self._names):
            if isinstance(run, DataError):
                error = ShardError(run.problem, url, run.key)
                stopped = not _handled(error, self.handler, stream, url)
                losses.append(error)
                if stopped:
                    return True
            else:
                yield marks, *run
        if self.eof_value is not None:
            yield marks, [], []
        return False

    def _names(self, names: list[str]) -> list[str]:
        """Return the names under which members are read, "" for those that are left out."""
        chosen = self.select_files or self.rename_files or self.skip_meta != _SKIPPED
        chosen = chosen or "\0__" in "\0" + "\0".join(names)
        return [self._name(name) for name in names] if chosen else names

    def _name(self, name: str) -> str:
        try:
            if self.skip_meta is not None and re.match(self.skip_meta, name):
                return ""
            name = name if self.rename_files is None else self.rename_files(name)
            return name if self.select_files is None or self.select_files(name) else ""
        except Exception as exn:
            if self.handler(exn):
                return ""
            raise


def tar_file_iterator(
    fileobj: Any, skip_meta: str | None = _SKIPPED, handler: Handler = reraise_exception, **chosen: Any
) -> Iterator[Sample]:
    """Yield the members of an archive, which stays open; ``skip_meta`` is a pattern of names that are left out."""
    expander = tar_file_expander((), handler, eof_value=None, skip_meta=skip_meta, **chosen)
    for _, names, values in expander._shard_runs({"stream": fileobj, "url": str(fileobj)}, []):
        yield from ({"fname": name, "data": data} for name, data in zip(names, values, strict=True))


def _runs_of(members: Iterable[Sample]) -> Iterator[Run]:
    for member in members:
        marks = {name: member[name] for name in ("__url__", "__local_path__") if member.get(name) is not None}
        yield (marks, [member["fname"]], [member["data"]]) if member else (marks, [], [])


def group_by_keys(
    data: Any, keys: Any = base_plus_ext, lcase: bool = True, suffixes: Any = None, handler: Handler = reraise_exception
) -> Iterator[Sample]:
    """Join consecutive members with one key to a sample; a field that appears twice in it is a ``ValueError``."""
    fused = isinstance(data, tar_file_expander) and inspect.getgeneratorstate(data.members) == inspect.GEN_CREATED
    plain = keys is base_plus_ext and lcase
    sample: Sample = {}
    key, prefix = None, "\0"  # no name begins so
    for marks, names, values in data.runs() if fused else _runs_of(data):
        for name, value in zip(names, values, strict=True):
            try:
                if name.startswith(prefix) and "/" not in (suffix := name[len(prefix) :]):  # as a member before
                    found, suffix = prefix[:-1], suffix.lower()
                elif plain and (dot := name.find(".", slash := name.rfind("/") + 1)) > slash:
                    found, suffix, prefix = name[:dot], name[dot + 1 :].lower(), name[: dot + 1]
                else:
                    found, suffix = keys(name)
                    if found is None:
                        continue
                    suffix = suffix.lower() if lcase else suffix
                if found != key:
                    if sample and not sample.get("__bad__"):
                        yield sample
                    sample, key = {"__key__": found, **marks}, found
                if suffix in sample:
                    raise ValueError(f"{name}: duplicate file name in tar file {suffix} {list(sample)}")
                if suffixes is None or suffix in suffixes:
                    sample[suffix] = value
            except Exception as exn:
                if not _handled(exn, handler, marks.get("__url__")):
                    if valid_sample(sample):
                        yield sample
                    return
        if not names:
            if valid_sample(sample):
                yield sample
            sample, key = {}, None
    if valid_sample(sample):
        yield sample


def tarfile_samples(
    src: Iterable[Sample], handler: Handler = reraise_exception, select_files: Any = None, rename_files: Any = None
) -> Iterator[Sample]:
    streams = url_opener(src, handler=handler)
    files = tar_file_expander(streams, handler=handler, select_files=select_files, rename_files=rename_files)
    return group_by_keys(files, handler=handler)


tarfile_to_samples = pipelinefilter(tarfile_samples)
