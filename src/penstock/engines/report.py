"""A table of a run, live in the terminal: who is busy, who waits, and what holds it up.

It must never cost a run: it has a thread and a console of its own, and whatever fails in it is logged and forgotten.
Without a terminal there is nothing live, only the plain table once the run is over.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from penstock.engines.meter import Meters
from penstock.engines.stats import SegmentStats, Stats, number, snapshot, spoken
from penstock.errors import MissingExtra

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

log = logging.getLogger(__name__)

REFRESH_S = 0.25
PATIENCE_S = 2.0  # a terminal that takes no more is not waited for
BAR = 23  # as long as what explains it
COLOURS = ("green", "yellow", "red")  # busy, starved, blocked
BLOCKS, LETTERS = "█▒░", "#=-"  # to be told apart without colours too; the second where a terminal knows no others


class Report:
    """Shows a run while it goes on, and leaves its last table behind."""

    def __init__(self, meters: Meters, *, console: Console | None = None) -> None:
        """Make ready to show ``meters``.

        Args:
            meters: Of the run.
            console: Where to; standard error.

        Raises:
            MissingExtra: rich is not installed.
        """
        try:
            from rich.console import Console
        except ImportError:
            raise MissingExtra("report=True", "report") from None
        self._meters = meters
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._stopped = threading.Lock()  # taken once, by whoever stops it

    def start(self) -> None:
        """Begin to show it, where there is a terminal."""
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
        """Show it for the last time and end; a second call does nothing."""
        if self._thread is None or not self._stopped.acquire(blocking=False):
            return
        self._stop.set()
        # The collector may end a forgotten run in any thread, this report's own among them.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(PATIENCE_S)
        try:
            self._finish()
        except Exception:
            log.warning("the report could not be ended", exc_info=True)

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
            log.warning("the report stands still", exc_info=True)

    def _show(self) -> None:
        assert self._live is not None
        self._live.update(table(snapshot(self._meters), glyphs(self._console.encoding)), refresh=True)

    def _finish(self) -> None:
        if self._live is None:
            self._console.file.write(f"{snapshot(self._meters)}\n")
            self._console.file.flush()
            return
        try:
            self._show()
        finally:
            self._live.stop()


def table(stats: Stats, marks: str = BLOCKS) -> Group:
    """The run as rich shows it: a line for each segment, then the sentence."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    faulty = any(segment.faults for segment in stats.segments)
    grid = Table(title=Text(stats.summary), title_justify="left", box=None, padding=(0, 1, 0, 0))
    # What may not wrap keeps its width in a narrow terminal. A name may, so that it is cut, as it does not.
    grid.add_column("segment", min_width=8)
    grid.add_column("on", no_wrap=True)
    for heading in ("workers", "samples/s", "MB/s"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column(_legend(marks), no_wrap=True)
    grid.add_column("queue", justify="right", no_wrap=True)
    if faulty:
        grid.add_column("faults", style="red", overflow="fold")
    for segment in stats.segments:
        name = Text(spoken(segment.name), no_wrap=True, overflow="ellipsis")
        rates = (number(segment.samples_per_s), number(segment.mb_per_s))
        words = map(Text, (segment.on, f"{segment.workers}", *rates))
        rest = (f"{segment.queue_fill}", segment.faults)
        grid.add_row(name, *words, bar(segment, marks), *map(Text, rest[: 1 + faulty]))
    return Group(grid, Text(stats.bottleneck, style="bold"))


def _legend(marks: str) -> Text:
    from rich.text import Text

    words = zip(marks, ("busy", "starved", "blocked"), COLOURS, strict=True)
    return Text(" ").join(Text(f"{mark}{word}", style=colour) for mark, word, colour in words)


def bar(segment: SegmentStats, marks: str = BLOCKS) -> Text:
    """How the time of a segment's workers is spent, as a bar of three colours."""
    from rich.text import Text

    text, reached = Text(), 0.0
    for mark, share, colour in zip(marks, (segment.busy, segment.starved, segment.blocked), COLOURS, strict=True):
        # Rounded where it ends, so that the parts together are as long as they should be.
        many = round(BAR * min(1.0, reached + share)) - round(BAR * min(1.0, reached))
        reached += share
        text.append(mark * many, style=colour)
    return text


def glyphs(encoding: str) -> str:
    """What bars are made of on a terminal with this encoding."""
    return BLOCKS if encoding.lower().startswith("utf") else LETTERS
