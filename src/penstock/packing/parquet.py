"""Any dataset into Parquet: media embedded, and what fields mean in the schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.codecs.features import Audio, ClassLabel, Feature, Image, Value, arrow_schema
from penstock.codecs.limits import Limits
from penstock.codecs.registry import codec_of, decoder
from penstock.errors import DataError, PlanError
from penstock.formats.manifest import read_manifest_at
from penstock.formats.tables.parquet_writer import PARQUET_COMPRESSIONS
from penstock.formats.tables.source import require_arrow
from penstock.packing.inputs import PackInput
from penstock.packing.parquet_output import Embedding, TableOptions, estimate_tables, write_tables
from penstock.packing.tar_output import Packed
from penstock.plan import Context, Map, Place
from penstock.storage import Storage, redacted

_LOOKED_AT = 64  # samples that stand for all in a dry run
_SAME = {None: "zstd", "zst": "zstd", "gz": "gzip"}


def parquet_compression(compress: str | None) -> str:
    """How Parquet calls a compression; that of shards go by their names too.

    Raises:
        PlanError: it has none of this name.
    """
    compression = _SAME.get(compress, compress)
    if compression not in PARQUET_COMPRESSIONS:
        known = ", ".join(map(repr, PARQUET_COMPRESSIONS))
        raise PlanError(f"compress={compress!r}: Parquet files are compressed by one of {known}")
    return compression


def pack_tables(
    origin: PackInput,
    folder: str,
    options: TableOptions,
    said: Mapping[str, Any],
    *,
    progress: bool | None,
    dry_run: bool,
    storage: Storage | None,
) -> Packed:
    """Pack into Parquet files; ``said`` are the options that decide about them beside ``options``.

    Raises:
        DataError: a sample cannot be read or stored.
        PlanError: the folder holds something else.
        StorageError: the source cannot be read, or the folder not be written.
    """
    require_arrow("packing into Parquet")
    origin.check_outside(folder)
    if read_manifest_at(folder, storage) is not None:
        raise PlanError(f"{redacted(folder)} holds tar shards; choose another folder for Parquet files")
    plan, feature = origin.plan, _Told(origin.classes)
    if not origin.typed:
        plan = plan.then(Typed())
    if origin.files is not None:  # a kind of file that comes late has its column from the beginning
        names = ("__key__", *origin.files.names())
        options = replace(options, schema=arrow_schema({name: feature.of(name) for name in names}))
    embedding = Embedding(f"{origin.said}\n{json.dumps(said, sort_keys=True)}", feature, origin.numbered)
    epoch = plan.epoch or 0
    if dry_run:
        return estimate_tables(plan, epoch, folder, options, embedding, _LOOKED_AT)
    return write_tables(plan, epoch, folder, options, progress=progress, storage=storage, embedding=embedding)


@dataclass(frozen=True, slots=True)
class _Told:
    """What a field holds, by its name: that of a shard's field is an extension."""

    classes: tuple[str, ...] | None

    def __call__(self, name: str, value: Any) -> Feature | None:
        """The feature of media and classes; ``None``: what the value's type says."""
        told = self.of(name)
        if isinstance(told, Image | Audio):
            return told if isinstance(value, bytes) or _is_media(value) else None
        return told if isinstance(told, ClassLabel) and isinstance(value, int) else None

    def of(self, name: str) -> Feature:
        """The feature of a field whose values are bytes in shards."""
        if name.startswith("__"):
            return Value("string")
        match codec_of(name):
            case "image":
                return Image()
            case "audio":
                return Audio()
        if name == "cls":
            return ClassLabel(self.classes) if self.classes else Value("int64")
        return Value("string" if _plain(name) == "txt" else "int64" if _plain(name) == "cls" else "binary")


def _is_media(value: Any) -> bool:
    """Whether it is a picture or a sound that was decoded."""
    if isinstance(value, Mapping):
        return value.keys() == {"array", "sampling_rate"}
    return getattr(value, "ndim", 0) >= 2 or type(value).__module__.startswith("PIL.")


def _plain(name: str) -> str:
    return name.rpartition(".")[2]


@dataclass(frozen=True)
class Typed(Map):
    """Makes texts and numbers of the bytes that shards have for them; media and all else stay bytes."""

    def function(self, ctx: Context) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Decode ``txt`` and ``cls``."""
        known = {kind: decoder(kind, limits=Limits()) for kind in ("txt", "cls")}

        def typed(sample: dict[str, Any]) -> dict[str, Any]:
            out = {}
            for name, value in sample.items():
                if isinstance(value, bytes) and (decode := known.get(_plain(name))) is not None:
                    try:
                        value = decode(value)
                    except ValueError as exc:
                        raise ValueError(f"field {name!r}: {exc}") from exc
                out[name] = value
            return out

        return typed

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError that names shard and key."""
        error = DataError(str(exc), place.shard, place.key)
        error.__cause__ = exc.__cause__ or exc
        return error
