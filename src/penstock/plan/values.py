"""Small values of a plan: scopes, resources, fields, rank cuts, error policy, engine options; and argument checks."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from enum import Enum
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from penstock.errors import PlanError, shows_user_frames

P = ParamSpec("P")
T = TypeVar("T")
Workers = int | tuple[int, int] | None
WorkerKind = Literal["threads", "processes"]
CutKind = Literal["range", "step"]
Uneven = Literal["keep", "drop", "pad"]


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Scope(Enum):
    """How much of the stream a stage must see at once."""

    EACH = "each"  # one item at a time, on any worker
    GROUP = "group"  # groups of consecutive items, at the consumer; its buffer is empty between groups
    ALL = "all"  # the whole stream, in a world of 1


class Recut(Enum):
    """What happens to a stage when a state is restored under another number of ranks."""

    FREE = "free"  # items are independent, so any rank can continue with any of them
    WINDOW = "window"  # a group that was delivered in part is replayed by one rank
    REGROUP = "regroup"  # each rank forms its groups anew
    NEVER = "never"  # the stage's progress belongs to one stream


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a stage requests; neighbouring stages with equal resources share one pool.

    Raises:
        PlanError: A value is out of range.
    """

    workers: Workers = None
    on: WorkerKind = "threads"
    cpus: float | None = None
    gpus: float = 0
    retries: int = 0
    timeout_s: float | None = None
    memory: float | str | None = None  # bytes per worker

    def pooled(self) -> Resources:
        """Return the resources of the stage's pool: all but the retries, which the stage itself performs."""
        return replace(self, retries=0)

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(WorkerKind))
        for name in ("cpus", "gpus", "timeout_s"):
            object.__setattr__(self, name, _plain_number(getattr(self, name)))
        given = self.workers
        workers = tuple(map(_plain_number, given)) if isinstance(given, tuple) else _plain_number(given)
        object.__setattr__(self, "workers", workers)
        workers = 1 if workers is None else workers
        low, high = workers if isinstance(workers, tuple) and len(workers) == 2 else (workers, workers)
        if not (type(low) is int and type(high) is int and 1 <= low <= high):
            raise PlanError(f"workers={self.workers!r}: expected a whole number of at least 1, or (min, max)")
        check_count("retries", self.retries)
        if not ((self.gpus == 0 or _is_positive(self.gpus)) and (self.cpus is None or _is_positive(self.cpus))):
            raise PlanError(
                f"cpus={self.cpus!r}, gpus={self.gpus!r}: cpus must be above 0 and gpus must not be negative"
            )
        if self.timeout_s is not None:
            check_seconds("timeout_s", self.timeout_s)
        if self.memory is not None:
            object.__setattr__(self, "memory", size_in_bytes("memory", self.memory))


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a sample that the stages need; other fields are never read from the shard."""

    only: frozenset[str] | None = None  # None: every field
    excluded: frozenset[str] = frozenset()
    meta: bool = True  # include the fields named __like_this__
    where: Any = None  # a Condition: samples that do not meet it need only be counted, not read
    required: frozenset[str] = frozenset()  # a sample without these fails before ``where`` decides

    def wants(self, name: str) -> bool:
        """Return whether the field ``name`` is requested."""
        if self.only is not None and name in self.only:
            return True
        if name.startswith("__"):
            return self.meta and name not in self.excluded
        return self.only is None and name not in self.excluded

    def with_(self, names: Iterable[str]) -> Fields:
        """Return these fields with ``names`` added."""
        names = frozenset(names)
        only = None if self.only is None else self.only | names
        return Fields(only, self.excluded - names, self.meta)

    def without(self, names: Iterable[str]) -> Fields:
        """Return these fields with ``names`` removed."""
        names = frozenset(names)
        only = None if self.only is None else self.only - names
        return Fields(only, self.excluded | names, self.meta)


EVERYTHING = Fields()


@dataclass(frozen=True, slots=True)
class SharedStages:
    """What the parts of one ``split`` have in common: on a cluster, one set of workers runs these stages for all.

    Attributes:
        token: A name that no other split has.
        count: How many stages the dataset had before it was split.
    """

    token: str
    count: int


@dataclass(frozen=True, slots=True)
class Cut:
    """How the order is cut, and for which rank.

    Raises:
        PlanError: A value is out of range.
    """

    rank: int
    world: int
    kind: CutKind = "range"
    uneven: Uneven = "keep"
    in_loader_worker: bool = field(default=False, compare=False)  # created in a DataLoader worker, for that worker
    shared: SharedStages | None = field(default=None, compare=False, repr=False)  # what parts of one split share

    def __post_init__(self) -> None:
        check_choice("cut", self.kind, get_args(CutKind))
        check_choice("uneven", self.uneven, get_args(Uneven))
        object.__setattr__(self, "world", check_count("world", self.world, least=1))
        object.__setattr__(self, "rank", check_count("rank", self.rank))
        if self.rank >= self.world:
            raise PlanError(f"rank={self.rank} is out of range for world={self.world}: ranks run from 0 to world - 1")


@dataclass(frozen=True, slots=True)
class OnError:
    """What happens to a sample that fails: the run stops, or the sample is skipped and counted.

    Raises:
        PlanError: The action is unknown, the limit is negative, or a quarantine is given without "skip".
    """

    action: Literal["raise", "skip"] = "raise"
    limit: float | None = None  # the maximum number of skips per rank, or their share of the samples if below 1
    quarantine: str | None = None  # the file or folder that lists the skipped samples

    def __post_init__(self) -> None:
        check_choice("on_error", self.action, ("raise", "skip"))
        object.__setattr__(self, "limit", _plain_number(self.limit))
        if self.limit is not None and not (_is_number(self.limit) and self.limit >= 0):
            raise PlanError(f"limit={self.limit!r}: expected a number of samples, or a share below 1")
        if self.quarantine is not None and self.action != "skip":
            raise PlanError(
                f"quarantine={self.quarantine!r} lists what is skipped: use it with on_error('skip', quarantine=...)"
            )


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The engine that runs the plan, with its options."""

    name: str = "local"
    options: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of one option."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True, slots=True, eq=False)
