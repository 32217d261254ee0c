"""Files that a table only names: which they are, and their bytes."""

from __future__ import annotations

import os
from typing import Any

from penstock.codecs.features import Audio, Feature, Image, Struct, arrow_type
from penstock.codecs.features import Sequence as ListOf


def holds_files(feature: Feature) -> bool:
    """Whether values are, or have in them, pictures or sounds."""
    if isinstance(feature, ListOf):
        return holds_files(feature.feature)
    if isinstance(feature, Struct):
        return any(holds_files(inner) for _, inner in feature.fields)
    return isinstance(feature, Image | Audio)


def lacks(array: Any, feature: Feature) -> bool:
    """Whether a file is only named."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(feature, ListOf):
        return lacks(array.flatten(), feature.feature)
    if isinstance(feature, Struct):
        parts = zip(array.flatten(), feature.fields, strict=True)
        return any(lacks(part, inner) for part, (_, inner) in parts if holds_files(inner))
    if not pa.types.is_struct(array.type):
        return False
    data, path = array.flatten()[:2]
    return bool(pc.any(pc.and_(data.is_null(), path.is_valid())).as_py())


def only_named(array: Any, feature: Feature) -> Any:
    """A column of files that are all only named, with their bytes; ``None``: it is none, or one cannot be read."""
    import pyarrow as pa

    if not isinstance(feature, Image | Audio) or array.null_count or array.type != arrow_type(feature):
        return None
    data, path = array.flatten()
    if path.null_count or data.null_count < len(data):
        return None
    names = path.to_pylist()
    try:
        files = pa.array([read_named(name) for name in names], data.type)
    except (OSError, ValueError, pa.ArrowException):  # the slower way says which
        return None
    return pa.StructArray.from_arrays(
        [files, pa.array(map(os.path.basename, names), path.type)], fields=list(array.type)
    )


def read_named(path: str) -> bytes:
    """The bytes of a file that a dataset names."""
    try:
        with open(path, "rb", buffering=0) as local:
            return local.readall()
    except FileNotFoundError:
        pass
    from datasets.utils.file_utils import xopen  # knows files in archives, and on the hub

    with xopen(path, "rb") as file:
        data: bytes = file.read()
    return data
