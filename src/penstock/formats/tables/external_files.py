"""Image and audio files that a table stores by path only: find such values, and read the files."""

from __future__ import annotations

import os
from typing import Any

from penstock.codecs.features import Audio, Feature, Image, Struct, arrow_type
from penstock.codecs.features import Sequence as ListOf


def has_media(feature: Feature) -> bool:
    """Return whether values of this feature are images or audio, or contain some."""
    if isinstance(feature, ListOf):
        return has_media(feature.feature)
    if isinstance(feature, Struct):
        return any(has_media(inner) for _, inner in feature.fields)
    return isinstance(feature, Image | Audio)


def has_external_files(array: Any, feature: Feature) -> bool:
    """Return whether a column has values with a path and without bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(feature, ListOf):
        return has_external_files(array.flatten(), feature.feature)
    if isinstance(feature, Struct):
        children = zip(array.flatten(), feature.fields, strict=True)
        return any(has_external_files(child, inner) for child, (_, inner) in children if has_media(inner))
    if not pa.types.is_struct(array.type):
        return False
    data, path = array.flatten()[:2]
    return bool(pc.any(pc.and_(data.is_null(), path.is_valid())).as_py())


def embed_files(array: Any, feature: Feature) -> Any:
    """Return a column with the bytes of its files, paths cut to base names.

    Returns ``None`` where the caller must go value by value: the column is not one of images or audio that all lack
    their bytes, or a file cannot be read.
    """
    import pyarrow as pa

    if not isinstance(feature, Image | Audio) or array.null_count or array.type != arrow_type(feature):
        return None
    data, path = array.flatten()
    if path.null_count or data.null_count < len(data):
        return None
    paths = path.to_pylist()
    try:
        contents = pa.array([read_external_file(name) for name in paths], data.type)
    except (OSError, ValueError, pa.ArrowException):  # value by value shows which file it is
        return None
    return pa.StructArray.from_arrays(
        [contents, pa.array(map(os.path.basename, paths), path.type)], fields=list(array.type)
    )


def read_external_file(path: str) -> bytes:
    """Return the bytes of a local file, or of any path that Hugging Face datasets can open.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as local:
            return local.readall()
    except FileNotFoundError:
        pass
    from datasets.utils.file_utils import xopen  # opens files inside archives and on the hub

    with xopen(path, "rb") as file:
        data: bytes = file.read()
    return data
