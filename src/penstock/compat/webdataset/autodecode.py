"""Decode samples field by field: a list of handlers ``f(key, data)``, of which the first that returns a value wins."""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from penstock import codecs
from penstock.codecs.images import load_image, open_image
from penstock.compat.webdataset import utils

FieldHandler = Callable[[str, bytes], Any]

pytorch_weights_only = os.environ.get("WDS_PYTORCH_WEIGHTS_ONLY", "0") == "1"
_LIMITS = codecs.Limits()

IMAGE_EXTENSIONS = re.findall(
    r"\w+",
    """blp bmp dib bufr cur pcx dcx dds ps eps fit fits fli flc ftc ftu gbr gif grib h5 hdf png apng jp2 j2k jpc jpf jpx
    j2c icns ico im iim tif tiff jfif jpe jpg jpeg mpg mpeg msp pcd pxr pbm pgm ppm pnm psd bw rgb rgba sgi ras tga icb
    vda vst webp wmf emf xbm xpm""",
)
_UNSAFE_FORMATS = {"EPS", "WMF", "FPX", "MIC", "HDF5", "GRIB", "BUFR", "FITS", "MPEG"}  # they start programs, or more


def torch_loads(data: bytes) -> Any:
    """Load what ``torch.save`` wrote: tensors and plain values, and with ``wds.trust(pickle=True)`` anything."""
    if utils.enforce_security:
        raise ValueError("torch.loads is not allowed for security reasons when enforce_security is set.")
    weights_only = pytorch_weights_only or not utils.trusted("pickle")
    torch: Any = importlib.import_module("torch")
    return torch.load(io.BytesIO(data), weights_only=weights_only, map_location="cpu")


def unpickle_loads(data: bytes) -> Any:
    """Load a pickled object; ``ValueError`` if pickle is not trusted."""
    enforced = "Unpickling is not allowed for security reasons when enforce_security is set."
    utils.require_trust("pickle", "the field holds a pickle, which can run code and is refused", enforced)
    return pickle.loads(data)


@functools.cache
def _codec(extension: str) -> Any:
    return codecs.decoder(extension, limits=_LIMITS)


def _by_codec(extension: str) -> Callable[[bytes], Any]:
    """Return the decoder of one of Penstock's codecs, made when it is first used."""
    return lambda data: _codec(extension)(data)


npy_loads, npz_loads, cbor_loads = _by_codec("npy"), _by_codec("npz"), _by_codec("cbor")
tenbin_loads, msgpack_loads = _by_codec("ten"), _by_codec("mp")
decoders: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(("pkl", "pickle", "pyd"), lambda data: unpickle_loads(data)),
    **dict.fromkeys(("ten", "tb"), tenbin_loads),
    **dict.fromkeys(("mp", "msg"), msgpack_loads),
    "pth": lambda data: torch_loads(data),
    "npy": npy_loads,
    "npz": npz_loads,
    "cbor": cbor_loads,
}


def basichandlers(key: str, data: bytes) -> Any:
    """Decode text, numbers, JSON, arrays and so on by extension; None if the extension is none of these."""
    decode = decoders.get(key.rpartition(".")[2])
    return None if decode is None else decode(data)


def call_extension_handler(key: str, data: bytes, f: Callable[[bytes], Any], extensions: list[str]) -> Any:
    """Decode with ``f`` if the last parts of the key are one of the extensions."""
    name = "." + key.lower().lstrip(".")
    return f(data) if any(name.endswith("." + extension) for extension in extensions) else None


def handle_extension(extensions: str, f: Callable[[bytes], Any]) -> FieldHandler:
    """Return a handler that decodes these extensions, ``"jpg jpeg"`` or ``"seg.jpg"``, with ``f``."""
    return functools.partial(call_extension_handler, f=f, extensions=extensions.lower().split())


imagespecs = {
    f"{atype}{mode}{bits}": (atype or "numpy", "uint8" if bits else "float", mode)
    for atype in ("", "torch")
    for mode in ("l", "rgb", "rgba")
    for bits in ("8", "")
} | {
    "torch": ("torch", "float", "rgb"),
    "pil": ("pil", None, "rgb"),
    **{f"pil{mode}": ("pil", None, mode) for mode in ("l", "rgb", "rgba")},
}
"""What each spec means: container, type of the values, mode."""


class ImageHandler:
    """Decodes images by a spec such as ``"rgb8"``, ``"torchrgb"`` or ``"pil"``; ``ValueError`` for any other."""

    def __init__(self, imagespec: str, extensions: Any = IMAGE_EXTENSIONS) -> None:
        if imagespec not in imagespecs:
            raise ValueError(f"Unknown imagespec: {imagespec}")
        self.imagespec, self.extensions = imagespec, set(extensions)

    def __call__(self, key: str, data: bytes) -> Any:
        if key.rpartition(".")[2].lower() not in self.extensions:
            return None
        atype, etype, mode = imagespecs[self.imagespec]
        if atype == "pil":
            return _pil_image(data, mode.upper())
        pixels = _jpeg_pixels(data) if mode == "rgb" and data[:3] == b"\xff\xd8\xff" else None
        if pixels is None:
            pixels = np.array(_pil_image(data, mode.upper()))
        if atype == "torch" and pixels.ndim == 3:
            pixels = np.ascontiguousarray(pixels.transpose(2, 0, 1))
        if etype == "float":
            pixels = pixels.astype(np.float32)
            pixels /= 255.0
        return importlib.import_module("torch").from_numpy(pixels) if atype == "torch" else pixels


