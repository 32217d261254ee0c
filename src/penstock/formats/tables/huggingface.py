"""Hugging Face datasets as a source, and samples as a Hugging Face dataset.

A dataset's Arrow table is read where it lies, in memory or mapped from disk: any worker reads any rows, nothing is
copied before it is asked for, and no picture or sound is decoded before ``decode()``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from penstock.blobs.draft import partial_path
from penstock.codecs.feature_codecs import store_sample, stored, told_by
from penstock.codecs.features import (
    Feature,
    Features,
    arrow_schema,
    arrow_type,
    described,
    features_from,
    metadata_of,
)
from penstock.errors import DataError, MissingExtra, PlanError, StorageError
from penstock.formats.tables.columns import ABSENT, ArrowColumns
from penstock.formats.tables.external_files import holds_files, lacks, only_named, read_named
from penstock.formats.tables.values import values_of
from penstock.order import I64
from penstock.plan import ByObject, Fields, Resources
from penstock.plan.values import Workers
from penstock.storage.protocol import own

_LOT = 1000  # samples of one record batch that is written
_MARKS = ("dataset_dict.json", "state.json")  # what stands in folders that were saved to disk


@dataclass(frozen=True, slots=True)
class HuggingFaceSource:
    """A dataset, a builder (or its class), or the name or folder of a dataset, which is loaded when it is opened."""

    what: ByObject | str
    split: str | None = None
    workers: Workers = None

    @property
    def streams(self) -> bool:
        """Whether it can only be read front to back: examples are made, or come, one after the other."""
        return not isinstance(self.what, str) and not _is_table(self.what.value)

    @property
    def random_access(self) -> bool:
        """A table is read anywhere."""
        return not self.streams

    @property
    def resources(self) -> Resources | None:
        """A pool of its own only if asked for: rows of a table are cut out, not made."""
        return None if self.workers is None else Resources(self.workers)

    def open(self) -> TableReader | StreamReader | BuilderReader:
        """Load what is only named.

        Raises:
            MissingExtra: the package datasets is not installed.
            PlanError: it has several splits, and none is chosen.
            StorageError: it is a name, and cannot be loaded.
        """
        what = _load(self.what, self.split) if isinstance(self.what, str) else self.what.value
        if _is_builder(what):
            return BuilderReader(what, self.split)
        return TableReader(what) if _is_table(what) else StreamReader(what)

    def describe(self) -> str:
        """The call that made it."""
        if isinstance(self.what, str):
            chosen = "" if self.split is None else f", split={self.split!r}"
            return f"from_huggingface({self.what!r}{chosen})"
        what = self.what.value
        many = f", {len(what)} rows" if _is_table(what) else ""
        return f"from_huggingface({what.__name__ if isinstance(what, type) else type(what).__name__}{many})"


def check_dataset(what: Any) -> None:
    """Require something that can be read.

    Raises:
        PlanError: it is nothing of Hugging Face's, or has a transform of its own.
    """
    if _is_builder(what):
        return
    if not readable(what):
        raise PlanError(f"from_huggingface needs a dataset, a builder, a folder or a name, not {type(what).__name__}")
    if _is_table(what) and what.format["type"] == "custom":
        raise PlanError("the dataset has a transform: take it off with_format(None), and give its function to map()")


def readable(what: Any) -> bool:
    """Whether it is a dataset or a builder of Hugging Face's."""
    return _is_builder(what) or _is_table(what) or (hasattr(what, "features") and hasattr(what, "num_shards"))


def _is_table(what: Any) -> bool:
    return hasattr(what, "data") and hasattr(what, "_indices")


def _is_builder(what: Any) -> bool:
    return hasattr(what, "_generate_examples") and hasattr(what, "_split_generators")


def _load(name: str, split: str | None) -> Any:
    """Load a dataset by folder or name; once a process, while a folder is not written anew."""
    saved = [os.path.join(name, mark) for mark in _MARKS if os.path.exists(os.path.join(name, mark))]
    age = [os.stat(path).st_mtime_ns for path in saved]
    key = ("huggingface", os.path.abspath(name) if saved else name, split, *age)
    return own(key, lambda: _loaded(name, split, saved))


def _loaded(name: str, split: str | None, saved: Sequence[str]) -> Any:
    datasets = _datasets()
    try:
        found = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=split)
    except Exception as exc:  # whatever the library, the hub or the network may raise
        text = (str(exc).splitlines() or [type(exc).__name__])[0]
        raise StorageError(f"the dataset cannot be loaded: {text}", name) from exc
    if not isinstance(found, Mapping):
        return found
    chosen = split or (next(iter(found)) if len(found) == 1 else None)
    if chosen not in found:
        way = f"split=, or in a command as hf:{name}#{next(iter(found), '')}"
        raise PlanError(f"{name!r} has the splits {', '.join(found)}: choose one with {way}")
    return found[chosen]


