"""Publishes the outputs of a job, input by input: which input owns which file, what is done, and what failed.

A journal has a line for each outcome of an input. The line of an input is written before its outputs are published, and
the input counts as done only if both the line and the outputs exist. Where outputs replace earlier ones of the same
input, the line is written twice: the first says that the input is not done. A run that is killed at any moment
therefore leaves nothing that the next run mistakes for finished, and nothing is deleted before what replaces it is
visible.

Outcomes arrive in any order, and the result does not depend on that order: if several inputs write the same name, all
of them fail.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import PlanError, StateError, StorageError
from penstock.landing.journal import Journal
from penstock.landing.lock import temporary_folder, work_lock
from penstock.storage import Storage, redacted

JOB_FOLDER = ".penstock-job"  # in the output folder, for the lock, the journal and the drafts
# Errors of the disk, not of an input: the next input would fail in the same way.
UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_START_OVER = "pass fresh=True (--fresh) to start over"
Outputs = tuple[tuple[str, int], ...]  # names and sizes


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of processing an input, whether it succeeded or failed.

    Attributes:
        key: The input.
        fingerprint: The content that was processed; ``None`` if it could not be accessed.
        tries: How often the function was called.
        outputs: The names and sizes of the files that the function wrote.
        draft: The folder that holds the outputs, if they are not published yet.
        rows: The rows that the function returned, as JSON.
        error: What went wrong, in one line; ``None`` if nothing did.
        traceback: The traceback of the error.
        unwritable: Whether the disk is full or read-only, which ends the run.
    """

    key: str
    fingerprint: tuple[Any, ...] | None
    tries: int
    outputs: Outputs = ()
    draft: str | None = None
    rows: str = "[]"
    error: str | None = None
    traceback: str = ""
    unwritable: bool = False


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


@dataclass(frozen=True, slots=True)
class InputRecord:
    """The latest entry of an input in the journal.

    Attributes:
        fingerprint: The content that was processed; None if it could not be accessed.
        code: The hash of the function that processed it.
        outputs: The outputs that the input owns in the folder, whether it is done or not.
        done: Whether the input need not be processed again while its content, code and outputs stay the same.
        line: The offset and size of its line in the journal.
    """

    fingerprint: tuple[Any, ...] | None
    code: str
    outputs: Outputs
    done: bool
    line: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Job:
    """What is done with which inputs.

    Attributes:
        function: The name of the function; a folder holds the outputs of one.
        code: The hash of the function; inputs that another version of it processed are processed again.
        keys: The inputs, in order.
    """

    function: str
    code: str
    keys: Sequence[str]


