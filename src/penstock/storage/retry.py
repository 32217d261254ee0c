"""Retries of requests: how often, after which wait, from which byte on; each storage says what can be retried."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from penstock.errors import PlanError, StorageError
from penstock.plan.values import check_seconds
from penstock.storage.protocol import changed_error, redacted

_log = logging.getLogger("penstock.storage")
# Not the module's shared generator: it belongs to the user, and all forked children would wait for the same times.
_random = random.SystemRandom()
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Retry:
    """How persistent a storage is.

    Attributes:
        tries: Consecutive failures after which an operation fails; enough progress in between resets the count.
        base_s: The wait after the first failure. It doubles with each further one, and is shortened at random by up
            to half.
        most_s: The longest wait, even if the server asks for a longer one.
        stall_s: A connection that delivers nothing for this long is given up.
        floor: Bytes per second, averaged over ``stall_s`` seconds, below which a connection counts as stalled.
        hedge: Send a second request if the first byte has not arrived after this many seconds, and take whichever
            answers first; ``None``: never.
        connect_s: How long connecting may take.

    Raises:
        PlanError: A value is out of range.
    """

    tries: int = 6
    base_s: float = 0.2
    most_s: float = 20.0
    stall_s: float = 10.0
    floor: int = 16_384
    hedge: float | None = None
    connect_s: float = 5.0

    def __post_init__(self) -> None:
        values = (self.tries, self.base_s, self.most_s, self.floor, self.stall_s, self.connect_s)
        numbers = all(isinstance(value, Real) and not isinstance(value, bool) and value >= 0 for value in values)
        if not numbers or self.tries < 1 or min(self.stall_s, self.connect_s) <= 0:
            raise PlanError(
                f"{self}: tries must be at least 1; base_s, most_s and floor at least 0; stall_s and connect_s above 0"
            )
        if self.hedge is not None:
            check_seconds("hedge", self.hedge)


DEFAULT = Retry()


def check_retry(retry: Any) -> None:
    """Check that ``retry`` is a ``Retry``.

    Raises:
        PlanError: It is something else.
    """
    if not isinstance(retry, Retry):
        raise PlanError(f"retry={retry!r}: give penstock.storage.Retry(...)")


class TransientError(Exception):
    """A failure that a retry may overcome; ``retry_after_s`` is the wait that the server asked for."""

    def __init__(self, problem: str, retry_after_s: float | None = None) -> None:
        super().__init__(problem, retry_after_s)
        self.problem, self.retry_after_s = problem, retry_after_s


class Body(Protocol):
    """The bytes of an object from an offset on, as they arrive."""

    @property
    def tag(self) -> str | None:
        """The tag of the object, see ``Info.tag``."""

    @property
    def size(self) -> int | None:
        """The size of the whole object, if known."""

    def pieces(self) -> Iterator[bytes]:
        """Yield bytes as they arrive, up to the end of the requested range.

        Raises:
            TransientError: The connection broke.
        """

    def fill(self, into: memoryview) -> Iterator[memoryview]:
        """Receive the bytes as ``pieces`` does, but straight into a buffer, and yield the parts of it that are filled.

        Raises:
            TransientError: The connection broke.
        """

    def prime(self) -> None:
        """Wait for the first bytes, and buffer them for ``pieces`` or ``fill``."""

    def close(self) -> None:
        """Return the connection to its pool, or close it if part of the response is unread."""


_thread = threading.local()


@contextmanager
def while_wanted(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Within the context, let this thread retry only while ``is_wanted()`` is true."""
    _thread.is_wanted = is_wanted
    try:
        yield
    finally:
        del _thread.is_wanted


def wanted() -> bool:
    """Return whether the result of this thread's work is still needed; true outside of ``while_wanted``."""
    is_wanted: Callable[[], bool] | None = getattr(_thread, "is_wanted", None)
    return is_wanted is None or is_wanted()


class Backoff:
    """Counts the failures of one operation, and waits between its attempts."""

    def __init__(self, retry: Retry, url: str) -> None:
        self._retry, self._url = retry, redacted(url)
        self._failures = self._received_bytes = 0

    def received(self, size: int) -> None:
        """Record progress; as many bytes as a connection needs not to count as stalled reset the failures."""
        self._received_bytes += size
        if self._received_bytes >= max(1, self._retry.floor * self._retry.stall_s):
            self._failures = self._received_bytes = 0

    def wait(self, failure: TransientError) -> None:
        """Wait before the next attempt.

        Raises:
            StorageError: This was the last attempt, or the result is no longer needed.
        """
        self._received_bytes = 0
        self._failures += 1
        if self._failures >= self._retry.tries or not wanted():
            times = f" ({self._failures} times)" if self._failures > 1 else ""
            raise StorageError(f"{failure.problem}{times}", self._url) from None
        pause = self._pause_s(failure.retry_after_s)
        _log.info("%s: %s; retrying in %.1f s", self._url, failure.problem, pause)
        time.sleep(pause)

    def _pause_s(self, retry_after_s: float | None) -> float:
        retry = self._retry
        pause = min(retry.most_s, retry.base_s * 2.0 ** (self._failures - 1)) * _random.uniform(0.5, 1.0)
        return max(pause, min(retry_after_s or 0.0, retry.most_s))


