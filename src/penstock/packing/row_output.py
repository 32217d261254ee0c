"""Writes the samples of a plan to files of rows: CSV, JSON lines, TFRecord."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from penstock.engines import Program, Run
from penstock.engines.progress import Progress
from penstock.errors import DataError
from penstock.formats.rows.encoding import AsCsv, AsExample, AsJson, RowStage
from penstock.formats.rows.file_set import FileSet
from penstock.packing.folder_lock import folder_lock
from penstock.packing.journal import start_from_json, start_to_json
from penstock.packing.tar_output import Packed, ordered_engine, storage_errors
from penstock.plan import Plan, size_in_bytes
from penstock.storage import Storage, redacted

__all__ = ["AsCsv", "AsExample", "AsJson", "RowStage", "write_rows"]


def write_rows(
    plan: Plan,
    epoch: int,
    url: str | os.PathLike[str],
    encoder: RowStage,
    *,
    max_bytes: float | str | None,
    resume: bool,
    progress: bool,
    storage: Storage | None,
) -> Packed:
    """Run a plan and write its samples to files of rows, in order; the files appear when the last one is complete.

    Raises:
        DataError: A sample cannot be stored as a row, or has other fields than the first.
        PlanError: An argument is out of range, or another run is writing to the target.
        StorageError: The target cannot be written.
    """
    limit = None if max_bytes is None else size_in_bytes("max_bytes", max_bytes)
    url = os.fspath(url)
    program = Program(replace(plan.then(encoder), engine=ordered_engine(plan.engine)))
    job = _RowJob(program, epoch, encoder, limit)
    with storage_errors(url), ExitStack() as stack:
        files = stack.enter_context(FileSet(url, encoder.suffixes, limit, storage))
        if files.on_disk:
            stack.enter_context(folder_lock(str(files.drafts), "run"))
        files.finish()
        files.check_empty()
        skipped = job.run(files, resume, progress, redacted(url))
        names = files.publish()
    return Packed(redacted(files.folder), names, files.rows, files.nbytes, skipped)


@dataclass(slots=True)
class _RowJob:
    """Writes the samples of a program, and checkpoints so that an interrupted run can be resumed."""

    program: Program
    epoch: int
    encoder: RowStage
    max_bytes: int | None

    def run(self, files: FileSet, resume: bool, progress: bool, url: str) -> int:
        """Write the rows that are not written yet; return how many samples were skipped."""
        program, stream = self.program, self.program.stream is not None
        order = None if stream else program.order(self.epoch)
        start = program.stream_start() if order is None else program.start(order, program.plan.cut)
        total = None if stream else program.length(program.plan.cut)
        fingerprint = "" if stream else self._fingerprint()
        checkpoint = files.resume(fingerprint) if resume and not stream else None
        skipped_before = 0
        first: Any = None  # the first row of the dataset, whose fields all rows must have
        if checkpoint is not None:
            start, skipped_before = start_from_json(checkpoint["start"]), int(checkpoint["skipped"])
            first = (tuple(checkpoint["fields"]), b"")
        run = Run(program, order, self.epoch, start, tracked=not stream)
        remaining = None if total is None else max(0, total - files.rows)
        with Progress("writing", remaining, shown=None if progress else False) as bar:
            for rows in run.runs():
                if first is None and len(rows):
                    first = rows[0]
                    files.head = self.encoder.head(first)
                try:
                    files.add(self.encoder.frame(list(rows), first))
                except ValueError as exc:
                    raise DataError(f"{self.encoder.name}: {exc}", url) from exc
                bar.add(len(rows))
                if resume and not stream and files.checkpoint_due:
                    fields = list(first[0]) if isinstance(first, tuple) else []
                    position = {"what": fingerprint, "start": start_to_json(run.here()), "fields": fields}
                    files.write_checkpoint({**position, "skipped": skipped_before + len(run.skips_so_far())})
        return skipped_before + len(run.skipped)

    def _fingerprint(self) -> str:
        """Return a hash of the dataset and the options: only a run with the same fingerprint can be resumed."""
        plan = self.program.plan
        order = self.program.identity(counts=True)
        parts = [order, plan.describe(), repr(self.encoder), self.epoch, plan.seed, self.max_bytes]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]
