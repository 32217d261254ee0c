"""Hugging Face datasets as a source, and samples as a Hugging Face dataset.

A dataset's Arrow table is read where it is, in memory or mapped from disk: any worker reads any row, nothing is copied
before it is asked for, and no image or audio is decoded before ``decode()``.
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
from penstock.codecs.feature_codecs import infer_features, store_sample, stored
from penstock.codecs.features import (
    Feature,
    Features,
    arrow_schema,
    arrow_type,
    described,
    features_from,
    metadata_of,
)
from penstock.errors import DataError, PlanError, StorageError, import_extra
from penstock.formats.tables.columns import ABSENT, ArrowColumns
from penstock.formats.tables.external_files import embed_files, has_external_files, has_media, read_external_file
from penstock.formats.tables.values import values_of
from penstock.order import I64
from penstock.plan import ByObject, Fields, Reader, Resources, Source, StreamReader, Traits
from penstock.plan.values import Workers
from penstock.storage.protocol import per_process

_BATCH_ROWS = 1000  # samples of one record batch that is written
_SAVED_FILES = ("dataset_dict.json", "state.json")  # one of them is in each folder that save_to_disk wrote


@dataclass(frozen=True, slots=True)
class HuggingFaceSource(Source):
    """A dataset, a builder (or its class), or the name or folder of a dataset, which is loaded when it is opened."""

    dataset: ByObject | str
    split: str | None = None
    workers: Workers = None

    @property
    def streams(self) -> bool:
        """Whether examples can only be read front to back: a streaming dataset, or a builder that generates them."""
        return not isinstance(self.dataset, str) and not _is_table(self.dataset.value)

    @property
    def random_access(self) -> bool:
        return not self.streams

    @property
    def resources(self) -> Resources | None:
        """A pool only if ``workers`` asks for one: slicing rows out of a table costs little."""
        return None if self.workers is None else Resources(self.workers)

    def open(self) -> DatasetTableReader | StreamingDatasetReader | BuilderReader:
        """Load the dataset, if it is given by name or folder.

        Raises:
            MissingExtra: The package datasets is not installed.
            PlanError: The dataset has several splits, and none is chosen.
            StorageError: The dataset cannot be loaded.
        """
        dataset = _load(self.dataset, self.split) if isinstance(self.dataset, str) else self.dataset.value
        if _is_builder(dataset):
            return BuilderReader(dataset, self.split)
        return DatasetTableReader(dataset) if _is_table(dataset) else StreamingDatasetReader(dataset)

    def describe(self) -> str:
        if isinstance(self.dataset, str):
            chosen = "" if self.split is None else f", split={self.split!r}"
            return f"from_huggingface({self.dataset!r}{chosen})"
        dataset = self.dataset.value
        rows = f", {len(dataset)} rows" if _is_table(dataset) else ""
        return f"from_huggingface({dataset.__name__ if isinstance(dataset, type) else type(dataset).__name__}{rows})"


def check_dataset(dataset: Any) -> None:
    """Check that an object can be read as a Hugging Face dataset.

    Raises:
        PlanError: The object is neither a dataset nor a builder, or has a transform.
    """
    if _is_builder(dataset):
        return
    if not is_huggingface_dataset(dataset):
        raise PlanError(
            f"from_huggingface needs a dataset, a builder, a folder or a name, not {type(dataset).__name__}"
        )
    if _is_table(dataset) and dataset.format["type"] == "custom":
        raise PlanError("the dataset has a transform: remove it with with_format(None), and pass its function to map()")


def is_huggingface_dataset(candidate: Any) -> bool:
    """Return whether an object is a Hugging Face dataset or builder."""
    return (
        _is_builder(candidate)
        or _is_table(candidate)
        or (hasattr(candidate, "features") and hasattr(candidate, "num_shards"))
    )


def _is_table(candidate: Any) -> bool:
    return hasattr(candidate, "data") and hasattr(candidate, "_indices")


def _is_builder(candidate: Any) -> bool:
    return hasattr(candidate, "_generate_examples") and hasattr(candidate, "_split_generators")


def _load(name: str, split: str | None) -> Any:
    """Load a dataset by folder or name, once per process; a folder that was saved again is loaded again."""
    saved = [os.path.join(name, file) for file in _SAVED_FILES if os.path.exists(os.path.join(name, file))]
    times = [os.stat(path).st_mtime_ns for path in saved]
    key = ("huggingface", os.path.abspath(name) if saved else name, split, *times)
    return per_process(key, lambda: _load_split(name, split, saved))


def _load_split(name: str, split: str | None, saved: Sequence[str]) -> Any:
    datasets = _datasets()
    try:
        loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=split)
    except Exception as exc:  # the library, the hub and the network raise exceptions of many types
        text = (str(exc).splitlines() or [type(exc).__name__])[0]
        raise StorageError(f"the dataset cannot be loaded: {text}", name) from exc
    if not isinstance(loaded, Mapping):
        return loaded
    chosen = split or (next(iter(loaded)) if len(loaded) == 1 else None)
    if chosen not in loaded:
        option = f"split=, or in a command as hf:{name}#{next(iter(loaded), '')}"
        raise PlanError(f"{name!r} has the splits {', '.join(loaded)}: choose one with {option}")
    return loaded[chosen]


class DatasetTableReader(Reader):
    """Reads the rows of a dataset's table as one shard, in the order of the dataset's indices."""

    def __init__(self, dataset: Any) -> None:
        self.names = ["rows"]
        declared = features_from(dataset.features.to_dict())
        columns = [name for name in dataset.format["columns"] or declared if name in declared]
        self._features = {name: declared[name] for name in columns}
        table = dataset.data.table.select(columns)
        table = table.replace_schema_metadata(metadata_of(self._features))
        self._batches = [batch for batch in table.to_batches() if batch.num_rows]
        self._offsets = np.cumsum([0, *(batch.num_rows for batch in self._batches)], dtype=np.int64)
        self._indices: I64 | None = None
        if dataset._indices is not None:
            self._indices = dataset._indices.table.column(0).to_numpy().astype(np.int64)
        self._count = len(dataset)
        self._row_bytes = table.nbytes / max(1, table.num_rows)
        self._name = str(dataset.info.dataset_name or "dataset")
        self._media = {name: feature for name, feature in self._features.items() if has_media(feature)}

    @property
    def traits(self) -> Traits:
        return Traits(columnar=True, find_features=lambda: self._features)

    def counts(self, scan: bool) -> I64 | None:
        return np.array([self._count], np.int64)

    def key(self, shard: int, index: int) -> str | None:
        return f"row {index}"

    def fields(self, shard: int) -> tuple[str, ...]:
        return tuple(self._features)

    def url(self, shard: int) -> str:
        """Return the dataset's name: the user does not know the files of its table."""
        return self._name

    def locate(self, shard: I64, index: I64, fields: Fields) -> LocatedDatasetRows:
        return LocatedDatasetRows(self, index, fields, np.full(len(index), int(self._row_bytes), np.int64))

    def read(self, index: I64, fields: Fields) -> tuple[Sequence[Any], dict[int, DataError]]:
        """Slice rows out of the table; image and audio files that it stores by path are read."""
        row = index if self._indices is None else self._indices[index]
        slot = np.searchsorted(self._offsets, row, "right") - 1
        used, slot = np.unique(slot, return_inverse=True)
        batches = [self._batches[number] for number in used.tolist()]
        wanted = {name: name for name in self._features if fields.wants(name)}
        row = row - self._offsets[used][slot]
        columns = ArrowColumns(batches, row, slot if len(batches) > 1 else None, wanted, self._row_bytes)
        media = {name: feature for name, feature in self._media.items() if name in wanted}
        return self._with_files(columns, media, index) if media else (columns, {})

    def _with_files(
        self, columns: ArrowColumns, media: Features, index: I64
    ) -> tuple[Sequence[Any], dict[int, DataError]]:
        batch = columns.batch()
        errors: dict[int, DataError] = {}
        complete = True
        for name, feature in media.items():
            array = batch.column(name)
            if not has_external_files(array, feature):
                continue
            complete = False
            if (embedded := embed_files(array, feature)) is not None:
                position = batch.schema.get_field_index(name)
                batch = batch.set_column(position, batch.schema.field(position), embedded)
                continue
            values: list[Any] = []
            for number, value in enumerate(values_of(array)):
                try:
                    values.append(stored(feature, value, read=read_external_file))
                except (OSError, ValueError) as exc:
                    problem = f"field {name!r}: {exc}"
                    errors.setdefault(number, DataError(problem, self._name, self.key(0, int(index[number]))))
                    values.append(None)
            batch = _with_column(batch, name, values, feature)
        if complete:
            return columns, {}
        row = np.arange(len(index))
        row[list(errors)] = ABSENT
        return ArrowColumns([batch], row, row_bytes=batch.nbytes / max(1, len(index))), errors


