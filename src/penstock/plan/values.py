"""The small values a plan is made of: scopes, resources, wanted fields, cuts, error policy, engine options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from numbers import Integral
from typing import Any, Literal, get_args

from penstock.errors import PlanError

Workers = int | tuple[int, int] | None
WorkerKind = Literal["threads", "processes"]
CutKind = Literal["range", "step"]
Uneven = Literal["keep", "drop", "pad"]


class Scope(Enum):
    """How much of the stream a stage must see at once."""

    EACH = "each"  # one item at a time, on any worker
    GROUP = "group"  # so many consecutive items, at the consumer, its buffer empty between groups
    ALL = "all"  # the whole stream, in a world of one


@dataclass(frozen=True, slots=True)
class Resources:
    """What a stage asks of the machine; equal neighbours are fused into one pool.

    Raises:
        PlanError: a number that cannot be meant.
    """

    workers: Workers = None
    on: WorkerKind = "threads"
    cpus: float | None = None
    gpus: float = 0
    retries: int = 0
    timeout_s: float | None = None
    memory: float | str | None = None  # bytes that one worker needs

    def pooled(self) -> Resources:
        """What a pool must have: retries are the stage's own affair."""
        return replace(self, retries=0)

    def __post_init__(self) -> None:
        check_choice("on", self.on, get_args(WorkerKind))
        asked = 1 if self.workers is None else self.workers
        low, high = asked if isinstance(asked, tuple) and len(asked) == 2 else (asked, asked)
        if not (type(low) is int and type(high) is int and 1 <= low <= high):
            raise PlanError(f"workers={self.workers!r}: give a number from 1, or (min, max)")
        check_count("retries", self.retries)
        if not (_is_number(self.gpus) and self.gpus >= 0 and (self.cpus is None or _positive(self.cpus))):
            raise PlanError(f"cpus={self.cpus!r}, gpus={self.gpus!r}: give positive numbers")
        if self.timeout_s is not None and not _positive(self.timeout_s):
            raise PlanError(f"timeout_s={self.timeout_s!r}: give seconds above 0")
        if self.memory is not None:
            object.__setattr__(self, "memory", size_in_bytes("memory", self.memory))


@dataclass(frozen=True, slots=True)
class Fields:
    """Which fields of a sample anybody asks for; the others are never cut out of the shard."""

    only: frozenset[str] | None = None  # None: every field
    excluded: frozenset[str] = frozenset()
    meta: bool = True  # the fields named __like_this__
    where: Any = None  # a Condition: samples that do not fulfil it need not be read, only counted

    def wants(self, name: str) -> bool:
        """Say whether ``name`` is asked for."""
        if self.only is not None and name in self.only:
            return True
        if name.startswith("__"):
            return self.meta and name not in self.excluded
        return self.only is None and name not in self.excluded

    def with_(self, names: Iterable[str]) -> Fields:
        """Ask for ``names`` as well."""
        names = frozenset(names)
        only = None if self.only is None else self.only | names
        return Fields(only, self.excluded - names, self.meta)

    def without(self, names: Iterable[str]) -> Fields:
        """Ask for ``names`` no more."""
        names = frozenset(names)
        only = None if self.only is None else self.only - names
        return Fields(only, self.excluded | names, self.meta)


EVERYTHING = Fields()


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's share of the order."""

    rank: int
    world: int
    how: CutKind = "range"
    uneven: Uneven = "keep"
    within: bool = field(default=False, compare=False)  # made in a DataLoader's worker: for that worker

    def __post_init__(self) -> None:
        check_choice("cut", self.how, get_args(CutKind))
        check_choice("uneven", self.uneven, get_args(Uneven))
        object.__setattr__(self, "world", check_count("world", self.world, least=1))
        object.__setattr__(self, "rank", check_count("rank", self.rank))
        if self.rank >= self.world:
            raise PlanError(f"rank={self.rank} is not below world={self.world}")


@dataclass(frozen=True, slots=True)
class OnError:
    """What happens to a sample that fails: the run stops, or the sample is skipped and counted."""

    action: Literal["raise", "skip"] = "raise"
    limit: float | None = None  # skips a rank may have: a number, or a share of what it has seen
    quarantine: str | None = None  # the file that lists them

    def __post_init__(self) -> None:
        check_choice("on_error", self.action, ("raise", "skip"))
        if self.limit is not None and not (_is_number(self.limit) and self.limit >= 0):
            raise PlanError(f"limit={self.limit!r}: give a number of samples, or a share below 1")
        if self.quarantine is not None and self.action != "skip":
            raise PlanError(
                f"quarantine={self.quarantine!r} lists what is skipped: use on_error('skip', quarantine=...)"
            )


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which engine runs the plan, and what it may use."""

    name: str = "local"
    options: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """Return one option."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True, slots=True, eq=False)
class ByObject:
    """Holds a value that a plan compares by identity: a list of items, keyword arguments."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def size_in_bytes(name: str, value: float | str) -> int:
    """Read a size: a number of bytes, or text such as ``"500MB"`` (powers of 1000).

    Raises:
        PlanError: it is neither.

    >>> size_in_bytes("max_bytes", "1.5GB")
    1500000000
    """
    if _positive(value):
        return int(value)
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?b?)\s*", str(value).lower())
    unit = match and match[2] if match and match[2] in _UNITS else None
    if match is None or unit is None or match[1].count(".") > 1 or float(match[1]) <= 0:
        raise PlanError(f'{name}={value!r}: give a number of bytes, or a text like "500MB"')
    return int(float(match[1]) * _UNITS[unit])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _positive(value: Any) -> bool:
    """Whether it is a number above 0, and not without bound."""
    return _is_number(value) and 0 < value < float("inf")


def check_count(name: str, value: Any, least: int = 0) -> int:
    """Require a whole number from ``least``, and give it as one of Python's.

    Raises:
        PlanError: it is not one.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise PlanError(f"{name}={value!r}: give a whole number from {least}")
    return int(value)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Require one of ``choices``.

    Raises:
        PlanError: it is not one.
    """
    if value not in (choices := tuple(choices)):
        raise PlanError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def check_callable(name: str, value: Any) -> None:
    """Require a function.

    Raises:
        PlanError: it cannot be called.
    """
    if not callable(value):
        raise PlanError(f"{name} needs a function, not {value!r}")


def takes_parameter(fn: Callable[..., Any], parameter: str) -> bool:
    """Say whether ``fn`` has a parameter of that name (what asks for ``rng`` or ``device`` gets it)."""
    try:
        return parameter in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return False


def name_of(fn: Any) -> str:
    """Name a function for ``repr`` and messages."""
    inner = getattr(fn, "func", None)  # functools.partial
    if inner is not None and not hasattr(fn, "__name__"):
        return f"partial({name_of(inner)})"
    return str(getattr(fn, "__name__", None) or type(fn).__name__)
