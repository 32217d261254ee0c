"""From one format to another: formats are recognised by file names; samples keep their fields, keys and types."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import numpy as np

from penstock.dataset.dataset import Dataset
from penstock.dataset.sources import read_tar
from penstock.dataset.table_sources import read_arrow, read_csv, read_json, read_parquet, read_text, read_tfrecords
from penstock.engines import Program
from penstock.errors import PenstockError, PlanError, StorageError
from penstock.formats.rows.tfrecord import TFRECORD_SUFFIXES
from penstock.formats.tables.source import ARROW_SUFFIXES as ARROW
from penstock.formats.tables.source import PARQUET_SUFFIXES
from penstock.formats.tar.shard_names import TAR_SUFFIXES
from penstock.packing import Packed, pack
from penstock.packing.tar_output import check_elsewhere, check_flag, path_of
from penstock.plan import Drop, MapFn, Resources, check_choice
from penstock.plan.values import Workers
from penstock.storage import Storage, local_path, open_storage, redacted
from penstock.storage.protocol import scheme

Format = Literal["tar", "parquet", "csv", "json", "tfrecords"]
FORMATS: tuple[Format, ...] = ("tar", "parquet", "csv", "json", "tfrecords")
_PACKED = ("", ".gz", ".bz2", ".xz", ".zst")
_SUFFIXES: dict[str, tuple[str, ...]] = {
    "tar": TAR_SUFFIXES,
    "parquet": PARQUET_SUFFIXES,
    "arrow": ARROW,
    "csv": tuple(kind + packed for kind in (".csv", ".tsv") for packed in _PACKED),
    "json": tuple(kind + packed for kind in (".jsonl", ".ndjson", ".json") for packed in _PACKED),
    "tfrecords": tuple(kind + packed for kind in TFRECORD_SUFFIXES for packed in _PACKED),
    "text": tuple(".txt" + packed for packed in _PACKED),
}
_ABOUT = ("manifest.json", "dataset_info.json", "dataset_dict.json", "state.json")  # files about shards, not shards
_TYPED = (".json", ".txt", ".npy")  # extensions of members that hold values other than bytes


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: Format | None = None,
    max_bytes: float | str | None = None,
    workers: Workers = None,
    resume: bool = True,
    progress: bool = False,
    storage: Storage | None = None,
) -> Packed:
    """Read files of one format and write the same samples, in order, in another.

    Formats are recognised by file names: that of ``source`` (a file, a folder, a pattern) and that of ``target``,
    unless ``format`` is given. In tar shards, a value that is not bytes becomes a member named after its type:
    ``label.json``, ``text.txt``, ``vector.npy``; converting back restores the value under its own name.

    Args:
        source: What to read.
        target: A folder, or (except for Parquet) one file.
        format: What to write; by default the suffix of ``target``, else Parquet from shards and shards from the rest.
        max_bytes: The most bytes of each file of a folder.
        workers: How many workers read.
        resume: Resume an interrupted run.
        progress: Show a progress bar.
        storage: How to reach remote files.

    Raises:
        DataError: A sample cannot be read, or cannot be stored in the other format.
        PlanError: The formats cannot be recognised, or the arguments contradict each other.
        StorageError: The source does not exist, or the target cannot be written.
    """
    read, write = path_of("source", source), path_of("target", target)
    check_flag("resume", resume)
    given = format_of(read, storage)
    wanted = format or _format_by_name(write) or ("parquet" if given == "tar" else "tar")
    check_choice("format", wanted, FORMATS)
    ds = open_files(read, given, workers, storage)
    if wanted == given == "tar":
        raise PlanError(f"{redacted(read)} and {redacted(write)} are both tar; use `penstock pack` to repack shards")
    if _format_by_name(write) is None:  # a folder
        check_elsewhere(Program(ds.plan), write, every=True)
    if given == "tar":
        ds = Dataset(ds.plan.then(Drop(("__url__",))).then(MapFn(_Values(), resources=Resources())))
    if wanted == "tar":
        members = Dataset(ds.plan.then(MapFn(_Members(), resources=Resources())))
        return pack(members, write, max_bytes=max_bytes or 1e9, shuffle=False, resume=resume, storage=storage)
    if wanted == "parquet":
        return ds.write_parquet(write, max_bytes or "500MB", resume=resume, progress=progress, storage=storage)
    writers: dict[str, Callable[..., Packed]] = {
        "csv": ds.write_csv,
        "json": ds.write_json,
        "tfrecords": ds.write_tfrecords,
    }
    return writers[wanted](write, max_bytes, resume=resume, progress=progress, storage=storage)


def open_files(url: str, given: str, workers: Workers = None, storage: Storage | None = None) -> Dataset:
    """Read files of a format that ``format_of`` recognised."""
    readers: dict[str, Callable[..., Dataset]] = {
        "tar": read_tar,
        "parquet": read_parquet,
        "arrow": read_arrow,
        "csv": read_csv,
        "json": read_json,
        "tfrecords": read_tfrecords,
        "text": read_text,
    }
    options = {"delimiter": "\t"} if given == "csv" and ".tsv" in os.path.basename(url) else {}
    return readers[given](url, workers=workers, storage=storage, **options)


def format_of(url: str, storage: Storage | None = None) -> str:
    """Recognise the format of a file by its name, or of a folder by the files in it.

    Raises:
        PlanError: No format is recognised, or several are.
        StorageError: The file or folder does not exist.
    """
    if (known := _format_by_name(url)) is not None:
        return known
    names = _inside(url, storage)
    kinds = _kinds(names)
    if not kinds:
        some = f", only {', '.join(sorted(names)[:3])}" if names else ""
        problem = f"{redacted(url)}: there are no files of a supported format{some}"
        raise PlanError(f"{problem}. Supported formats: {', '.join(FORMATS)}")
    if len(kinds) > 1:
        found = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
        raise PlanError(
            f"{redacted(url)} holds files of several formats ({found}); name one, as in '{redacted(url)}/*.csv'"
        )
    return next(iter(kinds))


def described_as(url: str, storage: Storage | None = None) -> str:
    """Return the format to inspect: tar where there are shards, and where no format is recognised."""
    try:
        kinds = _format_by_name(url) or _kinds(_inside(url, storage))
    except PenstockError:  # whoever inspects it reports what is wrong
        return "tar"
    return kinds if isinstance(kinds, str) else "tar" if "tar" in kinds or not kinds else kinds.most_common(1)[0][0]


def _kinds(names: Iterable[str]) -> Counter[str]:
    return Counter(kind for name in names if (kind := _format_by_name(name)) is not None)


def _format_by_name(url: str) -> str | None:
    name = url.lower().partition("?")[0]
    if os.path.basename(name) in _ABOUT:
        return None
    return next((kind for kind, suffixes in _SUFFIXES.items() if name.endswith(suffixes)), None)


def _inside(url: str, storage: Storage | None) -> list[str]:
    if scheme(url) != "file":
        below = url.rstrip("/") + "/"
        return [one.url.rpartition("/")[2] for one in open_storage(url, storage).list(below)]
    folder = local_path(url)
    if not os.path.isdir(folder):
        raise StorageError("no such file or folder", redacted(url))
    found = [name for _, _, names in os.walk(folder) for name in names]
    return [name for name in found if not name.startswith(".") and not name.endswith(".index")]


@dataclass(frozen=True, slots=True)
class _Members:
    """Turns a sample's values into members of a tar shard."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in sample.items():
            if name.startswith("__"):
                made[name] = value
            else:
                member, data = _member(name, value)
                made[member] = data
        return made


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
    return f"{plain}.json", json.dumps(value, ensure_ascii=False, default=_listed).encode()


def _listed(value: Any) -> Any:
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
    """Turns members of a tar shard back into the values they were made of."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return dict(_value(name, value) for name, value in sample.items())


def _value(name: str, data: Any) -> tuple[str, Any]:
    plain, dot, kind = name.rpartition(".")
    if not plain or f"{dot}{kind}" not in _TYPED or name.startswith("__"):
        return name, data
    if kind == "json":
        return plain, json.loads(data)
    if kind == "txt":
        return plain, data.decode("utf-8", "surrogateescape")
    array = np.load(BytesIO(data), allow_pickle=False)
    return plain, array if array.ndim else array[()]
