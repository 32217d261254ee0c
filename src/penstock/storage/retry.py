"""When to try again, how long to wait, and where to go on: the one place that knows."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from penstock.errors import PlanError, StorageError
from penstock.storage.protocol import changed, redacted

_log = logging.getLogger("penstock.storage")
_random = random.SystemRandom()  # the shared generator belongs to the user, and forked children would wait in step
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Retry:
    """How patient a storage is.

    Attributes:
        tries: Failures in a row that end it; those after a good piece of progress are a new row.
        base_s: The wait after the first failure, doubled after each; shortened at random by up to a half.
        most_s: The longest wait, also when a server asks for a longer one.
        stall_s: A connection that says nothing for so long is given up.
        floor: Bytes a second, over ``stall_s`` seconds, below which a connection counts as stalled.
        hedge: Ask a second time when the first byte has not come after so many seconds; the first answer wins.
        connect_s: How long a connection may take.
    """

    tries: int = 6
    base_s: float = 0.2
    most_s: float = 20.0
    stall_s: float = 10.0
    floor: int = 16_384
    hedge: float | None = None
    connect_s: float = 5.0

    def __post_init__(self) -> None:
        if self.tries < 1 or min(self.base_s, self.most_s, self.floor) < 0 or min(self.stall_s, self.connect_s) <= 0:
            raise PlanError(f"{self}: tries from 1, waits and floor from 0, stall_s and connect_s above 0")
        if self.hedge is not None and self.hedge <= 0:
            raise PlanError(f"hedge={self.hedge}: a time above 0, or None")


DEFAULT = Retry()


class Temporary(Exception):
    """Something that may go well the next time; ``after_s`` is what the server asked to wait."""

    def __init__(self, problem: str, after_s: float | None = None) -> None:
        super().__init__(problem, after_s)
        self.problem, self.after_s = problem, after_s


class Body(Protocol):
    """The bytes of an object from some place on, arriving."""

    @property
    def tag(self) -> str | None:
        """Which content it is."""

    @property
    def size(self) -> int | None:
        """Of the whole object, where known."""

    def pieces(self) -> Iterator[bytes]:
        """What arrives, up to the end of what was asked for; ``Temporary`` when it breaks."""

    def prime(self) -> None:
        """Wait for the first piece."""

    def close(self) -> None:
        """Give the connection back, or up."""


_here = threading.local()


@contextmanager
def while_wanted(asked: Callable[[], bool]) -> Iterator[None]:
    """Within it, this thread tries again only while somebody wants what it tries."""
    _here.wanted = asked
    try:
        yield
    finally:
        del _here.wanted


def wanted() -> bool:
    """Whether anybody still wants what this thread does; always, outside of ``while_wanted``."""
    asked: Callable[[], bool] | None = getattr(_here, "wanted", None)
    return asked is None or asked()


class Patience:
    """Counts failures and waits between them."""

    def __init__(self, retry: Retry, url: str) -> None:
        self._retry, self._url = retry, redacted(url)
        self._failures = self._came = 0

    def came(self, size: int) -> None:
        """Take note of progress: what keeps a stalled connection alive also forgives earlier failures."""
        self._came += size
        if self._came >= max(1, self._retry.floor * self._retry.stall_s):
            self._failures = self._came = 0

    def wait(self, trouble: Temporary) -> None:
        """Wait for the next try.

        Raises:
            StorageError: this was the last one, or nobody wants another.
        """
        self._came = 0
        self._failures += 1
        if self._failures >= self._retry.tries or not wanted():
            times = f" ({self._failures} times)" if self._failures > 1 else ""
            raise StorageError(f"{trouble.problem}{times}", self._url) from None
        pause = self._pause(trouble.after_s)
        _log.info("%s: %s; again in %.1f s", self._url, trouble.problem, pause)
        time.sleep(pause)

    def _pause(self, after_s: float | None) -> float:
        retry = self._retry
        pause = min(retry.most_s, retry.base_s * 2.0 ** (self._failures - 1)) * _random.uniform(0.5, 1.0)
        return max(pause, min(after_s or 0.0, retry.most_s))


class StallDetector:
    """Tells a stall from a slow line: only time spent waiting for bytes counts, not the reader's own."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._waited, self._came = 0.0, 0

    def came(self, size: int, waited_s: float) -> None:
        """Take note of bytes and of how long they took.

        Raises:
            Temporary: too few came for too long.
        """
        self._waited += waited_s
        self._came += size
        if self._waited >= self._retry.stall_s:
            if self._came < self._retry.floor * self._waited:
                raise Temporary(f"it stalled: {self._came:,} bytes in {self._waited:.0f} s")
            self._waited, self._came = 0.0, 0


