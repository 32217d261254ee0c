"""Turns items of map-style datasets into fields of a shard: images, labels, texts and arrays, encoded to bytes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.codecs.registry import encode
from penstock.formats.torch import item_to_sample
from penstock.packing.file_list import EXTENSION_ALIASES
from penstock.plan import ByObject, Context, Map, Place, is_tensor, sample_error

_IMAGE_NAMES = ("image", "img", "jpg", "png", "picture", "x")
_LABEL_NAMES = ("label", "cls", "class", "target", "labels", "y")
_TEXT_NAMES = ("text", "txt", "caption")
_MAGIC = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
)
_UNSAFE_IN_FIELD = re.compile(r"[^a-z0-9_-]+")


class _ItemStage(Map):
    """A stage whose errors name the item that failed."""

    def failure(self, exc: Exception, place: Place) -> Exception:
        return sample_error(f"item {place.key}: {exc}", Place(None, place.key), exc)


@dataclass(frozen=True)
class GetItem(_ItemStage):
    """Turns a number into the item of a dataset, as a dict of named values."""

    dataset: ByObject

    def describe(self) -> str:
        return f"items of {type(self.dataset.value).__name__}"

    def function(self, ctx: Context) -> Callable[[int], dict[str, Any]]:
        dataset = self.dataset.value
        return lambda number: item_to_sample(dataset[number], ("image", "label"))


@dataclass(frozen=True)
class EncodeItem(_ItemStage):
    """Encodes the values of an item as fields."""

    image: str

    def function(self, ctx: Context) -> Callable[[dict[str, Any]], dict[str, bytes]]:
        return lambda item: encode_item(item, self.image)


def encode_item(item: Mapping[str, Any], image: str) -> dict[str, bytes]:
    """Return the fields that store an item; the type of a value decides, and ``None`` is left out.

    Args:
        item: The named values.
        image: The extension of images that are not encoded yet: ``"png"`` or ``"jpg"``.

    Raises:
        TypeError: A value cannot be stored.
        ValueError: An array is not a valid image, or two values have the same field.
    """
    fields: dict[str, bytes] = {}
    for name, value in item.items():
        if value is None:
            continue
        field, data = _encode_value(str(name).lower(), value, image)
        if field in fields:
            field = f"{_safe_name(name)}.{field}"
        if field in fields:
            raise ValueError(f"two values would be stored as {field!r}; rename one of them")
        fields[field] = data
    return fields


def _encode_value(name: str, value: Any, image: str) -> tuple[str, bytes]:
    if isinstance(value, bytes | bytearray | memoryview):
        return _field_name(name, image_extension(bytes(value)) or "bin", _IMAGE_NAMES), bytes(value)
    if isinstance(value, Mapping) and set(value) == {"bytes", "path"}:  # how Hugging Face stores an image or a sound
        return _stored_media(name, value)
    if type(value).__module__.partition(".")[0] == "PIL":
        return _field_name(name, image, _IMAGE_NAMES), encode(image, value)
    array = value if isinstance(value, np.ndarray) else value.detach().cpu().numpy() if is_tensor(value) else None
    if array is not None and array.ndim >= 2 and name in _IMAGE_NAMES:
        return _field_name(name, image, _IMAGE_NAMES), encode(image, _to_hwc(value))
    if array is not None and array.ndim:
        return f"{_safe_name(name)}.npy", encode("npy", array)
    if array is not None or isinstance(value, np.generic):
        value = (array if array is not None else value).item()
    if isinstance(value, int) and name in _LABEL_NAMES:
        return _field_name(name, "cls", _LABEL_NAMES), b"%d" % value
    if isinstance(value, str):
        return _field_name(name, "txt", _TEXT_NAMES), value.encode()
    return f"{_safe_name(name)}.json", json.dumps(value, sort_keys=True, default=_to_list).encode()


def _to_list(value: Any) -> Any:
    """Return an array inside a JSON document as a list."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be stored inside another value")


def _stored_media(name: str, value: Mapping[str, Any]) -> tuple[str, bytes]:
    path, data = value["path"], value["bytes"]
    if data is None:
        with open(path, "rb") as file:
            data = file.read()
    suffix = os.path.splitext(path or "")[1].lstrip(".").lower()
    extension = image_extension(data) or EXTENSION_ALIASES.get(suffix, suffix) or "bin"
    return _field_name(name, extension, _IMAGE_NAMES), data


def _field_name(name: str, extension: str, usual_names: Sequence[str]) -> str:
    """Return the field of a value: the extension alone if the name adds nothing to it."""
    return extension if name in usual_names or name == extension else f"{_safe_name(name)}.{extension}"


def _safe_name(name: str) -> str:
    return _UNSAFE_IN_FIELD.sub("_", str(name).lower()) or "_"


def _to_hwc(value: Any) -> Any:
    """Return an array with its channels last, if they come first."""
    if isinstance(value, np.ndarray) and value.ndim == 3 and value.shape[0] in (1, 3, 4) and value.shape[2] > 4:
        return value.transpose(1, 2, 0)
    return value


def image_extension(data: bytes) -> str | None:
    """Return the extension of an encoded image by its first bytes; None if the bytes do not begin an image."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((extension for magic, extension in _MAGIC if data.startswith(magic)), None)
