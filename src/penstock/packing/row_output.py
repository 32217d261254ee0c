"""What a plan gives, into files of rows: CSV, JSON lines, TFRecord."""

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
from penstock.packing.tar_output import Packed, failures_of, ordered_engine
from penstock.plan import Plan, size_in_bytes
from penstock.storage import Storage, redacted

__all__ = ["AsCsv", "AsExample", "AsJson", "RowStage", "write_rows"]


def write_rows(
    plan: Plan,
    epoch: int,
    url: str | os.PathLike[str],
    kind: RowStage,
    *,
    max_bytes: float | str | None,
    resume: bool,
    progress: bool,
    storage: Storage | None,
) -> Packed:
    """Run a plan and write what comes out, in order; the files appear when the last of them is done.

    Raises:
        DataError: a sample has no place in such a file, or other fields than the first.
        PlanError: an argument out of range, or another one is writing there.
        StorageError: the place cannot be written.
    """
    limit = None if max_bytes is None else size_in_bytes("max_bytes", max_bytes)
    url = os.fspath(url)
    program = Program(replace(plan.then(kind), engine=ordered_engine(plan.engine)))
    job = _Job(program, epoch, kind, limit)
    with failures_of(url), ExitStack() as stack:
        files = stack.enter_context(FileSet(url, kind.suffixes, limit, storage))
        if files.on_disk:
            stack.enter_context(folder_lock(str(files.drafts), "writing"))
        files.finish()
        files.check_empty()
        skipped = job.run(files, resume, progress, redacted(url))
        names = files.publish()
    return Packed(redacted(files.folder), names, files.rows, files.nbytes, skipped)


@dataclass(slots=True)
class _Job:
    """One writing: what is noted of it, and the rest of it."""

    program: Program
    epoch: int
    kind: RowStage
    limit: int | None

    def run(self, files: FileSet, resume: bool, progress: bool, place: str) -> int:
        """Write what is not yet written; how many samples were left out."""
        program, stream = self.program, self.program.stream is not None
        order = None if stream else program.order(self.epoch)
        begin = program.front() if order is None else program.start(order, program.plan.cut)
        total = None if stream else program.length(program.plan.cut)
        what = "" if stream else self._what()
        known = files.take_up(what) if resume and not stream else None
        start = begin if known is None else start_from_json(known["start"])
        before = 0 if known is None else int(known["skipped"])
        first: Any = None if known is None else (tuple(known["fields"]), b"")
        run = Run(program, order, self.epoch, start, tracked=not stream)
        left = None if total is None else max(0, total - files.rows)
        with Progress("writing", left, shown=None if progress else False) as bar:
            for rows in run.runs():
                if first is None and len(rows):
                    first = rows[0]
                    files.head = self.kind.head(first)
                try:
                    files.add(self.kind.frame(list(rows), first))
                except ValueError as exc:
                    raise DataError(f"{self.kind.name}: {exc}", place) from exc
                bar.add(len(rows))
                if resume and not stream and files.due:
                    names = list(first[0]) if isinstance(first, tuple) else []
                    said = {"what": what, "start": start_to_json(run.here()), "fields": names}
                    files.note({**said, "skipped": before + len(run.passed())})
        return before + len(run.skipped)

    def _what(self) -> str:
        """A name for what is written: another dataset or other options give another one."""
        plan = self.program.plan
        said = [self.program.identity(counts=True), plan.describe(), repr(self.kind), self.epoch, plan.seed, self.limit]
        return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()[:32]
