"""Codecs by feature: decode stored values, encode values for storage, infer features from values."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from penstock.codecs import audio, images
from penstock.codecs.arrays import as_array
from penstock.codecs.features import (
    Audio,
    ClassLabel,
    Feature,
    Features,
    Image,
    OtherFeature,
    Sequence,
    Struct,
    Tensor,
    Value,
    feature_of,
)
from penstock.codecs.limits import Limits
from penstock.codecs.registry import codec_of, encode, extension, is_image
from penstock.codecs.resample import resampled

_IMAGE_SPECS_BY_MODE = {"RGB": "rgb8", "L": "l8", "RGBA": "rgba8"}
_FILE_KEYS = {"bytes", "path"}  # the members of a file that is embedded in a table

ReadFile = Callable[[str], bytes]  # path -> content


def feature_decoder(feature: Feature, spec: str | None = None, *, limits: Limits) -> Callable[[Any], Any] | None:
    """Return the function that decodes stored values of ``feature``; ``None`` if they need no decoding.

    The function returns values that are not in stored form, and ``None``, unchanged.

    Args:
        feature: What the field holds.
        spec: How images are decoded; ``None``: in the mode of the feature.
        limits: How large a value may be.

    Raises:
        MissingExtra: A package that the codec needs is not installed.
    """
    match feature:
        case Image(mode, True):
            decode_image = images.image_decoder(spec or _IMAGE_SPECS_BY_MODE.get(mode or ""), limits)
            return partial(decode_file, decode=decode_image)
        case Audio(rate, channels, True):
            decode = partial(_decode_audio, limits=limits, rate=rate, channels=channels)
            audio.audio_decoder(limits)  # raises where soundfile is not installed
            return partial(decode_file, decode=decode)
        case Tensor():
            return partial(_decode_tensor, feature=feature)
        case Sequence(inner):
            decode_item = feature_decoder(inner, spec, limits=limits)
            return None if decode_item is None else partial(_decode_list, decode_item=decode_item)
        case Struct(fields):
            candidates = {name: feature_decoder(inner, spec, limits=limits) for name, inner in fields}
            decoders = {name: decoder for name, decoder in candidates.items() if decoder is not None}
            return partial(_decode_struct, decoders=decoders) if decoders else None
    return None


def file_bytes(value: Any) -> bytes | None:
    """Return the bytes of a file embedded in a table, ``{"bytes", "path"}``, or bytes themselves; else ``None``.

    Raises:
        ValueError: The table holds only the path of the file, not its bytes.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping) and "bytes" in value and value.keys() <= _FILE_KEYS:
        if value["bytes"] is None:
            raise ValueError(f"the path {value.get('path')!r} is stored without the bytes of its file")
        return bytes(value["bytes"])
    return None


def decode_file(value: Any, decode: Callable[..., Any], **kwargs: Any) -> Any:
    """Decode a file embedded in a table; return any other value unchanged.

    Raises:
        ValueError: The table holds only the path of the file, not its bytes.
    """
    data = file_bytes(value)
    return value if data is None else decode(data, **kwargs)


def _decode_audio(data: bytes, limits: Limits, rate: int | None, channels: int | None) -> dict[str, Any]:
    decoded = audio.decode_audio(data, limits)
    if channels == 1 and decoded["array"].ndim == 2:
        decoded["array"] = decoded["array"].mean(axis=1, dtype=np.float32)
    if rate is not None and decoded["sampling_rate"] != rate:
        array, own_rate = decoded["array"], decoded["sampling_rate"]
        size = array.nbytes * rate // max(1, own_rate)
        limits.check_bytes(size, "resampled audio")
        limits.check_ratio(array.nbytes, size, "resampled audio")
        decoded = {"array": resampled(array, own_rate, rate), "sampling_rate": rate}
    return decoded


def _decode_tensor(value: Any, feature: Tensor) -> Any:
    return None if value is None else _to_array(value, feature)


def _to_array(value: Any, feature: Tensor) -> np.ndarray[Any, Any]:
    array = _stacked(value, np.dtype(feature.dtype))
    if not array.size and not len(array):  # an empty list does not determine the other lengths
        array = array.reshape(0, *(length or 0 for length in feature.shape[1:]))
    actual, expected = array.shape, feature.shape
    if len(actual) != len(expected) or any(length not in (None, n) for length, n in zip(expected, actual, strict=True)):
        raise ValueError(f"the array has the shape {actual}, but its feature has {expected}")
    return array


