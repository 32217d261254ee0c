"""A progress bar for long work: on a terminal, or on request; otherwise silent."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 28


class Progress:
    """Shows how far some work is, its rate and what remains; rewrites one line ten times a second."""

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "samples",
        *,
        shown: bool | None = None,
        to: TextIO | None = None,
    ) -> None:
        """Begin.

        Args:
            what: The work, in a word.
            total: How much there is, where that is known.
            unit: What is counted.
            shown: Show it; ``None``: only where the output is a terminal.
            to: Where to; standard error.
        """
        self._to = to or sys.stderr
        self._shown = self._to.isatty() if shown is None else shown
        self._what, self._total, self._unit = what, total, unit
        self._begun = self._last = time.monotonic()
        self.done = 0

    def add(self, many: int = 1) -> None:
        """Note progress."""
        self.done += many
        if self._shown and (now := time.monotonic()) - self._last >= 0.1:
            self._last = now
            self._to.write(f"\r\x1b[2K{self.line(now - self._begun)}")
            self._to.flush()

    def close(self) -> None:
        """End with a line that stays."""
        if self._shown:
            self._to.write(f"\r\x1b[2K{self.line(time.monotonic() - self._begun)}\n")
            self._to.flush()

    def line(self, seconds: float) -> str:
        """The line after so many seconds."""
        rate = self.done / seconds if seconds > 0 else 0.0
        if not self._total:
            return f"{self._what}: {self.done:,} {self._unit}, {rate:,.0f}/s"
        filled = min(WIDTH, WIDTH * self.done // self._total)
        left = (self._total - self.done) / rate if rate else 0.0
        bar = "█" * filled + "░" * (WIDTH - filled)
        return f"{self._what} {bar} {self.done:,}/{self._total:,} {self._unit}, {rate:,.0f}/s, {_clock(left)} left"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
