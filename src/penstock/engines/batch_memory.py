"""Memory for large batches: reused once the arrays of an earlier batch are gone, and pinned if there is CUDA."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict, deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MIN_REUSED_BYTES = 1 << 20  # smaller buffers are as cheap to allocate
_MAX_BUFFERS = 4  # per size: a consumer that drops more batches at once leaves the rest to the allocator


class BatchMemory:
    """Stacks arrays in memory that earlier batches no longer use; not thread-safe, except for the end of a batch."""

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[NDArray[np.uint8]]] = defaultdict(lambda: deque(maxlen=_MAX_BUFFERS))

    def stacked(self, values: list[NDArray[Any]]) -> NDArray[Any]:
        """Stack arrays of the same shape.

        A large result takes the memory of an earlier batch if no array or tensor of that batch exists any more. With
        CUDA it is in pinned memory, which torch reclaims once the copies from it are done.
        """
        first = values[0]
        shape = (len(values), *first.shape)
        if first.nbytes * len(values) < _MIN_REUSED_BYTES or any(value.dtype != first.dtype for value in values):
            return np.stack(values)
        out = _pinned_buffer(shape, first.dtype)
        return np.stack(values, out=self._array(shape, first.dtype) if out is None else out)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialised array whose memory becomes free when the last array that views it is gone."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        free = self._free[nbytes]
        memory = free.popleft() if free else np.empty(nbytes, np.uint8)
        # Every view of ``whole``, and every tensor made of one, refers to it: numpy follows the owners of memory only
        # through arrays, and a memoryview is none.
        whole = np.frombuffer(memory.data, dtype)
        weakref.finalize(whole, free.append, memory).atexit = False
        return whole.reshape(shape)


def _pinned_buffer(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return pinned memory, or ``None`` without CUDA, in a DataLoader worker, or for a dtype that torch lacks."""
    torch = sys.modules.get("torch")
    if torch is None or dtype.kind not in "biuf" or not torch.cuda.is_available():
        return None
    if torch.utils.data.get_worker_info() is not None:  # a DataLoader worker must not initialise the GPU
        return None
    kind = getattr(torch, dtype.name, None)
    return None if kind is None else torch.empty(shape, dtype=kind, pin_memory=True).numpy()
