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
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, BinaryIO, cast

from penstock.compat.webdataset import filters, gopen
from penstock.compat.webdataset.handlers import Handler, reraise_exception
from penstock.errors import DataError
from penstock.formats.tar.archive import (
    BLOCK,
    checksum_holds,
    compression_of,
    has_relevant_records,
    padded,
)
from penstock.formats.tar.grouper import Grouper, SampleEntry
from penstock.formats.tar.walker import ArchiveBuffer, ArchiveWalker, MemberSpan, archive_chunks
from penstock.storage import expand_braces

trace = False
meta_prefix = meta_suffix = "__"

Sample = dict[str, Any]
Chosen = Callable[[str], bool]
Renamed = Callable[[str], str]

_NAME = re.compile(r"((?:.*/|)[^.]+)\.([^/]*)\Z")
_META = r"__[^/]*__($|/)"
_MIN_RUN, _RETRY_AFTER = 4, 64  # samples that are worth a look ahead; members before the next look
_PAX, _PLAIN = ord("x"), (ord("0"), 0)


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
    """Open the shard of each ``dict(url=...)``, as ``stream``; fetches a remote shard while the one before it is read.

    Raises:
        OSError: A shard cannot be opened, and the handler raises.
    """
    return open_each(data, lambda url: (gopen.gopen(url, **options), None), handler)


def open_each(
    data: Iterable[Any], open_url: Callable[[str], tuple[Any, str | None]], handler: Handler
) -> Iterator[Sample]:
    """Yield each shard with its stream; ``open_url`` returns the stream and the local path, if there is one.

    Raises:
        Exception: What ``open_url`` raises, unless the handler continues or stops.
    """
    fetching: Sample | None = None
    for item in data:
        sample = item if isinstance(item, dict) else {"url": item}
        try:
            stream, path = open_url(sample["url"])
        except Exception as exn:
            if fetching is not None:  # it comes first
                yield fetching
                fetching = None
            exn.args = (*exn.args, sample.get("url"))
            if handler(exn):
                continue
            return
        sample.update({"stream": stream} if path is None else {"stream": stream, "local_path": path})
        if fetching is not None:
            yield fetching
        fetching = sample if isinstance(stream, gopen.RemoteStream) else None
        if fetching is None:
            yield sample
    if fetching is not None:
        yield fetching


class _Ungrouped(Grouper[Any]):
    """Passes every member on as it is: WebDataset's rules for keys are not ours."""

    def push(self, name: bytes, value: Any, problem: str | None = None) -> list[SampleEntry[Any]]:
        return [(name, (), [value], problem, False)] if name or problem else []

    def push_run(
        self, names: list[bytes], values: Any, at: int
    ) -> tuple[list[bytes], tuple[str, ...], list[Any]] | None:
        return names[at:], (), values[at:]

    def finish(self) -> list[SampleEntry[Any]]:
        return []


class _MemberWalker(ArchiveWalker[Any]):
    """Walks over members, many headers at a time, also where each has a PAX header for its time, as WebDataset's."""

    def __init__(self, shard: str, buffer: ArchiveBuffer, value: Callable[[bytes, MemberSpan], Any] | None) -> None:
        super().__init__(shard, buffer, value)
        self._grouper = _Ungrouped()

    def _read_headers(self) -> tuple[list[bytes], list[MemberSpan], int | None]:
        found = super()._read_headers()
        return found if found[0] or found[2] is not None else self._read_headers_after_pax()

    def _read_headers_after_pax(self) -> tuple[list[bytes], list[MemberSpan], int | None]:
        buffer = self.buffer
        data, base, stop, most = buffer.data, buffer.base, buffer.size, buffer.max_member
        names: list[bytes] = []
        spans: list[MemberSpan] = []
        begin = offset = buffer.offset  # of the member's first header, and of the header to be read
        needed: int | None = offset + BLOCK - begin
        while (at := offset - base) + BLOCK <= stop and len(names) < self._headers_ahead:
            head, needed = data[at : at + BLOCK], None
            try:
                size = int(head[124:135], 8)
            except ValueError:
                break
            kind = head[156]
            if not 0 <= size <= most or head[345] or not checksum_holds(head):
                break
            end = offset + BLOCK + padded(size)
            if kind == _PAX and size <= BLOCK and end - base <= stop:
                if has_relevant_records(data[at + BLOCK : at + BLOCK + size]):
                    break
                offset, needed = end, end + BLOCK - begin
                continue
            if kind == _PAX and size <= BLOCK:
                needed = end + BLOCK - begin
                break
            if kind not in _PLAIN:
                break
            name = head[:100].partition(b"\0")[0]
            if end - base > stop:
                needed = None if buffer.drops(size, name) else end - begin
                break
            names.append(name)
            spans.append((begin, offset + BLOCK, size, end))
            begin = offset = end
            needed = BLOCK
        buffer.offset = buffer.begin = begin
        return names, spans, needed


