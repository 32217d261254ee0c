"""Heartbeat: which item a worker is working on, written by the worker for every item and readable by any process."""

from __future__ import annotations

import mmap
import struct
import time

HEARTBEAT_BYTES = mmap.PAGESIZE
_RECORD = struct.Struct("<qqd")  # stage, input, when it began
_IDLE = -1


class Heartbeat:
    """The stage and the input that a worker is working on, and since when.

    In shared memory it can be read by other processes: the monotonic clock is the same for all processes of a machine.
    """

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = bytearray(_RECORD.size) if memory is None else memory
        self.clear()

    def begin(self, stage: int, number: int) -> None:
        """Record that stage ``stage`` of the segment begins with input ``number``."""
        _RECORD.pack_into(self._memory, 0, stage, number, time.monotonic())

    def clear(self) -> None:
        """Record that the worker is idle."""
        self.begin(_IDLE, _IDLE)

    def read(self) -> tuple[int, int, float] | None:
        """Return the stage, the input and the seconds spent on it so far; ``None`` if the worker is idle."""
        stage, number, since = _RECORD.unpack_from(self._memory)
        return None if stage == _IDLE else (stage, number, time.monotonic() - since)