class ByObject:
    """A wrapper for a value that plans compare by identity: a list of items, keyword arguments."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


_NEAR = 0.6  # the ratio of equal characters from which two names are taken for one
_MAX_NAMES = 20  # fields listed in a message
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def size_in_bytes(name: str, value: float | str) -> int:
    """Parse a size: a number of bytes, or text such as ``"500MB"`` (powers of 1000).

    Raises:
        PlanError: ``value`` is not a size; the message names the argument ``name``.

    >>> size_in_bytes("max_bytes", "1.5GB")
    1500000000
    """
    if _is_positive(value := _plain_number(value)):
        return int(value)
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?b?)\s*", str(value).lower())
    unit = match and match[2] if match and match[2] in _UNITS else None
    if match is None or unit is None or match[1].count(".") > 1 or float(match[1]) <= 0:
        raise PlanError(f'{name}={value!r}: expected a number of bytes, or text such as "500MB"')
    return int(float(match[1]) * _UNITS[unit])


def _plain_number(value: Any) -> Any:
    """Return a number of another library, such as numpy, as one of Python; anything else unchanged."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    """Return whether ``value`` is a finite number above 0."""
    return _is_number(value) and 0 < value < float("inf")


def check_count(name: str, value: Any, least: int = 0) -> int:
    """Return ``value`` as an ``int`` (numpy integers are accepted) if it is a whole number of at least ``least``.

    Raises:
        PlanError: ``value`` is not such a number; the message names the argument ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise PlanError(f"{name}={value!r}: expected a whole number of at least {least}")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """Return ``value`` if it is a boolean: any other value would count as true or false by chance.

    Raises:
        PlanError: ``value`` is not a boolean; the message names the argument ``name``.
    """
    if not isinstance(value, bool):
        raise PlanError(f"{name}={value!r}: expected True or False")
    return value


