"""Typed features: what the fields of a table mean, as small values, and as the metadata that Hugging Face reads.

A file whose schema carries this metadata loads in ``datasets`` with its features, and files of theirs are decoded here
by what they say: ``decode()`` without arguments follows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, cast

from penstock.errors import MissingExtra, PlanError

METADATA = b"huggingface"  # the key of an Arrow schema's metadata under which features are described
_DTYPE = re.compile(r"[a-z][a-z0-9_]*([\[(][^\])]*[\])])?")
_NUMBERS = re.compile(r"u?int(8|16|32|64)|float(16|32|64)|bool")


class Feature:
    """What one field holds; the kinds below are all there are."""

    __slots__ = ()


Given: TypeAlias = "Feature | Mapping[str, Given]"  # what a user may write for one: nested dicts are structs


@dataclass(frozen=True, slots=True)
class Value(Feature):
    """A number, text, bytes or a moment, by the name of its Arrow type: ``"int64"``, ``"string"``, ``"binary"``."""

    dtype: str = "string"

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or not _DTYPE.fullmatch(self.dtype):
            raise PlanError(f"Value({self.dtype!r}): give the name of a type, such as 'int64' or 'string'")

    @property
    def is_number(self) -> bool:
        """Whether an array can hold many of them."""
        return _NUMBERS.fullmatch(self.dtype) is not None


@dataclass(frozen=True, slots=True)
class Image(Feature):
    """A picture, stored as the bytes of its file; decoded to uint8, as stored or in ``mode`` (``"RGB"``, ``"L"``)."""

    mode: str | None = None
    decode: bool = True


@dataclass(frozen=True, slots=True)
class Audio(Feature):
    """Sound, stored as the bytes of its file; decoded to ``{"array", "sampling_rate"}``, at ``sampling_rate`` if given.

    ``num_channels=1`` mixes several channels into one.
    """

    sampling_rate: int | None = None
    num_channels: int | None = None
    decode: bool = True

    def __post_init__(self) -> None:
        rate = self.sampling_rate
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int) or rate < 1):
            raise PlanError(f"Audio(sampling_rate={rate!r}): give samples a second, such as 16000")


@dataclass(frozen=True, slots=True)
class ClassLabel(Feature):
    """A class by its number; ``names`` says what the numbers mean."""

    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = (self.names,) if isinstance(self.names, str) else tuple(self.names)
        if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
            raise PlanError(f"ClassLabel({list(names)!r}): give different names")
        object.__setattr__(self, "names", names)

    def number(self, name: str) -> int:
        """The number of a class.

        Raises:
            ValueError: there is no such class.
        """
        if name not in self.names:
            raise ValueError(f"{name!r} is none of the classes {', '.join(self.names[:8])}")
        return self.names.index(name)


@dataclass(frozen=True, slots=True)
class Tensor(Feature):
    """An array of one shape and dtype; the first length may be ``None``: it differs from sample to sample."""

    shape: tuple[int | None, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        shape = tuple(self.shape)
        right = all(type(n) is int and n >= 0 for n in shape[1:]) and shape and (shape[0] is None or shape[0] >= 0)
        if not right or _NUMBERS.fullmatch(self.dtype) is None:
            raise PlanError(
                f"Tensor({self.shape!r}, {self.dtype!r}): give lengths and a type, as in (224, 224), 'uint8'"
            )
        object.__setattr__(self, "shape", shape)


@dataclass(frozen=True, slots=True)
class Sequence(Feature):
    """Any number of values of one kind, or exactly ``length``."""

    feature: Feature
    length: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature", feature_of(self.feature))


@dataclass(frozen=True, slots=True)
class Struct(Feature):
    """Named values inside of one field: what a nested dict of features becomes."""

    fields: tuple[tuple[str, Feature], ...]


@dataclass(frozen=True, slots=True)
class OtherFeature(Feature):
    """A kind that is not known here, kept as it was described, so that writing it again loses nothing."""

    described: str


Features: TypeAlias = dict[str, Feature]


def feature_of(given: Any) -> Feature:
    """Read what a user wrote for one field: a feature, or a dict of them.

    Raises:
        PlanError: it is neither.
    """
    if isinstance(given, Feature):
        return given
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return Struct(tuple((name, feature_of(inner)) for name, inner in given.items()))
    raise PlanError(f"{given!r} is no feature: give one of ps.features, such as Value('int64'), or a dict of them")


def features_of(metadata: Mapping[bytes, bytes] | None) -> Features | None:
    """Read the features that an Arrow schema's metadata describes; ``None`` where it says nothing of them.

    Metadata that cannot be understood is as good as none: the columns are there all the same.
    """
    try:
        described = json.loads((metadata or {})[METADATA])["info"]["features"]
        return features_from(described)
    except (KeyError, TypeError, ValueError):
        return None


def metadata_of(features: Mapping[str, Given]) -> dict[bytes, bytes]:
    """Describe features as the metadata of an Arrow schema."""
    return {METADATA: json.dumps({"info": {"features": described(features)}}).encode()}


def described(features: Mapping[str, Given]) -> dict[str, Any]:
    """Describe features in the plain dicts and lists that Hugging Face stores."""
    return {name: _description(feature_of(feature)) for name, feature in features.items()}


def features_from(descriptions: Mapping[str, Any]) -> Features:
    """Read what ``described`` gives, or ``Features.to_dict`` of Hugging Face.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(descriptions, Mapping):
        raise ValueError(f"features are described by a dict, not by {type(descriptions).__name__}")
    return {name: _feature(inner) for name, inner in descriptions.items()}


