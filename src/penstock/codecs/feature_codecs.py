"""Fields by their features: stored values decoded, values made ready to be stored, features told from values."""

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

_MODES = {"RGB": "rgb8", "L": "l8", "RGBA": "rgba8"}
_STORED = {"bytes", "path"}  # the fields of a file that is kept in a table

Read = Callable[[str], bytes]  # the bytes of a file that a value names


def decoder_of(feature: Feature, spec: str | None = None, *, limits: Limits) -> Callable[[Any], Any] | None:
    """Return the function from stored values of ``feature`` to what users work with; ``None``: they are the same.

    What is not in its stored form any more is left as it is, and so is ``None``.

    Args:
        feature: What the field holds.
        spec: How images are decoded; ``None``: as the feature says.
        limits: How large a value may be.

    Raises:
        MissingExtra: a package that is needed is not installed.
    """
    match feature:
        case Image(mode, True):
            return partial(of_file, decode=images.decoder(spec or _MODES.get(mode or ""), limits))
        case Audio(rate, channels, True):
            decode = partial(_sound, decode=audio.decoder(limits), rate=rate, channels=channels)
            return partial(of_file, decode=decode)
        case Tensor():
            return partial(_tensor, feature=feature)
        case Sequence(inner):
            each = decoder_of(inner, spec, limits=limits)
            return None if each is None else partial(_items, each=each)
        case Struct(fields):
            known = {name: decoder_of(inner, spec, limits=limits) for name, inner in fields}
            calls = {name: call for name, call in known.items() if call is not None}
            return partial(_inside, calls=calls) if calls else None
    return None