class OutputSink:
    """The outputs of one job in one folder, locked. Not thread-safe; :func:`open_outputs` creates it.

    Attributes:
        drafts: The local folder for files that are being written.
        scratch: A temporary folder for what workers download.
        records: The record of each input, by its key.
        owners: The key of the input that owns an output, by the name of the output.
    """

    def __init__(
        self, folder: OutputFolder, journal: Journal, job: Job, drafts: str, scratch: str, overwrite: bool
    ) -> None:
        self._folder, self._journal, self._job, self._overwrite = folder, journal, job, overwrite
        self.drafts, self.scratch = drafts, scratch
        self._numbers = {key: number for number, key in enumerate(job.keys)}
        self.records: dict[str, InputRecord] = {}
        self.owners: dict[str, str] = {}
        self._contested: dict[str, str] = {}  # names that no input may publish -> an input that wrote them
        self._failed: dict[str, Failure] = {}

    def load(self, fresh: bool) -> None:
        """Read the journal; with ``fresh``, remove all outputs that it lists, as far as it is intact, and start over.

        Raises:
            StateError: The journal is damaged, or belongs to another function.
            OSError: The folder cannot be written.
        """
        header: dict[str, Any] | None = None
        function = self._job.function
        try:
            for entry, offset, size in self._journal.load(lenient=fresh):
                header = header or entry
                with suppress(ValueError, KeyError, TypeError) if fresh else ExitStack():
                    if "key" in entry:
                        self._index(entry, (offset, size))
        except StateError as exc:
            raise StateError(f"{exc}; {_START_OVER}") from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise StateError(f"{self._journal.damaged(exc)}; {_START_OVER}") from exc
        if header is not None and header.get("function") != function and not fresh:
            raise StateError(
                f"{redacted(self._folder.url)} holds the outputs of {header.get('function')}, not of {function}; "
                f"choose another folder, or {_START_OVER}"
            )
        if fresh:
            self._folder.remove([*self.owners])
            self.records.clear()
            self.owners.clear()
        if header is None or fresh:
            self._journal.start({"function": function})

    def _index(self, entry: dict[str, Any], line: tuple[int, int]) -> None:
        """Update ``records`` and ``owners`` with an entry."""
        key = entry["key"]
        outputs = tuple((str(name), int(nbytes)) for name, nbytes in entry["outputs"])
        for name, _ in outputs:
            if normalize_name(name) != name:
                raise ValueError(f"{name!r} is not the name of an output")
        for name in [name for name, owner in self._owned_by(key) if owner == key]:
            del self.owners[name]
        fingerprint = None if entry["sign"] is None else tuple(entry["sign"])
        self.records[key] = InputRecord(fingerprint, str(entry.get("code")), outputs, bool(entry["done"]), line)
        self.owners.update((name, key) for name, _ in outputs)

    def _owned_by(self, key: str) -> list[tuple[str, str | None]]:
        record = self.records.get(key)
        return [(name, self.owners.get(name)) for name, _ in (record.outputs if record is not None else ())]

    def is_done(self, key: str, fingerprint: tuple[Any, ...] | None) -> bool:
        """Return whether an input of this content need not be processed again by this function."""
        record = self.records.get(key)
        if record is None or not record.done or record.code != self._job.code:
            return False
        return fingerprint is not None and fingerprint == record.fingerprint and self._folder.holds(record.outputs)

    def begin(self, keys: Iterable[str]) -> None:
        """Record that inputs are about to be processed again, before workers upload outputs over earlier ones."""
        again = [key for key in keys if key in self.records and self.records[key].done] if self._folder.remote else []
        for key in again:
            self._add(Outcome(key, self.records[key].fingerprint, 0, self.records[key].outputs), done=False)
        if again:
            self._journal.sync()

    def rows(self, key: str) -> Any:
        """Return the rows of an input that is done, as parsed JSON."""
        return self._journal.read(*self.records[key].line)["rows"]

    def failures(self) -> tuple[Failure, ...]:
        """Return the inputs that failed so far, in the order of the inputs."""
        return tuple(self._failed[key] for key in sorted(self._failed, key=self._numbers.__getitem__))

    def sync(self) -> None:
        """Make everything durable that was committed so far."""
        self._journal.sync()

    def commit(self, outcome: Outcome, *, trial: bool = False) -> None:
        """Publish the outputs of an input or, if it failed, remove its earlier outputs; record either in the journal.

        Raises:
            StorageError: Nothing can be written any more.
        """
        if outcome.unwritable:
            self._discard(outcome)
            raise _unwritable_error(outcome.error or "", outcome.key)
        if outcome.error is None:
            outcome = self._check_names(outcome)
        try:
            self._record_and_publish(outcome, trial)
        except OSError as exc:
            self._discard(outcome)
            raise _unwritable_error(exc.strerror or str(exc), outcome.key) from exc

    def commit_lost(self, key: str, problem: str) -> None:
        """Record the failure of an input whose worker died or took too long.

        Raises:
            StorageError: Nothing can be written any more.
        """
        self.commit(Outcome(key, None, 0, error=problem))

    def _check_names(self, outcome: Outcome) -> Outcome:
        """Return the outcome, or a failure if another input or file already has the name of an output."""
        key, names = outcome.key, [name for name, _ in outcome.outputs]
        owners = self.owners
        owner_of = {name: owners.get(name) or self._contested.get(name, key) for name in names}
        if clashes := {name: owner for name, owner in owner_of.items() if owner != key}:
            self._contested.update(dict.fromkeys(names, key) | self._contested)
            for name, owner in clashes.items():
                if owners.get(name) == owner and owner in self._numbers:
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
        if owner not in self._numbers:
            return (
                f"{key!r} writes {name!r}, which is an output of {owner!r}, an input of an earlier run; choose another "
                f"folder, or {_START_OVER}"
            )
        first, second = sorted((key, owner), key=self._numbers.__getitem__)
        return (
            f"{first!r} and {second!r} both write {name!r}, so neither is published; make the name depend on the input"
        )

    def _revoke(self, key: str, other: str, name: str) -> None:
        """Remove the published outputs of an input because another one has written the same name."""
        record = self.records[key]
        self._contested.update({own: key for own, _ in record.outputs} | self._contested)
        problem = self._clash_message(key, other, name)
        self._record_and_publish(Outcome(key, record.fingerprint, 1, error=problem), trial=False)

    def _fail(self, outcome: Outcome, problem: str) -> Outcome:
        self._discard(outcome)
        return replace(outcome, outputs=(), draft=None, rows="[]", error=problem)

    def _discard(self, outcome: Outcome) -> None:
        """Remove everything that the function wrote."""
        if outcome.draft is not None:
            shutil.rmtree(outcome.draft, ignore_errors=True)
        elif outcome.outputs:
            self._folder.remove([name for name, _ in outcome.outputs])

    def _record_and_publish(self, outcome: Outcome, trial: bool) -> None:
        """Write the journal, then publish, then remove the input's earlier outputs: the order that readers rely on."""
        record = self.records.get(outcome.key)
        names = {name for name, _ in outcome.outputs}
        old = tuple(output for output in (record.outputs if record else ()) if output[0] not in names)
        replaces = record is not None and bool(record.outputs) and outcome.error is None
        self._add(outcome, done=not (trial or replaces or outcome.error), more=old if replaces else ())
        if outcome.error is not None:
            self._folder.remove([name for name, _ in old])
            self._add_failure(outcome)
            return
        try:
            self._folder.publish(outcome.draft, outcome.outputs)
        except (OSError, PlanError) as exc:
            if isinstance(exc, OSError) and exc.errno in UNWRITABLE:
                raise
            problem = str(exc) if isinstance(exc, PlanError) else f"the outputs cannot be published: {exc.strerror}"
            self._folder.remove([*names, *(name for name, _ in old)])
            outcome = self._fail(outcome, _with_path(problem, exc))
            self._add(outcome, done=False)
            self._add_failure(outcome)
            return
        if replaces:
            self._folder.remove([name for name, _ in old])
            self._add(outcome, done=not trial)

    def _add(self, outcome: Outcome, *, done: bool, more: Outputs = ()) -> None:
        """Append the outcome of an input, which also owns the outputs ``more``."""
        entry = {
            "key": outcome.key,
            "done": done,
            "sign": outcome.fingerprint,
            "code": self._job.code,
            "outputs": (*outcome.outputs, *more),
            "tries": outcome.tries,
        }
        if outcome.error is not None:
            entry |= {"error": outcome.error, "trace": outcome.traceback}
        self._index(entry, self._journal.append(f'{json.dumps(entry)[:-1]}, "rows": {outcome.rows}}}'))

    def _add_failure(self, outcome: Outcome) -> None:
        self._failed[outcome.key] = Failure(outcome.key, outcome.error or "", outcome.traceback, outcome.tries)


