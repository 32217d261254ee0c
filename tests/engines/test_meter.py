"""Meters know the time of a run, and an observer cannot make the run fail."""

from __future__ import annotations

import logging
import time

import pytest

from penstock.engines.meter import Event, Meter, Meters


def test_the_duration_stops_growing_when_the_run_ends() -> None:
    meters = Meters(begun=time.perf_counter() - 5)
    assert 5 <= meters.seconds < 100
    meters.ended = meters.begun + 7
    assert meters.seconds == 7


def test_the_current_wait_of_the_consumer_counts() -> None:
    meters = Meters(waited=3.0)
    assert meters.waiting() == 3
    meters.waiting_since = time.perf_counter() - 4
    assert 7 <= meters.waiting() < 100


def test_the_observer_gets_every_event_with_its_segment_and_time() -> None:
    events: list[Event] = []
    meters = Meters(begun=time.perf_counter() - 5, observer=events.append)
    meters.notify("begin")
    meters.notify("block", Meter("map(f)", "threads"), worker=3, took=0.5, items=8)
    assert [event.kind for event in events] == ["begin", "block"]
    assert events[0][2:] == (None, None, 0.0, 0, None)
    assert events[1][2:] == ("map(f)", 3, 0.5, 8, None)
    assert 5 <= events[0].seconds <= events[1].seconds < 100


def test_an_observer_that_raises_is_logged_and_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def fail(event: Event) -> None:
        calls.append(event.kind)
        raise ValueError("no more")

    meters = Meters(observer=fail)
    with caplog.at_level(logging.ERROR):
        meters.notify("begin")
        meters.notify("end")
    assert calls == ["begin"]
    assert caplog.text.count("the observer failed") == 1
    assert "no more" in caplog.text
