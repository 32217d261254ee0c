"""``ps.pack``: write any dataset to shards, in one exact order, and resume where a run was interrupted."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from penstock.blobs.compression import COMPRESSION_SUFFIXES
from penstock.engines import Program, Run, Start, engine_options
from penstock.engines.progress import Progress
from penstock.errors import PlanError, StorageError
from penstock.formats.manifest import Manifest, ShardEntry, manifest_url, read_manifest_at, write_manifest_at
from penstock.formats.tar import ShardWriter
from penstock.formats.tar.shard_names import on_disk
from penstock.formats.tar.writer import remove_shards
from penstock.packing.estimate import estimate_shards
from penstock.packing.folder_lock import folder_in_use, folder_lock, is_running
from penstock.packing.inputs import PackInput, recognise, shuffle_plan
from penstock.packing.journal import (
    NUMBERED_SHARD,
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
from penstock.packing.tar_output import (
    Packed,
    ShardLimits,
    check_flag,
    check_not_source,
    check_path,
    ordered_engine,
    storage_errors,
    with_key,
)
from penstock.plan import OnError, Resources, check_choice, check_count, size_in_bytes
from penstock.plan.values import Workers
from penstock.storage import Storage, local_path, open_storage, redacted
from penstock.storage.protocol import scheme
from penstock.vision.store import Store, StoreImages
from penstock.vision.tiles import TileImages

Compress = Literal["gz", "zst", "bz2", "xz", "zstd", "snappy", "gzip", "lz4", "brotli", "none"]
_CHECKPOINT_SAMPLES = 256  # between two starts: computing one costs as much as reading a small sample
_log = logging.getLogger(__name__)
_PARTIAL_FILE = re.compile(
    r"\.(?:shard-\d{6,}\.tar.*|manifest\.json|\.penstock-pack\.json)\.(\d+)-[0-9a-f]{8}\.partial"
)


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
    tiles: bool = False,
    on_error: Literal["raise", "skip"] | None = None,
    progress: bool | None = None,
    dry_run: bool = False,
    append: bool = False,
    storage: Storage | None = None,
    engine: str | None = None,
) -> Packed:
    """Pack a dataset into shards in a folder, local or remote; the same source, seed and options give the same bytes.

    A shard appears when it is complete, with an index beside it; the manifest is written last. Parquet files appear
    together, with images and sounds embedded and the types of fields in the schema. An interrupted run is resumed
    where it stopped; for a complete one there is nothing to do.

    Args:
        source: A folder of class folders, a CSV or JSON-lines list, a map-style dataset of (image, label), a
            Hugging Face dataset, a ``ps.Dataset``, or shards. The bytes of files are stored unchanged.
        url: The folder to write to: a path or URL.
        format: Write tar archives or Parquet files.
        max_bytes: The most bytes of a shard, unless one sample alone is larger.
        max_samples: The most samples of a shard.
        workers: How many workers read the source, or (min, max): threads for files, processes for datasets.
        shuffle: Shuffle the samples by ``seed``; a ``ps.Dataset`` that is shuffled already keeps its order.
        seed: Determines the order.
        resume: Resume an interrupted run; ``False`` starts over and replaces the shards in the folder.
        compress: Compress shards (``"zst"``, ``"gz"``, ``"bz2"``, ``"xz"``), which then cannot be read in part; in
            Parquet files, compress all columns that are not media, by ``"zstd"`` or another codec of
            ``write_parquet``.
        image: How to encode images that are not encoded yet.
        images: Scale images down and encode them again, such as ``vision.Store(max_side=512)``.
        tiles: Store JPEGs in tiles, without loss, so that crops of them decode faster; needs the program jpegtran.
        on_error: Raise or skip a sample that cannot be read or stored; by default as the dataset says.
        progress: Show a progress bar; ``None``: if standard error is a terminal.
        dry_run: Write nothing, and return what would be written.
        append: Add shards to those in the folder.
        storage: The storage of ``url``, and of ``source`` if it is a URL of the same scheme.
        engine: The engine that reads the samples, such as ``"ray"``; by default that of the dataset. Shards are always
            written by this process.

    Returns:
        The names of the shards, and the numbers of samples and bytes.

    Raises:
        DataError: A sample cannot be read or stored.
        PlanError: An argument is not valid, the source cannot be packed, the folder holds other shards, or another run
            is writing to it.
        StorageError: The source cannot be read, or the folder cannot be written.
    """
    check_choice("format", format, ("tar", "parquet"))
    folder, is_parquet = check_path("url", url), format == "parquet"
    for name, flag in {
        "shuffle": shuffle,
        "resume": resume,
        "dry_run": dry_run,
        "append": append,
        "tiles": tiles,
    }.items():
        check_flag(name, flag)
    check_choice("image", image, ("png", "jpg"))
    if images is not None and not isinstance(images, Store):
        raise PlanError(f"images={images!r}: give vision.Store(max_side=...)")
    check_count("seed", seed)
    check_count("max_samples", max_samples, least=1)
    if compress is not None and not is_parquet:
        check_choice("compress", compress, COMPRESSION_SUFFIXES)
    compression = parquet_compression(compress) if is_parquet else ""
    same_storage = isinstance(source, str | os.PathLike) and scheme(os.fspath(source)) == scheme(folder) != "file"
    typed = is_parquet and images is None and not tiles  # images are stored anew in encoded fields
    origin = recognise(source, workers=workers, image=image, storage=storage if same_storage else None, typed=typed)
    limits = ShardLimits(size_in_bytes("max_bytes", max_bytes), max_samples, compress)
    options: dict[str, Any] = {"max_bytes": limits.max_bytes, "max_samples": max_samples, "compress": compress}
    options |= {"shuffle": shuffle, "seed": seed, "image": image, "append": append}
    plan = shuffle_plan(origin.plan) if shuffle else origin.plan
    if images is not None:
        options["images"] = asdict(images)
        plan = plan.then(StoreImages(images, resources=Resources(workers)))
    if tiles:
        options["tiles"] = True
        plan = plan.then(TileImages(resources=Resources(workers)))
    chosen = plan.engine if engine is None else engine_options(engine, {})
    plan = replace(plan, engine=ordered_engine(chosen), seed=seed if plan.seed is None else plan.seed)
    if on_error is not None:
        plan = replace(plan, errors=OnError(on_error))
    origin = replace(origin, plan=plan)
    target = _Target.of(folder, storage)
    if is_parquet:
        table_options = TableOptions(limits.max_bytes, max_samples, compression, append, resume)
        return pack_tables(
            origin, target.folder, table_options, options, progress=progress, dry_run=dry_run, storage=target.given
        )
    packing = _PackRun(origin, target, limits, options)
    if dry_run:
        return packing.estimate()
    with storage_errors(folder):
        return packing.run(resume, progress)


@dataclass(frozen=True, slots=True)
class _Target:
    """The folder to write to, and the storage that the user gave for it."""

    folder: str
    given: Storage | None

    @classmethod
    def of(cls, url: str, storage: Storage | None) -> _Target:
        if url.endswith((".tar", ".tgz", ".parquet")) or "%" in url.rpartition("/")[2]:
            raise PlanError(f"{redacted(url)}: packing writes a folder of shards; give a folder")
        local = on_disk(url)
        folder = (local_path(url) if local else url).rstrip("/") or "/"
        return cls(folder, None if local else storage)

    @property
    def storage(self) -> Storage:
        return open_storage(self.folder, self.given)

    def manifest(self) -> Manifest | None:
        return read_manifest_at(self.folder, self.given)

    def missing_shards(self, entries: tuple[ShardEntry, ...]) -> list[str]:
        """Return the names of the shards that do not exist or have another size than when they were written."""
        prefix = f"{self.folder}/"
        sizes = {one.url.removeprefix(prefix): one.size for one in self.storage.list(self.folder)} if entries else {}
        return [entry.name for entry in entries if sizes.get(entry.name) != entry.bytes]

    def remove_leftovers(self, journal: Journal | None) -> None:
        """Remove what killed runs left behind: partial files, and uploads of shards that are pending in the journal."""
        if on_disk(self.folder):
            self._remove_partial_files()
            return
        drop_uploads = getattr(self.storage, "drop_uploads", None)
        if drop_uploads is None or journal is None:
            return
        try:
            drop_uploads(self.folder, journal.is_pending)
        except StorageError as error:  # such uploads are invisible and only take up space
            _log.info("uploads that were never completed may be left: %s", error)

    def _remove_partial_files(self) -> None:
        for name in os.listdir(self.folder):
            match = _PARTIAL_FILE.fullmatch(name)
            if match and not is_running(int(match[1])):
                with suppress(OSError):
                    os.unlink(os.path.join(self.folder, name))


class _PackRun:
    """Packs one source into tar shards in one folder."""

    def __init__(self, origin: PackInput, target: _Target, limits: ShardLimits, options: dict[str, Any]) -> None:
        self._origin, self._target, self._limits, self._options = origin, target, limits, options
        self._program = Program(origin.plan)
        origin.check_outside(target.folder)
        check_not_source(self._program, target.folder)
        self._epoch = origin.plan.epoch or 0

    def estimate(self) -> Packed:
        """Return what would be written."""
        first_shard, _ = self._first_numbers()
        return estimate_shards(self._origin, self._epoch, redacted(self._target.folder), first_shard, self._limits)

    def _first_numbers(self) -> tuple[int, int]:
        """Return the numbers of the first shard and of the first sample to write."""
        manifest = self._target.manifest() if self._options["append"] else None
        if manifest is None:
            return 0, 0
        matches = (NUMBERED_SHARD.fullmatch(shard.name) for shard in manifest.shards)
        first_shard = max((int(match[1]) + 1 for match in matches if match), default=0)
        return first_shard, sum(shard.samples for shard in manifest.shards)

    def run(self, resume: bool, progress: bool | None) -> Packed:
        """Write the shards that are not written yet."""
        with folder_lock(self._target.folder) as owner:
            new = Journal(self._origin.fingerprint(self._program), self._options, by=owner)
            interrupted = self._interrupted_journal(resume)
            if interrupted is not None and interrupted.by is not None and interrupted.by.is_alive():
                raise folder_in_use(self._target.folder, str(interrupted.by))
            if interrupted is None or not resume or self._program.stream is not None:
                manifest = self._target.manifest()
                if manifest is not None and resume and self._is_complete(manifest, new):
                    return self._result(manifest.shards, 0)
                journal = self._start(new, manifest, resume, interrupted)
            else:
                journal = self._resume(interrupted, new)
            self._target.remove_leftovers(interrupted)
            journal, skipped = self._write(journal, progress)
            self._finish(journal)
            return self._result(journal.entries, skipped)

    def _interrupted_journal(self, resume: bool) -> Journal | None:
        """Return the journal of an interrupted run; one that cannot be read is ignored by a run that starts over."""
        try:
            return read_journal(self._target.storage, self._target.folder)
        except PlanError:
            if resume:
                raise
            return None

    def _is_complete(self, manifest: Manifest, journal: Journal) -> bool:
        if self._options["append"] or manifest.source_fingerprint != self._fingerprint(journal):
            return False
        return not self._target.missing_shards(manifest.shards)

    def _start(self, new: Journal, manifest: Manifest | None, resume: bool, interrupted: Journal | None) -> Journal:
        """Check that the folder may be written, and write the first journal."""
        append = self._options["append"]
        if manifest is not None and manifest.shards and resume and not append:
            raise PlanError(
                f"{redacted(self._target.folder)} holds {len(manifest.shards)} shards of another source or with other "
                "options; append=True adds to them, resume=False replaces them"
            )
        listed = {shard.name for shard in manifest.shards} if manifest is not None else set()
        old = (interrupted.shard_names() if interrupted is not None else set()) - listed
        if append:
            self._check_classes(manifest)
            first_shard, samples = self._first_numbers()
            journal = replace(new, first=first_shard, samples=samples, old=tuple(sorted(old)))
        else:
            journal = replace(new, old=tuple(sorted(old | listed)))
        write_journal(self._target.storage, self._target.folder, journal)
        if manifest is not None and not append:
            # From here on the folder holds shards of both sets: no manifest is better than a wrong one.
            self._target.storage.delete(manifest_url(self._target.folder))
        return journal

    def _resume(self, interrupted: Journal, new: Journal) -> Journal:
        """Check that the interrupted run is the same and its shards exist, and take over its journal."""
        interrupted.check_same_run(new)
        if missing := self._target.missing_shards(interrupted.entries):
            raise PlanError(f"{missing[0]} was written before and is gone or changed; pass resume=False to start over")
        journal = replace(interrupted, by=new.by)
        write_journal(self._target.storage, self._target.folder, journal)
        return journal

    def _check_owner(self, journal: Journal) -> None:
        """Stop if another run has taken over a remote folder; on a disk, the lock file prevents that."""
        if on_disk(self._target.folder):
            return
        found = read_journal(self._target.storage, self._target.folder)
        if found is None or found.by != journal.by:
            owner = str(found.by) if found is not None and found.by is not None else "already finished"
            raise folder_in_use(self._target.folder, owner)

    def _check_classes(self, manifest: Manifest | None) -> None:
        existing, new = manifest.classes if manifest is not None else None, self._origin.classes
        if existing is not None and new is not None and existing != new:
            raise PlanError(
                f"the existing shards have {len(existing)} classes ({', '.join(existing[:3])}, ...) and the source has "
                f"others ({', '.join(new[:3])}, ...): the same number would mean two things; choose another folder"
            )

    def _write(self, journal: Journal, progress: bool | None) -> tuple[Journal, int]:
        """Write the remaining shards, and the journal after each; return the last journal and the skipped samples."""
        current = journal

        def published(entry: ShardEntry, position: JournalPosition | None) -> None:
            nonlocal current
            if position is not None:
                current = current.with_shard(entry, position)
                self._check_owner(current)
                write_journal(self._target.storage, self._target.folder, current)
            else:
                current = replace(current, entries=(*current.entries, entry))

        samples = _RemainingSamples(self._program, self._epoch, journal.place)
        done = sum(entry.samples for entry in journal.entries)
        remaining = None if samples.total is None else max(0, samples.total - done)
        limits = self._limits
        with (
            ShardWriter(
                self._target.folder,
                max_bytes=limits.max_bytes,
                max_samples=limits.max_samples,
                compress=limits.compress,
                start=journal.first + len(journal.entries),
                manifest=False,
                storage=self._target.given,
                background=True,
                published=published,
            ) as writer,
            closing(samples),
            Progress("packing", remaining, shown=progress) as bar,
        ):
            for number, sample in enumerate(samples, start=journal.samples + done):
                writer.write(self._with_key(sample, number), samples.position)
                bar.add()
            writer.close(samples.position)
        return current, samples.skipped

    def _with_key(self, sample: dict[str, Any], number: int) -> dict[str, Any]:
        if not self._origin.numbered_keys:
            return with_key(sample, number)
        stem = sample.get("__key__")
        sample["__key__"] = f"{number:09d}-{stem}" if stem else f"{number:09d}"
        return sample

    def _finish(self, journal: Journal) -> None:
        """Remove the shards of an earlier run, write the manifest, and remove the journal."""
        target = self._target
        self._check_owner(journal)
        remove_shards(target.folder, sorted({*journal.old} - {entry.name for entry in journal.entries}), target.given)
        fingerprint = "" if self._options["append"] else self._fingerprint(journal)
        write_manifest_at(
            target.folder, target.given, journal.entries, classes=self._origin.classes, source_fingerprint=fingerprint
        )
        remove_journal(target.storage, target.folder)

    def _fingerprint(self, journal: Journal) -> str:
        """Return a hash of the source and the options, by which a complete run is recognised."""
        text = json.dumps([journal.source, dict(journal.options)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _result(self, entries: tuple[ShardEntry, ...], skipped: int) -> Packed:
        samples, nbytes = sum(entry.samples for entry in entries), sum(entry.bytes for entry in entries)
        return Packed(redacted(self._target.folder), tuple(entry.name for entry in entries), samples, nbytes, skipped)


class _RemainingSamples:
    """The samples that are still to be written, and the position in their stream before each."""

    def __init__(self, program: Program, epoch: int, position: JournalPosition | None) -> None:
        self._is_stream = program.stream is not None
        order = None if self._is_stream else program.order(epoch)
        beginning = program.stream_start() if order is None else program.start(order, program.plan.cut)
        start = beginning if position is None else start_from_json(position.start)
        self._to_drop = 0 if position is None else position.beyond  # samples that the shards hold already
        self._skipped_before = 0 if position is None else position.skipped
        self._run = Run(program, order, epoch, start, tracked=not self._is_stream)
        self._checkpoint: Start = start
        self._checkpoint_skips = 0
        self._since_checkpoint = 0  # samples
        self.total = None if self._is_stream else program.length(program.plan.cut)

    @property
    def skipped(self) -> int:
        """The number of samples skipped so far."""
        return self._skipped_before + len(self._run.skips_so_far())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in self._run:
            if self._to_drop:
                self._to_drop -= 1
                self._since_checkpoint += 1
                continue
            yield sample
            self._since_checkpoint += 1
            if self._since_checkpoint >= _CHECKPOINT_SAMPLES:
                self._set_checkpoint()
        self._set_checkpoint()

    def _set_checkpoint(self) -> None:
        self._checkpoint, self._since_checkpoint = self._run.here(), 0
        self._checkpoint_skips = len(self._run.skips_so_far())

    def close(self) -> None:
        self._run.close()

    def position(self) -> JournalPosition | None:
        """Return the position before the sample that was yielded last, or the end; None for a stream."""
        if self._is_stream:
            return None
        skipped = self._skipped_before + self._checkpoint_skips
        return JournalPosition(start_to_json(self._checkpoint), self._since_checkpoint, skipped)