def _with_column(batch: Any, name: str, values: list[Any], feature: Feature) -> Any:
    import pyarrow as pa

    position = batch.schema.get_field_index(name)
    array = pa.array(values, arrow_type(feature))
    return batch.set_column(position, batch.schema.field(position).with_type(array.type), array)


@dataclass(slots=True)
class LocatedDatasetRows:
    """Rows of a dataset's table, not sliced out yet."""

    reader: DatasetTableReader
    index: I64
    fields: Fields
    nbytes: I64

    def take(self, sel: Any) -> LocatedDatasetRows:
        return LocatedDatasetRows(self.reader, self.index[sel], self.fields, self.nbytes[sel])

    def read(self) -> tuple[Sequence[Any], dict[int, DataError]]:
        return self.reader.read(self.index, self.fields) if len(self.index) else ([], {})


class StreamingDatasetReader(StreamReader):
    """Reads a streaming dataset from front to back; images and audio stay encoded."""

    def __init__(self, dataset: Any) -> None:
        declared = dataset.features
        self._dataset = dataset if declared is None else dataset.decode(False)
        self._features: Features = {} if declared is None else features_from(declared.to_dict())

    @property
    def traits(self) -> Traits:
        return Traits(find_features=lambda: self._features)

    def stream(self, fields: Fields) -> Iterator[tuple[Any, DataError | None]]:
        media = {name: feature for name, feature in self._features.items() if has_media(feature) and fields.wants(name)}
        for number, example in enumerate(self._dataset):
            sample = {name: value for name, value in example.items() if fields.wants(name)}
            yield _sample_or_error(lambda: sample | _stored_media(media, sample), "dataset", f"row {number}")  # noqa: B023