def check_seconds(name: str, value: Any) -> None:
    """Check that ``value`` is a finite number of seconds above 0.

    Raises:
        PlanError: ``value`` is not such a number; the message names the argument ``name``.
    """
    if not _is_positive(value):
        raise PlanError(f"{name}={value!r}: expected a number of seconds above 0")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Check that ``value`` is one of ``choices``.

    Raises:
        PlanError: ``value`` is not one of them; the message names the argument ``name``.
    """
    if value not in (choices := tuple(choices)):
        raise PlanError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def takes_mode(fn: Callable[P, T]) -> Callable[P, T]:
    """Make a function that writes refuse ``resume=``, ``append=`` and ``replace=``, with what to write instead."""
    run = shows_user_frames(fn)

    @functools.wraps(fn)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if wrong := sorted({"resume", "append", "replace"} & options.keys()):
            raise TypeError(
                f"{fn.__name__}() has no argument {wrong[0]!r}: an interrupted run continues by itself, mode='append' "
                "adds to what the target holds, and mode='replace' replaces it"
            )
        return run(*args, **options)

    return call


def no_field(wanted: Iterable[str], known: Iterable[str]) -> str:
    """Return the words about a field that does not exist: the fields there are, and the name nearest to it.

    >>> no_field(["jgp"], ["jpg", "cls"])
    "no field 'jgp'; the fields are cls, jpg: did you mean jpg?"
    """
    wanted, known = list(wanted), sorted({name for name in known if not name.startswith("__")})
    text = f"no field {' or '.join(map(repr, wanted))}"
    if not known:
        return text
    ratio, near = max((SequenceMatcher(None, name, other).ratio(), other) for name in wanted for other in known)
    more = f" and {len(known) - _MAX_NAMES} more" if len(known) > _MAX_NAMES else ""
    hint = f": did you mean {near}?" if ratio >= _NEAR else ""
    hint = ": not every sample has all of them" if near in wanted else hint
    return f"{text}; the fields are {', '.join(known[:_MAX_NAMES])}{more}{hint}"


def check_names(method: str, names: tuple[Any, ...]) -> None:
    """Check that a method got field names.

    Raises:
        PlanError: There are none, or one is not text; the message says what to write instead of a list of names.
    """
    if names and all(isinstance(name, str) and name for name in names):
        return
    given = ", ".join(map(repr, names)) or "nothing"
    listed = names[0] if len(names) == 1 and isinstance(names[0], list | tuple) else ()
    as_arguments = f": write {method}({', '.join(map(repr, listed))})" if listed else ""
    raise PlanError(f"{method} needs field names, not {given}{as_arguments}")


def is_callable_class(fn: Any) -> bool:
    """Return whether ``fn`` is a class whose instances can be called; ``dict`` and ``str`` are not."""
    return isinstance(fn, type) and any("__call__" in base.__dict__ for base in fn.__mro__)


def check_callable(name: str, value: Any, *, constructs: bool = True) -> None:
    """Check that ``value`` can be called.

    Raises:
        PlanError: ``value`` cannot be called, or is a class whose instances can be, where none are constructed; the
            message names the argument ``name``.
    """
    if not callable(value):
        needed = "a function, or a condition such as ps.col('cls') == 3" if name == "filter" else "a function"
        raise PlanError(f"{name} needs {needed}, not {value!r}")
    if not constructs and is_callable_class(value):
        raise PlanError(f"{name} needs an instance of {name_of(value)}: write {name_of(value)}(...)")
    calls = (value, value.__call__ if isinstance(value, type) else type(value).__call__)
    if any(map(inspect.iscoroutinefunction, calls)) or any(map(inspect.isasyncgenfunction, calls)):
        raise PlanError(f"{name} needs a plain function, and {name_of(value)} is async: call asyncio.run in one")


def kind_of(value: Any) -> str:
    """Return the type of a value for messages.

    >>> kind_of(3), kind_of("a"), kind_of(None)
    ('an int', 'a str', 'None')
    """
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[0].lower() in 'aeio' else 'a'} {kind}"


def takes_parameter(fn: Callable[..., Any], parameter: str) -> bool:
    """Return whether ``fn`` has a parameter of that name, such as ``rng`` or ``device``."""
    try:
        return parameter in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return False


def name_of(fn: Any) -> str:
    """Return the name of a function for ``repr`` and messages."""
    inner = getattr(fn, "func", None)  # functools.partial
    if inner is not None and not hasattr(fn, "__name__"):
        return f"partial({name_of(inner)})"
    return str(getattr(fn, "__name__", None) or type(fn).__name__)