def file_bytes(value: Any) -> bytes | None:
    """The bytes of a file as tables keep it, ``{"bytes", "path"}``, or of bytes themselves; ``None``: it is neither.

    Raises:
        ValueError: there is only the path of a file that was not stored.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping) and "bytes" in value and value.keys() <= _STORED:
        if value["bytes"] is None:
            raise ValueError(f"its file {value.get('path')!r} is named, and its bytes are not stored")
        return bytes(value["bytes"])
    return None


def of_file(value: Any, decode: Callable[..., Any], **more: Any) -> Any:
    """Decode the bytes of a file as tables keep it; a value that is something else is left as it is."""
    data = file_bytes(value)
    return value if data is None else decode(data, **more)


def _sound(data: bytes, decode: Callable[[bytes], Any], rate: int | None, channels: int | None) -> dict[str, Any]:
    sound: dict[str, Any] = decode(data)
    if channels == 1 and sound["array"].ndim == 2:
        sound["array"] = sound["array"].mean(axis=1, dtype=np.float32)
    if rate is not None and sound["sampling_rate"] != rate:
        sound = {"array": resampled(sound["array"], sound["sampling_rate"], rate), "sampling_rate": rate}
    return sound


def _tensor(value: Any, feature: Tensor) -> Any:
    return None if value is None else _array(value, feature)


def _array(value: Any, feature: Tensor) -> np.ndarray[Any, Any]:
    array = _numbers(value, np.dtype(feature.dtype))
    if not array.size and not len(array):  # a list of nothing does not tell its other lengths
        array = array.reshape(0, *(length or 0 for length in feature.shape[1:]))
    given, said = array.shape, feature.shape
    if len(given) != len(said) or any(length not in (None, n) for length, n in zip(said, given, strict=True)):
        raise ValueError(f"an array of the shape {given}, and {said} is what its feature says")
    return array


def _numbers(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray) and value.dtype == object and len(value):
        return np.stack([_numbers(row, dtype) for row in value])
    return np.asarray(value, dtype)


def _items(value: Any, each: Callable[[Any], Any]) -> Any:
    return [each(one) for one in value] if isinstance(value, list | tuple | np.ndarray) else value


def _inside(value: Any, calls: Mapping[str, Callable[[Any], Any]]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: calls[name](inner) if name in calls else inner for name, inner in value.items()}


def as_member(name: str, feature: Feature, value: Any) -> tuple[str, Any]:
    """What a field of a table is called in a shard, and its value there: one that its name's extension decodes.

    Raises:
        ValueError: there is only the path of a file that was not stored.
    """
    if feature == Value("binary"):  # bytes, or what an extension made of them
        return name, value
    kind, data = _kind(feature, value), value
    if kind in ("image", "audio") and isinstance(value, Mapping) and (found := file_bytes(value)) is not None:
        suffix = os.path.splitext(value.get("path") or "")[1].lstrip(".").lower()
        data, ending = found, suffix if codec_of(suffix) == kind else _sniffed(found, feature)
    else:
        ending = {"image": "png", "audio": "wav", "int": "cls"}.get(kind, kind)
    if value is None or isinstance(value, bytes) or codec_of(name) == kind:
        return name, data
    if isinstance(feature, Tensor):
        data = _array(value, feature)
    return f"{name}.{ending}", data


def _kind(feature: Feature, value: Any) -> str:
    """The codec for a value."""
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
    whole = isinstance(value, int) and not isinstance(value, bool)
    return "txt" if isinstance(value, str) else "int" if whole else "json"


def _sniffed(data: bytes, feature: Feature) -> str:
    """The extension of a file by its first bytes; any of its family will do, since content decides."""
    magics = {b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"fLaC": "flac", b"OggS": "ogg", b"ID3": "mp3"}
    found = next((kind for magic, kind in magics.items() if data.startswith(magic)), None)
    return found or ("png" if isinstance(feature, Image) else "wav")


def stored(feature: Feature, value: Any, *, image: str = "png", sound: str = "wav", read: Read | None = None) -> Any:
    """Return ``value`` as a table stores a field of ``feature``; the way back of ``decoder_of``.

    Args:
        feature: What the field holds.
        value: A value as users have it, or as it is stored already. Images are arrays, PIL images or bytes; sound is
            ``{"array", "sampling_rate"}`` or bytes; a class is its number or its name.
        image: How pictures that are not bytes yet are encoded.
        sound: How sounds that are not bytes yet are encoded.
        read: Reads the file of an image or a sound that is given by its path; ``None``: a path is refused.

    Raises:
        ValueError: the value is not what the feature says.
        TypeError: the same, by its type.
        MissingExtra: a package that is needed is not installed.
    """
    if value is None:
        return None
    match feature:
        case Image():
            return _file(value, image, read)
        case Audio():
            return _file(value, sound, read)
        case ClassLabel():
            return _class(feature, value)
        case Tensor():
            array = as_array(value)
            return _array(value if array is None else array, feature).tolist()
        case Sequence(inner, length):
            return _list(value, inner, length, image, sound, read)
        case Struct(fields):
            if not isinstance(value, Mapping):
                raise TypeError(f"a {type(value).__name__}, and a dict is what its feature says")
            known = [name for name, _ in fields]
            if extra := [name for name in value if name not in known]:
                raise ValueError(f"it has {', '.join(map(repr, extra))}, of which its feature says nothing")
            return {name: stored(inner, value.get(name), image=image, sound=sound, read=read) for name, inner in fields}
        case Value():
            array = as_array(value) if not isinstance(value, bytes | str) else None
            return value if array is None else array.tolist()
    return value


def _list(value: Any, inner: Feature, length: int | None, image: str, sound: str, read: Read | None) -> list[Any]:
    array = as_array(value)
    if array is None and not isinstance(value, list | tuple):
        raise TypeError(f"a {type(value).__name__}, and a list is what its feature says")
    if length is not None and len(value) != length:
        raise ValueError(f"a list of {len(value)}, and {length} is what its feature says")
    if array is not None and isinstance(inner, Value):
        out: list[Any] = array.tolist()
        return out
    return [stored(inner, one, image=image, sound=sound, read=read) for one in value]


def _file(value: Any, kind: str, read: Read | None) -> dict[str, Any]:
    """A file as tables keep it."""
    if isinstance(value, str | os.PathLike):
        value = {"bytes": None, "path": os.fspath(value)}
    if isinstance(value, Mapping) and value.get("bytes") is None and value.get("path") and read is not None:
        value = {"bytes": read(value["path"]), "path": os.path.basename(value["path"])}
    data = file_bytes(value)
    if data is None:
        return {"bytes": encode(kind, value), "path": None}
    return {"bytes": data, "path": value.get("path") if isinstance(value, Mapping) else None}


def _class(feature: ClassLabel, value: Any) -> int:
    if isinstance(value, str):
        return feature.number(value)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"a {type(value).__name__}, and a class is a number or a name")
    if feature.names and not -1 <= value < len(feature.names):
        raise ValueError(f"class {value}, and there are {len(feature.names)}")
    return int(value)


def store_sample(features: Mapping[str, Feature], sample: Mapping[str, Any], **how: Any) -> dict[str, Any]:
    """Return a sample as a table stores it, ``None`` for what it has not; ``how`` as in ``stored``.

    Raises:
        ValueError: a field is not what its feature says, or has none.
        MissingExtra: a package that is needed is not installed.
    """
    if extra := [name for name in sample if name not in features]:
        raise ValueError(f"field {extra[0]!r} is not among the features: {', '.join(features)}")
    out = {}
    for name, feature in features.items():
        try:
            out[name] = stored(feature, sample.get(name), **how)
        except (TypeError, ValueError, OverflowError) as exc:
            raise ValueError(f"field {name!r}: {exc}") from exc
    return out


def told_by(samples: Iterable[Mapping[str, Any]], known: Mapping[str, Feature] | None = None) -> Features:
    """Tell features by the values of some samples; what is ``known`` is believed where the values allow it.

    Raises:
        ValueError: a value is of a kind that no table stores.
    """
    out: Features = {}
    for sample in samples:
        for name, value in sample.items():
            if value is None or (name in out and not _vague(out[name])):
                out.setdefault(name, (known or {}).get(name) or Value("null"))
                continue
            sure = (known or {}).get(name)
            try:
                out[name] = sure if sure is not None and _holds(sure, value) else _told(name, value)
            except ValueError as exc:
                raise ValueError(f"field {name!r}: {exc}") from exc
    return out


def _vague(feature: Feature) -> bool:
    """Whether a later value may say more: nothing came yet, or a list of nothing."""
    return feature == Value("null") or (isinstance(feature, Sequence) and _vague(feature.feature))


def _holds(feature: Feature, value: Any) -> bool:
    if isinstance(feature, OtherFeature):
        return True
    if isinstance(feature, Value):
        return _kind_of(value) in (None, _FAMILIES.get(feature.dtype.rstrip("0123456789").removeprefix("u")))
    try:
        stored(feature, value)
    except (TypeError, ValueError):
        return False
    return True


_FAMILIES = {"int": int, "float": float, "bool": bool, "string": str, "large_string": str, "binary": bytes}


def _kind_of(value: Any) -> type | None:
    """Which family of plain values it belongs to; ``None``: one of those that only Arrow tells apart."""
    families = ((bool, (bool, np.bool_)), (int, (int, np.integer)), (float, (float, np.floating)), (str, str))
    found = next((family for family, kinds in families if isinstance(value, kinds)), None)
    if found is None and isinstance(value, bytes | bytearray):
        return bytes
    return object if found is None and isinstance(value, np.ndarray | Mapping | list | tuple) else found


def _told(name: str, value: Any) -> Feature:
    kind = type(value).__module__.partition(".")[0]
    if kind == "PIL" or (isinstance(value, bytes) and is_image(name)):
        return Image()
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, bytes) and extension(name) in audio.EXTENSIONS:
        return Audio()
    if isinstance(value, np.generic):
        return Value(str(value.dtype))
    array = as_array(value)
    if array is not None and array.ndim:
        if not Value(str(array.dtype)).is_number:
            raise ValueError(f"an array of {array.dtype} cannot be stored in a table")
        return Sequence(Value(str(array.dtype))) if array.ndim == 1 else Tensor(array.shape, str(array.dtype))
    if isinstance(value, list | tuple):
        return Sequence(_together([_told(name, one) for one in value if one is not None]))
    return Value(_plain(value))


def _mapping(value: Mapping[str, Any]) -> Feature:
    if value.keys() == {"array", "sampling_rate"}:
        return Audio(int(value["sampling_rate"]))
    return feature_of({str(key): Value("null") if one is None else _told(str(key), one) for key, one in value.items()})


def _together(kinds: list[Feature]) -> Feature:
    """The one kind of a list's values; whole numbers among fractions are fractions."""
    different = set(kinds)
    if len(different) < 2:
        return kinds[0] if kinds else Value("null")
    if different == {Value("int64"), Value("float64")}:
        return Value("float64")
    raise ValueError(f"a list of different kinds: {', '.join(sorted(map(repr, different))[:3])}")


def _plain(value: Any) -> str:
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
    found = next((name for kind, name in names if isinstance(value, kind)), None)
    if found is None:
        raise ValueError(f"a {type(value).__name__} cannot be stored in a table")
    return found