def again(action: Callable[[], _T], url: str, retry: Retry) -> _T:
    """Do something until it goes well; it must be harmless to do twice.

    Raises:
        StorageError: it did not go well often enough, or never will.
    """
    patience = Patience(retry, url)
    while True:
        try:
            return action()
        except Temporary as trouble:
            patience.wait(trouble)


def fetch(
    begin: Callable[[int, int | None, str | None], Body],
    url: str,
    retry: Retry,
    start: int = 0,
    stop: int | None = None,
    tag: str | None = None,
    restart: bool = False,
) -> Iterator[tuple[int, bytes]]:
    """Yield places and the bytes there, going on where a connection broke, and only within the same content.

    Args:
        begin: Asks for the bytes from a place up to another (``None``: the end) of the content with a tag.
        url: For messages.
        retry: How patient to be.
        start: The first byte.
        stop: The byte behind the last one; ``None``: to the end.
        tag: The content to read; ``None``: whatever is there first.
        restart: Whether bytes may come a second time. Where nothing tells contents apart, this is the only way on.

    Raises:
        StorageError: it cannot be read, or changed.
    """
    at, size, patience = start, None, Patience(retry, url)
    while stop is None or at < stop:
        body: Body | None = None
        try:
            body = _first(lambda at=at, stop=stop, tag=tag: begin(at, stop, tag), retry.hedge)  # type: ignore[misc]
            if size is not None and body.size not in (None, size):
                raise changed(url)
            size, tag = size if body.size is None else body.size, tag or body.tag
            stop = size if stop is None else stop
            for piece in body.pieces():
                yield at, piece
                at += len(piece)
                patience.came(len(piece))
            if stop is None:
                return
            if at < stop:
                raise Temporary(f"the answer ended {stop - at:,} bytes early")
        except Temporary as trouble:
            if at > start and tag is None:
                if not restart:
                    raise StorageError(f"{trouble.problem}; without an ETag it cannot go on", redacted(url)) from None
                at = start
            patience.wait(trouble)
        finally:
            if body is not None:
                body.close()


def gather(pieces: Iterator[tuple[int, bytes]], start: int, into: memoryview | None) -> bytes | memoryview:
    """Put fetched pieces together, or where they belong in a buffer."""
    if into is None:
        parts: list[bytes] = []
        for at, piece in pieces:
            if at == start:  # the beginning, or all of it once more
                parts.clear()
            parts.append(piece)
        return b"".join(parts)
    flat = into.cast("B")
    for at, piece in pieces:
        flat[at - start : at - start + len(piece)] = piece
    return into


def _first(begin: Callable[[], Body], hedge: float | None) -> Body:
    """The body whose first byte comes first; another one is asked for when that takes long."""
    if hedge is None:
        return begin()
    race = _Race(begin)
    race.enter()
    try:
        outcome = race.outcomes.get(timeout=hedge)
    except Empty:
        race.enter()
        outcome = race.outcomes.get()
        if isinstance(outcome, BaseException):  # the other one may still do better
            outcome = race.outcomes.get()
    race.end()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


class _Race:
    """Requests for the same thing; all but the winner are closed when they come in."""

    def __init__(self, begin: Callable[[], Body]) -> None:
        self.outcomes: SimpleQueue[Body | BaseException] = SimpleQueue()
        self._begin = begin
        self._lock = threading.Lock()
        self._over = False

    def enter(self) -> None:
        threading.Thread(target=self._run, name="penstock-hedge", daemon=True).start()

    def end(self) -> None:
        with self._lock:
            self._over = True
        while not self.outcomes.empty():
            _close(self.outcomes.get())

    def _run(self) -> None:
        outcome: Body | BaseException
        try:
            outcome = _primed(self._begin())
        except BaseException as error:
            outcome = error
        with self._lock:
            if not self._over:
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
