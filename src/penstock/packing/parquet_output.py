"""What a plan gives, into Parquet files: written hidden, published together, and on where it was interrupted."""

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
from typing import TYPE_CHECKING, Any

from penstock.blobs.background import BackgroundThread
from penstock.blobs.draft import replace_file
from penstock.codecs.features import Feature, Image, Tensor, features_by_type, metadata_of
from penstock.engines import Program, Run, Start
from penstock.engines.progress import Progress
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.tables.arrow_table import table_from
from penstock.formats.tables.parquet_writer import ParquetLayout, TableWriter, Written, check_compression
from penstock.formats.tables.source import require_arrow
from penstock.packing.journal import start_from_json, start_to_json
from penstock.packing.parquet_set import publishing
from penstock.packing.tar_output import Packed, check_elsewhere, failures_of, ordered_engine
from penstock.plan import Columns, Plan, check_count, size_in_bytes
from penstock.storage import Storage, redacted

if TYPE_CHECKING:
    import pyarrow as pa

_JOURNAL = "journal.json"
_TRIED = 64  # samples at a time, where nothing is kept


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How Parquet files are written.

    Raises:
        PlanError: an argument makes no sense.
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
class Embedding:
    """What packing does beyond writing what a plan gives.

    Attributes:
        said: What the source is, and how it is packed: files of another are neither continued nor taken for these.
        feature: Tells by its name and a value what a field holds of which the source says nothing.
        numbered: Keys are made of the number in the files (and the file's name).
    """

    said: str
    feature: Callable[[str, Any], Feature | None]
    numbered: bool

    def named(self, sample: Any, number: int) -> Any:
        """The sample with its key, and without the place it was read from."""
        if not isinstance(sample, dict):
            return sample
        kept = {name: value for name, value in sample.items() if name not in ("__key__", "__url__")}
        if not self.numbered:
            return {"__key__": sample["__key__"], **kept} if "__key__" in sample else kept
        stem = sample.get("__key__")
        return {"__key__": f"{number:09d}-{stem}" if stem else f"{number:09d}", **kept}


def write_tables(
    plan: Plan,
    epoch: int,
    url: str,
    options: TableOptions,
    *,
    progress: bool | None = False,
    storage: Storage | None = None,
    embedding: Embedding | None = None,
) -> Packed:
    """Run a plan and write what comes out into Parquet files, in order.

    With ``embedding`` it is a packing: one that is complete has nothing to do, without ``resume`` it replaces the files
    that are there, and its bar is shown also where there is no terminal (``progress=None``: there only).

    Raises:
        DataError: a sample cannot be stored.
        PlanError: the folder holds such files, or the plan reads from there.
        StorageError: the place cannot be written.
    """
    require_arrow("writing Parquet")
    url = os.fspath(url)
    if url.endswith(".parquet"):
        raise PlanError(f"{redacted(url)}: write_parquet makes a folder of files; give a folder")
    program = Program(replace(plan, engine=ordered_engine(plan.engine)))
    check_elsewhere(program, url, every=True)  # before a folder is made, as what it reads may not be there
    with failures_of(url), ExitStack() as stack:
        place = stack.enter_context(publishing(url, storage))
        job = _Job(program, epoch, place.draft, options, embedding)
        for note in (place.finish(), place.done() if embedding is not None and not options.append else None):
            if note is not None and options.resume and note["what"] == job.what():
                return place.packed(note)
        there = place.sets()
        replaced = embedding is not None and not options.resume and not options.append
        prefix = "" if replaced else place.prefix(there, options.append, embedding is not None)
        if there and options.append and embedding is not None and embedding.numbered:
            job.first = place.rows(there)
        files, skipped = job.run(progress if embedding is not None else None if progress else False)
        names = [f"{prefix}{number:05d}-of-{len(files):05d}.parquet" for number in range(len(files))]
        rows, nbytes = sum(file.rows for file in files), sum(file.nbytes for file in files)
        note = {"what": job.what(), "rows": rows, "nbytes": nbytes, "skipped": skipped, "append": options.append}
        note |= {"old": sorted({*there} - {*names}) if replaced else [], "packing": embedding is not None}
        place.publish(files, names, note)
        return Packed(redacted(place.folder), tuple(names), rows, nbytes, skipped)


