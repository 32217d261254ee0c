"""Commit the outcomes of inputs to the output folder and the journal, one at a time.

Outcomes arrive in any order, and the result does not depend on that order: if several inputs write the same name, all
of them fail.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.errors import PlanError, StorageError
from penstock.jobs.inputs import Input
from penstock.jobs.journal import JobJournal
from penstock.jobs.output_folder import OutputFolder
from penstock.jobs.task import UNWRITABLE, Outcome


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that could not be processed.

    Attributes:
        input: The input, without secrets of its URL.
        error: What went wrong, in one line.
        traceback: The traceback, from the user's function on; empty if the worker died.
        tries: How often the function was called; 0 if unknown.
    """

    input: str
    error: str
    traceback: str
    tries: int


class OutputCommitter:
    """Publishes the outputs of inputs and records them in the journal. Not thread-safe."""

    def __init__(
        self, journal: JobJournal, folder: OutputFolder, inputs: Iterable[Input], overwrite: bool = False
    ) -> None:
        self._journal, self._folder, self._overwrite = journal, folder, overwrite
        self._inputs = {job_input.key: job_input for job_input in inputs}
        self._contested: dict[str, str] = {}  # names that no input may publish -> an input that wrote them
        self._failed: dict[str, Failure] = {}

    def failures(self) -> tuple[Failure, ...]:
        """Return the inputs that failed so far, in the order of the inputs."""
        return tuple(self._failed[key] for key in sorted(self._failed, key=lambda key: self._inputs[key].number))

    def commit(self, outcome: Outcome, *, trial: bool = False) -> None:
        """Publish the outputs of an input or, if it failed, remove its earlier outputs; record either in the journal.

        Raises:
            StorageError: Nothing can be written any more.
        """
        if outcome.unwritable:
            self._discard(outcome)
            raise _unwritable_error(outcome.error or "", outcome.input.key)
        if outcome.error is None:
            outcome = self._check_names(outcome)
        try:
            self._record_and_publish(outcome, trial)
        except OSError as exc:
            self._discard(outcome)
            raise _unwritable_error(exc.strerror or str(exc), outcome.input.key) from exc

    def commit_lost(self, job_input: Input, problem: str) -> None:
        """Record the failure of an input whose worker died or took too long.

        Raises:
            StorageError: Nothing can be written any more.
        """
        self.commit(Outcome(job_input, None, 0, error=problem))

    def _check_names(self, outcome: Outcome) -> Outcome:
        """Return the outcome, or a failure if another input or file already has the name of an output."""
        key, names = outcome.input.key, [name for name, _ in outcome.outputs]
        owners = self._journal.owners
        owner_of = {name: owners.get(name) or self._contested.get(name, key) for name in names}
        if clashes := {name: owner for name, owner in owner_of.items() if owner != key}:
            self._contested.update(dict.fromkeys(names, key) | self._contested)
            for name, owner in clashes.items():
                if owners.get(name) == owner and owner in self._inputs:
                    self._revoke(owner, key, name)
            name, owner = next(iter(clashes.items()))
            return self._fail(outcome, self._clash_message(key, owner, name))
        if self._overwrite:
            return outcome
        if existing := self._folder.existing(name for name in names if owners.get(name) != key):
            return self._fail(
                outcome,
                f"the folder already holds {existing[0]!r}, which is not an output of this job; remove it, choose "
                "another folder, or pass overwrite=True (--overwrite)",
            )
        return outcome

    def _clash_message(self, key: str, owner: str, name: str) -> str:
        if owner not in self._inputs:
            return (
                f"{key!r} writes {name!r}, which is an output of {owner!r}, an input of an earlier run; choose another "
                "folder, or pass fresh=True (--fresh) to start over"
            )
        first, second = sorted((key, owner), key=lambda key: self._inputs[key].number)
        return (
            f"{first!r} and {second!r} both write {name!r}, so neither is published; make the name depend on the input"
        )

    def _revoke(self, key: str, other: str, name: str) -> None:
        """Remove the published outputs of an input because another one has written the same name."""
        record, job_input = self._journal.records[key], self._inputs[key]
        self._contested.update({own: key for own, _ in record.outputs} | self._contested)
        problem = self._clash_message(key, other, name)
        self._record_and_publish(Outcome(job_input, record.fingerprint, 1, error=problem), trial=False)

    def _fail(self, outcome: Outcome, problem: str) -> Outcome:
        self._discard(outcome)
        return replace(outcome, outputs=(), draft=None, rows="[]", error=problem)

    def _discard(self, outcome: Outcome) -> None:
        """Remove everything that the function wrote."""
        if outcome.draft is not None:
            shutil.rmtree(outcome.draft, ignore_errors=True)
        elif outcome.outputs:
            self._folder.remove(name for name, _ in outcome.outputs)

    def _record_and_publish(self, outcome: Outcome, trial: bool) -> None:
        """Remove old outputs, then write the journal, then publish: the order that the journal relies on."""
        record = self._journal.records.get(outcome.input.key)
        uploaded = {name for name, _ in outcome.outputs} if outcome.draft is None else set()
        self._folder.remove(name for name, _ in (record.outputs if record else ()) if name not in uploaded)
        self._journal.add(outcome, trial=trial)
        if outcome.error is not None:
            self._add_failure(outcome)
            return
        try:
            self._folder.publish(outcome.draft, outcome.outputs)
        except (OSError, PlanError) as exc:
            if isinstance(exc, OSError) and exc.errno in UNWRITABLE:
                raise
            problem = str(exc) if isinstance(exc, PlanError) else f"the outputs cannot be published: {exc.strerror}"
            self._folder.remove(name for name, _ in outcome.outputs)
            failed = self._fail(outcome, _with_path(problem, exc))
            self._journal.add(failed)
            self._add_failure(failed)

    def _add_failure(self, outcome: Outcome) -> None:
        key = outcome.input.key
        self._failed[key] = Failure(key, outcome.error or "", outcome.traceback, outcome.tries)


def _with_path(problem: str, exc: Exception) -> str:
    path = getattr(exc, "filename2", None) or getattr(exc, "filename", None)
    return f"{problem} ({os.fspath(path)})" if path else problem


def _unwritable_error(problem: str, key: str) -> StorageError:
    return StorageError(f"{problem}; finished inputs are kept: free some space and run the job again", key)
