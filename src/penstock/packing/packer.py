"""Packing: any dataset into shards, in one exact order, and on where it was interrupted."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.blobs.compression import COMPRESSION_SUFFIXES
from penstock.engines import Program, Run, Start, engine_options
from penstock.engines.progress import Progress
from penstock.errors import PlanError, StorageError
from penstock.formats.manifest import Manifest, ShardEntry, manifest_url, read_manifest_at, write_manifest_at
from penstock.formats.tar import ShardWriter
from penstock.formats.tar.shard_names import on_disk
from penstock.formats.tar.writer import remove_shards
from penstock.packing.estimate import estimated
from penstock.packing.folder_lock import busy, folder_lock, is_running
from penstock.packing.inputs import PackInput, recognise, shuffled
from penstock.packing.journal import (
    NUMBERED,
    Journal,
    JournalPosition,
    read_journal,
    remove_journal,
    start_from_json,
    start_to_json,
    write_journal,
)
from penstock.packing.parquet import pack_tables, parquet_compression
from penstock.packing.parquet_output import TableOptions
from penstock.packing.tar_output import Packed, check_elsewhere, check_flag, failures_of, keyed, ordered_engine, path_of
from penstock.plan import OnError, Resources, check_choice, check_count, size_in_bytes
from penstock.plan.values import Workers
from penstock.storage import Storage, local_path, open_storage, redacted
from penstock.storage.protocol import scheme
from penstock.vision.store import Store, StoreImages

Compress = Literal["gz", "zst", "bz2", "xz", "zstd", "snappy", "gzip", "lz4", "brotli", "none"]
_MARK_EVERY = 256  # samples: to know where a stream stands costs as much as reading a small one
_log = logging.getLogger(__name__)
_PARTIAL = re.compile(r"\.(?:shard-\d{6,}\.tar.*|manifest\.json|\.penstock-pack\.json)\.(\d+)-[0-9a-f]{8}\.partial")


def pack(
    source: Any,
    url: str | os.PathLike[str],
    *,
    format: Literal["tar", "parquet"] = "tar",
    max_bytes: float | str = 1e8,
    max_samples: int = 100_000,
    workers: Workers = None,
    shuffle: bool = True,
    seed: int = 0,
    resume: bool = True,
    compress: Compress | None = None,
    image: Literal["png", "jpg"] = "png",
    images: Store | None = None,
    on_error: Literal["raise", "skip"] | None = None,
    progress: bool | None = None,
    dry_run: bool = False,
    append: bool = False,
    storage: Storage | None = None,
    engine: str | None = None,
) -> Packed:
    """Pack a dataset into shards in a folder, here or elsewhere; the same source, seed and options give the same bytes.

    Shards appear whole or not at all, each with an index beside it; the manifest comes last. Parquet files appear
    together, with images and sounds inside and what fields mean in their schema. A run that was interrupted goes on
    where it stopped, and one that is complete has nothing to do.

    Args:
        source: A folder of class folders, a CSV or JSON-lines list, a map-style dataset of (image, label), a
            Hugging Face dataset, a ``ps.Dataset``, or shards. The bytes of files are kept as they are.
        url: The folder to write to.
        format: What shards are: tar archives, or Parquet files.
        max_bytes: The most bytes of a shard, unless one sample alone has more.
        max_samples: The most samples of a shard.
        workers: How many read at a time, or (least, most): threads for files, processes for datasets.
        shuffle: Put the samples in a random order by ``seed``; a ``ps.Dataset`` that is shuffled keeps its own.
        seed: Decides the order.
        resume: Go on with an interrupted run; ``False`` starts over, and replaces what the folder holds.
        compress: Compress shards (``"zst"``, ``"gz"``, ``"bz2"``, ``"xz"``), which then cannot be read in part; in
            Parquet all but media is compressed, by ``"zstd"`` or what ``write_parquet`` knows.
        image: How images are stored that have no bytes of their own.
        images: Scale images down and encode them again, as ``vision.Store(max_side=512)`` says.
        on_error: What happens to a sample that cannot be read or stored; by default as the dataset says.
        progress: Show a bar; ``None``: on a terminal.
        dry_run: Write nothing; tell what would be written.
        append: Add shards to those that are there.
        storage: Where ``url`` lies, and ``source`` if it is a URL of the same scheme; by default as that says.
        engine: Who reads samples, such as ``"ray"``; by default as the dataset says. Shards are written here.

    Raises:
        DataError: a sample cannot be read or stored.
        PlanError: an argument makes no sense, the source is nothing that can be packed, or the folder holds
            something else.
        StorageError: the source cannot be read, or the folder not be written.
    """
    check_choice("format", format, ("tar", "parquet"))
    folder, tables = path_of("url", url), format == "parquet"
    for name, flag in {"shuffle": shuffle, "resume": resume, "dry_run": dry_run, "append": append}.items():
        check_flag(name, flag)
    check_choice("image", image, ("png", "jpg"))
    if images is not None and not isinstance(images, Store):
        raise PlanError(f"images={images!r}: give vision.Store(max_side=...)")
    check_count("seed", seed)
    check_count("max_samples", max_samples, least=1)
    if compress is not None and not tables:
        check_choice("compress", compress, COMPRESSION_SUFFIXES)
    compression = parquet_compression(compress) if tables else ""
    beside = isinstance(source, str | os.PathLike) and scheme(os.fspath(source)) == scheme(folder) != "file"
    typed = tables and images is None  # images are scaled down in the fields of shards
    origin = recognise(source, workers=workers, image=image, storage=storage if beside else None, typed=typed)
    limits = ShardLimits(size_in_bytes("max_bytes", max_bytes), max_samples, compress)
    options: dict[str, Any] = {"max_bytes": limits.nbytes, "max_samples": max_samples, "compress": compress}
    options |= {"shuffle": shuffle, "seed": seed, "image": image, "append": append}
    plan = shuffled(origin.plan) if shuffle else origin.plan
    if images is not None:
        options["images"] = {"max_side": images.max_side, "quality": images.quality}
        plan = plan.then(StoreImages(images, resources=Resources(workers)))
    chosen = plan.engine if engine is None else engine_options(engine, {})
    plan = replace(plan, engine=ordered_engine(chosen), seed=seed if plan.seed is None else plan.seed)
    if on_error is not None:
        plan = replace(plan, errors=OnError(on_error))
    origin = replace(origin, plan=plan)
    target = _Target.of(folder, storage)
    if tables:
        how = TableOptions(limits.nbytes, max_samples, compression, append, resume)
        place = target.folder, how, options
        return pack_tables(origin, *place, progress=progress, dry_run=dry_run, storage=target.given)
    packing = _Packing(origin, target, limits, options)
    if dry_run:
        return packing.estimate()
    with failures_of(folder):
        return packing.run(resume, progress)


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """How large shards are."""

    nbytes: int
    samples: int
    compress: str | None


@dataclass(frozen=True, slots=True)
class _Target:
    """The folder that is written to."""

    folder: str
    given: Storage | None

    @classmethod
    def of(cls, url: str, storage: Storage | None) -> _Target:
        if url.endswith((".tar", ".tgz", ".parquet")) or "%" in url.rpartition("/")[2]:
            raise PlanError(f"{redacted(url)}: packing makes a folder of shards; give a folder")
        local = on_disk(url)
        folder = (local_path(url) if local else url).rstrip("/") or "/"
        return cls(folder, None if local else storage)

    @property
    def storage(self) -> Storage:
        return open_storage(self.folder, self.given)

    def manifest(self) -> Manifest | None:
        return read_manifest_at(self.folder, self.given)

    def missing(self, entries: tuple[ShardEntry, ...]) -> list[str]:
        """The shards that are not there as they were written."""
        below = f"{self.folder}/"
        sizes = {one.url.removeprefix(below): one.size for one in self.storage.list(self.folder)} if entries else {}
        return [entry.name for entry in entries if sizes.get(entry.name) != entry.bytes]

    def sweep(self, journal: Journal | None) -> None:
        """Remove what runs left behind that were killed: files of theirs, uploads of what their journal awaits."""
        if on_disk(self.folder):
            self._sweep_files()
            return
        drop = getattr(self.storage, "drop_uploads", None)
        if drop is None or journal is None:
            return
        try:
            drop(self.folder, journal.awaits)
        except StorageError as error:  # they are invisible, and cost but their room
            _log.info("uploads that were never completed may be left: %s", error)

    def _sweep_files(self) -> None:
        for name in os.listdir(self.folder):
            match = _PARTIAL.fullmatch(name)
            if match and not is_running(int(match[1])):
                with suppress(OSError):
                    os.unlink(os.path.join(self.folder, name))


class _Packing:
    """One source on its way into one folder."""

    def __init__(self, origin: PackInput, target: _Target, limits: ShardLimits, options: dict[str, Any]) -> None:
        self._origin, self._target, self._limits, self._options = origin, target, limits, options
        self._program = Program(origin.plan)
        origin.check_outside(target.folder)
        check_elsewhere(self._program, target.folder)
        self._epoch = origin.plan.epoch or 0

    def estimate(self) -> Packed:
        """What would be written."""
        return estimated(self._origin, self._epoch, redacted(self._target.folder), *self._numbers(), self._limits)

    def _numbers(self) -> tuple[int, int]:
        """The number of the first shard, and of the first sample."""
        known = self._target.manifest() if self._options["append"] else None
        if known is None:
            return 0, 0
        matches = (NUMBERED.fullmatch(shard.name) for shard in known.shards)
        first = max((int(match[1]) + 1 for match in matches if match), default=0)
        return first, sum(shard.samples for shard in known.shards)

    def run(self, resume: bool, progress: bool | None) -> Packed:
        """Write what is not yet written."""
        with folder_lock(self._target.folder) as me:
            mine = Journal(self._origin.fingerprint(self._program), self._options, by=me)
            left = self._left(resume)
            if left is not None and left.by is not None and left.by.lives():
                raise busy(self._target.folder, str(left.by))
            if left is None or not resume or self._program.stream is not None:
                known = self._target.manifest()
                if known is not None and resume and self._is_done(known, mine):
                    return self._packed(known.shards, 0)
                begun = self._begun(mine, known, resume, left)
            else:
                begun = self._taken_up(left, mine)
            self._target.sweep(left)
            journal, skipped = self._write(begun, progress)
            self._finish(journal)
            return self._packed(journal.entries, skipped)

    def _taken_up(self, left: Journal, mine: Journal) -> Journal:
        """Go on with what was interrupted, if it is the same and all there."""
        left.check(mine)
        if missing := self._target.missing(left.entries):
            raise PlanError(f"{missing[0]} was written before and is gone or changed; pass resume=False to start over")
        taken = replace(left, by=mine.by)
        write_journal(self._target.storage, self._target.folder, taken)
        return taken

    def _check_mine(self, journal: Journal) -> None:
        """Stop where somebody else has taken over; on disks nobody can."""
        if on_disk(self._target.folder):
            return
        found = read_journal(self._target.storage, self._target.folder)
        if found is None or found.by != journal.by:
            who = str(found.by) if found is not None and found.by is not None else "which has ended"
            raise busy(self._target.folder, who)

    def _left(self, resume: bool) -> Journal | None:
        """The journal of a run that was interrupted; one that makes no sense is in nobody's way who starts over."""
        try:
            return read_journal(self._target.storage, self._target.folder)
        except PlanError:
            if resume:
                raise
            return None

    def _is_done(self, known: Manifest, mine: Journal) -> bool:
        return not self._options["append"] and known.made == self._made(mine) and not self._target.missing(known.shards)

    def _begun(self, mine: Journal, known: Manifest | None, resume: bool, left: Journal | None) -> Journal:
        """Write the first journal, once nothing speaks against it."""
        append = self._options["append"]
        if known is not None and known.shards and resume and not append:
            raise PlanError(
                f"{redacted(self._target.folder)} holds {len(known.shards)} shards of another source or with other "
                "options; append=True adds to them, resume=False replaces them"
            )
        listed = {shard.name for shard in known.shards} if known is not None else set()
        old = (left.names() if left is not None else set()) - listed
        if append:
            self._check_classes(known)
            first, samples = self._numbers()
            begun = replace(mine, first=first, samples=samples, old=tuple(sorted(old)))
        else:
            begun = replace(mine, old=tuple(sorted(old | listed)))
        write_journal(self._target.storage, self._target.folder, begun)
        if known is not None and not append:
            # From here on the folder holds some shards of each set: better no manifest than a wrong one.
            self._target.storage.delete(manifest_url(self._target.folder))
        return begun

    def _check_classes(self, known: Manifest | None) -> None:
        theirs, ours = known.classes if known is not None else None, self._origin.classes
        if theirs is not None and ours is not None and theirs != ours:
            raise PlanError(
                f"the shards there have {len(theirs)} classes ({', '.join(theirs[:3])}, ...) and the source others "
                f"({', '.join(ours[:3])}, ...): the same number would mean two things"
            )

    def _write(self, journal: Journal, progress: bool | None) -> tuple[Journal, int]:
        """Write the shards that are to come, with a note after each."""
        done = journal

        def published(entry: ShardEntry, place: JournalPosition | None) -> None:
            nonlocal done
            if place is not None:
                done = done.after(entry, place)
                self._check_mine(done)
                write_journal(self._target.storage, self._target.folder, done)
            else:
                done = replace(done, entries=(*done.entries, entry))

        steps = _Steps(self._program, self._epoch, journal.place)
        before = sum(entry.samples for entry in journal.entries)
        left = None if steps.total is None else max(0, steps.total - before)
        limits = self._limits
        with (
            ShardWriter(
                self._target.folder,
                max_bytes=limits.nbytes,
                max_samples=limits.samples,
                compress=limits.compress,
                start=journal.first + len(journal.entries),
                manifest=False,
                storage=self._target.given,
                background=True,
                published=published,
            ) as writer,
            closing(steps),
            Progress("packing", left, shown=progress) as bar,
        ):
            for number, sample in enumerate(steps, start=journal.samples + before):
                writer.write(self._keyed(sample, number), steps.place)
                bar.add()
            writer.close(steps.place)
        return done, steps.skipped

    def _keyed(self, sample: dict[str, Any], number: int) -> dict[str, Any]:
        if not self._origin.numbered:
            return keyed(sample, number)
        stem = sample.get("__key__")
        sample["__key__"] = f"{number:09d}-{stem}" if stem else f"{number:09d}"
        return sample

    def _finish(self, journal: Journal) -> None:
        target = self._target
        self._check_mine(journal)
        remove_shards(target.folder, sorted({*journal.old} - {entry.name for entry in journal.entries}), target.given)
        made = "" if self._options["append"] else self._made(journal)
        write_manifest_at(target.folder, target.given, journal.entries, classes=self._origin.classes, made=made)
        remove_journal(target.storage, target.folder)

    def _made(self, journal: Journal) -> str:
        said = json.dumps([journal.source, dict(journal.options)], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:32]

    def _packed(self, entries: tuple[ShardEntry, ...], skipped: int) -> Packed:
        samples, nbytes = sum(entry.samples for entry in entries), sum(entry.bytes for entry in entries)
        return Packed(redacted(self._target.folder), tuple(entry.name for entry in entries), samples, nbytes, skipped)