def estimate_tables(plan: Plan, epoch: int, url: str, options: TableOptions, embedding: Embedding, some: int) -> Packed:
    """Tell what would be written: exactly where there are no more samples than ``some``, else judged by these.

    Raises:
        DataError: a sample that was looked at cannot be stored.
    """
    require_arrow("writing Parquet")
    program = Program(replace(plan, engine=ordered_engine(plan.engine)))
    check_elsewhere(program, url, every=True)
    total = None if program.stream is not None else program.length(plan.cut)
    with tempfile.TemporaryDirectory(prefix="penstock-parquet-") as draft:
        job = _Job(program, epoch, draft, options, embedding, kept=False)
        files = job.tried(some if total is not None else None)
    rows, nbytes, many = sum(file.rows for file in files), sum(file.nbytes for file in files), len(files)
    guessed = total is not None and rows < total
    if total is not None and guessed and rows:
        rows, nbytes = total, nbytes * total // rows
        limits = (size_in_bytes("max_bytes", options.max_bytes), nbytes), (options.max_samples or rows, rows)
        many = max(-(-whole // part) for part, whole in limits)
    names = tuple(f"{number:05d}-of-{many:05d}.parquet" for number in range(many))
    return Packed(redacted(url), names, rows, nbytes, 0, guessed)


def _as_theirs(field: pa.Field, feature: Feature | None) -> pa.Field:
    """The column, marked as Hugging Face marks arrays: without that it takes them for lists."""
    if not (isinstance(feature, Tensor) and 2 <= len(feature.shape) <= 5) or field.metadata:
        return field
    name = f"datasets.features.features.Array{len(feature.shape)}DExtensionType"
    said = json.dumps([feature.shape, feature.dtype])
    return field.with_metadata({"ARROW:extension:name": name, "ARROW:extension:metadata": said})


@dataclass(slots=True)
class _Job:
    """One writing: what of it is done, and the rest of it."""

    program: Program
    epoch: int
    draft: str
    options: TableOptions
    embedding: Embedding | None = None
    kept: bool = True  # else files go when they are complete
    first: int = 0  # the number of the first sample
    files: list[Written] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)  # fields of which the embedding was asked
    features: dict[str, Any] | None = None  # known when the first samples come
    writer: TableWriter | None = None
    layout: ParquetLayout | None = None  # that of the files before
    marks: list[tuple[int, dict[str, Any], int]] = field(default_factory=list)  # (rows, where the run stands, skipped)

    def run(self, progress: bool | None) -> tuple[list[Written], int]:
        """Write what is not yet written; all files, and how many samples were left out."""
        known = self._taken_up() if self.options.resume else None
        if known is None:
            shutil.rmtree(self.draft, ignore_errors=True)
            os.makedirs(self.draft)
        stream = self.program.stream is not None
        order, begin = self._beginning()
        start = begin if known is None else start_from_json(known["start"])
        rows = sum(file.rows for file in self.files)
        drop, before = (0, 0) if known is None else (int(known["beyond"]), int(known["skipped"]))
        run = Run(self.program, order, self.epoch, start, tracked=not stream)
        self.marks = [] if stream else [(rows - drop, start_to_json(start), before)]
        total = None if stream else self.program.length(self.program.plan.cut)
        self._write(run, rows - drop, drop, None if total is None else max(0, total - rows), progress, before)
        return self.files, before + len(run.skipped)

    def tried(self, most: int | None) -> list[Written]:
        """Write the first samples, and keep nothing but what is known of the files then."""
        order, begin = self._beginning()
        run, writer, seen = Run(self.program, order, self.epoch, begin), self._opened(), 0
        try:
            samples = islice(run.items(), most)
            while items := list(islice(samples, _TRIED)):
                writer.write(self._table(items, seen))
                seen += len(items)
            writer.close()
        finally:
            run.close()
            writer.drop()
        return self.files

    def _beginning(self) -> tuple[Any, Start]:
        """The order of the samples, and where it begins."""
        if self.program.stream is not None:
            return None, self.program.front()
        order = self.program.order(self.epoch)
        return order, self.program.start(order, self.program.plan.cut)

    def _opened(self) -> TableWriter:
        options = self.options
        return TableWriter(
            self.draft,
            max_bytes=size_in_bytes("max_bytes", options.max_bytes),
            max_rows=options.max_samples,
            compression=options.compression,
            schema=options.schema or self._schema(),
            layout=self.layout,
            start=len(self.files),
            finished=self._finished,
            describe=self._described,
        )

    def _write(self, run: Run, seen: int, drop: int, left: int | None, progress: bool | None, before: int) -> None:
        writer = self.writer = self._opened()
        line = BackgroundThread("penstock parquet writer", 4)  # encoding takes longer than reading: let both go on
        try:
            what = "writing" if self.embedding is None else "packing"
            with Progress(what, left, shown=progress) as bar:
                for items in run.runs():
                    table = self._table(items, seen)
                    table, drop = table.slice(drop), max(0, drop - table.num_rows)
                    seen += len(items)
                    here = None if not self.marks else (seen, start_to_json(run.here()), before + len(run.passed()))
                    line(partial(self._append, writer, table, here))
                    bar.add(table.num_rows)
            line(writer.close)
            line.finish()
        finally:
            run.close()
            line.stop()
            writer.drop()

    def _append(self, writer: TableWriter, table: pa.Table, here: tuple[int, dict[str, Any], int] | None) -> None:
        writer.write(table)
        if here is not None:
            self.marks.append(here)

    def _table(self, items: Sequence[Any], seen: int) -> pa.Table:
        if self.embedding is not None and not isinstance(items, Columns):
            items = [self.embedding.named(item, number) for number, item in enumerate(items, self.first + seen)]
        try:
            return table_from(items, self._known(items)).replace_schema_metadata(None)
        except DataError as exc:
            for number, item in enumerate(items):  # name the first sample that is to blame by itself
                try:
                    table_from([item], self.features)
                except DataError as own:
                    raise DataError(own.problem, None, own.key or str(seen + number)) from exc
            raise DataError(exc.problem, None, f"{seen} to {seen + len(items) - 1}") from exc

    def _known(self, items: Sequence[Any]) -> dict[str, Any]:
        """What is known of the fields; pictures are told by themselves."""
        if self.features is None:
            self.features = dict(self.program.features())
            first = items[0] if len(items) and not isinstance(items, Columns) else None
            for name, value in first.items() if isinstance(first, dict) else ():
                if type(value).__module__.startswith("PIL."):
                    self.features.setdefault(name, Image())
        if self.embedding is not None and not isinstance(items, Columns):
            self._tell(items, self.embedding, self.features)
        return self.features

    def _tell(self, items: Sequence[Any], embedding: Embedding, known: dict[str, Any]) -> None:
        """Note what fields hold that come for the first time with a value."""
        for name, value in (pair for item in items if isinstance(item, dict) for pair in item.items()):
            if name not in self.asked and value is not None:
                self.asked.add(name)
                if name not in known and (feature := embedding.feature(name, value)) is not None:
                    known[name] = feature

    def _described(self, schema: pa.Schema) -> pa.Schema:
        """The schema with what is known of its columns, as others read it."""
        import pyarrow as pa

        known = self.features or {}
        if not any(name in known for name in schema.names):
            return schema
        by_type = features_by_type((field.name, field.type) for field in schema)
        schema = pa.schema([_as_theirs(field, known.get(field.name)) for field in schema])
        return schema.with_metadata(metadata_of({name: known.get(name, by_type[name]) for name in schema.names}))

    def _finished(self, file: Written) -> None:
        """Note that a file is complete, and where the rows of the next one begin."""
        self.files.append(file)
        if not self.kept:
            os.unlink(file.path)
            return
        rows = sum(one.rows for one in self.files)
        while len(self.marks) > 1 and self.marks[1][0] <= rows:
            self.marks.pop(0)
        if self.marks:
            at, start, skipped = self.marks[0]
            note = {"what": self.what(), "start": start, "beyond": rows - at, "skipped": skipped}
            layout = None if self.writer is None else self.writer.layout
            note["layout"] = None if layout is None else [layout.as_is, layout.batch]
            note["files"] = [[os.path.basename(one.path), one.rows, one.nbytes] for one in self.files]
            replace_file(Path(self.draft, _JOURNAL), json.dumps(note, separators=(",", ":")).encode())

    def what(self) -> str:
        """A name for what is written: another dataset or other options give another one."""
        own = self.options
        plan = self.program.plan
        order = "" if self.program.stream is not None else self.program.identity(counts=True)
        source = plan.describe() if self.embedding is None else self.embedding.said
        said = [order, source, self.epoch, plan.seed, own.compression]
        said += [size_in_bytes("max_bytes", own.max_bytes), own.max_samples, own.append, str(own.schema)]
        return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()[:32]

    def _taken_up(self) -> dict[str, Any] | None:
        """What an interrupted run of the same left, if it is all there."""
        try:
            note: dict[str, Any] = json.loads(Path(self.draft, _JOURNAL).read_bytes())
            if self.program.stream is not None or note["what"] != self.what():
                return None
            files = [Written(os.path.join(self.draft, name), rows, size) for name, rows, size in note["files"]]
            as_is, batch = note["layout"]
            layout = ParquetLayout(self.options.compression, tuple(as_is), int(batch))
            if any(os.stat(file.path).st_size != file.nbytes for file in files):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        self.files, self.layout = files, layout
        return note

    def _schema(self) -> pa.Schema | None:
        """The columns of what was written before the interruption."""
        import pyarrow.parquet as pq

        try:
            return pq.read_schema(self.files[0].path) if self.files else None
        except OSError as exc:
            raise StorageError(f"cannot be read again: {exc}", self.files[0].path) from exc
