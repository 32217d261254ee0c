"""Decode samples field by field: a list of handlers ``f(key, data)``, of which the first that returns a value wins."""

import functools
import importlib
import json
import os
import pickle
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock import codecs
from penstock.codecs.arrays import decode_pth
from penstock.codecs.gz import decompress
from penstock.codecs.images import IMAGE_SPECS, in_container, jpeg_pixels, load_image, open_image
from penstock.compat.webdataset import utils

pytorch_weights_only = os.environ.get("WDS_PYTORCH_WEIGHTS_ONLY", "0") == "1"
_LIMITS = codecs.Limits()

_OF_PILLOW = """
    blp bmp dib bufr cur pcx dcx dds ps eps fit fits fli flc ftc ftu gbr gif grib h5 hdf png apng jp2
    j2k jpc jpf jpx j2c icns ico im iim tif tiff jfif jpe jpg jpeg mpg mpeg msp pcd pxr pbm pgm ppm pnm psd bw rgb rgba
    sgi ras tga icb vda vst webp wmf emf xbm xpm"""
IMAGE_EXTENSIONS = _OF_PILLOW.split()
_VIDEO, _AUDIO = "mp4 ogv mjpeg avi mov h264 mpg webm wmv", "flac mp3 sox wav m4a ogg wma"


def torch_loads(data: bytes) -> Any:
    """Load what ``torch.save`` wrote: tensors and plain values, and with ``wds.trust(pickle=True)`` anything."""
    if utils.enforce_security:
        raise ValueError("torch.loads is not allowed for security reasons when enforce_security is set.")
    try:
        return decode_pth(data, _LIMITS, trust_pickle=utils.trusted("pickle") and not pytorch_weights_only)
    except ValueError as exc:
        if isinstance(exc.__cause__, pickle.UnpicklingError):
            problem = "the pth field is damaged, or holds more than tensors and plain values, which is refused"
            utils.require_trust("pickle", problem, problem)
        raise


def unpickle_loads(data: bytes) -> Any:
    enforced = "Unpickling is not allowed for security reasons when enforce_security is set."
    utils.require_trust("pickle", "the field holds a pickle, which can run code and is refused", enforced)
    return pickle.loads(data)


def _by_codec(extension: str, data: bytes) -> Any:
    return codecs.decoder(extension, limits=_LIMITS)(data)  # type: ignore[misc]  # each of these has one


_BY_CODEC = ("ten", "tb", "mp", "msg", "npy", "npz", "cbor")
decoders: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **{extension: functools.partial(_by_codec, extension) for extension in _BY_CODEC},
    **dict.fromkeys(("pkl", "pickle", "pyd"), lambda data: unpickle_loads(data)),
    "pth": lambda data: torch_loads(data),
}


def basichandlers(key: str, data: bytes) -> Any:
    decode = decoders.get(key.rpartition(".")[2])
    return None if decode is None else decode(data)


def call_extension_handler(key: str, data: bytes, f: Callable[[bytes], Any], extensions: list[str]) -> Any:
    parts, wanted = key.lower().split("."), [extension.split(".") for extension in extensions]
    return f(data) if any(parts[-len(each) :] == each for each in wanted) else None


def handle_extension(extensions: str, f: Callable[[bytes], Any]) -> Callable[[str, bytes], Any]:
    """Return a handler that decodes ``"jpg jpeg"`` or ``"seg.jpg"`` with ``f``; ``".jpg"``: the field of that name."""
    return functools.partial(call_extension_handler, f=f, extensions=extensions.lower().split())


_BY_CONTAINER = sorted(IMAGE_SPECS.items(), key=lambda item: item[1].container)
imagespecs = {name: spec for name, spec in _BY_CONTAINER if not name.startswith("pil") or name[-1] != "8"}


class ImageHandler:  # decodes images by a spec such as ``"rgb8"``, ``"torchrgb"`` or ``"pil"``
    def __init__(self, imagespec: str, extensions: Any = IMAGE_EXTENSIONS) -> None:
        if imagespec not in imagespecs:
            raise ValueError(f"Unknown imagespec: {imagespec}")
        self.imagespec, self.extensions = imagespec, set(extensions)

    def __call__(self, key: str, data: bytes) -> Any:
        if key.rpartition(".")[2].lower() not in self.extensions:
            return None
        spec = imagespecs[self.imagespec]
        image: Any = jpeg_pixels(data, _LIMITS) if spec.mode == "RGB" and spec.container != "pil" else None
        if image is None:
            load_image(image := open_image(data, _LIMITS))
            image = image.convert(spec.mode)
        return image if spec.container == "pil" else in_container(image, spec)


imagehandler = ImageHandler


def _by_torch(key: str, data: bytes, *, function: str, extensions: str, **options: Any) -> Any:
    extension = key.rpartition(".")[2]
    if extension not in extensions.split():
        return None
    module, _, name = function.rpartition(".")
    with tempfile.NamedTemporaryFile(suffix=f".{extension}") as file:
        file.write(data)
        file.flush()
        return getattr(importlib.import_module(module), name)(file.name, **options)


torch_video = functools.partial(_by_torch, function="torchvision.io.read_video", extensions=_VIDEO, pts_unit="sec")
torch_audio = functools.partial(_by_torch, function="torchaudio.load", extensions=_AUDIO)


class Continue(NamedTuple):  # returned by a handler: the next handlers get this key and data
    key: str
    data: bytes


def gzfilter(key: str, data: bytes) -> Continue | None:
    return Continue(key[:-3], decompress(data, _LIMITS)) if key.endswith(".gz") else None


class DecodingError(Exception):  # the field ``k`` of a sample cannot be decoded; the cause is the handler's error
    def __init__(self, url: Any = None, key: Any = None, k: Any = None, sample: Any = None) -> None:
        super().__init__(url, key, k)
        self.url, self.key, self.k, self.sample = url, key, k, sample

    def __str__(self) -> str:
        reason = f": {self.__cause__}" if self.__cause__ is not None else ""
        return f"cannot decode the field {self.k!r}{reason} (shard: {self.url}, key: {self.key})"


class Decoder:
    """Decodes the fields named in ``only``, or all; ``partial`` leaves alone those that are not bytes."""

    def __init__(
        self, handlers: Any, pre: Any = None, post: Any = None, only: Any = None, partial: bool = False
    ) -> None:
        pre, post = [gzfilter] if pre is None else pre, [basichandlers] if post is None else post
        self.handlers: list[Callable[[str, bytes], Any]] = [*pre, *handlers, *post]
        self.only = None if only is None else set(only.split() if isinstance(only, str) else only)
        self.partial = partial

    def decode1(self, key: str, data: Any) -> Any:
        key = "." + key
        for handler in self.handlers:
            result = handler(key, data)
            if isinstance(result, Continue):
                key, data = result
            elif result is not None:
                return result
        return data

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(sample, dict), f"decode() takes samples with named fields, and got {type(sample)}"
        return self.decode(sample)

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
