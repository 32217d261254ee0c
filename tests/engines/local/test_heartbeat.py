from __future__ import annotations

import mmap
import time

from penstock.engines.local.heartbeat import HEARTBEAT_BYTES, Heartbeat


def test_a_heartbeat_records_the_current_item_and_its_time() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.read() is None
    heartbeat.begin(2, 17)
    time.sleep(0.02)
    read = heartbeat.read()
    assert read is not None
    assert read[:2] == (2, 17)
    assert 0.02 <= read[2] < 1


def test_the_time_starts_again_with_a_new_item() -> None:
    heartbeat = Heartbeat()
    heartbeat.begin(0, 1)
    time.sleep(0.05)
    heartbeat.begin(0, 2)
    read = heartbeat.read()
    assert read is not None
    assert read[1] == 2
    assert read[2] < 0.04


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
