"""A set of files written by many writers: the order is cut into ranges, and each range is written next to its samples.

What is in a range depends on the plan and the number of ranges alone, so that a writer can be anywhere, a lost one is
replaced by another that writes the same bytes, and an interrupted run continues with the ranges that are missing. The
process that runs the plan holds the lock, the journal and the manifest; it receives entries of the manifest.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from penstock.blobs.background import join_thread
from penstock.blobs.draft import put_file
from penstock.engines import ConsumerHost, ConsumerLost, Lanes, Program
from penstock.engines.progress import Progress
from penstock.errors import EngineError, PlanError, StateError, StorageError
from penstock.formats.manifest import ShardEntry, file_sha256
from penstock.formats.tar.index import INDEX_SUFFIX
from penstock.formats.tar.shard_names import TAR_SUFFIXES, parse_target
from penstock.landing.commit import (
    MODES,
    Landing,
    Mode,
    Packed,
    RunProgress,
    Sink,
    storage_errors,
)
from penstock.landing.fingerprint import RunFingerprint, fingerprint_of
from penstock.landing.lock import temporary_folder
from penstock.landing.position import Position, ResumableRun
from penstock.landing.target import Target
from penstock.plan import Cut, check_choice
from penstock.storage import redacted

_ATTEMPTS = 6  # of a range whose writer or node is lost, over half a minute
_LONG_RUN_S = 10.0  # from which a run is worth an advice
_LIMIT_SHARE = 0.5  # of its time
_ATTEMPT_FOLDER = "range-"  # in the work folder: what one writer has not completed yet
log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Sinks:
    """What writes a set: one sink, or one for each of many ranges of the order.

    Attributes:
        make: Makes a sink; can be pickled.
        shards: The number of ranges; None for one sink.
        split: Whether a range may be several files, so that every name ends in its number in the range.
    """

    make: Callable[[], Sink]
    shards: int | None = None
    split: bool = False


@dataclass(frozen=True, slots=True)
class RangeJob:
    """One range, as its writer needs to know it; called in the writer's process, it returns the writer."""

    target: Target
    sinks: Sinks
    number: int
    drafts: str  # the absolute path of the drafts of a target on a disk
    first: int
    first_sample: int

    def __call__(self) -> RangeWriter:
        return RangeWriter(self)

    def name(self, file: int) -> str:
        """Return the name of the range's file with this number in the range; a range that is not split has one."""
        suffix = f"-{file}" if self.sinks.split else ""
        if self.target.format == "tar":
            stem, ending = self._tar_name(None)
            return f"{stem}{suffix}{ending}"
        prefix = f"set-{self.first:03d}-" if self.first else ""
        return f"{prefix}{self.number:05d}-of-{self.sinks.shards:05d}{suffix}.{self.target.format}"

    def _tar_name(self, compress: str | None) -> tuple[str, str]:
        """Return the name of the range's shard, without and with its ending."""
        label = self.target.label or parse_target(self.target.folder, compress)[1]
        name = label % (self.first + self.number)
        ending = max((suffix for suffix in TAR_SUFFIXES if name.endswith(suffix)), key=len, default="")
        return name.removesuffix(ending), ending

    def tar_pattern(self, compress: str | None) -> tuple[str, int]:
        """Return the pattern of the range's shards, and the number of the first."""
        if not self.sinks.split:
            return self.target.label or parse_target(self.target.folder, compress)[1], self.first + self.number
        stem, ending = self._tar_name(compress)
        return f"{stem.replace('%', '%%')}-%d{ending.replace('%', '%%')}", 0


class _NoPositions:
    """The positions of a range: none, since a range is written as a whole."""

    def mark(self) -> None:
        """Do nothing."""

    def position(self, number: int) -> Position | None:
        """Return None."""
        return None


