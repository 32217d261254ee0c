"""From shards to samples: open each shard, walk over its members, and group them by key.

Penstock's walker reads the members, in place where the shard is a local file. The three steps are functions over
iterators, as in WebDataset, and are looked up here when they are used, so that a program may replace any of them. While
the last two are the original ones, they run as one loop.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import random
import re
import stat
import tarfile
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from penstock.compat.webdataset import filters, gopen
from penstock.compat.webdataset.handlers import Handler, reraise_exception
from penstock.errors import DataError
from penstock.formats.tar.archive import BLOCK, compression_of
from penstock.formats.tar.members import Ungrouped, file_members
from penstock.formats.tar.walker import ArchiveBuffer, ArchiveWalker, MemberSpan, archive_chunks
from penstock.storage import expand_braces

trace = False
meta_prefix = meta_suffix = "__"

Sample = dict[str, Any]
Chosen = Callable[[str], bool] | None
Renamed = Callable[[str], str] | None

_NAME = re.compile(r"((?:.*/|)[^.]+)\.([^/]*)\Z")
_META = r"__[^/]*__($|/)"
_SHARDS_AHEAD = 2  # remote shards that are fetched behind the one that is read, as far as memory allows


class ShardError(DataError, tarfile.ReadError):
    """A shard is damaged or truncated; what was lost is in the message."""

    def __init__(self, problem: str, shard: str | None = None, key: str | None = None, *more: Any) -> None:
        super().__init__(problem, shard, key)


def base_plus_ext(path: str) -> tuple[str, str] | tuple[None, None]:
    """Split a path at the first dot of its last part; (None, None) if there is none.

    >>> base_plus_ext("a.d/b.seg.jpg")
    ('a.d/b', 'seg.jpg')
    """
    match = _NAME.match(path)
    return (match[1], match[2]) if match else (None, None)


def valid_sample(sample: Any) -> bool:
    """Return whether a sample is a dict with fields, and not marked as bad."""
    return isinstance(sample, dict) and len(sample) > 0 and not sample.get("__bad__", False)


def shardlist(urls: Any, *, shuffle: bool = False) -> Iterator[Sample]:
    """Yield ``dict(url=...)`` for each shard of a pattern or a list."""
    names = list(expand_braces(urls)) if isinstance(urls, str) else list(urls)
    if shuffle:
        random.shuffle(names)
    yield from ({"url": name} for name in names)


def url_opener(data: Iterable[Sample], handler: Handler = reraise_exception, **options: Any) -> Iterator[Sample]:
    """Open the shard of each ``dict(url=...)`` as ``stream``; a remote one is fetched while the one before is read."""
    return open_each(data, lambda url: (gopen.gopen(url, **options), None), handler)


def open_each(data: Iterable[Any], open_url: Callable[[str], tuple[Any, Any]], handler: Handler) -> Iterator[Sample]:
    """Yield each shard with its stream; ``open_url`` returns the stream and the local path, if there is one."""
    fetching: deque[Sample] = deque()  # remote shards, which are yielded when enough others are being fetched
    for item in data:
        sample = item if isinstance(item, dict) else {"url": item}
        try:
            stream, path = open_url(sample["url"])
        except Exception as exn:
            while fetching:
                yield fetching.popleft()
            exn.args = (*exn.args, sample.get("url"))
            if handler(exn):
                continue
            return
        sample.update({"stream": stream} if path is None else {"stream": stream, "local_path": path})
        fetching.append(sample)
        while len(fetching) > (_SHARDS_AHEAD if isinstance(stream, gopen.RemoteStream) else 0):
            yield fetching.popleft()
    while fetching:
        yield fetching.popleft()


def _mapped_file(stream: Any) -> mmap.mmap | None:
    """Map a local file that is read from its beginning and is not compressed; None for any other stream."""
    if not (isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO)) or stream.tell():
        return None
    status = os.fstat(stream.fileno())
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return None
    mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    return mapped if compression_of(mapped[:BLOCK]) is None else None


def _member_runs(stream: Any, url: str) -> Iterator[tuple[list[str], list[Any], Callable[[Any], bytes]] | ShardError]:
    """Yield names of members, what stands for their data, and the function that reads it; or what is damaged."""
    mapped = _mapped_file(stream)
    if mapped is not None:
        for run in file_members(mapped, stream):
            yield ShardError(run.problem, url, run.key) if isinstance(run, DataError) else (*run, mapped.__getitem__)
        return
    remote = isinstance(stream, gopen.RemoteStream) and compression_of(stream.head()[:BLOCK]) is None
    buffer = ArchiveBuffer(b"", stream.chunks() if remote else archive_chunks(stream))

    def copied(name: bytes, span: MemberSpan) -> bytes:
        return bytes(buffer.data[span[1] - buffer.base : span[1] - buffer.base + span[2]])

    for found in ArchiveWalker[Any](url, buffer, copied, grouper=Ungrouped()).runs():
        yield ShardError(found.problem, url, found.key) if isinstance(found, DataError) else (found[0], found[2], bytes)


def tar_file_iterator(
    fileobj: Any,
    skip_meta: str | None = _META,
    handler: Handler = reraise_exception,
    select_files: Chosen = None,
    rename_files: Renamed = None,
) -> Iterator[Sample]:
    """Yield ``dict(fname=..., data=...)`` for each file of an archive; ``ShardError`` where it is damaged."""
    losses: list[ShardError] = []
    choose = _name_filter(handler, select_files, rename_files)
    for run in _member_runs(fileobj, str(getattr(fileobj, "name", fileobj))):
        if isinstance(run, ShardError):
            losses.append(run)
            if not handler(run):
                raise run
            continue
        for name, value in zip(run[0], run[1], strict=True):
            fname = name if skip_meta is None and not choose.always else choose(name)
            if fname is not None:
                yield {"fname": fname, "data": run[2](value)}
    _report(losses)


def tar_file_expander(
    data: Iterable[Sample],
    handler: Handler = reraise_exception,
    select_files: Chosen = None,
    rename_files: Renamed = None,
    eof_value: Any = {},  # noqa: B006  # WebDataset's mark of a shard's end; it is never changed
) -> Iterator[Sample]:
    """Yield the members of each opened shard, and ``eof_value`` after its last: samples end with their shard."""
    for source in data:
        try:
            extra = {"__url__": source["url"]}
            if source.get("local_path") is not None:
                extra["__local_path__"] = source["local_path"]
            chosen = {"select_files": select_files, "rename_files": rename_files}
            for member in tar_file_iterator(source["stream"], handler=handler, **chosen):  # type: ignore[arg-type]
                member.update(extra)
                yield member
            if eof_value is not None:
                yield eof_value
        except Exception as exn:
            exn.args = (*exn.args, source.get("stream"), source.get("url"))
            if not handler(exn):
                return
        finally:
            _close(source)


def _close(source: Sample) -> None:
    with contextlib.suppress(Exception):  # a command may fail when it is closed early; what it wrote was read
        getattr(source.get("stream"), "close", bool)()


def group_by_keys(
    data: Iterable[Sample],
    keys: Callable[[str], tuple[Any, Any]] = base_plus_ext,
    lcase: bool = True,
    suffixes: Any = None,
    handler: Handler = reraise_exception,
) -> Iterator[Sample]:
    """Join consecutive members with one key to a sample; a field that appears twice in it is a ``ValueError``."""
    sample: Sample = {}
    for member in data:
        try:
            if member == {}:
                if valid_sample(sample):
                    yield sample
                sample = {}
                continue
            fname = member["fname"]
            key, suffix = keys(fname)
            if key is None:
                continue
            suffix = suffix.lower() if lcase else suffix
            if not sample or key != sample["__key__"]:
                if valid_sample(sample):
                    yield sample
                sample = {"__key__": key, "__url__": member["__url__"]}
            if suffix in sample:
                raise _duplicate(fname, suffix, sample)
            if suffixes is None or suffix in suffixes:
                sample[suffix] = member["data"]
            if member.get("__local_path__") is not None:
                sample["__local_path__"] = member["__local_path__"]
        except Exception as exn:
            if not _handled(exn, handler, member.get("__url__")):
                break
    if valid_sample(sample):
        yield sample


def _duplicate(fname: str, suffix: str, sample: Sample) -> ValueError:
    return ValueError(f"{fname}: duplicate file name in tar file {suffix} {list(sample)}")


def _handled(error: Exception, handler: Handler, url: Any) -> bool:
    error.args = (*error.args, url)
    return handler(error)


def grouped_samples(
    data: Iterable[Sample],
    handler: Handler = reraise_exception,
    select_files: Chosen = None,
    rename_files: Renamed = None,
    group_handler: Handler = reraise_exception,
) -> Iterator[Sample]:
    """Do what ``tar_file_expander`` and ``group_by_keys`` do, in one loop."""
    losses: list[ShardError] = []
    choose = _name_filter(handler, select_files, rename_files)
    try:
        for source in data:
            try:
                stopped = yield from _shard_samples(source, handler, group_handler, choose, losses)
            except Exception as exn:
                exn.args = (*exn.args, source.get("stream"), source.get("url"))
                stopped = not handler(exn)
            finally:
                _close(source)
            if stopped:
                return
    finally:
        _report(losses)


def _report(losses: list[ShardError]) -> None:
    """Say at the end of an iteration how much damage the handlers let pass."""
    if losses:
        first = f"the first: {losses[0].problem} (shard: {losses[0].shard})"
        warnings.warn(f"{len(losses)} damaged places in shards were skipped; {first}", RuntimeWarning, stacklevel=3)


def _name_filter(handler: Handler, select_files: Chosen, rename_files: Renamed) -> Any:
    """Return a function from the name of a member to its new name, or to None if it is left out."""

    def choose(name: str) -> str | None:
        try:
            if name[:2] == "__" and re.match(_META, name):
                return None
            name = name if rename_files is None else rename_files(name)
            return name if select_files is None or select_files(name) else None
        except Exception as exn:
            if handler(exn):
                return None
            raise

    choose.always = select_files is not None or rename_files is not None  # type: ignore[attr-defined]
    return choose


def _shard_samples(
    source: Sample, handler: Handler, group_handler: Handler, choose: Any, losses: list[ShardError]
) -> Generator[Sample, None, bool]:
    """Yield the samples of one opened shard; return whether a handler ends the stage."""
    url, always = source["url"], choose.always
    empty: Sample = {"__key__": None, "__url__": url}
    if source.get("local_path") is not None:
        empty["__local_path__"] = source["local_path"]
    sample: Sample = {}
    key, stopped = None, False
    for run in _member_runs(source["stream"], url):
        if isinstance(run, ShardError):
            run.args = (*run.args, source["stream"])
            stopped = not _handled(run, handler, url)
            losses.append(run)
            if stopped:
                break
            continue
        names, values, read = run
        for name, value in zip(names, values, strict=True):
            if always or name[:2] == "__":
                name = choose(name)
                if name is None:
                    continue
            slash = name.rfind("/") + 1
            dot = name.find(".", slash)
            if dot > slash:  # nearly always
                found, suffix = name[:dot], name[dot + 1 :].lower()
            elif (match := _NAME.match(name)) is not None:
                found, suffix = match[1], match[2].lower()
            else:
                continue
            if found != key:
                if sample and not sample.get("__bad__"):
                    yield sample
                sample, key = empty.copy(), found
                sample["__key__"] = found
            if suffix not in sample:
                sample[suffix] = read(value)
            elif not _handled(_duplicate(name, suffix, sample), group_handler, url):
                stopped = True
                break
        if stopped:
            break
    if sample and not sample.get("__bad__"):
        yield sample
    return stopped


_EXPANDER, _GROUPER = tar_file_expander, group_by_keys


def fused(expander: Any, grouper: Any) -> Any:
    """Return one stage for two neighbouring ones, if they are the original expander and grouper; else None."""
    if getattr(expander, "f", None) is not _EXPANDER or getattr(grouper, "f", None) is not _GROUPER:
        return None
    names = {"handler", "select_files", "rename_files"}
    if expander.args or grouper.args or not set(expander.kw) <= names or not set(grouper.kw) <= {"handler"}:
        return None
    group_handler = grouper.kw.get("handler", reraise_exception)
    return filters.FilterFunction(grouped_samples, group_handler=group_handler, **expander.kw)


def tarfile_samples(
    src: Iterable[Sample],
    handler: Handler = reraise_exception,
    select_files: Chosen = None,
    rename_files: Renamed = None,
) -> Iterator[Sample]:
    """Yield the samples of a stream of ``dict(url=...)``."""
    streams = url_opener(src, handler=handler)
    if tar_file_expander is _EXPANDER and group_by_keys is _GROUPER:
        return grouped_samples(streams, handler, select_files, rename_files, handler)
    files = tar_file_expander(streams, handler=handler, select_files=select_files, rename_files=rename_files)
    return group_by_keys(files, handler=handler)


tarfile_to_samples = filters.pipelinefilter(tarfile_samples)
