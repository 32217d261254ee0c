"""Items of datasets in memory or by function, as fields of a shard: images, labels, texts, arrays."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.codecs.registry import encode
from penstock.errors import DataError
from penstock.formats.torch import named
from penstock.plan import ByObject, Context, Map, Place, is_tensor

_IMAGES = ("image", "img", "jpg", "png", "picture", "x")
_LABELS = ("label", "cls", "class", "target", "labels", "y")
_TEXTS = ("text", "txt", "caption")
_MAGIC = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
)
_SAME = {"jpeg": "jpg", "jpe": "jpg", "tiff": "tif"}
_NAME = re.compile(r"[^a-z0-9_-]+")


class _OfItems(Map):
    """A stage whose failures name the item."""

    def failure(self, exc: Exception, place: Place) -> Exception:
        """A DataError with the number of the item."""
        error = DataError(f"item {place.key}: {exc}", None, place.key)
        error.__cause__ = exc
        return error


@dataclass(frozen=True)
class Ask(_OfItems):
    """Asks a dataset for the item of a number."""

    dataset: ByObject

    def describe(self) -> str:
        return f"items of {type(self.dataset.value).__name__}"

    def function(self, ctx: Context) -> Callable[[int], dict[str, Any]]:
        """Ask, and name the values."""
        dataset = self.dataset.value
        return lambda number: named(dataset[number], ("image", "label"))


@dataclass(frozen=True)
class StoreFields(_OfItems):
    """Makes the bytes of an item's values."""

    image: str

    def function(self, ctx: Context) -> Callable[[dict[str, Any]], dict[str, bytes]]:
        """Encode."""
        return lambda item: as_fields(item, self.image)


def as_fields(item: Mapping[str, Any], image: str) -> dict[str, bytes]:
    """Give the fields to store for an item, by what its values are; ``None`` is left out.

    Raises:
        TypeError: a value cannot be stored.
        ValueError: an image that cannot be one, or two values for one field.
    """
    fields: dict[str, bytes] = {}
    for name, value in item.items():
        if value is None:
            continue
        field, data = _stored(str(name).lower(), value, image)
        if field in fields:
            field = f"{_clean(name)}.{field}"
        if field in fields:
            raise ValueError(f"two values would be stored as {field!r}; give one of them another name")
        fields[field] = data
    return fields


def _stored(name: str, value: Any, image: str) -> tuple[str, bytes]:
    if isinstance(value, bytes | bytearray | memoryview):
        return _placed(name, sniffed(bytes(value)) or "bin", _IMAGES), bytes(value)
    if isinstance(value, Mapping) and set(value) == {"bytes", "path"}:  # an image or sound as Hugging Face keeps it
        return _kept(name, value)
    if type(value).__module__.partition(".")[0] == "PIL":
        return _placed(name, image, _IMAGES), encode(image, value)
    array = value if isinstance(value, np.ndarray) else value.detach().cpu().numpy() if is_tensor(value) else None
    if array is not None and array.ndim >= 2 and name in _IMAGES:
        return _placed(name, image, _IMAGES), encode(image, _upright(value))
    if array is not None and array.ndim:
        return f"{_clean(name)}.npy", encode("npy", array)
    if array is not None or isinstance(value, np.generic):
        value = (array if array is not None else value).item()
    if isinstance(value, int) and name in _LABELS:
        return _placed(name, "cls", _LABELS), b"%d" % value
    if isinstance(value, str):
        return _placed(name, "txt", _TEXTS), value.encode()
    return f"{_clean(name)}.json", json.dumps(value, sort_keys=True, default=_listed).encode()


def _listed(value: Any) -> Any:
    """Arrays inside of other values as lists."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be stored inside of another value")


def _kept(name: str, value: Mapping[str, Any]) -> tuple[str, bytes]:
    path, data = value["path"], value["bytes"]
    if data is None:
        with open(path, "rb") as file:
            data = file.read()
    suffix = os.path.splitext(path or "")[1].lstrip(".").lower()
    return _placed(name, sniffed(data) or _SAME.get(suffix, suffix) or "bin", _IMAGES), data


def _placed(name: str, extension: str, usual: Sequence[str]) -> str:
    """The field of a value: the extension alone where the name says no more than that."""
    return extension if name in usual or name == extension else f"{_clean(name)}.{extension}"


def _clean(name: str) -> str:
    return _NAME.sub("_", str(name).lower()) or "_"


def _upright(value: Any) -> Any:
    """An array as HWC, where its channels come first."""
    if isinstance(value, np.ndarray) and value.ndim == 3 and value.shape[0] in (1, 3, 4) and value.shape[2] > 4:
        return value.transpose(1, 2, 0)
    return value


def sniffed(data: bytes) -> str | None:
    """The extension of an image by its first bytes."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((extension for magic, extension in _MAGIC if data.startswith(magic)), None)
