"""A live table of a run in the terminal: which segments are busy, which wait, and the bottleneck.

The report never makes a run fail: it has its own thread and console, and its failures are only logged.
Without a terminal, the plain table is written once, when the run is over.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from penstock.engines.meter import Meters
from penstock.engines.stats import SegmentStats, Stats, number, short_name, snapshot
from penstock.errors import import_extra

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

log = logging.getLogger(__name__)

REFRESH_S = 0.25
TABLE_JOIN_TIMEOUT_S = 2.0  # the thread may be stuck in a terminal that accepts no more output
BAR_WIDTH = 23  # as wide as the legend above it
COLOURS = ("green", "yellow", "red")  # busy, starved, blocked
SHADES, ASCII_SHADES = "█▒░", "#=-"  # distinguishable without colours too; the second for terminals without Unicode


class Report:
    """Shows a table of a run while it runs, and leaves the last table on the screen."""

    def __init__(self, meters: Meters, *, console: Console | None = None) -> None:
        """Prepare a report; nothing is shown before ``start``.

        Args:
            meters: The meters of the run.
            console: Where to show it; standard error by default.

        Raises:
            MissingExtra: The package rich is not installed.
        """
        rich = import_extra("rich.console", "report=True", "report")
        self._meters = meters
        self._console: Console = console or rich.Console(stderr=True)
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._stopped = threading.Lock()  # acquired once, by the first call of ``stop``

    def start(self) -> None:
        """Start showing the table if the console is a terminal; a second call does nothing."""
        if self._thread is not None:
            return
        try:
            if self._console.is_terminal:
                self._live = self._begin()
        except Exception:
            log.warning("the report cannot be shown", exc_info=True)
        self._thread = threading.Thread(target=self._refresh, name="penstock report", daemon=True)
        if self._live is not None:
            self._thread.start()

    def stop(self) -> None:
        """Show the table for the last time; a second call does nothing."""
        if self._thread is None or not self._stopped.acquire(blocking=False):
            return
        self._stop.set()
        # The garbage collector may close a forgotten run in any thread, even in this report's own.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(TABLE_JOIN_TIMEOUT_S)
        try:
            self._finish()
        except Exception:
            log.warning("the last table of the report cannot be shown", exc_info=True)

    def _begin(self) -> Live:
        from rich.live import Live

        live = Live(console=self._console, auto_refresh=False)
        live.start()
        return live

    def _refresh(self) -> None:
        try:
            while not self._stop.wait(REFRESH_S):
                self._show()
        except Exception:
            log.warning("the report cannot be refreshed any longer", exc_info=True)

    def _show(self) -> None:
        assert self._live is not None
        self._live.update(table(snapshot(self._meters), shades_for(self._console.encoding)), refresh=True)

    def _finish(self) -> None:
        if self._live is None:
            self._console.file.write(f"{snapshot(self._meters)}\n")
            self._console.file.flush()
            return
        try:
            self._show()
        finally:
            self._live.stop()


def table(stats: Stats, shades: str = SHADES) -> Group:
    """Return the table as rich renders it: a line for each segment, then the bottleneck."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    faulty = any(segment.faults for segment in stats.segments)
    grid = Table(title=Text(stats.summary), title_justify="left", box=None, padding=(0, 1, 0, 0))
    # Columns with ``no_wrap`` keep their width in a narrow terminal. The name's column may shrink: the text is cut.
    grid.add_column("segment", min_width=8)
    grid.add_column("on", no_wrap=True)
    for heading in ("workers", "samples/s", "MB/s"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column(_legend(shades), no_wrap=True)
    grid.add_column("queue", justify="right", no_wrap=True)
    if faulty:
        grid.add_column("faults", style="red", overflow="fold")
    for segment in stats.segments:
        name = Text(short_name(segment.name), no_wrap=True, overflow="ellipsis")
        rates = (number(segment.samples_per_s), number(segment.mb_per_s))
        before = map(Text, (segment.on, f"{segment.workers}", *rates))
        after = (f"{segment.queue_fill}", segment.faults)
        grid.add_row(name, *before, bar(segment, shades), *map(Text, after[: 1 + faulty]))
    return Group(grid, Text(stats.bottleneck, style="bold"))


def _legend(shades: str) -> Text:
    from rich.text import Text

    entries = zip(shades, ("busy", "starved", "blocked"), COLOURS, strict=True)
    return Text(" ").join(Text(f"{shade}{word}", style=colour) for shade, word, colour in entries)


def bar(segment: SegmentStats, shades: str = SHADES) -> Text:
    """Return how the workers of a segment spend their time, as a bar of three colours."""
    from rich.text import Text

    text, reached = Text(), 0.0
    for shade, share, colour in zip(shades, (segment.busy, segment.starved, segment.blocked), COLOURS, strict=True):
        # The ends are rounded, not the lengths, so that the parts add up to the whole bar.
        length = round(BAR_WIDTH * min(1.0, reached + share)) - round(BAR_WIDTH * min(1.0, reached))
        reached += share
        text.append(shade * length, style=colour)
    return text


def shades_for(encoding: str) -> str:
    """Return the characters of bars on a terminal with this encoding."""
    return SHADES if encoding.lower().startswith("utf") else ASCII_SHADES