@contextmanager
def open_outputs(
    url: str, storage: Storage | None, job: Job, *, fresh: bool = False, overwrite: bool = False
) -> Iterator[OutputSink]:
    """Lock an output folder and read its journal.

    Args:
        url: The folder: an absolute path or a URL.
        storage: The storage of a remote folder; None on a disk.
        job: What is done with which inputs.
        fresh: Remove the outputs of earlier runs.
        overwrite: Whether to replace files that are not outputs of this job.

    Raises:
        PlanError: Another run is writing to the folder.
        StateError: The journal is damaged, or belongs to another function.
        OSError: The folder cannot be written.
    """
    work = f"{url.rstrip('/')}/{JOB_FOLDER}"
    with ExitStack() as stack:
        stack.enter_context(work_lock(work, storage, "job"))
        scratch = stack.enter_context(temporary_folder(work, keep=False))
        drafts = os.path.join(scratch if storage is not None else work, "drafts")
        if os.path.islink(drafts):
            raise PlanError(f"{drafts} is a link, which a run does not follow; remove it")
        shutil.rmtree(drafts, ignore_errors=True)  # left by a run that was killed
        stack.callback(shutil.rmtree, drafts, ignore_errors=True)
        journal = stack.enter_context(closing(Journal(work, storage)))
        sink = OutputSink(OutputFolder(url, storage), journal, job, drafts, scratch, overwrite)
        sink.load(fresh)
        try:
            yield sink
        finally:
            journal.sync()


