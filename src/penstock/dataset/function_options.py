"""The arguments of the stages that call a function, under our names and under Ray Data's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypedDict

from penstock.errors import PlanError
from penstock.plan import ByObject, Resources
from penstock.plan.peer_names import check_arguments, unknown_argument
from penstock.plan.values import Workers


class ActorPool(Protocol):
    """What a stage uses of ``ray.data.ActorPoolStrategy``."""

    @property
    def min_size(self) -> int:
        """The smallest number of workers."""

    @property
    def max_size(self) -> float:
        """The largest number of workers; infinite if it was not given."""


class RayWords(TypedDict, total=False):
    """Ray Data's names for arguments of a stage that calls a function."""

    fn_constructor_args: Sequence[Any]
    fn_constructor_kwargs: Mapping[str, Any]
    concurrency: Workers
    compute: ActorPool
    num_cpus: float
    num_gpus: float


_OUR_NAMES = {
    "fn_constructor_args": "fn_args",
    "fn_constructor_kwargs": "fn_kwargs",
    "concurrency": "workers",
    "compute": "workers",
    "num_cpus": "cpus",
    "num_gpus": "gpus",
}
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Resources)}


def function_options(
    stage: str, words: Mapping[str, Any], fn_args: Sequence[Any], fn_kwargs: Mapping[str, Any] | None, *resources: Any
) -> dict[str, Any]:
    """Return the keyword arguments of a stage that calls a function.

    Args:
        stage: The name of the stage, for messages.
        words: Arguments under Ray Data's names.
        fn_args: Arguments of a class's constructor.
        fn_kwargs: Keyword arguments of a class's constructor.
        resources: The values of ``Resources``, in order.

    Raises:
        PlanError: An argument is unknown, out of range, or given under two names.
    """
    defaults = {**_DEFAULTS, "fn_args": (), "fn_kwargs": None}
    given = dict(zip(defaults, (*resources, fn_args, fn_kwargs), strict=True))
    for word, value in words.items():
        if word not in _OUR_NAMES:
            raise unknown_argument(stage, word, [*defaults], _OUR_NAMES)
        name = _OUR_NAMES[word]
        if given[name] != defaults[name]:
            raise PlanError(f"{stage}: {word} is Ray Data's name for {name}, which is given too; leave one of them out")
        given[name] = _pool_size(stage, value) if word == "compute" else value
    args, kwargs = given.pop("fn_args"), given.pop("fn_kwargs")
    return {
        "resources": Resources(**given),
        "args": ByObject(tuple(args)) if args else None,
        "kwargs": ByObject(dict(kwargs)) if kwargs else None,
    }


def resources_of(stage: str, unknown: Mapping[str, Any], *values: Any) -> Resources:
    """Return the resources of a stage from its arguments, given in the order of ``Resources``.

    Raises:
        PlanError: An argument is unknown or out of range.
    """
    check_arguments(stage, unknown, [*_DEFAULTS])
    return Resources(*values)


def _pool_size(stage: str, pool: Any) -> Workers:
    """Return the workers that an ``ActorPoolStrategy`` stands for."""
    low, high = getattr(pool, "min_size", None), getattr(pool, "max_size", None)
    if not isinstance(low, int) or not isinstance(high, int | float):
        raise PlanError(f"{stage}: compute={pool!r}: give ray.data.ActorPoolStrategy(...), or workers=")
    if high != float("inf"):
        return low, int(high)
    if low > 1:
        raise PlanError(f"{stage}: compute={pool!r} has no largest size: give max_size too, or workers=(min, max)")
    return None
