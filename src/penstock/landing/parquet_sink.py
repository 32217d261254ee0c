"""Writes samples to Parquet files: tables with typed features, and a checkpoint after every file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from penstock.blobs.background import BackgroundThread
from penstock.codecs.features import Feature, Image, Tensor, features_by_type, metadata_of
from penstock.engines import Program
from penstock.errors import DataError, PlanError, StorageError
from penstock.formats.manifest import ShardEntry, file_sha256
from penstock.formats.tables.arrow_table import table_from
from penstock.formats.tables.parquet_writer import ParquetLayout, TableWriter, WrittenFile, check_compression
from penstock.formats.tables.source import PARQUET_SUFFIXES
from penstock.landing.commit import OpenSet, Packed, numbered_key
from penstock.landing.position import Positions, ResumableRun
from penstock.landing.target import Target, check_suffix, target_text
from penstock.plan import Columns, check_count, size_in_bytes
from penstock.storage import Storage, local_path, redacted
from penstock.storage.protocol import scheme

if TYPE_CHECKING:
    import pyarrow as pa

_ESTIMATE_BATCH = 64  # samples that a dry run encodes at a time
_QUEUED_TABLES = 4  # tables that wait to be encoded
_NO_LIMIT = 1 << 62  # bytes


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How Parquet files are written.

    Raises:
        PlanError: An argument is out of range.
    """

    max_bytes: float | str | None = "500MB"
    max_samples: int | None = None
    compression: str = "zstd"
    schema: pa.Schema | None = None

    def __post_init__(self) -> None:
        if self.max_bytes is not None:
            size_in_bytes("max_bytes", self.max_bytes)
        if self.max_samples is not None:
            check_count("max_samples", self.max_samples, least=1)
        check_compression(self.compression)

    @property
    def limited(self) -> bool:
        """Whether a range may be more than one file."""
        return self.max_bytes is not None or self.max_samples is not None

    def options(self) -> dict[str, Any]:
        """Return what determines the files, for the comparison with an interrupted run."""
        limit = None if self.max_bytes is None else self.file_bytes
        schema = None if self.schema is None else str(self.schema)
        return {"max_bytes": limit, "max_samples": self.max_samples, "compression": self.compression, "schema": schema}

    @property
    def file_bytes(self) -> int:
        """The maximum size of a file."""
        return _NO_LIMIT if self.max_bytes is None else size_in_bytes("max_bytes", self.max_bytes)


@dataclass(frozen=True, slots=True)
class PackSpec:
    """What ``ps.pack`` adds to writing the samples of a plan.

    Attributes:
        feature_of: Returns the feature of a field by its name and a value, where the source has none for it.
        numbered_keys: Whether keys are made of the number of the sample (and the name of its file).
    """

    feature_of: Callable[[str, Any], Feature | None]
    numbered_keys: bool

    def with_key(self, sample: Any, number: str) -> Any:
        """Return the sample with its key first, and without its URL."""
        if not isinstance(sample, dict):
            return sample
        fields = {name: value for name, value in sample.items() if name not in ("__key__", "__url__")}
        if not self.numbered_keys:
            return {"__key__": sample["__key__"], **fields} if "__key__" in sample else fields
        return {"__key__": numbered_key(sample, number), **fields}


def parquet_target(url: str | os.PathLike[str], storage: Storage | None) -> Target:
    """Return the target for Parquet files: a folder.

    Raises:
        PlanError: The URL is a file.
    """
    text = target_text(url)
    if text.endswith(".parquet"):
        raise PlanError(f"{redacted(text)}: write_parquet writes a folder of files; give a folder")
    check_suffix(text, "Parquet files", PARQUET_SUFFIXES)
    folder = (local_path(text) if scheme(text) == "file" else text).rstrip("/") or "/"
    return Target(folder, "parquet", PARQUET_SUFFIXES, "", storage)


