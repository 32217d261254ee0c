"""A remote shard without an index: its samples are located as its bytes arrive."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator

import numpy as np

from penstock.blobs.content import Content
from penstock.blobs.prefetch import PrefetchedBytes
from penstock.blobs.remote_bytes import RemoteBytes, StreamedBytes
from penstock.errors import DataError
from penstock.formats.tar.index import I64, Index
from penstock.formats.tar.located import OpenShard
from penstock.formats.tar.scan import Scan

MAX_UNINDEXED = 1 << 26  # of a shard without an index: one that never ends must not fill the memory with keys


class UnindexedShard:
    """The samples of a shard as far as its headers have arrived; safe to use from several threads.

    Args:
        url: What to call the shard in samples and errors.
        content: Its bytes.
        completed: Called with the index, once, when the end of the shard has arrived; returns the index to use.
    """

    def __init__(self, url: str, content: RemoteBytes, completed: Callable[[Index], Index]) -> None:
        self.url, self.content = url, content
        self._completed = completed
        self._scan = Scan(content)
        self._parts: list[OpenShard] = []
        self._first: list[int] = []  # the number of the first sample of each part
        self._known = 0
        self._whole: OpenShard | None = None
        self._located = 0  # the samples before this one were located
        self._lock = threading.Lock()

    @property
    def whole(self) -> OpenShard | None:
        """The shard with its whole index, once its end has arrived."""
        return self._whole

    def grow(self, beyond: int) -> tuple[int, bool]:
        """Wait for samples beyond the first ``beyond``; return how many are known, and whether these are all.

        Raises:
            StorageError: The shard cannot be fetched, or has changed.
            DataError: The shard holds more samples than an index can have.
        """
        with self._lock:
            while self._known <= beyond and self._whole is None:
                self._add_part()
            return self._known, self._whole is not None

    def parts(self, rows: I64) -> Iterator[tuple[OpenShard, I64]]:
        """Yield the parts that hold samples, each with the places in ``rows`` of its samples.

        Raises:
            StorageError: The shard cannot be fetched, or has changed.
            IndexError: The shard has no sample of one of these numbers.
        """
        known, _ = self.grow(int(rows.max()))
        if not (int(rows.min()) >= 0 and int(rows.max()) < known):
            raise IndexError(f"sample {int(rows.max())} of {known} in {self.url}")
        owner = np.searchsorted(np.array(self._first), rows, "right") - 1
        for number in np.unique(owner).tolist():
            yield self._parts[number], np.flatnonzero(owner == number)
        self._located = max(self._located, int(rows.max()) + 1)
        self._pass_over()

    def fields(self) -> tuple[str, ...]:
        """Return the fields of the samples that are known; waits for the first sample."""
        self.grow(0)
        return tuple(dict.fromkeys(name for part in self._parts for kind in part.index.kinds for name in kind))

    def _add_part(self) -> None:
        """Scan what is available, at least one step, and add a part with the samples that were found."""
        more = self._scan.advance()
        while more and self._scan.available:
            more = self._scan.advance()
        found, first = self._scan.samples, self._known
        if found > MAX_UNINDEXED:
            raise DataError(f"it has more than {MAX_UNINDEXED:,} samples: too many for one shard", self.url)
        if found > first:
            self._parts.append(OpenShard(self.url, self._scan.part(first), Content(self.content), base=first))
            self._first.append(first)
            self._known = found
        if not more:
            self._complete()

    def _complete(self) -> None:
        content = self.content
        mapped = content.mapped() if isinstance(content, StreamedBytes) else content
        self._whole = OpenShard(self.url, self._completed(self._scan.index()), Content(mapped, content.problem))
        self._pass_over()

    def _pass_over(self) -> None:
        """Release bytes that were fetched ahead, up to the last sample that was located."""
        if isinstance(self.content, PrefetchedBytes) and self._located:
            if self._whole is not None and self._located >= self._known:
                self.content.pass_over(len(self.content))
                return
            part = self._parts[bisect_right(self._first, self._located - 1) - 1]
            self.content.pass_over(part.index.end(self._located - 1 - part.base))
