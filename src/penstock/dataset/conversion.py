"""Converts files to another format, recognised by file names; samples keep their fields, keys and types."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import numpy as np

from penstock.codecs.registry import CODECS
from penstock.dataset.dataset import Dataset
from penstock.dataset.sources import read_lmdb, read_tar
from penstock.dataset.table_sources import read_arrow, read_csv, read_json, read_parquet, read_text, read_tfrecords
from penstock.engines import EngineName, Program
from penstock.errors import PenstockError, PlanError, StorageError
from penstock.formats.lmdb import LMDB_SUFFIXES
from penstock.formats.rows.tfrecord import TFRECORD_SUFFIXES
from penstock.formats.tables.source import ARROW_SUFFIXES as ARROW
from penstock.formats.tables.source import PARQUET_SUFFIXES
from penstock.formats.tar.shard_names import TAR_SUFFIXES
from penstock.landing import MODES, Mode, Packed, Target, check_path
from penstock.packing import pack
from penstock.plan import Drop, MapFn, Resources, check_choice, check_flag
from penstock.plan.values import Workers
from penstock.storage import Storage, local_path, open_storage, redacted
from penstock.storage.protocol import scheme
from penstock.vision.tiles import TileImages

Format = Literal["tar", "parquet", "csv", "json", "tfrecords"]
RecordFields = Literal["tf.Example", "msgpack", "pickle", "caffe"] | Callable[[bytes], Mapping[str, Any]]
FORMATS: tuple[Format, ...] = ("tar", "parquet", "csv", "json", "tfrecords")
_COMPRESSIONS = ("", ".gz", ".bz2", ".xz", ".zst")
_SUFFIXES: dict[str, tuple[str, ...]] = {
    "tar": TAR_SUFFIXES,
    "parquet": PARQUET_SUFFIXES,
    "arrow": ARROW,
    "csv": tuple(suffix + compression for suffix in (".csv", ".tsv") for compression in _COMPRESSIONS),
    "json": tuple(suffix + compression for suffix in (".jsonl", ".ndjson", ".json") for compression in _COMPRESSIONS),
    "tfrecords": tuple(suffix + compression for suffix in TFRECORD_SUFFIXES for compression in _COMPRESSIONS),
    "text": tuple(".txt" + compression for compression in _COMPRESSIONS),
    "lmdb": LMDB_SUFFIXES,
}
_METADATA_FILES = ("manifest.json", "dataset_info.json", "dataset_dict.json", "state.json")  # beside shards
_TEXT_FORMATS = ("csv", "json")  # formats that cannot hold bytes
_PLAIN = frozenset((*CODECS["int"].extensions, *CODECS["txt"].extensions))  # extensions of numbers and text
_TYPED = (".json", ".txt", ".npy")  # extensions of members that hold values other than bytes


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: Format | None = None,
    max_bytes: float | str | None = None,
    workers: Workers = None,
    tiles: bool = False,
    drop: Sequence[str] = (),
    shards: int | None = None,
    mode: Mode = "new",
    progress: bool = False,
    storage: Storage | None = None,
    fields: RecordFields | None = None,
    trust_pickle: bool = False,
    engine: EngineName = "local",
) -> Packed:
    """Read files of one format and write the same samples, in order, in another.

    The source format is recognised by file names. In tar shards, a value that is not bytes becomes a member named after
    its type: ``label.json``, ``text.txt``, ``vector.npy``; converting back restores the value under its original name.
    In CSV and JSON lines, the fields ``cls`` and ``txt`` of tar shards are numbers and text.

    Args:
        source: A file, a folder or a pattern.
        target: A folder, or (except for Parquet) one file.
        format: The format to write. By default the suffix of ``target`` decides; if it has none, tar shards become
            Parquet, and everything else becomes tar shards.
        max_bytes: The maximum size of each file in a folder.
        shards: Cut the order into this many ranges, each one file, and write them in parallel.
        workers: How many workers read.
        tiles: Store JPEGs in tiles, without loss, so that crops of them decode faster; tar may then become tar.
        drop: Fields to leave out, such as images that CSV cannot hold.
        mode: ``"new"`` continues an interrupted run and refuses a target that holds something else, ``"replace"``
            replaces what it holds, ``"append"`` adds to it.
        progress: Show a progress bar.
        storage: How to reach remote files.
        fields: How the records of LMDB are decoded, as in ``read_lmdb``; by default they are one field, ``value``.
        trust_pickle: Decode pickled records, which can run code.
        engine: The engine that reads, such as ``"ray"``. It writes, too, if ``shards`` is given; otherwise this process
            does.

    Raises:
        DataError: A sample cannot be read, or cannot be stored in the target format.
        PlanError: The formats cannot be recognised, or the arguments contradict each other.
        StorageError: The source does not exist, or the target cannot be written.
    """
    read, write = check_path("source", source), check_path("target", target)
    check_choice("mode", mode, MODES)
    check_flag("tiles", tiles)
    source_format = format_of(read, storage)
    target_format = format or _format_by_name(write) or ("parquet" if source_format == "tar" else "tar")
    check_choice("format", target_format, FORMATS)
    ds = open_files(read, source_format, workers, storage, fields, trust_pickle).on(engine)
    if target_format == source_format == "tar" and not tiles:
        raise PlanError(f"{redacted(read)} and {redacted(write)} are both tar; use `penstock pack` to repack shards")
    if _format_by_name(write) is None:  # a folder
        landing_folder = local_path(write) if scheme(write) == "file" else write
        Target(landing_folder, target_format, ()).check_not_source(Program(ds.plan), ("",))
    if dropped := (drop,) if isinstance(drop, str) else tuple(drop):
        ds = ds.drop(*dropped)
    if tiles:
        ds = Dataset(ds.plan.then(TileImages(resources=Resources(workers))))
    limit = 1e9 if max_bytes is None and shards is None else max_bytes
    if target_format == source_format == "tar":
        return pack(ds, write, max_bytes=limit, shards=shards, shuffle=False, mode=mode, storage=storage)
    if source_format == "tar":
        ds = Dataset(
            ds.plan.then(Drop(("__url__",))).then(MapFn(_Values(target_format in _TEXT_FORMATS), resources=Resources()))
        )
    if target_format == "tar":
        members = Dataset(ds.plan.then(MapFn(_to_members, resources=Resources())))
        return pack(members, write, max_bytes=limit, shards=shards, shuffle=False, mode=mode, storage=storage)
    if target_format == "parquet":
        return ds.write_parquet(write, max_bytes, shards, mode=mode, progress=progress, storage=storage)
    writers: dict[str, Callable[..., Packed]] = {
        "csv": ds.write_csv,
        "json": ds.write_json,
        "tfrecords": ds.write_tfrecords,
    }
    return writers[target_format](write, max_bytes, shards, mode=mode, progress=progress, storage=storage)


def open_files(
    url: str,
    format: str,
    workers: Workers = None,
    storage: Storage | None = None,
    fields: Any = None,
    trust_pickle: bool = False,
) -> Dataset:
    """Read files in a format that ``format_of`` returned; ``fields`` and ``trust_pickle`` are those of ``read_lmdb``.

    Raises:
        PlanError: ``fields`` is given, but the files are not LMDB.
    """
    readers: dict[str, Callable[..., Dataset]] = {
        "tar": read_tar,
        "parquet": read_parquet,
        "arrow": read_arrow,
        "csv": read_csv,
        "json": read_json,
        "tfrecords": read_tfrecords,
        "text": read_text,
    }
    if format == "lmdb":
        return read_lmdb(url, fields, trust_pickle, workers=workers)
    if fields is not None:
        raise PlanError(f"fields={fields!r} says how the records of LMDB are decoded, but the files are {format}")
    return readers[format](url, workers=workers, storage=storage)


def format_of(url: str, storage: Storage | None = None) -> str:
    """Recognise the format of a file by its name, or of a folder by the files in it.

    Raises:
        PlanError: No format is recognised, or several are.
        StorageError: The file or folder does not exist.
    """
    if (known := _format_by_name(url)) is not None:
        return known
    names = _file_names(url, storage)
    formats = _formats(names)
    if not formats:
        examples = f", only {', '.join(sorted(names)[:3])}" if names else ""
        problem = f"{redacted(url)}: there are no files of a supported format{examples}"
        raise PlanError(f"{problem}. Supported formats: {', '.join(FORMATS)}; `penstock pack` packs other files")
    if len(formats) > 1:
        found = ", ".join(f"{count} {name}" for name, count in formats.most_common())
        raise PlanError(
            f"{redacted(url)} holds files of several formats ({found}); name one, as in '{redacted(url)}/*.csv'"
        )
    return next(iter(formats))


def format_to_inspect(url: str, storage: Storage | None = None) -> str:
    """Return the format to inspect: tar where there are shards, and where no format is recognised."""
    try:
        found = _format_by_name(url) or _formats(_file_names(url, storage))
    except PenstockError:  # reading it as tar raises an error that says what is wrong
        return "tar"
    return found if isinstance(found, str) else "tar" if "tar" in found or not found else found.most_common(1)[0][0]


def _formats(names: Iterable[str]) -> Counter[str]:
    """Count the files of each format."""
    return Counter(format for name in names if (format := _format_by_name(name)) is not None)


def _format_by_name(url: str) -> str | None:
    name = url.lower().partition("?")[0]
    if os.path.basename(name) in _METADATA_FILES:
        return None
    return next((format for format, suffixes in _SUFFIXES.items() if name.endswith(suffixes)), None)


def _file_names(url: str, storage: Storage | None) -> list[str]:
    """Return the names of the files in a folder and its subfolders."""
    if scheme(url) != "file":
        prefix = url.rstrip("/") + "/"
        found = [file.url.rpartition("/")[2] for file in open_storage(url, storage).list(prefix)]
    elif not os.path.isdir(folder := local_path(url)):
        raise StorageError("no such file or folder", redacted(url))
    else:
        found = [name for _, _, names in os.walk(folder) for name in names]
    return [name for name in found if not name.startswith(".") and not name.endswith(".index")]


def _to_members(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample's values as members of a tar shard."""
    return dict((name, value) if name.startswith("__") else _member(name, value) for name, value in sample.items())


