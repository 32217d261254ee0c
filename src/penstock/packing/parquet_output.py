"""Write the samples of a plan to Parquet files: drafts with a journal, so that an interrupted run can resume."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.blobs.background import BackgroundThread
from penstock.blobs.draft import replace_file
from penstock.codecs.features import Feature, Image, Tensor, features_by_type, metadata_of
from penstock.engines import Program, Run, Start
from penstock.engines.progress import Progress
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.tables.arrow_table import table_from
from penstock.formats.tables.parquet_writer import ParquetLayout, TableWriter, WrittenFile, check_compression
from penstock.formats.tables.source import require_arrow
from penstock.packing.journal import start_from_json, start_to_json
from penstock.packing.parquet_set import open_parquet_set
from penstock.packing.tar_output import Packed, check_not_source, ordered_engine, storage_errors
from penstock.plan import Columns, Plan, check_count, size_in_bytes
from penstock.storage import Storage, redacted

if TYPE_CHECKING:
    import pyarrow as pa

_JOURNAL = "journal.json"
_ESTIMATE_BATCH = 64  # samples that a dry run encodes at a time
_QUEUED_TABLES = 4  # tables that wait to be encoded


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How Parquet files are written.

    Raises:
        PlanError: An argument is out of range.
    """

    max_bytes: float | str = "500MB"
    max_samples: int | None = None
    compression: str = "zstd"
    append: bool = False
    resume: bool = True
    schema: pa.Schema | None = None

    def __post_init__(self) -> None:
        size_in_bytes("max_bytes", self.max_bytes)
        if self.max_samples is not None:
            check_count("max_samples", self.max_samples, least=1)
        check_compression(self.compression)


@dataclass(frozen=True, slots=True)
class PackSpec:
    """What ``ps.pack`` adds to writing the samples of a plan.

    Attributes:
        identity: The source and the options: an interrupted or complete run with another identity is another run.
        feature_of: Returns the feature of a field by its name and a value, where the source has none for it.
        numbered_keys: Whether keys are made of the number of the sample (and the name of its file).
    """

    identity: str
    feature_of: Callable[[str, Any], Feature | None]
    numbered_keys: bool

    def with_key(self, sample: Any, number: int) -> Any:
        """Return the sample with its key first, and without its URL."""
        if not isinstance(sample, dict):
            return sample
        fields = {name: value for name, value in sample.items() if name not in ("__key__", "__url__")}
        if not self.numbered_keys:
            return {"__key__": sample["__key__"], **fields} if "__key__" in sample else fields
        stem = sample.get("__key__")
        return {"__key__": f"{number:09d}-{stem}" if stem else f"{number:09d}", **fields}


def write_tables(
    plan: Plan,
    epoch: int,
    url: str,
    options: TableOptions,
    *,
    progress: bool | None = False,
    storage: Storage | None = None,
    spec: PackSpec | None = None,
) -> Packed:
    """Run a plan and write its samples to Parquet files, in order.

    With ``spec``, this is a packing run: for a complete one there is nothing to do, without ``resume`` it replaces the
    files in the folder, and ``progress=True`` shows the bar even if standard error is not a terminal.

    Raises:
        DataError: A sample cannot be stored.
        PlanError: The folder holds other Parquet files, or the plan reads from it.
        StorageError: The folder cannot be written.
    """
    require_arrow("writing Parquet")
    url = os.fspath(url)
    if url.endswith(".parquet"):
        raise PlanError(f"{redacted(url)}: write_parquet writes a folder of files; give a folder")
    program = Program(replace(plan, engine=ordered_engine(plan.engine)))
    check_not_source(program, url, every=True)  # before the folder is created: the source may not exist
    is_packing = spec is not None
    with storage_errors(url), ExitStack() as stack:
        target = stack.enter_context(open_parquet_set(url, storage))
        job = _TableJob(program, epoch, target.draft, options, spec)
        for record in (
            target.finish_publishing(),
            target.complete_run() if is_packing and not options.append else None,
        ):
            if record is not None and options.resume and record["what"] == job.fingerprint():
                return target.result(record)
        existing = target.list_files()
        replaces = is_packing and not options.resume and not options.append
        prefix = "" if replaces else target.name_prefix(existing, options.append, is_packing)
        if existing and options.append and spec is not None and spec.numbered_keys:
            job.first_number = target.count_rows(existing)
        files, skipped = job.run(progress if is_packing else None if progress else False)
        names = [f"{prefix}{number:05d}-of-{len(files):05d}.parquet" for number in range(len(files))]
        rows, nbytes = sum(file.rows for file in files), sum(file.nbytes for file in files)
        record = {"what": job.fingerprint(), "rows": rows, "nbytes": nbytes, "skipped": skipped}
        record |= {"append": options.append, "old": sorted({*existing} - {*names}) if replaces else []}
        target.publish(files, names, record | {"packing": is_packing})
        return Packed(redacted(target.folder), tuple(names), rows, nbytes, skipped)


