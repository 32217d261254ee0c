"""The codecs, and which of them decodes and encodes a field: by its extension, or as the user asks by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.codecs import arrays, audio, gz, images, text
from penstock.codecs.limits import Limits
from penstock.errors import PlanError

Spec = str | None
Decoder = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class _CodecArguments:
    """What a codec may depend on besides the data: the name of the field and the arguments of ``decode``."""

    field: str
    limits: Limits
    trust_pickle: bool


@dataclass(frozen=True, slots=True)
class _Codec:
    """One storage format of values: its extensions, and how to decode and encode it."""

    extensions: tuple[str, ...]
    decoder: Callable[[_CodecArguments], Decoder]
    encode: Callable[[Any, _CodecArguments], bytes]


def _data_only(decode: Decoder) -> Callable[[_CodecArguments], Decoder]:
    """Adapt a decoder that needs only the data."""
    return lambda arguments: decode


def _with_limits(decode: Callable[..., Any]) -> Callable[[_CodecArguments], Decoder]:
    """Adapt a decoder that needs the limits."""
    return lambda arguments: partial(decode, limits=arguments.limits)


def _value_only(encode: Callable[[Any], bytes]) -> Callable[[Any, _CodecArguments], bytes]:
    """Adapt an encoder that needs only the value."""
    return lambda value, arguments: encode(value)


def _with_extension(encode: Callable[[Any, str], bytes]) -> Callable[[Any, _CodecArguments], bytes]:
    """Adapt an encoder that needs the field's extension."""
    return lambda value, arguments: encode(value, extension(arguments.field))


def _int_decoder(arguments: _CodecArguments) -> Decoder:
    return partial(text.decode_int, name=extension(arguments.field))


def _pth_decoder(arguments: _CodecArguments) -> Decoder:
    return arrays.pth_decoder(arguments.limits, trust_pickle=arguments.trust_pickle)


def _pickle_decoder(arguments: _CodecArguments) -> Decoder:
    return pickle.loads if arguments.trust_pickle else _refuse_pickle


def _refuse_pickle(data: bytes) -> Any:
    raise ValueError("pickle can run code and is refused; pass decode(trust_pickle=True) if you trust this data")


def _encode_pickle(value: Any, arguments: _CodecArguments) -> bytes:
    if not arguments.trust_pickle:
        raise ValueError("pickle can run code when it is read and is refused; pass trust_pickle=True to write it")
    return pickle.dumps(value)


CODECS: Mapping[str, _Codec] = MappingProxyType(
    {
        "txt": _Codec(("txt", "text", "transcript"), _data_only(text.decode_text), _value_only(text.encode_text)),
        "int": _Codec(
            ("cls", "cls2", "class", "count", "index", "inx", "id"),
            _int_decoder,
            _value_only(text.encode_int),
        ),
        "json": _Codec(("json", "jsn"), _data_only(text.decode_json), _value_only(text.encode_json)),
        "msgpack": _Codec(("msgpack", "mp", "msg"), lambda _: text.msgpack_decoder(), _value_only(text.encode_msgpack)),
        "cbor": _Codec(("cbor",), lambda _: text.cbor_decoder(), _value_only(text.encode_cbor)),
        "npy": _Codec(("npy",), _with_limits(arrays.decode_npy), _value_only(arrays.encode_npy)),
        "npz": _Codec(("npz",), _with_limits(arrays.decode_npz), _value_only(arrays.encode_npz)),
        "ten": _Codec(("ten", "tb", "tenbin"), _data_only(arrays.decode_tenbin), _value_only(arrays.encode_tenbin)),
        "pth": _Codec(("pth",), _pth_decoder, _value_only(arrays.encode_pth)),
        "audio": _Codec(
            audio.AUDIO_EXTENSIONS,
            lambda arguments: audio.audio_decoder(arguments.limits),
            _with_extension(audio.encode_audio),
        ),
        "image": _Codec(
            images.IMAGE_EXTENSIONS,
            lambda arguments: images.image_decoder(None, arguments.limits),
            _with_extension(images.encode_image),
        ),
        "pickle": _Codec(("pkl", "pickle", "pyd"), _pickle_decoder, _encode_pickle),
    }
)

_BY_EXTENSION: Mapping[str, str] = MappingProxyType(
    {extension: name for name, codec in CODECS.items() for extension in codec.extensions}
)


def extension(field: str) -> str:
    """Return the part of a field's name that chooses its codec: ``"png"`` for ``"seg.PNG"``."""
    return field.rpartition(".")[2].lower()


def codec_of(field: str) -> str | None:
    """Return the name of the codec for the extension of this field, ``.gz`` ignored; ``None`` if there is none."""
    return _BY_EXTENSION.get(extension(field.lower().removesuffix(".gz")))


def is_image(field: str) -> bool:
    """Return whether ``decode(spec)`` applies an image spec to this field."""
    return _BY_EXTENSION.get(extension(field)) == "image"


