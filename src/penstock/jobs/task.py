"""Process one input in a worker: call the user's function, with retries, on a local file and a private folder."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from penstock.blobs.draft import put_file
from penstock.errors import DataError, MissingExtra, PenstockError, PlanError, StageError, StorageError
from penstock.jobs.inputs import Fingerprint, Input, take_fingerprint
from penstock.jobs.job_rows import encode_rows, to_rows
from penstock.jobs.output import Out
from penstock.landing.output_sink import UNWRITABLE, Outcome
from penstock.plan import Context, Map, Place, name_of, takes_parameter
from penstock.storage import NotFound, Storage, open_storage

_PERMANENT_ERRORS = (PlanError, DataError, NotFound)  # a retry would fail in the same way
_MAX_ERROR_LENGTH = 300  # characters of an error in one line
_MAX_TRACEBACK_LENGTH = 20_000  # characters
_THIS_FOLDER = os.path.dirname(__file__)


@dataclass(frozen=True)
class ProcessStage(Map):
    """The stage of a job, from an ``Input`` to an ``Outcome``; an exception of the function is an outcome too.

    Attributes:
        fn: The user's function, or a class that is constructed once per worker.
        drafts: The folder for files that are being written.
        scratch: The folder for remote inputs that are downloaded.
        retries: How often a failed call is repeated.
        remote: The URL of the output folder; ``None`` if it is local.
        protected: Names in the output folder that must not be replaced, and what they are.
        cwd: The folder that relative paths start from.
        storage: The storage of remote inputs and outputs.
    """

    fn: Callable[..., Any]
    drafts: str
    scratch: str
    retries: int = 0
    remote: str | None = None
    protected: tuple[tuple[str, str], ...] = ()
    cwd: str = ""
    storage: Storage | None = None

    @property
    def name(self) -> str:
        return "process"

    def describe(self) -> str:
        return f"process({name_of(self.fn)})"

    def failure(self, exc: Exception, place: Place) -> Exception:
        """Return the error for a worker that died, in one line and without a traceback."""
        error = StageError(str(exc)[:_MAX_ERROR_LENGTH])  # Ray's messages are long
        error.__cause__ = exc
        return error

    def function(self, ctx: Context) -> Callable[[Input], Outcome]:
        if "call" not in ctx.local:
            if self.cwd and os.getcwd() != self.cwd:  # a worker that was started in another folder
                os.chdir(self.cwd)
            ctx.local["call"] = self.make_call(ctx.device)
        call = ctx.local["call"]
        return lambda job_input: self.run_with_retries(job_input, call)

    def make_call(self, device: Any = None) -> Callable[[Path, Out], Any]:
        """Return the user's function as a function of (path, out); a class is constructed."""
        fn = self.fn
        if isinstance(fn, type):
            fn = fn(device=device) if takes_parameter(fn, "device") else fn()
        elif takes_parameter(fn, "device"):
            with_device = fn
            return lambda path, out: with_device(path, out, device=device)
        return (lambda path, out: fn(path)) if _positional_parameters(fn) == 1 else fn

    def run_with_retries(self, job_input: Input, call: Callable[[Path, Out], Any]) -> Outcome:
        """Call the function until it succeeds or there are no retries left."""
        outcome = self._try_once(job_input, call, 1)
        while outcome.error is not None and not outcome.unwritable and outcome.tries <= self.retries:
            if outcome.fingerprint is None:
                break
            outcome = self._try_once(job_input, call, outcome.tries + 1)
        return outcome

    def _try_once(self, job_input: Input, call: Callable[[Path, Out], Any], tries: int) -> Outcome:
        before: Fingerprint | None = None
        try:
            before = take_fingerprint(job_input, self.storage)
            return self.call_once(job_input, call, before, tries)
        except MissingExtra:
            raise
        except (Exception, SystemExit) as exc:
            unwritable = isinstance(exc, OSError) and exc.errno in UNWRITABLE
            tries = max(tries, self.retries + 1) if isinstance(exc, _PERMANENT_ERRORS) else tries
            error = _one_line(exc)
            return Outcome(
                job_input.key, before, tries, error=error, traceback=_user_traceback(exc), unwritable=unwritable
            )

    def call_once(
        self, job_input: Input, call: Callable[[Path, Out], Any], before: Fingerprint, tries: int = 1
    ) -> Outcome:
        """Call the function once; let its exceptions through, and remove what it wrote if it fails.

        Raises:
            StorageError: The input cannot be read, changed during the call, or an output cannot be uploaded.
            DataError: The function returned something that is not rows, or did not write an output.
            PlanError: An output would replace an input or the metadata.
        """
        draft = tempfile.mkdtemp(prefix=f"{job_input.number}-", dir=_ensure_folder(self.drafts))
        try:
            with self._local_file(job_input) as path:
                out = Out(draft, job_input.url if job_input.path is not None else job_input.key)
                rows = to_rows(call(path, out))
                outputs = tuple(out.written())
            if job_input.path is not None and take_fingerprint(job_input, self.storage) != before:
                raise StorageError("the input changed while it was being processed", job_input.key)
            self._check_names(outputs)
            if self.remote is not None:
                self._upload(draft, outputs)
                shutil.rmtree(draft, ignore_errors=True)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return Outcome(job_input.key, before, tries, outputs, None if self.remote else draft, encode_rows(rows))

    @contextmanager
    def _local_file(self, job_input: Input) -> Iterator[Path]:
        """Provide the input as a local file; a remote one is downloaded under its own name."""
        if (path := job_input.path) is not None:
            if os.path.isdir(path):
                raise StorageError("the input is a folder, not a file", job_input.key)
            yield Path(path)
            return
        with tempfile.TemporaryDirectory(prefix="input-", dir=_ensure_folder(self.scratch)) as folder:
            name = job_input.url.partition("?")[0].rpartition("/")[2] if "://" in job_input.url else ""
            downloaded = Path(folder, name if name not in ("", ".", "..") else "input")
            with downloaded.open("wb") as file:
                for chunk in open_storage(job_input.url, self.storage).stream(job_input.url):
                    file.write(chunk)
            yield downloaded

    def _check_names(self, outputs: tuple[tuple[str, int], ...]) -> None:
        protected = dict(self.protected)
        for name, _ in outputs:
            if name in protected:
                raise PlanError(f"the output {name!r} would replace {protected[name]}; choose another name or folder")

    def _upload(self, draft: str, outputs: tuple[tuple[str, int], ...]) -> None:
        """Upload all outputs, one at a time."""
        assert self.remote is not None
        storage = open_storage(self.remote, self.storage)
        for name, _ in outputs:
            put_file(storage, f"{self.remote}/{name}", os.path.join(draft, name))


