"""The errors Penstock raises.

    PenstockError
    |-- PlanError(ValueError)      an argument is invalid, or stages cannot be combined
    |-- DataError(ValueError)      a shard or sample is damaged, refused or not of the expected type
    |-- StageError(RuntimeError)   a user's function failed on a sample
    |-- StorageError(OSError)      bytes could not be found, read or written
    |-- StateError(ValueError)     a saved state cannot be restored into this dataset
    |-- MissingExtra(ImportError)  an optional dependency is not installed
    `-- EngineError(RuntimeError)  an engine cannot run the plan, or failed while running it

The facts are in ``args`` and ``__str__`` formats them, so every error can be pickled and keeps its attributes.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
import unicodedata
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OTHERS = (_PACKAGE, os.path.dirname(os.__file__) + os.sep, "<frozen", "<string>")


class PenstockError(Exception):
    """The base class of all errors that Penstock raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return the traceback that a notebook shows: the user's own frames, and one sentence.

        The frames of the exception that a user's function raised come first. ``traceback`` and tools other than
        IPython show all frames.
        """
        chain: list[BaseException] = [self]
        while (cause := chain[-1].__cause__) is not None and cause not in chain:
            chain.append(cause)
        shown: dict[str, None] = {}  # a frame may be part of several tracebacks of the chain
        for exc in (*reversed(chain[1:]), self):
            for frame in traceback.extract_tb(exc.__traceback__):
                if _is_users(frame.filename):
                    where = "" if frame.filename.startswith("<") else f", line {frame.lineno}"
                    shown[f"{frame.filename}{where}, in {frame.name}\n    {frame.line}"] = None
        return [*(line for entry in shown for line in entry.split("\n")), f"{type(self).__name__}: {self}"]


class PlanError(PenstockError, ValueError):
    """An argument is invalid, or stages cannot be combined; raised where the plan is written."""


class StateError(PenstockError, ValueError):
    """A saved state is damaged, incomplete, or belongs to another dataset or plan."""


class EngineError(PenstockError, RuntimeError):
    """An engine lacks what the plan requests, failed, or was closed while it was being read."""


class DataError(PenstockError, ValueError):
    """A shard or sample is damaged, refused or not of the expected type.

    Attributes:
        problem: What is wrong.
        shard: The shard, or None if the problem is not in a shard.
        key: The key of the sample, or None if the problem is not in one sample.
    """

    def __init__(self, problem: str, shard: str | None = None, key: str | None = None) -> None:
        super().__init__(problem, shard, key)
        self.problem, self.shard, self.key = problem, shard, key

    def __str__(self) -> str:
        return _located(self.problem, shard=self.shard, key=self.key)


class StageError(PenstockError, RuntimeError):
    """A stage failed on a sample; the exception that the user's function raised is the ``__cause__``.

    Attributes:
        problem: The type and text of the failure.
        stage: The stage, as it describes itself.
        key: The key of the sample.
        shard: The shard of the sample.
    """

    def __init__(
        self, problem: str, stage: str | None = None, key: str | None = None, shard: str | None = None
    ) -> None:
        super().__init__(problem, stage, key, shard)
        self.problem, self.stage, self.key, self.shard = problem, stage, key, shard

    def __str__(self) -> str:
        return _located(self.problem, stage=self.stage, shard=self.shard, key=self.key)


def user_frames(error: BaseException) -> TracebackType | None:
    """Return the part of the traceback of a failure's cause that begins in the user's function; None without one."""
    cause = error.__cause__
    trace = cause.__traceback__ if isinstance(error, StageError) and cause is not None else None
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    return trace


def short_traceback(error: StageError) -> StageError:
    """Return the error with a traceback of only the user's frames; its ``__cause__`` keeps the complete traceback."""
    return error.with_traceback(user_frames(error))


def shows_user_frames(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a method that runs user functions raise their failures with the user's frames and one of its own."""

    @functools.wraps(method)
    def call(*args: _P.args, **options: _P.kwargs) -> _T:
        try:
            return method(*args, **options)
        except StageError as error:
            raise short_traceback(error) from error.__cause__

    return call


class StorageError(PenstockError, OSError):
    """Bytes could not be found, read or written.

    Attributes:
        problem: What is wrong.
        url: The file or object, without credentials.
    """

    def __init__(self, problem: str, url: str | None = None) -> None:
        super().__init__(problem, url)
        self.problem, self.url = problem, url

    def __str__(self) -> str:
        return _located(self.problem, url=self.url)


class MissingExtra(PenstockError, ImportError):
    """A feature needs a package that is not installed.

    Attributes:
        feature: The feature that needs the package.
        extra: The Penstock extra that installs the package.
    """

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(feature, extra)
        self.feature, self.extra = feature, extra

    def __str__(self) -> str:
        return f"a package for {self.feature} is not installed: pip install 'penstock[{self.extra}]'"


def import_extra(module: str, feature: str, extra: str) -> Any:
    """Import a module of an optional package, which ``feature`` needs and ``extra`` installs.

    Raises:
        MissingExtra: The package is not installed.
    """
    try:
        __import__(module)  # faster than import_module, which counts where this is called for every sample
    except ImportError as error:
        raise MissingExtra(feature, extra) from error
    return sys.modules[module]


def _is_users(path: str) -> bool:
    """Return whether a file is the user's: neither this library nor an installed package."""
    return not path.startswith(_OTHERS) and f"{os.sep}site-packages{os.sep}" not in path


def _located(problem: str, **places: str | None) -> str:
    """Append the places that are not None: ``bad header (shard: a.tar, key: 0001)``."""
    known = ", ".join(f"{name}: {value}" for name, value in places.items() if value is not None)
    return printable(f"{problem} ({known})" if known else problem)


def printable(text: str) -> str:
    """Return text with its control characters escaped: names in a shard must not move the cursor of a terminal.

    >>> printable("a\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter in "\n\t" or not unicodedata.category(letter).startswith("C") else ascii(letter)[1:-1]
        for letter in text
    )


def message_of(exc: BaseException) -> str:
    """Return the type and text of an exception, even if computing its text fails."""
    try:
        return f"{type(exc).__name__}: {exc}"
    except Exception as failure:
        return f"{type(exc).__name__} (its text cannot be shown: {type(failure).__name__})"


def loading_error(name: str, exc: Exception) -> PlanError:
    """Return the error for a module of the user that cannot be loaded: one line, with the line that failed."""
    frames = [one for one in traceback.extract_tb(exc.__traceback__) if not one.filename.startswith(_OTHERS)]
    shown = frames and not isinstance(exc, SyntaxError)  # which names the line itself
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if shown else ""
    return PlanError(f"{name} failed: {' '.join(message_of(exc).split())}{where}")
