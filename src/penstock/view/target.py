"""The target of ``penstock view``: files of any format, or the dataset that a program defines."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from penstock.dataset import Dataset, read_files, read_images, read_lmdb
from penstock.dataset.conversion import format_to_inspect, open_files
from penstock.dataset.programs import load_attribute
from penstock.errors import PenstockError, PlanError
from penstock.storage import local_path, url_patterns
from penstock.storage.protocol import scheme

_PROGRAM = re.compile(r".+\.py:[A-Za-z_][A-Za-z0-9_.]*")
_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
_MAX_LISTED = 2000  # files of a folder by whose names its format is recognised


def is_program(url: str) -> bool:
    """Return whether an argument names a dataset of a program, such as ``train.py:ds``."""
    return _PROGRAM.fullmatch(url) is not None


def open_target(urls: Sequence[str]) -> Dataset:
    """Return the dataset to show.

    Raises:
        PlanError: The files have several formats, or a program has no such dataset.
        StorageError: A file does not exist.
    """
    if len(urls) == 1 and is_program(urls[0]):
        return _from_program(urls[0])
    patterns = url_patterns(list(urls))
    found = [_open(pattern) for pattern in patterns]
    if len(found) > 1 and len({type(ds.plan.source) for ds in found}) > 1:
        raise PlanError("these files have several formats; name files of one format at a time")
    whole = found[0]
    for ds in found[1:]:
        whole = whole.union(ds)
    return whole


def _open(pattern: str) -> Dataset:
    if scheme(pattern) == "file" and (path := Path(local_path(pattern))).exists():
        if path.name.endswith((".mdb", ".lmdb")) or (path / "data.mdb").is_file():
            return read_lmdb(str(path))
        if path.is_dir() and (names := _file_names(path)):
            suffixes = [os.path.splitext(name)[1].lower() for name in names]
            images = sum(suffix in _IMAGES for suffix in suffixes)
            if images > len(names) / 2:
                in_folders = not any(os.path.dirname(name) == "" for name in names)
                return read_images(str(path), labels="folder" if in_folders else None)
            if not any(_is_data(name) for name in names):
                return read_files(str(path))
    return open_files(pattern, format_to_inspect(pattern))


def _is_data(name: str) -> bool:
    try:
        return format_to_inspect(name) != "tar" or ".t" in os.path.basename(name)
    except PenstockError:
        return False


def _file_names(folder: Path) -> list[str]:
    found: list[str] = []
    for parent, _, names in os.walk(folder):
        found += [os.path.relpath(os.path.join(parent, name), folder) for name in names if not name.startswith(".")]
        if len(found) > _MAX_LISTED:
            break
    return found


def _from_program(name: str) -> Dataset:
    """Run a program and return one of its variables."""
    value = load_attribute(name)
    if not isinstance(value, Dataset):
        raise PlanError(f"{name!r} is of type {type(value).__name__}, not a Dataset")
    return value