def _open_buffer(stream: Any) -> tuple[ArchiveBuffer, bool]:
    """Return the archive in a stream, and whether it is mapped whole, so that members can be read later."""
    if isinstance(stream, gopen.RemoteStream):
        plain = compression_of(stream.head()[:BLOCK]) is None
        return ArchiveBuffer(b"", stream.chunks() if plain else archive_chunks(cast(BinaryIO, stream))), False
    if isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO):
        status = os.fstat(stream.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_size and not stream.tell():
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            if compression_of(mapped[:BLOCK]) is None:
                return ArchiveBuffer(mapped), True
    return ArchiveBuffer(b"", archive_chunks(stream)), False


def _member_runs(stream: Any, url: str) -> Iterator[tuple[list[str], list[Any], Callable[[Any], bytes]] | ShardError]:
    """Yield names of members, what stands for their data, and the function that reads it; or what is damaged.

    Raises:
        OSError: The stream cannot be read.
    """
    buffer, mapped = _open_buffer(stream)

    def copied(name: bytes, span: MemberSpan) -> bytes:
        return bytes(buffer.data[span[1] - buffer.base : span[1] - buffer.base + span[2]])

    data = buffer.data
    read: Callable[[Any], bytes] = (lambda span: data[span[1] : span[1] + span[2]]) if mapped else bytes
    for run in _MemberWalker(url, buffer, None if mapped else copied).runs():
        if isinstance(run, DataError):
            yield ShardError(run.problem, url, run.key)
        else:
            yield run[0], run[2], read


def tar_file_iterator(
    fileobj: Any,
    skip_meta: str | None = _META,
    handler: Handler = reraise_exception,
    select_files: Chosen | None = None,
    rename_files: Renamed | None = None,
) -> Iterator[Sample]:
    """Yield ``dict(fname=..., data=...)`` for each file of an archive.

    Raises:
        ShardError: The archive is damaged, and the handler raises.
        OSError: The stream cannot be read.
    """
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
    select_files: Chosen | None = None,
    rename_files: Renamed | None = None,
    eof_value: Any = {},  # noqa: B006  # WebDataset's mark of a shard's end; it is never changed
) -> Iterator[Sample]:
    """Yield the members of each opened shard, and ``eof_value`` after its last, so that samples end with their shard.

    Raises:
        ShardError: A shard is damaged, and the handler raises.
        OSError: A shard cannot be read, and the handler raises.
    """
    for source in data:
        try:
            extra = {"__url__": source["url"]}
            if source.get("local_path") is not None:
                extra["__local_path__"] = source["local_path"]
            for member in tar_file_iterator(
                source["stream"], handler=handler, select_files=select_files, rename_files=rename_files
            ):
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
    """Join consecutive members with one key to a sample.

    Raises:
        ValueError: A field appears twice in a sample, and the handler raises.
    """
    sample: Sample | None = None
    for member in data:
        try:
            if member == {}:
                if valid_sample(sample):
                    yield sample  # type: ignore[misc]
                sample = None
                continue
            fname = member["fname"]
            key, suffix = keys(fname)
            if key is None:
                continue
            suffix = suffix.lower() if lcase else suffix
            if sample is None or key != sample["__key__"]:
                if valid_sample(sample):
                    yield sample  # type: ignore[misc]
                sample = {"__key__": key, "__url__": member["__url__"]}
            if suffix in sample:
                raise _duplicate(fname, suffix, sample)
            if suffixes is None or suffix in suffixes:
                sample[suffix] = member["data"]
            if member.get("__local_path__") is not None:
                sample["__local_path__"] = member["__local_path__"]
        except Exception as exn:
            exn.args = (*exn.args, member.get("__url__"))
            if not handler(exn):
                break
    if valid_sample(sample):
        yield sample  # type: ignore[misc]