class RangeWriter:
    """Writes one range, in the process where its samples are; a consumer of a run, and the open set of its sink."""

    adds = may_be_empty = True

    def __init__(self, job: RangeJob) -> None:
        self._job, self.target = job, job.target
        self.entries: dict[str, ShardEntry] = {}
        self.state: dict[str, Any] = {}
        self._leftovers = ExitStack()
        self.drafts = self._own_folder()
        self._sink = job.sinks.make()
        self._sink.open(self, _NoPositions())

    def _own_folder(self) -> str:
        """Return a folder that no other writer uses, not even another one of the same range."""
        prefix = f"{_ATTEMPT_FOLDER}{self._job.number:06d}-"
        if not self.target.on_disk:
            own = temporary_folder(f"{self.target.work}/{prefix}", keep=False)
            return self._leftovers.enter_context(own)
        try:
            folder = tempfile.mkdtemp(prefix=prefix, dir=self._job.drafts)
        except FileNotFoundError as exc:
            problem = "this machine has no such folder; write to a folder that all nodes share, or to a URL"
            raise StorageError(problem, self.target.folder) from exc
        self._leftovers.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def tar_names(self, compress: str | None) -> tuple[str, int]:
        """Return the path or URL of the range's shards, and the number of the first."""
        pattern, start = self._job.tar_pattern(compress)
        return f"{self.drafts if self.target.on_disk else self.target.folder.rstrip('/')}/{pattern}", start

    def number_text(self, number: int) -> str:
        """Return the key of a sample that has none: the number of its range, and its own in the range."""
        return f"{self._job.number:06d}-{self._job.first_sample + number:09d}"

    def checkpoint(self, entry: ShardEntry, position: Position | None, state: Mapping[str, Any] | None = None) -> None:
        """Record a complete file."""
        self.entries[entry.name] = entry

    def add(self, items: Sequence[Any]) -> None:
        """Write samples."""
        self._sink.add(items)

    def close(self) -> list[ShardEntry]:
        """Complete the range, move its files to where the run or its readers find them, and return their entries."""
        self._sink.close()
        numbered = reversed([*enumerate(self.entries.values())])  # see check_sets
        entries = [self._publish(entry, number) for number, entry in numbered]
        self.drop()
        return entries[::-1]

    def _publish(self, entry: ShardEntry, number: int) -> ShardEntry:
        path = os.path.join(self.drafts, entry.name)
        if self.target.format == "tar":
            name = entry.name
        else:
            name = self._job.name(number)
            entry = entry._replace(name=name, sha256=entry.sha256 or file_sha256(path))
        if not self.target.on_disk:
            if self.target.format != "tar":  # shards are uploaded as they are written
                put_file(self.target.storage, self.target.url(name), path)
            return entry
        for suffix in (INDEX_SUFFIX, "") if self.target.format == "tar" else ("",):
            os.replace(path + suffix, os.path.join(self._job.drafts, name + suffix))
        return entry

    def drop(self) -> None:
        """Remove what is not complete; does nothing after ``close``."""
        self._sink.drop()
        self._leftovers.close()


class RangeLanding(Landing):
    """A run that lands range by range, in any order.

    Attributes:
        done: The files of the ranges that are complete, and the number of samples that were skipped in each.
    """

    def __init__(self, target: Target, run: RunFingerprint, options: Mapping[str, Any], mode: Mode) -> None:
        Landing.__init__(self, replace(target, streamed=True), run, options, mode)
        self.done: dict[int, tuple[list[ShardEntry], int]] = {}
        self._lock = threading.Lock()

    @property
    def hidden(self) -> bool:
        """Whether files stay invisible until the commit: all but those of a new set of shards, and remote files."""
        return self.target.on_disk and (self.target.format != "tar" or self._mode != "new")

    def _load(self) -> RunProgress | None:
        found = Landing._load(self)
        if found is not None:  # ranges are complete in any order; the commit lists them in theirs
            found.entries = {entry.name: entry for _, (entries, _) in sorted(found.ranges.items()) for entry in entries}
        return found

    def _read_line(self, found: RunProgress, line: Mapping[str, Any]) -> None:
        if "range" in line:
            entries = [ShardEntry(*fields) for fields in line["entries"]]
            for entry in entries:
                self._check_draft(entry)
            found.ranges[int(line["range"])] = entries, int(line["skipped"])
            found.entries |= {entry.name: entry for entry in entries}

    def _resume(self, found: RunProgress) -> Packed | None:
        """Take over an interrupted run: ranges whose files are gone are written again."""
        self.first, self.first_sample = int(found.header["first"]), int(found.header["number"])
        sizes, visible = self._draft_sizes(), self.target.sizes()

        def is_there(entries: Iterable[ShardEntry]) -> bool:
            return all(entry.bytes in (sizes.get(entry.name), visible.get(entry.name)) for entry in entries)

        if found.commit is not None and is_there(found.entries.values()):
            return self._finish(found)
        self._decided = True
        self.done = {number: done for number, done in found.ranges.items() if is_there(done[0])}
        self.entries = {entry.name: entry for entries, _ in self.done.values() for entry in entries}
        self._remove_drafts(keep=self.entries)
        return None

    def complete(self, number: int, entries: list[ShardEntry], skipped: int) -> None:
        """Record that a range is complete; thread-safe.

        Raises:
            PlanError: Another run has taken over the remote folder.
            StorageError: The journal cannot be written, or a file that was written is not seen from here.
        """
        with self._lock:
            self._check_lock()
            for entry in entries:
                if self.target.on_disk and not os.path.exists(os.path.join(self.drafts, entry.name)):
                    problem = f"a writer on another node wrote {entry.name}, which is not seen from here"
                    raise StorageError(f"{problem}; write to a folder that all nodes share, or to a URL", self.drafts)
            if not self.hidden and self.target.on_disk:
                for entry in entries:
                    self._publish(entry.name, entry.name)
            line = {"range": number, "entries": entries, "skipped": skipped}
            self._journal.append(json.dumps(line, separators=(",", ":")), sync=True)
            self.done[number] = entries, skipped
            self.entries |= {entry.name: entry for entry in entries}

    def commit_ranges(self, classes: Sequence[str] | None) -> Packed:
        """Make all files visible, in the order of the ranges."""
        done = [self.done[number] for number in sorted(self.done)]
        self.entries = {entry.name: entry for entries, _ in done for entry in entries}
        return self.commit(sum(skipped for _, skipped in done), classes)

    def _remove_drafts(self, keep: Iterable[str]) -> None:
        Landing._remove_drafts(self, keep)
        with os.scandir(self.drafts) as found:
            for one in found:
                if one.name.startswith(_ATTEMPT_FOLDER) and one.is_dir(follow_symlinks=False):
                    shutil.rmtree(one.path, ignore_errors=True)