def _member(name: str, value: Any) -> tuple[str, bytes]:
    plain = name.lower().replace(" ", "_")
    if isinstance(value, bytes | bytearray | memoryview):
        return plain, bytes(value)
    if isinstance(value, dict) and value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes):
        return f"{plain}{_extension(value['bytes'], value['path'])}", value["bytes"]
    if isinstance(value, str):
        return f"{plain}.txt", value.encode("utf-8", "surrogateescape")
    if isinstance(value, np.ndarray | np.generic):
        out = BytesIO()
        np.save(out, np.asarray(value), allow_pickle=False)
        return f"{plain}.npy", out.getvalue()
    return f"{plain}.json", json.dumps(value, ensure_ascii=False, default=_json_value).encode()


def _json_value(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise PlanError(
        f"a value of type {type(value).__name__} cannot be stored in a tar shard; map it to bytes, or drop it"
    )


def _extension(data: bytes, path: str | None) -> str:
    known = {b"\xff\xd8": ".jpg", b"\x89P": ".png", b"RI": ".wav", b"fL": ".flac", b"Og": ".ogg", b"GI": ".gif"}
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    return known.get(data[:2]) or os.path.splitext(path or "")[1].lower() or ".bin"


@dataclass(frozen=True, slots=True)
class _Values:
    """Turns members of a tar shard back into the original values; ``plain``: numbers and text, too."""

    plain: bool = False

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        values = dict(_value(name, value) for name, value in sample.items())
        return {name: _plain_value(name, value) for name, value in values.items()} if self.plain else values


def _plain_value(name: str, value: Any) -> Any:
    """Return the number or text of a field with such an extension; other values as they are."""
    extension = name.rpartition(".")[2]
    if not isinstance(value, bytes) or extension not in _PLAIN:
        return value
    return int(value) if extension in CODECS["int"].extensions else value.decode("utf-8", "surrogateescape")


def _value(name: str, data: Any) -> tuple[str, Any]:
    plain, dot, extension = name.rpartition(".")
    if not plain or f"{dot}{extension}" not in _TYPED or name.startswith("__"):
        return name, data
    if extension == "json":
        return plain, json.loads(data)
    if extension == "txt":
        return plain, data.decode("utf-8", "surrogateescape")
    array = np.load(BytesIO(data), allow_pickle=False)
    return plain, array if array.ndim else array[()]
