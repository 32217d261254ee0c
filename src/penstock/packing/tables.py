"""What a plan gives, into Parquet files: written hidden, published together, and on where it was interrupted."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.codecs.features import Feature, Image, Tensor, features_by_type, metadata_of
from penstock.engines import Program, Run
from penstock.engines.progress import Progress
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.parquet.layout import Layout
from penstock.formats.parquet.source import require_arrow
from penstock.formats.parquet.tables import table_from
from penstock.formats.parquet.writer import TableWriter, Written, check_compression
from penstock.formats.publish import replace_file
from penstock.formats.tar.line import Line
from penstock.formats.tar.names import on_disk
from penstock.packing.journal import start_from_json, start_to_json
from penstock.packing.turn import turn
from penstock.packing.writing import Packed, failures_of, in_order
from penstock.plan import Columns, Plan, check_count, size_in_bytes
from penstock.storage import Storage, local_path, open_storage, shown

if TYPE_CHECKING:
    import pyarrow as pa

_DRAFT = ".penstock-parquet"  # the folder of what is not published, in the target
_JOURNAL = "journal.json"
_NAMES = "names.json"  # the names that the files are being given
_NAME = re.compile(r"(?:append-(\d{3,})-)?\d{5,}-of-\d{5,}\.parquet")
_PIECE = 8 << 20


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


def write_tables(
    plan: Plan, epoch: int, url: str, options: TableOptions, *, progress: bool = False, storage: Storage | None = None
) -> Packed:
    """Run a plan and write what comes out into Parquet files, in order.

    Raises:
        DataError: a sample cannot be stored.
        PlanError: the folder holds such files, or the plan reads from there.
        StorageError: the place cannot be written.
    """
    require_arrow("writing Parquet")
    url = os.fspath(url)
    if url.endswith(".parquet"):
        raise PlanError(f"{shown(url)}: write_parquet makes a folder of files; give a folder")
    program = Program(replace(plan, engine=in_order(plan.engine)))
    with failures_of(url), ExitStack() as stack:
        place = stack.enter_context(_place(url, storage))
        job = _Job(program, epoch, place.draft, options)
        if (note := place.finish()) is not None and options.resume and note["what"] == job.what():
            return _packed(place, note)
        prefix = place.prefix(options.append)
        _check_elsewhere(program, place)
        files, skipped = job.run(progress)
        names = [f"{prefix}{number:05d}-of-{len(files):05d}.parquet" for number in range(len(files))]
        rows, nbytes = sum(file.rows for file in files), sum(file.nbytes for file in files)
        note = {"what": job.what(), "rows": rows, "nbytes": nbytes, "skipped": skipped}
        place.publish(files, names, note)
        return Packed(shown(place.folder), tuple(names), rows, nbytes, skipped)


def _as_theirs(field: pa.Field, feature: Feature | None) -> pa.Field:
    """The column, marked as Hugging Face marks arrays: without that it takes them for lists."""
    if not (isinstance(feature, Tensor) and 2 <= len(feature.shape) <= 5) or field.metadata:
        return field
    name = f"datasets.features.features.Array{len(feature.shape)}DExtensionType"
    said = json.dumps([feature.shape, feature.dtype])
    return field.with_metadata({"ARROW:extension:name": name, "ARROW:extension:metadata": said})


def _packed(place: _Place, note: dict[str, Any]) -> Packed:
    names = tuple(name for _, name in note["files"])
    return Packed(shown(place.folder), names, note["rows"], note["nbytes"], note["skipped"])


@contextmanager
def _place(url: str, storage: Storage | None) -> Iterator[_Place]:
    """The folder to write to, and one for drafts: in it where it is on a disk, else a temporary one."""
    if on_disk(url):
        folder = local_path(url).rstrip("/") or "/"
        os.makedirs(folder, exist_ok=True)
        with turn(folder):
            yield _Place(folder, os.path.join(folder, _DRAFT), None)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-parquet-") as draft:
        yield _Place(url.rstrip("/"), draft, open_storage(url, storage))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where files are published, and where they are until then."""

    folder: str
    draft: str
    storage: Storage | None  # None: it is on a disk

    def prefix(self, append: bool) -> str:
        """What the names of a new set begin with.

        Raises:
            PlanError: there is a set, and nobody said that another one goes beside it.
        """
        if self.storage is None:
            names = os.listdir(self.folder)
        else:
            names = [one.url.rpartition("/")[2] for one in self.storage.list(self.folder + "/")]
        found = [match for match in map(_NAME.fullmatch, names) if match]
        if not found:
            return ""
        if not append:
            raise PlanError(
                f"{shown(self.folder)} holds {len(found)} Parquet files; append=True adds a set beside them, "
                "or choose another folder"
            )
        return f"append-{1 + max(int(match[1] or 0) for match in found):03d}-"

    def finish(self) -> dict[str, Any] | None:
        """Give the rest of their names to the files of a run that was interrupted while it did so; what it wrote."""
        try:
            note: dict[str, Any] = json.loads(Path(self.draft, _NAMES).read_bytes())
        except (OSError, ValueError):
            return None
        for own, name in note["files"]:
            if os.path.exists(path := os.path.join(self.draft, own)):
                os.replace(path, os.path.join(self.folder, name))
        shutil.rmtree(self.draft, ignore_errors=True)
        return note

    def publish(self, files: Sequence[Written], names: Sequence[str], note: dict[str, Any]) -> None:
        """Give all files their names, one right after the other."""
        if self.storage is None:
            note["files"] = [[os.path.basename(file.path), name] for file, name in zip(files, names, strict=True)]
            replace_file(Path(self.draft, _NAMES), json.dumps(note).encode())
            self.finish()
            return
        with ExitStack() as stack:
            uploads = []
            for file, name in zip(files, names, strict=True):
                upload = stack.enter_context(self.storage.put(f"{self.folder}/{name}", size_hint=file.nbytes))
                with open(file.path, "rb") as source:
                    while piece := source.read(_PIECE):
                        upload.write(piece)
                uploads.append(upload)
            for upload in uploads:
                upload.commit()