def write_set(
    program: Program,
    epoch: int,
    target: Target,
    sinks: Sinks,
    options: Mapping[str, Any],
    *,
    mode: Mode = "new",
    kind: str = "run",
    title: str = "writing",
    progress: bool | None = False,
    classes: Sequence[str] | None = None,
) -> Packed:
    """Run a program and write its samples to a target, once: what an interrupted run has written is not written again.

    Args:
        program: Yields the samples, in an exact order.
        epoch: The epoch to run.
        target: Where the files land.
        sinks: What writes them.
        options: What else determines the files, for the comparison with an interrupted or complete run.
        mode: What to do if the target holds files.
        kind: What kind of run it is, for the error of one that finds the target in use.
        title: The title of the progress bar.
        progress: Whether to show the progress bar; None: if standard error is a terminal.
        classes: The class names, for the manifest.

    Raises:
        DataError: A sample cannot be read or stored.
        EngineError: The cluster lacks what a stage requests, or writers were lost repeatedly.
        PlanError: The dataset has no end, the target holds files or an unfinished run of another plan, or another run
            is writing there.
        StorageError: The target cannot be written.
    """
    check_choice("mode", mode, MODES)
    program.check_finite()
    if sinks.shards is not None:
        if target.is_file:
            file = redacted(target.url(target.label))
            raise PlanError(f"{file}: shards={sinks.shards} writes several files; give a folder")
        options = {**options, "shards": sinks.shards}
    with storage_errors(target.folder):
        make = Landing if sinks.shards is None else RangeLanding
        landing = make(target, fingerprint_of(program, epoch), options, mode)
        with landing.opened(kind):
            if (finished := landing.begin()) is not None:
                return finished
            done = sum(entry.samples for entry in landing.entries.values())
            total = None if program.stream is not None else program.length(program.plan.cut or Cut(0, 1))
            remaining = None if total is None else max(0, total - done)
            with Progress(title, remaining, shown=progress) as bar:
                if isinstance(landing, RangeLanding) and sinks.shards is not None:
                    _RangeRuns(program, epoch, landing, sinks, sinks.shards, bar).write()
                    return landing.commit_ranges(classes)
                skipped = _write_samples(program, epoch, landing, sinks.make(), bar, done)
            return landing.commit(skipped, classes)


