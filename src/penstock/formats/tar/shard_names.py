"""Names of shards: those that patterns match, the target of a writer, and compression by suffix."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence

from penstock.blobs.compression import COMPRESSION_SUFFIXES
from penstock.errors import PlanError, StorageError
from penstock.formats.manifest import set_pattern
from penstock.storage import Storage, expand, local_path
from penstock.storage.protocol import scheme

TAR_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz")
_DEFAULT_PATTERN = "shard-%06d.tar"
_READERS = {
    "read_parquet": (".parquet", ".pq"),
    "read_arrow": (".arrow", ".feather"),
    "read_csv": (".csv", ".tsv"),
    "read_json": (".json", ".jsonl", ".ndjson"),
    "read_tfrecords": (".tfrecord", ".tfrecords"),
    "read_images": (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm"),
}
_MAX_LISTED = 10_000  # files below a folder that are looked at to say what it holds


def expand_shards(
    patterns: Sequence[str], storage: Storage | None = None, suffixes: tuple[str, ...] = TAR_SUFFIXES
) -> list[str]:
    """Return the shards that patterns match, as ``storage.expand`` does; files in folders have one of ``suffixes``.

    Raises:
        StorageError: A folder or pattern has no shards, or a file is of another format; the message says what was
            found and what reads it.
    """
    try:
        urls = expand(patterns, suffixes, storage)
    except StorageError as exc:
        found = _describe_folder(exc.url) if exc.url is not None else None
        if found is None:
            raise
        raise StorageError(f"there are no tar shards in this folder; {found}", exc.url) from exc
    for url in urls:
        if not url.endswith(suffixes) and (reader := _reader_of(url)) not in (None, "read_images"):
            raise StorageError(f"this is not a tar shard: {_advice(str(reader), url)}", url)
    return urls


def _reader_of(name: str) -> str | None:
    """Return the function that reads files with such a name; None if that is not known."""
    extension = os.path.splitext(name)[1].lower()
    return next((reader for reader, suffixes in _READERS.items() if extension in suffixes), None)


def _advice(reader: str, url: str) -> str:
    command = "pack" if reader == "read_images" else "convert"
    return f"read with ps.{reader}, or make shards with `penstock {command} {shlex.quote(url)} FOLDER`"


def _describe_folder(url: str) -> str | None:
    """Return what a local folder without shards holds, and what reads it; None if it is not a local folder."""
    if scheme(url) != "file" or not os.path.isdir(path := local_path(url)):
        return None
    names: list[str] = []
    for _, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [name for name in files if not name.startswith(".")]
        if len(names) >= _MAX_LISTED:
            break
    if not names:
        return "it is empty"
    if found := next((suffix for suffix in TAR_SUFFIXES if any(name.endswith(suffix) for name in names)), None):
        return f"those of its subfolders are {url.rstrip('/')}/**/*{found}"
    extensions = Counter(os.path.splitext(name)[1].lower() or "no extension" for name in names)
    common, count = extensions.most_common(1)[0]
    reader = _reader_of("x" + common)
    advice = _advice(reader, url) if reader is not None else "read with ps.read_files"
    return f"{count:,} of its files are {common}: {advice}"


def parse_target(path: str, compress: str | None) -> tuple[str, str, bool]:
    """Return the folder of a target, the name or pattern of its shards, and whether it is a single archive.

    Raises:
        PlanError: The name has a ``%`` but is not a pattern for numbered shards that readers of the folder find, or it
            has the suffix of another compression.
    """
    folder, name = os.path.split(path)
    single = "%" not in name and name.endswith(TAR_SUFFIXES)
    is_escape = scheme(path) in ("http", "https") and not name.endswith(TAR_SUFFIXES)  # such as my%20data
    if not single and ("%" not in name or is_escape):
        folder, name = path, _DEFAULT_PATTERN
    if compress is not None and suffix_compression(name) is None:
        name += COMPRESSION_SUFFIXES[compress]
    if compress is not None and suffix_compression(name) != compress:
        raise PlanError(f"{name!r} is the name of another compression than compress={compress!r}; change one of them")
    if not single:
        _check_pattern(name)
    return folder or ".", name, single


def on_disk(url: str) -> bool:
    """Return whether a URL is a local path, which is written without going through a storage."""
    return scheme(url) == "file"


def suffix_compression(name: str) -> str | None:
    """Return the compression that the suffix of a name stands for."""
    if name.endswith(".tgz"):
        return "gz"
    return next((kind for kind, suffix in COMPRESSION_SUFFIXES.items() if name.endswith(suffix)), None)


def _check_pattern(name: str) -> None:
    try:
        # Later runs would replace other shards unseen, and readers would miss them in the folder.
        is_found = set_pattern("tar", name).fullmatch(name % 1) and name.endswith(TAR_SUFFIXES)
    except (TypeError, ValueError):
        is_found = False
    if not is_found:
        raise PlanError(f"{name!r} is not a pattern for numbered shards: write it like 'train-%06d.tar'")