class ParquetSink:
    """Writes samples to Parquet files of a bounded size, which a thread encodes.

    Args:
        declared: The features that the sources declare, by field.
        options: How the files are written.
        spec: What ``ps.pack`` adds.
    """

    def __init__(self, declared: Mapping[str, Feature], options: TableOptions, spec: PackSpec | None = None) -> None:
        self._declared, self._options, self._spec = declared, options, spec
        self._features: dict[str, Any] | None = None  # by field; known from the first samples on
        self._resolved: set[str] = set()  # fields for which the spec was asked for a feature
        self._encoder: BackgroundThread | None = None
        self._number_text: Callable[[int], str] = "{:09d}".format
        self._seen = self._rows = 0  # samples seen; in complete files

    def open(self, landing: OpenSet, samples: Positions) -> None:
        """Begin with the file after those that are complete."""
        self._landing, self._samples, self._number_text = landing, samples, landing.number_text
        self._seen = self._rows = sum(entry.samples for entry in landing.entries.values())
        schema, layout = self._options.schema, None
        if landing.entries:
            first = os.path.join(landing.drafts, next(iter(landing.entries)))
            as_is, batch = landing.state["layout"]
            schema, layout = schema or _schema_of(first), ParquetLayout(self._options.compression, tuple(as_is), batch)
        self._writer = self._open_writer(landing.drafts, len(landing.entries), schema, layout, self._complete)
        # Encoding takes longer than reading, so a thread encodes while the run reads on.
        self._encoder = BackgroundThread("penstock parquet writer", _QUEUED_TABLES)

    def add(self, items: Sequence[Any]) -> None:
        """Write samples.

        Raises:
            DataError: A sample cannot be stored.
        """
        assert self._encoder is not None
        self._encoder(partial(self._writer.write, self._to_table(items)))

    def close(self) -> None:
        """Complete the last file; a set without any rows is one file without rows."""
        assert self._encoder is not None
        landing = self._landing
        is_first = not self._seen and not landing.entries and not landing.adds and not landing.may_be_empty
        self._encoder(partial(self._writer.close, is_first))
        self._encoder.finish()

    def drop(self) -> None:
        """End without completing the current file."""
        if self._encoder is not None:
            self._encoder.stop()
            self._writer.drop()

    def estimate(
        self, program: Program, epoch: int, folder: str, max_samples: int, shards: int | None = None
    ) -> Packed:
        """Return what would be written: exact for up to ``max_samples`` samples, else estimated from that many.

        Raises:
            DataError: A sample that was encoded for the estimate cannot be stored.
        """
        files: list[WrittenFile] = []
        samples = ResumableRun(program, epoch)
        total = samples.total

        def measured(file: WrittenFile) -> None:
            files.append(file)
            os.unlink(file.path)

        with closing(samples), tempfile.TemporaryDirectory(prefix="penstock-parquet-") as drafts:
            writer = self._open_writer(drafts, 0, self._options.schema, None, measured)
            items = (item for block in samples for item in block)
            first = islice(items, max_samples if total is not None else None)
            try:
                while batch := list(islice(first, _ESTIMATE_BATCH)):
                    writer.write(self._to_table(batch))
                writer.close()
            finally:
                writer.drop()
        rows, nbytes, count = sum(file.rows for file in files), sum(file.nbytes for file in files), len(files)
        is_estimate = total is not None and rows < total
        if total is not None and is_estimate and rows:
            rows, nbytes = total, nbytes * total // rows
            limits = (
                (self._options.file_bytes, nbytes),
                (self._options.max_samples or rows, rows),
            )
            count = max(-(-whole // limit) for limit, whole in limits)
        if shards is not None:
            count = min(shards, max(rows, count))
        names = tuple(f"{number:05d}-of-{shards or count:05d}.parquet" for number in range(count))
        return Packed(redacted(folder), names, rows, nbytes, 0, is_estimate)

    def _open_writer(
        self,
        folder: str,
        start: int,
        schema: pa.Schema | None,
        layout: ParquetLayout | None,
        finished: Callable[[WrittenFile], object],
    ) -> TableWriter:
        return TableWriter(
            folder,
            max_bytes=self._options.file_bytes,
            max_rows=self._options.max_samples,
            compression=self._options.compression,
            schema=schema,
            layout=layout,
            start=start,
            finished=finished,
            describe=self._describe_schema,
        )

    def _complete(self, file: WrittenFile) -> None:
        self._rows += file.rows
        layout = self._writer.layout
        state = {"layout": None if layout is None else [layout.as_is, layout.batch]}
        checksum = "" if self._spec is None else file_sha256(file.path)
        entry = ShardEntry(os.path.basename(file.path), file.rows, file.nbytes, checksum)
        self._landing.checkpoint(entry, self._samples.position(self._rows), state)

    def _to_table(self, items: Sequence[Any]) -> pa.Table:
        seen = self._seen
        self._seen += len(items)
        if self._spec is not None and not isinstance(items, Columns):
            items = [self._spec.with_key(item, self._number_text(number)) for number, item in enumerate(items, seen)]
        try:
            return table_from(items, self._resolve_features(items)).replace_schema_metadata(None)
        except DataError as exc:
            for number, item in enumerate(items):  # name the first sample that fails by itself
                try:
                    table_from([item], self._features)
                except DataError as own:
                    raise DataError(own.problem, None, own.key or str(seen + number)) from exc
            raise DataError(exc.problem, None, f"{seen} to {seen + len(items) - 1}") from exc

    def _resolve_features(self, items: Sequence[Any]) -> dict[str, Any]:
        """Return the known features of fields; PIL images are recognised by their type."""
        if self._features is None:
            self._features = dict(self._declared)
            first = items[0] if len(items) and not isinstance(items, Columns) else None
            for name, value in first.items() if isinstance(first, dict) else ():
                if type(value).__module__.startswith("PIL."):
                    self._features.setdefault(name, Image())
        if self._spec is not None and not isinstance(items, Columns):
            self._add_spec_features(items, self._spec, self._features)
        return self._features

    def _add_spec_features(self, items: Sequence[Any], spec: PackSpec, features: dict[str, Any]) -> None:
        """Add the features of fields that have a value for the first time."""
        for name, value in (pair for item in items if isinstance(item, dict) for pair in item.items()):
            if name not in self._resolved and value is not None:
                self._resolved.add(name)
                if name not in features and (feature := spec.feature_of(name, value)) is not None:
                    features[name] = feature

    def _describe_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema with the features in its metadata, in the format of Hugging Face."""
        import pyarrow as pa

        known = self._features or {}
        if not any(name in known for name in schema.names):
            return schema
        by_type = features_by_type((column.name, column.type) for column in schema)
        schema = pa.schema([_mark_array(column, known.get(column.name)) for column in schema])
        return schema.with_metadata(metadata_of({name: known.get(name, by_type[name]) for name in schema.names}))


def _schema_of(path: str) -> pa.Schema:
    """Return the schema of a file of an interrupted run."""
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(os.path.abspath(path))  # Arrow takes ~ for the home folder
    except OSError as exc:
        raise StorageError(f"cannot resume from this file: {exc}", path) from exc


def _mark_array(column: pa.Field, feature: Feature | None) -> pa.Field:
    """Return a column of arrays with the metadata by which Hugging Face recognises them; without, it reads lists."""
    if not (isinstance(feature, Tensor) and 2 <= len(feature.shape) <= 5) or column.metadata:
        return column
    name = f"datasets.features.features.Array{len(feature.shape)}DExtensionType"
    metadata = json.dumps([feature.shape, feature.dtype])
    return column.with_metadata({"ARROW:extension:name": name, "ARROW:extension:metadata": metadata})
