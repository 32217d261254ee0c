"""Write the samples of a plan to tar shards; also the result, checks and errors that all writers share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from penstock.codecs.stage import Encode
from penstock.engines import Program, Run
from penstock.engines.progress import Progress
from penstock.errors import PlanError, StorageError
from penstock.formats.tar import ShardWriter
from penstock.formats.tar.reader import TarReader
from penstock.formats.tar.shard_names import on_disk
from penstock.packing.file_list import FileListReader
from penstock.plan import EngineOptions, Plan, check_count, size_in_bytes
from penstock.storage import Storage, local_path, redacted


@dataclass(frozen=True, slots=True)
class Packed:
    """What was written, or what a dry run would write.

    Attributes:
        folder: The folder of the shards.
        shards: The names of the shards, in order.
        samples: The number of samples in the shards.
        nbytes: The bytes of all shards.
        skipped: The number of samples that were skipped because they could not be read or stored.
        estimated: Whether the numbers are an estimate from a few samples; only in a dry run.
    """

    folder: str
    shards: tuple[str, ...]
    samples: int
    nbytes: int
    skipped: int = 0
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """When a shard is full, and how it is compressed."""

    max_bytes: int
    max_samples: int
    compress: str | None


def write_shards(
    plan: Plan,
    epoch: int,
    url: str,
    *,
    max_bytes: float | str,
    max_samples: int,
    compress: str | None,
    trust_pickle: bool,
    progress: bool,
    storage: Storage | None = None,
) -> Packed:
    """Run a plan and write its samples to tar shards, in order.

    Samples without ``__key__`` get their number as key.

    Raises:
        DataError: A sample cannot be stored.
        PlanError: An argument is out of range, or the plan reads from the target.
        StorageError: The target cannot be written.
    """
    limit = size_in_bytes("max_bytes", max_bytes)
    check_count("max_samples", max_samples, least=1)
    url = os.fspath(url)
    program = Program(replace(plan.then(Encode(trust_pickle)), engine=ordered_engine(plan.engine)))
    stream = program.stream is not None
    order = None if stream else program.order(epoch)
    start = program.stream_start() if order is None else program.start(order, plan.cut)
    with (
        storage_errors(url),
        ShardWriter(
            url, max_bytes=limit, max_samples=max_samples, compress=compress, storage=storage, background=True
        ) as writer,
    ):
        check_not_source(program, writer.folder, writer.single)
        total = None if stream else program.length(plan.cut)
        run = Run(program, order, epoch, start)
        with Progress("writing", total, shown=None if progress else False) as bar:
            for number, sample in enumerate(run.items()):
                writer.write(with_key(sample, number))
                bar.add()
        writer.close()
    names = tuple(entry.name for entry in writer.entries)
    samples = sum(entry.samples for entry in writer.entries)
    nbytes = sum(entry.bytes for entry in writer.entries)
    return Packed(redacted(writer.folder), names, samples, nbytes, len(run.skipped))


def ordered_engine(engine: EngineOptions) -> EngineOptions:
    """Return the engine options without ``ordered``, so that the engine keeps the order."""
    return replace(engine, options=tuple((name, value) for name, value in engine.options if name != "ordered"))


def with_key(sample: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the sample with a key: its ``__key__``, or its number if it has none."""
    return sample if "__key__" in sample else {"__key__": f"{number:09d}", **sample}


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn an ``OSError`` into a ``StorageError`` that names the URL."""
    try:
        yield
    except StorageError:
        raise
    except OSError as exc:
        raise StorageError(f"cannot write: {exc.strerror or exc}", redacted(url)) from exc


def check_not_source(program: Program, folder: str, single: str | None = None, *, every: bool = False) -> None:
    """Refuse to write to a folder that the plan reads from.

    Args:
        program: The program of the plan.
        folder: The folder to write to.
        single: The name of the one archive to write; only an archive of that name is refused.
        every: Check files of every format, not only tar shards. A list of files is never checked: its files may be
            anywhere.

    Raises:
        PlanError: The plan reads from the folder.
    """
    if program.stream is not None:
        return
    target = _canonical_folder(folder)
    for reader in program.readers:
        if (isinstance(reader, TarReader) or (every and not isinstance(reader, FileListReader))) and any(
            _source_folder(url) == target and single in (None, os.path.basename(url))
            for url in map(reader.url, range(len(reader.names)))
        ):
            raise PlanError(
                f"the dataset reads from {redacted(folder)}, where it is to be written; choose another folder"
            )


def check_path(name: str, value: str | os.PathLike[str]) -> str:
    """Return a path or URL argument as text.

    Raises:
        PlanError: The value is not a path or URL.
    """
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str) and path:
        return path
    raise PlanError(f"{name}={value!r}: give a path or a URL")


def check_flag(name: str, value: Any) -> None:
    """Check that an argument is a boolean.

    Raises:
        PlanError: The value is neither True nor False.
    """
    if not isinstance(value, bool):
        raise PlanError(f"{name}={value!r}: give True or False")


def _source_folder(url: str) -> str | None:
    """Return the folder that holds a shard, or the shard itself if it is a folder; None if it does not exist."""
    if not on_disk(url):
        return url.rpartition("/")[0]
    path = os.path.realpath(local_path(url))
    if os.path.isdir(path):
        return path
    return os.path.dirname(path) if os.path.exists(path) else None


def _canonical_folder(folder: str) -> str:
    return os.path.realpath(local_path(folder)) if on_disk(folder) else folder.rstrip("/")
