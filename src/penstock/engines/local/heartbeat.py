"""What a worker is doing, written by it for every item and read by whoever watches it, in any process."""

from __future__ import annotations

import mmap
import struct
import time

SIZE = mmap.PAGESIZE
_FORM = struct.Struct("<qqd")
_NOBODY = -1


class Heartbeat:
    """The stage and the input a worker is at, and since when. Clocks of one machine's processes agree."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = bytearray(_FORM.size) if memory is None else memory
        self.leave()

    def enter(self, stage: int, number: int) -> None:
        """Note that stage ``stage`` of the segment begins with input ``number``."""
        _FORM.pack_into(self._memory, 0, stage, number, time.monotonic())

    def leave(self) -> None:
        """Note that nothing is being done."""
        self.enter(_NOBODY, _NOBODY)

    def read(self) -> tuple[int, int, float] | None:
        """The stage, the input and the seconds it has been at it; ``None``: it is at nothing."""
        stage, number, since = _FORM.unpack_from(self._memory)
        return None if stage == _NOBODY else (stage, number, time.monotonic() - since)
