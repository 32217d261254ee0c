from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import PlanError, StorageError
from penstock.storage.retry import (
    Backoff,
    Retry,
    StallDetector,
    TransientError,
    assemble,
    fetch,
    while_wanted,
    with_retries,
)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def _failing(times: int, after_s: float | None = None) -> Any:
    left = [times]

    def action() -> str:
        if left[0]:
            left[0] -= 1
            raise TransientError("it broke", after_s)
        return "done"

    return action


def test_waits_double_up_to_the_longest_with_jitter(slept: list[float]) -> None:
    assert with_retries(_failing(5), "a", Retry(base_s=1, most_s=5)) == "done"
    for pause, longest in zip(slept, (1, 2, 4, 5, 5), strict=True):
        assert longest / 2 <= pause <= longest
    first = slept.copy()
    slept.clear()
    with_retries(_failing(5), "a", Retry(base_s=1, most_s=5))
    assert slept != first


def test_after_the_last_try_the_error_has_the_problem(slept: list[float]) -> None:
    with pytest.raises(StorageError, match=r"it broke \(3 times\)") as caught:
        with_retries(_failing(3), "http://u:p@host/a?b", Retry(tries=3))
    assert caught.value.url == "http://host/a?..."
    assert len(slept) == 2


def test_the_wait_that_a_server_asks_for_is_bounded(slept: list[float]) -> None:
    with_retries(_failing(1, 3.0), "a", Retry(base_s=0.1, most_s=20))
    with_retries(_failing(1, 3600.0), "a", Retry(base_s=0.1, most_s=20))
    assert slept == [3.0, 20.0]


def test_enough_progress_resets_the_failures(slept: list[float]) -> None:
    backoff = Backoff(Retry(tries=2, floor=10, stall_s=10), "a")
    for _ in range(5):
        backoff.wait(TransientError("it broke"))
        backoff.received(100)
    backoff.wait(TransientError("it broke"))
    backoff.received(99)
    with pytest.raises(StorageError):
        backoff.wait(TransientError("it broke"))


def test_a_stall_is_a_low_rate_for_a_long_time() -> None:
    detector = StallDetector(Retry(stall_s=10, floor=1000))
    for _ in range(30):
        detector.received(1_000, 1.0)
    for _ in range(9):
        detector.received(0, 1.0)
    with pytest.raises(TransientError, match="stalled"):
        detector.received(999, 1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"tries": 0},
        {"tries": "3"},
        {"base_s": -1},
        {"base_s": float("nan")},
        {"stall_s": 0},
        {"floor": -1},
        {"hedge": 0},
        {"hedge": True},
        {"connect_s": 0},
        {"connect_s": None},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        Retry(**settings)


class _Body:
    """The bytes of a ten-byte object from an offset on, three at a time; breaks after ``breaks`` pieces."""

    def __init__(self, start: int, breaks: int | None, tag: str | None, size: int | None = 10) -> None:
        self.tag, self.size = tag, size
        self._start, self._breaks = start, breaks
        self.closed = 0

    def pieces(self) -> Iterator[bytes]:
        for number, offset in enumerate(range(self._start, 10, 3)):
            if number == self._breaks:
                raise TransientError("it broke")
            yield b"0123456789"[offset : offset + 3]

    def fill(self, into: memoryview) -> Iterator[memoryview]:
        at = 0
        for piece in self.pieces():
            into[at : at + len(piece)] = piece
            yield into[at : at + len(piece)]
            at += len(piece)

    def prime(self) -> None: ...

    def close(self) -> None:
        self.closed += 1


def _bodies(tag: str | None, size: int | None = 10) -> tuple[Any, list[_Body]]:
    """Return a function that opens bodies, of which the first breaks, and the list of those it opened."""
    opened: list[_Body] = []

    def begin(start: int, stop: int | None, requested_tag: str | None) -> _Body:
        opened.append(_Body(start, None if opened else 2, tag, size))
        return opened[-1]

    return begin, opened


def test_a_broken_body_that_fills_a_buffer_resumes_at_the_byte_where_it_broke(slept: list[float]) -> None:
    begin, opened = _bodies("tag")
    buffer = bytearray(8)
    asked: list[int] = []  # how many responses had begun

    def into() -> memoryview:
        asked.append(len(opened))
        return memoryview(buffer)

    assert sum(len(piece) for _, piece in fetch(begin, "a", Retry(), 2, 10, into=into)) == 8
    assert (bytes(buffer), asked) == (b"23456789", [1, 2])
    assert [body.closed for body in opened] == [1, 1]


def test_a_broken_body_resumes_at_the_byte_where_it_broke(slept: list[float]) -> None:
    begin, opened = _bodies("tag")
    assert list(fetch(begin, "a", Retry())) == [(0, b"012"), (3, b"345"), (6, b"678"), (9, b"9")]
    assert [body.closed for body in opened] == [1, 1]


def test_without_a_tag_only_a_restart_is_safe(slept: list[float]) -> None:
    begin, _ = _bodies(None)
    assert assemble(fetch(begin, "a", Retry(), restart=True), 0) == b"0123456789"
    begin, _ = _bodies(None)
    buffer = memoryview(bytearray(10))
    list(fetch(begin, "a", Retry(), 0, 10, restart=True, into=lambda: buffer))
    assert bytes(buffer) == b"0123456789"
    begin, _ = _bodies(None)
    with pytest.raises(StorageError, match="cannot resume"):
        list(fetch(begin, "a", Retry()))


def test_a_body_of_unknown_size_is_read_to_its_end(slept: list[float]) -> None:
    begin, opened = _bodies("tag", None)
    opened.append(_Body(0, None, "tag"))
    assert assemble(fetch(begin, "a", Retry()), 0) == b"0123456789"


def test_a_closed_reader_closes_the_body() -> None:
    begin, opened = _bodies("tag")
    pieces = fetch(begin, "a", Retry())
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert [body.closed for body in opened] == [1]


def test_the_slower_of_two_hedged_requests_is_closed() -> None:
    opened: list[_Body] = []
    overtaken = threading.Event()

    def begin(start: int, stop: int | None, tag: str | None) -> _Body:
        opened.append(_Body(start, None, "tag"))
        body = opened[-1]
        if len(opened) == 1:
            assert overtaken.wait(60)
            time.sleep(0.3)
        else:
            overtaken.set()
        return body

    assert assemble(fetch(begin, "a", Retry(hedge=0.05)), 0) == b"0123456789"
    deadline = time.monotonic() + 60
    while len(opened) < 2 or not opened[0].closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [body.closed for body in opened] == [1, 1]


def test_a_request_that_is_no_longer_wanted_is_not_retried(slept: list[float]) -> None:
    answers = iter([True, True, False])
    with pytest.raises(StorageError, match=r"it broke \(3 times\)"), while_wanted(lambda: next(answers)):
        with_retries(_failing(5), "a", Retry(tries=9))
    assert len(slept) == 2
    assert with_retries(_failing(5), "a", Retry(tries=9)) == "done"
