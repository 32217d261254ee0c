"""From shards to samples: open each shard, walk over its members, and group them by key.

Penstock's walker reads the members, in place where the shard is a local file. The three steps are functions over
iterators, as in WebDataset, and are looked up here when they are used, so that a program may replace any of them.
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
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from penstock.compat.webdataset import filters, gopen
from penstock.compat.webdataset.handlers import Handler, reraise_exception
from penstock.errors import DataError
from penstock.formats.tar.archive import BLOCK, compression_of
from penstock.formats.tar.grouper import Grouper, SampleEntry
from penstock.formats.tar.walker import ArchiveBuffer, ArchiveWalker, MemberSpan, archive_chunks
from penstock.storage import expand_braces

trace = False
meta_prefix = meta_suffix = "__"

Sample = dict[str, Any]
Chosen = Callable[[str], bool] | None
Renamed = Callable[[str], str] | None

_NAME = re.compile(r"((?:.*/|)[^.]+)\.([^/]*)\Z")
_META = r"__[^/]*__($|/)"


class ShardError(DataError, tarfile.ReadError):
    """A shard is damaged or truncated; what was lost is in the message."""

    def __init__(self, problem: str, shard: str | None = None, key: str | None = None, *more: Any) -> None:
        super().__init__(problem, shard, key)


def base_plus_ext(path: str) -> tuple[str, str] | tuple[None, None]:
    """Split a path at the first dot of its last part; (None, None) if there is none.

    >>> base_plus_ext("a.d/b.seg.jpg")
    ('a.d/b', 'seg.jpg')
    """
    slash = path.rfind("/") + 1
    dot = path.find(".", slash)
    if dot > slash:  # nearly always
        return path[:dot], path[dot + 1 :]
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
    fetching: list[Sample] = []  # at most one: a remote shard, which is yielded when the next one has been opened
    for item in data:
        sample = item if isinstance(item, dict) else {"url": item}
        try:
            stream, path = open_url(sample["url"])
        except Exception as exn:
            yield from fetching
            fetching = []
            exn.args = (*exn.args, sample.get("url"))
            if handler(exn):
                continue
            return
        sample.update({"stream": stream} if path is None else {"stream": stream, "local_path": path})
        yield from fetching
        fetching = [sample]
        if not isinstance(stream, gopen.RemoteStream):
            fetching = []
            yield sample
    yield from fetching


class _Ungrouped(Grouper[Any]):
    """Passes every member on as it is: WebDataset's rules for keys are not ours."""

    def push(self, name: bytes, value: Any, problem: str | None = None) -> list[SampleEntry[Any]]:
        return [(name, (), [value], problem, False)] if name or problem else []

    def push_run(self, names: list[bytes], values: Any, at: int) -> Any:
        return names[at:], (), values[at:]

    def finish(self) -> list[SampleEntry[Any]]:
        return []


