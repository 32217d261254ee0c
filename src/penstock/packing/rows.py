"""What a plan gives, into files of rows: CSV, JSON lines, TFRecord."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice

from penstock.engines import Program, Run
from penstock.engines.progress import Progress
from penstock.errors import DataError
from penstock.formats.encoding import AsCsv, AsExample, AsJson, RowStage
from penstock.formats.fileset import FileSet
from penstock.packing.writing import Packed, failures_of, in_order
from penstock.plan import Plan, size_in_bytes
from penstock.storage import Storage, shown

__all__ = ["AsCsv", "AsExample", "AsJson", "RowStage", "write_rows"]

_LOT = 256  # rows that are handed to the file together


def write_rows(
    plan: Plan,
    epoch: int,
    url: str | os.PathLike[str],
    kind: RowStage,
    *,
    max_bytes: float | str | None,
    progress: bool,
    storage: Storage | None,
) -> Packed:
    """Run a plan and write what comes out, in order; the files appear when the last of them is done.

    Raises:
        DataError: a sample has no place in such a file, or other fields than the first.
        PlanError: an argument out of range.
        StorageError: the place cannot be written.
    """
    limit = None if max_bytes is None else size_in_bytes("max_bytes", max_bytes)
    url = os.fspath(url)
    program = Program(replace(plan.then(kind), engine=in_order(plan.engine)))
    stream = program.stream is not None
    order = None if stream else program.order(epoch)
    run = Run(program, order, epoch, program.front() if order is None else program.start(order, plan.cut))
    total = None if stream else program.length(plan.cut)
    with (
        failures_of(url),
        FileSet(url, kind.suffixes, limit, storage) as files,
        Progress("writing", total, shown=None if progress else False) as bar,
    ):
        rows, first = iter(run.items()), None
        while lot := list(islice(rows, _LOT)):
            if first is None:
                first = lot[0]
                files.head = kind.head(first)
            try:
                files.add(kind.framed(lot, first))
            except ValueError as exc:
                raise DataError(f"{kind.name}: {exc}", shown(url)) from exc
            bar.add(len(lot))
        names = files.publish()
    return Packed(shown(files.folder), names, files.rows, files.nbytes, len(run.skipped))
