"""Which codec reads and writes a field: by its extension, or as the user names it."""

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
class _Request:
    """What a codec may want to know about the field it is built for."""

    field: str
    limits: Limits
    trust_pickle: bool


@dataclass(frozen=True, slots=True)
class _Codec:
    """One way of storing values: the extensions that mean it, and both directions."""

    extensions: tuple[str, ...]
    decoder: Callable[[_Request], Decoder]
    encode: Callable[[Any, _Request], bytes]


def _plainly(decode: Decoder) -> Callable[[_Request], Decoder]:
    """Of a decoder that needs the data alone."""
    return lambda request: decode


def _within_limits(decode: Callable[..., Any]) -> Callable[[_Request], Decoder]:
    return lambda request: partial(decode, limits=request.limits)


def _value_only(encode: Callable[[Any], bytes]) -> Callable[[Any, _Request], bytes]:
    """Of an encoder that needs the value alone."""
    return lambda value, request: encode(value)


def _for_extension(encode: Callable[[Any, str], bytes]) -> Callable[[Any, _Request], bytes]:
    return lambda value, request: encode(value, extension(request.field))


def _int_decoder(request: _Request) -> Decoder:
    return partial(text.decode_int, name=extension(request.field))


def _pth_decoder(request: _Request) -> Decoder:
    return arrays.pth_decoder(request.limits, trust_pickle=request.trust_pickle)


def _pickle_decoder(request: _Request) -> Decoder:
    return pickle.loads if request.trust_pickle else _refuse_pickle


def _refuse_pickle(data: bytes) -> Any:
    raise ValueError("pickle can run code and is refused; decode(trust_pickle=True) if you trust this data")


def _encode_pickle(value: Any, request: _Request) -> bytes:
    if not request.trust_pickle:
        raise ValueError("pickle can run code when it is read and is refused; trust_pickle=True to write it")
    return pickle.dumps(value)


CODECS: Mapping[str, _Codec] = MappingProxyType(
    {
        "txt": _Codec(("txt", "text", "transcript"), _plainly(text.decode_text), _value_only(text.encode_text)),
        "int": _Codec(
            ("cls", "cls2", "class", "count", "index", "inx", "id"),
            _int_decoder,
            _value_only(text.encode_int),
        ),
        "json": _Codec(("json", "jsn"), _plainly(text.decode_json), _value_only(text.encode_json)),
        "msgpack": _Codec(("msgpack", "mp", "msg"), lambda _: text.msgpack_decoder(), _value_only(text.encode_msgpack)),
        "cbor": _Codec(("cbor",), lambda _: text.cbor_decoder(), _value_only(text.encode_cbor)),
        "npy": _Codec(("npy",), _within_limits(arrays.decode_npy), _value_only(arrays.encode_npy)),
        "npz": _Codec(("npz",), _within_limits(arrays.decode_npz), _value_only(arrays.encode_npz)),
        "ten": _Codec(("ten", "tb", "tenbin"), _plainly(arrays.decode_tenbin), _value_only(arrays.encode_tenbin)),
        "pth": _Codec(("pth",), _pth_decoder, _value_only(arrays.encode_pth)),
        "audio": _Codec(audio.EXTENSIONS, lambda r: audio.decoder(r.limits), _for_extension(audio.encode_audio)),
        "image": _Codec(
            images.EXTENSIONS, lambda r: images.decoder(None, r.limits), _for_extension(images.encode_image)
        ),
        "pickle": _Codec(("pkl", "pickle", "pyd"), _pickle_decoder, _encode_pickle),
    }
)

_BY_EXTENSION: Mapping[str, str] = MappingProxyType(
    {extension: name for name, codec in CODECS.items() for extension in codec.extensions}
)


def extension(field: str) -> str:
    """The part of a field's name that chooses its codec: ``"png"`` for ``"seg.PNG"``."""
    return field.rpartition(".")[2].lower()


def codec_of(field: str) -> str | None:
    """The name of the codec that the extension of this field means."""
    return _BY_EXTENSION.get(extension(field.lower().removesuffix(".gz")))


def is_image(field: str) -> bool:
    """Whether ``decode(spec)`` applies an image spec to this field."""
    return _BY_EXTENSION.get(extension(field)) == "image"