def _write_samples(program: Program, epoch: int, landing: Landing, sink: Sink, bar: Progress, done: int) -> int:
    """Write the samples after the first ``done`` by one sink, and return how many of them were skipped."""
    try:
        samples = ResumableRun(program, epoch, landing.position, done)
    except StateError as exc:
        raise PlanError(f"{exc}; mode='replace' starts over") from exc
    begun, writing_s = time.monotonic(), 0.0
    with closing(samples):
        sink.open(landing, samples)
        try:
            for items in samples:
                since = time.monotonic()
                sink.add(items)
                writing_s += time.monotonic() - since
                bar.add(len(items))
            sink.close()
        finally:
            sink.drop()
    if program.plan.engine.name == "ray":
        _warn_if_limit(writing_s, time.monotonic() - begun)
    return samples.skipped


def _warn_if_limit(writing_s: float, whole_s: float) -> None:
    """Say that writing in this process was the limit of a run on a cluster, if it was."""
    if whole_s > _LONG_RUN_S and writing_s > _LIMIT_SHARE * whole_s:
        share = 100 * writing_s / whole_s
        advice = "shards=n lets the cluster write n files in parallel, and no samples pass through this process"
        log.warning("this process spent %.0f%% of the run on writing; %s", share, advice)


@dataclass(slots=True, eq=False)
class _RangeRuns:
    """Writes the missing ranges of a landing, several at a time."""

    program: Program
    epoch: int
    landing: RangeLanding
    sinks: Sinks
    shards: int
    bar: Progress
    failures: dict[int, BaseException] = field(default_factory=dict)  # by range
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self) -> None:
        """Write the missing ranges.

        Raises:
            PenstockError: A range cannot be written: the error of the first one that failed, in order.
        """
        missing = [number for number in range(self.shards) if number not in self.landing.done]
        if not missing:
            return
        order = self.program.order(self.epoch)
        lanes = Lanes(self.program, order, self.epoch, len(missing), consumers=True)
        start = partial(self.program.start, order)
        numbers = iter(missing)
        work = partial(self._write_ranges, lanes, start, numbers)
        threads = [
            threading.Thread(target=work, name=f"penstock writer {lane}", daemon=True) for lane in range(lanes.count)
        ]
        try:
            if len(threads) == 1:
                work()
            else:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():
                        thread.join(1.0)  # with a timeout, so that Ctrl-C is noticed
        finally:
            self.stopped.set()
            lanes.close()
            for thread in threads:
                join_thread(thread, 10.0)
        if self.failures:
            raise self.failures[min(self.failures)]

    def _write_ranges(self, lanes: Lanes, start: Callable[[Cut], Any], numbers: Iterator[int]) -> None:
        """Write range after range, in one lane, until there are none left or one fails."""
        with closing(lanes.host()) as host:
            while not self.stopped.is_set():
                with self.lock:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    entries, skipped = self._write_range(number, lanes, start, host)
                    self.landing.complete(number, entries, skipped)
                except _Stopped:
                    return
                except BaseException as exc:  # raised where all lanes have ended
                    if not self.stopped.is_set():
                        self.failures[number] = exc
                    self.stopped.set()
                    lanes.close()
                    return

    def _write_range(
        self, number: int, lanes: Lanes, start: Callable[[Cut], Any], host: ConsumerHost
    ) -> tuple[list[ShardEntry], int]:
        """Write one range, again if its writer is lost; return its files, and how many samples were skipped."""
        landing, target = self.landing, self.landing.target
        if target.on_disk:
            target = replace(target, folder=os.path.abspath(target.folder))
        drafts = os.path.abspath(landing.drafts)
        job = RangeJob(target, self.sinks, number, drafts, landing.first, landing.first_sample)
        shown = 0  # samples that the progress bar has counted
        for attempt in range(1, _ATTEMPTS + 1):
            written = 0
            with closing(lanes.run(start(Cut(number, self.shards)))) as run:
                try:
                    writer = host.make(job)
                    try:
                        for items in run.runs():
                            if self.stopped.is_set():
                                raise _Stopped
                            if len(items):
                                writer.add(items)
                            written += len(items)
                            with self.lock:
                                self.bar.add(max(0, written - shown))
                            shown = max(shown, written)
                        return writer.close(), len(run.skips_so_far())
                    finally:
                        with suppress(ConsumerLost):
                            writer.drop()
                except ConsumerLost as exc:
                    if attempt == _ATTEMPTS or self.stopped.is_set():
                        raise
                    log.warning("range %d is written again: %s", number, exc)
            self.stopped.wait(2.0 ** (attempt - 1))  # a cluster may choose a node that is gone until it knows that
        raise EngineError(f"range {number} could not be written")


class _Stopped(Exception):
    """Another range has failed."""