class TableReader:
    """One shard: the rows of a dataset's table, in the order of its indices."""

    def __init__(self, dataset: Any) -> None:
        self.names = ["rows"]
        self.features: Features = features_from(dataset.features.to_dict())
        columns = [name for name in dataset.format["columns"] or self.features if name in self.features]
        self.features = {name: self.features[name] for name in columns}
        table = dataset.data.table.select(columns)
        table = table.replace_schema_metadata(metadata_of(self.features))
        self._batches = [batch for batch in table.to_batches() if batch.num_rows]
        self._edges = np.cumsum([0, *(batch.num_rows for batch in self._batches)], dtype=np.int64)
        self._indices: I64 | None = None
        if dataset._indices is not None:
            self._indices = dataset._indices.table.column(0).to_numpy().astype(np.int64)
        self._count = len(dataset)
        self._row_bytes = table.nbytes / max(1, table.num_rows)
        self._name = str(dataset.info.dataset_name or "dataset")
        self._media = {name: feature for name, feature in self.features.items() if holds_files(feature)}

    def counts(self, scan: bool) -> I64 | None:
        """The number of rows."""
        return np.array([self._count], np.int64)

    def count(self, shard: int) -> int:
        """The number of rows."""
        return self._count

    def sizes(self) -> list[int]:
        """Not asked: the count is known."""
        return [0]

    def key(self, shard: int, index: int) -> str | None:
        """The row."""
        return f"row {index}"

    def url(self, shard: int) -> str:
        """The dataset's name: its rows lie in files that nobody named."""
        return self._name

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedDatasetRows:
        """Remember which."""
        return LocatedDatasetRows(self, index, fields, np.full(len(index), int(self._row_bytes), np.int64))

    def read(self, index: I64, fields: Fields) -> tuple[Sequence[Any], dict[int, DataError]]:
        """Cut rows out of the table; files that it only names are read into it."""
        row = index if self._indices is None else self._indices[index]
        slot = np.searchsorted(self._edges, row, "right") - 1
        used, slot = np.unique(slot, return_inverse=True)
        batches = [self._batches[number] for number in used.tolist()]
        wanted = {name: name for name in self.features if fields.wants(name)}
        row = row - self._edges[used][slot]
        columns = ArrowColumns(batches, row, slot if len(batches) > 1 else None, wanted, self._row_bytes)
        media = {name: feature for name, feature in self._media.items() if name in wanted}
        return self._with_files(columns, media, index) if media else (columns, {})

    def _with_files(
        self, columns: ArrowColumns, media: Features, index: I64
    ) -> tuple[Sequence[Any], dict[int, DataError]]:
        batch = columns.batch()
        bad: dict[int, DataError] = {}
        whole = True
        for name, feature in media.items():
            array = batch.column(name)
            if not lacks(array, feature):
                continue
            whole = False
            if (ready := only_named(array, feature)) is not None:
                batch = batch.set_column(place := batch.schema.get_field_index(name), batch.schema.field(place), ready)
                continue
            found: list[Any] = []
            for number, value in enumerate(values_of(array)):
                try:
                    found.append(stored(feature, value, read=read_named))
                except (OSError, ValueError) as exc:
                    problem = f"field {name!r}: {exc}"
                    bad.setdefault(number, DataError(problem, self._name, self.key(0, int(index[number]))))
                    found.append(None)
            batch = _replaced(batch, name, found, feature)
        if whole:
            return columns, {}
        row = np.arange(len(index))
        row[list(bad)] = ABSENT
        return ArrowColumns([batch], row, row_bytes=batch.nbytes / max(1, len(index))), bad


def _replaced(batch: Any, name: str, values: list[Any], feature: Feature) -> Any:
    import pyarrow as pa

    place = batch.schema.get_field_index(name)
    array = pa.array(values, arrow_type(feature))
    return batch.set_column(place, batch.schema.field(place).with_type(array.type), array)


@dataclass(slots=True)
class LocatedDatasetRows:
    """Rows that will be cut out."""

    reader: TableReader
    index: I64
    fields: Fields
    nbytes: I64

    def take(self, sel: Any) -> LocatedDatasetRows:
        """Some of them."""
        return LocatedDatasetRows(self.reader, self.index[sel], self.fields, self.nbytes[sel])

    def read(self) -> tuple[Sequence[Any], dict[int, DataError]]:
        """The rows, as columns."""
        return self.reader.read(self.index, self.fields) if len(self.index) else ([], {})


class StreamReader:
    """A streaming dataset: front to back, pictures and sounds as their bytes."""

    def __init__(self, dataset: Any) -> None:
        known = dataset.features
        self._dataset = dataset if known is None else dataset.decode(False)
        self.features: Features | None = None if known is None else features_from(known.to_dict())

    def stream(self, fields: Fields) -> Iterator[tuple[Any, DataError | None]]:
        """The samples as they come."""
        media = {name: one for name, one in (self.features or {}).items() if holds_files(one) and fields.wants(name)}
        for number, example in enumerate(self._dataset):
            sample = {name: value for name, value in example.items() if fields.wants(name)}
            yield _tried(lambda: sample | _stored_files(media, sample), "dataset", f"row {number}")  # noqa: B023


def _stored_files(media: Features, sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: stored(feature, sample.get(name), read=read_named) for name, feature in media.items()}


