"""Progress is one line, shown on a terminal or on request."""

from __future__ import annotations

import io

import pytest

from penstock.engines.progress import WIDTH, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the current time, for the test to change."""
    now = [100.0]
    monkeypatch.setattr("penstock.engines.progress.time.monotonic", lambda: now[0])
    return now


def test_without_a_total_the_line_has_count_and_rate() -> None:
    progress = Progress("packing", unit="files", to=io.StringIO())
    progress.add(1500)
    assert progress.line(3.0) == "packing: 1,500 files, 500/s"


def test_with_a_total_the_line_has_a_bar_and_the_time_left() -> None:
    progress = Progress("packing", total=400, to=io.StringIO())
    progress.add(100)
    filled = WIDTH // 4
    bar = "█" * filled + "░" * (WIDTH - filled)
    assert progress.line(10.0) == f"packing {bar} 100/400 samples, 10/s, 0:30 left"


@pytest.mark.parametrize(("left_s", "shown"), [(59, "0:59"), (60, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_the_time_left_is_shown_in_hours_minutes_and_seconds(left_s: int, shown: str) -> None:
    progress = Progress("packing", total=1 + left_s, to=io.StringIO())
    progress.add(1)
    assert progress.line(1.0).endswith(f", {shown} left")


def test_a_line_without_progress_does_not_divide_by_zero() -> None:
    progress = Progress("packing", total=10, to=io.StringIO())
    assert progress.line(0.0).endswith("0/10 samples, 0/s, 0:00 left")


def test_more_than_the_total_does_not_overflow_the_bar() -> None:
    progress = Progress("packing", total=10, to=io.StringIO())
    progress.add(15)
    assert progress.line(1.0).count("█") == WIDTH


def test_nothing_is_written_without_a_terminal() -> None:
    out = io.StringIO()
    with Progress("packing", total=10, to=out) as progress:
        progress.add(10)
    assert out.getvalue() == ""


def test_the_line_is_shown_on_a_terminal_and_on_request() -> None:
    for out, shown in ((Terminal(), None), (io.StringIO(), True)):
        with Progress("packing", total=10, to=out, shown=shown) as progress:
            progress.add(10)
        assert "10/10 samples" in out.getvalue()
        assert out.getvalue().endswith("\n")


def test_the_line_is_rewritten_at_most_ten_times_a_second(clock: list[float]) -> None:
    out = Terminal()
    progress = Progress("packing", to=out)
    for _ in range(100):
        clock[0] += 0.025
        progress.add()
    assert out.getvalue().count("\r") == pytest.approx(25, abs=6)
    assert progress.done == 100
