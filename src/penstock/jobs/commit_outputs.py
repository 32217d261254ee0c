"""What is made of outcomes, one after the other: names given, clashes found, everything noted.

Outcomes come in any order, and what becomes of them does not depend on it: of inputs that write one name none keeps
it, whichever came first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.errors import PlanError, StorageError
from penstock.jobs.inputs import Input
from penstock.jobs.journal import Journal
from penstock.jobs.output_folder import Folder
from penstock.jobs.task import FULL, Done


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that could not be processed.

    Attributes:
        input: Which.
        error: What went wrong, in a line.
        traceback: Where, from the function on; empty where a worker ended without a word.
        tries: How often the function was called; 0: nobody knows.
    """

    input: str
    error: str
    traceback: str
    tries: int


class OutputCommitter:
    """Settles outcomes in a folder and its journal."""

    def __init__(self, journal: Journal, folder: Folder, inputs: Iterable[Input], overwrite: bool = False) -> None:
        self._journal, self._folder, self._overwrite = journal, folder, overwrite
        self._inputs = {one.key: one for one in inputs}
        self._contested: dict[str, str] = {}  # names that nobody may have, and one of those who wanted them
        self._failed: dict[str, Failure] = {}

    def failures(self) -> tuple[Failure, ...]:
        """The inputs that failed, in order."""
        return tuple(self._failed[key] for key in sorted(self._failed, key=lambda key: self._inputs[key].number))

    def settle(self, done: Done, *, trial: bool = False) -> None:
        """Publish what an input gave, or take away what it had, and note it.

        Raises:
            StorageError: nothing can be written any more.
        """
        if done.full:
            self._drop(done)
            raise _stopped(done.error or "", done.input.key)
        if done.error is None:
            done = self._checked(done)
        try:
            self._note(done, trial)
        except OSError as exc:
            self._drop(done)
            raise _stopped(exc.strerror or str(exc), done.input.key) from exc

    def lost(self, one: Input, problem: str) -> None:
        """Note that nothing came back of an input: its worker ended."""
        self.settle(Done(one, None, 0, error=problem))

    def _checked(self, done: Done) -> Done:
        """The outcome, or a failure if it may not have its names."""
        key, names = done.input.key, [name for name, _ in done.outputs]
        owners = self._journal.owners
        clashes = {name: owners.get(name) or self._contested.get(name, key) for name in names}
        if clashes := {name: other for name, other in clashes.items() if other != key}:
            self._contested.update(dict.fromkeys(names, key) | self._contested)
            for name, other in clashes.items():
                if owners.get(name) == other and other in self._inputs:
                    self._revoke(other, key, name)
            name, other = next(iter(clashes.items()))
            return self._refused(done, self._clash(key, other, name))
        if self._overwrite:
            return done
        if strange := self._folder.strangers(name for name in names if owners.get(name) != key):
            return self._refused(
                done,
                f"there is a {strange[0]!r} in the folder that is no output of this job; remove it, choose another "
                "folder, or pass overwrite=True",
            )
        return done

    def _clash(self, one: str, other: str, name: str) -> str:
        if other not in self._inputs:
            return (
                f"{one!r} writes {name!r}, which is an output of {other!r}, an input of an earlier run; choose another "
                "folder, or pass fresh=True to start over"
            )
        first, second = sorted((one, other), key=lambda key: self._inputs[key].number)
        return f"{first!r} and {second!r} both write {name!r}, so neither may; put something of the input into the name"

    def _revoke(self, key: str, other: str, name: str) -> None:
        """Take away from an input what it got before another one wanted the same."""
        record, one = self._journal.records[key], self._inputs[key]
        self._contested.update({own: key for own, _ in record.outputs} | self._contested)
        self._note(Done(one, record.sign, 1, error=self._clash(key, other, name)), trial=False)

    def _refused(self, done: Done, problem: str) -> Done:
        self._drop(done)
        return replace(done, outputs=(), draft=None, rows="[]", error=problem)

    def _drop(self, done: Done) -> None:
        """Leave nothing of what was written."""
        if done.draft is not None:
            shutil.rmtree(done.draft, ignore_errors=True)
        elif done.outputs:
            self._folder.remove(name for name, _ in done.outputs)

    def _note(self, done: Done, trial: bool) -> None:
        """Old outputs go, then the journal says what there will be, then it is there: see the journal's promise."""
        before = self._journal.records.get(done.input.key)
        kept = {name for name, _ in done.outputs} if done.draft is None else set()  # uploaded already
        self._folder.remove(name for name, _ in (before.outputs if before else ()) if name not in kept)
        self._journal.add(done, trial=trial)
        if done.error is not None:
            self._fail(done)
            return
        try:
            self._folder.publish(done.draft, done.outputs)
        except (OSError, PlanError) as exc:
            if isinstance(exc, OSError) and exc.errno in FULL:
                raise
            problem = str(exc) if isinstance(exc, PlanError) else f"cannot be published: {exc.strerror}"
            self._folder.remove(name for name, _ in done.outputs)
            failed = self._refused(done, _named(problem, exc))
            self._journal.add(failed)
            self._fail(failed)

    def _fail(self, done: Done) -> None:
        key = done.input.key
        self._failed[key] = Failure(key, done.error or "", done.trace, done.tries)


def _named(problem: str, exc: Exception) -> str:
    place = getattr(exc, "filename2", None) or getattr(exc, "filename", None)
    return f"{problem} ({os.fspath(place)})" if place else problem


def _stopped(problem: str, key: str) -> StorageError:
    return StorageError(f"{problem}; what is done is kept: make room and run it again", key)
