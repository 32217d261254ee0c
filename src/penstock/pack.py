"""Any dataset into shards."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from penstock.codecs.stage import Encode
from penstock.engines import Program, Run
from penstock.engines.progress import Progress
from penstock.errors import PlanError, StorageError
from penstock.formats.tar import ShardWriter
from penstock.formats.tar.reader import TarReader
from penstock.plan import Plan, check_count, size_in_bytes
from penstock.storage import local_path


@dataclass(frozen=True, slots=True)
class Packed:
    """What was written."""

    folder: str
    shards: tuple[str, ...]  # names, in order
    samples: int
    nbytes: int


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
    target = local_path(os.fspath(url))
    ordered = replace(plan.then(Encode(trust_pickle)), engine=_ordered(plan))
    program = Program(ordered)
    stream = program.stream is not None
    order = None if stream else program.order(epoch)
    start = program.front() if order is None else program.start(order, plan.cut)
    try:
        with ShardWriter(target, max_bytes=limit, max_samples=max_samples, compress=compress) as writer:
            _check_elsewhere(program, writer)
            total = None if stream else program.length(plan.cut)
            with Progress("writing", total, shown=None if progress else False) as bar:
                for number, sample in enumerate(Run(program, order, epoch, start).items()):
                    writer.write(_keyed(sample, number))
                    bar.add()
    except OSError as exc:
        if isinstance(exc, StorageError):
            raise
        raise StorageError(f"cannot write: {exc.strerror or exc}", url) from exc
    names = tuple(entry.name for entry in writer.entries)
    samples = sum(entry.samples for entry in writer.entries)
    return Packed(str(writer.folder), names, samples, sum(entry.bytes for entry in writer.entries))


def _ordered(plan: Plan) -> Any:
    options = tuple((name, value) for name, value in plan.engine.options if name != "ordered")
    return replace(plan.engine, options=options)


def _keyed(sample: dict[str, Any], number: int) -> dict[str, Any]:
    return sample if "__key__" in sample else {"__key__": f"{number:09d}", **sample}


def _check_elsewhere(program: Program, writer: ShardWriter) -> None:
    if program.stream is not None:
        return
    written = os.path.realpath(writer.folder)
    for reader in program.readers:
        if isinstance(reader, TarReader) and any(os.path.realpath(folder) == written for folder in reader.folders()):
            raise PlanError(f"the dataset reads from {writer.folder}, where it is to be written; choose another folder")
