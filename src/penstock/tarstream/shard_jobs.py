"""Process every input shard into an output shard, several at a time, on this machine or on a Ray cluster.

Output shards that exist are skipped, so that a run resumes where it was interrupted.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from penstock.errors import PenstockError, PlanError, StorageError
from penstock.formats.manifest import ShardEntry, read_manifest_at, write_manifest, write_manifest_at
from penstock.formats.tar.indexing import make_manifest_entry
from penstock.formats.tar.shard_names import TAR_SUFFIXES, on_disk
from penstock.storage import exists, expand_braces, local_path, open_storage, redacted
from penstock.tarstream.gather import file_identity, find_shards

PLACEHOLDER = "{}"
_MANIFEST_INTERVAL_S = 10.0
ProcessShard = Callable[[str, str], ShardEntry]  # from the URLs of the input and of the output
StartJob = Callable[["ShardJob"], Future[ShardEntry]]


@dataclass(frozen=True, slots=True)
class ShardJob:
    """An input shard, and the output shard that it is processed into."""

    source: str
    target: str


def plan_jobs(inputs: Iterable[str], output: str) -> list[ShardJob]:
    """Return a job for every input shard.

    ``{}`` in the output is replaced by what the braces of the input stand for or, without braces, by the name of the
    input shard without its extension.

    Raises:
        PlanError: Two inputs would be written to one output, or an output would replace its input.
        StorageError: Nothing matches an input pattern.

    >>> [job.target for job in plan_jobs(["in-{08..09}.tar"], "out-{}.tar")]
    ['out-08.tar', 'out-09.tar']
    """
    jobs = [ShardJob(url, output.replace(PLACEHOLDER, part)) for pattern in inputs for url, part in _expand(pattern)]
    sources: dict[str, str] = {}
    read = {file_identity(job.source, 0) for job in jobs}
    for job in jobs:
        if (other := sources.setdefault(job.target, job.source)) != job.source:
            both = f"{redacted(other)} and {redacted(job.source)}"
            raise PlanError(f"{both} would both become {redacted(job.target)}: give them different outputs")
        if file_identity(job.target, 1) in read:
            raise PlanError(
                f"{redacted(job.target)} is read, and would be replaced by an output: choose another output"
            )
    return jobs


def _expand(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the shards that match a pattern, each with the part of its name that replaces the placeholder."""
    group = re.search(r"\{[^{}]*(?:\.\.|,)[^{}]*\}", pattern)
    if group is not None and pattern.count("{") == 1 and not re.search(r"[*?\[]", pattern):
        yield from (
            (pattern[: group.start()] + part + pattern[group.end() :], part) for part in expand_braces(group[0])
        )
        return
    for url in find_shards([pattern]):
        name = url.rpartition("/")[2]
        suffix = next((suffix for suffix in sorted(TAR_SUFFIXES, key=len, reverse=True) if name.endswith(suffix)), "")
        yield url, name.removesuffix(suffix)


@dataclass(slots=True)
class JobCounts:
    """How many output shards were written, existed already, or failed."""

    done: int = 0
    existing: int = 0
    failed: int = 0


def run_jobs(jobs: list[ShardJob], start: StartJob, parallel: int, *, fresh: bool = False) -> JobCounts:
    """Run jobs, ``parallel`` at a time; outputs that exist are skipped, unless ``fresh``.

    A shard that fails is reported on standard error and does not stop the others. The manifests of the output folders
    list all outputs, including those of earlier runs.

    Raises:
        StorageError: A storage cannot be reached, or a manifest cannot be written.
    """
    counts, manifests = JobCounts(), _Manifests()
    running: dict[Future[ShardEntry], ShardJob] = {}
    ended: SimpleQueue[Future[ShardEntry]] = SimpleQueue()  # Ctrl-C in futures.wait() may leave a future locked
    waiting = iter(jobs)
    try:
        while True:
            while len(running) < parallel and (job := next(waiting, None)) is not None:
                if not fresh and exists(open_storage(job.target), job.target):
                    counts.existing += 1
                    manifests.add_existing(job.target)
                else:
                    future = start(job)
                    running[future] = job
                    future.add_done_callback(ended.put)
            if not running:
                break
            future = ended.get()
            _finish_job(future, running.pop(future), counts, manifests)
            manifests.write_if_due()
    finally:
        for future in running:
            future.cancel()
    manifests.write_all()
    return counts


