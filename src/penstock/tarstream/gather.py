"""Read many archives as one stream of samples: one after the other, several at a time, or mixed at random."""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from random import Random
from typing import Any

from penstock.blobs.background import BoundedQueue
from penstock.errors import DataError
from penstock.formats.tar.shard_names import expand_shards, on_disk
from penstock.storage import STDIN, local_path, url_patterns
from penstock.tarstream.raw import RawReader, RawRun, RawSample, open_raw

ErrorHandler = Callable[[DataError], object]

_BATCH_BYTES = 1 << 20  # passed from a reader thread to the consumer at once
_QUEUED_BATCHES = 2  # per thread
_FINISHED = object()


def find_shards(patterns: Iterable[str]) -> list[str]:
    """Return the archives that patterns (braces, globs, folders, URLs) stand for, in order; ``-`` is standard input.

    Raises:
        StorageError: A folder or glob has no archives.
        PlanError: A pattern is empty, or stands for more than a million names.
    """
    urls: list[str] = []
    for pattern in patterns:
        urls += [STDIN] if pattern == STDIN else expand_shards(url_patterns(pattern))
    return urls


def file_identity(url: str, fd: int) -> object:
    """Return what is the same for all names of a file, as links have several; ``-`` is the file open as ``fd``."""
    if url != STDIN and not on_disk(url):
        return url
    try:
        status = os.fstat(fd) if url == STDIN else os.stat(local_path(url))
    except OSError:  # it does not exist
        return url, fd
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else (url, fd)


def raise_error(error: DataError) -> None:
    """Raise ``error``: the default for samples that cannot be read."""
    raise error


def gather_samples(
    urls: Iterable[str], *, on_error: ErrorHandler = raise_error, workers: int = 1, mapped: bool = False
) -> Iterator[RawSample]:
    """Yield the samples of archives; with several workers, samples of different archives are interleaved.

    Args:
        urls: The archives, as :func:`find_shards` returns them.
        on_error: Called for each sample that cannot be read; raises by default.
        workers: The number of archives read at a time.
        mapped: Map files instead of reading them, as :func:`open_raw` does; ignored with several workers.

    Raises:
        StorageError: An archive cannot be read.
        DataError: An archive is damaged, unless ``on_error`` accepts that.
    """
    for run in gather_runs(urls, on_error=on_error, workers=workers, mapped=mapped):
        yield from run


def gather_runs(
    urls: Iterable[str],
    *,
    on_error: ErrorHandler = raise_error,
    workers: int = 1,
    mapped: bool = False,
    skipped: Counter[str] | None = None,
) -> Iterator[RawRun]:
    """Yield the samples of archives as :func:`gather_samples` does, in runs with the same fields.

    With one worker, ``skipped`` counts the members that belong to no sample, by kind.

    Raises:
        StorageError: An archive cannot be read.
        DataError: An archive is damaged, unless ``on_error`` accepts that.
    """
    if workers > 1:
        yield from _read_in_threads(urls, on_error, workers)
        return
    for url in urls:
        with closing(open_raw(url, mapped=mapped)) as reader:
            yield from _good_runs(reader.runs(skipped=skipped), on_error)


def gather_parts(urls: Iterable[str], *, on_error: ErrorHandler = raise_error) -> Iterator[RawSample]:
    """Yield the samples of archives one after the other; one whose members lie apart is yielded in several parts.

    Raises:
        StorageError: An archive cannot be read.
        DataError: An archive is damaged, unless ``on_error`` accepts that.
    """
    for url in urls:
        with closing(open_raw(url, mapped=True)) as reader:
            for run in _good_runs(reader.runs(apart=True), on_error):
                yield from run


def _good_runs(items: Iterable[RawRun | DataError], on_error: ErrorHandler) -> Iterator[RawRun]:
    for item in items:
        if isinstance(item, RawRun):
            yield item
        else:
            on_error(item)


def _read_in_threads(urls: Iterable[str], on_error: ErrorHandler, workers: int) -> Iterator[RawRun]:
    waiting = list(urls)[::-1]
    batches: BoundedQueue[Any] = BoundedQueue(workers * _QUEUED_BATCHES)
    stopped = threading.Event()
    args = (waiting, batches, stopped)
    threads = [
        threading.Thread(target=_read_archives, args=args, daemon=True) for _ in range(min(workers, len(waiting)))
    ]
    for thread in threads:
        thread.start()
    try:
        finished = 0
        while finished < len(threads):
            batch = batches.get()
            if batch is _FINISHED:
                finished += 1
            elif isinstance(batch, BaseException):
                raise batch
            else:
                yield from _good_runs(batch, on_error)
    finally:
        stopped.set()
        batches.make_room(len(threads))  # for the batch that a thread is about to put
        for thread in threads:
            thread.join()


def _read_archives(waiting: list[str], batches: BoundedQueue[Any], stopped: threading.Event) -> None:
    """Read archives until none is waiting; an error ends this thread and is passed to the consumer."""
    try:
        while not stopped.is_set():
            try:
                url = waiting.pop()
            except IndexError:
                break
            for batch in _batched(open_raw(url)):
                if stopped.is_set():
                    break
                batches.put(batch)
    except BaseException as exc:  # raised again in the consumer's thread
        batches.put_last(exc)
    batches.put_last(_FINISHED)


def _batched(reader: RawReader) -> Iterator[list[RawRun | DataError]]:
    batch: list[RawRun | DataError] = []
    size = 0
    with closing(reader):
        for item in reader.runs():
            batch.append(item)
            size += item.nbytes(len(item)) if isinstance(item, RawRun) else 0
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def mix_streams(
    streams: list[Iterator[RawSample]], weights: list[float], random: Random, *, all: bool = False
) -> Iterator[RawSample]:
    """Yield samples of several streams, choosing a stream at random by weight for each sample.

    Args:
        streams: The samples of each source.
        weights: The weight of each source.
        random: The generator that chooses the stream.
        all: Continue with the other streams when one is exhausted; by default the mixture ends.
    """
    remaining = list(zip(streams, weights, strict=True))
    while remaining:
        chosen = random.choices(range(len(remaining)), [weight for _, weight in remaining])[0]
        raw = next(remaining[chosen][0], None)
        if raw is not None:
            yield raw
        elif all:
            del remaining[chosen]
        else:
            return
