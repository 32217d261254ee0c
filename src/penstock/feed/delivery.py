"""The items of one run as a loader delivers them: converted to a format, and recorded in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

from penstock.engines import DeliveryCallback, Start
from penstock.feed.backend import ItemRun
from penstock.feed.batch_format import BatchFormat
from penstock.feed.ledger import LedgerWriter
from penstock.order import I64
from penstock.plan import Skipped

_Rows = list[tuple[I64, int]]  # tables of samples, each with the number of items that they are in


class _ItemProgress(NamedTuple):
    """The progress of a run after an item that was converted ahead of its delivery."""

    start: Start
    skips: int
    rows: _Rows


class Delivery:
    """Delivers the items of a run, and reports the progress after the last one that was delivered.

    A thread may convert items ahead of their delivery: progress and ledger follow what is delivered.

    Attributes:
        run: The run.
    """

    def __init__(
        self,
        start_run: Callable[[DeliveryCallback | None], ItemRun],
        *,
        format: BatchFormat | None = None,
        ledger: LedgerWriter | None = None,
    ) -> None:
        """Start a run of an epoch.

        Args:
            start_run: Starts the run, given what is called with the samples of its items.
            format: What items are converted to.
            ledger: Records the samples of every item.
        """
        self._format, self._ledger = format, ledger
        self.run = start_run(None if ledger is None else self._on_delivered)
        self._converted: Generator[Any, None, None] | None = None
        self._rows: _Rows = []  # of the item that is converted next
        self._progress: list[_ItemProgress] = []  # after the last two delivered items; empty: the run's own progress

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the items.

        Raises:
            PenstockError: A sample failed, or an item cannot be converted, after the items before it.
        """
        return iter(self.run) if self._format is None else self._converted_items(self._format)

    def _converted_items(self, format: BatchFormat) -> Iterator[Any]:
        self._progress = [_ItemProgress(self.run.here(), 0, [])]
        self._converted = format.convert_all(self._items_with_progress())
        for item, progress in self._converted:
            self._progress = [self._progress[-1], progress]
            self._record(progress.rows)
            yield item
        self._progress = []
        self._record(self._rows)  # samples after the last item, which gave no output

    def _items_with_progress(self) -> Iterator[tuple[Any, _ItemProgress]]:
        """Yield every item with the progress after it; called in the thread that converts."""
        for item in self.run:
            self.run.report_delivered()
            rows, self._rows = self._rows, []
            yield item, _ItemProgress(self.run.here(), len(self.run.skips_so_far()), rows)

    def _on_delivered(self, rows: I64, items: int) -> None:
        if self._format is None:
            self._record([(rows, items)])
        else:
            self._rows.append((rows, items))

    def _record(self, tables: _Rows) -> None:
        if self._ledger is not None:
            for rows, items in tables:
                self._ledger.record(rows, items)

    def hold_back(self) -> None:
        """Count the last item as not delivered, although the ledger has it; no other item may be requested."""
        if self._progress:
            self._progress.pop()
        else:
            self.run.report_delivered()
            self.run.hold_back()

    def here(self) -> Start:
        """Return the start of a run that continues after the last delivered item."""
        if self._progress:
            return self._progress[-1].start
        self.run.report_delivered()
        return self.run.here()

    def skips(self) -> list[Skipped]:
        """Return the skipped samples before the last delivered item."""
        skips = self.run.skips_so_far()
        return skips[: self._progress[-1].skips] if self._progress else skips

    def close(self) -> None:
        """Stop the run, and the thread that converts its items."""
        if self._converted is not None:
            self._converted.close()
        self.run.close()