def check_spec(spec: str, *, by_field: bool = False) -> None:
    """Check that ``spec`` is valid.

    Args:
        spec: An image spec such as ``"rgb8"``.
        by_field: The spec is given for one named field, so the name of a codec (``"json"``, ``"audio"``),
            a known extension or ``"bytes"`` is valid too.

    Raises:
        PlanError: The spec is not valid; the message names the nearest spec and lists all of them.
    """
    if spec in images.IMAGE_SPECS or (by_field and (spec == "bytes" or spec in CODECS or spec in _BY_EXTENSION)):
        return
    supported = [*images.IMAGE_SPECS, *(["bytes", *CODECS] if by_field else [])]
    nearest = get_close_matches(str(spec), supported, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    if not by_field and (spec == "bytes" or spec in CODECS or spec in _BY_EXTENSION):
        hint = f"it applies to a single field: decode(fields={{'name': {spec!r}}}); "
    raise PlanError(f"unknown decode spec {spec!r}: {hint}supported specs: {', '.join(supported)}")


def decoder(field: str, spec: Spec = None, *, limits: Limits, trust_pickle: bool = False) -> Decoder | None:
    """Return the function that decodes this field by its extension, or ``None`` if the field stays bytes.

    The function is pure, thread-safe and picklable; it raises ``ValueError`` for data that it cannot, or must not,
    decode.

    Args:
        field: The field's name; its last part, in upper or lower case, is the extension. ``.gz`` is decompressed
            first.
        spec: An image spec, applied to image extensions; ``None`` decodes images as they are stored.
        limits: How large the value may be.
        trust_pickle: Decode pickle, and ``pth`` files that hold more than tensors and plain values.

    Raises:
        PlanError: The spec is unknown.
        MissingExtra: The codec needs a package that is not installed.
    """
    if spec is not None:
        check_spec(spec)
    outer, _, last = field.rpartition(".")
    if last.lower() == "gz":
        inner = decoder(outer, spec, limits=limits, trust_pickle=trust_pickle) if outer else None
        return partial(_decompress_then_decode, inner=inner, limits=limits)
    name = _BY_EXTENSION.get(extension(field))
    if name is None:
        return None
    if name == "image":
        return images.image_decoder(spec, limits)
    return CODECS[name].decoder(_CodecArguments(field, limits, trust_pickle))


def decoder_by_spec(field: str, spec: Spec, *, limits: Limits, trust_pickle: bool = False) -> Decoder:
    """Return the function that decodes this field by the spec given for it, whatever its extension.

    Args:
        field: The field's name; if it ends in ``.gz``, the data is decompressed first, unless ``spec`` is ``"bytes"``.
        spec: An image spec, the name of a codec, an extension, or ``"bytes"``; ``None``: by extension.
        limits: As for ``decoder``.
        trust_pickle: As for ``decoder``.

    Raises:
        PlanError: The spec is unknown.
        MissingExtra: The codec needs a package that is not installed.
    """
    if spec is None:
        return decoder(field, limits=limits, trust_pickle=trust_pickle) or bytes
    check_spec(spec, by_field=True)
    if spec == "bytes":
        return bytes
    if extension(field) == "gz":
        inner = decoder_by_spec(field[: -len(".gz")], spec, limits=limits, trust_pickle=trust_pickle)
        return partial(_decompress_then_decode, inner=inner, limits=limits)
    if spec in images.IMAGE_SPECS:
        return images.image_decoder(spec, limits)
    name = spec if spec in CODECS else _BY_EXTENSION[spec]
    return CODECS[name].decoder(_CodecArguments(field, limits, trust_pickle))


def encode(field: str, value: Any, *, trust_pickle: bool = False) -> bytes:
    """Return the bytes to store for a field: the inverse of ``decoder(field)``.

    Bytes count as encoded already and are returned unchanged (under ``.gz`` they are compressed, unless they are
    gzip data); text is written as UTF-8 under every extension that has no codec.

    Raises:
        TypeError: The extension has no codec.
        ValueError: The codec cannot store this value, or pickle is not trusted.
        MissingExtra: The codec needs a package that is not installed.
    """
    raw = bytes(value) if isinstance(value, bytes | bytearray | memoryview) else None
    outer, _, last = field.rpartition(".")
    if last.lower() == "gz":
        if raw is not None and raw.startswith(gz.GZIP_MAGIC):
            return raw
        return gz.compress(encode(outer, value, trust_pickle=trust_pickle))
    if raw is not None:
        return raw
    name = _BY_EXTENSION.get(extension(field))
    if name is None and not isinstance(value, str):
        raise TypeError(_no_encoder_message(field, value))
    try:
        return CODECS[name or "txt"].encode(value, _CodecArguments(field, Limits(), trust_pickle))
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ValueError(f"field {field!r} ({type(value).__name__}) cannot be encoded: {exc}") from exc


def _decompress_then_decode(data: bytes, inner: Decoder | None, limits: Limits) -> Any:
    content = gz.decompress(data, limits)
    return content if inner is None else inner(content)


def _no_encoder_message(field: str, value: Any) -> str:
    suggestion = "json"
    if isinstance(value, int | np.integer | np.bool_):
        suggestion = "cls"
    elif isinstance(value, np.ndarray):
        suggestion = "npy"
    elif type(value).__module__.partition(".")[0] == "PIL":
        suggestion = "png"
    elif type(value).__module__.partition(".")[0] == "torch":
        suggestion = "pth"
    return (
        f"field {field!r} ({type(value).__name__}) cannot be encoded: its extension has no encoder; "
        f"rename it, e.g. .rename({suggestion}={field!r})"
    )
