"""``ps.pack(format="parquet")``: which features the fields of a dataset have, and how media is embedded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.codecs.features import Audio, ClassLabel, Feature, Image, Value, arrow_schema
from penstock.codecs.limits import Limits
from penstock.codecs.registry import codec_of, decoder
from penstock.engines import Program
from penstock.errors import PlanError
from penstock.formats.tables.parquet_writer import PARQUET_COMPRESSIONS
from penstock.formats.tables.source import require_arrow
from penstock.landing import PackSpec, ParquetSink, TableOptions, exact_program
from penstock.packing.inputs import PackInput
from penstock.plan import Context, Map, Place, sample_error

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


def parquet_sinks(
    origin: PackInput, options: TableOptions, shards: int | None
) -> tuple[Program, Callable[[], ParquetSink]]:
    """Return the program that yields the samples of a source, and what makes sinks that write them to Parquet files.

    Raises:
        MissingExtra: pyarrow is not installed.
    """
    require_arrow("packing into Parquet")
    plan, features = origin.plan, _FieldFeatures(origin.classes)
    if not origin.typed:
        plan = plan.then(DecodeTextAndLabels())
    if origin.files is not None:  # an extension that first appears in a late file has its column from the beginning
        names = ("__key__", *origin.files.field_names())
        options = replace(options, schema=arrow_schema({name: features.of(name) for name in names}))
    program = exact_program(plan, shards)
    return program, partial(ParquetSink, program.features(), options, PackSpec(features, origin.numbered_keys))


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
        return sample_error(str(exc), place, exc.__cause__ or exc)