def _ensure_folder(folder: str) -> str:
    os.makedirs(folder, exist_ok=True)
    return folder


def _positional_parameters(fn: Callable[..., Any]) -> int:
    """Return how many positional arguments a function takes; 2 if that is not known or any number is allowed."""
    try:
        parameters = signature(fn).parameters.values()
    except (TypeError, ValueError):
        return 2
    if any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters):
        return 2
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in positional for parameter in parameters)


def check_function(fn: Any) -> None:
    """Check that ``fn`` can be called with (path, out) or with a path alone.

    Raises:
        PlanError: ``fn`` cannot be called, or takes other arguments.
    """
    if not callable(fn):
        raise PlanError(f"process needs a function of (path, out), not {fn!r}")
    if isinstance(fn, type) and not any("__call__" in vars(base) for base in fn.__mro__):
        raise PlanError(f"{fn.__name__} is a class without __call__(self, path, out)")
    call = fn.__call__ if isinstance(fn, type) else fn
    try:
        call_signature = signature(call)
    except (TypeError, ValueError):
        return
    bound = ("self",) if isinstance(fn, type) else ()
    keywords = {"device": None} if takes_parameter(call, "device") else {}
    for args in (("path", "out"), ("path",)):
        try:
            call_signature.bind(*bound, *args, **keywords)
        except TypeError:
            continue
        return
    raise PlanError(f"{name_of(fn)}{call_signature} cannot be called with (path, out) or with (path)")


def _one_line(exc: BaseException) -> str:
    if isinstance(exc, PenstockError):
        return str(exc)
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text[:_MAX_ERROR_LENGTH]}" if text else type(exc).__name__


def _user_traceback(exc: BaseException) -> str:
    """Return the traceback from the user's function on, without frames of this package, shortened in the middle."""
    frame = exc.__traceback__
    while (
        frame is not None and frame.tb_next is not None and frame.tb_frame.f_code.co_filename.startswith(_THIS_FOLDER)
    ):
        frame = frame.tb_next
    text = "".join(traceback.format_exception(type(exc), exc, frame))
    if len(text) <= _MAX_TRACEBACK_LENGTH:
        return text
    half = _MAX_TRACEBACK_LENGTH // 2
    return f"{text[:half]}\n...\n{text[-half:]}"