def _check_elsewhere(program: Program, place: _Place) -> None:
    """Refuse to write where the plan reads."""
    if program.stream is not None:
        return
    written = os.path.realpath(place.folder) if place.storage is None else place.folder
    for reader in program.readers:
        for shard in range(len(reader.names)):
            folder = os.path.dirname(reader.url(shard)) or "."
            if written == (os.path.realpath(folder) if place.storage is None else folder):
                raise PlanError(f"the dataset reads from {shown(place.folder)}, where it is to be written")


@dataclass(slots=True)
class _Job:
    """One writing: what of it is done, and the rest of it."""

    program: Program
    epoch: int
    draft: str
    options: TableOptions
    files: list[Written] = field(default_factory=list)
    features: dict[str, Any] | None = None  # known when the first samples come
    writer: TableWriter | None = None
    layout: Layout | None = None  # that of the files before
    marks: list[tuple[int, dict[str, Any], int]] = field(default_factory=list)  # (rows, where the run stands, skipped)

    def run(self, progress: bool) -> tuple[list[Written], int]:
        """Write what is not yet written; all files, and how many samples were left out."""
        known = self._taken_up() if self.options.resume else None
        if known is None:
            shutil.rmtree(self.draft, ignore_errors=True)
            os.makedirs(self.draft)
        stream = self.program.stream is not None
        order = None if stream else self.program.order(self.epoch)
        begin = self.program.front() if order is None else self.program.start(order, self.program.plan.cut)
        start = begin if known is None else start_from_json(known["start"])
        rows = sum(file.rows for file in self.files)
        drop, before = (0, 0) if known is None else (int(known["beyond"]), int(known["skipped"]))
        run = Run(self.program, order, self.epoch, start, tracked=not stream)
        self.marks = [] if stream else [(rows - drop, start_to_json(start), before)]
        total = None if stream else self.program.length(self.program.plan.cut)
        self._write(run, rows - drop, drop, None if total is None else max(0, total - rows), progress, before)
        return self.files, before + len(run.skipped)

    def _write(self, run: Run, seen: int, drop: int, left: int | None, progress: bool, before: int) -> None:
        options = self.options
        writer = self.writer = TableWriter(
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
        line = Line("penstock parquet writer", 4)  # encoding takes longer than reading: let both go on
        try:
            with Progress("writing", left, shown=None if progress else False) as bar:
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
        return self.features

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
        said = [order, plan.describe(), self.epoch, plan.seed, own.compression]
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
            layout = Layout(self.options.compression, tuple(as_is), int(batch))
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
