"""Collating samples into batches, and splitting batches into samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Number
from typing import Any

import numpy as np

from penstock.errors import DataError
from penstock.plan.columns import Columns
from penstock.plan.values import kind_of

_SCALARS = (Number, np.bool_, np.datetime64, np.timedelta64)
PAD_FIELD = "__pad__"  # set in a sample that is repeated so that all ranks have the same number of samples


Stack = Callable[[list[Any]], Any]  # joins arrays of the same shape


def collate(samples: Sequence[Any], stack: Stack = np.stack) -> Any:
    """Join samples into columns: dicts into a dict, tuples into a tuple, anything else into one column.

    Raises:
        DataError: The samples differ in type, in fields or in length.
    """
    return samples.collate() if isinstance(samples, Columns) else _collate(samples, partial(column, stack=stack))


def _collate(samples: Sequence[Any], join: Any) -> Any:
    first = samples[0]
    if isinstance(first, dict):
        if any(not isinstance(sample, dict) for sample in samples):
            raise DataError("the samples of a batch differ in type: some are dicts and others are not")
        if PAD_FIELD in samples[-1]:  # padding comes last; the samples before it lack the field
            samples = [{**sample, PAD_FIELD: sample.get(PAD_FIELD, False)} for sample in samples]
            first = samples[0]
        for sample in samples:
            if sample.keys() != first.keys():
                differing = sorted(set(map(str, sample.keys() ^ first.keys())))
                raise DataError(
                    f"the samples of a batch differ in fields: {', '.join(differing)}; "
                    "select() the common ones, or pass collate=",
                    None,
                    _sample_key(sample),
                )
        return {name: join([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple):
        if any(len(sample) != len(first) for sample in samples):
            raise DataError("the tuples of a batch differ in length")
        return tuple(join(list(values)) for values in zip(*samples, strict=True))
    return join(list(samples))


def _sample_key(sample: dict[str, Any]) -> str | None:
    key = sample.get("__key__")
    return key if isinstance(key, str) else None


def column(values: list[Any], stack: Stack = np.stack) -> Any:
    """Join the values of one field: numbers into an array, arrays or tensors of the same shape stacked, else a list."""
    first = values[0]
    if all(isinstance(value, _SCALARS) for value in values):
        return _numbers(values)
    if isinstance(first, np.ndarray):
        same = all(isinstance(value, np.ndarray) and value.shape == first.shape for value in values)
        return stack(values) if same and first.dtype != object else values
    if is_tensor(first) and all(is_tensor(value) and value.shape == first.shape for value in values):
        return sys.modules["torch"].stack(values)
    return values


def _numbers(values: list[Any]) -> Any:
    array = np.array(values)
    if array.dtype.char in "dQ" and all(isinstance(value, Integral) for value in values):
        with suppress(OverflowError):  # numpy makes floats of integers that have no common type
            return np.array(values, np.uint64)
        return np.array(values, object)
    return array


def is_tensor(value: Any) -> bool:
    """Return whether ``value`` is a torch tensor, without importing torch."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)  # it has none while another thread imports it
    return kind is not None and isinstance(value, kind)


def uncollate(batch: Any) -> list[Any]:
    """Split a batch of columns into its samples; the inverse of ``collate``.

    Raises:
        DataError: The columns differ in length, or one has no value per sample.
    """
    if isinstance(batch, dict):
        parts, names = list(batch.values()), list(batch)
        return [dict(zip(names, row, strict=True)) for row in _row_tuples(parts, names)]
    if isinstance(batch, tuple):
        return _row_tuples(list(batch), [str(i) for i in range(len(batch))])
    if isinstance(batch, str | bytes | Mapping) or not hasattr(batch, "__iter__"):
        raise DataError(f"a batch is a dict or tuple of columns, or a list, not {kind_of(batch)}")
    return list(batch)


def _row_tuples(parts: list[Any], names: list[str]) -> list[tuple[Any, ...]]:
    parts = [part.to_pylist() if hasattr(part, "to_pylist") else part for part in parts]  # of Arrow
    lengths = {name: _row_count(name, part) for name, part in zip(names, parts, strict=True)}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the columns of a batch differ in length: {lengths}")
    return list(zip(*parts, strict=True))


def _row_count(name: str, part: Any) -> int:
    if not isinstance(part, str | bytes | Mapping | Set) and getattr(part, "ndim", None) != 0:
        with suppress(TypeError):
            return len(part)
    raise DataError(f"column {name!r} is {kind_of(part)}, without a value for each sample")


@dataclass(frozen=True, slots=True)
class Pad:
    """A collate function that pads the arrays and lists of numbers in a column to the largest shape among them.

    A column of dicts, such as decoded audio, becomes a dict of padded columns.
    """

    value: float = 0

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collate ``samples`` with padding."""
        return _collate(samples, self._column)

    def _column(self, values: list[Any]) -> Any:
        if all(isinstance(value, dict) and value and value.keys() == values[0].keys() for value in values):
            return {name: self._column([value[name] for value in values]) for name in values[0]}
        if is_tensor(values[0]):
            torch = sys.modules["torch"]
            return torch.from_numpy(self._column([value.detach().cpu().numpy() for value in values]))
        arrays = [_numbers(value) if _is_number_list(value) else value for value in values]
        if not all(isinstance(a, np.ndarray) and a.ndim == np.ndim(arrays[0]) and a.ndim for a in arrays):
            return column(values)
        shape = np.max([a.shape for a in arrays], axis=0)
        dtype = np.result_type(*arrays)
        if dtype.kind == "f" and all(a.dtype.kind in "iu" for a in arrays):
            dtype = _numbers([self.value, *(number for a in arrays for number in a.flat)]).dtype
        out = np.full((len(arrays), *shape), self.value, dtype)
        for row, array in zip(out, arrays, strict=True):
            row[tuple(slice(0, side) for side in array.shape)] = array
        return out


def _is_number_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Number) for v in value)


def pad(value: float = 0) -> Pad:
    """Return a collate function for ``batched(n, collate=ps.pad())`` that pads with ``value`` to the largest shape."""
    return Pad(value)
