"""``ps.process``: a function over inputs, each once, whatever happens in between."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from penstock.blobs.draft import put_object, read_object
from penstock.dataset import Dataset
from penstock.engines import engine_options, start_run
from penstock.engines.progress import Progress
from penstock.errors import PlanError, StageError
from penstock.formats.items import ItemsSource
from penstock.jobs.commit_outputs import Failure, OutputCommitter
from penstock.jobs.inputs import Input, InputsSource, inputs_of, sign, signs
from penstock.jobs.job_rows import from_json, readable
from penstock.jobs.journal import DiskJournal, FarJournal, Journal
from penstock.jobs.metadata import INPUT, check_metadata, filled, write_metadata
from penstock.jobs.output import HIDDEN
from penstock.jobs.output_folder import DiskFolder, FarFolder, Folder
from penstock.jobs.task import Work, check_function
from penstock.packing.folder_lock import Owner, busy, folder_lock
from penstock.packing.tar_output import failures_of
from penstock.plan import ByObject, OnError, Plan, Resources, check_choice, check_count, name_of
from penstock.storage import Storage, local_path, open_storage, redacted
from penstock.storage.protocol import scheme

log = logging.getLogger("penstock")

_OWNER = "owner.json"


class Processed(Dataset):
    """The rows of a job, in the order of its inputs, and what became of it.

    Attributes:
        inputs: How many inputs there are.
        worked: How many of them were worked on now; the others were done before.
        failures: Those that failed.
    """

    __slots__ = ("failures", "inputs", "worked")

    def __init__(self, rows: list[dict[str, Any]], inputs: int, worked: int, failures: tuple[Failure, ...]) -> None:
        super().__init__(Plan(ItemsSource(ByObject(rows))))
        self.inputs, self.worked, self.failures = inputs, worked, failures

    def _with(self, plan: Plan) -> Dataset:  # type: ignore[override]
        return Dataset(plan)


def process(
    inputs: Any,
    fn: Callable[..., Any],
    out: str | os.PathLike[str] = "outputs/",
    metadata: str | os.PathLike[str] | None = None,
    workers: int | tuple[int, int] | None = 8,
    on: Literal["processes", "threads"] = "processes",
    retries: int = 2,
    engine: Literal["local", "ray"] | None = None,
    *,
    timeout_s: float | None = None,
    only: int | None = None,
    fresh: bool = False,
    overwrite: bool = False,
    on_failure: Literal["keep", "raise"] = "keep",
    cpus: float | None = None,
    gpus: float = 0,
    address: str | None = None,
    progress: bool | None = None,
    storage: Storage | None = None,
) -> Processed:
    """Turn files into files: call ``fn(path, out)`` on every input that is not done yet, and collect its rows.

    ``fn`` writes to ``out.path(name)``, which is published when the call succeeds, and returns a row (a dict), several,
    a generator of rows, or nothing. Every row gets a field ``input`` that names its input, unless it has one. A journal
    in ``out`` says what is done: an input that is neither new, changed (size, time or tag), failed nor without its
    outputs is not done again. That the function has changed is not noticed.

    Args:
        inputs: A list of paths or URLs, a glob, a folder, or a column of a dataset: ``ds["input"]``.
        fn: A function of (path, out), or of the path alone; or a class, made once a worker, with such a ``__call__``.
        out: The folder of outputs: a path or URL.
        metadata: A file for the rows of all inputs that are done, in their order: ``.parquet``, ``.csv``, ``.jsonl``.
        workers: How many inputs are worked on at a time, or (min, max); ``None``: as many as there are cores.
        on: Where: in processes, or in threads of this one.
        retries: How often a call that fails is repeated.
        engine: ``"ray"`` runs it on a cluster, which must see the same files.
        timeout_s: How long one call may take; the process that takes longer is ended, and another one tries once more.
        only: Call it on so many of the inputs only, in this process, once; what it raises comes out. Nothing counts as
            done by that, and no metadata is written.
        fresh: Forget what is done: remove all outputs of this job and begin anew.
        overwrite: Replace files of the folder that are no outputs of this job.
        on_failure: ``"raise"``: end with an error if inputs failed, when all others are done.
        cpus: What one call needs of the machine.
        gpus: The same; ``fn`` may have a parameter ``device``.
        address: The Ray cluster.
        progress: Show how far it is; ``None``: where the output is a terminal.
        storage: How to reach what is remote.

    Returns:
        The rows, as a dataset, with ``failures``, and ``inputs`` and ``worked``: how many there are, and were done now.

    Raises:
        DataError: rows have no place in the metadata file.
        EngineError: the function cannot be sent to a worker.
        PlanError: an argument makes no sense, or another run is writing there.
        StageError: inputs failed, and ``on_failure`` is ``"raise"``.
        StateError: the journal is that of another function, or damaged.
        StorageError: the folder cannot be written, or nothing is there to be read.
    """
    check_function(fn)
    check_choice("on_failure", on_failure, ("keep", "raise"))
    if only is not None:
        check_count("only", only, least=1)
    check_count("retries", retries)
    plan = _Plan(fn, retries, Resources(workers, on, cpus, gpus, 0, timeout_s), engine, address, storage)
    plan.check()
    rows_at = None if metadata is None else os.fspath(metadata)
    if rows_at is not None:
        check_metadata(rows_at)
    job = _Job(inputs_of(inputs, storage), plan, os.fspath(out), rows_at, overwrite)
    with ExitStack() as stack:
        with failures_of(job.out):
            job.open(stack, fresh)
        answer = job.trial(only) if only is not None else job.run(progress)
    _tell(answer)
    if answer.failures and on_failure == "raise":
        first = answer.failures[0]
        problem = f"{len(answer.failures)} of {answer.inputs} inputs failed; the first: {first.error}"
        raise StageError(problem, f"process({name_of(fn)})", first.input)
    return answer


def _tell(answer: Processed) -> None:
    if failed := answer.failures:
        some = "; ".join(f"{one.input}: {one.error}" for one in failed[:3])
        log.warning("%d of %d inputs failed (%s%s)", len(failed), answer.inputs, some, "; ..." * (len(failed) > 3))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the function is called."""

    fn: Callable[..., Any]
    retries: int
    resources: Resources
    engine: str | None
    address: str | None
    storage: Storage | None

    def check(self) -> None:
        check_choice("engine", self.engine or "local", ("local", "ray"))
        if self.address is not None and self.engine != "ray":
            raise PlanError(f"address={self.address!r} is for engine='ray'")
        if self.resources.timeout_s is not None and self.resources.on == "threads" and self.engine != "ray":
            raise PlanError("timeout_s needs on='processes': a thread cannot be ended")
        self.options()

    def options(self) -> Any:
        """The engine, which may give outcomes in any order: nobody shall wait for the one that takes longest."""
        name = self.engine or "local"
        address = {} if self.address is None else {"address": self.address}
        return engine_options(name, {"ordered": False, **address})


