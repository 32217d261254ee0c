"""A Python function for every sample, named on the command line as ``module:function``."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from penstock.codecs.registry import encode
from penstock.dataset import read_tar
from penstock.errors import DataError, PlanError
from penstock.formats.tar.archive import EncodedSamples, encode_sample


def find(name: str) -> Callable[..., Any]:
    """Import a function; modules of the current folder are found too.

    Raises:
        PlanError: There is no such function.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise PlanError(f"{name!r} names no function: write it like module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as exc:
        raise PlanError(f"there is no module {exc.name!r}, which {name!r} needs") from exc
    except AttributeError as exc:
        raise PlanError(f"there is no such function: {exc}") from exc
    if not callable(found):
        raise PlanError(f"{name!r} is no function")
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Each:
    """Calls the function on a sample: it gives a sample, several, or None for none.

    Attributes:
        name: The function.
        keep: A sample it fails on stays as it was.
    """

    name: str
    keep: bool = False

    def __call__(self, sample: dict[str, Any]) -> list[dict[str, Any]]:
        """Give the samples that come of one, encoded."""
        try:
            given = find(self.name)(dict(sample))
            return [_encoded(one, sample) for one in _several(given, self.name)]
        except Exception:
            if not self.keep:
                raise
            sys.stderr.write(f"penstock: kept as it was: {sample['__key__']!r}\n{traceback.format_exc()}")
            return [_encoded(sample, sample)]


def _several(given: Any, name: str) -> Iterable[Any]:
    if given is None:
        return ()
    if isinstance(given, dict):
        return (given,)
    if isinstance(given, list | tuple | Iterator):
        return given
    raise TypeError(f"{name} gave a {type(given).__name__}: give a sample (a dict), several, or None")


def _encoded(given: Any, sample: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise TypeError(f"a sample is a dict of fields, not {type(given).__name__}")
    fields = {name: encode(name, value) for name, value in given.items() if not name.startswith("__")}
    return {"__key__": given.get("__key__", sample["__key__"]), "__url__": sample["__url__"], **fields}


def call_on_each(
    urls: list[str],
    name: str,
    *,
    parallel: int,
    ordered: bool,
    decode: str | None,
    on_error: str,
    timeout_s: float | None,
) -> Iterator[EncodedSamples]:
    """Call a function on every sample of shards, in ``parallel`` processes, and give what comes of them for a writer.

    Raises:
        StageError: The function failed, unless such samples are skipped or kept.
        DataError: A sample cannot be read, or what came of it cannot be stored.
    """
    find(name)
    samples = read_tar(urls[0] if len(urls) == 1 else urls)
    if decode is not None:
        samples = samples.decode(decode)
    on = "processes" if parallel > 1 or timeout_s is not None else "threads"
    samples = samples.flat_map(Each(name, on_error == "keep"), workers=parallel, on=on, timeout_s=timeout_s)
    if on_error == "skip":
        samples = samples.on_error("skip")
    if not ordered:
        samples = samples.on("local", ordered=False)
    for one in samples:
        fields = {field: value for field, value in one.items() if not field.startswith("__")}
        if fields:
            try:
                yield encode_sample(one["__key__"], fields)
            except DataError as exc:
                raise DataError(exc.problem, one["__url__"], exc.key) from exc