def _stacked(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return nested lists, or arrays of arrays, as one array."""
    if isinstance(value, np.ndarray) and value.dtype == object and len(value):
        return np.stack([_stacked(row, dtype) for row in value])
    return np.asarray(value, dtype)


def _decode_list(value: Any, decode_item: Callable[[Any], Any]) -> Any:
    return [decode_item(item) for item in value] if isinstance(value, list | tuple | np.ndarray) else value


def _decode_struct(value: Any, decoders: Mapping[str, Callable[[Any], Any]]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: decoders[name](inner) if name in decoders else inner for name, inner in value.items()}


def to_tar_field(name: str, feature: Feature, value: Any) -> tuple[str, Any]:
    """Return the name and value of a table's field in a tar shard; the extension of the name decodes the value.

    Raises:
        ValueError: The table holds only the path of a file, not its bytes.
    """
    if feature == Value("binary"):  # bytes, or a value that was decoded from them by extension
        return name, value
    codec, data = _codec_name(feature, value), value
    if codec in ("image", "audio") and isinstance(value, Mapping) and (content := file_bytes(value)) is not None:
        path_suffix = os.path.splitext(value.get("path") or "")[1].lstrip(".").lower()
        data, suffix = content, path_suffix if codec_of(path_suffix) == codec else _sniffed_suffix(content, feature)
    else:
        suffix = {"image": "png", "audio": "wav", "int": "cls"}.get(codec, codec)
    if value is None or isinstance(value, bytes) or codec_of(name) == codec:
        return name, data
    if isinstance(feature, Tensor):
        data = _to_array(value, feature)
    return f"{name}.{suffix}", data


def _codec_name(feature: Feature, value: Any) -> str:
    """Return the name of the codec that stores a value in a tar shard."""
    match feature:
        case Image():
            return "image"
        case Audio():
            return "audio"
        case Tensor():
            return "npy"
        case ClassLabel():
            return "int"
    if isinstance(value, np.ndarray):
        return "npy"
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return "txt" if isinstance(value, str) else "int" if is_integer else "json"


def _sniffed_suffix(data: bytes, feature: Feature) -> str:
    """Return an extension for a file by its first bytes; any media extension works: decoders look at the content."""
    magics = {b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"fLaC": "flac", b"OggS": "ogg", b"ID3": "mp3"}
    recognised = next((suffix for magic, suffix in magics.items() if data.startswith(magic)), None)
    return recognised or ("png" if isinstance(feature, Image) else "wav")


def stored(
    feature: Feature,
    value: Any,
    *,
    image_format: str = "png",
    audio_format: str = "wav",
    read: ReadFile | None = None,
) -> Any:
    """Return ``value`` as a table stores a field of ``feature``: the inverse of ``feature_decoder``.

    Args:
        feature: What the field holds.
        value: A decoded value, or one that is in stored form already. Images are arrays, PIL images or bytes; audio
            is ``{"array", "sampling_rate"}`` or bytes; a class is its number or its name.
        image_format: The extension of the format in which images that are not bytes are encoded.
        audio_format: The extension of the format in which audio that is not bytes is encoded.
        read: Reads the file of an image or audio that is given by its path; ``None``: a path is refused.

    Raises:
        ValueError: The value does not match the feature.
        TypeError: The type of the value does not match the feature.
        MissingExtra: A package that the codec needs is not installed.
    """
    if value is None:
        return None
    match feature:
        case Image():
            return _stored_file(value, image_format, read)
        case Audio():
            return _stored_file(value, audio_format, read)
        case ClassLabel():
            return _class_number(feature, value)
        case Tensor():
            array = as_array(value)
            return _to_array(value if array is None else array, feature).tolist()
        case Sequence(inner, length):
            store = partial(stored, image_format=image_format, audio_format=audio_format, read=read)
            return _stored_list(value, inner, length, store)
        case Struct(fields):
            if not isinstance(value, Mapping):
                raise TypeError(f"expected a dict, as its feature says, not {type(value).__name__}")
            members = [name for name, _ in fields]
            if extra := [name for name in value if name not in members]:
                raise ValueError(f"unexpected {', '.join(map(repr, extra))}: its feature has only {', '.join(members)}")
            store = partial(stored, image_format=image_format, audio_format=audio_format, read=read)
            return {name: store(inner, value.get(name)) for name, inner in fields}
        case Value():
            array = as_array(value) if not isinstance(value, bytes | str) else None
            return value if array is None else array.tolist()
    return value


def _stored_list(value: Any, inner: Feature, length: int | None, store: Callable[[Feature, Any], Any]) -> list[Any]:
    array = as_array(value)
    if array is None and not isinstance(value, list | tuple):
        raise TypeError(f"expected a list, as its feature says, not {type(value).__name__}")
    if length is not None and len(value) != length:
        raise ValueError(f"expected a list of length {length}, as its feature says, not {len(value)}")
    if array is not None and isinstance(inner, Value):
        items: list[Any] = array.tolist()
        return items
    return [store(inner, item) for item in value]


def _stored_file(value: Any, suffix: str, read: ReadFile | None) -> dict[str, Any]:
    """Return an image or audio as the embedded file that a table stores."""
    if isinstance(value, str | os.PathLike):
        value = {"bytes": None, "path": os.fspath(value)}
    if isinstance(value, Mapping) and value.get("bytes") is None and value.get("path") and read is not None:
        value = {"bytes": read(value["path"]), "path": os.path.basename(value["path"])}
    data = file_bytes(value)
    if data is None:
        return {"bytes": encode(suffix, value), "path": None}
    return {"bytes": data, "path": value.get("path") if isinstance(value, Mapping) else None}


def _class_number(feature: ClassLabel, value: Any) -> int:
    if isinstance(value, str):
        return feature.number(value)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"expected the number or name of a class, not {type(value).__name__}")
    if feature.names and not -1 <= value < len(feature.names):
        raise ValueError(f"class {value} is out of range: there are {len(feature.names)} classes")
    return int(value)


def store_sample(features: Mapping[str, Feature], sample: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Return a sample as a table stores it, ``None`` for fields that it lacks; ``options`` as in ``stored``.

    Raises:
        ValueError: A field does not match its feature, or has no feature.
        MissingExtra: A package that a codec needs is not installed.
    """
    if extra := [name for name in sample if name not in features]:
        raise ValueError(f"field {extra[0]!r} is not among the features: {', '.join(features)}")
    out = {}
    for name, feature in features.items():
        try:
            out[name] = stored(feature, sample.get(name), **options)
        except (TypeError, ValueError, OverflowError) as exc:
            raise ValueError(f"field {name!r}: {exc}") from exc
    return out


def infer_features(samples: Iterable[Mapping[str, Any]], known: Mapping[str, Feature] | None = None) -> Features:
    """Infer the features of fields from sample values; a ``known`` feature is kept if the values match it.

    Raises:
        ValueError: A table cannot store a value.
    """
    out: Features = {}
    for sample in samples:
        for name, value in sample.items():
            if value is None or (name in out and not _is_incomplete(out[name])):
                out.setdefault(name, (known or {}).get(name) or Value("null"))
                continue
            feature = (known or {}).get(name)
            try:
                out[name] = feature if feature is not None and _matches(feature, value) else _inferred(name, value)
            except ValueError as exc:
                raise ValueError(f"field {name!r}: {exc}") from exc
    return out


def _is_incomplete(feature: Feature) -> bool:
    """Return whether a later value may add information: only ``None`` or empty lists have been seen."""
    return feature == Value("null") or (isinstance(feature, Sequence) and _is_incomplete(feature.feature))


def _matches(feature: Feature, value: Any) -> bool:
    if isinstance(feature, OtherFeature):
        return True
    if isinstance(feature, Value):
        return _family(value) in (None, _FAMILIES.get(feature.dtype.rstrip("0123456789").removeprefix("u")))
    try:
        stored(feature, value)
    except (TypeError, ValueError):
        return False
    return True


_FAMILIES = {"int": int, "float": float, "bool": bool, "string": str, "large_string": str, "binary": bytes}


def _family(value: Any) -> type | None:
    """Return the Python type that stands for all types like the value's; ``None`` for dates and other scalars."""
    families = ((bool, (bool, np.bool_)), (int, (int, np.integer)), (float, (float, np.floating)), (str, str))
    found = next((family for family, types in families if isinstance(value, types)), None)
    if found is None and isinstance(value, bytes | bytearray):
        return bytes
    return object if found is None and isinstance(value, np.ndarray | Mapping | list | tuple) else found


def _inferred(name: str, value: Any) -> Feature:
    package = type(value).__module__.partition(".")[0]
    if package == "PIL" or (isinstance(value, bytes) and is_image(name)):
        return Image()
    if isinstance(value, Mapping):
        return _inferred_struct(value)
    if isinstance(value, bytes) and extension(name) in audio.AUDIO_EXTENSIONS:
        return Audio()
    if isinstance(value, np.generic):
        return Value(str(value.dtype))
    array = as_array(value)
    if array is not None and array.ndim:
        if not Value(str(array.dtype)).is_number:
            raise ValueError(f"an array of {array.dtype} cannot be stored in a table")
        return Sequence(Value(str(array.dtype))) if array.ndim == 1 else Tensor(array.shape, str(array.dtype))
    if isinstance(value, list | tuple):
        return Sequence(_common_feature([_inferred(name, item) for item in value if item is not None]))
    return Value(_scalar_dtype(value))


def _inferred_struct(value: Mapping[str, Any]) -> Feature:
    if value.keys() == {"array", "sampling_rate"}:
        return Audio(int(value["sampling_rate"]))
    members = {str(key): Value("null") if inner is None else _inferred(str(key), inner) for key, inner in value.items()}
    return feature_of(members)


def _common_feature(features: list[Feature]) -> Feature:
    """Return the one feature of the items of a list; integers among floats count as floats."""
    distinct = set(features)
    if len(distinct) < 2:
        return features[0] if features else Value("null")
    if distinct == {Value("int64"), Value("float64")}:
        return Value("float64")
    raise ValueError(f"the items of a list have different types: {', '.join(sorted(map(repr, distinct))[:3])}")


def _scalar_dtype(value: Any) -> str:
    names: tuple[tuple[Any, str], ...] = (
        (bool, "bool"),
        (int, "int64"),
        (float, "float64"),
        (str, "string"),
        (bytes | bytearray, "binary"),
        (datetime.datetime, "timestamp[us]"),
        (datetime.date, "date32"),
        (datetime.time, "time64[us]"),
        (datetime.timedelta, "duration[us]"),
    )
    dtype = next((name for kind, name in names if isinstance(value, kind)), None)
    if dtype is None:
        raise ValueError(f"a value of type {type(value).__name__} cannot be stored in a table")
    return dtype