@dataclass(slots=True)
class _Job:
    """One run: its inputs, and the folder it fills."""

    inputs: list[Input]
    plan: _Plan
    out: str
    metadata: str | None
    overwrite: bool
    folder: Folder = None  # type: ignore[assignment] # set by open
    journal: Journal = None  # type: ignore[assignment] # the same
    work: Work = None  # type: ignore[assignment] # the same
    settling: OutputCommitter = None  # type: ignore[assignment] # the same

    def open(self, stack: ExitStack, fresh: bool) -> None:
        """Have the folder to oneself, and know what is done."""
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-job-", ignore_cleanup_errors=True))
        function = name_of(self.plan.fn)
        remote = scheme(self.out) != "file"
        if remote:
            self.out = self.out.rstrip("/")
            storage = open_storage(self.out, self.plan.storage)
            stack.enter_context(_far_turn(self.out, storage))
            self.folder, drafts = FarFolder(self.out, storage), os.path.join(scratch, "drafts")
            self.journal = FarJournal(self.out, storage, function, fresh)
        else:
            self.out = os.path.abspath(local_path(self.out))
            stack.enter_context(folder_lock(os.path.join(self.out, HIDDEN), "job"))
            self.folder, drafts = DiskFolder(self.out), os.path.join(self.out, HIDDEN, "drafts")
            shutil.rmtree(drafts, ignore_errors=True)  # of a run that was killed
            stack.callback(shutil.rmtree, drafts, ignore_errors=True)
            self.journal = DiskJournal(self.out, function, fresh)
        stack.callback(self.journal.close)
        if fresh:
            self.folder.remove(list(self.journal.owners))
            self.journal.reset()
        self.work = Work(
            self.plan.fn,
            drafts,
            scratch,
            self.plan.retries,
            self.out if remote else None,
            tuple(self._taken().items()),
            os.getcwd(),
            self.plan.storage,
            resources=self.plan.resources,
        )
        self.settling = OutputCommitter(self.journal, self.folder, self.inputs, self.overwrite)

    def _taken(self) -> dict[str, str]:
        """Names in the folder that outputs must not have: those of inputs, and of the metadata."""
        found = {}
        places = [(one.url, f"the input {one.key!r}") for one in self.inputs]
        if self.metadata is not None:
            places.append((self.metadata, "the metadata"))
        if scheme(self.out) != "file":
            below = f"{self.out}/"
            return {url.removeprefix(below): what for url, what in places if url.startswith(below)}
        real = cache(os.path.realpath)  # few folders hold many inputs
        root = real(self.out)
        for url, what in places:
            if scheme(url) == "file":
                parent, name = os.path.split(local_path(url))
                place = f"{real(parent or '.')}/{name}"
                if place.startswith(f"{root}/"):
                    found[place.removeprefix(f"{root}/")] = what
        return found

    def trial(self, only: int) -> Processed:
        """Call the function on the first inputs, here."""
        call, rows = self.work.caller(), []
        for one in self.inputs[:only]:
            done = self.work.called(one, call, sign(one, self.plan.storage))
            self.settling.settle(done, trial=True)
            if failed := self.settling.failures():
                raise PlanError(failed[0].error)
            rows += _named(one, from_json(json.loads(done.rows)))
        many = min(only, len(self.inputs))
        return Processed(filled(rows), many, many, ())

    def run(self, progress: bool | None) -> Processed:
        """Do what is not done, and write down all that is."""
        left = self._left()
        with Progress("processing", len(self.inputs), "inputs", shown=progress) as bar:
            bar.add(len(self.inputs) - len(left))
            if left:
                self._do(left, bar)
        failures = self.settling.failures()
        self.journal.sync()
        failed = {one.input for one in failures}
        done = [one for one in self.inputs if one.key not in failed]
        rows = filled([row for one in done for row in _named(one, self.journal.rows(one.key))])
        if self.metadata is not None:
            write_metadata(rows, self.metadata, self.plan.storage)
        return Processed(rows, len(self.inputs), len(left), failures)

    def _left(self) -> list[Input]:
        known = [one for one in self.inputs if (found := self.journal.records.get(one.key)) and found.done]
        now = dict(zip((one.key for one in known), signs(known, self.plan.storage), strict=True))
        return [one for one in self.inputs if not self._is_done(one, now.get(one.key))]

    def _is_done(self, one: Input, now: Any) -> bool:
        record = self.journal.records.get(one.key)
        if record is None or not record.done or now is None or tuple(now) != record.sign:
            return False
        return self.folder.holds(record.outputs)

    def _do(self, left: Sequence[Input], bar: Progress) -> None:
        plan = Plan(InputsSource(ByObject(left))).then(self.work)
        run = start_run(replace(plan, errors=OnError("skip"), engine=self.plan.options()), 0)
        with closing(run):
            for outcomes in run.runs():
                for done in outcomes:
                    self.settling.settle(done)
                bar.add(len(outcomes))
        for skip in run.skipped:  # whose workers died or took too long
            self.settling.lost(left[skip.place.number], skip.problem)
            bar.add()


def _named(one: Input, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with the name of its input, unless it has one."""
    name = readable(one.url if one.path is not None else one.key)
    return [{INPUT: name, **row} for row in rows]


@contextmanager
def _far_turn(url: str, storage: Storage) -> Iterator[None]:
    """Have a place elsewhere to oneself, as far as that can be known."""
    at = f"{url}/{HIDDEN}/{_OWNER}"
    with folder_lock(url, "job") as me:
        if (found := read_object(storage, at)) is not None:
            before = Owner(**json.loads(found))
            if before.lives():
                raise busy(redacted(url), str(before), "job")
        put_object(storage, at, json.dumps(asdict(me)).encode())
        try:
            yield
        finally:
            storage.delete(at)
