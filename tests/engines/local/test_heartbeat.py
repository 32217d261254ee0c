from __future__ import annotations

import mmap
import time

import pytest

from penstock.engines.local.heartbeat import HEARTBEAT_BYTES, Heartbeat


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a heartbeat sees, as the only item of a list."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_heartbeat_records_the_current_item_and_its_time(clock: list[float]) -> None:
    heartbeat = Heartbeat()
    assert heartbeat.read() is None
    heartbeat.begin(2, 17)
    clock[0] += 3
    assert heartbeat.read() == (2, 17, 3.0)


def test_the_time_starts_again_with_a_new_item(clock: list[float]) -> None:
    heartbeat = Heartbeat()
    heartbeat.begin(0, 1)
    clock[0] += 3
    heartbeat.begin(0, 2)
    clock[0] += 1
    assert heartbeat.read() == (0, 2, 1.0)


def test_a_cleared_heartbeat_records_nothing() -> None:
    heartbeat = Heartbeat()
    heartbeat.begin(0, 0)
    assert heartbeat.read() is not None
    heartbeat.clear()
    assert heartbeat.read() is None


def test_a_heartbeat_in_shared_memory_is_read_through_another() -> None:
    with mmap.mmap(-1, HEARTBEAT_BYTES) as memory:
        writer, reader = Heartbeat(memory), Heartbeat(memory)
        writer.begin(1, 5)
        read = reader.read()
        assert read is not None
        assert read[:2] == (1, 5)