class StallDetector:
    """Detects connections that deliver too little. Only time spent waiting for bytes counts, not the reader's own."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._waited_s, self._received_bytes = 0.0, 0

    def received(self, size: int, waited_s: float) -> None:
        """Record bytes and how long they took to arrive.

        Raises:
            TransientError: The connection has stalled.
        """
        self._waited_s += waited_s
        self._received_bytes += size
        if self._waited_s >= self._retry.stall_s:
            if self._received_bytes < self._retry.floor * self._waited_s:
                raise TransientError(
                    f"the connection stalled: {self._received_bytes:,} bytes in {self._waited_s:.0f} s"
                )
            self._waited_s, self._received_bytes = 0.0, 0


def with_retries(action: Callable[[], _T], url: str, retry: Retry) -> _T:
    """Call ``action`` until it succeeds, and return its result. ``action`` must be idempotent.

    Raises:
        StorageError: The action failed too often, or failed for good.
    """
    backoff = Backoff(retry, url)
    while True:
        try:
            return action()
        except TransientError as failure:
            backoff.wait(failure)


def fetch(
    begin: Callable[[int, int | None, str | None], Body],
    url: str,
    retry: Retry,
    start: int = 0,
    stop: int | None = None,
    tag: str | None = None,
    restart: bool = False,
    into: Callable[[], memoryview] | None = None,
) -> Iterator[tuple[int, bytes | memoryview]]:
    """Yield (offset, bytes), resuming at the byte where a connection broke, and never mixing two contents.

    Args:
        begin: Requests the bytes from an offset up to another (``None``: the end) of the content with a tag.
        url: The object, for messages.
        retry: How persistent to be.
        start: Offset of the first byte.
        stop: Offset after the last byte; ``None``: the end of the object.
        tag: The content to read; ``None``: whatever the first response has.
        restart: Whether the same bytes may be yielded a second time. Without a tag that is the only safe way to
            continue after a break.
        into: Returns the buffer that receives the bytes from ``start`` to ``stop``; called when a response has begun.

    Raises:
        StorageError: The object cannot be read, or changed.
    """
    at, size, backoff = start, None, Backoff(retry, url)
    while stop is None or at < stop:
        body: Body | None = None
        try:
            body = _open_hedged(lambda at=at, stop=stop, tag=tag: begin(at, stop, tag), retry.hedge)  # type: ignore[misc]
            if size is not None and body.size not in (None, size):
                raise changed_error(url)
            size, tag = size if body.size is None else body.size, tag or body.tag
            stop = size if stop is None else stop
            for piece in body.pieces() if into is None else body.fill(into()[at - start :]):
                yield at, piece
                at += len(piece)
                backoff.received(len(piece))
            if stop is None:
                return
            if at < stop:
                raise TransientError(f"the response ended {stop - at:,} bytes early")
        except TransientError as failure:
            if at > start and tag is None:
                if not restart:
                    raise StorageError(
                        f"{failure.problem}; the server sends no ETag, so the read cannot resume", redacted(url)
                    ) from None
                at = start
            backoff.wait(failure)
        finally:
            if body is not None:
                body.close()


def assemble(pieces: Iterator[tuple[int, bytes | memoryview]], start: int) -> bytes:
    """Join the pieces that ``fetch`` yields from ``start`` on."""
    parts: list[bytes | memoryview] = []
    for at, piece in pieces:
        if at == start:  # the first piece, or a restart
            parts.clear()
        parts.append(piece)
    return b"".join(parts)


def _open_hedged(begin: Callable[[], Body], hedge_s: float | None) -> Body:
    """Return the body whose first byte arrives first; a second request starts after ``hedge_s`` seconds."""
    if hedge_s is None:
        return begin()
    request = _HedgedRequest(begin)
    request.start_attempt()
    try:
        outcome = request.outcomes.get(timeout=hedge_s)
    except Empty:
        request.start_attempt()
        outcome = request.outcomes.get()
        if isinstance(outcome, BaseException):  # the other attempt may still succeed
            outcome = request.outcomes.get()
    request.finish()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


class _HedgedRequest:
    """Up to two attempts at one request, each in a thread; the body that is not used is closed when it arrives."""

    def __init__(self, begin: Callable[[], Body]) -> None:
        self.outcomes: SimpleQueue[Body | BaseException] = SimpleQueue()
        self._begin = begin
        self._lock = threading.Lock()
        self._finished = False

    def start_attempt(self) -> None:
        threading.Thread(target=self._attempt, name="penstock-hedge", daemon=True).start()

    def finish(self) -> None:
        with self._lock:
            self._finished = True
        while not self.outcomes.empty():
            _close(self.outcomes.get())

    def _attempt(self) -> None:
        outcome: Body | BaseException
        try:
            outcome = _primed(self._begin())
        except BaseException as error:
            outcome = error
        with self._lock:
            if not self._finished:
                self.outcomes.put(outcome)
                return
        _close(outcome)


def _primed(body: Body) -> Body:
    try:
        body.prime()
    except BaseException:
        body.close()
        raise
    return body


def _close(outcome: Body | BaseException) -> None:
    if not isinstance(outcome, BaseException):
        outcome.close()
