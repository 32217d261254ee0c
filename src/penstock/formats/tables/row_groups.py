"""Decoded row groups: made side by side in threads, shared by all who read from them, let go of when memory is up."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

Batches = list["pa.RecordBatch"]


class Key(NamedTuple):
    """Some columns of a row group."""

    shard: int
    group: int
    names: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Decoded:
    """A row group that is decoded, or will be."""

    key: Key
    nbytes: int
    future: Future[Batches]
    decode: Callable[[Key], Batches]

    def batches(self) -> Batches:
        """The rows, waiting for them if need be.

        Raises:
            DataError: they cannot be decoded.
            StorageError: they cannot be read.
        """
        try:
            return self.future.result()
        except CancelledError:  # whoever asked for it has ended; somebody else still wants it
            return self.decode(self.key)


class Groups:
    """The row groups at hand.

    Args:
        decode: Decodes one.
        nbytes: Tells about how large one is.
        workers: How many are decoded at a time.
        budget: Bytes that are kept for those who come later.
    """

    def __init__(
        self, decode: Callable[[Key], Batches], nbytes: Callable[[Key], int], workers: int, budget: int
    ) -> None:
        self._decode, self._nbytes, self._workers, self._budget = decode, nbytes, workers, budget
        self._kept: OrderedDict[Key, Decoded] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def want(
        self,
        keys: Sequence[Key],
        ahead: Sequence[Key] = (),
        *,
        passing: bool = False,
        behind: Mapping[int, int] | None = None,
    ) -> list[Decoded]:
        """Have row groups decoded, in this order.

        Args:
            keys: Those that are needed now.
            ahead: Those that will be needed next; begun as far as memory allows.
            passing: Nobody comes back to others than these: they are let go of.
            behind: By shard, the row group before which nobody comes back.
        """
        with self._lock:
            found = [self._begun(key) for key in keys]
            held = sum(one.nbytes for one in found)
            coming = []
            for key in ahead:
                held += self._nbytes(key)
                if held > self._budget:
                    break
                coming.append(self._begun(key))
            staying = {one.key for one in (*found, *coming)}
            for key in [key for key in self._kept if key.group < (behind or {}).get(key.shard, 0)]:
                self._kept.pop(key).future.cancel()
            self._let_go(staying, 0 if passing else self._budget)
            return found

    def _begun(self, key: Key) -> Decoded:
        known = self._kept.get(key)
        if known is None or known.future.cancelled():
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, "penstock parquet")
            known = self._kept[key] = Decoded(
                key, self._nbytes(key), self._pool.submit(self._decode, key), self._decode
            )
        self._kept.move_to_end(key)
        return known

    def _let_go(self, staying: set[Key], budget: int) -> None:
        """Forget those used longest ago until the rest fits."""
        held = sum(one.nbytes for one in self._kept.values())
        for key in list(self._kept):
            if held <= budget:
                return
            if key not in staying:
                gone = self._kept.pop(key)
                gone.future.cancel()
                held -= gone.nbytes

    def rest(self) -> None:
        """End the threads, and keep no more than what was used last."""
        with self._lock:
            pool, self._pool = self._pool, None
            last = next(reversed(self._kept), None)
            self._let_go({last} if last is not None else set(), 0)
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def memory_for_groups() -> int:
    """A quarter of the machine's memory: the row groups of a shuffle's shards should fit, and leave room."""
    try:
        return max(256 << 20, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
    except (ValueError, OSError):
        return 1 << 30