class OutputFolder:
    """The output folder of a job: a local one, into which drafts are moved, or one to which workers upload."""

    def __init__(self, url: str, storage: Storage | None) -> None:
        self.url, self._storage, self.remote = url, storage, storage is not None
        self._real = os.path.realpath(url) if storage is None else ""
        self._checked_parents: set[str] = set()  # exist, and are known to be inside the folder
        self._sizes: dict[str, int | None] | None = None  # of a remote folder, listed once

    def holds(self, outputs: Outputs) -> bool:
        """Return whether all outputs exist with these sizes."""
        if self._storage is not None:
            if self._sizes is None:
                prefix = f"{self.url}/"
                self._sizes = {info.url.removeprefix(prefix): info.size for info in self._storage.list(prefix)}
            return all(name in self._sizes and self._sizes[name] in (None, size) for name, size in outputs)
        try:
            return all(os.lstat(os.path.join(self.url, name)).st_size == size for name, size in outputs)
        except OSError:
            return False

    def existing(self, names: Iterable[str]) -> list[str]:
        """Return the names that files have already; remote outputs have been uploaded by now."""
        return (
            [name for name in names if os.path.lexists(os.path.join(self.url, name))] if self._storage is None else []
        )

    def publish(self, draft: str | None, outputs: Outputs) -> None:
        """Move the files of a draft to their names, and remove the draft; a worker has uploaded remote outputs.

        Raises:
            OSError: A file cannot be moved; others may have been.
            PlanError: A name leads out of the folder.
        """
        if draft is None:
            return
        for name, _ in outputs:
            source, target = os.path.join(draft, name), os.path.join(self.url, name)
            if (parent := os.path.dirname(target)) not in self._checked_parents:
                os.makedirs(parent, exist_ok=True)
                self._check_inside(parent, name)
                self._checked_parents.add(parent)
            try:
                os.replace(source, target)
            except FileNotFoundError:  # another program has removed the parent in the meantime
                os.makedirs(parent, exist_ok=True)
                os.replace(source, target)
            except OSError as exc:
                if exc.errno != errno.EXDEV:
                    raise
                _copy(source, target, draft)
        shutil.rmtree(draft, ignore_errors=True)

    def remove(self, names: Iterable[str]) -> None:
        """Remove the outputs that exist, and the folders that become empty; names that lead out of it are left."""
        for name in names:
            if self._storage is not None:
                self._storage.delete(f"{self.url}/{name}")
                continue
            parent = os.path.dirname(name)
            with suppress(FileNotFoundError, NotADirectoryError, PlanError):
                self._check_inside(os.path.join(self.url, parent), name)
                os.unlink(os.path.join(self.url, name))
            while parent:
                try:
                    os.rmdir(os.path.join(self.url, parent))
                except OSError:  # not empty, or a link
                    break
                self._checked_parents.discard(os.path.join(self.url, parent))
                parent = os.path.dirname(parent)

    def _check_inside(self, parent: str, name: str) -> None:
        real = os.path.realpath(parent)
        if os.path.commonpath([real, self._real]) != self._real:
            raise PlanError(f"the output {name!r} leads out of the folder, through a link to {real}; remove the link")


def _copy(source: str, target: str, draft: str) -> None:
    """Copy a file to a folder that is mounted from another disk; the target appears whole."""
    partial = f"{os.path.dirname(target)}/.{os.path.basename(draft)}.partial"
    try:
        shutil.copyfile(source, partial)
        os.replace(partial, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(partial)
        raise


def normalize_name(name: str | os.PathLike[str]) -> str:
    """Return the normalized form of an output's name.

    Raises:
        PlanError: The name is not valid, or leads out of the output folder.

    >>> normalize_name("a//b.txt")
    'a/b.txt'
    """
    if not isinstance(name, str | os.PathLike):
        raise PlanError(f"out.path({name!r}): give a name, such as 'a.txt' or 'a/b.txt'")
    text = os.fsdecode(name)
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or "\0" in text or text.endswith(("/", "/.")):
        raise PlanError(f"out.path({text!r}) is not a valid file name; give a name, such as 'a.txt' or 'a/b.txt'")
    if text.startswith("/") or ".." in parts:
        raise PlanError(f"out.path({text!r}) leads out of the output folder; give a relative name without '..'")
    if parts[0] == JOB_FOLDER:
        raise PlanError(f"out.path({text!r}): {JOB_FOLDER} is reserved for the journal; choose another name")
    return "/".join(parts)


def _with_path(problem: str, exc: Exception) -> str:
    path = getattr(exc, "filename2", None) or getattr(exc, "filename", None)
    return f"{problem} ({os.fspath(path)})" if path else problem


def _unwritable_error(problem: str, key: str) -> StorageError:
    return StorageError(f"{problem}; finished inputs are kept: free some space and run the job again", key)
