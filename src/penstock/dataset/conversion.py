"""From one format to another: what is there is told by names, and samples keep their fields, keys and types."""

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
from penstock.formats.rows.tfrecord import SUFFIXES as TFRECORDS
from penstock.formats.tables.source import ARROW_SUFFIXES as ARROW
from penstock.formats.tables.source import SUFFIXES as PARQUET
from penstock.formats.tar.source import SUFFIXES as TAR
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
    "tar": TAR,
    "parquet": PARQUET,
    "arrow": ARROW,
    "csv": tuple(kind + packed for kind in (".csv", ".tsv") for packed in _PACKED),
    "json": tuple(kind + packed for kind in (".jsonl", ".ndjson", ".json") for packed in _PACKED),
    "tfrecords": tuple(kind + packed for kind in TFRECORDS for packed in _PACKED),
    "text": tuple(".txt" + packed for packed in _PACKED),
}
_OURS = ("manifest.json", "dataset_info.json", "dataset_dict.json", "state.json")  # what tells of shards and is none
_TYPED = (".json", ".txt", ".npy")  # how members are called that were no bytes


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

    Formats are told by the names of files: of ``source`` (a file, a folder, a pattern), and of ``target``, unless
    ``format`` says it. In tar shards, values that are no bytes get a member named after their kind: ``label.json``,
    ``text.txt``, ``vector.npy``; on the way back these are values again, under their own names.

    Args:
        source: What to read.
        target: A folder, or (but for Parquet) one file.
        format: What to write; by default what ``target`` ends in, or Parquet of shards and shards of anything else.
        max_bytes: The most bytes of a file; for one that is not one alone.
        workers: Workers that read.
        resume: Go on with an interrupted run.
        progress: Show a bar.
        storage: How to reach what is remote.

    Raises:
        DataError: a sample cannot be read, or has no place in the other format.
        PlanError: the formats cannot be told, or the arguments do not go together.
        StorageError: nothing is there, or the place cannot be written.
    """
    read, write = path_of("source", source), path_of("target", target)
    check_flag("resume", resume)
    given = format_of(read, storage)
    made = format or _named(write) or ("parquet" if given == "tar" else "tar")
    check_choice("format", made, FORMATS)
    ds = open_files(read, given, workers, storage)
    if made == given == "tar":
        raise PlanError(f"{redacted(read)} and {redacted(write)} are both tar; `penstock pack` makes shards of shards")
    if _named(write) is None:  # a folder
        check_elsewhere(Program(ds.plan), write, every=True)
    if given == "tar":
        ds = Dataset(ds.plan.then(Drop(("__url__",))).then(MapFn(_Values(), resources=Resources())))
    if made == "tar":
        members = Dataset(ds.plan.then(MapFn(_Members(), resources=Resources())))
        return pack(members, write, max_bytes=max_bytes or 1e9, shuffle=False, resume=resume, storage=storage)
    if made == "parquet":
        return ds.write_parquet(write, max_bytes or "500MB", resume=resume, progress=progress, storage=storage)
    writers: dict[str, Callable[..., Packed]] = {
        "csv": ds.write_csv,
        "json": ds.write_json,
        "tfrecords": ds.write_tfrecords,
    }
    return writers[made](write, max_bytes, resume=resume, progress=progress, storage=storage)


def open_files(url: str, given: str, workers: Workers = None, storage: Storage | None = None) -> Dataset:
    """Read files of a kind that ``format_of`` told."""
    how: dict[str, Callable[..., Dataset]] = {
        "tar": read_tar,
        "parquet": read_parquet,
        "arrow": read_arrow,
        "csv": read_csv,
        "json": read_json,
        "tfrecords": read_tfrecords,
        "text": read_text,
    }
    more = {"delimiter": "\t"} if given == "csv" and ".tsv" in os.path.basename(url) else {}
    return how[given](url, workers=workers, storage=storage, **more)


def format_of(url: str, storage: Storage | None = None) -> str:
    """What kind of files a name, or what lies in a folder, tells of.

    Raises:
        PlanError: it tells nothing, or of several kinds.
        StorageError: nothing is there.
    """
    if (named := _named(url)) is not None:
        return named
    names = _inside(url, storage)
    kinds = _kinds(names)
    if not kinds:
        some = f", only {', '.join(sorted(names)[:3])}" if names else ""
        raise PlanError(f"{redacted(url)}: no files of a known kind are there{some}; known are {', '.join(FORMATS)}")
    if len(kinds) > 1:
        many = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
        raise PlanError(
            f"{redacted(url)} holds files of several kinds ({many}); name some, as in '{redacted(url)}/*.csv'"
        )
    return next(iter(kinds))


def described_as(url: str, storage: Storage | None = None) -> str:
    """What kind of files to look at there: shards where there are some, and where nothing can be told."""
    try:
        kinds = _named(url) or _kinds(_inside(url, storage))
    except PenstockError:  # who looks there says what is wrong
        return "tar"
    return kinds if isinstance(kinds, str) else "tar" if "tar" in kinds or not kinds else kinds.most_common(1)[0][0]


def _kinds(names: Iterable[str]) -> Counter[str]:
    return Counter(kind for name in names if (kind := _named(name)) is not None)


def _named(url: str) -> str | None:
    name = url.lower().partition("?")[0]
    if os.path.basename(name) in _OURS:
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
    """A sample's values as the members of a tar shard."""

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
    raise PlanError(f"a value of type {type(value).__name__} has no place in a tar shard; map it to bytes, or drop it")


def _extension(data: bytes, path: str | None) -> str:
    known = {b"\xff\xd8": ".jpg", b"\x89P": ".png", b"RI": ".wav", b"fL": ".flac", b"Og": ".ogg", b"GI": ".gif"}
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    return known.get(data[:2]) or os.path.splitext(path or "")[1].lower() or ".bin"


@dataclass(frozen=True, slots=True)
class _Values:
    """The members of a tar shard as values: those that were none before are made values again."""

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
