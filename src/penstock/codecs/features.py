"""Typed features: what the fields of a table mean, and the schema metadata in which Hugging Face describes them.

A file whose schema has this metadata loads in ``datasets`` with its features. In the other direction, ``decode()``
without arguments decodes the files that ``datasets`` writes by the features in their metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, cast

from penstock.errors import PlanError, import_extra

METADATA_KEY = b"huggingface"  # the key in the metadata of an Arrow schema under which features are described
_MAX_DEPTH = 64  # levels of lists and structs
_MAX_UNNAMED = 1_000_000  # classes without names
_DTYPE = re.compile(r"[a-z][a-z0-9_]*([\[(][^\])]*[\])])?")
_NUMBERS = re.compile(r"u?int(8|16|32|64)|float(16|32|64)|bool")


class Feature:
    """What one field holds; the classes below are all the features there are."""

    __slots__ = ()


FeatureLike: TypeAlias = "Feature | Mapping[str, FeatureLike]"  # what users may pass: a nested dict is a struct


@dataclass(frozen=True, slots=True)
class Value(Feature):
    """A number, text, bytes, date or time, by the name of its Arrow type: ``"int64"``, ``"string"``, ``"binary"``."""

    dtype: str = "string"

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or not _DTYPE.fullmatch(self.dtype):
            raise PlanError(f"Value({self.dtype!r}): give the name of a type, such as 'int64' or 'string'")

    @property
    def is_number(self) -> bool:
        """Whether a numpy array can hold such values: integers, floats and bools."""
        return _NUMBERS.fullmatch(self.dtype) is not None


@dataclass(frozen=True, slots=True)
class Image(Feature):
    """An image, stored as the bytes of its file; decoded to uint8, as stored or in ``mode`` (``"RGB"``, ``"L"``)."""

    mode: str | None = None
    decode: bool = True


@dataclass(frozen=True, slots=True)
class Audio(Feature):
    """Audio, stored as the bytes of its file; decoded to ``{"array", "sampling_rate"}``, at ``sampling_rate`` if given.

    ``num_channels=1`` mixes all channels into one.
    """

    sampling_rate: int | None = None
    num_channels: int | None = None
    decode: bool = True

    def __post_init__(self) -> None:
        rate = self.sampling_rate
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int) or rate < 1):
            raise PlanError(f"Audio(sampling_rate={rate!r}): give a rate in Hz, such as 16000")


@dataclass(frozen=True, slots=True)
class ClassLabel(Feature):
    """A class, stored as its number; class ``i`` is called ``names[i]``."""

    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = (self.names,) if isinstance(self.names, str) else tuple(self.names)
        if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
            raise PlanError(f"ClassLabel({list(names)!r}): give names that are strings and all different")
        object.__setattr__(self, "names", names)

    def number(self, name: str) -> int:
        """Return the number of a class.

        Raises:
            ValueError: No class has this name.
        """
        if name not in self.names:
            raise ValueError(f"{name!r} is not one of the classes {', '.join(self.names[:8])}")
        return self.names.index(name)


@dataclass(frozen=True, slots=True)
class Tensor(Feature):
    """An array of a fixed shape and dtype; the first length may be ``None`` if it differs between samples."""

    shape: tuple[int | None, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        shape = tuple(self.shape)
        rest_is_valid = all(type(length) is int and length >= 0 for length in shape[1:])
        shape_is_valid = rest_is_valid and shape and (shape[0] is None or shape[0] >= 0)
        if not shape_is_valid or _NUMBERS.fullmatch(self.dtype) is None:
            raise PlanError(
                f"Tensor({self.shape!r}, {self.dtype!r}): give a shape and a numeric type, as in (224, 224), 'uint8'"
            )
        object.__setattr__(self, "shape", shape)


@dataclass(frozen=True, slots=True)
class Sequence(Feature):
    """A list of values of one feature: of any length, or of exactly ``length``."""

    feature: Feature
    length: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature", feature_of(self.feature))


@dataclass(frozen=True, slots=True)
class Struct(Feature):
    """Named values inside one field; a nested dict of features becomes a ``Struct``."""

    fields: tuple[tuple[str, Feature], ...]


@dataclass(frozen=True, slots=True)
class OtherFeature(Feature):
    """A feature without a class of its own, kept as its JSON description, so that it can be written unchanged."""

    described: str


Features: TypeAlias = dict[str, Feature]


def feature_of(given: Any) -> Feature:
    """Return the feature that a user passed for one field: a feature itself, or a dict of features as a ``Struct``.

    Raises:
        PlanError: ``given`` is neither.
    """
    if isinstance(given, Feature):
        return given
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return Struct(tuple((name, feature_of(inner)) for name, inner in given.items()))
    raise PlanError(f"{given!r} is not a feature: give one of ps.features, such as Value('int64'), or a dict of them")


def features_of(metadata: Mapping[bytes, bytes] | None) -> Features | None:
    """Return the features described in the metadata of an Arrow schema; ``None`` if it describes none.

    Invalid descriptions are ignored, since the columns can be read without them.
    """
    try:
        descriptions = json.loads((metadata or {})[METADATA_KEY])["info"]["features"]
        return features_from(descriptions)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def metadata_of(features: Mapping[str, FeatureLike]) -> dict[bytes, bytes]:
    """Return the metadata for an Arrow schema that describes ``features``."""
    return {METADATA_KEY: json.dumps({"info": {"features": described(features)}}).encode()}


def described(features: Mapping[str, FeatureLike]) -> dict[str, Any]:
    """Return the description of ``features`` in the dicts and lists that Hugging Face stores as JSON."""
    return {name: _description(feature_of(feature)) for name, feature in features.items()}


def features_from(descriptions: Mapping[str, Any]) -> Features:
    """Return the features of a description, as ``described`` or ``datasets.Features.to_dict`` return it.

    Raises:
        ValueError: ``descriptions`` does not describe features.
    """
    if not isinstance(descriptions, Mapping):
        raise ValueError(f"features must be described by a dict, not {type(descriptions).__name__}")
    return {name: _parsed_feature(description, _MAX_DEPTH) for name, description in descriptions.items()}


def _description(feature: Feature) -> Any:
    match feature:
        case Value(dtype):
            return {"dtype": dtype, "_type": "Value"}
        case ClassLabel(names):
            return {"names": list(names), "_type": "ClassLabel"}
        case Sequence(inner, length):
            return {"feature": _description(inner), "_type": "List", **({} if length is None else {"length": length})}
        case Struct(members):
            return {name: _description(member) for name, member in members}
        case Tensor(shape, dtype):
            if 2 <= len(shape) <= 5:
                return {"shape": list(shape), "dtype": dtype, "_type": f"Array{len(shape)}D"}
            inner = Value(dtype) if len(shape) == 1 else Tensor(shape[1:], dtype)
            return _description(Sequence(inner, shape[0]))
        case OtherFeature(text):
            return json.loads(text)
    default = type(feature)()  # a description leaves out default values
    parameters = [field.name for field in fields(cast(Any, feature))]
    changed = {name: getattr(feature, name) for name in parameters if getattr(feature, name) != getattr(default, name)}
    return {**changed, "_type": type(feature).__name__}


def _parsed_feature(description: Any, depth: int) -> Feature:
    if not depth:
        raise ValueError(f"features are nested more than {_MAX_DEPTH} deep")
    if isinstance(description, list) and len(description) == 1:  # how old versions of datasets describe lists
        return Sequence(_parsed_feature(description[0], depth - 1))
    if not isinstance(description, Mapping):
        raise ValueError(f"{description!r} does not describe a feature")
    kind = description.get("_type")
    if not isinstance(kind, str):
        return Struct(tuple((name, _parsed_feature(inner, depth - 1)) for name, inner in description.items()))
    if kind == "Value":
        return Value(description["dtype"])
    if kind == "Image":
        return Image(description.get("mode"), description.get("decode", True))
    if kind == "Audio":
        get = description.get
        return Audio(get("sampling_rate"), get("num_channels"), get("decode", True))
    if kind == "ClassLabel":
        names, count = description.get("names"), description.get("num_classes") or 0
        # A larger number without names is a claim that no data backs; the column holds numbers all the same.
        return ClassLabel(tuple(names or map(str, range(count)))) if names or count <= _MAX_UNNAMED else Value("int64")
    if kind in ("List", "Sequence"):
        return _parsed_list(description, depth)
    if re.fullmatch(r"Array[2-5]D", kind):
        return Tensor(tuple(description["shape"]), description["dtype"])
    return OtherFeature(json.dumps(description, sort_keys=True))


def _parsed_list(description: Mapping[str, Any], depth: int) -> Feature:
    inner, length = _parsed_feature(description["feature"], depth - 1), description.get("length", -1)
    length = None if length in (-1, None) else int(length)
    # datasets stores a Sequence of a struct as a struct of lists, unlike a List of one.
    if isinstance(inner, Struct) and description["_type"] == "Sequence":
        return Struct(tuple((name, Sequence(feature, length)) for name, feature in inner.fields))
    return Sequence(inner, length)


def arrow_type(feature: FeatureLike) -> Any:
    """Return the Arrow type in which a field of this feature is stored.

    Raises:
        MissingExtra: pyarrow is not installed.
        PlanError: Arrow has no type of that name, or the feature is an ``OtherFeature``.
    """
    pa = _pyarrow()
    match feature_of(feature):
        case Value(dtype):
            return _value_type(dtype)
        case Image() | Audio():
            return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        case ClassLabel():
            return pa.int64()
        case Sequence(inner, length):
            return pa.list_(arrow_type(inner), -1 if length is None else length)
        case Struct(members):
            return pa.struct([(name, arrow_type(member)) for name, member in members])
        case Tensor(shape, dtype):
            kind = _value_type(dtype)
            for _ in shape:
                kind = pa.list_(kind)
            return kind
    raise PlanError(f"the feature {feature} cannot be written: it has no Arrow type")


def arrow_schema(features: Mapping[str, FeatureLike]) -> Any:
    """Return the Arrow schema of a table with these features, with their description in its metadata.

    Raises:
        MissingExtra: pyarrow is not installed.
        PlanError: A feature has no Arrow type.
    """
    pa = _pyarrow()
    columns = [(name, arrow_type(feature)) for name, feature in features.items()]
    return pa.schema(columns, metadata=metadata_of(features))


def features_by_type(columns: Iterable[tuple[str, Any]]) -> Features:
    """Return the features of columns, given as ``(name, type)``, by their Arrow types alone.

    Raises:
        MissingExtra: pyarrow is not installed.
    """
    return {name: _feature_by_type(arrow) for name, arrow in columns}


def _feature_by_type(arrow: Any) -> Feature:
    pa = _pyarrow()
    if isinstance(arrow, pa.BaseExtensionType):
        return _feature_by_type(arrow.storage_type)
    if pa.types.is_struct(arrow):
        members = [arrow.field(number) for number in range(arrow.num_fields)]
        return Struct(tuple((member.name, _feature_by_type(member.type)) for member in members))
    if pa.types.is_fixed_size_list(arrow):
        return Sequence(_feature_by_type(arrow.value_type), arrow.list_size)
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        return Sequence(_feature_by_type(arrow.value_type))
    if pa.types.is_dictionary(arrow):
        return _feature_by_type(arrow.value_type)
    return Value(_DTYPE_NAMES.get(str(arrow), str(arrow)))


# Arrow types whose text is not the name that Hugging Face uses.
_DTYPE_NAMES = {
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
    "date32[day]": "date32",
    "date64[ms]": "date64",
}


def _value_type(dtype: str) -> Any:
    pa = _pyarrow()
    if match := re.fullmatch(r"timestamp\[(s|ms|us|ns), tz=(.+)\]", dtype):
        return pa.timestamp(match[1], match[2])
    if match := re.fullmatch(r"(decimal128|decimal256)\((\d+), (-?\d+)\)", dtype):
        return getattr(pa, match[1])(int(match[2]), int(match[3]))
    try:
        return pa.type_for_alias(dtype)
    except ValueError as exc:
        raise PlanError(f"Value({dtype!r}): Arrow has no such type") from exc


def _pyarrow() -> Any:
    return import_extra("pyarrow", "tables", "tables")
