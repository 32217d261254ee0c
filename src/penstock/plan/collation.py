"""How samples become batches and batches samples again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.plan.columns import Columns

_SCALARS = (Number, np.bool_, np.datetime64, np.timedelta64)
PAD = "__pad__"  # marks a sample that is repeated so that ranks are equal


Stack = Callable[[list[Any]], Any]  # joins arrays of one shape


def collate(samples: Sequence[Any], stack: Stack = np.stack) -> Any:
    """Turn samples into columns: dicts into a dict, tuples into a tuple, anything else into one column.

    Raises:
        DataError: the samples do not have the same fields.
    """
    return samples.collate() if isinstance(samples, Columns) else _columns(samples, partial(column, stack=stack))


def _columns(samples: Sequence[Any], join: Any) -> Any:
    first = samples[0]
    if isinstance(first, dict):
        if any(not isinstance(sample, dict) for sample in samples):
            raise DataError("samples of one batch differ in kind: only some of them have fields")
        if PAD in samples[-1]:  # padding comes last; the samples before it have no mark
            samples = [{**sample, PAD: sample.get(PAD, False)} for sample in samples]
            first = samples[0]
        for sample in samples:
            if sample.keys() != first.keys():
                odd = sorted(set(map(str, sample.keys() ^ first.keys())))
                raise DataError(f"samples of one batch differ in fields: {', '.join(odd)}", None, _key(sample))
        return {name: join([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple):
        if any(len(sample) != len(first) for sample in samples):
            raise DataError("tuples of one batch differ in length")
        return tuple(join(list(values)) for values in zip(*samples, strict=True))
    return join(list(samples))


def _key(sample: dict[str, Any]) -> str | None:
    key = sample.get("__key__")
    return key if isinstance(key, str) else None


def column(values: list[Any], stack: Stack = np.stack) -> Any:
    """Join the values of one field: numbers into an array, equal-shaped arrays or tensors stacked, else the list."""
    first = values[0]
    if all(isinstance(value, _SCALARS) for value in values):
        return np.array(values)
    if isinstance(first, np.ndarray):
        same = all(isinstance(value, np.ndarray) and value.shape == first.shape for value in values)
        return stack(values) if same and first.dtype != object else values
    if is_tensor(first) and all(is_tensor(value) and value.shape == first.shape for value in values):
        return sys.modules["torch"].stack(values)
    return values


def is_tensor(value: Any) -> bool:
    """Say whether ``value`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def rows(batch: Any) -> list[Any]:
    """Turn columns back into samples.

    Raises:
        DataError: the columns differ in length.
    """
    if isinstance(batch, dict):
        parts, names = list(batch.values()), list(batch)
        return [dict(zip(names, row, strict=True)) for row in _rows(parts, names)]
    if isinstance(batch, tuple):
        return _rows(list(batch), [str(i) for i in range(len(batch))])
    return list(batch)


def _rows(parts: list[Any], names: list[str]) -> list[tuple[Any, ...]]:
    lengths = {name: len(part) for name, part in zip(names, parts, strict=True)}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the columns of a batch differ in length: {lengths}")
    return list(zip(*parts, strict=True))


@dataclass(frozen=True, slots=True)
class Pad:
    """A collate function that pads: arrays and lists of numbers in a column grow to the largest shape among them."""

    value: float = 0

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collate ``samples``."""
        return _columns(samples, self._column)

    def _column(self, values: list[Any]) -> Any:
        if is_tensor(values[0]):
            torch = sys.modules["torch"]
            return torch.from_numpy(self._column([value.detach().cpu().numpy() for value in values]))
        arrays = [np.asarray(value) if _numbers(value) else value for value in values]
        if not all(isinstance(a, np.ndarray) and a.ndim == np.ndim(arrays[0]) and a.ndim for a in arrays):
            return column(values)
        shape = np.max([a.shape for a in arrays], axis=0)
        out = np.full((len(arrays), *shape), self.value, np.result_type(*arrays))
        for row, array in zip(out, arrays, strict=True):
            row[tuple(slice(0, side) for side in array.shape)] = array
        return out


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Number) for v in value)


def pad(value: float = 0) -> Pad:
    """Make a collate function for ``batched(n, collate=ps.pad())`` that pads to the largest shape with ``value``."""
    return Pad(value)


_LEAST = 1 << 20  # bytes: smaller ones are as cheap from the system
_MOST = 4  # of one shape that are kept: who holds more batches than that gets fresh memory
_UNUSED = 3  # references to a buffer that nobody else holds: the list, the loop, and the question


class BatchMemory:
    """Gives arrays to stack others in; for one thread."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], list[NDArray[Any]]] = {}

    def stacked(self, values: list[NDArray[Any]]) -> NDArray[Any]:
        """Arrays of one shape as one.

        Large ones lie in memory that an earlier batch had, if neither it nor any part of it is in use; where there is
        CUDA, in pinned memory, which torch takes back itself when copies from it are done.
        """
        first = values[0]
        shape = (len(values), *first.shape)
        if first.nbytes * len(values) < _LEAST or any(value.dtype != first.dtype for value in values):
            return np.stack(values)
        out = _pinned(shape, first.dtype)
        return np.stack(values, out=self._free(shape, first.dtype) if out is None else out)

    def _free(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        kept = self._kept.setdefault((shape, dtype), [])
        for buffer in kept:
            if sys.getrefcount(buffer) <= _UNUSED:  # whatever shows a part of it holds it
                return buffer.view()
        made = np.empty(shape, dtype)
        if len(kept) < _MOST:
            kept.append(made)
        return made.view()


def _pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Memory that a GPU can fetch from by itself, if this process is one that may ask for it."""
    torch = sys.modules.get("torch")
    if torch is None or dtype.kind not in "biuf" or not torch.cuda.is_available():
        return None
    if torch.utils.data.get_worker_info() is not None:  # a loader's process has no business with the GPU
        return None
    kind = getattr(torch, dtype.name, None)
    return None if kind is None else torch.empty(shape, dtype=kind, pin_memory=True).numpy()
