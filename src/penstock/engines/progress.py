"""A progress bar for long work: shown on a terminal or on request, silent otherwise."""

from __future__ import annotations

import sys
import time
from typing import TextIO

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
            shown: Whether to show the line; None: only if ``to`` is a terminal.
            to: The stream to write to; standard error by default.
        """
        self._to = to or sys.stderr
        self._shown = self._to.isatty() if shown is None else shown
        self._title, self._total, self._unit = title, total, unit
        self._begun = self._last = time.monotonic()
        self.done = 0

    def add(self, count: int = 1) -> None:
        """Add ``count`` to the work done."""
        self.done += count
        if self._shown and (now := time.monotonic()) - self._last >= 0.1:
            self._last = now
            self._to.write(f"\r\x1b[2K{self.line(now - self._begun)}")
            self._to.flush()

    def close(self) -> None:
        """Write the line for the last time, and end it with a newline."""
        if self._shown:
            self._to.write(f"\r\x1b[2K{self.line(time.monotonic() - self._begun)}\n")
            self._to.flush()

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


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
