"""The batches that a server has ready for one consumer: made by a thread, bounded in bytes, dropped when idle."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.engines import Pipeline, Served, Start
from penstock.errors import PenstockError
from penstock.serving.answers import Answers
from penstock.serving.batch_codec import encode_message
from penstock.serving.requests import BatchRequest, error_json

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0  # the longest silence of a server that works
END, MOVED = "end", "moved"  # why a stream has no more batches: the epoch has ended, or the consumer has to ask again


@dataclass(slots=True)
class StreamCounts:
    """What was sent to a consumer."""

    batches: int = 0
    nbytes: int = 0
    begun: float = field(default_factory=time.monotonic)


class BatchStream:
    """The batches of one request.

    A thread runs the pipeline and encodes batches. It waits while ``max_bytes`` are ready, but for one batch there is
    always room. The transport takes messages; if it takes none for a long time, ``close_idle`` ends the run, and the
    consumer is told to ask again when it comes back.
    """

    def __init__(self, pipeline: Pipeline, answers: Answers, request: BatchRequest, max_bytes: int, peer: str) -> None:
        """Start the thread.

        Raises:
            PenstockError: The request does not fit the plan.
        """
        self.request, self.peer = request, peer
        self.counts = StreamCounts()
        epoch, start = answers.batch_start(request)
        self._pipeline, self._answers, self._max_bytes = pipeline, answers, max_bytes
        self._changed = threading.Condition()
        self._ready: deque[tuple[Any, int, bool]] = deque()  # a message, its size, and whether it is the last
        self._ready_bytes = 0
        self._taken_at = time.monotonic()
        self._closed: str | None = None
        self._thread = threading.Thread(target=self._fill, args=(epoch, start), name="penstock stream", daemon=True)
        self._thread.start()

    def _fill(self, epoch: int, start: Start) -> None:
        """Run the pipeline and put its batches where the transport takes them."""
        request = self.request
        try:
            batches = self._pipeline.batches(epoch, start, part=request.part, traced=request.traced)
            with closing(batches):
                for served in batches:
                    if not self._put(*self._encode(epoch, served), last=served.ended):
                        return
        except PenstockError as exc:
            if self._closed is None:
                notes = getattr(exc, "__notes__", [])
                self._put(*encode_message({"error": error_json(exc), "notes": notes}), last=True)
        except BaseException as exc:
            if self._closed is None:
                log.exception("a run for a consumer failed")
                self._put(*encode_message({"error": error_json(exc), "notes": []}), last=True)

    def _encode(self, epoch: int, served: Served) -> tuple[Any, int]:
        header: dict[str, Any] = {"after": self._answers.state_json(self.request.cut, epoch, served.after)}
        if self.request.repeated is not None:
            header = {"quota": served.after.quota}
        if served.skips:
            header["skips"] = [[list(skip.place), skip.stage, skip.problem] for skip in served.skips]
        if served.ended:
            header[END] = True
        if served.rows:
            header["items"] = [items for _, items in served.rows]
        return encode_message(header, served.item, [rows for rows, _ in served.rows])

    def _put(self, message: Any, nbytes: int, *, last: bool) -> bool:
        """Add a message when there is room; return whether the consumer wants more."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not self._ready or self._ready_bytes + nbytes <= self._max_bytes
            )
            if self._closed is not None:
                return False
            self._ready.append((message, nbytes, last))
            self._ready_bytes += nbytes
            self._changed.notify_all()
            return True

    def messages(self) -> Iterator[tuple[Any, bytes]]:
        """Yield messages with their metadata: the number of batches that are ready, or that the stream has moved."""
        alive, _ = encode_message({})
        try:
            while True:
                with self._changed:
                    self._taken_at = time.monotonic()
                    self._changed.wait_for(lambda: self._ready or self._closed, HEARTBEAT_S)
                    if self._closed is not None:
                        break
                    message, nbytes, last = self._ready.popleft() if self._ready else (alive, 0, False)
                    self._ready_bytes -= nbytes
                    ready = len(self._ready) if message is not alive else -1
                    self._changed.notify_all()
                if nbytes:
                    self.counts.batches += 1
                    self.counts.nbytes += nbytes
                yield message, str(ready).encode()
                if last:
                    return
                del message
            yield alive, MOVED.encode()
        finally:
            self.close()

    @property
    def ready_bytes(self) -> int:
        """The bytes that are ready for the consumer."""
        return self._ready_bytes

    def close_idle(self, idle_s: float) -> bool:
        """End the run if the consumer has taken nothing for ``idle_s``; return whether it was ended."""
        if self._closed is None and time.monotonic() - self._taken_at > idle_s:
            self.close()
            return True
        return False

    def close(self) -> None:
        """End the run; a consumer that asks for more batches must request a new stream."""
        with self._changed:
            self._closed = self._closed or MOVED
            self._ready.clear()
            self._ready_bytes = 0
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread."""
        with suppress(RuntimeError):
            self._thread.join(timeout_s)