def _open_buffer(stream: Any) -> tuple[ArchiveBuffer, bool]:
    """Return the archive in a stream, and whether it is mapped whole, so that members can be read later."""
    if isinstance(stream, gopen.RemoteStream) and compression_of(stream.head()[:BLOCK]) is None:
        return ArchiveBuffer(b"", stream.chunks()), False
    if isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO):
        status = os.fstat(stream.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_size and not stream.tell():
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            if compression_of(mapped[:BLOCK]) is None:
                return ArchiveBuffer(mapped), True
    return ArchiveBuffer(b"", archive_chunks(stream)), False


def _members(
    source: Sample, handler: Handler, select_files: Chosen, rename_files: Renamed, losses: list[ShardError], meta: bool
) -> Generator[Sample, None, bool]:
    """Yield the members of one opened shard; return whether the handler ends the stage."""
    buffer, mapped = _open_buffer(source["stream"])
    data, url = buffer.data, source["url"]
    extra = {} if url is None else {"__url__": url}
    if source.get("local_path") is not None:
        extra["__local_path__"] = source["local_path"]

    def chosen(name: str) -> str | None:
        """Return the new name of a member, or None if it is left out."""
        try:
            if not meta and name[:2] == "__" and re.match(_META, name):
                return None
            name = name if rename_files is None else rename_files(name)
            return name if select_files is None or select_files(name) else None
        except Exception as exn:
            if handler(exn):
                return None
            raise

    def copied(name: bytes, span: MemberSpan) -> bytes:
        return bytes(buffer.data[span[1] - buffer.base : span[1] - buffer.base + span[2]])

    choosing = select_files is not None or rename_files is not None
    read: Callable[[Any], bytes] = (lambda span: data[span[1] : span[1] + span[2]]) if mapped else bytes
    shard = str(getattr(source["stream"], "name", source["stream"])) if url is None else url
    for run in ArchiveWalker[Any](shard, buffer, None if mapped else copied, grouper=_Ungrouped()).runs():
        if isinstance(run, DataError):
            loss = ShardError(run.problem, shard, run.key)
            loss.args = (*loss.args, source["stream"], shard)
            stopped = not handler(loss)
            losses.append(loss)
            if stopped:
                return True
            continue
        for name, value in zip(run[0], run[2], strict=True):
            fname = chosen(name) if choosing or name[:2] == "__" else name
            if fname is not None:
                yield {"fname": fname, "data": read(value), **extra}
    return False


def _report(losses: list[ShardError]) -> None:
    """Say at the end of an iteration how much damage the handlers let pass."""
    if losses:
        first = f"the first: {losses[0].problem} (shard: {losses[0].shard})"
        warnings.warn(f"{len(losses)} damaged places in shards were skipped; {first}", RuntimeWarning, stacklevel=3)


def tar_file_iterator(
    fileobj: Any,
    skip_meta: str | None = _META,
    handler: Handler = reraise_exception,
    select_files: Chosen = None,
    rename_files: Renamed = None,
) -> Iterator[Sample]:
    """Yield ``dict(fname=..., data=...)`` for each file of an archive; ``ShardError`` where it is damaged."""
    losses: list[ShardError] = []
    source = {"stream": fileobj, "url": None}
    stopped = yield from _members(source, handler, select_files, rename_files, losses, skip_meta is None)
    if stopped:
        raise losses[-1]
    _report(losses)


def tar_file_expander(
    data: Iterable[Sample],
    handler: Handler = reraise_exception,
    select_files: Chosen = None,
    rename_files: Renamed = None,
    eof_value: Any = {},  # noqa: B006  # WebDataset's mark of a shard's end; it is never changed
) -> Iterator[Sample]:
    """Yield the members of each opened shard, and ``eof_value`` after its last: samples end with their shard."""
    losses: list[ShardError] = []
    try:
        for source in data:
            try:
                stopped = yield from _members(source, handler, select_files, rename_files, losses, False)
            except Exception as exn:
                exn.args = (*exn.args, source.get("stream"), source.get("url"))
                stopped = not handler(exn)
            finally:
                with contextlib.suppress(Exception):  # a command may fail when it is closed before its end
                    getattr(source.get("stream"), "close", bool)()
            if stopped:
                return
            if eof_value is not None:
                yield eof_value
    finally:
        _report(losses)


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
            if not member:
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
                if member.get("__local_path__") is not None:
                    sample["__local_path__"] = member["__local_path__"]
            if suffix in sample:
                raise ValueError(f"{fname}: duplicate file name in tar file {suffix} {list(sample)}")
            if suffixes is None or suffix in suffixes:
                sample[suffix] = member["data"]
        except Exception as exn:
            exn.args = (*exn.args, member.get("__url__"))
            if not handler(exn):
                break
    if valid_sample(sample):
        yield sample


def tarfile_samples(
    src: Iterable[Sample],
    handler: Handler = reraise_exception,
    select_files: Chosen = None,
    rename_files: Renamed = None,
) -> Iterator[Sample]:
    """Yield the samples of a stream of ``dict(url=...)``."""
    streams = url_opener(src, handler=handler)
    files = tar_file_expander(streams, handler=handler, select_files=select_files, rename_files=rename_files)
    return group_by_keys(files, handler=handler)


tarfile_to_samples = filters.pipelinefilter(tarfile_samples)