def _description(feature: Feature) -> Any:
    match feature:
        case Value(dtype):
            return {"dtype": dtype, "_type": "Value"}
        case ClassLabel(names):
            return {"names": list(names), "_type": "ClassLabel"}
        case Sequence(inner, length):
            return {"feature": _description(inner), "_type": "List", **({} if length is None else {"length": length})}
        case Struct(inside):
            return {name: _description(one) for name, one in inside}
        case Tensor(shape, dtype):
            if 2 <= len(shape) <= 5:
                return {"shape": list(shape), "dtype": dtype, "_type": f"Array{len(shape)}D"}
            inner = Value(dtype) if len(shape) == 1 else Tensor(shape[1:], dtype)
            return _description(Sequence(inner, shape[0]))
        case OtherFeature(text):
            return json.loads(text)
    usual = type(feature)()  # a description leaves out what is as usual
    parts = [one.name for one in fields(cast(Any, feature))]
    said = {name: getattr(feature, name) for name in parts if getattr(feature, name) != getattr(usual, name)}
    return {**said, "_type": type(feature).__name__}


def _feature(told: Any) -> Feature:
    if isinstance(told, list) and len(told) == 1:  # how lists were described once
        return Sequence(_feature(told[0]))
    if not isinstance(told, Mapping):
        raise ValueError(f"{told!r} describes no feature")
    kind = told.get("_type")
    if not isinstance(kind, str):
        return Struct(tuple((name, _feature(inner)) for name, inner in told.items()))
    if kind == "Value":
        return Value(told["dtype"])
    if kind == "Image":
        return Image(told.get("mode"), told.get("decode", True))
    if kind == "Audio":
        return Audio(told.get("sampling_rate"), told.get("num_channels"), told.get("decode", True))
    if kind == "ClassLabel":
        return ClassLabel(tuple(told.get("names") or map(str, range(told.get("num_classes") or 0))))
    if kind in ("List", "Sequence"):
        return _list(told)
    if re.fullmatch(r"Array[2-5]D", kind):
        return Tensor(tuple(told["shape"]), told["dtype"])
    return OtherFeature(json.dumps(told, sort_keys=True))


def _list(told: Mapping[str, Any]) -> Feature:
    inner, length = _feature(told["feature"]), told.get("length", -1)
    length = None if length in (-1, None) else int(length)
    if isinstance(inner, Struct) and told["_type"] == "Sequence":  # stored as a struct of lists, by old habit
        return Struct(tuple((name, Sequence(feature, length)) for name, feature in inner.fields))
    return Sequence(inner, length)


def arrow_type(feature: Given) -> Any:
    """The Arrow type that a field of this feature is stored as.

    Raises:
        MissingExtra: pyarrow is not installed.
        PlanError: there is no such type.
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
        case Struct(inside):
            return pa.struct([(name, arrow_type(one)) for name, one in inside])
        case Tensor(shape, dtype):
            kind = _value_type(dtype)
            for _ in shape:
                kind = pa.list_(kind)
            return kind
    raise PlanError(f"a feature of this kind cannot be written: {feature}")


def arrow_schema(features: Mapping[str, Given]) -> Any:
    """The Arrow schema of a table with these features, which it describes in its metadata.

    Raises:
        MissingExtra: pyarrow is not installed.
        PlanError: a feature cannot be written.
    """
    pa = _pyarrow()
    columns = [(name, arrow_type(feature)) for name, feature in features.items()]
    return pa.schema(columns, metadata=metadata_of(features))


def features_by_type(columns: Iterable[tuple[str, Any]]) -> Features:
    """What can be said of columns by their Arrow types alone: ``(name, type)`` each.

    Raises:
        MissingExtra: pyarrow is not installed.
    """
    return {name: _by_type(kind) for name, kind in columns}


def _by_type(kind: Any) -> Feature:
    pa = _pyarrow()
    if isinstance(kind, pa.BaseExtensionType):
        return _by_type(kind.storage_type)
    if pa.types.is_struct(kind):
        inner = [kind.field(number) for number in range(kind.num_fields)]
        return Struct(tuple((one.name, _by_type(one.type)) for one in inner))
    if pa.types.is_fixed_size_list(kind):
        return Sequence(_by_type(kind.value_type), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return Sequence(_by_type(kind.value_type))
    if pa.types.is_dictionary(kind):
        return _by_type(kind.value_type)
    return Value(_ALIASES.get(str(kind), str(kind)))


_ALIASES = {
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
        raise PlanError(f"Value({dtype!r}): there is no such type") from exc


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as exc:
        raise MissingExtra("tables", "tables") from exc
    return pyarrow