def estimate_tables(
    plan: Plan, epoch: int, url: str, options: TableOptions, spec: PackSpec, max_samples: int
) -> Packed:
    """Return what would be written: exact for up to ``max_samples`` samples, else estimated from that many.

    Raises:
        DataError: A sample that was encoded for the estimate cannot be stored.
    """
    require_arrow("writing Parquet")
    program = Program(replace(plan, engine=ordered_engine(plan.engine)))
    check_not_source(program, url, every=True)
    total = None if program.stream is not None else program.length(plan.cut)
    with tempfile.TemporaryDirectory(prefix="penstock-parquet-") as draft:
        job = _TableJob(program, epoch, draft, options, spec, keep_files=False)
        files = job.write_first(max_samples if total is not None else None)
    rows, nbytes, count = sum(file.rows for file in files), sum(file.nbytes for file in files), len(files)
    is_estimate = total is not None and rows < total
    if total is not None and is_estimate and rows:
        rows, nbytes = total, nbytes * total // rows
        limits = (size_in_bytes("max_bytes", options.max_bytes), nbytes), (options.max_samples or rows, rows)
        count = max(-(-whole // limit) for limit, whole in limits)
    names = tuple(f"{number:05d}-of-{count:05d}.parquet" for number in range(count))
    return Packed(redacted(url), names, rows, nbytes, 0, is_estimate)


def _mark_array(column: pa.Field, feature: Feature | None) -> pa.Field:
    """Return a column of arrays with the metadata by which Hugging Face recognises them; without, it reads lists."""
    if not (isinstance(feature, Tensor) and 2 <= len(feature.shape) <= 5) or column.metadata:
        return column
    name = f"datasets.features.features.Array{len(feature.shape)}DExtensionType"
    metadata = json.dumps([feature.shape, feature.dtype])
    return column.with_metadata({"ARROW:extension:name": name, "ARROW:extension:metadata": metadata})


class _Checkpoint(NamedTuple):
    """A position from which a run can be resumed."""

    rows: int  # rows before it
    start: dict[str, Any]  # the start of the run, as JSON
    skipped: int  # samples skipped before it


@dataclass(slots=True)
class _TableJob:
    """Writes the samples of a program to draft files, and a journal after each file."""

    program: Program
    epoch: int
    draft: str
    options: TableOptions
    spec: PackSpec | None = None
    keep_files: bool = True  # else a file is deleted when it is complete
    first_number: int = 0  # the number of the first sample
    files: list[WrittenFile] = field(default_factory=list)
    resolved: set[str] = field(default_factory=set)  # fields for which the spec was asked for a feature
    features: dict[str, Any] | None = None  # by field; known from the first samples on
    writer: TableWriter | None = None
    layout: ParquetLayout | None = None  # of the files of an interrupted run
    checkpoints: list[_Checkpoint] = field(default_factory=list)

    def run(self, progress: bool | None) -> tuple[list[WrittenFile], int]:
        """Write the files that are not written yet; return all files, and the number of skipped samples."""
        journal = self._resume() if self.options.resume else None
        if journal is None:
            shutil.rmtree(self.draft, ignore_errors=True)
            os.makedirs(self.draft)
        is_stream = self.program.stream is not None
        order, beginning = self._beginning()
        start = beginning if journal is None else start_from_json(journal["start"])
        rows = sum(file.rows for file in self.files)
        to_drop, skipped = (0, 0) if journal is None else (int(journal["beyond"]), int(journal["skipped"]))
        run = Run(self.program, order, self.epoch, start, tracked=not is_stream)
        self.checkpoints = [] if is_stream else [_Checkpoint(rows - to_drop, start_to_json(start), skipped)]
        total = None if is_stream else self.program.length(self.program.plan.cut)
        remaining = None if total is None else max(0, total - rows)
        self._write(run, rows - to_drop, to_drop, skipped, remaining, progress)
        return self.files, skipped + len(run.skipped)

    def write_first(self, max_samples: int | None) -> list[WrittenFile]:
        """Write the first samples; return the files, of which only rows and sizes are kept."""
        order, beginning = self._beginning()
        run, writer, seen = Run(self.program, order, self.epoch, beginning), self._open_writer(), 0
        try:
            samples = islice(run.items(), max_samples)
            while items := list(islice(samples, _ESTIMATE_BATCH)):
                writer.write(self._to_table(items, seen))
                seen += len(items)
            writer.close()
        finally:
            run.close()
            writer.drop()
        return self.files

    def _beginning(self) -> tuple[Any, Start]:
        """Return the order of the samples, and the start of a run from its beginning."""
        if self.program.stream is not None:
            return None, self.program.stream_start()
        order = self.program.order(self.epoch)
        return order, self.program.start(order, self.program.plan.cut)

    def _open_writer(self) -> TableWriter:
        options = self.options
        return TableWriter(
            self.draft,
            max_bytes=size_in_bytes("max_bytes", options.max_bytes),
            max_rows=options.max_samples,
            compression=options.compression,
            schema=options.schema or self._written_schema(),
            layout=self.layout,
            start=len(self.files),
            finished=self._file_finished,
            describe=self._describe_schema,
        )

    def _write(
        self, run: Run, seen: int, to_drop: int, skipped: int, remaining: int | None, progress: bool | None
    ) -> None:
        """Write the items of a run.

        Args:
            run: The run.
            seen: The number of rows before its first item.
            to_drop: The number of its first items that the files hold already.
            skipped: The number of samples skipped before it.
            remaining: The number of samples to write, if known.
            progress: Whether to show a progress bar.
        """
        writer = self.writer = self._open_writer()
        # Encoding takes longer than reading, so a thread encodes while the run reads on.
        encoder = BackgroundThread("penstock parquet writer", _QUEUED_TABLES)
        try:
            title = "writing" if self.spec is None else "packing"
            with Progress(title, remaining, shown=progress) as bar:
                for items in run.runs():
                    table = self._to_table(items, seen)
                    table, to_drop = table.slice(to_drop), max(0, to_drop - table.num_rows)
                    seen += len(items)
                    checkpoint = None
                    if self.checkpoints:
                        checkpoint = _Checkpoint(seen, start_to_json(run.here()), skipped + len(run.skips_so_far()))
                    encoder(partial(self._append, writer, table, checkpoint))
                    bar.add(table.num_rows)
            encoder(writer.close)
            encoder.finish()
        finally:
            run.close()
            encoder.stop()
            writer.drop()

    def _append(self, writer: TableWriter, table: pa.Table, checkpoint: _Checkpoint | None) -> None:
        writer.write(table)
        if checkpoint is not None:
            self.checkpoints.append(checkpoint)

    def _to_table(self, items: Sequence[Any], seen: int) -> pa.Table:
        if self.spec is not None and not isinstance(items, Columns):
            items = [self.spec.with_key(item, number) for number, item in enumerate(items, self.first_number + seen)]
        try:
            return table_from(items, self._resolve_features(items)).replace_schema_metadata(None)
        except DataError as exc:
            for number, item in enumerate(items):  # name the first sample that fails by itself
                try:
                    table_from([item], self.features)
                except DataError as own:
                    raise DataError(own.problem, None, own.key or str(seen + number)) from exc
            raise DataError(exc.problem, None, f"{seen} to {seen + len(items) - 1}") from exc

    def _resolve_features(self, items: Sequence[Any]) -> dict[str, Any]:
        """Return the known features of fields; PIL images are recognised by their type."""
        if self.features is None:
            self.features = dict(self.program.features())
            first = items[0] if len(items) and not isinstance(items, Columns) else None
            for name, value in first.items() if isinstance(first, dict) else ():
                if type(value).__module__.startswith("PIL."):
                    self.features.setdefault(name, Image())
        if self.spec is not None and not isinstance(items, Columns):
            self._add_spec_features(items, self.spec, self.features)
        return self.features

    def _add_spec_features(self, items: Sequence[Any], spec: PackSpec, features: dict[str, Any]) -> None:
        """Add the features of fields that have a value for the first time."""
        for name, value in (pair for item in items if isinstance(item, dict) for pair in item.items()):
            if name not in self.resolved and value is not None:
                self.resolved.add(name)
                if name not in features and (feature := spec.feature_of(name, value)) is not None:
                    features[name] = feature

    def _describe_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema with the features in its metadata, in the format of Hugging Face."""
        import pyarrow as pa

        known = self.features or {}
        if not any(name in known for name in schema.names):
            return schema
        by_type = features_by_type((column.name, column.type) for column in schema)
        schema = pa.schema([_mark_array(column, known.get(column.name)) for column in schema])
        return schema.with_metadata(metadata_of({name: known.get(name, by_type[name]) for name in schema.names}))

    def _file_finished(self, file: WrittenFile) -> None:
        """Write a journal with the complete files and the last checkpoint before the next file."""
        self.files.append(file)
        if not self.keep_files:
            os.unlink(file.path)
            return
        rows = sum(one.rows for one in self.files)
        while len(self.checkpoints) > 1 and self.checkpoints[1].rows <= rows:
            self.checkpoints.pop(0)
        if self.checkpoints:
            before, start, skipped = self.checkpoints[0]
            journal = {"what": self.fingerprint(), "start": start, "beyond": rows - before, "skipped": skipped}
            layout = None if self.writer is None else self.writer.layout
            journal["layout"] = None if layout is None else [layout.as_is, layout.batch]
            journal["files"] = [[os.path.basename(one.path), one.rows, one.nbytes] for one in self.files]
            replace_file(Path(self.draft, _JOURNAL), json.dumps(journal, separators=(",", ":")).encode())

    def fingerprint(self) -> str:
        """Return a hash of the dataset and the options: only a run with the same fingerprint can be resumed."""
        options, plan = self.options, self.program.plan
        order = "" if self.program.stream is not None else self.program.identity(counts=True)
        source = plan.describe() if self.spec is None else self.spec.identity
        parts = [order, source, self.epoch, plan.seed, options.compression]
        parts += [size_in_bytes("max_bytes", options.max_bytes), options.max_samples, options.append]
        return hashlib.sha256(json.dumps([*parts, str(options.schema)], default=str).encode()).hexdigest()[:32]

    def _resume(self) -> dict[str, Any] | None:
        """Return the journal of an interrupted run with the same fingerprint; None if a file of it is missing."""
        try:
            journal: dict[str, Any] = json.loads(Path(self.draft, _JOURNAL).read_bytes())
            if self.program.stream is not None or journal["what"] != self.fingerprint():
                return None
            files = [WrittenFile(os.path.join(self.draft, name), rows, size) for name, rows, size in journal["files"]]
            as_is, batch = journal["layout"]
            layout = ParquetLayout(self.options.compression, tuple(as_is), int(batch))
            if any(os.stat(file.path).st_size != file.nbytes for file in files):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        self.files, self.layout = files, layout
        return journal

    def _written_schema(self) -> pa.Schema | None:
        """Return the schema of the files of an interrupted run."""
        import pyarrow.parquet as pq

        try:
            return pq.read_schema(self.files[0].path) if self.files else None
        except OSError as exc:
            raise StorageError(f"cannot resume from this file: {exc}", self.files[0].path) from exc