def _stored_media(media: Features, sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: stored(feature, sample.get(name), read=read_external_file) for name, feature in media.items()}


def _sample_or_error(make: Callable[[], Any], url: str, key: str) -> tuple[Any, DataError | None]:
    try:
        return make(), None
    except (OSError, TypeError, ValueError) as exc:
        error = DataError(str(exc), url, key)
        error.__cause__ = exc
        return None, error


class BuilderReader(StreamReader):
    """Reads what a builder's ``_generate_examples`` yields, stored by our own features: datasets encodes nothing."""

    def __init__(self, builder: Any, split: str | None) -> None:
        self._builder = builder() if isinstance(builder, type) else builder
        declared = self._builder.info.features
        if declared is None:
            raise PlanError(f"{type(self._builder).__name__} does not declare features in _info()")
        self._features: Features = features_from(declared.to_dict())
        self._split = split

    @property
    def traits(self) -> Traits:
        return Traits(find_features=lambda: self._features)

    def stream(self, fields: Fields) -> Iterator[tuple[Any, DataError | None]]:
        known = self._features
        wanted = {name: feature for name, feature in known.items() if fields.wants(name)}
        name = type(self._builder).__name__
        for key, example in self._builder._generate_examples(**self._arguments()):
            sample = {field: value for field, value in example.items() if field in wanted or field not in known}
            yield _sample_or_error(lambda: store_sample(wanted, sample, read=read_external_file), name, str(key))  # noqa: B023

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of ``_generate_examples`` for the chosen split, downloading its files.

        Raises:
            PlanError: The builder has several splits and none is chosen, or not the chosen one.
        """
        datasets, builder = _datasets(), self._builder
        manager = datasets.DownloadManager(
            dataset_name=builder.dataset_name,
            data_dir=builder.config.data_dir,
            download_config=datasets.DownloadConfig(cache_dir=builder._cache_downloaded_dir),
            base_path=builder.base_path,
        )
        splits = {str(split.name): split.gen_kwargs for split in builder._split_generators(manager)}
        chosen = self._split or (next(iter(splits)) if len(splits) == 1 else None)
        if chosen not in splits:
            raise PlanError(f"{type(builder).__name__} has the splits {', '.join(splits)}: choose one with split=")
        arguments: dict[str, Any] = splits[chosen]
        return arguments


def to_huggingface_dataset(
    samples: Iterable[Any],
    known: Mapping[str, Feature],
    given: Mapping[str, Feature] | None,
    path: str | os.PathLike[str] | None,
) -> Any:
    """Return samples as a ``datasets.Dataset``, in memory or in an Arrow file at ``path``.

    Args:
        samples: The samples.
        known: The features that the sources declare; used where the first samples agree with them.
        given: The features of all fields, from the user; then none is inferred.
        path: A file, which appears under this name when it is complete.

    Raises:
        DataError: A sample does not match the features.
        MissingExtra: The package datasets is not installed.
        StorageError: The file cannot be written.
    """
    datasets = _datasets()
    rows = enumerate(_fields(sample) for sample in samples)
    first = list(islice(rows, _BATCH_ROWS))
    try:
        features = dict(given) if given is not None else infer_features((sample for _, sample in first), known)
    except ValueError as exc:
        raise DataError(str(exc)) from exc
    hf_features = datasets.Features.from_dict(described(features))
    info = datasets.DatasetInfo(features=hf_features)
    batches = _batches(chain(first, rows), features, hf_features)
    if path is None:
        import pyarrow as pa

        table = pa.Table.from_batches(batches, schema=hf_features.arrow_schema)
        return datasets.Dataset(datasets.table.InMemoryTable(table), info=info)
    _write(Path(path), batches, hf_features.arrow_schema)
    return datasets.Dataset.from_file(os.fspath(path), info=info)


def _fields(sample: Any) -> dict[str, Any]:
    if not isinstance(sample, dict):
        raise DataError(f"a Hugging Face dataset needs samples with fields, not {type(sample).__name__}")
    return {name: value for name, value in sample.items() if name != "__url__"}


def _batches(rows: Iterator[tuple[int, dict[str, Any]]], features: Features, hf_features: Any) -> Iterator[Any]:
    import pyarrow as pa

    schema = arrow_schema(features)
    while numbered := list(islice(rows, _BATCH_ROWS)):
        encoded = []
        for number, sample in numbered:
            try:
                encoded.append(store_sample(features, sample))
            except ValueError as exc:
                raise DataError(str(exc), None, f"sample {number}") from exc
        try:
            table = pa.Table.from_pylist(encoded, schema=schema)
        except (pa.ArrowException, TypeError, OverflowError) as exc:
            problem = str(exc).splitlines()[0]
            raise DataError(f"the samples from {numbered[0][0]} on do not match the features: {problem}") from exc
        yield from _datasets().table.table_cast(table, hf_features.arrow_schema).combine_chunks().to_batches()


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
    return import_extra("datasets", "Hugging Face datasets", "huggingface")
