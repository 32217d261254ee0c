"""What a worker does with one input: the function called on a private copy of the world, as often as it takes."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from penstock.errors import DataError, MissingExtra, PenstockError, PlanError, StageError, StorageError
from penstock.jobs.inputs import Input, Sign, sign
from penstock.jobs.job_rows import rows_of, to_json
from penstock.jobs.output import Out
from penstock.plan import Context, Map, Place, name_of, takes_parameter
from penstock.storage import NotFound, Storage, open_storage

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})  # no input's fault, and the next one will not fare better
_HOPELESS = (PlanError, DataError, NotFound)  # the same again, however often it is tried
_SHORT = 300  # letters of an error in a line
_LONGEST = 20_000  # letters of a traceback that is kept
_PIECE = 1 << 20
_HERE = os.path.dirname(__file__)


@dataclass(frozen=True, slots=True)
class Done:
    """What became of an input.

    Attributes:
        input: Which.
        sign: The content that was worked on; ``None``: it could not be looked at.
        tries: How often the function was called.
        outputs: The names and sizes of what it wrote.
        draft: The folder where that lies, if it is not published yet.
        rows: What it returned, as JSON.
        error: What went wrong, in a line; ``None``: nothing.
        trace: The same at length.
        full: Nothing can be written any more.
    """

    input: Input
    sign: Sign | None
    tries: int
    outputs: tuple[tuple[str, int], ...] = ()
    draft: str | None = None
    rows: str = "[]"
    error: str | None = None
    trace: str = ""
    full: bool = False


@dataclass(frozen=True)
class Work(Map):
    """The stage of a job: an ``Input`` in, a ``Done`` out. What the function raises is an answer like any other.

    Attributes:
        fn: The user's function, or a class that is made once a worker.
        drafts: The folder for what is being written.
        scratch: The folder for inputs that are fetched.
        retries: How often a call is repeated.
        remote: Where outputs go, if not to a disk.
        taken: Names in the folder of outputs that are not to be replaced, and what they are.
        cwd: The folder that relative paths start from.
        storage: How to reach what is remote.
    """

    fn: Callable[..., Any]
    drafts: str
    scratch: str
    retries: int = 0
    remote: str | None = None
    taken: tuple[tuple[str, str], ...] = ()
    cwd: str = ""
    storage: Storage | None = None

    @property
    def name(self) -> str:
        return "process"

    def describe(self) -> str:
        return f"process({name_of(self.fn)})"

    def failure(self, exc: Exception, place: Place) -> Exception:
        """The end of a worker, said in a line; there is no traceback of that."""
        error = StageError(str(exc)[:_SHORT])  # Ray says much
        error.__cause__ = exc
        return error

    def function(self, ctx: Context) -> Callable[[Input], Done]:
        """What to call on an input; prepared once a worker."""
        if "call" not in ctx.local:
            if self.cwd and os.getcwd() != self.cwd:  # a worker that was started elsewhere
                os.chdir(self.cwd)
            ctx.local["call"] = self.caller(ctx.device)
        call = ctx.local["call"]
        return lambda one: self.tried(one, call)

    def caller(self, device: Any = None) -> Callable[[Path, Out], Any]:
        """The user's function as it is called; a class is constructed."""
        fn = self.fn
        if isinstance(fn, type):
            fn = fn(device=device) if takes_parameter(fn, "device") else fn()
        elif takes_parameter(fn, "device"):
            plain = fn
            return lambda path, out: plain(path, out, device=device)
        return (lambda path, out: fn(path)) if _parameters(fn) == 1 else fn

    def tried(self, one: Input, call: Callable[[Path, Out], Any]) -> Done:
        """Call the function until it succeeds, or as often as it may be."""
        done = self._once(one, call, 1)
        while done.error is not None and not done.full and done.tries <= self.retries:
            if done.sign is None:
                break
            done = self._once(one, call, done.tries + 1)
        return done

    def _once(self, one: Input, call: Callable[[Path, Out], Any], tries: int) -> Done:
        seen: Sign | None = None
        try:
            seen = sign(one, self.storage)
            return self.called(one, call, seen, tries)
        except MissingExtra:
            raise
        except (Exception, SystemExit) as exc:
            full = isinstance(exc, OSError) and exc.errno in FULL
            tries = max(tries, self.retries + 1) if isinstance(exc, _HOPELESS) else tries
            return Done(one, seen, tries, error=brief(exc), trace=told(exc), full=full)

    def called(self, one: Input, call: Callable[[Path, Out], Any], seen: Sign, tries: int = 1) -> Done:
        """Call the function once; what it raises comes out, and nothing it wrote stays."""
        draft = tempfile.mkdtemp(prefix=f"{one.number}-", dir=_made(self.drafts))
        try:
            with self._at_hand(one) as path:
                out = Out(draft, one.url if one.path is not None else one.key)
                rows = rows_of(call(path, out))
                outputs = tuple(out.written())
            if one.path is not None and sign(one, self.storage) != seen:
                raise StorageError("it changed while it was being worked on", one.key)
            self._check_names(outputs)
            if self.remote is not None:
                self._upload(draft, outputs)
                shutil.rmtree(draft, ignore_errors=True)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return Done(one, seen, tries, outputs, None if self.remote else draft, to_json(rows))

    @contextmanager
    def _at_hand(self, one: Input) -> Iterator[Path]:
        """The input as a file of this machine, under its own name."""
        if (path := one.path) is not None:
            if os.path.isdir(path):
                raise StorageError("this is a folder", one.key)
            yield Path(path)
            return
        with tempfile.TemporaryDirectory(prefix="input-", dir=_made(self.scratch)) as folder:
            name = one.url.partition("?")[0].rpartition("/")[2] if "://" in one.url else ""
            fetched = Path(folder, name if name not in ("", ".", "..") else "input")
            with fetched.open("wb") as file:
                for piece in open_storage(one.url, self.storage).stream(one.url):
                    file.write(piece)
            yield fetched

    def _check_names(self, outputs: tuple[tuple[str, int], ...]) -> None:
        taken = dict(self.taken)
        for name, _ in outputs:
            if name in taken:
                raise PlanError(f"the output {name!r} would replace {taken[name]}; choose another name or folder")

    def _upload(self, draft: str, outputs: tuple[tuple[str, int], ...]) -> None:
        """Send all outputs, then make them visible one right after the other."""
        assert self.remote is not None
        storage = open_storage(self.remote, self.storage)
        with ExitStack() as stack:
            uploads = []
            for name, size in outputs:
                upload = stack.enter_context(storage.put(f"{self.remote}/{name}", size_hint=size))
                with open(os.path.join(draft, name), "rb") as file:
                    while piece := file.read(_PIECE):
                        upload.write(piece)
                uploads.append(upload)
            for upload in uploads:
                upload.commit()


