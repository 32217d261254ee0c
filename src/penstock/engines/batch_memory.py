"""Memory for large batches: reused once the arrays of an earlier batch are gone, and pinned if there is CUDA.

Where the rows of a batch are known before its arrays are computed, workers compute them there, and nothing is copied.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict, deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MIN_REUSED_BYTES = 1 << 20  # smaller buffers are as cheap to allocate
_MAX_BUFFERS = 4  # per size: a consumer that drops more batches at once leaves the rest to the allocator
_MAX_MISSES = 4  # batches whose rows were computed elsewhere, after which no more memory is offered


class BatchMemory:
    """Stacks arrays in memory that earlier batches no longer use. Threads may take rows while another one stacks."""

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[NDArray[np.uint8]]] = defaultdict(lambda: deque(maxlen=_MAX_BUFFERS))
        self._lock = threading.Lock()
        # By the number of the batch and the field. Only rows in use keep a batch: a stage may replace what it gets.
        self._filling: weakref.WeakValueDictionary[tuple[int, str], NDArray[Any]] = weakref.WeakValueDictionary()
        self._batch_size = 0
        self._misses = 0

    def row(self, number: int, field: str, row: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a row of batch ``number``, whose field has this shape; ``None`` if it is to be computed elsewhere."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if self._misses >= _MAX_MISSES or nbytes < _MIN_REUSED_BYTES:
            return None
        with self._lock:
            self._batch_size = shape[0]
            batch = self._filling.get((number, field))
            if batch is None:
                batch = self._filling[number, field] = self._new(shape, dtype)
        return batch.reshape(shape)[row] if batch.nbytes == nbytes and batch.dtype == dtype else None

    def _filled(self, values: list[NDArray[Any]]) -> NDArray[Any] | None:
        """Return the batch whose first rows the arrays are; ``None`` if they are elsewhere."""
        first = values[0]
        with self._lock:
            similar = {
                key: batch
                for key, batch in self._filling.items()
                if batch.dtype == first.dtype and batch.nbytes == self._batch_size * first.nbytes
            }
            if not similar:
                return None
            addresses = [_address(value) for value in values]
            key = next((key for key, batch in similar.items() if _address(batch) == addresses[0]), next(iter(similar)))
            batch = self._filling.pop(key)  # a batch that is not the one expected is given up, too
            if addresses == [_address(batch) + row * first.nbytes for row in range(len(values))] and all(
                value.flags.c_contiguous and value.dtype == batch.dtype for value in values
            ):
                return batch.reshape(-1)[: len(values) * first.size].reshape(len(values), *first.shape)
            self._misses += 1
            return None

    def _new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the memory of a batch, as the array that each of its views refers to."""
        pinned = _pinned_buffer(shape, dtype)
        return self._array(shape, dtype) if pinned is None else pinned

    def stacked(self, values: list[NDArray[Any]]) -> NDArray[Any]:
        """Stack arrays of the same shape, or return the memory in which they are stacked already.

        A large result takes the memory of an earlier batch if no array or tensor of that batch exists any more. With
        CUDA it is in pinned memory, which torch reclaims once the copies from it are done.
        """
        if (filled := self._filled(values)) is not None:
            return filled
        first = values[0]
        shape = (len(values), *first.shape)
        if first.nbytes * len(values) < _MIN_REUSED_BYTES or any(value.dtype != first.dtype for value in values):
            return np.stack(values)
        with self._lock:
            out = self._new(shape, first.dtype).reshape(shape)
        return np.stack(values, out=out)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialised flat array whose memory becomes free when the last array that views it is gone."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        free = self._free[nbytes]
        memory = free.popleft() if free else np.empty(nbytes, np.uint8)
        # Every view of ``whole``, and every tensor made of one, refers to it: numpy follows the owners of memory only
        # through arrays, and a memoryview is none.
        whole = np.frombuffer(memory.data, dtype)
        weakref.finalize(whole, free.append, memory).atexit = False
        return whole


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


class BlockRows:
    """The rows that the items of one block will take in batches of one size: each is given out once, in order."""

    def __init__(self, memory: BatchMemory, batch_size: int, first: int, count: int) -> None:
        """Describe a block.

        Args:
            memory: Where the batches are.
            batch_size: The rows of a batch.
            first: How many items come before the block.
            count: The items of the block.
        """
        self._memory, self._batch_size, self._first, self._count = memory, batch_size, first, count
        self._taken: dict[str, int] = {}

    def take(self, field: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        taken = self._taken.get(field, 0)
        if taken == self._count:  # the block is processed again, or an item is
            return None
        self._taken[field] = taken + 1
        number, row = divmod(self._first + taken, self._batch_size)
        out: NDArray[Any] | None = self._memory.row(number, field, row, (self._batch_size, *shape), dtype)
        return out


def _pinned_buffer(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return pinned memory, or ``None`` without CUDA, in a DataLoader worker, or for a dtype that torch lacks."""
    torch = sys.modules.get("torch")
    if torch is None or dtype.kind not in "biuf" or not torch.cuda.is_available():
        return None
    if torch.utils.data.get_worker_info() is not None:  # a DataLoader worker must not initialise the GPU
        return None
    kind = getattr(torch, dtype.name, None)
    return None if kind is None else torch.empty(shape, dtype=kind, pin_memory=True).numpy()
