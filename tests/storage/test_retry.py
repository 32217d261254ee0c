from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import PlanError, StorageError
from penstock.storage.retry import Patience, Retry, StallDetector, Temporary, again, fetch, gather, while_wanted


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
            raise Temporary("it broke", after_s)
        return "done"

    return action


def test_waits_double_up_to_the_longest_and_differ(slept: list[float]) -> None:
    assert again(_failing(5), "a", Retry(base_s=1, most_s=5)) == "done"
    for pause, whole in zip(slept, (1, 2, 4, 5, 5), strict=True):
        assert whole / 2 <= pause <= whole
    first = slept.copy()
    slept.clear()
    again(_failing(5), "a", Retry(base_s=1, most_s=5))
    assert slept != first


def test_after_the_last_try_the_trouble_is_the_error(slept: list[float]) -> None:
    with pytest.raises(StorageError, match=r"it broke \(3 times\)") as caught:
        again(_failing(3), "http://u:p@host/a?b", Retry(tries=3))
    assert caught.value.url == "http://host/a?..."
    assert len(slept) == 2


def test_what_the_server_asks_for_is_waited_but_not_for_ever(slept: list[float]) -> None:
    again(_failing(1, 3.0), "a", Retry(base_s=0.1, most_s=20))
    again(_failing(1, 3600.0), "a", Retry(base_s=0.1, most_s=20))
    assert slept == [3.0, 20.0]


def test_good_progress_starts_a_new_row_of_failures(slept: list[float]) -> None:
    patience = Patience(Retry(tries=2, floor=10, stall_s=10), "a")
    for _ in range(5):
        patience.wait(Temporary("it broke"))
        patience.came(100)
    patience.wait(Temporary("it broke"))
    patience.came(99)
    with pytest.raises(StorageError):
        patience.wait(Temporary("it broke"))


def test_a_stall_is_few_bytes_for_long_and_nothing_else() -> None:
    pace = StallDetector(Retry(stall_s=10, floor=1000))
    for _ in range(30):
        pace.came(1_000, 1.0)
    for _ in range(9):
        pace.came(0, 1.0)
    with pytest.raises(Temporary, match="stalled"):
        pace.came(999, 1.0)


@pytest.mark.parametrize(
    "settings", [{"tries": 0}, {"base_s": -1}, {"stall_s": 0}, {"floor": -1}, {"hedge": 0}, {"connect_s": 0}]
)
def test_settings_without_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        Retry(**settings)


class _Body:
    """Ten bytes from a place on, three at a time, that break after so many pieces."""

    def __init__(self, start: int, breaks: int | None, tag: str | None, size: int | None = 10) -> None:
        self.tag, self.size = tag, size
        self._start, self._breaks = start, breaks
        self.closed = 0

    def pieces(self) -> Iterator[bytes]:
        for number, at in enumerate(range(self._start, 10, 3)):
            if number == self._breaks:
                raise Temporary("it broke")
            yield b"0123456789"[at : at + 3]

    def prime(self) -> None: ...

    def close(self) -> None:
        self.closed += 1


def _bodies(tag: str | None, size: int | None = 10) -> tuple[Any, list[_Body]]:
    made: list[_Body] = []

    def begin(start: int, stop: int | None, tag_asked: str | None) -> _Body:
        made.append(_Body(start, None if len(made) else 2, tag, size))
        return made[-1]

    return begin, made


def test_a_broken_body_goes_on_at_the_byte_where_it_broke(slept: list[float]) -> None:
    begin, made = _bodies("tag")
    assert list(fetch(begin, "a", Retry())) == [(0, b"012"), (3, b"345"), (6, b"678"), (9, b"9")]
    assert [body.closed for body in made] == [1, 1]


def test_without_a_tag_only_a_restart_is_safe(slept: list[float]) -> None:
    begin, _ = _bodies(None)
    assert gather(fetch(begin, "a", Retry(), restart=True), 0, None) == b"0123456789"
    begin, _ = _bodies(None)
    buffer = memoryview(bytearray(10))
    assert gather(fetch(begin, "a", Retry(), restart=True), 0, buffer) == b"0123456789"
    begin, _ = _bodies(None)
    with pytest.raises(StorageError, match="cannot go on"):
        list(fetch(begin, "a", Retry()))


def test_a_body_of_unknown_size_ends_where_it_ends(slept: list[float]) -> None:
    begin, made = _bodies("tag", None)
    made.append(_Body(0, None, "tag"))
    assert gather(fetch(begin, "a", Retry()), 0, None) == b"0123456789"


def test_a_reader_that_stops_closes_the_body() -> None:
    begin, made = _bodies("tag")
    pieces = fetch(begin, "a", Retry())
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert [body.closed for body in made] == [1]


def test_the_loser_of_a_race_is_closed() -> None:
    made: list[_Body] = []

    def begin(start: int, stop: int | None, tag: str | None) -> _Body:
        made.append(_Body(start, None, "tag"))
        body = made[-1]
        if len(made) == 1:
            time.sleep(0.3)
        return body

    assert gather(fetch(begin, "a", Retry(hedge=0.05)), 0, None) == b"0123456789"
    deadline = time.monotonic() + 3
    while len(made) < 2 or not made[0].closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [body.closed for body in made] == [1, 1]


def test_what_nobody_wants_any_more_is_not_tried_again(slept: list[float]) -> None:
    wanted = iter([True, True, False])
    with pytest.raises(StorageError, match=r"it broke \(3 times\)"), while_wanted(lambda: next(wanted)):
        again(_failing(5), "a", Retry(tries=9))
    assert len(slept) == 2
    assert again(_failing(5), "a", Retry(tries=9)) == "done"
