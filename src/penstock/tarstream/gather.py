"""Many archives as one stream of samples: one after the other, or several at a time as they come."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from random import Random
from typing import Any

from penstock.errors import DataError
from penstock.storage import STDIN, expand, spell
from penstock.storage.protocol import Storage
from penstock.tarstream.raw import RawReader, RawRun, RawSample, open_raw

SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz")
Bad = Callable[[DataError], object]

_BATCH = 1 << 20  # bytes that cross from a reader's thread at once
_ROOM = 2  # batches that wait, for each reader
_OVER = object()


def find_shards(inputs: Iterable[str], storage: Storage | None = None) -> list[str]:
    """List the archives that patterns mean, in order: braces, globs, folders, URLs; ``-`` is standard input.

    Raises:
        StorageError: A folder or a glob holds nothing.
        PlanError: Nothing is given.
    """
    out: list[str] = []
    for one in inputs:
        out += [STDIN] if one == STDIN else expand(spell(one), SUFFIXES, storage)
    return out


def refuse(error: DataError) -> None:
    """Raise what is wrong with a sample."""
    raise error


def gather(urls: Iterable[str], *, bad: Bad = refuse, workers: int = 1, mapped: bool = False) -> Iterator[RawSample]:
    """Give the samples of archives; with several workers in any order of the archives, each from front to back.

    Args:
        urls: What :func:`find_shards` gave.
        bad: Told of samples that cannot be read; by default they are raised.
        workers: Archives read at a time.
        mapped: Map files instead of reading them, as :func:`open_raw` says.

    Raises:
        StorageError: An archive cannot be read.
        DataError: One is damaged.
    """
    for stretch in stretches(urls, bad=bad, workers=workers, mapped=mapped):
        yield from stretch


def stretches(urls: Iterable[str], *, bad: Bad = refuse, workers: int = 1, mapped: bool = False) -> Iterator[RawRun]:
    """Give the samples as :func:`gather` does, those together that lie together.

    Raises:
        StorageError: An archive cannot be read.
        DataError: One is damaged.
    """
    if workers > 1:
        yield from _side_by_side(urls, bad, workers)
        return
    for url in urls:
        with closing(open_raw(url, mapped=mapped)) as reader:
            yield from _good(reader.stretches(), bad)


def _good(items: Iterable[RawRun | DataError], bad: Bad) -> Iterator[RawRun]:
    for item in items:
        if isinstance(item, RawRun):
            yield item
        else:
            bad(item)


def _side_by_side(urls: Iterable[str], bad: Bad, workers: int) -> Iterator[RawRun]:
    waiting = list(urls)[::-1]
    batches: queue.Queue[Any] = queue.Queue(workers * _ROOM)
    stopped = threading.Event()
    args = (waiting, batches, stopped)
    threads = [threading.Thread(target=_read, args=args, daemon=True) for _ in range(min(workers, len(waiting)))]
    for thread in threads:
        thread.start()
    try:
        over = 0
        while over < len(threads):
            batch = batches.get()
            if batch is _OVER:
                over += 1
            elif isinstance(batch, BaseException):
                raise batch
            else:
                yield from _good(batch, bad)
    finally:
        stopped.set()
        while any(thread.is_alive() for thread in threads):
            _drain(batches)
            for thread in threads:
                thread.join(0.01)


def _drain(batches: queue.Queue[Any]) -> None:
    try:
        while True:
            batches.get_nowait()
    except queue.Empty:
        return


def _read(waiting: list[str], batches: queue.Queue[Any], stopped: threading.Event) -> None:
    """Read archives until none waits; an error ends the reader and is handed over."""
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
    except BaseException as exc:  # raised again by whoever takes the batches
        batches.put(exc)
    batches.put(_OVER)


def _batched(reader: RawReader) -> Iterator[list[RawRun | DataError]]:
    batch: list[RawRun | DataError] = []
    size = 0
    with closing(reader):
        for item in reader.stretches():
            batch.append(item)
            size += item.nbytes(len(item)) if isinstance(item, RawRun) else 0
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def mixed(
    streams: list[Iterator[RawSample]], weights: list[float], random: Random, *, all: bool = False
) -> Iterator[RawSample]:
    """Give samples of several streams at random, each as often as its weight says.

    Args:
        streams: The samples of each source.
        weights: One for each.
        random: Chooses.
        all: Go on with the others when one is at its end; otherwise that ends the mixture.
    """
    left = list(zip(streams, weights, strict=True))
    while left:
        place = random.choices(range(len(left)), [weight for _, weight in left])[0]
        raw = next(left[place][0], None)
        if raw is not None:
            yield raw
        elif all:
            del left[place]
        else:
            return