def check_spec(spec: str, *, by_field: bool = False) -> None:
    """Check that ``spec`` means something, where it is written.

    Args:
        spec: An image spec such as ``"rgb8"``.
        by_field: The spec is given for one named field, where the name of a codec (``"json"``, ``"audio"``),
            any known extension or ``"bytes"`` will do as well.

    Raises:
        PlanError: It does not; the message lists what does, nearest first.
    """
    if spec in images.FORMS or (by_field and (spec == "bytes" or spec in CODECS or spec in _BY_EXTENSION)):
        return
    known = [*images.FORMS, *(["bytes", *CODECS] if by_field else [])]
    near = get_close_matches(str(spec), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if not by_field and (spec == "bytes" or spec in CODECS or spec in _BY_EXTENSION):
        hint = f"it is for one field: decode(fields={{'name': {spec!r}}}); "
    raise PlanError(f"unknown decode spec {spec!r}: {hint}known are {', '.join(known)}")


def decoder(field: str, spec: Spec = None, *, limits: Limits, trust_pickle: bool = False) -> Decoder | None:
    """Return the function that decodes this field's bytes, or ``None`` where they stay bytes.

    The function is pure, thread-safe and picklable; it raises ``ValueError`` for data it cannot, or must not,
    decode.

    Args:
        field: The field's name; its last part, in any case, is the extension. ``.gz`` is unfolded first.
        spec: An image spec, applied to image extensions; ``None`` gives images as they are stored.
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
        return partial(_unfolded, inner=inner, limits=limits)
    name = _BY_EXTENSION.get(extension(field))
    if name is None:
        return None
    if name == "image":
        return images.decoder(spec, limits)
    return CODECS[name].decoder(_Request(field, limits, trust_pickle))


def explicit(field: str, spec: Spec, *, limits: Limits, trust_pickle: bool = False) -> Decoder:
    """Return the function that decodes this field as the user asked for it by name, whatever its extension.

    Args:
        field: The field's name; if it ends in ``.gz`` it is unfolded first, unless bytes are asked for.
        spec: An image spec, the name of a codec or of an extension, or ``"bytes"``; ``None``: by extension.
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
        inner = explicit(field[: -len(".gz")], spec, limits=limits, trust_pickle=trust_pickle)
        return partial(_unfolded, inner=inner, limits=limits)
    if spec in images.FORMS:
        return images.decoder(spec, limits)
    name = spec if spec in CODECS else _BY_EXTENSION[spec]
    return CODECS[name].decoder(_Request(field, limits, trust_pickle))


def encode(field: str, value: Any, *, trust_pickle: bool = False) -> bytes:
    """Return the bytes to store for a field: the way back of ``decoder(field)``.

    Bytes are taken as already encoded and pass through (under ``.gz`` they are compressed unless they are
    gzip already); text is written as UTF-8 under every extension that means nothing else.

    Raises:
        TypeError: No codec knows the extension.
        ValueError: The codec cannot store this value, or pickle is not trusted.
        MissingExtra: The codec needs a package that is not installed.
    """
    raw = bytes(value) if isinstance(value, bytes | bytearray | memoryview) else None
    outer, _, last = field.rpartition(".")
    if last.lower() == "gz":
        if raw is not None and raw.startswith(gz.MAGIC):
            return raw
        return gz.compress(encode(outer, value, trust_pickle=trust_pickle))
    if raw is not None:
        return raw
    name = _BY_EXTENSION.get(extension(field))
    if name is None and not isinstance(value, str):
        raise TypeError(_no_encoder(field, value))
    try:
        return CODECS[name or "txt"].encode(value, _Request(field, Limits(), trust_pickle))
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise ValueError(f"field {field!r} ({type(value).__name__}) cannot be encoded: {exc}") from exc


def _unfolded(data: bytes, inner: Decoder | None, limits: Limits) -> Any:
    content = gz.decompress(data, limits)
    return content if inner is None else inner(content)


def _no_encoder(field: str, value: Any) -> str:
    fitting = "json"
    if isinstance(value, int | np.integer | np.bool_):
        fitting = "cls"
    elif isinstance(value, np.ndarray):
        fitting = "npy"
    elif type(value).__module__.partition(".")[0] == "PIL":
        fitting = "png"
    elif type(value).__module__.partition(".")[0] == "torch":
        fitting = "pth"
    return (
        f"field {field!r} ({type(value).__name__}) has no encoder for its extension; "
        f"rename it, e.g. .rename({fitting}={field!r})"
    )
