"""Shards to shards: one output for each input, many at a time, here or on a cluster, and on where a run was ended."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError, PlanError, StorageError
from penstock.formats.manifest import ShardEntry, read_manifest_at, write_manifest, write_manifest_at
from penstock.formats.tar.shard_names import TAR_SUFFIXES, on_disk
from penstock.storage import braces, exists, local_path, open_storage, redacted
from penstock.tarstream.gather import find_shards

PLACE = "{}"
_OFTEN_S = 10.0  # seconds between two writings of the manifest
Convert = Callable[[str, str], ShardEntry]


@dataclass(frozen=True, slots=True)
class Pair:
    """A shard and what it becomes."""

    source: str
    target: str


def pairs(inputs: Iterable[str], output: str) -> list[Pair]:
    """Say which shard becomes which: ``{}`` in the output is what stood for the braces of the input, else its name.

    Raises:
        PlanError: Two would become one.
        StorageError: Nothing is there.

    >>> [pair.target for pair in pairs(["in-{08..09}.tar"], "out-{}.tar")]
    ['out-08.tar', 'out-09.tar']
    """
    made = [Pair(url, output.replace(PLACE, part)) for pattern in inputs for url, part in _named(pattern)]
    seen: dict[str, str] = {}
    for pair in made:
        if (before := seen.setdefault(pair.target, pair.source)) != pair.source:
            raise PlanError(f"{redacted(before)} and {redacted(pair.source)} would both become {redacted(pair.target)}")
        if pair.target == pair.source:
            raise PlanError(f"{redacted(pair.source)} would become itself: choose another name")
    return made


def _named(pattern: str) -> Iterator[tuple[str, str]]:
    """The shards that a pattern means, each with the part of its name that tells it from the others."""
    group = re.search(r"\{[^{}]*(?:\.\.|,)[^{}]*\}", pattern)
    if group is not None and pattern.count("{") == 1 and not re.search(r"[*?\[]", pattern):
        yield from ((pattern[: group.start()] + part + pattern[group.end() :], part) for part in braces(group[0]))
        return
    for url in find_shards([pattern]):
        name = url.rpartition("/")[2]
        ending = next((suffix for suffix in sorted(TAR_SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), "")
        yield url, name.removesuffix(ending)


@dataclass(slots=True)
class Tally:
    """What came of a run over many shards."""

    done: int = 0
    there: int = 0
    failed: int = 0


def convert_all(
    planned: list[Pair], start: Callable[[Pair], Future[ShardEntry]], jobs: int, *, fresh: bool = False
) -> Tally:
    """Convert shards, ``jobs`` at a time; those that are there already are left as they are, unless ``fresh``.

    A shard that fails is told, and does not stop the others. What was written goes into the manifests of its folders.

    Raises:
        StorageError: An output cannot be looked for, or a manifest cannot be written.
    """
    tally, books = Tally(), _Books()
    under_way: dict[Future[ShardEntry], Pair] = {}
    waiting = iter(planned)
    try:
        while True:
            while len(under_way) < jobs and (pair := next(waiting, None)) is not None:
                if not fresh and exists(open_storage(pair.target), pair.target):
                    tally.there += 1
                    books.there(pair.target)
                else:
                    under_way[start(pair)] = pair
            if not under_way:
                break
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                _note(future, under_way.pop(future), tally, books)
            books.write_often()
    finally:
        for future in under_way:
            future.cancel()
    books.write()
    return tally


def _note(future: Future[ShardEntry], pair: Pair, tally: Tally, books: _Books) -> None:
    try:
        books.add(pair.target, future.result())
        tally.done += 1
    except PenstockError as exc:
        tally.failed += 1
        sys.stderr.write(f"penstock: {redacted(pair.source)} failed: {exc}\n")


class _Books:
    """The manifests of the folders that are written to."""

    def __init__(self) -> None:
        self._entries: dict[str, list[ShardEntry]] = {}
        self._there: dict[str, list[str]] = {}
        self._last = time.monotonic()

    def add(self, target: str, entry: ShardEntry) -> None:
        self._entries.setdefault(_folder(target), []).append(entry)

    def there(self, target: str) -> None:
        self._there.setdefault(_folder(target), []).append(target)

    def write_often(self) -> None:
        if time.monotonic() - self._last >= _OFTEN_S:
            self._put(self._entries)
            self._entries = {}
            self._last = time.monotonic()

    def write(self) -> None:
        """Write all of it; shards of an earlier run that no manifest knows are looked at."""
        from penstock.inspection.verify import entry_of

        for folder, targets in self._there.items():
            known = read_manifest_at(folder)
            names = {entry.name for entry in known.shards} if known is not None else set()
            for target in targets:
                if target.rpartition("/")[2] not in names:
                    self._entries.setdefault(folder, []).append(entry_of(target))
        self._put(self._entries)

    def _put(self, entries: dict[str, list[ShardEntry]]) -> None:
        for folder, some in entries.items():
            try:
                if on_disk(folder):
                    write_manifest(local_path(folder), some)
                else:
                    write_manifest_at(folder, None, some)
            except StorageError:
                raise
            except OSError as exc:
                raise StorageError(f"the manifest cannot be written: {exc.strerror or exc}", redacted(folder)) from exc


def _folder(url: str) -> str:
    return os.path.dirname(url) or "."


def on_threads(convert: Convert, jobs: int) -> tuple[ThreadPoolExecutor, Callable[[Pair], Future[ShardEntry]]]:
    """Convert in threads of this process."""
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="penstock-shard")
    return pool, lambda pair: pool.submit(convert, pair.source, pair.target)


def on_ray(convert: Convert, cpus: int) -> Callable[[Pair], Future[ShardEntry]]:
    """Convert as tasks of Ray, each on ``cpus`` cores of any node.

    Raises:
        MissingExtra: Ray is not installed.
    """
    from penstock.engines.ray.session import ensure, imported

    ensure()
    ray = imported()
    task: Any = ray.remote(max_retries=2)(_apart).options(num_cpus=cpus)

    def start(pair: Pair) -> Future[ShardEntry]:
        future: Future[ShardEntry] = task.remote(convert, pair.source, pair.target).future()
        return _plain(future)

    return start


def _apart(convert: Convert, source: str, target: str) -> ShardEntry | PenstockError:
    """Convert in a task of Ray; an error of ours comes back as a value, without the wrapping of the cluster."""
    try:
        return convert(source, target)
    except PenstockError as exc:
        return exc


def _plain(inner: Future[Any]) -> Future[ShardEntry]:
    """The future of a task, with our errors raised again."""
    outer: Future[ShardEntry] = Future()

    def finished(done: Future[Any]) -> None:
        try:
            value = done.result()
        except BaseException as exc:
            problem = StorageError(f"the task failed on the cluster: {type(exc).__name__}: {exc}")
            outer.set_exception(problem)
            return
        if isinstance(value, PenstockError):
            outer.set_exception(value)
        else:
            outer.set_result(value)

    inner.add_done_callback(finished)
    return outer
