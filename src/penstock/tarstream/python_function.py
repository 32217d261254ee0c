"""Call a Python function, named as ``module:function`` or ``file.py:function``, on every sample."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.codecs.registry import encode
from penstock.dataset import Dataset, read_tar
from penstock.dataset.programs import load_function
from penstock.errors import DataError
from penstock.formats.tar.archive import EncodedSamples, encode_sample
from penstock.plan.values import WorkerKind


@dataclass(frozen=True, slots=True)
class SampleFunction:
    """Calls a function on a sample and encodes what it returns: a sample, several, or None for no sample.

    It holds the name of the function, not the function, so that it can be pickled.

    Attributes:
        name: The function, as ``module:function`` or ``file.py:function``.
        keep_failed: Whether a sample on which the function fails is kept unchanged.
    """

    name: str
    keep_failed: bool = False

    def __call__(self, sample: dict[str, Any]) -> list[dict[str, Any]]:
        """Call the function on a sample and return the encoded results."""
        try:
            returned = load_function(self.name)(dict(sample))
            return [_encode(result, sample) for result in _as_samples(returned, self.name)]
        except Exception:
            if not self.keep_failed:
                raise
            sys.stderr.write(f"penstock: kept unchanged: {sample['__key__']!r}\n{traceback.format_exc()}")
            return [_encode(sample, sample)]


def _as_samples(returned: Any, name: str) -> Iterable[Any]:
    if returned is None:
        return ()
    if isinstance(returned, dict):
        return (returned,)
    if isinstance(returned, list | tuple | Iterator):
        return returned
    problem = f"{name} returned a value of type {type(returned).__name__}"
    raise TypeError(f"{problem}: return a sample (a dict), several samples, or None")


def _encode(result: Any, sample: dict[str, Any]) -> dict[str, Any]:
    """Encode a sample that a function returned; without a key, it gets the key of the original sample."""
    if not isinstance(result, dict):
        raise TypeError(f"a sample must be a dict of fields, not a value of type {type(result).__name__}")
    fields = {name: encode(name, value) for name, value in result.items() if not name.startswith("__")}
    return {"__key__": result.get("__key__", sample["__key__"]), "__url__": sample["__url__"], **fields}


def samples_of(
    urls: list[str], name: str, *, parallel: int, decode: str | None, on_error: str, timeout_s: float | None
) -> Dataset:
    """Return a dataset of what a function returns for the samples of shards, called in ``parallel`` processes.

    Raises:
        PlanError: There is no such function.
    """
    load_function(name)  # before workers start, so that a wrong name is one clear error
    samples = read_tar(urls[0] if len(urls) == 1 else urls)
    if decode is not None:
        samples = samples.decode(decode)
    on: WorkerKind = "processes" if parallel > 1 or timeout_s is not None else "threads"
    function = SampleFunction(name, keep_failed=on_error == "keep")
    samples = samples.flat_map(function, workers=parallel, on=on, timeout_s=timeout_s)
    return samples.on_error("skip") if on_error == "skip" else samples


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
    """Call a function on every sample of shards, in ``parallel`` processes, and yield the results for a tar writer.

    Raises:
        PlanError: There is no such function.
        StageError: The function failed, unless failed samples are skipped or kept.
        DataError: A sample cannot be read, or a result cannot be stored.
    """
    samples = samples_of(urls, name, parallel=parallel, decode=decode, on_error=on_error, timeout_s=timeout_s)
    if not ordered:
        samples = samples.on("local", ordered=False)
    for sample in samples:
        fields = {field: value for field, value in sample.items() if not field.startswith("__")}
        if fields:
            try:
                yield encode_sample(sample["__key__"], fields)
            except DataError as exc:
                raise DataError(exc.problem, sample["__url__"], exc.key) from exc