def _finish_job(future: Future[ShardEntry], job: ShardJob, counts: JobCounts, manifests: _Manifests) -> None:
    try:
        manifests.add(job.target, future.result())
        counts.done += 1
    except PenstockError as exc:
        counts.failed += 1
        sys.stderr.write(f"penstock: {redacted(job.source)} failed: {exc}\n")


class _Manifests:
    """Collects the manifest entries of the output folders, and writes them every few seconds."""

    def __init__(self) -> None:
        self._entries: dict[str, list[ShardEntry]] = {}
        self._existing: dict[str, list[str]] = {}
        self._written_at = time.monotonic()

    def add(self, target: str, entry: ShardEntry) -> None:
        self._entries.setdefault(_folder_of(target), []).append(entry)

    def add_existing(self, target: str) -> None:
        self._existing.setdefault(_folder_of(target), []).append(target)

    def write_if_due(self) -> None:
        if time.monotonic() - self._written_at >= _MANIFEST_INTERVAL_S:
            self._write(self._entries)
            self._entries = {}
            self._written_at = time.monotonic()

    def write_all(self) -> None:
        """Write all entries, including those of existing shards that a killed run did not add to the manifest."""
        for folder, targets in self._existing.items():
            manifest = read_manifest_at(folder)
            names = {entry.name for entry in manifest.shards} if manifest is not None else set()
            for target in targets:
                if target.rpartition("/")[2] not in names:
                    self._entries.setdefault(folder, []).append(make_manifest_entry(target))
        self._write(self._entries)

    def _write(self, entries_by_folder: dict[str, list[ShardEntry]]) -> None:
        for folder, entries in entries_by_folder.items():
            try:
                if on_disk(folder):
                    write_manifest(local_path(folder), entries)
                else:
                    write_manifest_at(folder, None, entries)
            except StorageError:
                raise
            except OSError as exc:
                raise StorageError(f"cannot write the manifest: {exc.strerror or exc}", redacted(folder)) from exc


def _folder_of(url: str) -> str:
    return os.path.dirname(url) or "."


def on_threads(process: ProcessShard, threads: int) -> tuple[ThreadPoolExecutor, StartJob]:
    """Return a pool of threads, which the caller shuts down, and a function that starts a job in it."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock-shard")
    return pool, lambda job: pool.submit(process, job.source, job.target)


def on_ray(process: ProcessShard, cpus: int) -> StartJob:
    """Return a function that starts a job as a Ray task on ``cpus`` cores of any node.

    Raises:
        MissingExtra: Ray is not installed.
        EngineError: No node of the cluster has that many cores.
    """
    from penstock.engines.ray.placement import Need, grant_workers
    from penstock.engines.ray.session import connect_ray, import_ray

    connect_ray()
    ray = import_ray()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    grant_workers([Need(f"proc -p {cpus}", cpus=cpus)], nodes, cpus)
    task: Any = ray.remote(max_retries=2)(_ray_task).options(num_cpus=cpus)

    def start(job: ShardJob) -> Future[ShardEntry]:
        future: Future[ShardEntry] = task.remote(process, job.source, job.target).future()
        return _unwrap(future)

    return start


def _ray_task(process: ProcessShard, source: str, target: str) -> ShardEntry | PenstockError:
    """Run a job; return a Penstock error as a value, because Ray would wrap an error that is raised."""
    try:
        return process(source, target)
    except PenstockError as exc:
        return exc


def _unwrap(task: Future[Any]) -> Future[ShardEntry]:
    """Return a future of the entry that a task returns; it raises the error if the task returns one."""
    outer: Future[ShardEntry] = Future()

    def on_done(done: Future[Any]) -> None:
        try:
            value = done.result()
        except BaseException as exc:
            outer.set_exception(StorageError(f"the task failed on the cluster: {type(exc).__name__}: {exc}"))
            return
        if isinstance(value, PenstockError):
            outer.set_exception(value)
        else:
            outer.set_result(value)

    task.add_done_callback(on_done)
    return outer