class _Steps:
    """The samples still to come, and where in their stream one stands between any two of them."""

    def __init__(self, program: Program, epoch: int, at: JournalPosition | None) -> None:
        self._stream = program.stream is not None
        order = None if self._stream else program.order(epoch)
        whole = program.front() if order is None else program.start(order, program.plan.cut)
        start = whole if at is None else start_from_json(at.start)
        self._drop = 0 if at is None else at.beyond
        self._before = 0 if at is None else at.skipped
        self._run = Run(program, order, epoch, start, tracked=not self._stream)
        self._mark: Start = start
        self._marked_skips = 0
        self._since = 0
        self.total = None if self._stream else program.length(program.plan.cut)

    @property
    def skipped(self) -> int:
        """Samples left out so far."""
        return self._before + len(self._run.passed())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in self._run:
            if self._drop:
                self._drop -= 1
                self._since += 1
                continue
            yield sample
            self._since += 1
            if self._since >= _MARK_EVERY:
                self._mark, self._since = self._run.here(), 0
                self._marked_skips = len(self._run.passed())
        self._mark, self._since, self._marked_skips = self._run.here(), 0, len(self._run.passed())

    def close(self) -> None:
        """End the run."""
        self._run.close()

    def place(self) -> JournalPosition | None:
        """Where the stream stands before the sample that was given last; after it, when that was the last."""
        if self._stream:
            return None
        return JournalPosition(start_to_json(self._mark), self._since, self._before + self._marked_skips)
