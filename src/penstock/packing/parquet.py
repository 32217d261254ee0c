"""``ps.pack(format="parquet")``: which features the fields of a dataset have, and how media is embedded."""

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
from penstock.packing.parquet_output import PackSpec, TableOptions, estimate_tables, write_tables
from penstock.packing.tar_output import Packed
from penstock.plan import Context, Map, Place
from penstock.storage import Storage, redacted

_MEASURED_SAMPLES = 64  # samples that a dry run encodes; its estimate is based on them
_PARQUET_NAMES = {None: "zstd", "zst": "zstd", "gz": "gzip"}  # of the compressions of tar shards


def parquet_compression(compress: str | None) -> str:
    """Return Parquet's name of a compression; the names for tar shards are accepted too.

    Raises:
        PlanError: Parquet has no such compression.
    """
    compression = _PARQUET_NAMES.get(compress, compress)
    if compression not in PARQUET_COMPRESSIONS:
        known = ", ".join(map(repr, PARQUET_COMPRESSIONS))
        raise PlanError(f"compress={compress!r}: give a compression of Parquet files: {known}")
    return compression


def pack_tables(
    origin: PackInput,
    folder: str,
    options: TableOptions,
    pack_options: Mapping[str, Any],
    *,
    progress: bool | None,
    dry_run: bool,
    storage: Storage | None,
) -> Packed:
    """Pack a source into Parquet files.

    Args:
        origin: The source.
        folder: The folder to write to.
        options: How the files are written.
        pack_options: The options of ``ps.pack`` that identify the run, in addition to ``options``.
        progress: Show a progress bar; ``None``: if standard error is a terminal.
        dry_run: Write nothing, and return what would be written.
        storage: The storage of the folder.

    Raises:
        DataError: A sample cannot be read or stored.
        PlanError: The folder holds tar shards or other Parquet files, or the source reads from it.
        StorageError: The source cannot be read, or the folder cannot be written.
    """
    require_arrow("packing into Parquet")
    origin.check_outside(folder)
    if read_manifest_at(folder, storage) is not None:
        raise PlanError(f"{redacted(folder)} holds tar shards; choose another folder for Parquet files")
    plan, features = origin.plan, _FieldFeatures(origin.classes)
    if not origin.typed:
        plan = plan.then(DecodeTextAndLabels())
    if origin.files is not None:  # an extension that first appears in a late file has its column from the beginning
        names = ("__key__", *origin.files.field_names())
        options = replace(options, schema=arrow_schema({name: features.of(name) for name in names}))
    identity = f"{origin.identity}\n{json.dumps(pack_options, sort_keys=True)}"
    spec = PackSpec(identity, features, origin.numbered_keys)
    epoch = plan.epoch or 0
    if dry_run:
        return estimate_tables(plan, epoch, folder, options, spec, _MEASURED_SAMPLES)
    return write_tables(plan, epoch, folder, options, progress=progress, storage=storage, spec=spec)


@dataclass(frozen=True, slots=True)
class _FieldFeatures:
    """The features of fields by their names, whose last part is an extension."""

    classes: tuple[str, ...] | None

    def __call__(self, name: str, value: Any) -> Feature | None:
        """Return the feature of a field of media or classes; None if the type of the value decides."""
        feature = self.of(name)
        if isinstance(feature, Image | Audio):
            return feature if isinstance(value, bytes) or _is_decoded_media(value) else None
        return feature if isinstance(feature, ClassLabel) and isinstance(value, int) else None

    def of(self, name: str) -> Feature:
        """Return the feature of a field whose values are bytes in tar shards."""
        if name.startswith("__"):
            return Value("string")
        match codec_of(name):
            case "image":
                return Image()
            case "audio":
                return Audio()
        if name == "cls":
            return ClassLabel(self.classes) if self.classes else Value("int64")
        return Value("string" if _extension(name) == "txt" else "int64" if _extension(name) == "cls" else "binary")


def _is_decoded_media(value: Any) -> bool:
    """Return whether a value is a decoded image or sound."""
    if isinstance(value, Mapping):
        return value.keys() == {"array", "sampling_rate"}
    return getattr(value, "ndim", 0) >= 2 or type(value).__module__.startswith("PIL.")


def _extension(name: str) -> str:
    return name.rpartition(".")[2]


@dataclass(frozen=True)
class DecodeTextAndLabels(Map):
    """Decodes the fields ``txt`` and ``cls``, which are bytes in tar shards; media and all other fields stay bytes."""

    def function(self, ctx: Context) -> Callable[[dict[str, Any]], dict[str, Any]]:
        decoders = {extension: decoder(extension, limits=Limits()) for extension in ("txt", "cls")}

        def decode_sample(sample: dict[str, Any]) -> dict[str, Any]:
            decoded = {}
            for name, value in sample.items():
                if isinstance(value, bytes) and (decode := decoders.get(_extension(name))) is not None:
                    try:
                        value = decode(value)
                    except ValueError as exc:
                        raise ValueError(f"field {name!r}: {exc}") from exc
                decoded[name] = value
            return decoded

        return decode_sample

    def failure(self, exc: Exception, place: Place) -> Exception:
        error = DataError(str(exc), place.shard, place.key)
        error.__cause__ = exc.__cause__ or exc
        return error
