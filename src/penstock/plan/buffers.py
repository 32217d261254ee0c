"""The memory of batches: taken again as soon as nobody holds the batch that was made in it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST = 1 << 20  # bytes: smaller ones are as cheap from the system
_MOST = 4  # of one shape that are kept: who holds more batches than that gets fresh memory
_UNUSED = 3  # references to a buffer that nobody else holds: the list, the loop, and the question


class Buffers:
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