def _tried(make: Callable[[], Any], url: str, key: str) -> tuple[Any, DataError | None]:
    try:
        return make(), None
    except (OSError, TypeError, ValueError) as exc:
        error = DataError(str(exc), url, key)
        error.__cause__ = exc
        return None, error


class BuilderReader:
    """What a builder's ``_generate_examples`` gives, stored by its features: no other library decodes or encodes."""

    def __init__(self, builder: Any, split: str | None) -> None:
        self._builder = builder() if isinstance(builder, type) else builder
        told = self._builder.info.features
        if told is None:
            raise PlanError(f"{type(self._builder).__name__} does not tell its features in _info()")
        self.features: Features = features_from(told.to_dict())
        self._split = split

    def stream(self, fields: Fields) -> Iterator[tuple[Any, DataError | None]]:
        """The examples as they are made."""
        wanted = {name: feature for name, feature in self.features.items() if fields.wants(name)}
        name = type(self._builder).__name__
        for key, example in self._builder._generate_examples(**self._arguments()):
            sample = {field: value for field, value in example.items() if field in wanted or field not in self.features}
            yield _tried(lambda: store_sample(wanted, sample, read=read_named), name, str(key))  # noqa: B023

    def _arguments(self) -> dict[str, Any]:
        datasets, builder = _datasets(), self._builder
        manager = datasets.DownloadManager(
            dataset_name=builder.dataset_name,
            data_dir=builder.config.data_dir,
            download_config=datasets.DownloadConfig(cache_dir=builder._cache_downloaded_dir),
            base_path=builder.base_path,
        )
        splits = {str(one.name): one.gen_kwargs for one in builder._split_generators(manager)}
        chosen = self._split or (next(iter(splits)) if len(splits) == 1 else None)
        if chosen not in splits:
            raise PlanError(f"{type(builder).__name__} has the splits {', '.join(splits)}: choose one with split=")
        arguments: dict[str, Any] = splits[chosen]
        return arguments


def collected(
    samples: Iterable[Any],
    known: Mapping[str, Feature],
    given: Mapping[str, Feature] | None,
    path: str | os.PathLike[str] | None,
) -> Any:
    """Make a ``datasets.Dataset`` of samples, in memory or in an Arrow file at ``path``.

    Args:
        samples: They.
        known: What their sources say of fields, believed where the values allow it.
        given: What the user says of all fields; then nothing is guessed.
        path: A file, which appears when it is whole.

    Raises:
        DataError: a sample is not what the features say.
        MissingExtra: the package datasets is not installed.
        StorageError: the file cannot be written.
    """
    datasets = _datasets()
    rows = enumerate(_fields(sample) for sample in samples)
    first = list(islice(rows, _LOT))
    try:
        features = dict(given) if given is not None else told_by((sample for _, sample in first), known)
    except ValueError as exc:
        raise DataError(str(exc)) from exc
    theirs = datasets.Features.from_dict(described(features))
    info = datasets.DatasetInfo(features=theirs)
    batches = _batches(chain(first, rows), features, theirs)
    if path is None:
        import pyarrow as pa

        table = pa.Table.from_batches(batches, schema=theirs.arrow_schema)
        return datasets.Dataset(datasets.table.InMemoryTable(table), info=info)
    _write(Path(path), batches, theirs.arrow_schema)
    return datasets.Dataset.from_file(os.fspath(path), info=info)


def _fields(sample: Any) -> dict[str, Any]:
    if not isinstance(sample, dict):
        raise DataError(f"a dataset holds samples with fields, not {type(sample).__name__}")
    return {name: value for name, value in sample.items() if name != "__url__"}


def _batches(rows: Iterator[tuple[int, dict[str, Any]]], features: Features, theirs: Any) -> Iterator[Any]:
    import pyarrow as pa

    schema = arrow_schema(features)
    while lot := list(islice(rows, _LOT)):
        ready = []
        for number, sample in lot:
            try:
                ready.append(store_sample(features, sample))
            except ValueError as exc:
                raise DataError(str(exc), None, f"sample {number}") from exc
        try:
            table = pa.Table.from_pylist(ready, schema=schema)
        except (pa.ArrowException, TypeError, OverflowError) as exc:
            problem = str(exc).splitlines()[0]
            raise DataError(f"the samples from {lot[0][0]} on are not what the features say: {problem}") from exc
        yield from _datasets().table.table_cast(table, theirs.arrow_schema).combine_chunks().to_batches()


def _write(target: Path, batches: Iterator[Any], schema: Any) -> None:
    import pyarrow as pa

    draft = partial_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("xb") as file:
            with pa.ipc.new_stream(file, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as exc:
        if isinstance(exc, StorageError):
            raise
        raise StorageError(f"cannot write: {exc.strerror or exc}", str(target)) from exc
    finally:
        draft.unlink(missing_ok=True)


def _datasets() -> Any:
    try:
        import datasets
        import datasets.table
    except ImportError as exc:
        raise MissingExtra("Hugging Face datasets", "huggingface") from exc
    return datasets
