"""A progress bar for long work: shown on a terminal, in a notebook or on request, silent otherwise."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from penstock.codecs.markup import Markup, tag

WIDTH = 28


class Progress:
    """A line with the progress of some work, its rate and the time remaining, rewritten up to ten times a second."""

    def __init__(
        self,
        title: str,
        total: int | None = None,
        unit: str = "samples",
        *,
        shown: bool | None = None,
        to: TextIO | None = None,
    ) -> None:
        """Start the clock.

        Args:
            title: The name of the work: a word or two.
            total: The amount of work, if it is known.
            unit: What is counted.
            shown: Whether to show the line; None: only if ``to`` is a terminal, or if this is a notebook.
            to: The stream to write to; standard error by default.
        """
        self._to = to or sys.stderr
        self._notebook = _notebook_display() if to is None and shown is not False else None
        self._handle: Any = None  # of the bar in the notebook
        self._shown = self._to.isatty() or self._notebook is not None if shown is None else shown
        self._title, self._total, self._unit = title, total, unit
        self._begun = self._last = time.monotonic()
        self.done = 0

    def add(self, count: int = 1) -> None:
        """Add ``count`` to the work done."""
        self.done += count
        if self._shown and (now := time.monotonic()) - self._last >= 0.1:
            self._last = now
            self._show(now - self._begun, "")

    def close(self) -> None:
        """Write the line for the last time, and end it with a newline."""
        if self._shown:
            self._show(time.monotonic() - self._begun, "\n")

    def _show(self, seconds: float, end: str) -> None:
        if self._notebook is None:
            self._to.write(f"\r\x1b[2K{self.line(seconds)}{end}")
            self._to.flush()
        elif self._handle is None:
            self._handle = self._notebook(self._html(seconds), display_id=True)
        else:
            self._handle.update(self._html(seconds))

    def _html(self, seconds: float) -> Markup:
        """Return the bar as a notebook shows it."""
        text = self.line(seconds)
        if not self._total:
            return tag("div", text)
        bar = tag("progress", value=min(self.done, self._total), max=self._total, style="width:16em")
        facts = text.translate({ord("█"): None, ord("░"): None})
        return tag("div", bar, " ", facts)

    def line(self, seconds: float) -> str:
        """Return the line as it is after ``seconds`` of work."""
        rate = self.done / seconds if seconds > 0 else 0.0
        if not self._total:
            return f"{self._title}: {self.done:,} {self._unit}, {rate:,.0f}/s"
        filled = min(WIDTH, WIDTH * self.done // self._total)
        remaining_s = (self._total - self.done) / rate if rate else 0.0
        bar = "█" * filled + "░" * (WIDTH - filled)
        return (
            f"{self._title} {bar} {self.done:,}/{self._total:,} {self._unit}, {rate:,.0f}/s, {_clock(remaining_s)} left"
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _notebook_display() -> Any:
    """Return the function that displays objects in a notebook; None if this process is not a kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if type(shell).__name__ != "ZMQInteractiveShell":
        return None
    from IPython.display import display

    return display


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