def _made(folder: str) -> str:
    os.makedirs(folder, exist_ok=True)
    return folder


def _parameters(fn: Callable[..., Any]) -> int:
    """How many arguments a function takes by position; 2 where nobody can tell."""
    try:
        known = signature(fn).parameters.values()
    except (TypeError, ValueError):
        return 2
    if any(one.kind is Parameter.VAR_POSITIONAL for one in known):
        return 2
    return sum(one.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for one in known)


def check_function(fn: Any) -> None:
    """Require something that can be called with a path and ``out``, or with a path.

    Raises:
        PlanError: it is not that.
    """
    if not callable(fn):
        raise PlanError(f"process needs a function of (path, out), not {fn!r}")
    if isinstance(fn, type) and not any("__call__" in vars(one) for one in fn.__mro__):
        raise PlanError(f"{fn.__name__} is a class without __call__(self, path, out)")
    call = fn.__call__ if isinstance(fn, type) else fn
    try:
        shape = signature(call)
    except (TypeError, ValueError):
        return
    own = ("self",) if isinstance(fn, type) else ()
    known = {"device": None} if takes_parameter(call, "device") else {}
    for args in (("path", "out"), ("path",)):
        try:
            shape.bind(*own, *args, **known)
        except TypeError:
            continue
        return
    raise PlanError(f"{name_of(fn)}{shape} cannot be called with (path, out)")


def brief(exc: BaseException) -> str:
    """An error in a line."""
    if isinstance(exc, PenstockError):
        return str(exc)
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text[:_SHORT]}" if text else type(exc).__name__


def told(exc: BaseException) -> str:
    """An error at length: the traceback from the user's function on."""
    inner = exc.__traceback__
    while inner is not None and inner.tb_next is not None and inner.tb_frame.f_code.co_filename.startswith(_HERE):
        inner = inner.tb_next
    text = "".join(traceback.format_exception(type(exc), exc, inner))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}\n...\n{text[-_LONGEST // 2 :]}"
