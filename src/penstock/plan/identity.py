"""The identity of a sample, as users, quarantine files and ``exclude`` name it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

from penstock.errors import PlanError
from penstock.plan.block import Skipped


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """The identity of a sample: the number of its source in the plan, its shard's name, and its index in the shard."""

    source: int
    shard: str
    index: int


def parse_identity(value: Any) -> Identity:
    """Return the identity of a sample, given as (source, shard, index) or as an entry of ``loader.skipped``.

    Raises:
        PlanError: ``value`` does not identify a sample.
    """
    if isinstance(value, Skipped):
        value = (value.place.leaf, value.place.name, value.place.number)
    match value:
        case Identity():
            return value
        case (int() as source, str() as shard, int() as index, *_) if min(source, index) >= 0:
            return Identity(source, shard, index)
    raise PlanError(
        f"exclude: {value!r:.80} does not identify a sample: expected (source, shard, index), or the path of a file"
    )


def exclusions(arguments: Iterable[Any]) -> tuple[str | Identity, ...]:
    """Normalise the arguments of ``exclude``: paths, identities, and lists of identities.

    Raises:
        PlanError: An argument is neither a path, an identity nor a list of identities.
    """
    out: list[str | Identity] = []
    for value in arguments:
        if isinstance(value, str | os.PathLike):
            out.append(os.fspath(value))
        elif isinstance(value, Iterable) and not isinstance(value, tuple | bytes):
            out += map(parse_identity, value)
        else:
            out.append(parse_identity(value))
    return tuple(out)


def digest(samples: Iterable[Identity]) -> str:
    """Return a short hash of a set of samples, independent of their order."""
    text = json.dumps([astuple(identity) for identity in sorted(set(samples))])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
