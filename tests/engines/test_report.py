"""The report shows a run in the terminal and never makes it fail."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable

import pytest
from rich.console import Console
from rich.text import Text

from penstock.engines import report as report_module
from penstock.engines.meter import Meter, Meters
from penstock.engines.report import ASCII_SHADES, BAR_WIDTH, SHADES, Report, bar, shades_for, table
from penstock.engines.stats import snapshot
from penstock.errors import MissingExtra

THREAD_NAME = "penstock report"


class BreakingTerminal(io.StringIO):
    """A terminal that fails after a number of writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.writes = writes

    def write(self, text: str) -> int:
        self.writes -= 1
        if self.writes < 0:
            raise OSError("gone")
        return super().write(text)


@pytest.fixture
def meters() -> Meters:
    segment = Meter("read -> decode('rgb8') -> map([x])", "threads", 2, 2, 2, blocks=50, items=400, nbytes=10**7)
    segment.busy, segment.starved, segment.blocked, segment.pending, segment.deaths = 10.0, 6.0, 4.0, 3, 2
    return Meters([segment], begun=0.0, ended=10.0, items=400, waited=2.0)


def terminal(file: io.StringIO | None = None, width: int = 160) -> Console:
    return Console(file=file or io.StringIO(), force_terminal=True, width=width, color_system="standard")


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def test_a_run_is_shown_while_it_runs(meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "REFRESH_S", 0.01)
    console = terminal()
    report = Report(meters, console=console)
    report.start()
    try:
        assert eventually(lambda: "400 delivered" in output(console))
        meters.items = 555
        assert eventually(lambda: "555 delivered" in output(console))
        assert threads()[0].daemon
    finally:
        report.stop()
    assert not threads()


def test_the_last_table_stays_on_the_screen(meters: Meters) -> None:
    console = terminal()
    report = Report(meters, console=console)
    report.start()
    meters.items = 777  # later than any refresh
    report.stop()
    last = output(console).rpartition("777 delivered")[2]
    assert "decode('rgb8') -> map([x])" in last  # brackets are not taken for markup
    assert all(cell in last for cell in ("threads", "40", "1.0", "3", "deaths 2"))
    assert " ".join(last.split()).count(snapshot(meters).bottleneck) == 1
    assert "\x1b[?25h" in last  # the cursor is visible again


def test_the_bar_shows_the_time_of_the_workers_in_three_colours(meters: Meters) -> None:
    text = bar(snapshot(meters).segments[0])
    half, most = round(0.5 * BAR_WIDTH), round(0.8 * BAR_WIDTH)
    assert text.plain == SHADES[0] * half + SHADES[1] * (most - half) + SHADES[2] * (BAR_WIDTH - most)
    assert [str(span.style) for span in text.spans] == ["green", "yellow", "red"]


@pytest.mark.parametrize("shares", [(1 / 3, 1 / 3, 1 / 3), (0.125, 0.125, 0.75), (0.98, 0.01, 0.01), (1.2, 0.1, 0.1)])
def test_a_full_bar_always_has_the_same_length(meters: Meters, shares: tuple[float, float, float]) -> None:
    segment = meters.segments[0]
    segment.busy, segment.starved, segment.blocked = (20 * share for share in shares)
    assert len(bar(snapshot(meters).segments[0])) == BAR_WIDTH


def test_a_narrow_terminal_cuts_names_but_not_numbers(meters: Meters) -> None:
    meters.segments[0].deaths, meters.segments[0].items = 0, 1234567
    console = terminal(width=80)
    console.print(table(snapshot(meters)))
    lines = Text.from_ansi(output(console)).plain.splitlines()
    assert " ".join(lines[1].split()) == "segment on workers samples/s MB/s █busy ▒starved ░blocked queue"
    assert lines[2].split()[-6:-2] == ["threads", "2", "123,457", "1.0"]
    assert "…" in lines[2]
    assert "faults" not in output(console)


def test_a_terminal_without_unicode_gets_ascii_bars(meters: Meters) -> None:
    assert (shades_for("utf-8"), shades_for("ascii")) == (SHADES, ASCII_SHADES)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict", write_through=True)
    report = Report(meters, console=Console(file=out, force_terminal=True, width=160))
    report.start()
    report.stop()
    out.seek(0)
    assert ASCII_SHADES[0] * 10 in out.read()


def test_without_a_terminal_one_plain_table_is_written_at_the_end(
    meters: Meters, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(meters)
    report.start()
    assert not threads()
    assert capsys.readouterr().err == ""
    report.stop()
    assert capsys.readouterr() == ("", f"{snapshot(meters)}\n")


def test_stopping_twice_shows_the_table_once(meters: Meters, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(meters)
    report.start()
    report.start()
    report.stop()
    report.stop()
    assert capsys.readouterr().err.count("delivered") == 1


def test_a_report_that_was_not_started_shows_nothing(meters: Meters, capsys: pytest.CaptureFixture[str]) -> None:
    Report(meters).stop()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("writes", [0, 1, 3])
def test_a_failing_terminal_does_not_make_the_run_fail(
    meters: Meters, writes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(report_module, "REFRESH_S", 0.01)
    before = sys.stdout, sys.stderr
    report = Report(meters, console=terminal(BreakingTerminal(writes)))
    with caplog.at_level(logging.WARNING):
        report.start()
        assert eventually(lambda: not threads())  # it stops refreshing
        report.stop()
    assert (sys.stdout, sys.stderr) == before
    assert "the report" in caplog.text


def test_a_report_can_be_stopped_by_its_own_thread(meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "REFRESH_S", 0.01)
    console = terminal()
    report = Report(meters, console=console)
    show = report._show

    def show_and_stop() -> None:  # as if the garbage collector closed a forgotten run during a refresh
        show()
        report.stop()

    monkeypatch.setattr(report, "_show", show_and_stop)
    report.start()
    assert eventually(lambda: not threads())
    assert "\x1b[?25h" in output(console)


def test_without_rich_the_error_names_the_extra(meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(MissingExtra, match=r"a package for report=True is not .* 'penstock\[report\]'"):
        Report(meters)