def _duplicate(fname: str, suffix: str, sample: Sample) -> ValueError:
    return ValueError(f"{fname}: duplicate file name in tar file {suffix} {list(sample)}")


def grouped_samples(
    data: Iterable[Sample],
    handler: Handler = reraise_exception,
    select_files: Chosen | None = None,
    rename_files: Renamed | None = None,
    group_handler: Handler = reraise_exception,
) -> Iterator[Sample]:
    """Do what ``tar_file_expander`` and ``group_by_keys`` do, in one loop.

    Raises:
        ShardError: A shard is damaged, and the handler raises.
        OSError: A shard cannot be read, and the handler raises.
        ValueError: A field appears twice in a sample, and ``group_handler`` raises.
    """
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


def _name_filter(handler: Handler, select_files: Chosen | None, rename_files: Renamed | None) -> Any:
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
    url, always, key = source["url"], choose.always, None
    empty: Sample = {"__key__": None, "__url__": url}
    if source.get("local_path") is not None:
        empty["__local_path__"] = source["local_path"]
    sample: Sample = {}
    endings: list[str] = []  # of the members of the open sample, as they are written
    stopped = False
    for run in _member_runs(source["stream"], url):
        if isinstance(run, ShardError):
            run.args = (*run.args, source["stream"], url)
            stopped = not handler(run)
            losses.append(run)
            if stopped:
                break
            continue
        names, values, read = run
        skip_to = tried_at = 0
        for at, name in enumerate(names):
            if at < skip_to:
                continue
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
                if not always and endings and at >= tried_at:
                    keys = _equal_samples(names, at, endings, key)
                    tried_at = at + _RETRY_AFTER
                    if keys:
                        suffixes, place = [ending[1:].lower() for ending in endings], at
                        for found in keys:
                            if place > at:
                                yield sample
                            sample = empty.copy()
                            sample["__key__"] = found
                            for suffix in suffixes:
                                sample[suffix] = read(values[place])
                                place += 1
                        key, skip_to, tried_at = found, place, place
                        continue
                sample, key, endings = empty.copy(), found, []
                sample["__key__"] = found
            if suffix in sample:
                endings = []
                stopped = not _handled(_duplicate(name, suffix, sample), group_handler, url)
                if stopped:
                    break
                continue
            sample[suffix] = read(values[at])
            endings.append(name[dot:])
        if stopped:
            break
    if sample and not sample.get("__bad__"):
        yield sample
    return stopped


def _equal_samples(names: list[str], at: int, endings: list[str], key: str | None) -> list[str]:
    """Return the keys of the next samples if all of them have members with these endings and plain names; else none."""
    step = len(endings)
    count = (len(names) - at) // step
    if count < _MIN_RUN:
        return []
    stop = at + count * step
    keys = [name[: -len(endings[0])] for name in names[at:stop:step]]
    for place, ending in enumerate(endings):
        if [found + ending for found in keys] != names[at + place : stop : step]:
            return []
    lines = "\n{}\n".format("\n".join(keys))
    unusual = any(mark in lines for mark in (".", "__", "/\n", "\n\n")) or lines.count("\n") != count + 1
    unusual = unusual or any("__" in ending for ending in endings)
    return [] if unusual or len({key, *keys}) <= count else keys


def _handled(error: Exception, handler: Handler, url: str) -> bool:
    error.args = (*error.args, url)
    return handler(error)


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
    select_files: Chosen | None = None,
    rename_files: Renamed | None = None,
) -> Iterator[Sample]:
    """Yield the samples of a stream of ``dict(url=...)``.

    Raises:
        ShardError: A shard is damaged, and the handler raises.
        OSError: A shard cannot be read, and the handler raises.
    """
    streams = url_opener(src, handler=handler)
    if tar_file_expander is _EXPANDER and group_by_keys is _GROUPER:
        return grouped_samples(streams, handler, select_files, rename_files, handler)
    files = tar_file_expander(streams, handler=handler, select_files=select_files, rename_files=rename_files)
    return group_by_keys(files, handler=handler)


tarfile_to_samples = filters.pipelinefilter(tarfile_samples)
