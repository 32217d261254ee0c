"""What a plan gives, into shards: the part that packing and ``write_tar`` share."""

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
from penstock.packing.file_list import ListReader
from penstock.plan import EngineOptions, Plan, check_count, size_in_bytes
from penstock.storage import Storage, local_path, redacted


@dataclass(frozen=True, slots=True)
class Packed:
    """What was written, or would be.

    Attributes:
        folder: Where.
        shards: Their names, in order.
        samples: How many they hold.
        nbytes: The bytes of all shards.
        skipped: Samples left out because they could not be read or stored.
        estimated: The numbers are a guess from some samples (of a dry run only).
    """

    folder: str
    shards: tuple[str, ...]
    samples: int
    nbytes: int
    skipped: int = 0
    estimated: bool = False


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
    """Run a plan and write what comes out into tar shards, in order.

    Samples without ``__key__`` get their number as key.

    Raises:
        DataError: a sample cannot be stored.
        PlanError: an argument out of range, or the plan reads from where it writes.
        StorageError: the place cannot be written.
    """
    limit = size_in_bytes("max_bytes", max_bytes)
    check_count("max_samples", max_samples, least=1)
    url = os.fspath(url)
    program = Program(replace(plan.then(Encode(trust_pickle)), engine=ordered_engine(plan.engine)))
    stream = program.stream is not None
    order = None if stream else program.order(epoch)
    start = program.front() if order is None else program.start(order, plan.cut)
    with (
        failures_of(url),
        ShardWriter(
            url, max_bytes=limit, max_samples=max_samples, compress=compress, storage=storage, background=True
        ) as writer,
    ):
        check_elsewhere(program, writer.folder, writer.single)
        total = None if stream else program.length(plan.cut)
        run = Run(program, order, epoch, start)
        with Progress("writing", total, shown=None if progress else False) as bar:
            for number, sample in enumerate(run.items()):
                writer.write(keyed(sample, number))
                bar.add()
        writer.close()
    names = tuple(entry.name for entry in writer.entries)
    samples = sum(entry.samples for entry in writer.entries)
    nbytes = sum(entry.bytes for entry in writer.entries)
    return Packed(redacted(writer.folder), names, samples, nbytes, len(run.skipped))


def ordered_engine(engine: EngineOptions) -> EngineOptions:
    """The engine, asked to keep the order."""
    return replace(engine, options=tuple((name, value) for name, value in engine.options if name != "ordered"))


def keyed(sample: dict[str, Any], number: int) -> dict[str, Any]:
    """The sample with a key: its own, or its number."""
    return sample if "__key__" in sample else {"__key__": f"{number:09d}", **sample}


@contextmanager
def failures_of(url: str) -> Iterator[None]:
    """Turn what the system says about a place into a StorageError that names it."""
    try:
        yield
    except StorageError:
        raise
    except OSError as exc:
        raise StorageError(f"cannot write: {exc.strerror or exc}", redacted(url)) from exc


def check_elsewhere(program: Program, folder: str, single: str | None = None, *, every: bool = False) -> None:
    """Refuse to write where the plan reads; one archive (``single``) may lie beside others, but be none of them.

    Only shards count, or with ``every`` files of any kind; not those of a list of files, which lie where they lie.

    Raises:
        PlanError: it is so.
    """
    if program.stream is not None:
        return
    written = _place(folder)
    for reader in program.readers:
        if (isinstance(reader, TarReader) or (every and not isinstance(reader, ListReader))) and any(
            _holder(url) == written and single in (None, os.path.basename(url))
            for url in map(reader.url, range(len(reader.names)))
        ):
            raise PlanError(
                f"the dataset reads from {redacted(folder)}, where it is to be written; choose another folder"
            )


def path_of(name: str, value: str | os.PathLike[str]) -> str:
    """Give a path or URL as text.

    Raises:
        PlanError: it is none.
    """
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str) and path:
        return path
    raise PlanError(f"{name}={value!r}: give a path or a URL")


def check_flag(name: str, value: Any) -> None:
    """Require yes or no.

    Raises:
        PlanError: it is neither.
    """
    if not isinstance(value, bool):
        raise PlanError(f"{name}={value!r}: give True or False")


def _holder(url: str) -> str | None:
    """The folder in which something lies that a reader names, or which it is; ``None``: it lies nowhere."""
    if not on_disk(url):
        return url.rpartition("/")[0]
    path = os.path.realpath(local_path(url))
    if os.path.isdir(path):
        return path
    return os.path.dirname(path) if os.path.exists(path) else None


def _place(folder: str) -> str:
    return os.path.realpath(local_path(folder)) if on_disk(folder) else folder.rstrip("/")
