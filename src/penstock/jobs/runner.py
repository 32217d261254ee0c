"""``ps.process``: call a function on every input, exactly once, even across interrupted runs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from penstock.dataset import Dataset
from penstock.engines import engine_options, start_run
from penstock.engines.progress import Progress
from penstock.errors import PlanError, StageError
from penstock.formats.items import ItemsSource
from penstock.jobs.inputs import Input, InputsSource, fingerprints, resolve_inputs, take_fingerprint
from penstock.jobs.job_rows import decode_rows, escape_bytes
from penstock.jobs.metadata import INPUT_FIELD, check_metadata, fill_fields, write_metadata
from penstock.jobs.task import ProcessStage, check_function
from penstock.landing import check_path, code_digest, storage_errors
from penstock.landing.output_sink import Failure, Job, OutputSink, open_outputs
from penstock.plan import ByObject, OnError, Plan, Resources, check_choice, check_count, name_of
from penstock.storage import Storage, local_path, open_storage
from penstock.storage.protocol import scheme

log = logging.getLogger("penstock")

_LOGGED_FAILURES = 3


class Processed(Dataset):
    """The rows of a job, in the order of its inputs, and its failures.

    Attributes:
        inputs: The number of inputs.
        worked: The number of inputs that this run processed; the others were done before.
        failures: The inputs that failed.
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

    ``fn`` writes to ``out.path(name)``, which is published if the call succeeds, and returns a row (a dict), several
    rows, a generator of rows, or None. Every row gets a field ``input`` that names its input, unless it has one. A
    journal in ``out`` records what is done: an input is processed again only if it is new, has changed (its size, time
    or tag), failed, or lacks an output, or if the code of the function has changed.

    Args:
        inputs: A list of paths or URLs, a glob, a folder, or a column of a dataset: ``ds["input"]``.
        fn: A function of (path, out) or of the path alone, or a class with such a ``__call__``, which is constructed
            once per worker.
        out: The output folder: a path or URL.
        metadata: A file for the rows of all inputs that are done, in their order: ``.parquet``, ``.csv``, ``.tsv`` or
            ``.jsonl``.
        workers: How many inputs are processed at a time, or (min, max); ``None``: one per core.
        on: Whether workers are processes, or threads of this process.
        retries: How often a failed call is repeated.
        engine: ``"ray"`` runs the job on a cluster, whose machines must see the same files.
        timeout_s: How long one call may take; a process that takes longer is killed, and another one tries once more.
        only: Process only this many of the first inputs, once each and in this process, and let exceptions of ``fn``
            through. Nothing counts as done, and no metadata is written.
        fresh: Remove all outputs of this job and start over.
        overwrite: Replace files in the output folder that are not outputs of this job.
        on_failure: ``"raise"`` raises an error if inputs failed, once all others are done.
        cpus: The cores that one call needs.
        gpus: The devices that one call needs; ``fn`` may have a parameter ``device``.
        address: The address of the Ray cluster.
        progress: Whether to show a progress bar; ``None``: if standard error is a terminal.
        storage: The storage of remote inputs and outputs.

    Returns:
        The rows as a dataset, with the attributes ``failures``, ``inputs`` and ``worked``.

    Raises:
        DataError: The metadata file cannot store the rows.
        EngineError: The function cannot be sent to a worker.
        PlanError: An argument is not valid, or another run is writing to the output folder.
        StageError: Inputs failed, and ``on_failure`` is ``"raise"``.
        StateError: The journal belongs to another function, or is damaged.
        StorageError: The output folder cannot be written, or there are no inputs.
    """
    check_function(fn)
    check_choice("on_failure", on_failure, ("keep", "raise"))
    if only is not None:
        check_count("only", only, least=1)
    check_count("retries", retries)
    settings = _Settings(fn, retries, Resources(workers, on, cpus, gpus, 0, timeout_s), engine, address, storage)
    settings.check()
    metadata_url = None if metadata is None else check_path("metadata", metadata)
    if metadata_url is not None:
        check_metadata(metadata_url)
    job = _JobRun(resolve_inputs(inputs, storage), settings, check_path("out", out), metadata_url, overwrite)
    with ExitStack() as stack:
        with storage_errors(job.out):
            job.open(stack, fresh)
        processed = job.try_first(only) if only is not None else job.run(progress)
    _log_failures(processed)
    if processed.failures and on_failure == "raise":
        first = processed.failures[0]
        problem = f"{len(processed.failures)} of {processed.inputs} inputs failed; the first: {first.error}"
        raise StageError(problem, f"process({name_of(fn)})", first.input)
    return processed


def _log_failures(processed: Processed) -> None:
    if failures := processed.failures:
        shown = "; ".join(f"{failure.input}: {failure.error}" for failure in failures[:_LOGGED_FAILURES])
        more = "; ..." if len(failures) > _LOGGED_FAILURES else ""
        log.warning("%d of %d inputs failed (%s%s)", len(failures), processed.inputs, shown, more)


@dataclass(frozen=True, slots=True)
class _Settings:
    """The function of a job, and how and where it is called."""

    fn: Callable[..., Any]
    retries: int
    resources: Resources
    engine: str | None
    address: str | None
    storage: Storage | None

    def check(self) -> None:
        check_choice("engine", self.engine or "local", ("local", "ray"))
        if self.address is not None and self.engine != "ray":
            raise PlanError(f"address={self.address!r} needs engine='ray'")
        if self.resources.timeout_s is not None and self.resources.on == "threads" and self.engine != "ray":
            raise PlanError("timeout_s needs on='processes': a thread cannot be stopped")
        self.engine_options()

    def engine_options(self) -> Any:
        """Return the options of the engine; unordered, so that no outcome waits for a slow input before it."""
        name = self.engine or "local"
        address = {} if self.address is None else {"address": self.address}
        return engine_options(name, {"ordered": False, **address})


@dataclass(slots=True)
class _JobRun:
    """One run of a job: its inputs, its settings and its output folder."""

    inputs: list[Input]
    settings: _Settings
    out: str
    metadata: str | None
    overwrite: bool
    outputs: OutputSink = None  # type: ignore[assignment] # set by open()
    stage: ProcessStage = None  # type: ignore[assignment] # set by open()

    def open(self, stack: ExitStack, fresh: bool) -> None:
        """Lock the output folder and read its journal; closing ``stack`` releases both."""
        remote = scheme(self.out) != "file"
        self.out = self.out.rstrip("/") if remote else os.path.abspath(local_path(self.out))
        storage = open_storage(self.out, self.settings.storage) if remote else None
        fn, keys = self.settings.fn, [job_input.key for job_input in self.inputs]
        job = Job(name_of(fn), code_digest(fn), keys)
        self.outputs = stack.enter_context(open_outputs(self.out, storage, job, fresh=fresh, overwrite=self.overwrite))
        self.stage = ProcessStage(
            self.settings.fn,
            self.outputs.drafts,
            self.outputs.scratch,
            self.settings.retries,
            self.out if remote else None,
            tuple(self._protected_names().items()),
            os.getcwd(),
            self.settings.storage,
            resources=self.settings.resources,
        )

    def _protected_names(self) -> dict[str, str]:
        """Return the names in the output folder that belong to inputs or the metadata, each with a description."""
        protected = {}
        urls = [(job_input.url, f"the input {job_input.key!r}") for job_input in self.inputs]
        if self.metadata is not None:
            urls.append((self.metadata, "the metadata"))
        if scheme(self.out) != "file":
            prefix = f"{self.out}/"
            return {url.removeprefix(prefix): description for url, description in urls if url.startswith(prefix)}
        real_path = cache(os.path.realpath)  # many inputs are in few folders
        root = real_path(self.out)
        for url, description in urls:
            if scheme(url) == "file":
                parent, name = os.path.split(local_path(url))
                path = f"{real_path(parent or '.')}/{name}"
                if path.startswith(f"{root}/"):
                    protected[path.removeprefix(f"{root}/")] = description
        return protected

    def try_first(self, only: int) -> Processed:
        """Call the function on the first ``only`` inputs, in this process, without counting them as done."""
        call, rows = self.stage.make_call(), []
        for job_input in self.inputs[:only]:
            outcome = self.stage.call_once(job_input, call, take_fingerprint(job_input, self.settings.storage))
            self.outputs.commit(outcome, trial=True)
            if failures := self.outputs.failures():
                raise PlanError(failures[0].error)
            rows += _label_rows(job_input, decode_rows(json.loads(outcome.rows)))
        tried = min(only, len(self.inputs))
        return Processed(fill_fields(rows), tried, tried, ())

    def run(self, progress: bool | None) -> Processed:
        """Process the inputs that are not done, and return the rows of all inputs that are done by then."""
        to_do = self._inputs_to_do()
        with Progress("processing", len(self.inputs), "inputs", shown=progress) as bar:
            bar.add(len(self.inputs) - len(to_do))
            if to_do:
                self.outputs.begin(job_input.key for job_input in to_do)
                self._process(to_do, bar)
        failures = self.outputs.failures()
        self.outputs.sync()
        failed = {failure.input for failure in failures}
        done = [job_input for job_input in self.inputs if job_input.key not in failed]
        rows = fill_fields(
            [row for job_input in done for row in _label_rows(job_input, decode_rows(self.outputs.rows(job_input.key)))]
        )
        if self.metadata is not None:
            write_metadata(rows, self.metadata, self.settings.storage, self.outputs.drafts)
        return Processed(rows, len(self.inputs), len(to_do), failures)

    def _inputs_to_do(self) -> list[Input]:
        recorded = [
            job_input
            for job_input in self.inputs
            if (record := self.outputs.records.get(job_input.key)) and record.done
        ]
        current = dict(
            zip((job_input.key for job_input in recorded), fingerprints(recorded, self.settings.storage), strict=True)
        )
        return [
            job_input
            for job_input in self.inputs
            if not self.outputs.is_done(job_input.key, current.get(job_input.key))
        ]

    def _process(self, inputs: Sequence[Input], bar: Progress) -> None:
        plan = Plan(InputsSource(ByObject(inputs))).then(self.stage)
        run = start_run(replace(plan, errors=OnError("skip"), engine=self.settings.engine_options()), 0)
        with closing(run):
            for outcomes in run.runs():
                for outcome in outcomes:
                    self.outputs.commit(outcome)
                bar.add(len(outcomes))
        for skipped in run.skipped:  # their workers died or took too long
            self.outputs.commit_lost(inputs[skipped.place.number].key, skipped.problem)
            bar.add()


def _label_rows(job_input: Input, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the name of the input to rows that do not have such a field."""
    name = escape_bytes(job_input.url if job_input.path is not None else job_input.key)
    return [{INPUT_FIELD: name, **row} for row in rows]