imagehandler = ImageHandler


def field_handlers(args: Iterable[Any]) -> list[FieldHandler]:
    """Return the handlers that the arguments of ``decode`` stand for: image specs and functions."""
    return [ImageHandler(arg) if isinstance(arg, str) else arg for arg in args]


def _pil_image(data: bytes, mode: str) -> Any:
    try:
        image: Any = open_image(data, _LIMITS)
    except ValueError as exc:
        if isinstance(exc, codecs.OverLimit) or not str(exc).startswith("not an image"):
            raise
        image = _rare_image(data)
    load_image(image)
    return image.convert(mode)


def _rare_image(data: bytes) -> Any:
    """Open an image of a format that is seldom used, if reading it starts no program."""
    pillow = importlib.import_module("PIL.Image")
    pillow.init()
    image = pillow.open(io.BytesIO(data), formats=[name for name in pillow.OPEN if name not in _UNSAFE_FORMATS])
    _LIMITS.check_pixels(*image.size)
    return image


def _jpeg_pixels(data: bytes) -> Any:
    """Decode a JPEG to the pixels that Pillow decodes, in less time; None for rare kinds and damage."""
    try:
        import simplejpeg

        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        if colorspace not in ("YCbCr", "RGB", "Gray"):
            return None
        _LIMITS.check_pixels(width, height)
        return simplejpeg.decode_jpeg(data)
    except codecs.OverLimit:
        raise
    except (ImportError, ValueError, KeyError):
        return None


def _by_torch(key: str, data: bytes, *, function: str, extensions: str, **options: Any) -> Any:
    """Pass the field, as a temporary file, to a function of torchaudio or torchvision."""
    extension = key.rpartition(".")[2]
    if extension not in extensions.split():
        return None
    module, _, name = function.rpartition(".")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"file.{extension}")
        with open(path, "wb") as file:
            file.write(data)
        return getattr(importlib.import_module(module), name)(path, **options)


_VIDEO, _AUDIO = "mp4 ogv mjpeg avi mov h264 mpg webm wmv", "flac mp3 sox wav m4a ogg wma"
torch_video = functools.partial(_by_torch, function="torchvision.io.read_video", extensions=_VIDEO, pts_unit="sec")
torch_audio = functools.partial(_by_torch, function="torchaudio.load", extensions=_AUDIO)


class Continue:
    """Returned by a handler: the next handlers get this key and data."""

    def __init__(self, key: str, data: bytes) -> None:
        self.key, self.data = key, data


def gzfilter(key: str, data: bytes) -> Continue | None:
    """Decompress ``.gz`` fields for the next handlers."""
    return Continue(key[:-3], _codec("bin.gz")(data)) if key.endswith(".gz") else None


default_pre_handlers: list[FieldHandler] = [gzfilter]
default_post_handlers: list[FieldHandler] = [basichandlers]


class DecodingError(Exception):
    """The field ``k`` of a sample cannot be decoded; the cause is the error of its handler."""

    def __init__(self, url: Any = None, key: Any = None, k: Any = None, sample: Any = None) -> None:
        super().__init__(url, key, k)
        self.url, self.key, self.k, self.sample = url, key, k, sample

    def __str__(self) -> str:
        reason = f": {self.__cause__}" if self.__cause__ is not None else ""
        return f"cannot decode the field {self.k!r}{reason} (shard: {self.url}, key: {self.key})"


class Decoder:
    """Decodes samples: each field by the first of ``pre``, ``handlers`` and ``post`` that returns a value.

    ``only`` names the fields to decode, ``partial`` leaves alone those that are not bytes.
    """

    def __init__(
        self, handlers: Any, pre: Any = None, post: Any = None, only: Any = None, partial: bool = False
    ) -> None:
        assert isinstance(handlers, list), f"handlers = {handlers} must be a list"
        pre = default_pre_handlers if pre is None else pre
        post = default_post_handlers if post is None else post
        self.handlers: list[FieldHandler] = [*pre, *handlers, *post]
        assert all(callable(handler) for handler in self.handlers), f"one of {self.handlers} not callable"
        self.only = None if only is None else set(only.split() if isinstance(only, str) else only)
        self.partial = partial

    def decode1(self, key: str, data: Any) -> Any:
        """Decode one field; it stays as it is if no handler returns a value."""
        key = "." + key
        for handler in self.handlers:
            result = handler(key, data)
            if isinstance(result, Continue):
                key, data = result.key, result.data
            elif result is not None:
                return result
        return data

    def decode(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Decode the fields of a sample; ``DecodingError`` if a handler fails."""
        result = {}
        for name, value in sample.items():
            try:
                if name[:2] == "__":
                    value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
                elif (self.only is None or name in self.only) and not (self.partial and not isinstance(value, bytes)):
                    assert isinstance(value, bytes), f"the field {name!r} is decoded already: {type(value)}"
                    value = self.decode1(name, value)
            except Exception as exn:
                raise DecodingError(sample.get("__url__"), sample.get("__key__"), name, sample) from exn
            result[name] = value
        return result

    def __call__(self, sample: Any) -> dict[str, Any]:
        assert isinstance(sample, dict), type(sample)
        return self.decode(sample)
